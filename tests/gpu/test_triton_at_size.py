"""Promises of the Triton kernels at the sizes of models, where tiles, splits and persistence take effect."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tokenspeed.kernels.reference import gemm as reference_gemm
from tokenspeed_kernels_aok.triton import activation, attention, gemm, logprobs, norm, rope, sample
from tokenspeed_kernels_aok.triton.launch import arch_of
from triton_cases.attention import make_call
from triton_cases.support import DEVICE, SIZES, assert_agrees, random, same_bits


@pytest.mark.parametrize(("k", "n"), [(1024, 4096), (4096, 6144), (12288, 4096)])
def test_rows_of_a_projection_do_not_depend_on_the_batch(k: int, n: int) -> None:
    x, weight = random(2048, k, dtype=torch.bfloat16), random(n, k, dtype=torch.bfloat16, seed=1) * 0.02
    whole = gemm.linear(x, weight)
    assert_agrees("gemm.linear", whole, reference_gemm.linear(x, weight))
    for size in (*SIZES, 256, 257, 1024):
        assert same_bits(gemm.linear(x[:size], weight), whole[:size])
    table = gemm.table_for(arch_of(DEVICE), torch.bfloat16)
    for tile in table.tiles:
        assert same_bits(gemm.linear_by(table, tile, x, weight), whole), f"{tile} adds in another order"


def test_halves_of_k_added_afterwards_are_caught() -> None:
    """The control: what a split-K kernel would compute has other bits."""
    x, weight = random(2048, 4096, dtype=torch.bfloat16), random(1024, 4096, dtype=torch.bfloat16, seed=1)
    halves = gemm.linear(x[:, :2048], weight[:, :2048]).float() + gemm.linear(x[:, 2048:], weight[:, 2048:]).float()
    assert not same_bits(halves.bfloat16(), gemm.linear(x, weight))


def test_long_decode_by_one_program_or_many_is_prefill() -> None:
    call = make_call([4200], [4200], heads=(8, 2, 128))
    prefill = call.run()
    for position in (4199, 4096, 4095, 256, 255, 17):
        for whole in (True, False):
            assert same_bits(call.upto(0, position + 1, 1).run(whole=whole)[0], prefill[position])
    assert same_bits(call.upto(0, 4200, 333).run(), prefill[-333:])
    assert same_bits(call.run(window=1000, whole=False), call.run(window=1000))


def _decode_step() -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
    """The queries that a step reads, and a step of four sequences that runs every kernel of a decode."""
    call = make_call([300, 1, 777, 1], [1, 1, 1, 1], heads=(8, 2, 128))
    weight = random(2048, 1024, dtype=torch.bfloat16, seed=3) * 0.02
    scale = random(1024, dtype=torch.bfloat16, seed=4)
    table, positions = random(1024, 128, seed=5), call.context_lens.long() - 1
    ones, zeros = torch.ones(4, device=DEVICE), torch.zeros(4, device=DEVICE)
    seeds = torch.arange(4, device=DEVICE)

    def step() -> torch.Tensor:
        rotated, _ = rope.apply(call.q, call.q[:, :2], positions, table)
        rows = attention.paged(rotated, *call.arguments()[1:]).flatten(1)
        hidden = activation.silu_and_mul(gemm.linear(norm.rms(rows, scale, 1e-6), weight))
        ids = sample.sample(hidden, ones, zeros.int(), ones, zeros, seeds, positions)
        scores = logprobs.logprobs(hidden, ids.unsqueeze(-1), ones, "megatron", 32768)
        return torch.cat([hidden.float(), ids.unsqueeze(-1).float(), scores], dim=-1)

    return call.q, step


def test_graph_replay_is_eager_on_new_inputs() -> None:
    q, step = _decode_step()
    step()  # compiles, which may not happen during capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for seed in (11, 12):
        q.copy_(random(*q.shape, dtype=torch.bfloat16, seed=seed))
        graph.replay()
        torch.cuda.synchronize()
        replayed = out.clone()
        assert torch.isfinite(replayed).all()
        assert same_bits(replayed, step())


def test_sampling_over_a_real_vocabulary_does_not_depend_on_the_batch() -> None:
    logits = random(33, 151936, dtype=torch.bfloat16) * 3
    columns = [
        torch.full((33,), 0.8, device=DEVICE),
        torch.tensor([0, 40, 1000] * 11, dtype=torch.int32, device=DEVICE),
        torch.tensor([1.0, 0.9, 0.95] * 11, device=DEVICE),
        torch.zeros(33, device=DEVICE),
        torch.arange(33, device=DEVICE),
        torch.arange(33, device=DEVICE) * 7,
    ]
    batch = sample.sample(logits, *columns)
    for row in (0, 1, 2, 32):
        alone = sample.sample(*(each[row : row + 1] for each in (logits, *columns)))
        assert same_bits(alone, batch[row : row + 1])
    scores = logprobs.logprobs(logits, batch.unsqueeze(-1), columns[0], "megatron", 32768)
    alone = logprobs.logprobs(logits[7:8], batch[7:8].unsqueeze(-1), columns[0][7:8], "megatron", 32768)
    assert same_bits(alone, scores[7:8])
