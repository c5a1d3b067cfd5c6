"""The plugin host: good plugins register, bad ones are reported with their error, and none of them takes it down."""

from __future__ import annotations

from typing import Any

import pytest

from tokenspeed.errors import ConfigError
from tokenspeed.plugins import PluginHost, PluginReport, load_plugins

ONE_KERNEL = """
@hookimpl
def tokenspeed_kernels():
    return [kernel("{name}")]
"""


def report_of(host: PluginHost, name: str) -> PluginReport:
    return next(report for report in host.reports if report.name == name)


def test_a_good_plugin_registers_and_its_specs_are_stamped(folder: Any) -> None:
    folder.install(
        "good-plugin",
        """
        import click
        from tokenspeed.numerics.envelopes import BUILTIN_TRAINERS, TrainerProfile

        TOKENSPEED_API = 1

        @hookimpl
        def tokenspeed_kernels():
            return [kernel("good.linear"), kernel("good.norm", "norm.rms")]

        @hookimpl
        def tokenspeed_models():
            yield ModelProfile("GoodForCausalLM", "nowhere:Good")

        @hookimpl
        def tokenspeed_trainer_profiles():
            return [TrainerProfile("fsdp", "FSDP2", dict(BUILTIN_TRAINERS[1].tight))]

        @hookimpl
        def tokenspeed_commands():
            return [click.Command("good")]
        """,
    )
    host = load_plugins(["good-plugin"])
    report = report_of(host, "good-plugin")
    assert (report.status, report.error, report.distribution, report.version) == ("ok", "", "good-plugin", "1.2.3")
    assert report.kernels == ("good.linear", "good.norm")
    assert report.models == ("GoodForCausalLM",)
    assert report.trainer_profiles == ("fsdp",)
    assert report.commands == ("good",)
    assert {(spec.distribution, spec.version) for spec in host.kernels()} == {("good-plugin", "1.2.3")}
    assert [profile.distribution for profile in host.models()] == ["good-plugin"]
    assert "fsdp" in [profile.name for profile in host.trainer_profiles()]
    assert host.problems == ()


BAD = {
    "import-error": ("raise RuntimeError('built for another\\nCUDA')", "RuntimeError: built for another CUDA"),
    "missing-dependency": ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
    "exits": ("raise SystemExit(3)", "SystemExit: 3"),
    "syntax": ("def broken(:", "SyntaxError"),
    "wrong-api": (
        "TOKENSPEED_API = 99",
        "written for version 99 of the plugin hooks, and this tokenspeed has version 1",
    ),
    "odd-api": ("TOKENSPEED_API = '1'", "TOKENSPEED_API is '1'; it must be an integer"),
    "misspelt-unmarked": (
        "def tokenspeed_kernel(): return []",
        "unknown hook tokenspeed_kernel; did you mean tokenspeed_kernels",
    ),
    "misspelt-marked": ("@hookimpl\ndef tokenspeed_kernals(): return []", "unknown hook tokenspeed_kernals"),
    "foreign-hook": ("@hookimpl\ndef kernels(): return []", "unknown hook 'kernels'"),
    "unmarked": ("def tokenspeed_kernels(): return []", "tokenspeed_kernels is not marked with @hookimpl"),
    "extra-argument": ("@hookimpl\ndef tokenspeed_kernels(config): return []", "config"),
    "wrapper": (
        "@hookimpl(wrapper=True)\ndef tokenspeed_kernels():\n    return (yield)",
        "tokenspeed_kernels is a hook wrapper",
    ),
    "raises": ("@hookimpl\ndef tokenspeed_kernels(): return 1 / 0", "ZeroDivisionError"),
    "raises-late": (
        "@hookimpl\ndef tokenspeed_kernels():\n    yield kernel('late')\n    raise KeyError('x')",
        "KeyError",
    ),
    "returns-none": (
        "@hookimpl\ndef tokenspeed_kernels(): return None",
        "tokenspeed_kernels returned None, not a list",
    ),
    "returns-text": (
        "@hookimpl\ndef tokenspeed_kernels(): return 'ab'",
        "tokenspeed_kernels returned 'ab', not a list",
    ),
    "returns-odd": ("@hookimpl\ndef tokenspeed_kernels(): return [3]", "3 is not a KernelSpec"),
    "twice": ("@hookimpl\ndef tokenspeed_kernels(): return [kernel('a'), kernel('a')]", "returned a more than once"),
    "unknown-operator": (
        "@hookimpl\ndef tokenspeed_kernels(): return [KernelSpec('a', 'gemm.liner', 's', 'm:f', ({},))]",
        "unknown operator 'gemm.liner'; did you mean gemm.linear?",
    ),
    "unknown-role": (
        "@hookimpl\ndef tokenspeed_kernels(): return [kernel('a', signatures=({'wieght': 'bfloat16'},))]",
        "signature names wieght; gemm.linear has the dtype roles weight, x",
    ),
    "no-signature": ("@hookimpl\ndef tokenspeed_kernels(): return [kernel('a', signatures=())]", "no dtype signatures"),
    "dtype-word": (
        "@hookimpl\ndef tokenspeed_kernels(): return [kernel('a', signatures=({'x': 'bf16', 'weight': 'bfloat16'},))]",
        "unknown dtype 'bf16'; did you mean bfloat16?",
    ),
    "dtype-as-number": (
        "@hookimpl\ndef tokenspeed_kernels(): return [kernel('a', signatures=({'x': 3, 'weight': 'float16'},))]",
        "unknown dtype 3; known are bfloat16, bool, float16",
    ),
    "device-word": (
        "@hookimpl\ndef tokenspeed_kernels(): return on(device='gpu')",
        "unknown device 'gpu'; known are cpu, cuda",
    ),
    "arch-as-text": (
        "@hookimpl\ndef tokenspeed_kernels(): return on(arch='x86_64')",
        "arch is 'x86_64', not a frozenset of names",
    ),
    "arch-word": (
        "@hookimpl\ndef tokenspeed_kernels(): return on(arch=frozenset({'x86-64'}))",
        "unknown arch 'x86-64'; did you mean x86_64?",
    ),
    "gpu-arch-word": (
        "@hookimpl\ndef tokenspeed_kernels(): return on(device='cuda', arch=frozenset({'sm_90'}))",
        "unknown arch 'sm_90'; a GPU's is written as sm90",
    ),
    "isa-word": (
        "@hookimpl\ndef tokenspeed_kernels(): return on(isa=frozenset({'avx-512f'}))",
        "unknown isa 'avx-512f'; did you mean avx512f?",
    ),
    "library-word": (
        "@hookimpl\ndef tokenspeed_kernels(): return on(libraries=frozenset({'flashinfer-python'}))",
        "unknown library 'flashinfer-python'; known are flashinfer, numpy, torch, triton",
    ),
    "features-as-text": (
        "@hookimpl\ndef tokenspeed_kernels(): return [kernel('a', features='batch_invariant')]",
        "features is 'batch_invariant', not a frozenset",
    ),
    "traits-as-text": (
        "@hookimpl\ndef tokenspeed_kernels(): return [kernel('a', traits={'kv_layout': 'nhd'})]",
        "build it with trait_table()",
    ),
    "misspelt-feature": (
        "@hookimpl\ndef tokenspeed_kernels(): return [kernel('a', features=frozenset({'batch-invariant'}))]",
        "unknown feature 'batch-invariant'; did you mean batch_invariant?",
    ),
    "misspelt-trait": (
        "from tokenspeed import trait_table\n"
        "@hookimpl\ndef tokenspeed_kernels():\n"
        "    s = ({'x': 'bfloat16', 'weight': 'bfloat16'},)\n"
        "    return [KernelSpec('a', 'norm.rms', 's', 'm:f', s, traits=trait_table({'hiden': {192}}))]",
        "unknown trait 'hiden'; did you mean hidden?",
    ),
    "bad-target": (
        "@hookimpl\ndef tokenspeed_kernels(): return [kernel('a', target='m.f')]",
        "'m.f', not 'module:function'",
    ),
    "bad-model": (
        "@hookimpl\ndef tokenspeed_models(): return [ModelProfile('A', 'nowhere')]",
        "'nowhere' is not 'module:Class'",
    ),
    "odd-model": ("@hookimpl\ndef tokenspeed_models(): return ['LlamaForCausalLM']", "is not a ModelProfile"),
    "odd-command": ("@hookimpl\ndef tokenspeed_commands(): return [print]", "is not a click command"),
    "builtin-command": (
        "import click\n@hookimpl\ndef tokenspeed_commands(): return [click.Command('serve')]",
        "command serve is built in",
    ),
    "builtin-trainer": (
        "from tokenspeed.numerics.envelopes import BUILTIN_TRAINERS\n"
        "@hookimpl\ndef tokenspeed_trainer_profiles(): return [BUILTIN_TRAINERS[0]]",
        "trainer profile megatron: a profile of that name is built in",
    ),
    "partial-trainer": (
        "from tokenspeed.numerics.envelopes import TrainerProfile\n"
        "@hookimpl\ndef tokenspeed_trainer_profiles(): return [TrainerProfile('mine', '', {'tf32': 'off'})]",
        "tf32 is not a trainer switch",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_plugin_is_reported_with_its_error_and_used_for_nothing(folder: Any, name: str) -> None:
    source, expected = BAD[name]
    bad = folder.install(f"bad-{name}", source)
    good = folder.install("other-plugin", ONE_KERNEL.format(name="other.linear"))
    host = load_plugins([bad, good])
    report = report_of(host, bad)
    assert report.status == "broken"
    assert expected in report.error
    assert "\n" not in report.error
    assert (report.distribution, report.version) == (bad, "1.2.3")
    assert [spec.name for spec in host.kernels()] == ["other.linear"]
    assert report_of(host, good).status == "ok"


def test_a_misspelt_hook_is_blamed_on_its_own_plugin(folder: Any) -> None:
    folder.install("a-first", "@hookimpl\ndef tokenspeed_kernals(): return []")
    folder.install("b-second", ONE_KERNEL.format(name="second"))
    host = load_plugins(["a-first", "b-second"])
    assert {report.name: report.status for report in host.reports if report.status != "disabled"} == {
        "a-first": "broken",
        "b-second": "ok",
    }


def test_an_optional_hook_of_a_newer_host_is_accepted(folder: Any) -> None:
    name = folder.install("newer", "@hookimpl(optionalhook=True)\ndef tokenspeed_quantizers(): return []")
    assert report_of(load_plugins([name]), name).status == "ok"


def test_an_entry_point_that_names_nothing_is_broken(folder: Any) -> None:
    name = folder.install("dangling", "", target="dangling:no_such_object")
    assert "no_such_object" in report_of(load_plugins([name]), name).error


def test_an_entry_point_may_name_an_object(folder: Any) -> None:
    source = """
        class _Plugin:
            @hookimpl
            def tokenspeed_kernels(self):
                return [kernel("object.linear")]

        plugin = _Plugin()
        """
    name = folder.install("an-object", source, target="an_object:plugin")
    assert report_of(load_plugins([name]), name).kernels == ("object.linear",)


@pytest.mark.parametrize(
    ("kind", "source", "claim"),
    [
        ("kernels", ONE_KERNEL.format(name="same"), "kernel same"),
        (
            "models",
            "@hookimpl\ndef tokenspeed_models(): return [ModelProfile('SameLM', 'nowhere:Same')]",
            "architecture SameLM",
        ),
        (
            "trainer_profiles",
            "from dataclasses import replace\nfrom tokenspeed.numerics.envelopes import BUILTIN_TRAINERS\n"
            "@hookimpl\ndef tokenspeed_trainer_profiles(): return [replace(BUILTIN_TRAINERS[0], name='same')]",
            "trainer profile same",
        ),
        (
            "commands",
            "import click\n@hookimpl\ndef tokenspeed_commands(): return [click.Command('same')]",
            "command same",
        ),
    ],
)
def test_a_name_claimed_twice_is_refused_with_both_distributions(
    folder: Any, kind: str, source: str, claim: str
) -> None:
    folder.install("left-one", source)
    folder.install("right-one", source, version="4.5")
    host = load_plugins(["left-one", "right-one"])
    assert [problem.summary for problem in host.problems] == [
        f"{claim} is claimed by left-one 1.2.3 and by right-one 4.5"
    ]
    offered = [getattr(item, "name", getattr(item, "architecture", "")) for item in getattr(host, kind)()]
    assert claim.split()[-1] not in offered
    assert report_of(host, "left-one").error == f"{claim} is also claimed by right-one 4.5"
    assert {report_of(host, name).status for name in ("left-one", "right-one")} == {"clash"}


def test_only_allowed_plugins_are_imported(folder: Any) -> None:
    wanted = folder.install("wanted", ONE_KERNEL.format(name="wanted.linear"))
    folder.install("unwanted", "raise RuntimeError('must not be imported')")
    host = load_plugins([wanted])
    assert [spec.name for spec in host.kernels()] == ["wanted.linear"]
    assert report_of(host, "unwanted").status == "disabled"
    assert {report.status for report in load_plugins([]).reports} == {"disabled"}


def test_an_allowed_name_that_is_not_installed_is_an_error(folder: Any) -> None:
    folder.install("here", "")
    with pytest.raises(ConfigError, match=r"--plugins: wnated is not installed; installed: .*here"):
        load_plugins(["here", "wnated"])


def test_listing_imports_no_torch(folder: Any) -> None:
    folder.install("light", ONE_KERNEL.format(name="light.linear"))
    code = (
        "import sys; from tokenspeed.plugins import load_plugins\n"
        "print(*(report.name for report in load_plugins().reports))\n"
        "sys.exit('torch' in sys.modules)"
    )
    result = folder.run("-c", code)
    assert result.returncode == 0, result.stderr
    assert {"light", "tokenspeed-reference"} <= set(result.stdout.split())
