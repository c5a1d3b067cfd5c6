"""Tile tables: data, keyed by architecture. Nothing is tuned at run time.

The rule for a table of `gemm`: every entry has the same BLOCK_K and compiles to the same matrix instruction, of which
Triton issues one after another along ascending K into one fp32 accumulator (no entry splits K over warps, blocks or
clusters). An element's additions are then the same in every entry, and the entry may be chosen by M, N and the number
of multiprocessors. `scripts/triton_aot.py` reads the instruction back from the compiled code of every entry.

How the instruction is held fixed:

- sm80, sm86, sm89: `mma.sync` m16n8k16 is the only bf16 shape that Triton emits, whatever the tile and the warps.
- sm90: the N of `wgmma` m64nNk16 follows the tile. That all N add alike was measured by others (arXiv:2511.10909) and
  is said by no vendor. A tile is therefore cut into panels of 64 columns, each with an accumulator and a `tl.dot` of
  its own: m64n64k16 always. The 64 rows of the smallest tile are cheap for decode, where memory is the limit; narrower
  tiles would keep more multiprocessors busy there, and wait for a GPU that shows that they add alike.
- sm100: the same with `tcgen05.mma` at M = 128, N = 64, K = 16.
- gfx942: `v_mfma_f32_32x32x8`, which Triton picks for both tiles. Compiled only: no kernel spec offers it, since nobody
  has run it.

Sources of the sizes: shared memory per multiprocessor of the CUDA C programming guide (164 KB on sm80, 100 KB on sm86
and sm89, 228 KB on sm90 and sm100), 16 KB or more of weights in flight in every multiprocessor for small M, and no
register spilled at compile time. None of them has been timed on a GPU yet.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GemmTile:
    """One tile of the output: `block_m` rows and `panels` panels of `block_n` columns.

    `resident` is how many programs fit a multiprocessor: the persistent grid has at most that many for each.
    """

    block_m: int
    block_n: int
    panels: int
    num_warps: int
    num_stages: int
    resident: int = 1

    @property
    def columns(self) -> int:
        """Output columns of the tile."""
        return self.block_n * self.panels


@dataclass(frozen=True)
class GemmTable:
    """The tiles of one architecture for 16-bit operands, large ones first, and what they all share.

    `descriptors`: whether operands travel by tensor descriptors (TMA). `instruction` is the matrix instruction of every
    entry, as `scripts/triton_aot.py` reads it from the compiled code.
    """

    instruction: str
    block_k: int
    descriptors: bool
    tiles: tuple[GemmTile, ...]

    def choose(self, m: int, n: int, multiprocessors: int, groups: int = 1) -> GemmTile:
        """The largest tile that is at least half full in M and still gives every multiprocessor one; else the last."""
        for tile in self.tiles[:-1]:
            if m >= self._least_rows(tile, n, multiprocessors, groups):
                return tile
        return self.tiles[-1]

    def row_counts(self, n: int, multiprocessors: int, groups: int = 1) -> tuple[int, ...]:
        """For each tile that some number of rows chooses the least such number, ascending; the first is 1."""
        least = [self._least_rows(tile, n, multiprocessors, groups) for tile in self.tiles[:-1]]
        # A larger tile comes first, so that one which needs as many rows as a smaller one leaves that one nothing.
        chosen = [count for at, count in enumerate(least) if count < min(least[:at], default=count + 1)]
        return tuple(sorted({1, *chosen}))

    @staticmethod
    def _least_rows(tile: GemmTile, n: int, multiprocessors: int, groups: int) -> int:
        """The least M that makes `tile` half full and gives every multiprocessor one."""
        across = groups * -(-n // tile.columns)
        return max(tile.block_m // 2, (-(-multiprocessors // across) - 1) * tile.block_m) + 1


_AMPERE_SMALL = (
    GemmTile(64, 128, 1, num_warps=4, num_stages=4),
    GemmTile(64, 64, 1, num_warps=4, num_stages=4),
    GemmTile(32, 64, 1, num_warps=4, num_stages=5, resident=2),
    GemmTile(16, 64, 1, num_warps=4, num_stages=5, resident=2),
)
_SMALL_SHARED = GemmTable("m16n8k16", 64, False, (GemmTile(128, 128, 1, num_warps=8, num_stages=3), *_AMPERE_SMALL))

GEMM: dict[str, GemmTable] = {
    "sm80": GemmTable(
        "m16n8k16",
        64,
        False,
        (
            GemmTile(128, 256, 1, num_warps=8, num_stages=3),
            GemmTile(128, 128, 1, num_warps=8, num_stages=4),
            *_AMPERE_SMALL,
        ),
    ),
    "sm86": _SMALL_SHARED,
    "sm89": _SMALL_SHARED,
    "sm90": GemmTable(
        "m64n64k16",
        64,
        True,
        (
            GemmTile(128, 64, 4, num_warps=8, num_stages=4),
            GemmTile(128, 64, 2, num_warps=8, num_stages=4),
            GemmTile(64, 64, 2, num_warps=4, num_stages=4, resident=2),
            GemmTile(64, 64, 1, num_warps=4, num_stages=6, resident=2),
        ),
    ),
    "sm100": GemmTable(
        "m128n64k16",
        64,
        True,
        (
            GemmTile(128, 64, 4, num_warps=8, num_stages=4),
            GemmTile(128, 64, 2, num_warps=4, num_stages=4),
            GemmTile(128, 64, 1, num_warps=4, num_stages=4, resident=2),
        ),
    ),
    "gfx942": GemmTable(
        "m32n32k8",
        64,
        False,
        (
            GemmTile(128, 128, 1, num_warps=8, num_stages=2),
            GemmTile(64, 64, 1, num_warps=4, num_stages=2),
        ),
    ),
}

_FLOAT32_TILES = (GemmTile(64, 64, 1, num_warps=4, num_stages=2),)
_FLOAT32 = GemmTable("fma", 32, False, _FLOAT32_TILES)
GEMM_FLOAT32: dict[str, GemmTable] = dict.fromkeys(GEMM, _FLOAT32) | {
    "gfx942": GemmTable("m32n32k2", 32, False, _FLOAT32_TILES)
}
"""fp32 operands: plain FMAs (no TF32; gfx942 has fp32 in its matrix unit), one tile. For checks and small models."""


@dataclass(frozen=True)
class AttentionTile:
    """How `attention.paged` cuts its work; one entry for each architecture and head size, prefill and decode alike.

    `block_m` rows (query tokens times the heads of a group) meet `block_n` keys at a time. `split` keys, counted from
    position 0, are reduced on their own and folded in ascending order: it is part of the bit order.
    """

    block_m: int
    block_n: int
    split: int
    num_warps: int
    num_stages: int


SPLIT = 256
"""Keys in a split; also the chunk of the CPU kernels."""

_HOPPER = {
    64: AttentionTile(64, 64, SPLIT, num_warps=4, num_stages=3),
    128: AttentionTile(64, 32, SPLIT, num_warps=4, num_stages=3),
    256: AttentionTile(64, 32, SPLIT, num_warps=8, num_stages=2),
}
_BLACKWELL = _HOPPER | {256: AttentionTile(64, 16, SPLIT, num_warps=8, num_stages=2)}
_AMPERE = {
    64: AttentionTile(64, 32, SPLIT, num_warps=4, num_stages=3),
    128: AttentionTile(64, 32, SPLIT, num_warps=8, num_stages=2),
    256: AttentionTile(32, 32, SPLIT, num_warps=8, num_stages=2),
}
ATTENTION: dict[str, dict[int, AttentionTile]] = {
    "sm80": _AMPERE,
    "sm86": _AMPERE,
    "sm89": _AMPERE,
    "sm90": _HOPPER,
    "sm100": _BLACKWELL,
    "gfx942": _AMPERE,
}
"""Tiles for 16-bit caches by architecture and the largest (padded) head size that they serve."""

ATTENTION_FLOAT32 = AttentionTile(32, 16, SPLIT, num_warps=8, num_stages=2)
"""fp32 caches, on every architecture."""


def attention_tile(arch: str, head_dim: int, itemsize: int) -> AttentionTile:
    """The tile for heads of `head_dim` features of `itemsize` bytes. Raises KeyError for an unknown arch."""
    if itemsize == 4:
        return ATTENTION_FLOAT32
    return next(tile for largest, tile in ATTENTION[arch].items() if head_dim <= largest)
