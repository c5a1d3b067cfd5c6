"""Selection, on made-up kernels and machines: eligibility, choice, links, pins, and the words of every refusal."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tokenspeed.errors import PluginError
from tokenspeed.kernels.operators import OPERATORS
from tokenspeed.kernels.registry import KernelRegistry, dtype_roles
from tokenspeed.kernels.select import Pins, Selection, select, spell_priority
from tokenspeed.kernels.spec import (
    BATCH_INVARIANT,
    DTYPES,
    KernelSpec,
    MachineRequirement,
    Need,
    Priority,
    TraitValue,
    spell_values,
    trait_table,
)
from tokenspeed.machine import Machine, named_machine
from tokenspeed.plugins import PluginReport

CPU = Machine("cpu", "x86_64", frozenset({"avx2", "fma"}))
BF16 = {"x": "bfloat16", "weight": "bfloat16"}
LINEAR = Need.of("gemm.linear", dtypes=BF16)
INVARIANT = Need.of("gemm.linear", dtypes=BF16, features=[BATCH_INVARIANT])


def spec(name: str, operator: str = "gemm.linear", *, traits: dict[str, Any] | None = None, **more: Any) -> KernelSpec:
    roles = dtype_roles(OPERATORS[operator]) if operator in OPERATORS else ("x",)
    more = {
        "signatures": (dict.fromkeys(roles, "bfloat16"),),
        "solution": name.partition(".")[0],
        "distribution": "dist-" + name.partition(".")[0],
        "version": "1.0",
        **more,
    }
    if "features" in more:
        more["features"] = frozenset(more["features"])
    return KernelSpec(
        name=name, operator=operator, implementation="nowhere:f", traits=trait_table(traits or {}), **more
    )


def run(needs: list[Need], *specs: KernelSpec, machine: Machine = CPU, pins: Pins | None = None) -> Selection:
    return select(needs, KernelRegistry(specs), machine, pins)


def reason(selection: Selection, need: Need, name: str) -> str:
    return next(verdict.reason for verdict in selection.verdicts[need] if verdict.spec.name == name)


@pytest.mark.parametrize(
    ("need", "candidate", "expected"),
    [
        (LINEAR, spec("a", machine=MachineRequirement("cuda")), "needs device cuda, this machine is cpu"),
        (
            LINEAR,
            spec("a", machine=MachineRequirement("cpu", isa=frozenset({"avx512f"}))),
            "needs instruction sets avx512f, which this machine lacks",
        ),
        (
            LINEAR,
            spec("a", signatures=({"x": "float32", "weight": "float32"},)),
            "no dtype signature for weight bfloat16, x bfloat16; it has weight float32, x float32",
        ),
        (INVARIANT, spec("a"), "lacks the required feature batch_invariant (declares no features)"),
        (
            INVARIANT,
            spec("a", features=["deterministic"]),
            "lacks the required feature batch_invariant (declares deterministic)",
        ),
        (
            Need.of("gemm.linear", dtypes=BF16, traits={"weight_format": "fp8"}),
            spec("a"),
            "does not declare weight_format, and weight_format=fp8 is required",
        ),
        (
            Need.of("gemm.linear", dtypes=BF16, traits={"weight_format": "fp8"}),
            spec("a", traits={"weight_format": ["awq", "gptq"]}),
            "declares weight_format=awq|gptq, and fp8 is required",
        ),
        (
            Need.of("gemm.linear", dtypes=BF16, facts={"k": 96, "n": 64}),
            spec("a", traits={"k": [64, 128]}),
            "k is 96, and it supports only 64, 128",
        ),
    ],
)
def test_an_ineligible_kernel_is_rejected_with_the_reason(need: Need, candidate: KernelSpec, expected: str) -> None:
    selection = run([need], candidate)
    assert need not in selection.choices
    assert reason(selection, need, "a") == expected
    (problem,) = selection.problems
    assert problem.kind == "missing-kernel"
    assert expected in problem.render()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["b", "a"], "a|b"),
        ([True], "True"),
        ([256, 64], "64, 256"),
        ([1, 2, 3], "1, 2, 3"),
        ([*range(1, 9), 16, *range(64, 257, 16)], "1-8, 16, 64-256 step 16"),
        ([16, 32, *range(64, 129, 16), 160, 192, 256], "16, 32, 64-128 step 16, 160, 192, 256"),
        ([7], "7"),
        ([], ""),
    ],
)
def test_values_are_spelt_for_people(values: list[TraitValue], expected: str) -> None:
    assert spell_values(values) == expected


def test_every_reason_is_given_not_only_the_first() -> None:
    selection = run([INVARIANT], spec("a", machine=MachineRequirement("cuda")))
    assert reason(selection, INVARIANT, "a") == (
        "needs device cuda, this machine is cpu; lacks the required feature batch_invariant (declares no features)"
    )


def test_facts_that_a_kernel_does_not_restrict_are_free() -> None:
    need = Need.of("gemm.linear", dtypes=BF16, facts={"k": 96})
    assert run([need], spec("a", traits={"n": [64]})).choices[need].name == "a"


def test_required_features_are_a_subset() -> None:
    assert run([INVARIANT], spec("a", features=[BATCH_INVARIANT, "more"])).choices[INVARIANT].name == "a"


def test_dtypes_are_called_as_torch_calls_them() -> None:
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in DTYPES)


def test_one_of_several_signatures_is_enough() -> None:
    both = ({"x": "float32", "weight": "float32"}, BF16)
    assert run([LINEAR], spec("a", signatures=both)).choices[LINEAR].name == "a"


def test_the_choice_goes_by_priority_then_name_never_by_order() -> None:
    specs = [
        spec("b.fast", priority=Priority.PERFORMANT + 1),
        spec("a.fast", priority=Priority.PERFORMANT + 1),
        spec("z.slow", priority=Priority.PORTABLE),
        spec("a.best", priority=Priority.PLUGIN, features=[]),
    ]
    for order in itertools.permutations(specs):
        assert run([LINEAR], *order).choices[LINEAR].name == "a.best"
        assert run([LINEAR], *(s for s in order if s.name != "a.best")).choices[LINEAR].name == "a.fast"
    selection = run([LINEAR], *specs)
    assert reason(selection, LINEAR, "a.best") == "chosen: first by priority and name, priority PLUGIN"
    assert reason(selection, LINEAR, "b.fast") == ("eligible, but its priority PERFORMANT+1 is below PLUGIN of a.best")
    selection = run([LINEAR], *specs[:2])
    assert reason(selection, LINEAR, "b.fast") == "eligible, but a.fast has the same priority and comes first by name"


def test_priority_does_not_outrank_a_required_feature() -> None:
    selection = run([INVARIANT], spec("fast", priority=1000), spec("sure", priority=-5, features=[BATCH_INVARIANT]))
    assert selection.choices[INVARIANT].name == "sure"


def test_a_pin_narrows_the_choice() -> None:
    pins = Pins({"gemm.linear": "slow"})
    selection = run([LINEAR], spec("slow"), spec("fast", priority=Priority.PLUGIN), pins=pins)
    assert selection.choices[LINEAR].name == "slow"
    assert reason(selection, LINEAR, "slow") == "chosen: pinned by the user"
    assert reason(selection, LINEAR, "fast") == "the user pinned slow"
    assert selection.problems == ()


def test_a_pin_does_not_outrank_a_required_feature() -> None:
    pins = Pins({"gemm.linear": "fast"})
    selection = run([INVARIANT], spec("fast"), spec("sure", features=[BATCH_INVARIANT]), pins=pins)
    assert INVARIANT not in selection.choices
    (problem,) = selection.problems
    assert problem.kind == "pin"
    assert problem.summary == (
        "--kernel gemm.linear=fast cannot serve gemm.linear (weight bfloat16, x bfloat16) with batch_invariant: "
        "it lacks the required feature batch_invariant (declares no features)"
    )


def test_a_pin_that_names_no_kernel_of_the_operator_is_refused() -> None:
    norm = spec("ours.norm", "norm.rms")
    (problem,) = run([LINEAR], spec("ours.linear"), norm, pins=Pins({"gemm.linear": "ours.linaer"})).problems
    assert problem.summary == "--kernel gemm.linear=ours.linaer: no such kernel is installed"
    assert problem.remedy == "did you mean ours.linear?"
    (problem,) = run([LINEAR], spec("ours.linear"), norm, pins=Pins({"gemm.linear": "ours.norm"})).problems
    assert problem.summary == "--kernel gemm.linear=ours.norm: that kernel serves norm.rms"


def test_a_pin_of_an_unknown_operator_is_refused() -> None:
    (problem,) = run([LINEAR], spec("a"), pins=Pins({"gemm.liner": "a"})).problems
    assert problem.summary == "--kernel gemm.liner=a: there is no operator gemm.liner"
    assert problem.remedy == "did you mean gemm.linear?"


def test_an_unused_pin_is_noted() -> None:
    selection = run([LINEAR], spec("a"), pins=Pins({"norm.add_rms": "b"}))
    assert selection.problems == ()
    assert selection.unused_pins == ("norm.add_rms",)


def test_a_solution_narrows_the_choice() -> None:
    specs = (spec("ours.linear"), spec("theirs.linear", priority=Priority.PLUGIN))
    assert run([LINEAR], *specs, pins=Pins(solutions={"gemm.linear": "ours"})).choices[LINEAR].name == "ours.linear"
    selection = run([LINEAR], *specs, pins=Pins(solutions={"gemm.linear": "nobody"}))
    assert reason(selection, LINEAR, "ours.linear") == "solution ours, and nobody was asked for"


KV = {"x": "bfloat16", "kv": "bfloat16"}
WRITE = Need.of("cache.write", dtypes=KV)
READ = Need.of("attention.paged", dtypes=KV)


def pair(
    solution: str, layout: str | None, priority: int, *, read: bool = True, write: bool = True
) -> list[KernelSpec]:
    traits = {"kv_layout": [layout]} if layout else {}
    specs = []
    if write:
        specs.append(spec(f"{solution}.write", "cache.write", traits=traits, priority=priority))
    if read:
        specs.append(spec(f"{solution}.read", "attention.paged", traits=traits, priority=priority))
    return specs


def test_linked_operators_take_one_layout() -> None:
    specs = [*pair("slow", "nhd", 0), *pair("fast", "pairs", 8)]
    selection = run([WRITE, READ], *specs)
    assert selection.links == {"kv_layout": "pairs"}
    assert {s.name for s in selection.choices.values()} == {"fast.write", "fast.read"}
    assert reason(selection, READ, "slow.read") == "declares kv_layout=nhd, and this plan uses pairs"


def test_a_layout_that_only_one_operator_has_is_not_taken() -> None:
    selection = run([WRITE, READ], *pair("slow", "nhd", 0), *pair("half", "odd", 100, write=False))
    assert {s.name for s in selection.choices.values()} == {"slow.write", "slow.read"}


def test_kernels_of_two_solutions_may_share_a_layout() -> None:
    selection = run([WRITE, READ], *pair("slow", "nhd", 0), *pair("reader", "nhd", 8, write=False))
    assert {s.name for s in selection.choices.values()} == {"slow.write", "reader.read"}


def test_a_kernel_that_is_silent_about_a_link_is_not_taken() -> None:
    selection = run([WRITE, READ], *pair("slow", "nhd", 0), *pair("silent", None, 100))
    assert selection.links == {"kv_layout": "nhd"}
    assert reason(selection, READ, "silent.read") == (
        "does not declare kv_layout, which must be the same for the whole plan"
    )


def test_equally_good_layouts_are_decided_by_name() -> None:
    specs = [*pair("a", "zebra", 4), *pair("b", "apple", 4)]
    for order in itertools.permutations(specs):
        assert run([WRITE, READ], *order).links == {"kv_layout": "apple"}


def test_a_pin_decides_the_layout() -> None:
    specs = [*pair("slow", "nhd", 0), *pair("fast", "pairs", 8)]
    selection = run([WRITE, READ], *specs, pins=Pins({"cache.write": "slow.write"}))
    assert {s.name for s in selection.choices.values()} == {"slow.write", "slow.read"}


def test_operators_that_cannot_agree_are_refused_together() -> None:
    specs = [*pair("left", "nhd", 0, write=False), *pair("right", "pairs", 8, read=False)]
    selection = run([WRITE, READ], *specs)
    assert not selection.choices
    (problem,) = selection.problems
    assert problem.kind == "link"
    assert problem.summary == (
        "no value of kv_layout is served by every operator that must share it: cache.write, attention.paged"
    )
    assert "right.write (dist-right 1.0): rejected, declares kv_layout=pairs" in problem.render()


def test_one_problem_for_all_shapes_of_an_operator() -> None:
    needs = [
        Need.of("gemm.linear", dtypes=BF16, facts={"k": k, "n": 8}, features=[BATCH_INVARIANT]) for k in range(1, 7)
    ]
    (problem,) = run(needs, spec("a")).problems
    assert problem.render().splitlines() == [
        "[missing-kernel] no kernel can serve gemm.linear (weight bfloat16, x bfloat16) with batch_invariant "
        "on cpu x86_64 (avx2, fma), 1 core",
        "    needed for k=1, n=8; k=2, n=8; k=3, n=8; k=4, n=8; and 2 more",
        "    a (dist-a 1.0): rejected, lacks the required feature batch_invariant (declares no features)",
        "    -> install tokenspeed-kernels-aok (pip install 'tokenspeed[aok]')",
    ]


def test_a_refusal_names_the_distribution_that_would_supply_the_kernel() -> None:
    def remedy(need: Need, machine: Machine = CPU, *specs: KernelSpec) -> str:
        (problem,) = run([need], *specs, machine=machine).problems
        return problem.remedy

    assert remedy(INVARIANT) == "install tokenspeed-kernels-aok (pip install 'tokenspeed[aok]')"
    attention = Need.of("attention.paged", dtypes=KV)
    assert remedy(attention, named_machine("sm90")) == (
        "install tokenspeed-kernels-aok (pip install 'tokenspeed[aok]'), "
        "or install tokenspeed-kernels-flashinfer (pip install 'tokenspeed[flashinfer]')"
    )
    installed = spec("aok.linear", distribution="tokenspeed-kernels-aok")
    assert remedy(INVARIANT, CPU, installed) == (
        "install a distribution that offers such a kernel, or use --numerics auto, which promises nothing"
    )
    quantised = Need.of("gemm.linear", dtypes=BF16, traits={"weight_format": "fp8"})
    torch_sum = Need.of("sampling.logprobs", dtypes={}, traits={"block_order": "torch_sum"})
    assert remedy(torch_sum) == "install a distribution that offers such a kernel"
    assert remedy(quantised) == "install a distribution that offers such a kernel"


def test_a_plugin_that_could_not_be_loaded_is_named_with_its_error() -> None:
    broken = PluginReport("aok", "m", "tokenspeed-kernels-aok", "0.9", "broken", "ImportError: libgomp.so.1")
    models = PluginReport("models", "m", "tokenspeed-models", "0.9", "broken", "ImportError: x")
    disabled = PluginReport("acme", "m", "acme-kernels", "7", "disabled", "not named by --plugins")
    registry = KernelRegistry([spec("a")], [broken, models, disabled])
    missing, *plugins = select([INVARIANT], registry, CPU).problems
    assert missing.remedy == "mend the plugins named below"
    assert [problem.summary for problem in plugins] == [
        "plugin aok (tokenspeed-kernels-aok 0.9) is broken: ImportError: libgomp.so.1",
        "plugin acme (acme-kernels 7) is disabled: not named by --plugins",
    ]
    assert [problem.kind for problem in plugins] == ["broken-plugin", "disabled-plugin"]
    assert plugins[1].remedy == "add acme to --plugins"
    assert select([LINEAR], registry, CPU).problems == ()


def test_an_operator_without_any_kernel() -> None:
    (problem,) = run([LINEAR]).problems
    assert "no usable plugin offers a kernel for gemm.linear" in problem.details


def test_a_registry_refuses_one_name_twice() -> None:
    with pytest.raises(PluginError, match="kernel a is claimed by left and by right"):
        KernelRegistry([spec("a", distribution="left"), spec("a", distribution="right")])


@pytest.mark.parametrize(
    ("priority", "expected"), [(0, "REFERENCE"), (3, "REFERENCE+3"), (9, "PERFORMANT+1"), (19, "PLUGIN+3"), (-1, "-1")]
)
def test_priorities_are_spelled_by_band(priority: int, expected: str) -> None:
    assert spell_priority(priority) == expected
