"""The reference kernels: against torch's own operations, and on inputs that only the written rules allow."""

from __future__ import annotations

import ast
import importlib
import inspect
import math

import pytest
import torch

from tokenspeed.kernels.operators import OPERATORS, Operator
from tokenspeed.kernels.reference import activation, attention, cache, embedding, gemm, norm, rope
from tokenspeed.kernels.reference.plugin import tokenspeed_kernels
from tokenspeed.kernels.registry import spec_faults
from tokenspeed.kernels.spec import Priority

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_every_operator_has_a_reference_that_promises_nothing() -> None:
    specs = list(tokenspeed_kernels())
    assert not [fault for spec in specs for fault in spec_faults(spec)]
    assert {(spec.operator, spec.machine.device) for spec in specs} == {
        (name, device) for name in OPERATORS for device in ("cpu", "cuda")
    }
    assert all(spec.priority == Priority.REFERENCE for spec in specs)
    references = [spec for spec in specs if spec.solution == "reference"]
    assert len(references) == 2 * len(OPERATORS)
    assert all(spec.features == frozenset() for spec in references)
    assert all(spec.implementation == OPERATORS[spec.operator].reference for spec in references)
    # The one kernel beside them, for trainers that add in torch's own order.
    assert {spec.name for spec in specs if spec.solution != "reference"} == {"torch.sampling.logprobs"}


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=lambda operator: operator.name)
def test_every_reference_is_called_as_its_operator_says(operator: Operator) -> None:
    module, _, name = operator.reference.partition(":")
    taken = inspect.signature(getattr(importlib.import_module(module), name)).parameters.values()
    assert [(parameter.name, parameter.default) for parameter in taken] == [
        (argument.role, ast.literal_eval(argument.default) if argument.default else inspect.Parameter.empty)
        for argument in operator.arguments
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_batched_is_linear_group_by_group(dtype: torch.dtype) -> None:
    x, weight = randn(5, 3, 16, dtype=dtype), randn(3, 7, 16, seed=1, dtype=dtype)
    out = gemm.batched(x, weight)
    expected = torch.stack([gemm.linear(x[:, g], weight[g]) for g in range(3)], dim=1)
    assert out.dtype == dtype
    assert torch.allclose(out.float(), expected.float(), rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_rounds_once(dtype: torch.dtype) -> None:
    x, weight, bias = randn(5, 64, dtype=dtype), randn(2500, 64, seed=1, dtype=dtype), randn(2500, seed=2, dtype=dtype)
    exact = x.double() @ weight.double().T + bias.double()
    out = gemm.linear(x, weight, bias)
    assert out.dtype == dtype
    assert torch.allclose(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)
    assert torch.equal(gemm.linear(x[:0], weight), out[:0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype: torch.dtype) -> None:
    heads = randn(7, 12, 32, dtype=dtype)[:, 2:6]  # a view, as the query heads of a merged projection are
    weight = randn(32, seed=1, dtype=dtype)
    out = norm.rms(heads, weight, 1e-3)
    exact = heads.double() / (heads.double().square().mean(-1, keepdim=True) + 1e-3).sqrt()
    assert out.is_contiguous()
    assert torch.allclose(out.double(), exact * weight.double(), rtol=3 * torch.finfo(dtype).eps, atol=1e-6)


def test_rms_norm_rounds_before_the_scale() -> None:
    x, weight = randn(50, 64, dtype=torch.bfloat16), randn(64, seed=1, dtype=torch.bfloat16)
    normed = norm.rms(x, torch.ones_like(weight), 1e-6)
    assert torch.equal(norm.rms(x, weight, 1e-6), normed * weight)


def test_add_rms_norms_the_unrounded_sum() -> None:
    x, residual = randn(50, 64, dtype=torch.bfloat16), randn(50, 64, seed=1, dtype=torch.bfloat16)
    weight = torch.ones(64, dtype=torch.bfloat16)
    out, total = norm.add_rms(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    wide = norm.rms(x.float() + residual.float(), weight.float(), 1e-6).to(torch.bfloat16)
    assert torch.equal(out, wide)
    assert not torch.equal(out, norm.rms(total, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(dtype: torch.dtype) -> None:
    x = randn(6, 80, dtype=dtype)
    exact = torch.nn.functional.silu(x[:, :40].double()) * x[:, 40:].double()
    assert torch.allclose(activation.silu_and_mul(x).double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_embedding() -> None:
    weight = randn(20, 8)
    ids = torch.tensor([3, 0, 19])
    assert torch.equal(embedding.lookup(ids, weight), torch.stack([weight[3], weight[0], weight[19]]))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_rope_is_a_complex_multiplication(interleaved: bool, rotary_dim: int) -> None:
    q, k = randn(5, 4, 16), randn(5, 2, 16, seed=1)
    positions = torch.tensor([0, 9, 3, 3, 1])
    angles = torch.outer(torch.arange(10.0), 100.0 ** -(torch.arange(rotary_dim // 2) / 8))
    out = rope.apply(q, k, positions, torch.cat((angles.cos(), angles.sin()), -1), interleaved)
    turn = torch.polar(torch.ones_like(angles), angles)[positions].unsqueeze(1)
    for x, y in zip((q, k), out, strict=True):
        head = x[..., :rotary_dim]
        heads = (*x.shape[:-1],)
        pairs = head.reshape(*heads, -1, 2) if interleaved else head.reshape(*heads, 2, -1).transpose(-1, -2)
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
        expected = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
        assert torch.allclose(y[..., :rotary_dim], expected, atol=1e-6)
        assert torch.equal(y[..., rotary_dim:], x[..., rotary_dim:])


def test_cache_write_skips_negative_slots_and_takes_any_strides() -> None:
    both = torch.zeros(3, 2, 16, 2, 8)  # keys and values of a page side by side: the page stride is not 16 slots
    k_cache, v_cache = both[:, 0], both[:, 1]
    k, v = randn(4, 2, 8), randn(4, 2, 8, seed=1)
    cache.write(k, v, k_cache, v_cache, torch.tensor([33, -1, 0, 15]))
    assert torch.equal(k_cache[2, 1], k[0])
    assert torch.equal(k_cache[0, 0], k[2])
    assert torch.equal(v_cache[0, 15], v[3])
    assert int((both != 0).any(-1).any(-1).sum()) == 6


@pytest.mark.parametrize("window", [0, 1, 5, 1000])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_paged_attention_is_masked_attention(window: int, num_heads: int, num_kv_heads: int) -> None:
    """Ragged queries over scattered pages, with garbage in unused slots and table entries, against dense attention."""
    lengths, counts = [1, 40, 16, 33], [1, 7, 16, 1]
    k_cache = torch.full((12, 16, num_kv_heads, 8), torch.nan)
    v_cache = k_cache.clone()
    tables = torch.full((4, 3), 1 << 30, dtype=torch.int32)
    pages = iter([7, 2, 11, 0, 5, 9, 3, 1])
    queries, expected = [], []
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        keys, values = randn(length, num_kv_heads, 8, seed=b), randn(length, num_kv_heads, 8, seed=10 + b)
        for i in range(math.ceil(length / 16)):
            tables[b, i] = page = next(pages)
            part = slice(16 * i, min(16 * i + 16, length))
            k_cache[page, : part.stop - part.start] = keys[part]
            v_cache[page, : part.stop - part.start] = values[part]
        queries.append(randn(count, num_heads, 8, seed=20 + b))
        expected.append(dense_attention(queries[-1], keys, values, window))
    out = attention.paged(
        torch.cat(queries),
        k_cache,
        v_cache,
        torch.tensor([0, 1, 8, 24, 25], dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        tables,
        8**-0.5,
        window,
    )
    assert torch.allclose(out, torch.cat(expected), atol=1e-6)


def dense_attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int) -> torch.Tensor:
    count, length = len(q), len(keys)
    mask = torch.ones(count, length, dtype=torch.bool).tril(length - count)
    if window:
        mask &= ~torch.ones(count, length, dtype=torch.bool).tril(length - count - window)
    q, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q, keys, values))
    out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=True)
    return out[0].transpose(0, 1)


def test_nothing_in_nothing_out() -> None:
    empty_q, empty_cache = torch.empty(0, 4, 8), torch.empty(2, 16, 2, 8)
    starts, no_ints = torch.zeros(1, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
    out = attention.paged(empty_q, empty_cache, empty_cache, starts, no_ints, no_ints.view(0, 1), 1.0)
    assert out.shape == (0, 4, 8)
    assert norm.rms(torch.empty(0, 8), torch.ones(8), 1e-6).shape == (0, 8)
    assert activation.silu_and_mul(torch.empty(0, 8)).shape == (0, 4)
