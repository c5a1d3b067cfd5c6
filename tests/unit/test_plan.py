"""The plan: its digest covers what was decided and nothing else, and binding reports kernels that are not there."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tokenspeed.errors import StartRefused
from tokenspeed.kernels.registry import KernelRegistry
from tokenspeed.kernels.select import Pins, select
from tokenspeed.kernels.spec import KernelSpec, Need, trait_table
from tokenspeed.layers.context import Operation
from tokenspeed.machine import Machine
from tokenspeed.models.profile import ModelProfile
from tokenspeed.numerics.canonical import canonical_json
from tokenspeed.numerics.card import as_text
from tokenspeed.numerics.plan import Plan, make_plan
from tokenspeed.numerics.resolve import resolve

LINEAR = Need.of("gemm.linear", dtypes={"x": "bfloat16", "weight": "bfloat16"}, facts={"k": 8})
NORM = Need.of("norm.rms", dtypes={"x": "bfloat16"})
MACHINE = Machine("cpu", "x86_64", frozenset({"avx2"}), cores=4, libraries={"torch": "2.13.0"})


def spec(name: str, operator: str, roles: tuple[str, ...], **more: Any) -> KernelSpec:
    fields = {
        "implementation": "json:dumps",
        "signatures": (dict.fromkeys(roles, "bfloat16"),),
        "traits": trait_table({}),
        "distribution": "acme",
        "version": "1.0",
        **more,
    }
    return KernelSpec(name=name, operator=operator, solution="acme", **fields)


def make(
    *, linear: dict[str, Any] | None = None, numerics: str = "auto", machine: Machine = MACHINE, **more: Any
) -> Plan:
    specs = [
        spec("acme.linear", "gemm.linear", ("x", "weight"), features=frozenset({"batch_invariant"}), **(linear or {})),
        spec("acme.norm", "norm.rms", ("x",), features=frozenset({"batch_invariant"})),
    ]
    needs = more.pop("needs", [LINEAR, NORM])
    selection = select(needs, KernelRegistry(specs), machine, more.pop("pins", None))
    assert selection.problems == ()
    fields = {
        "model": "folder/model",
        "dtype": "bfloat16",
        "profile": ModelProfile("AcmeForCausalLM", "acme:Model", distribution="acme", version="1.0"),
        "core_version": "0.1.0",
        **more,
    }
    return make_plan(machine=machine, numerics=resolve(numerics).numerics, selection=selection, **fields)


def test_the_digest_does_not_depend_on_order_machine_or_names_of_files() -> None:
    plan = make()
    assert make(needs=[NORM, LINEAR]).digest == plan.digest
    assert make(machine=replace(MACHINE, isa=frozenset({"avx2", "avx512f"}), cores=64)).digest == plan.digest
    assert make(model="elsewhere").digest == plan.digest
    assert make(notes=["something to see"]).digest == plan.digest
    assert len(plan.digest) == 64


@pytest.mark.parametrize(
    "change",
    [
        {"numerics": "rl-bitwise"},
        {"dtype": "float32"},
        {"linear": {"version": "1.1"}},
        {"linear": {"distribution": "other"}},
        {"profile": ModelProfile("OtherForCausalLM", "acme:Model", distribution="acme", version="1.0")},
        {"needs": [LINEAR]},
    ],
)
def test_the_digest_changes_with_every_decision(change: dict[str, Any]) -> None:
    assert make(**change).digest != make().digest


def test_the_plan_is_plain_data_with_every_reason() -> None:
    plan = make(pins=Pins({"gemm.linear": "acme.linear", "norm.add_rms": "none"}))
    data = json.loads(json.dumps(plan.as_dict()))
    assert data["digest"] == plan.digest
    assert data["versions"] == {"acme": "1.0", "tokenspeed": "0.1.0", "torch": "2.13.0"}
    (linear, _) = data["operators"]
    assert linear["kernel"] == "acme.linear"
    assert linear["candidates"][0]["reason"] == "chosen: pinned by the user"
    assert data["notes"] == ["--kernel norm.add_rms=… is unused: the model does not need it"]


def test_the_card_names_what_matters() -> None:
    text = as_text(make(numerics="rl-bitwise").card())
    for part in ("folder/model", "rl-bitwise", "trainer megatron", "acme.linear", "acme 1.0", "logprob_order=megatron"):
        assert part in text


def test_the_card_fits_its_terminal_and_cuts_nothing_off(monkeypatch: pytest.MonkeyPatch) -> None:
    card = make(numerics="rl-bitwise").card()

    def shown(columns: int) -> tuple[int, Counter[str]]:
        monkeypatch.setenv("COLUMNS", str(columns))
        text = as_text(card)
        return max(map(len, text.splitlines())), Counter(re.sub(r"[\s╭╮╰╯│─]", "", text))

    (narrow, folded), (wide, whole) = shown(40), shown(500)
    assert narrow <= 40 < wide <= 120
    assert folded == whole


def test_canonical_json_has_one_spelling() -> None:
    assert canonical_json({"b": 1, "a": "é"}) == b'{"a":"\\u00e9","b":1}'
    with pytest.raises(ValueError, match="Out of range"):
        canonical_json(float("nan"))


def test_binding_attaches_the_chosen_kernels() -> None:
    plan = make(linear={"prepare_weights": "json:loads"})
    linear, norm = Operation(LINEAR), Operation(NORM)
    with pytest.raises(RuntimeError, match="not bound"):
        linear()
    plan.bind([linear, norm])
    assert (linear.run, linear.prepare, norm.run) == (json.dumps, json.loads, json.dumps)
    assert norm.prepare("as it is") == "as it is"


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("no_such_module:f", "no_such_module:f: ModuleNotFoundError: No module named 'no_such_module'"),
        ("json:no_such_function", "AttributeError: module 'json' has no attribute 'no_such_function'"),
        ("json:__doc__", "not a function"),
    ],
)
def test_a_kernel_that_is_not_there_is_refused_at_start(target: str, expected: str) -> None:
    plan = make(linear={"implementation": target})
    with pytest.raises(StartRefused) as caught:
        plan.bind([Operation(LINEAR), Operation(NORM), Operation(LINEAR)])
    (problem,) = caught.value.problems
    assert problem.kind == "broken-kernel"
    assert problem.summary == ("kernel acme.linear of acme 1.0 was chosen for gemm.linear and cannot be loaded")
    assert expected in problem.details[0]
    assert "--kernel gemm.linear=NAME" in problem.remedy


def counts_for_tests(need: Need, most: int) -> list[int]:
    """Named by specs below: a kernel with two tiles, whose larger one begins at a row count that the shape gives."""
    return [1, int(dict(need.facts)["k"]), 10 * most]


def test_kernels_say_which_row_counts_compile_something() -> None:
    plan = make(linear={"row_counts": f"{__name__}:counts_for_tests"})
    assert plan.row_counts(100) == (1, 8)
    assert plan.row_counts(7) == (1,)
    assert make().row_counts(100) == ()


def test_a_kernel_that_cannot_say_it_refuses_the_start() -> None:
    plan = make(linear={"row_counts": "json:no_such_function"})
    with pytest.raises(StartRefused, match=r"acme\.linear .* cannot be loaded"):
        plan.row_counts(100)
