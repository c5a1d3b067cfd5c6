"""cache.write: what lies where in a page of the layout `aok_pairs`, and what a write leaves alone."""

from __future__ import annotations

import pytest
import torch

from aok_support import DTYPES, VARIANTS, bits, same_bits, threads, use_variant
from tokenspeed_kernels_aok.cpu import attention

PAGES = 5
HEAD_SIZES = (2, 6, 32, 44, 64, 80, 96, 128, 192, 256)


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use_variant(monkeypatch, request.param, attention, _cache_write="_CACHE_WRITE")
    return request.param


def random_bits(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Every bit random, so NaN, infinities and denormals are among the values: a copy must not change any."""
    generator = torch.Generator().manual_seed(seed)
    integer = torch.int16 if dtype == torch.bfloat16 else torch.int32
    limits = torch.iinfo(integer)
    return torch.randint(limits.min, limits.max + 1, shape, dtype=integer, generator=generator).view(dtype)


def unpack(k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages of `aok_pairs` as [P, 16, Hkv, D] in the natural order, by the description of the layout alone."""
    pages, slots, heads, d = k_cache.shape
    k, v = k_cache.flatten(1), v_cache.flatten(1).view(pages, heads, slots, d)
    if k_cache.dtype == torch.float32:
        return k.view(pages, heads, d, slots).permute(0, 3, 1, 2), v.transpose(1, 2)
    keys = k.view(pages, heads, d // 2, slots, 2).permute(0, 3, 1, 2, 4).flatten(3)
    blocks = []
    for start in range(0, d, 32):
        block = v[..., start : min(start + 32, d)]
        blocks.append(torch.cat([block[..., 0::2], block[..., 1::2]], dim=-1))
    return keys, torch.cat(blocks, dim=-1).transpose(1, 2)


@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_goes_to_its_place_and_nowhere_else(dtype: torch.dtype) -> None:
    slots = torch.tensor([3, -1, 79, 16, 0, -5, 47])
    for d in HEAD_SIZES:
        k, v = (random_bits(len(slots), 3, d, dtype=dtype, seed=seed) for seed in (0, 1))
        before = [random_bits(PAGES, 16, 3, d, dtype=dtype, seed=seed) for seed in (2, 3)]
        caches = [cache.clone() for cache in before]
        attention.cache_write(k, v, *caches, slots)
        for got, old, new in zip(unpack(*caches), unpack(*before), (k, v), strict=True):
            expected = old.clone()
            for token, slot in enumerate(slots.tolist()):
                if slot >= 0:
                    expected[slot // 16, slot % 16] = new[token]
            assert same_bits(got, expected), d


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_threads_and_one_by_one(dtype: torch.dtype) -> None:
    tokens, heads, d = 70, 8, 64
    qkv = random_bits(tokens, 4 * heads * d, dtype=dtype, seed=0)
    k, v = (part.unflatten(1, (heads, d)) for part in qkv.split([2 * heads * d, heads * d, heads * d], dim=1)[1:])
    slots = torch.randperm(PAGES * 16)[:tokens]
    results = []
    for count in (1, 2):
        with threads(count):
            caches = torch.zeros(2, PAGES, 16, heads, d, dtype=dtype)
            attention.cache_write(k, v, caches[0], caches[1], slots)
            results.append(caches)
    alone = torch.zeros_like(results[0])
    for token in range(tokens):
        one = slice(token, token + 1)
        attention.cache_write(k[one].contiguous(), v[one].contiguous(), alone[0], alone[1], slots[one])
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], alone)
    # Control: one bit of one value is one word of the cache.
    bits(qkv)[0, 2 * heads * d] ^= 1
    attention.cache_write(k, v, alone[0], alone[1], slots)
    assert (bits(alone) != bits(results[0])).sum() == 1


def test_keys_and_values_interleaved_in_one_allocation() -> None:
    k, v = (random_bits(4, 2, 16, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    slots = torch.tensor([0, 17, 40, 5])
    both = torch.zeros(PAGES, 2, 16, 2, 16, dtype=torch.bfloat16)
    apart = torch.zeros(2, PAGES, 16, 2, 16, dtype=torch.bfloat16)
    attention.cache_write(k, v, both[:, 0], both[:, 1], slots)
    attention.cache_write(k, v, apart[0], apart[1], slots)
    assert same_bits(both.transpose(0, 1), apart)


def test_nothing_to_write() -> None:
    cache = torch.zeros(PAGES, 16, 2, 16)
    attention.cache_write(torch.empty(0, 2, 16), torch.empty(0, 2, 16), cache, cache, torch.empty(0, dtype=torch.int64))
    assert not cache.any()


def test_what_does_not_fit_is_refused() -> None:
    x, cache, slots = torch.zeros(1, 2, 16), torch.zeros(PAGES, 16, 2, 16), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="the cache has 80 slots"):
        attention.cache_write(x, x, cache, cache, torch.tensor([80]))
    with pytest.raises(ValueError, match=r"expected \[1, 2, 16\]"):
        attention.cache_write(x[:, :1], x, cache, cache, slots)
    with pytest.raises(ValueError, match="D even"):
        attention.cache_write(x[..., :15], x[..., :15], cache[..., :15], cache[..., :15], slots)
    with pytest.raises(ValueError, match="page must be contiguous"):
        attention.cache_write(x, x, cache.transpose(1, 2).contiguous().transpose(1, 2), cache, slots)
    with pytest.raises(TypeError, match=r"expected torch\.int64"):
        attention.cache_write(x, x, cache, cache, slots.int())
    with pytest.raises(TypeError, match=r"expected torch\.float32"):
        attention.cache_write(x.bfloat16(), x, cache, cache, slots)
    with pytest.raises(TypeError, match="bfloat16 and float32"):
        attention.cache_write(x.half(), x.half(), cache.half(), cache.half(), slots)
