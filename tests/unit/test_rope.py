"""Rotary tables have the bits that transformers' have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tokenspeed.layers.context import LayerContext
from tokenspeed.layers.rope import (
    CERTIFIED_POSITIONS,
    RopeScaling,
    RotaryEmbedding,
    cos_sin_table,
    inverse_frequencies,
)
from tokenspeed.models.config import ConfigFields
from tokenspeed.models.rope_config import read_rope

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, **LLAMA3},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn-without-truncation": {
        "rope_type": "yarn",
        "rope_theta": 1.5e5,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
        "beta_fast": 20.0,
        "beta_slow": 1.5,
    },
    "yarn-with-mscale": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
    "yarn-with-attention-factor": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.25,
    },
}


@pytest.mark.parametrize("head_dim", [64, 128, 80])
@pytest.mark.parametrize("case", CASES)
def test_tables_equal_those_of_transformers(case: str, head_dim: int) -> None:
    config = transformers.LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters=dict(CASES[case]),
    )
    theirs = LlamaRotaryEmbedding(config)
    fields = ConfigFields({"rope_parameters": CASES[case]})
    scaling = read_rope(fields, 131072)
    fields.check()
    assert torch.equal(inverse_frequencies(scaling, head_dim), theirs.inv_freq)
    cos, sin = theirs(torch.empty(0), torch.arange(3000).unsqueeze(0))
    half = head_dim // 2
    assert torch.equal(cos_sin_table(scaling, head_dim, 3000), torch.cat((cos[0, :, :half], sin[0, :, :half]), -1))


def test_the_scalings_differ() -> None:
    """Negative control: a scaling that was ignored would equal another."""
    tables = []
    for rope in CASES.values():
        scaling = read_rope(ConfigFields({"rope_parameters": {**rope, "rope_theta": 1e4}}), 131072)
        tables.append(cos_sin_table(scaling, 64, 50))
    assert not any(torch.equal(a, b) for i, a in enumerate(tables) for b in tables[:i])


class Devices(TorchDispatchMode):
    """Where each operation of torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.seen.setdefault(func.overloadpacket.__name__, set()).add(out.device.type)
        return out


@pytest.mark.parametrize(("value", "device"), [("cpu", "cpu"), ("model", "meta")])
def test_the_switch_says_where_the_table_is_computed(value: str, device: str) -> None:
    """`cpu`: on the host, whatever the model's device, and then copied. The meta device stands for a GPU."""
    scaling = RopeScaling("yarn", factor=4.0, original_positions=512)
    rotary = RotaryEmbedding(LayerContext(torch.float32, {"yarn_ramp_mask_device": value}), scaling, 64, 100)
    with Devices() as devices:
        rotary.allocate(torch.device("meta"))
    assert rotary.table is not None
    assert rotary.table.device.type == "meta"
    computed = {name: where for name, where in devices.seen.items() if name in ("pow", "clamp", "reciprocal", "cos")}
    assert set().union(*computed.values()) == {device}
    assert {"clamp", "cos"} <= computed.keys()


def test_on_a_cpu_both_values_are_one() -> None:
    scaling = RopeScaling("yarn", factor=4.0, original_positions=512)
    tables = []
    for value in ("cpu", "model"):
        rotary = RotaryEmbedding(LayerContext(torch.float32, {"yarn_ramp_mask_device": value}), scaling, 64, 100)
        rotary.allocate(torch.device("cpu"))
        tables.append(rotary.table)
    assert torch.equal(*tables)


@pytest.mark.parametrize("rotary_dim", [2, 6, 64])
def test_a_row_is_the_same_whatever_the_other_rows(rotary_dim: int) -> None:
    scaling = RopeScaling(theta=5e5)
    whole = cos_sin_table(scaling, rotary_dim, 20_011)
    for count in (1, 7, 16, 1001, 20_010):
        assert torch.equal(cos_sin_table(scaling, rotary_dim, count), whole[:count])
    for step in (2, 3, 16):
        assert torch.equal(cos_sin_table(scaling, rotary_dim, range(0, 20_011, step)), whole[::step])


def test_a_table_covers_what_an_engine_serves() -> None:
    """A billion positions are no reason for a table of a billion rows; what is certified is the model's, not the
    engine's, and reaches over the whole context."""
    certified = []
    for served in (100, 3000):
        rotary = RotaryEmbedding(LayerContext(torch.float32), RopeScaling(), 4, 10**9)
        rotary.limit_context(served)
        rotary.allocate(torch.device("cpu"))
        assert rotary.table is not None
        assert torch.equal(rotary.table, cos_sin_table(RopeScaling(), 4, served))
        certified += [table for _, table in rotary.tables()]
    assert torch.equal(*certified)
    assert CERTIFIED_POSITIONS // 2 < len(certified[0]) <= CERTIFIED_POSITIONS
    last = 10**9 - 1 - (10**9 - 1) % (-(-(10**9) // CERTIFIED_POSITIONS))
    assert torch.equal(certified[0][-1:], cos_sin_table(RopeScaling(), 4, range(last, last + 1)))


def test_a_limit_beyond_the_context_changes_nothing() -> None:
    rotary = RotaryEmbedding(LayerContext(torch.float32), RopeScaling(), 4, 50)
    rotary.limit_context(80)
    rotary.allocate(torch.device("cpu"))
    ((_, certified),) = rotary.tables()
    assert torch.equal(rotary.table, certified)
    assert len(certified) == 50
