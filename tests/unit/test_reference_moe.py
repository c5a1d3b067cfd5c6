"""The reference router and experts: against torch's own operations, and on ties, groups and identities."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tokenspeed.kernels.reference.moe import experts, route

pytestmark = pytest.mark.usefixtures("one_thread")


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_the_torch_form_is_softmax_and_topk() -> None:
    logits = randn(50, 16)
    weights, ids = route(logits, None, 4, "softmax", "torch", normalise=False)
    values, indices = torch.topk(torch.softmax(logits, -1), 4)
    assert torch.equal(weights, values)
    assert torch.equal(ids, indices.int())
    normal, _ = route(logits, None, 4, "softmax", "torch", scale=2.5)
    assert torch.equal(normal, values / (((values[:, :1] + values[:, 1:2]) + values[:, 2:3]) + values[:, 3:]) * 2.5)


@pytest.mark.parametrize("form", ["fused", "torch"])
def test_equal_scores_go_to_the_lowest_expert(form: str) -> None:
    logits = torch.zeros(3, 40)
    logits[1, 37] = 1.0
    logits[2, ::2] = -0.0
    ids = route(logits, None, 3, "softmax", form)[1]
    assert ids.tolist() == [[0, 1, 2], [37, 0, 1], [0, 1, 2]]


def test_the_fused_form_tells_logits_apart_whose_softmax_is_equal() -> None:
    logits = torch.full((1, 8), 0.1)
    logits[0, 5] = torch.nextafter(torch.tensor(0.1), torch.tensor(1.0))
    assert torch.softmax(logits, -1).unique().numel() == 1
    assert route(logits, None, 1, "softmax", "torch")[1].item() == 0
    assert route(logits, None, 1, "softmax", "fused")[1].item() == 5


def test_the_bias_chooses_and_does_not_weigh() -> None:
    logits, bias = randn(20, 8), torch.zeros(8)
    bias[6] = 100.0
    weights, ids = route(logits, bias, 2, "sigmoid", "torch", normalise=False)
    assert (ids[:, 0] == 6).all()
    assert torch.equal(weights, torch.sigmoid(logits).gather(-1, ids.long()))


def test_only_the_best_groups_are_eligible() -> None:
    """The best single expert loses when its group's two best add up to less."""
    logits = torch.tensor([[5.0, -9.0, 2.0, 1.9, 2.0, 1.9, -9.0, -9.0]])
    _, ids = route(logits, None, 2, "sigmoid", "torch", groups=4, top_groups=1)
    assert ids.tolist() == [[2, 3]]
    _, ids = route(logits, None, 4, "sigmoid", "torch", groups=4, top_groups=2)
    assert sorted(ids[0].tolist()) == [2, 3, 4, 5]


def test_all_scores_zero_stay_finite() -> None:
    weights, ids = route(torch.full((1, 4), -200.0), None, 2, "sigmoid", "torch")
    assert weights.tolist() == [[0.0, 0.0]]
    assert ids.tolist() == [[0, 1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slot_order_is_a_fold_of_linears(dtype: torch.dtype) -> None:
    x, gate_up, down = randn(7, 24, dtype=dtype), randn(5, 32, 24, seed=1, dtype=dtype), randn(5, 24, 16, seed=2)
    down = down.to(dtype)
    weights, ids = route(randn(7, 6, seed=3), None, 3, "softmax", "torch")
    out = experts(x, gate_up, down, weights, ids, "slot")
    for t in range(7):
        total = torch.zeros(24)
        for weight, expert in zip(weights[t], ids[t].tolist(), strict=True):
            if expert < 5:
                gate, up = F.linear(x[t : t + 1].float(), gate_up[expert].float()).to(dtype).float().chunk(2, -1)
                hidden = (gate * torch.sigmoid(gate) * up).to(dtype)
                y = F.linear(hidden.float(), down[expert].float()).to(dtype)[0]
            else:
                y = x[t]
            total = total + weight * y.float()
        assert torch.allclose(out[t].float(), total, rtol=8e-3 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
    assert (ids == 5).any(), "no token chose the identity"


def test_rank_order_adds_by_expert() -> None:
    """1e8 + 1 - 1e8 depends on the order: slots are (0, 2, 1), experts (0, 1, 2)."""
    x = torch.ones(1, 2)
    gate_up = torch.full((3, 2, 2), 20.0)
    down = torch.tensor([1e8, -1e8, 1.0]).view(3, 1, 1).expand(3, 2, 1) / 1600
    weights, ids = torch.ones(1, 3), torch.tensor([[0, 2, 1]], dtype=torch.int32)
    assert experts(x, gate_up, down, weights, ids, "slot").unique().item() == 0.0
    assert experts(x, gate_up, down, weights, ids, "rank").unique().item() == 1.0


def test_unknown_words_are_named() -> None:
    with pytest.raises(ValueError, match="scoring 'tanh'"):
        route(torch.zeros(1, 2), None, 1, "tanh", "torch")
    with pytest.raises(ValueError, match="form 'best'"):
        route(torch.zeros(1, 2), None, 1, "softmax", "best")
    one = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="order 'random'"):
        experts(torch.zeros(1, 2), torch.zeros(1, 4, 2), torch.zeros(1, 2, 2), one, one.int(), "random")
