"""References of sparse attention and of the layer norm: against torch's own operations, on ties and on short rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tokenspeed.kernels.reference import mla, sparse
from tokenspeed.kernels.reference.norm import layer

pytestmark = pytest.mark.usefixtures("one_thread")


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(*values: object) -> list[torch.Tensor]:
    return [torch.tensor(value, dtype=torch.int32) for value in values]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm_is_torchs(dtype: torch.dtype) -> None:
    x, weight, bias = (randn(*shape, seed=i, dtype=dtype) for i, shape in enumerate(((9, 50), (50,), (50,))))
    expected = F.layer_norm(x.float(), (50,), weight.float(), bias.float(), 1e-6).to(dtype)
    assert torch.allclose(
        layer(x, weight, bias, 1e-6), expected, rtol=8e-3 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
    )


def test_scores_are_weighted_sums_of_positive_parts() -> None:
    q, weights, keys = randn(3, 5, 6), randn(3, 5, seed=1), randn(20, 6, seed=2)
    cache = torch.full((3, 16, 1, 6), torch.nan)
    cache[[2, 0]] = F.pad(keys, (0, 0, 0, 12), value=torch.nan).view(2, 16, 1, 6)
    scores = sparse.index_scores(q, weights, cache, *ints([0, 3], [20], [[2, 0]]), 0.3)
    for row in range(3):
        expected = (F.relu(q[row] @ keys.T * 0.3) * weights[row, :, None]).sum(0)
        assert torch.allclose(scores[row, : 18 + row], expected[: 18 + row], rtol=1e-5, atol=1e-6)
        assert (scores[row, 18 + row :] == -torch.inf).all()


def test_equal_scores_go_to_the_lowest_position() -> None:
    scores = torch.zeros(5, 8)
    scores[1, 6] = 1.0
    scores[2, ::2] = -0.0
    scores[3, 2] = torch.nan
    scores[4] = -torch.inf
    positions = torch.tensor([7, 7, 7, 3, 1])
    assert sparse.index_topk(scores, positions, 4).tolist() == [
        [0, 1, 2, 3],
        [6, 0, 1, 2],
        [0, 1, 2, 3],
        [2, 0, 1, 3],
        [0, 1, -1, -1],
    ]
    assert sparse.index_topk(scores[:1], positions[:1], 10).tolist() == [[*range(8), -1, -1]]


def test_a_query_never_selects_what_it_does_not_see() -> None:
    scores = randn(30, 32)
    indices = sparse.index_topk(scores, torch.arange(30), 6)
    for row in range(30):
        expected = scores[row, : row + 1].topk(min(6, row + 1)).indices
        assert indices[row].tolist() == [*expected.tolist(), *[-1] * (6 - len(expected))]


def test_everything_selected_is_latent_attention_and_a_part_is_masked_attention() -> None:
    q, cache = randn(4, 3, 10), randn(2, 16, 1, 10, seed=1)
    where = ints([0, 4], [24], [[1, 0]])
    dense = mla.attention(q, cache, *where, 0.4, 7)
    everything = torch.stack([F.pad(torch.randperm(21 + i), (0, 3 - i), value=-1) for i in range(4)]).int()
    for order in sparse.ORDERS:
        assert torch.allclose(sparse.attention(q, cache, everything, *where, 0.4, 7, order), dense, atol=1e-6)
    few = torch.tensor([[5, 0, -1], [9, 20, 3], [1, -1, -1], [-1, -1, -1]], dtype=torch.int32)
    out = sparse.attention(q, cache, few, *where, 0.4, 7, "sorted")
    keys = cache[[1, 0]].flatten(0, 2)
    for row, selected in enumerate(([0, 5], [3, 9, 20], [1])):
        weights = torch.softmax(q[row] @ keys[selected].T * 0.4, -1)
        assert torch.allclose(out[row], weights @ keys[selected][:, :7], atol=1e-6)
    assert not out[3].any()
    with pytest.raises(ValueError, match="order 'random'"):
        sparse.attention(q, cache, few, *where, 0.4, 7, "random")
