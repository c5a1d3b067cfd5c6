"""attention.paged: the bits of the published order for every row, whatever else is in the call."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from aok_support import DTYPES, FAST_VARIANTS, KINDS, VARIANTS, awkward, narrowed, same_bits, threads, use_variant, wide
from oracle import attention as oracle
from tokenspeed_kernels_aok.cpu import attention

CONTEXTS = (1, 5, 16, 17, 255, 256, 257, 300, 777, 1024)
KERNELS = {"_attention": "_ATTENTION"}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use_variant(monkeypatch, request.param, attention, **KERNELS)
    return request.param


@dataclass
class Cache:
    """Some sequences, written into scattered pages of caches that hold NaN everywhere else."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    tables: torch.Tensor

    @classmethod
    def of(cls, keys: list[torch.Tensor], values: list[torch.Tensor], seed: int = 0) -> Cache:
        """`keys[b]`, `values[b]` [N_b,Hkv,D] in pages in an order drawn from `seed`."""
        _, heads, d = keys[0].shape
        wanted = [-(-len(k) // 16) for k in keys]
        pages = torch.randperm(sum(wanted) + 2, generator=torch.Generator().manual_seed(seed)).tolist()
        # Entries past a context are unspecified, here far outside of the cache.
        tables = torch.full((len(keys), max(wanted) + 1), -(10**6), dtype=torch.int32)
        caches = torch.full((2, len(pages), 16, heads, d), torch.nan, dtype=keys[0].dtype)
        for b, count in enumerate(wanted):
            tables[b, :count] = torch.tensor([pages.pop() for _ in range(count)])
            at = torch.arange(len(keys[b]))
            slots = tables[b].long()[at // 16] * 16 + at % 16
            attention.cache_write(keys[b], values[b], caches[0], caches[1], slots)
        return cls(keys, values, caches[0], caches[1], tables)

    @classmethod
    def random(cls, lengths: list[int], heads: int, d: int, dtype: torch.dtype, kind: str = "normal") -> Cache:
        keys = [awkward(kind, n, heads, d, dtype=dtype, seed=2 * b) for b, n in enumerate(lengths)]
        return cls.of(keys, [awkward(kind, n, heads, d, dtype=dtype, seed=2 * b + 1) for b, n in enumerate(lengths)])

    def run(
        self,
        q: list[torch.Tensor],
        contexts: list[int],
        rows: list[int] | None = None,
        *,
        scale: float,
        window: int = 0,
    ) -> list[torch.Tensor]:
        """Attention of the last queries q[i] of the first contexts[i] tokens of sequence rows[i], in one call."""
        counts = [len(part) for part in q]
        starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
        lengths = torch.tensor(contexts, dtype=torch.int32)
        tables = self.tables[rows or list(range(len(q)))]
        out = attention.attention(torch.cat(q), self.k_cache, self.v_cache, starts, lengths, tables, scale, window)
        return list(out.split(counts))

    def expected(self, b: int, q: torch.Tensor, position: int, scale: float, window: int = 0) -> torch.Tensor:
        """The oracle's row for the query q [Hq,D] at `position` of sequence b."""
        seen = slice(0, position + 1)
        row = oracle.attention_row(wide(q), wide(self.keys[b][seen]), wide(self.values[b][seen]), scale, window)
        return narrowed(row, q.dtype)


@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_rows_give_the_bits_of_the_oracle(dtype: torch.dtype) -> None:
    cache = Cache.random(list(CONTEXTS), 1, 32, dtype)
    q = awkward("normal", len(CONTEXTS), 2, 32, dtype=dtype, seed=99)
    for window in (0, 1, 17, 256):
        out = cache.run(list(q.split(1)), list(CONTEXTS), scale=0.3, window=window)
        for b, context in enumerate(CONTEXTS):
            assert same_bits(out[b][0], cache.expected(b, q[b], context - 1, 0.3, window)), (context, window)


@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_awkward_values_give_the_bits_of_the_oracle(kind: str, dtype: torch.dtype) -> None:
    cache = Cache.random([270], 2, 44, dtype, kind)
    q = awkward(kind, 5, 6, 44, dtype=dtype, seed=5)
    scale = 1e-3 if kind == "huge" else 0.15
    (out,) = cache.run([q], [270], scale=scale)
    for i in range(5):
        assert same_bits(out[i], cache.expected(0, q[i], 265 + i, scale)), i


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("d", "heads", "group"),
    [(64, 2, 7), (80, 1, 1), (96, 1, 3), (128, 2, 2), (192, 1, 4), (256, 1, 5), (2, 1, 1), (34, 1, 26)],
)
def test_head_and_group_sizes(d: int, heads: int, group: int, dtype: torch.dtype, variant: str) -> None:
    cache = Cache.random([40, 290], heads, d, dtype)
    q = [awkward("normal", n, heads * group, d, dtype=dtype, seed=n) for n in (3, 1)]
    out = cache.run(q, [40, 290], scale=d**-0.5)
    assert same_bits(out[0][0], cache.expected(0, q[0][0], 37, d**-0.5))
    assert same_bits(out[0][2], cache.expected(0, q[0][2], 39, d**-0.5))
    if variant != "portable" or d <= 64:
        assert same_bits(out[1][0], cache.expected(1, q[1][0], 289, d**-0.5))


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def prefilled(request: pytest.FixtureRequest) -> tuple[Cache, torch.Tensor]:
    """A sequence of 700 tokens, its queries, as a model of 4 query and 2 kv heads of 64 has them."""
    return Cache.random([700], 2, 64, request.param), awkward("normal", 700, 4, 64, dtype=request.param, seed=7)


SCALE = 0.125


@pytest.mark.parametrize("window", [0, 100])
def test_a_row_is_the_same_in_every_chunking(
    prefilled: tuple[Cache, torch.Tensor], window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, q = prefilled
    (whole,) = cache.run([q], [700], scale=SCALE, window=window)
    for position in (0, 100, 255, 256, 511, 512, 699):
        assert same_bits(whole[position], cache.expected(0, q[position], position, SCALE, window)), position
    for variant in FAST_VARIANTS:
        use_variant(monkeypatch, variant, attention, **KERNELS)
        for chunk in (1, 2, 3, 7, 64, 100, 256, 699):
            # Single tokens from a few places only: 700 calls tell no more.
            starts = range(0, 700, chunk) if chunk > 3 else (0, 15, 16, 254, 255, 256, 300, 511, 697)
            for start in starts:
                end = min(start + chunk, 700)
                (part,) = cache.run([q[start:end]], [end], scale=SCALE, window=window)
                assert same_bits(part, whole[start:end]), (variant, chunk, start)


def test_a_row_is_the_same_in_every_batch(
    prefilled: tuple[Cache, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, q = prefilled
    (whole,) = cache.run([q], [700], scale=SCALE)
    spans = [(699, 700), (0, 5), (250, 300), (17, 18), (300, 300), (511, 513), (3, 4), (0, 700), (256, 257)]
    for variant in FAST_VARIANTS:
        use_variant(monkeypatch, variant, attention, **KERNELS)
        for count in (1, 2):
            with threads(count):
                for order in (spans, spans[::-1], spans[2:5]):
                    out = cache.run([q[a:b] for a, b in order], [b for _, b in order], [0] * len(order), scale=SCALE)
                    for part, (a, b) in zip(out, order, strict=True):
                        assert same_bits(part, whole[a:b]), (variant, count, a, b)


def test_long_requests_are_split_between_chunks_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache.random([5000], 1, 16, torch.bfloat16)
    q = awkward("normal", 3, 2, 16, dtype=torch.bfloat16, seed=1)
    for window in (0, 2000):
        results = []
        for count in (1, 2, 3, 16):
            with threads(count):
                results += cache.run([q], [5000], scale=0.25, window=window)
        assert same_bits(results[0][2], cache.expected(0, q[2], 4999, 0.25, window))
        assert all(same_bits(one, results[0]) for one in results[1:])


def test_where_pages_lie_does_not_matter(prefilled: tuple[Cache, torch.Tensor]) -> None:
    cache, q = prefilled
    (whole,) = cache.run([q], [700], scale=SCALE)
    for seed in (1, 2):
        (moved,) = Cache.of(cache.keys, cache.values, seed).run([q], [700], scale=SCALE)
        assert same_bits(moved, whole)


def test_keys_that_a_row_does_not_see_touch_nothing() -> None:
    keys, values = (awkward("normal", 600, 1, 32, dtype=torch.float32, seed=seed) for seed in (0, 1))
    q = awkward("normal", 600, 6, 32, dtype=torch.float32, seed=2)
    (clean,) = Cache.of([keys], [values]).run([q], [600], scale=0.2, window=50)
    for poison in (torch.nan, torch.inf):
        bad_keys, bad_values = keys.clone(), values.clone()
        bad_keys[300], bad_values[300] = poison, poison
        (out,) = Cache.of([bad_keys], [bad_values]).run([q], [600], scale=0.2, window=50)
        assert same_bits(out[:300], clean[:300])
        assert same_bits(out[350:], clean[350:])
        assert out[300:350].isnan().any(dim=-1).all()


def test_row_ends_and_strides() -> None:
    cache = Cache.random([40], 2, 16, torch.bfloat16)
    qkv = awkward("normal", 5, 8 * 16 + 5, dtype=torch.bfloat16)[:, 5:]
    q = qkv[:, : 4 * 16].unflatten(1, (4, 16))
    args = (torch.tensor([0, 3], dtype=torch.int32), torch.tensor([40], dtype=torch.int32), cache.tables, 0.25)
    out = attention.attention(q, cache.k_cache, cache.v_cache, *args)
    assert same_bits(out, attention.attention(q.contiguous(), cache.k_cache, cache.v_cache, *args))
    assert not out[3:].any()  # rows of no sequence
    (alone,) = cache.run([q[:3]], [40], scale=0.25)
    assert same_bits(out[:3], alone)


def test_empty_calls() -> None:
    cache = Cache.random([3], 2, 16, torch.float32)
    none = torch.zeros(0, dtype=torch.int32)
    q = torch.empty(0, 4, 16)
    for starts, lengths, tables in (
        (torch.zeros(1, dtype=torch.int32), none, torch.zeros(0, 1, dtype=torch.int32)),
        (torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.zeros(1, 0, dtype=torch.int32)),
    ):
        assert attention.attention(q, cache.k_cache, cache.v_cache, starts, lengths, tables, 1.0).shape == (0, 4, 16)


def test_what_does_not_fit_is_refused() -> None:
    cache = Cache.random([40], 2, 16, torch.float32)
    q = torch.zeros(2, 4, 16)

    def call(starts: list[int], lengths: list[int], tables: torch.Tensor = cache.tables, window: int = 0) -> None:
        ints = (torch.tensor(x, dtype=torch.int32) for x in (starts, lengths))
        attention.attention(q, cache.k_cache, cache.v_cache, *ints, tables, 1.0, window)

    call([0, 2], [40])
    for starts, lengths in (
        ([0, 2], [1]),
        ([0, 2], [1000]),
        ([0, 3], [40]),
        ([1, 2], [40]),
        ([2, 0], [40]),
        ([0, 2], [49]),
    ):
        with pytest.raises(ValueError, match="do not fit together"):
            call(starts, lengths)
    with pytest.raises(ValueError, match="do not fit together"):
        call([0, 2], [40], cache.tables + 100)
    with pytest.raises(ValueError, match="query_starts is"):
        call([0, 1, 2], [40])
    with pytest.raises(ValueError, match="window is -1"):
        call([0, 2], [40], window=-1)
    with pytest.raises(TypeError, match=r"page_tables: torch\.int64"):
        call([0, 2], [40], cache.tables.long())
    q = q[:, :3]
    with pytest.raises(ValueError, match="heads must be a multiple"):
        call([0, 2], [40])


def test_no_less_accurate_than_torch() -> None:
    cache = Cache.random([1024], 2, 128, torch.float32)
    q = awkward("normal", 8, 4, 128, dtype=torch.float32, seed=3)
    (out,) = cache.run([q], [1024], scale=128**-0.5)
    mask = torch.ones(8, 1024, dtype=torch.bool).tril(1024 - 8)
    q, k, v = (x.transpose(0, 1) for x in (q, cache.keys[0], cache.values[0]))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    exact = sdpa(q.double(), k.double().repeat_interleave(2, 0), v.double().repeat_interleave(2, 0), attn_mask=mask)
    other = sdpa(q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0), attn_mask=mask)
    error = (out.transpose(0, 1) - exact).abs()
    assert error.max() <= 2 * (other - exact).abs().max()
    assert error.square().mean().sqrt() <= 1.5 * (other - exact).square().mean().sqrt()


def test_control_another_order_of_additions_is_seen(prefilled: tuple[Cache, torch.Tensor]) -> None:
    """torch's attention is right to within rounding, and the comparisons above tell it from the published order."""
    cache, q = prefilled
    (whole,) = cache.run([q], [700], scale=SCALE)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    k, v = (x[0].transpose(0, 1).repeat_interleave(2, 0) for x in (cache.keys, cache.values))
    other = sdpa(q.transpose(0, 1), k, v, is_causal=True, scale=SCALE).transpose(0, 1)
    assert torch.allclose(other.float(), whole.float(), atol=2e-2)
    assert not same_bits(other, whole)
