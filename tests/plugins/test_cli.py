"""The command line: light to import, lazy, with clean errors; plugins seen from outside through a real process."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tokenspeed import __version__
from tokenspeed.cli.commands import COMMANDS, NUMERICS_COMMANDS
from tokenspeed.cli.doctor import environment
from tokenspeed.cli.main import cli
from tokenspeed.config import OPTIONS, SWITCH_OPTIONS

LIGHT = """
import sys
from tokenspeed.cli.main import cli
cli({args!r}, standalone_mode=False)
sys.exit("torch" in sys.modules)
"""

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 320,
}

COMMAND = """
import click

@click.command()
def hello():
    \"\"\"Say hello.\"\"\"
    click.echo("hello from a plugin")

@hookimpl
def tokenspeed_commands():
    return [hello]
"""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("TOKENSPEED_")]:
        monkeypatch.delenv(name)


def run(*args: str, **environ: str) -> Result:
    return CliRunner().invoke(cli, args, prog_name="tokenspeed", env=environ)


@pytest.mark.parametrize(
    "args",
    [
        ["--version"],
        ["--help"],
        ["plugins"],
        ["plugins", "--json"],
        ["kernels"],
        ["kernels", "--json"],
        ["explain", "--help"],
        ["numerics", "--help"],
        ["numerics", "explain", "--numerics", "rl-bitwise"],
    ],
)
def test_these_commands_import_no_torch(folder: Any, args: list[str]) -> None:
    result = folder.run("-c", LIGHT.format(args=args))
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_the_version() -> None:
    assert run("--version").output == f"tokenspeed {__version__}\n"


def test_help_lists_every_command_without_importing_any(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenspeed.cli import lazy as module

    importer = SimpleNamespace(import_module=lambda name: pytest.fail(f"{name} was imported"))
    monkeypatch.setattr(module, "importlib", importer)
    output = run("--help", TOKENSPEED_PLUGINS="none").output
    for name, lazy in COMMANDS.items():
        assert f"  {name} " in output
        assert lazy.summary in output


def test_summaries_of_the_tables_are_one_sentence() -> None:
    for lazy in (*COMMANDS.values(), *NUMERICS_COMMANDS.values()):
        assert lazy.summary.endswith(".")


def test_a_misspelt_command_or_option_is_refused_with_the_nearest() -> None:
    result = run("kernls")
    assert result.exit_code == 2
    assert "no such command 'kernls'; did you mean kernels?" in result.output
    result = run("explain", "--numerix", "auto")
    assert result.exit_code == 2
    assert "--numerics" in result.output


def test_a_plugin_brings_a_command(folder: Any) -> None:
    folder.install("hello-plugin", COMMAND)
    assert run("hello").output == "hello from a plugin\n"
    output = run("--help").output
    assert "Commands from plugins" in output
    assert "Say hello." in output
    assert run("hello", TOKENSPEED_PLUGINS="none").exit_code == 2


def test_plugins_shows_a_plugin_that_cannot_be_imported(folder: Any) -> None:
    folder.install("bad-plugin", "raise ImportError('libacme.so.1: cannot open shared object file')")
    result = run("plugins")
    assert result.exit_code == 0
    assert "bad-plugin: ImportError: libacme.so.1: cannot open shared object file" in result.output
    reports = {report["name"]: report for report in json.loads(run("plugins", "--json").output)}
    assert reports["bad-plugin"]["status"] == "broken"
    assert reports["bad-plugin"]["version"] == "1.2.3"
    assert reports["tokenspeed-reference"]["status"] == "ok"
    assert run("plugins", "--plugins", "bad-plgin").output.startswith(
        "tokenspeed: --plugins: bad-plgin is not installed"
    )


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", [["kernels"], ["kernels", "attention.paged"], ["plugins"]])
def test_lists_fit_a_terminal_and_lose_nothing(
    command: list[str], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenspeed.cli.output.PLAIN_WIDTH", columns)
    output = run(*command).output
    assert max(map(len, output.splitlines()[:-1])) <= columns
    whole = "".join(output.split())
    for name in ("aok.attention.paged", "batch_invariant") if command[0] == "kernels" else ("tokenspeed-models",):
        assert name in whole


def test_kernels_lists_one_operator() -> None:
    specs = json.loads(run("kernels", "gemm.linear", "--json").output)
    assert {spec["operator"] for spec in specs} == {"gemm.linear"}
    assert "reference.gemm.linear" in run("kernels", "gemm.linear").output
    assert "'gemm.liner' is not an operator" in run("kernels", "gemm.liner").output


def test_explain_reports_plan_and_refusal(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    plugins = ("--plugins", "tokenspeed-reference,tokenspeed-models")
    result = run("explain", str(tmp_path), "--machine", "cpu-avx2", *plugins)
    assert result.exit_code == 0
    assert "reference.gemm.linear (tokenspeed" in result.output
    result = run("explain", str(tmp_path), "--machine", "sm90", "--numerics", "rl-bitwise", "--json", *plugins)
    assert result.exit_code == 2
    report = json.loads(result.output)
    assert report["machine"]["arch"] == "sm90"
    # Plugins that happen to be installed and are not allowed here are named too.
    assert {"missing-kernel"} <= {p["kind"] for p in report["problems"]} <= {"missing-kernel", "disabled-plugin"}
    assert all(operator["kernel"] is None for operator in report["operators"])


def test_numerics_explain_gives_value_and_reason() -> None:
    report = json.loads(run("numerics", "explain", "--numerics", "rl-bitwise", "--no-tf32", "--json").output)
    assert report["switches"]["logprob_order"] == "megatron"
    assert report["reasons"]["tf32"] == "required by rl-bitwise, also given (--no-tf32); no effect on a CPU"
    result = run("numerics", "explain", "--numerics", "rl-bitwise", TOKENSPEED_ROUTER_TOPK="fused")
    assert result.exit_code == 2
    assert "--router-topk fused was given (environment variable TOKENSPEED_ROUTER_TOPK)" in result.output


def test_a_wrong_option_is_one_clean_line_for_each_fault() -> None:
    result = run("numerics", "explain", "--threads", "many", TOKENSPEED_NUMERIX="1")
    assert result.exit_code == 2
    assert result.output.splitlines() == [
        "tokenspeed: environment variable TOKENSPEED_NUMERIX: no such option; did you mean TOKENSPEED_NUMERICS?",
        "tokenspeed: --threads: expected an integer, got 'many'",
    ]


def test_a_refused_start_is_exit_status_2_with_every_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    import click

    from tokenspeed.errors import Problem, StartRefused

    @click.command()
    def refused() -> None:
        raise StartRefused([Problem("one", "first"), Problem("two", "second", ("detail",), "do this")])

    monkeypatch.setattr(type(cli), "get_command", lambda *_args: refused)
    result = run("serve")
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "tokenspeed: the start is refused (2 problems)",
        "",
        "[one] first",
        "[two] second",
        "    detail",
        "    -> do this",
    ]


def test_the_help_shows_every_option_of_its_groups() -> None:
    output = run("explain", "--help").output
    shown = [option for option in (*OPTIONS.values(), *SWITCH_OPTIONS.values()) if option.group != "Server"]
    for option in shown:
        if option.name != "model" and option.group in ("Model", "Numerics", "Machine"):
            assert option.flag in output
    assert "--port" not in output


def test_doctor_shows_no_secret() -> None:
    shown = dict(
        environment({"TOKENSPEED_API_KEY": "s3cret", "HF_TOKEN": "s3cret", "OMP_NUM_THREADS": "2", "HOME": "/"})
    )
    assert shown == {"HF_TOKEN": "(set)", "OMP_NUM_THREADS": "2", "TOKENSPEED_API_KEY": "(set)"}


def test_doctor_reports_a_kernel_that_cannot_be_imported(folder: Any) -> None:
    folder.install("hollow", "@hookimpl\ndef tokenspeed_kernels(): return [kernel('hollow.linear')]")
    result = run("doctor", "--json")
    assert result.exit_code == 1
    report = json.loads(result.output)
    assert "No module named 'nowhere'" in report["broken kernels"]["hollow.linear"]
    assert report["plugins"]["hollow"] == "hollow 1.2.3: ok"
