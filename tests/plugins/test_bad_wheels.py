"""Bad packages as real wheels, installed with pip into a fresh environment: each gives the right message everywhere.

One environment and one process for all: the commands run there one after another, each with the plugins it is about.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PREAMBLE = """
from tokenspeed import BATCH_INVARIANT, KernelSpec, ModelProfile, Priority, hookimpl, trait_table

def norm(name, target="nowhere:norm", **more):
    signatures = tuple({"x": dtype, "weight": dtype} for dtype in ("float32", "bfloat16"))
    return KernelSpec(name, "norm.rms", "bad", target, signatures, priority=Priority.PLUGIN, **more)
"""

NORM = """
import torch

def honest(x, weight, eps):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight

def by_batch(x, weight, eps):
    out = honest(x, weight, eps)
    return out if len(x) < 5 else out * (1 + 2**-7)
"""

SOURCES: Mapping[str, str] = {
    "bad-import-error": "raise ImportError('libacme.so.1: cannot open shared object file')",
    "bad-missing-dependency": "import acme_runtime\n\n@hookimpl\ndef tokenspeed_kernels(): return [norm('acme.norm')]",
    "bad-api-version": "TOKENSPEED_API = 99\n\n@hookimpl\ndef tokenspeed_kernels(): return [norm('future.norm')]",
    "bad-misspelt-hook": "@hookimpl\ndef tokenspeed_kernls(): return [norm('misspelt.norm')]",
    "bad-same-kernel-a": "@hookimpl\ndef tokenspeed_kernels(): return [norm('same.norm')]",
    "bad-same-kernel-b": "@hookimpl\ndef tokenspeed_kernels(): return [norm('same.norm')]",
    "bad-architecture": """
        @hookimpl
        def tokenspeed_models(): return [ModelProfile("LlamaForCausalLM", "nowhere:Llama")]
    """,
    "bad-missing-function": """
        @hookimpl
        def tokenspeed_kernels(): return [norm("hollow.norm", "bad_norms:missing")]
    """,
    "bad-over-promise": """
        @hookimpl
        def tokenspeed_kernels():
            return [norm("boast.norm", "bad_norms:by_batch", features=frozenset({BATCH_INVARIANT}))]
    """,
    "bad-borrowed-order": """
        @hookimpl
        def tokenspeed_kernels():
            features = frozenset({BATCH_INVARIANT})
            return [norm("borrowed.norm", "bad_norms:honest", features=features, bit_order="aok/norm.rms@1")]
    """,
    "bad-subclass": """
        class Certified(KernelSpec):
            pass

        @hookimpl
        def tokenspeed_kernels():
            return [Certified("sub.norm", "norm.rms", "bad", "bad_norms:honest", ({"x": "float32"},))]
    """,
    "bad-slow-import": """
        import time

        time.sleep(1.2)

        @hookimpl
        def tokenspeed_kernels(): return [norm("slow.norm", "bad_norms:honest")]
    """,
}

OURS = ("tokenspeed-reference", "tokenspeed-kernels-aok", "tokenspeed-models")

DRIVER = """
import json, sys
from click.testing import CliRunner
from tokenspeed.cli.main import cli

done = {}
for name, arguments in json.loads(sys.argv[1]).items():
    result = CliRunner().invoke(cli, arguments, prog_name="tokenspeed")
    done[name] = {"status": result.exit_code, "output": result.output, "stdout": result.stdout}
print("\\n" + json.dumps(done))
"""


@dataclass(frozen=True)
class Outcome:
    status: int
    output: str
    stdout: str


def build_wheel(folder: Path, name: str, source: str) -> Path:
    """A wheel of one module with its entry point, with everything that pip checks."""
    module = name.replace("-", "_")
    info = f"{module}-1.2.3.dist-info"
    files = {
        f"{module}.py": PREAMBLE + textwrap.dedent(source),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2.3\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[tokenspeed]\n{name} = {module}\n",
    }
    if name == "bad-over-promise":
        files["bad_norms.py"] = NORM
    records = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        records.append(f"{path},sha256={digest},{len(text.encode())}")
    files[f"{info}/RECORD"] = "\n".join([*records, f"{info}/RECORD,,", ""])
    wheel = folder / f"{module}-1.2.3-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with all bad packages, beside what is installed here."""
    folder = tmp_path_factory.mktemp("bad")
    wheels = [build_wheel(folder, name, source) for name, source in SOURCES.items()]
    environment = folder / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    found = environment / "bin" / "python"
    site = next((environment / "lib").glob("python*/site-packages"))
    # Ours come from the environment that runs the tests, editable installs included.
    here = [path for path in sys.path if path.endswith("site-packages")]
    (site / "here.pth").write_text("\n".join(f"import site; site.addsitedir({path!r})" for path in here))
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(found),
            "install",
            "-q",
            "--no-index",
            "--no-deps",
            *map(str, wheels),
        ],
        check=True,
        capture_output=True,
    )
    return found


@pytest.fixture(scope="module")
def run(python: Path) -> Mapping[str, Outcome]:
    """Every command of this module, run in one process of that environment."""

    def explain(*bad: str, numerics: str = "auto") -> list[str]:
        return ["explain", "tiny", "--numerics", numerics, "--plugins", ",".join((*OURS, *bad))]

    def serve(*bad: str, numerics: str = "auto") -> list[str]:
        # Only for starts that are refused: another one would serve.
        return ["serve", "tiny", "--port", "0", "--numerics", numerics, "--plugins", ",".join((*OURS, *bad))]

    commands: dict[str, list[str]] = {"plugins": ["plugins"], "plugins --json": ["plugins", "--json"]}
    for name in SOURCES:
        commands[f"explain {name}"] = explain(name)
    commands["explain same kernels"] = explain("bad-same-kernel-a", "bad-same-kernel-b")
    commands["explain without aok"] = [
        "explain", "tiny", "--numerics", "rl-bitwise", "--plugins",
        "tokenspeed-reference,tokenspeed-models,bad-import-error,bad-missing-dependency,bad-api-version,bad-misspelt-hook",
    ]  # fmt: skip
    commands["start missing function"] = serve("bad-missing-function")
    commands["start over-promise"] = serve("bad-over-promise", numerics="rl-bitwise")
    commands["start borrowed order"] = serve("bad-borrowed-order", numerics="rl-bitwise")
    commands["start same kernels"] = serve("bad-same-kernel-a", "bad-same-kernel-b")
    commands["start architecture"] = serve("bad-architecture")
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("TOKENSPEED_", "PYTHON"))}
    done = subprocess.run(
        [str(python), "-c", DRIVER, json.dumps(commands)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        input="",
    )
    assert done.returncode == 0, done.stderr
    outcomes: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {name: Outcome(**outcome) for name, outcome in outcomes.items()}


IN_THE_LIST = {
    "bad-import-error": ("broken", "ImportError: libacme.so.1: cannot open shared object file"),
    "bad-missing-dependency": ("broken", "ModuleNotFoundError: No module named 'acme_runtime'"),
    "bad-api-version": ("broken", "written for version 99 of the plugin hooks"),
    "bad-misspelt-hook": ("broken", "unknown hook tokenspeed_kernls; did you mean tokenspeed_kernels?"),
    "bad-same-kernel-a": ("clash", "kernel same.norm is also claimed by bad-same-kernel-b 1.2.3"),
    "bad-same-kernel-b": ("clash", "kernel same.norm is also claimed by bad-same-kernel-a 1.2.3"),
    "bad-architecture": ("clash", "architecture LlamaForCausalLM is also claimed by tokenspeed-models"),
    "bad-subclass": ("broken", "kernel sub.norm is a Certified; a spec is plain data"),
    "bad-missing-function": ("ok", ""),
    "bad-over-promise": ("ok", ""),
    "bad-borrowed-order": ("ok", ""),
    "bad-slow-import": ("ok", ""),
}


@pytest.mark.parametrize("name", SOURCES)
def test_plugins_lists_it(name: str, run: Mapping[str, Outcome]) -> None:
    reports = {report["name"]: report for report in json.loads(run["plugins --json"].stdout)}
    status, error = IN_THE_LIST[name]
    assert (reports[name]["status"], reports[name]["version"]) == (status, "1.2.3")
    assert error in reports[name]["error"]
    if error:
        assert f"{name}: {reports[name]['error']}" in run["plugins"].output


def test_a_slow_import_is_pointed_out(run: Mapping[str, Outcome]) -> None:
    lines = [line for line in run["plugins"].output.splitlines() if "to load" in line]
    assert len(lines) == 1
    assert lines[0].startswith("plugin bad-slow-import (bad-slow-import 1.2.3) takes ")


@pytest.mark.parametrize(
    "name", ["bad-import-error", "bad-missing-dependency", "bad-api-version", "bad-misspelt-hook", "bad-subclass"]
)
def test_explain_goes_on_without_a_broken_one(name: str, run: Mapping[str, Outcome]) -> None:
    assert run[f"explain {name}"].status == 0
    assert "norm.rms" in run[f"explain {name}"].output


def test_a_refusal_names_the_broken_ones_that_might_have_served(run: Mapping[str, Outcome]) -> None:
    outcome = run["explain without aok"]
    assert outcome.status == 2
    for name in ("bad-import-error", "bad-missing-dependency", "bad-api-version", "bad-misspelt-hook"):
        assert f"plugin {name} ({name} 1.2.3) is broken: {IN_THE_LIST[name][1]}" in outcome.output


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "same kernels",
            "[plugin-clash] kernel same.norm is claimed by bad-same-kernel-a 1.2.3 and by bad-same-kernel-b 1.2.3",
        ),
        (
            "bad-architecture",
            "[plugin-clash] architecture LlamaForCausalLM is claimed by bad-architecture 1.2.3 and by",
        ),
    ],
)
def test_a_clash_is_refused_everywhere(command: str, message: str, run: Mapping[str, Outcome]) -> None:
    for outcome in (run[f"explain {command}"], run[f"start {command.removeprefix('bad-')}"]):
        assert outcome.status == 2
        assert message in outcome.output
        assert "uninstall one of them, or name the plugins to load with --plugins" in outcome.output


@pytest.mark.parametrize("name", ["bad-missing-function", "bad-over-promise", "bad-borrowed-order", "bad-slow-import"])
def test_explain_shows_what_was_promised(name: str, run: Mapping[str, Outcome]) -> None:
    """Selection trusts a spec and says whose it is; a start imports and tries the kernel."""
    assert run[f"explain {name}"].status == 0
    assert f"({name} 1.2.3): accepted, chosen" in run[f"explain {name}"].output


@pytest.mark.parametrize(
    ("command", "messages"),
    [
        (
            "missing function",
            (
                "[broken-kernel] kernel hollow.norm of bad-missing-function 1.2.3 was chosen for norm.rms",
                "module 'bad_norms' has no attribute 'missing'",
            ),
        ),
        (
            "over-promise",
            (
                "[unproved-kernel] kernel boast.norm of bad-over-promise 1.2.3 does not keep what it declares",
                "batch: ",
                "tokenspeed kernels verify --kernel boast.norm",
            ),
        ),
        (
            "borrowed order",
            (
                "[unproved-kernel] kernel borrowed.norm of bad-borrowed-order 1.2.3",
                "claims the order aok/norm.rms@1 of aok.norm.rms of tokenspeed-kernels-aok, and differs",
            ),
        ),
    ],
)
def test_a_start_is_refused(command: str, messages: tuple[str, ...], run: Mapping[str, Outcome]) -> None:
    outcome = run[f"start {command}"]
    assert outcome.status == 2, outcome.output
    for message in messages:
        assert message in outcome.output


HARMLESS = (
    "bad-import-error", "bad-missing-dependency", "bad-api-version", "bad-misspelt-hook", "bad-subclass",
    "bad-slow-import",
)  # fmt: skip


@pytest.fixture(scope="module")
def served(python: Path) -> str:
    """What `serve` says with every plugin that is no reason to refuse, until it listens."""
    command = [
        str(python),
        "-m",
        "tokenspeed",
        "serve",
        "tiny",
        "--port",
        "0",
        "--plugins",
        ",".join((*OURS, *HARMLESS)),
    ]
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("TOKENSPEED_", "PYTHON"))}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("serving on"):
                break
        process.terminate()
        process.stdout.read()
    assert said[-1].startswith("serving on"), "".join(said)
    return " ".join("".join(said).replace("│", " ").split())


@pytest.mark.parametrize("name", HARMLESS)
def test_explain_and_a_start_say_what_is_wrong_with_a_plugin_that_they_do_without(
    name: str, served: str, run: Mapping[str, Outcome]
) -> None:
    status, error = IN_THE_LIST[name]
    note = f"note: plugin {name} ({name} 1.2.3) {'is broken: ' if status == 'broken' else 'takes '}"
    texts = [served]
    if status == "broken":  # what is slow is loaded by now in the process that explains
        texts.append(" ".join(run[f"explain {name}"].output.split()))
    for text in texts:
        assert error in text.partition(note)[2]
        assert note in text
