"""attention.mla_paged and cache.write_latent: the bits of the published order, whatever shares the call."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aok_support import DTYPES, FAST_VARIANTS, VARIANTS, awkward, narrowed, same_bits, threads, use_variant, wide
from latent_support import LatentSequences, Spans, by_sequence, rows_of
from oracle import attention as oracle
from tokenspeed.kernels.reference import mla as reference
from tokenspeed_kernels_aok.cpu import attention, mla

SCALE = 0.17


class Sequences(LatentSequences):
    """With attention over them, and the oracle's."""

    def __init__(
        self, dtype: torch.dtype, lengths: list[int], *, heads: int = 5, c: int = 86, r: int = 70, seed: int = 0
    ):
        super().__init__(dtype, lengths, heads=heads, c=c, r=r, seed=seed)

    def run(self, spans: Spans) -> list[torch.Tensor]:
        """Attention of the queries of some sequences in one call."""
        out = mla.mla(rows_of(self.queries, spans), self.cache, *self.where(spans), SCALE, self.latent)
        return by_sequence(out, spans)

    def expected(self, b: int, positions: list[int]) -> torch.Tensor:
        """The oracle of attention.paged with one kv head whose values are the entries themselves."""
        entries = wide(self.entries[b])[:, None]
        rows = oracle.attention_rows(wide(self.queries[b])[positions], entries, entries, np.array(positions), SCALE)
        return narrowed(rows[..., : self.latent], self.dtype)


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use_variant(monkeypatch, request.param, mla, _latent_attention="_ATTENTION", _latent_write="_WRITE")
    return request.param


@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_the_oracle(dtype: torch.dtype) -> None:
    sequences = Sequences(dtype, [300, 40], c=22, r=18)
    (long, short) = sequences.run({0: (250, 300), 1: (0, 40)})
    positions = [250, 255, 256, 257, 299]
    assert same_bits(long[[p - 250 for p in positions]], sequences.expected(0, positions))
    assert same_bits(short[[0, 15, 16, 39]], sequences.expected(1, [0, 15, 16, 39]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 5, 16, 20])
def test_decode_is_prefill_is_chunks(dtype: torch.dtype, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's bits are the same in a whole prefill, in a chunk of any length, alone, and beside others."""
    sequences = Sequences(dtype, [530, 33, 270], heads=heads)
    with threads(1):
        whole = [sequences.run({b: (0, n)})[0] for b, n in enumerate(sequences.lengths)]
    for name in FAST_VARIANTS:
        use_variant(monkeypatch, name, mla, _latent_attention="_ATTENTION")
        for count in (1, 2):
            with threads(count):
                for position in (0, 15, 255, 256, 529):
                    assert same_bits(sequences.run({0: (position, position + 1)})[0][0], whole[0][position]), name
                for begin, end in ((0, 7), (250, 263), (500, 530)):
                    assert same_bits(sequences.run({0: (begin, end)})[0], whole[0][begin:end]), name
                together = sequences.run({2: (269, 270), 0: (100, 140), 1: (0, 33)})
                assert same_bits(together[0][0], whole[2][269])
                assert same_bits(together[1], whole[0][100:140])
                assert same_bits(together[2], whole[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_paged_attention_with_entries_for_keys_and_values(dtype: torch.dtype) -> None:
    """The other kernel, over its own layout, gives the same bits."""
    sequences = Sequences(dtype, [290], heads=6, c=48, r=32)
    k_cache, v_cache = torch.zeros(2, 19, 16, 1, 48, dtype=dtype).unbind()
    entries = sequences.entries[0].unsqueeze(1)
    attention.cache_write(entries, entries, k_cache, v_cache, torch.arange(290))
    ints = [torch.tensor(x, dtype=torch.int32) for x in ([0, 290], [290], [list(range(19))])]
    out = attention.attention(sequences.queries[0], k_cache, v_cache, *ints, SCALE)
    assert same_bits(sequences.run({0: (0, 290)})[0], out[..., :32])


def test_pages_lie_anywhere_and_what_follows_is_not_seen() -> None:
    one, other = Sequences(torch.bfloat16, [100, 50], seed=1), Sequences(torch.bfloat16, [100, 50], seed=1)
    for b in range(2):
        turned = other.tables[b][::-1]
        pages = other.cache[other.tables[b]].clone()
        other.cache[turned] = pages
        other.tables[b] = turned
    assert same_bits(one.run({0: (60, 100)})[0], other.run({0: (60, 100)})[0])
    expected = one.run({0: (0, 40)})[0]
    one.cache[one.tables[0][3:]] = torch.inf  # positions from 48 on
    assert same_bits(one.run({0: (0, 40)})[0], expected)


def test_near_the_reference() -> None:
    sequences = Sequences(torch.float32, [300], heads=4)
    ints = [torch.tensor(x, dtype=torch.int32) for x in ([0, 300], [300], sequences.tables)]
    plain = reference.attention(sequences.queries[0], sequences.cache, *ints, SCALE, 70)
    assert torch.allclose(sequences.run({0: (0, 300)})[0], plain, rtol=1e-4, atol=2e-5)


def test_writes_are_copies_and_negative_slots_are_skipped() -> None:
    cache = torch.zeros(3, 16, 1, 6, dtype=torch.bfloat16)
    latent = awkward("special", 3, 6, dtype=torch.bfloat16)
    mla.write_latent(latent, cache, torch.tensor([17, -1, 47]))
    assert same_bits(cache.view(48, 6)[[17, 47]], latent[[0, 2]])
    cache.view(48, 6)[[17, 47]] = 0
    assert not cache.any()


def test_wrong_arguments_are_named() -> None:
    cache = torch.zeros(2, 16, 1, 6)
    with pytest.raises(ValueError, match="slots reach 32"):
        mla.write_latent(torch.zeros(1, 6), cache, torch.tensor([32]))
    with pytest.raises(ValueError, match=r"latent is \[1, 4\]"):
        mla.write_latent(torch.zeros(1, 4), cache, torch.tensor([0]))
    with pytest.raises(ValueError, match="C even"):
        mla.write_latent(torch.zeros(1, 5), torch.zeros(2, 16, 1, 5), torch.tensor([0]))
    one = torch.tensor([1], dtype=torch.int32)
    starts, table = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    q = torch.zeros(1, 2, 6)
    with pytest.raises(ValueError, match="the latent part 7"):
        mla.mla(q, cache, starts, one, table, 1.0, 7)
    with pytest.raises(ValueError, match="do not fit together"):
        mla.mla(q, cache, starts, one * 0, table, 1.0, 4)
    with pytest.raises(ValueError, match="do not fit together"):
        mla.mla(q, cache, starts, one * 17, table, 1.0, 4)
    with pytest.raises(ValueError, match="do not fit together"):
        mla.mla(q, cache, starts, one, table + 2, 1.0, 4)
    with pytest.raises(TypeError, match="context_lens"):
        mla.mla(q, cache, starts, one.long(), table, 1.0, 4)
    assert mla.mla(q[:0], cache, starts[:1], one[:0], table[:0], 1.0, 4).shape == (0, 2, 4)
