"""The indexer, its choice and attention over it: the bits of the published order, whatever shares the call."""

from __future__ import annotations

import pytest
import torch

from aok_support import DTYPES, FAST_VARIANTS, KINDS, VARIANTS, awkward, narrowed, same_bits, threads, use_variant, wide
from latent_support import LatentSequences, Spans, by_sequence, rows_of
from oracle import sparse as oracle
from tokenspeed.kernels.reference import sparse as reference
from tokenspeed_kernels_aok.cpu import mla, sparse

SCALE = 0.17
KERNELS = {"_index_scores": "_SCORES", "_index_topk": "_TOPK", "_sparse_attention": "_ATTENTION"}


class Sequences(LatentSequences):
    """With weights of an indexer's heads, and a selection of `k` positions for every query."""

    def __init__(
        self,
        dtype: torch.dtype,
        lengths: list[int],
        *,
        heads: int = 5,
        c: int = 22,
        r: int = 18,
        k: int = 40,
        kind: str = "normal",
        seed: int = 0,
    ):
        super().__init__(dtype, lengths, heads=heads, c=c, r=r, kind=kind, seed=seed)
        self.k = k
        self.weights = [awkward("normal", n, heads, dtype=torch.float32, seed=90 + i) for i, n in enumerate(lengths)]
        generator = torch.Generator().manual_seed(seed)
        self.indices = [torch.full((n, k), -1, dtype=torch.int32) for n in lengths]
        for indices in self.indices:
            for position, row in enumerate(indices):
                chosen = torch.randperm(position + 1, generator=generator)[:k]
                row[: len(chosen)] = chosen

    def score(self, spans: Spans) -> list[torch.Tensor]:
        """Scores by sequence, without the columns behind its context."""
        q, weights = rows_of(self.queries, spans), rows_of(self.weights, spans)
        found = sparse.index_scores(q, weights, self.cache, *self.where(spans), SCALE)
        parts = by_sequence(found, spans)
        for part, (begin, end) in zip(parts, spans.values(), strict=True):
            assert all((row[begin + i + 1 :] == -torch.inf).all() for i, row in enumerate(part)), end
        return [part[:, :end] for part, (_, end) in zip(parts, spans.values(), strict=True)]

    def attend(self, spans: Spans, order: str) -> list[torch.Tensor]:
        q, indices = rows_of(self.queries, spans), rows_of(self.indices, spans)
        out = sparse.attention(q, self.cache, indices, *self.where(spans), SCALE, self.latent, order)
        return by_sequence(out, spans)


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use_variant(monkeypatch, request.param, sparse, **KERNELS)
    return request.param


@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_scores_have_the_bits_of_the_oracle(kind: str, dtype: torch.dtype) -> None:
    sequences = Sequences(dtype, [290, 17], heads=19, kind=kind)
    spans = {0: (275, 290), 1: (0, 17)}
    for b, got in zip(spans, sequences.score(spans), strict=True):
        begin, _ = spans[b]
        for position in (begin, begin + 1, begin + 14):
            q, weights = wide(sequences.queries[b][position]), wide(sequences.weights[b][position])
            expected = oracle.index_scores(q, weights, wide(sequences.entries[b])[: position + 1], SCALE)
            assert same_bits(got[position - begin, : position + 1], torch.from_numpy(expected))


@pytest.mark.usefixtures("variant")
def test_the_choice_is_the_oracles_on_ties_of_every_kind() -> None:
    for columns, k in ((1, 1), (30, 7), (64, 64), (50, 80), (3000, 300)):
        for kind in KINDS:
            scores = awkward(kind, 6, columns, dtype=torch.float32, seed=columns)
            scores[1] = torch.randint(-2, 3, (columns,), generator=torch.Generator().manual_seed(1)).float()
            scores[2] = scores[2].bfloat16().float()
            scores[3] = 0.25
            scores[4, ::3] = -torch.inf
            scores[5] = scores[5, 0] + torch.arange(columns) % 4 * 2.0**-24
            positions = torch.tensor([columns - 1, columns - 1, columns // 2, columns + 9, columns - 1, columns - 1])
            found = sparse.index_topk(scores, positions, k)
            for row, position in enumerate(positions.tolist()):
                expected = oracle.index_topk(wide(scores[row, : position + 1]), k)
                assert found[row].tolist() == expected + [-1] * (k - len(expected)), (kind, columns, row)
            if kind != "denormal":  # which the kernels read as zero
                assert torch.equal(found, reference.index_topk(scores, positions, k))


@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", sparse.ORDERS)
def test_attention_has_the_bits_of_the_oracle(dtype: torch.dtype, order: str) -> None:
    sequences = Sequences(dtype, [330, 40], heads=19, k=270)
    spans = {0: (300, 330), 1: (0, 40)}
    shows = 0
    for b, got in zip(spans, sequences.attend(spans, order), strict=True):
        begin, _ = spans[b]
        for position in (begin, begin + 15, begin + 29):
            chosen = [at for at in sequences.indices[b][position].tolist() if at >= 0]
            met = sorted(chosen) if order == "sorted" else chosen
            q, entries = wide(sequences.queries[b][position]), wide(sequences.entries[b])
            expected = oracle.attention_over(q, entries, met, SCALE, sequences.latent)
            assert same_bits(got[position - begin], narrowed(expected, dtype))
            other = oracle.attention_over(q, entries, sorted(met), SCALE, sequences.latent)
            shows += not same_bits(got[position - begin], narrowed(other, dtype))
    # Rounding to bf16 hides most differences of the last bit in so few values.
    assert (shows > 0) == (order == "selection") or (order == "selection" and dtype == torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 16, 20])
def test_a_row_has_the_same_bits_in_any_company(
    dtype: torch.dtype, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, in a chunk of any length, beside others, on two threads, on every instruction set."""
    sequences = Sequences(dtype, [530, 33, 270], heads=heads, k=300)
    whole: dict[str, list[torch.Tensor]] = {}
    for name in FAST_VARIANTS:
        use_variant(monkeypatch, name, sparse, **KERNELS)
        for count in (1, 2):
            with threads(count):
                runs = {"scores": sequences.score, **dict.fromkeys(sparse.ORDERS, sequences.attend)}
                for what, run in runs.items():
                    more = () if what == "scores" else (what,)
                    if what not in whole:
                        whole[what] = [run({b: (0, n)}, *more)[0] for b, n in enumerate(sequences.lengths)]
                    expected = whole[what]
                    for begin, end in ((0, 1), (255, 256), (529, 530), (0, 7), (250, 263)):
                        got = run({0: (begin, end)}, *more)[0]
                        assert same_bits(got, cut(expected[0][begin:end], what, end)), (name, what, begin)
                    mixed = {2: (269, 270), 0: (100, 140), 1: (0, 33)}
                    for (b, (begin, end)), got in zip(mixed.items(), run(mixed, *more), strict=True):
                        assert same_bits(got, cut(expected[b][begin:end], what, end)), (name, what, b)


def cut(rows: torch.Tensor, what: str, end: int) -> torch.Tensor:
    return rows[:, :end] if what == "scores" else rows


@pytest.mark.parametrize("k", [300, 17])
def test_the_order_of_the_indices_shows_in_selection_order_only(k: int) -> None:
    sequences = Sequences(torch.float32, [300], heads=4, k=k)
    spans = {0: (290, 300)}
    before = {order: sequences.attend(spans, order)[0] for order in sparse.ORDERS}
    sequences.indices[0][290:] = sequences.indices[0][290:].sort(dim=-1, descending=True).values
    after = {order: sequences.attend(spans, order)[0] for order in sparse.ORDERS}
    assert same_bits(before["sorted"], after["sorted"])
    assert not same_bits(before["selection"], after["selection"])
    ascending = sequences.indices[0][290:].clone()
    for row in ascending:
        count = int((row >= 0).sum())
        row[:count] = row[:count].sort().values
    sequences.indices[0][290:] = ascending
    assert same_bits(sequences.attend(spans, "selection")[0], before["sorted"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_everything_selected_and_sorted_is_attention_over_everything(dtype: torch.dtype) -> None:
    """Which another kernel computes, without lists: below `index_topk` a sparse model has the bits of a dense one."""
    sequences = Sequences(dtype, [290], heads=6, k=290)
    spans = {0: (0, 290)}
    dense = mla.mla(sequences.queries[0], sequences.cache, *sequences.where(spans), SCALE, sequences.latent)
    assert same_bits(sequences.attend(spans, "sorted")[0], dense)
    assert not same_bits(sequences.attend(spans, "selection")[0], dense)


def test_what_was_not_selected_is_not_felt_wherever_pages_lie() -> None:
    one, other = Sequences(torch.bfloat16, [100, 50], seed=1), Sequences(torch.bfloat16, [100, 50], seed=1)
    for b in range(2):
        turned = other.tables[b][::-1]
        pages = other.cache[other.tables[b]].clone()
        other.cache[turned] = pages
        other.tables[b] = turned
    spans = {0: (99, 100)}
    expected = one.attend(spans, "sorted")[0]
    assert same_bits(expected, other.attend(spans, "sorted")[0])
    assert same_bits(one.score(spans)[0], other.score(spans)[0])
    for position in set(range(100)) - set(one.indices[0][99].tolist()):
        one.cache[one.tables[0][position // 16], position % 16] = torch.inf
    assert same_bits(expected, one.attend(spans, "sorted")[0])
    assert not same_bits(one.score(spans)[0], other.score(spans)[0])


def test_near_the_reference() -> None:
    sequences = Sequences(torch.float32, [300], heads=4)
    spans = {0: (0, 300)}
    q, where = sequences.queries[0], sequences.where(spans)
    plain = reference.index_scores(q, sequences.weights[0], sequences.cache, *where, SCALE)
    assert torch.allclose(sequences.score(spans)[0], plain[:, :300], rtol=1e-4, atol=2e-5)
    for order in sparse.ORDERS:
        expected = reference.attention(q, sequences.cache, sequences.indices[0], *where, SCALE, 18, order)
        assert torch.allclose(sequences.attend(spans, order)[0], expected, rtol=1e-4, atol=2e-5)


def test_rows_of_no_sequence_and_queries_without_a_selection() -> None:
    sequences = Sequences(torch.float32, [20])
    starts, lengths, tables = sequences.where({0: (18, 20)})
    q, indices = sequences.queries[0][17:20], sequences.indices[0][17:20].clone()
    indices[0] = -1
    weights = sequences.weights[0][17:20]
    out = sparse.attention(q, sequences.cache, indices, starts, lengths, tables, SCALE, 18, "sorted")
    assert not out[0].any()
    assert out[1].any()
    assert not out[2].any(), "no sequence has a third query"
    scores = sparse.index_scores(q, weights, sequences.cache, starts, lengths, tables, SCALE)
    assert (scores[2] == -torch.inf).all()


def test_wrong_arguments_are_named() -> None:
    cache, q, weights = torch.zeros(2, 16, 1, 6), torch.zeros(1, 2, 6), torch.zeros(1, 2)
    one, starts, table = (torch.tensor(x, dtype=torch.int32) for x in ([1], [0, 1], [[0]]))
    indices = torch.zeros(1, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"weights is \[1, 3\]"):
        sparse.index_scores(q, torch.zeros(1, 3), cache, starts, one, table, 1.0)
    with pytest.raises(TypeError, match="weights"):
        sparse.index_scores(q, weights.bfloat16(), cache, starts, one, table, 1.0)
    with pytest.raises(ValueError, match="do not fit together"):
        sparse.index_scores(q, weights, cache, starts, one * 17, table, 1.0)
    with pytest.raises(ValueError, match="do not fit together"):
        sparse.index_scores(q, weights, cache, starts, one, table + 2, 1.0)
    with pytest.raises(TypeError, match="positions"):
        sparse.index_topk(torch.zeros(1, 4), one, 2)
    with pytest.raises(ValueError, match="top_k is 0"):
        sparse.index_topk(torch.zeros(1, 4), one.long(), 0)
    with pytest.raises(ValueError, match="order 'random'"):
        sparse.attention(q, cache, indices, starts, one, table, 1.0, 4, "random")
    with pytest.raises(ValueError, match="indices reach position 1; the longest context has 1"):
        sparse.attention(q, cache, indices + 1, starts, one, table, 1.0, 4, "sorted")
    with pytest.raises(ValueError, match="do not fit together"):
        sparse.attention(q, cache, indices, starts, one, table + 2, 1.0, 4, "sorted")
    with pytest.raises(TypeError, match="indices"):
        sparse.attention(q, cache, indices.long(), starts, one, table, 1.0, 4, "sorted")
    assert sparse.attention(q[:0], cache, indices[:0], starts[:1], one[:0], table[:0], 1.0, 4, "sorted").shape == (
        0,
        2,
        4,
    )
    assert sparse.index_topk(torch.zeros(0, 4), one[:0].long(), 3).shape == (0, 3)
