"""Backward passes: `gradcheck` in float64, agreement with plain torch, and the same bits every time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tokenspeed.kernels.reference.plugin import tokenspeed_kernels
from tokenspeed.trainer import gradients, kernels, operators
from tokenspeed.trainer.layout import make_layout
from tokenspeed.trainer.registration import operator

pytestmark = pytest.mark.usefixtures("one_thread")

EPS = 1e-6
SCALE = 0.4


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, queries: list[int], keys: list[int], window: int
) -> torch.Tensor:
    """Sequence by sequence, as the definition says."""
    out, q_start, k_start = [], 0, 0
    group = q.shape[1] // k.shape[1]
    for n, length in zip(queries, keys, strict=True):
        own_k = k[k_start : k_start + length].repeat_interleave(group, dim=1)
        own_v = v[k_start : k_start + length].repeat_interleave(group, dim=1)
        scores = torch.einsum("nhd,lhd->hnl", q[q_start : q_start + n], own_k) * SCALE
        at = torch.arange(length - n, length).unsqueeze(-1)
        seen = (torch.arange(length) <= at) & ((torch.arange(length) > at - window) if window else True)
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
        out.append(torch.einsum("hnl,lhd->nhd", weights, own_v))
        q_start, k_start = q_start + n, k_start + length
    return torch.cat(out)


def ragged(queries: list[int], keys: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """`query_starts` and `context_lens` of sequences with so many queries and keys."""
    return torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32), torch.tensor(keys, dtype=torch.int32)


def sparse_attention(
    q: torch.Tensor, entries: torch.Tensor, indices: torch.Tensor, queries: list[int], keys: list[int], latent: int
) -> torch.Tensor:
    """Query by query."""
    out, row, start = [], 0, 0
    for n, length in zip(queries, keys, strict=True):
        for _ in range(n):
            own = entries[start : start + length][indices[row][indices[row] >= 0].long()]
            out.append(torch.softmax(q[row] @ own.T * SCALE, dim=-1) @ own[:, :latent])
            row += 1
        start += length
    return torch.stack(out)


def rotate_neighbours(x: torch.Tensor) -> torch.Tensor:
    """The same with pairs (2i, 2i+1), as complex numbers."""
    cos, sin = TABLE[POSITIONS].unsqueeze(1).chunk(2, dim=-1)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.complex(cos, sin).to(pairs.dtype)).flatten(-2)


def route(logits: torch.Tensor, ids: torch.Tensor, scoring: str, normalise: bool) -> torch.Tensor:
    """Weights of given experts."""
    chosen = (torch.softmax(logits, -1) if scoring == "softmax" else torch.sigmoid(logits)).gather(-1, ids)
    return (chosen / (chosen.sum(-1, keepdim=True) + 1e-20) if normalise else chosen) * 2.5


def experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Every expert computes every token, as the definition says; the identity is one more."""
    inner = torch.einsum("th,efh->tef", x, gate_up[: len(down)])
    out = torch.einsum("tef,ehf->teh", silu_and_mul(inner), down)
    out = torch.cat((out, x.unsqueeze(1)), dim=1)
    chosen = out[torch.arange(len(x)).unsqueeze(-1), ids.clamp_max(len(down))]
    return (weights.unsqueeze(-1) * chosen).sum(1)


def with_backward(forward: Callable[..., torch.Tensor], backward: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """`forward` in plain torch with our backward in the place of autograd's."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(*inputs)
            return forward(*inputs)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return backward(grad, *ctx.saved_tensors)

    return lambda *inputs: Function.apply(*inputs)


CHOSEN = torch.tensor([[2, 0], [1, 4], [4, 2], [1, 2], [3, 5]])
"""Experts of five tokens; there are four, and beyond them identities."""

POSITIONS_CHOSEN = torch.tensor(
    [[3, 0, -1], [0, -1, -1], [1, 0, -1], [0, 2, 1], [3, 2, 0], [5, 1, 2], [6, 0, 4]], dtype=torch.int32
)
"""What seven queries of three sequences attend to."""

RAGGED = [([3, 3, 5], [3, 3, 5], 0), ([1, 4, 2], [4, 4, 7], 0), ([6, 6], [6, 6], 3)]
IDS = torch.tensor([[2], [0], [-1], [5]])
TEMPERATURE = torch.tensor([1.0, 0.7, 1.0, 0.0], dtype=torch.float64)
TABLE = torch.cat((random(8, 3, seed=8).cos(), random(8, 3, seed=8).sin()), dim=-1)
POSITIONS = torch.tensor([0, 3, 7, 3])


def rotate(x: torch.Tensor) -> torch.Tensor:
    cos, sin = TABLE[POSITIONS].unsqueeze(1).chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def scored(logits: torch.Tensor) -> torch.Tensor:
    divisor = torch.where(TEMPERATURE == 0, 1.0, TEMPERATURE).unsqueeze(-1)
    return torch.log_softmax(logits / divisor, -1).gather(-1, IDS.clamp_min(0)).masked_fill(IDS < 0, 0)


CASES: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "rms_norm": (
        rms_norm,
        lambda grad, x, weight: gradients.rms_norm(grad, x, weight, EPS),
        (random(3, 2, 5), random(5, seed=1)),
    ),
    "silu_and_mul": (silu_and_mul, gradients.silu_and_mul, (random(4, 6),)),
    "rope": (rotate, lambda grad, _: gradients.rotate_back(grad, POSITIONS, TABLE), (random(4, 2, 6),)),
    "rope, interleaved": (
        rotate_neighbours,
        lambda grad, _: gradients.rotate_back(grad, POSITIONS, TABLE, True),
        (random(4, 2, 6),),
    ),
    "batched_linear": (
        lambda x, weight: torch.einsum("tgk,gnk->tgn", x, weight),
        gradients.batched_linear,
        (random(4, 3, 5), random(3, 2, 5, seed=1)),
    ),
    "latent_attention": (
        lambda q, entries: attention(q, entries[:, None], entries[:, None, :4], [1, 4, 2], [4, 4, 7], 0),
        lambda grad, q, entries: gradients.latent_attention(grad, q, entries, *ragged([1, 4, 2], [4, 4, 7]), SCALE, 4),
        (random(7, 3, 6), random(15, 6, seed=1)),
    ),
    "sparse_attention": (
        lambda q, entries: sparse_attention(q, entries, POSITIONS_CHOSEN, [1, 4, 2], [4, 4, 7], 4),
        lambda grad, q, entries: gradients.sparse_attention(
            grad, q, entries, POSITIONS_CHOSEN, *ragged([1, 4, 2], [4, 4, 7]), SCALE, 4
        ),
        (random(7, 3, 6), random(15, 6, seed=1)),
    ),
    **{
        f"route {scoring}{', normalised' * normalise}": (
            lambda logits, s=scoring, n=normalise: route(logits, CHOSEN, s, n),
            lambda grad, logits, s=scoring, n=normalise: gradients.route(grad, logits, CHOSEN, s, n, 2.5),
            (random(5, 6),),
        )
        for scoring in ("softmax", "sigmoid")
        for normalise in (False, True)
    },
    "experts": (
        lambda x, gate_up, down, weights: experts(x, gate_up, down, weights, CHOSEN),
        lambda grad, x, gate_up, down, weights: gradients.experts(grad, x, gate_up, down, weights, CHOSEN),
        (random(5, 4), random(6, 6, 4, seed=1), random(4, 4, 3, seed=2), random(5, 2, seed=3)),
    ),
    "logprobs": (
        scored,
        lambda grad, logits: gradients.logprobs(grad, logits, IDS, TEMPERATURE),
        (random(4, 6),),
    ),
    **{
        f"attention {queries} of {keys}, window {window}": (
            lambda q, k, v, n=queries, m=keys, w=window: attention(q, k, v, n, m, w),
            lambda grad, q, k, v, n=queries, m=keys, w=window: gradients.attention(
                grad, q, k, v, *ragged(n, m), SCALE, w
            ),
            (random(sum(queries), 4, 3), random(sum(keys), 2, 3, seed=1), random(sum(keys), 2, 3, seed=2)),
        )
        for queries, keys, window in RAGGED
    },
}


@pytest.mark.parametrize("name", CASES)
def test_gradcheck(name: str) -> None:
    forward, backward, inputs = CASES[name]
    leaves = tuple(tensor.clone().requires_grad_() for tensor in inputs)
    assert torch.autograd.gradcheck(with_backward(forward, backward), leaves)


def test_gradcheck_notices_a_wrong_backward() -> None:
    forward, backward, inputs = CASES["silu_and_mul"]
    wrong = with_backward(forward, lambda grad, x: backward(grad, x) * 1.01)
    assert not torch.autograd.gradcheck(wrong, (inputs[0].clone().requires_grad_(),), raise_exception=False)


@pytest.fixture(scope="module", autouse=True)
def reference_kernels() -> None:
    kernels.load(spec for spec in tokenspeed_kernels() if not spec.name.endswith(".cuda"))


def operator_cases(dtype: torch.dtype) -> dict[str, tuple[Any, tuple[Any, ...], Callable[..., torch.Tensor]]]:
    """Each operator with arguments (on reference kernels) and plain torch to differentiate."""

    def leaf(*shape: int, seed: int) -> torch.Tensor:
        return random(*shape, seed=seed, dtype=dtype).requires_grad_()

    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    layout = make_layout((2, 3), torch.device("cpu"), attention_mask=mask)
    paged = (layout.query_starts, layout.context_lens, layout.page_tables, layout.slots, layout.pages, SCALE, 0)
    paged += ("reference.cache.write", "reference.attention.paged")
    latent = ("reference.cache.write_latent", "reference.attention.mla_paged")
    chosen = torch.tensor([[0, -1], [1, 0], [0, -1], [0, 1], [2, 0]], dtype=torch.int32)
    sparse = "reference.attention.sparse_paged"
    table = TABLE.float()
    bias = random(6, seed=7, dtype=torch.float32)

    def chosen_by(logits: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return operators.route(logits, bias, 2, "sigmoid", "torch", True, 2.5, 3, 2, "reference.moe.route")[1]

    return {
        "linear": (
            operators.linear,
            (leaf(5, 4, seed=1), leaf(3, 4, seed=2), leaf(3, seed=3), "reference.gemm.linear"),
            lambda x, weight, bias, _: torch.nn.functional.linear(x, weight, bias),
        ),
        "rms_norm": (
            operators.rms_norm,
            (leaf(5, 4, seed=1), leaf(4, seed=2), EPS, "reference.norm.rms"),
            lambda x, weight, *_: rms_norm(x.float(), weight.float()).to(dtype),
        ),
        "silu_and_mul": (
            operators.silu_and_mul,
            (leaf(5, 8, seed=1), "reference.activation.silu_and_mul"),
            lambda x, _: silu_and_mul(x.float()).to(dtype),
        ),
        "rope": (
            lambda *arguments: torch.cat(operators.rope(*arguments), dim=1),
            (leaf(4, 2, 6, seed=1), leaf(4, 1, 6, seed=2), POSITIONS, table, False, "reference.rope.apply"),
            lambda q, k, *_: torch.cat((rotate(q.double()), rotate(k.double())), dim=1).to(dtype),
        ),
        "batched_linear": (
            operators.batched_linear,
            (leaf(5, 3, 4, seed=1), leaf(3, 2, 4, seed=2), "reference.gemm.batched"),
            lambda x, weight, _: torch.einsum("tgk,gnk->tgn", x, weight),
        ),
        "latent_attention": (
            operators.latent_attention,
            (leaf(5, 4, 6, seed=1), leaf(5, 6, seed=2), *paged[:6], 4, *latent),
            lambda q, entries, *_: attention(
                q.float(), entries[:, None].float(), entries[:, None, :4].float(), [2, 3], [2, 3], 0
            ).to(dtype),
        ),
        "sparse_attention": (
            operators.sparse_attention,
            (leaf(5, 4, 6, seed=1), leaf(5, 6, seed=2), chosen, *paged[:6], 4, "sorted", latent[0], sparse),
            lambda q, entries, *_: sparse_attention(q.float(), entries.float(), chosen, [2, 3], [2, 3], 4).to(dtype),
        ),
        "route": (
            lambda *arguments: operators.route(*arguments)[0],
            (leaf(5, 6, seed=1), bias, 2, "sigmoid", "torch", True, 2.5, 3, 2, "reference.moe.route"),
            lambda logits, bias, *_: route(logits.float(), chosen_by(logits, bias), "sigmoid", True),
        ),
        "experts": (
            operators.experts,
            (
                leaf(5, 4, seed=1),
                leaf(6, 6, 4, seed=2),
                leaf(4, 4, 3, seed=3),
                random(5, 2, seed=4, dtype=torch.float32).requires_grad_(),
                CHOSEN,
                "slot",
                "reference.moe.experts",
            ),
            lambda x, gate_up, down, weights, ids, *_: experts(
                x.float(), gate_up.float(), down.float(), weights, ids
            ).to(dtype),
        ),
        "attention": (
            operators.attention,
            (leaf(5, 4, 6, seed=1), leaf(5, 2, 6, seed=2), leaf(5, 2, 6, seed=3), *paged),
            lambda q, k, v, *_: attention(q.float(), k.float(), v.float(), [2, 3], [2, 3], 0).to(dtype),
        ),
        "logprobs": (
            operators.logprobs,
            (leaf(3, 9, seed=1), IDS[:2].expand(2, 3).T, torch.ones(3), "torch", 4, "reference.sampling.logprobs"),
            lambda logits, ids, *_: torch.log_softmax(logits.float(), -1).gather(-1, ids),
        ),
    }


def differentiate(run: Callable[..., torch.Tensor], arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    leaves = [item for item in arguments if isinstance(item, torch.Tensor) and item.requires_grad]
    out = run(*arguments)
    return list(torch.autograd.grad(out, leaves, random(*out.shape, seed=9, dtype=out.dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", operator_cases(torch.float32))
def test_operator_differentiates_like_plain_torch(name: str, dtype: torch.dtype) -> None:
    run, arguments, plain = operator_cases(dtype)[name]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    once, again = differentiate(run, arguments), differentiate(run, arguments)
    for got, repeated, expected in zip(once, again, differentiate(plain, arguments), strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, repeated)
        assert (got - expected).float().norm() <= tolerance * expected.float().norm()


@pytest.mark.parametrize("name", operator_cases(torch.float32))
def test_operator_is_registered_properly(name: str) -> None:
    _, arguments, _ = operator_cases(torch.float32)[name]
    run = getattr(torch.ops.tokenspeed, name).default
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    assert set(torch.library.opcheck(run, arguments, test_utils=utilities).values()) == {"SUCCESS"}


def test_a_formula_that_names_no_argument_is_refused() -> None:
    def double(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    for number, wrong in enumerate(({"of": ("y",)}, {"backward": lambda grad, y: grad * y})):
        described: dict[str, Any] = {"backward": lambda grad, factor: grad * factor, "of": ("x",), **wrong}
        with pytest.raises(TypeError, match=r"^y: the operator takes x, factor$"):
            operator(f"tokenspeed_test::double_{number}", fake=lambda x: x.new_empty(x.shape), **described)(double)


def test_operators_of_an_indexer_are_registered_properly() -> None:
    """They have no gradient; the positions are those of the reference operators, sequence by sequence."""
    layout = make_layout((2, 3), torch.device("cpu"), attention_mask=torch.tensor([[0, 1, 1], [1, 1, 1]]))
    paged = (layout.query_starts, layout.context_lens, layout.page_tables, layout.slots, layout.pages, SCALE, 2)
    names = ("reference.cache.write_latent", "reference.attention.index_scores", "reference.attention.index_topk")
    q, weights, keys = (random(*shape, seed=1, dtype=torch.float32) for shape in ((5, 4, 6), (5, 4), (5, 6)))
    choose = (q, weights, keys, torch.tensor([0, 1, 0, 1, 2]), *paged, *names)
    norm = (keys, random(6, seed=2).float(), random(6, seed=3).float(), EPS, "reference.norm.layer")
    ours = torch.ops.tokenspeed
    for run, arguments in ((ours.choose_positions.default, choose), (ours.layer_norm.default, norm)):
        found = torch.library.opcheck(run, arguments, test_utils=("test_schema", "test_faketensor"))
        assert set(found.values()) == {"SUCCESS"}
    found = operators.choose_positions(*choose)
    scores = (torch.einsum("thd,ld->thl", q[2:], keys[2:]) * SCALE).relu().mul(weights[2:, :, None]).sum(1)
    assert found[0].tolist() == [0, -1]
    assert found[4].tolist() == scores[2].argsort(descending=True)[:2].tolist()
