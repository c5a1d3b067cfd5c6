"""Which Triton kernel serves which need on made-up machines; nothing here needs a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tokenspeed.kernels.operators import OPERATORS
from tokenspeed.kernels.registry import KernelRegistry
from tokenspeed.kernels.select import select
from tokenspeed.kernels.spec import BATCH_INVARIANT, Need
from tokenspeed.machine import named_machine
from tokenspeed_kernels_aok.triton.specs import ARCHITECTURES, triton_specs
from tokenspeed_kernels_aok.triton.tiles import ATTENTION, GEMM

NEEDS = [
    Need.of(
        operator.name,
        dtypes=dict.fromkeys({a.dtype[1:] for a in operator.arguments if a.dtype.startswith("$")}, "bfloat16"),
        facts={"head_dim": 128, "group_size": 4} if operator.name == "attention.paged" else {},
        features=[BATCH_INVARIANT],
        traits={"block_order": "aok_tree"} if "logprobs" in operator.name or "sumexp" in operator.name else {},
    )
    for operator in OPERATORS.values()
    if operator.name in {spec.operator for spec in triton_specs()}
]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_dense_need_is_served_on_every_architecture(architecture: str) -> None:
    selection = select(NEEDS, KernelRegistry(triton_specs()), named_machine(architecture))
    assert selection.problems == ()
    assert len(selection.choices) == len(NEEDS) == 12
    assert selection.links == {"kv_layout": "nhd"}
    for need, spec in selection.choices.items():
        own_order = need.operator in ("gemm.linear", "gemm.batched", "attention.paged")
        assert spec.name == f"aok.triton.{need.operator}" + (f".{architecture}" if own_order else "")
        assert spec.bit_order == f"aok-triton/{spec.name.removeprefix('aok.triton.')}@1"


@pytest.mark.parametrize(("machine", "reason"), [("sm75", "needs arch"), ("cpu", "needs device cuda")])
def test_other_machines_are_refused_with_the_reason(machine: str, reason: str) -> None:
    selection = select(NEEDS, KernelRegistry(triton_specs()), named_machine(machine))
    assert selection.choices == {}
    assert all(reason in verdict.reason for verdicts in selection.verdicts.values() for verdict in verdicts)


def test_shapes_outside_the_tiles_are_refused() -> None:
    need = Need.of("attention.paged", dtypes={"x": "bfloat16", "kv": "bfloat16"}, facts={"head_dim": 512})
    selection = select([need], KernelRegistry(triton_specs()), named_machine("sm90"))
    assert any("head_dim" in verdict.reason for verdict in selection.verdicts[need])
    assert selection.choices == {}


def test_tables_cover_what_the_specs_offer() -> None:
    assert set(ARCHITECTURES) <= GEMM.keys() == ATTENTION.keys()


def test_a_bit_order_belongs_to_one_operator() -> None:
    orders = [spec.bit_order for spec in triton_specs()]
    assert len(set(orders)) == len(orders)


def test_specs_import_neither_torch_nor_triton() -> None:
    code = (
        "import sys; from tokenspeed_kernels_aok.triton.specs import triton_specs; triton_specs();"
        "sys.exit(bool({'torch', 'triton'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_implementations_exist() -> None:
    import importlib

    for spec in triton_specs():
        for target in filter(None, (spec.implementation, spec.prepare_weights)):
            module, _, function = target.partition(":")
            assert callable(getattr(importlib.import_module(module), function))
