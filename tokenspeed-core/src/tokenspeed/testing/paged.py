"""Cases over the paged KV cache: queries of sequences for attention, tokens for what writes the cache.

A unit is one token of one sequence. Units of a call that follow each other in one sequence make up one chunk of it, so
an arrangement says what is a decode row and what is a prefill chunk. The cache is filled by the kernel's partner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from tokenspeed.kernels.operators import PAGE_SIZE
from tokenspeed.testing.cases import Results, Side
from tokenspeed.testing.inputs import ATTENTION_SCALE, CANCEL, LOUD, Recipe, cancel_pairs, characterise, generator_of
from tokenspeed.testing.memory import circumstances, place
from tokenspeed.testing.subject import Subject

LENGTHS = (1, 5, 16, 19, 33)
"""Tokens of the compared sequences: within a page, a page, beyond it. The last sequence is loud and not compared."""

LOUD_LENGTH = 40
_GARBAGE_PAGE = 1 << 30
_EXTRA_PAGES = 3


@dataclass(frozen=True)
class Family:
    """The roles of a pair of operators: what is written, by role of the writer, and into which caches."""

    written: tuple[str, ...]
    caches: tuple[str, ...]


_KV = Family(("k", "v"), ("k_cache", "v_cache"))
_LATENT = Family(("latent",), ("cache",))

FAMILIES = {
    "attention.paged": _KV,
    "cache.write": _KV,
    "attention.mla_paged": _LATENT,
    "attention.index_scores": _LATENT,
    "attention.sparse_paged": _LATENT,
    "cache.write_latent": _LATENT,
}


class PagedCase:
    """Sequences with a cache. Sizes: Hq, Hkv, D, or of compressed entries Hq or Hi, C, R, k; scalars: window, lengths,
    order."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.family = FAMILIES[recipe.operator]
        sizes = recipe.sizes
        self.kv_heads, self.width = (sizes["Hkv"], sizes["D"]) if self.family is _KV else (1, sizes["C"])
        lengths = tuple(recipe.scalars.get("lengths", LENGTHS))
        self.lengths = (*lengths, LOUD_LENGTH)
        self.tokens = [(s, p) for s, length in enumerate(self.lengths) for p in range(length)]
        self.starts = [sum(self.lengths[:s]) for s in range(len(self.lengths))]
        generator = generator_of(recipe)
        entry = (self.kv_heads, self.width) if self.family is _KV else (self.width,)
        heads = sizes["Hi"] if "Hi" in sizes else sizes["Hq"]
        shapes = {"q": (heads, self.width), **dict.fromkeys(self.family.written, entry)}
        self.rows: dict[str, torch.Tensor] = {}
        for role, shape in shapes.items():
            values = torch.randn((len(self.tokens), *shape), generator=generator)
            values = characterise(values, recipe.character, ATTENTION_SCALE)
            if recipe.character == "accumulation":
                # All keys count alike, so the result is the mean of the values: 1 so often, then 3.
                values = torch.ones_like(values) if role != "v" else self._steps(values)
            if recipe.character == CANCEL:
                # Keys that count nearly alike, and values that cancel from one token to the next.
                values = values * 0.2
                if role not in ("q", "k"):
                    cancel_pairs(values, 0, generator)
            values[self.starts[-1] :] *= LOUD
            self.rows[role] = values.to(getattr(torch, recipe.dtypes["x" if role == "q" else "kv"]))
        if "Hi" in sizes:
            # Of both signs, and yet no sum that is small beside its terms.
            self.rows["weights"] = torch.rand(len(self.tokens), heads, generator=generator) - 0.2
        # Of each query the positions selected for it, in no order.
        self.selected = [torch.randperm(p + 1, generator=generator)[: sizes.get("k", 0)] for _, p in self.tokens]

    def _steps(self, values: torch.Tensor) -> torch.Tensor:
        half = torch.tensor([p < self.lengths[s] // 2 for s, p in self.tokens])
        return torch.where(half[:, None, None], 1.0, 3.0).expand_as(values).clone()

    @property
    def subjects(self) -> tuple[int, ...]:
        """Every token but those of the loud sequence."""
        return tuple(range(self.starts[-1]))

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The tokens of the loud sequence."""
        return tuple(range(self.starts[-1], len(self.tokens)))

    @cached_property
    def page_counts(self) -> list[int]:
        """Pages of each sequence."""
        return [-(-length // PAGE_SIZE) for length in self.lengths]

    def page_tables(self, seed: int) -> list[list[int]]:
        """Which pages each sequence has; 0 gives them in order, another number shuffles them."""
        total = sum(self.page_counts) + _EXTRA_PAGES
        order = list(range(total))
        if seed:
            order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
        free = iter(order)
        return [[next(free) for _ in range(count)] for count in self.page_counts]

    def slots(self, units: Sequence[int], seed: int) -> torch.Tensor:
        """Slot of each unit, int64."""
        tables = self.page_tables(seed)
        found = [self.tokens[unit] for unit in units]
        return torch.tensor(
            [tables[s][p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for s, p in found], dtype=torch.int64
        )

    def empty_caches(self, filler: float, device: torch.device) -> dict[str, torch.Tensor]:
        """The caches by role, holding `filler` everywhere."""
        pages = sum(self.page_counts) + _EXTRA_PAGES
        shape = (pages, PAGE_SIZE, self.kv_heads, self.width)
        dtype = getattr(torch, self.recipe.dtypes["kv"])
        return {role: torch.full(shape, filler, dtype=dtype, device=device) for role in self.family.caches}

    def filled_caches(self, writer: Subject, side: Side) -> dict[str, torch.Tensor]:
        """Caches with every token of every sequence in its slot."""
        caches = self.empty_caches(side.filler, writer.device)
        written = {role: self.rows[role].to(writer.device) for role in self.family.written}
        slots = self.slots(range(len(self.tokens)), side.pages).to(writer.device)
        writer.call({**written, **caches, "slots": slots})
        return caches

    def attention_arguments(
        self, units: Sequence[int], side: Side, caches: Mapping[str, torch.Tensor]
    ) -> dict[str, Any]:
        """The arguments of one call of the attention."""
        device = caches[self.family.caches[0]].device
        chunks = self._chunks(units)
        tables = self.page_tables(side.pages)
        width = max((self.page_counts[s] for s, _, _ in chunks), default=0) + (1 if side.padding else 0)
        # What stands past a context is unspecified, so it is a page that is not there.
        filled = [
            [*tables[s][: -(-end // PAGE_SIZE)], *[_GARBAGE_PAGE] * (width - -(-end // PAGE_SIZE))]
            for s, _, end in chunks
        ]
        starts = [0]
        for _, first, end in chunks:
            starts.append(starts[-1] + end - first)
        index = torch.tensor(units, dtype=torch.int64)
        q, indices = self.rows["q"][index], self._indices(units, side.pages)
        weights = self.rows["weights"][index] if "weights" in self.rows else torch.empty(len(units), 0)
        if side.padding:
            # As the engine pads a decode step: rows of no sequence, and sequences of no row and no context.
            q, weights, indices = (
                torch.cat((rows, torch.full((side.padding, *rows.shape[1:]), filler, dtype=rows.dtype)))
                for rows, filler in ((q, torch.nan), (weights, torch.nan), (indices, _GARBAGE_PAGE))
            )
            starts += [starts[-1]] * side.padding
            chunks += [(0, 0, 0)] * side.padding
            filled += [[_GARBAGE_PAGE] * width] * side.padding

        def int32(values: Any, *shape: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device).reshape(shape)

        return {
            "q": place(q.to(device), side.layout).view,
            **caches,
            "query_starts": int32(starts, len(starts)),
            "context_lens": int32([end for _, _, end in chunks], len(chunks)),
            "page_tables": int32(filled, len(chunks), width),
            "scale": self.width**-0.5,
            "window": self.recipe.scalars.get("window", 0),
            "latent_dim": self.recipe.sizes.get("R", 0),
            "weights": place(weights.to(device), side.layout).view,
            "indices": place(indices.to(device), side.layout).view,
            "order": self.recipe.scalars.get("order"),
        }

    def _indices(self, units: Sequence[int], seed: int) -> torch.Tensor:
        """Selected positions int32[n,k]. Another seed gives another order, where the order must not matter."""
        indices = torch.full((len(units), self.recipe.sizes.get("k", 0)), -1, dtype=torch.int32)
        for row, unit in zip(indices, units, strict=True):
            chosen = self.selected[unit]
            if seed and self.recipe.scalars.get("order") == "sorted":
                chosen = chosen[torch.randperm(len(chosen), generator=torch.Generator().manual_seed(seed))]
            row[: len(chosen)] = chosen
        return indices

    def _chunks(self, units: Sequence[int]) -> list[tuple[int, int, int]]:
        """(sequence, first position, position after the last) of each run of tokens that follow each other."""
        chunks: list[tuple[int, int, int]] = []
        for unit in units:
            s, p = self.tokens[unit]
            if chunks and chunks[-1][0] == s and chunks[-1][2] == p:
                chunks[-1] = (s, chunks[-1][1], p + 1)
            else:
                chunks.append((s, p, p + 1))
        return chunks


class AttentionCase(PagedCase):
    """Units are query rows."""

    def evaluate(self, subject: Subject, side: Side) -> Results:
        """Fill a cache with the partner and run the calls of a side on it."""
        assert subject.partner is not None
        results: dict[int, tuple[torch.Tensor, ...]] = {}
        with circumstances(threads=side.threads, fresh=side.fresh):
            caches = self.filled_caches(subject.partner, side)
            for units in side.calls:
                (out,) = subject.call(self.attention_arguments(units, side, caches))
                for at, unit in enumerate(units):
                    results[unit] = self._result(out[at].to("cpu"), unit)
        return results

    def _result(self, row: torch.Tensor, unit: int) -> tuple[torch.Tensor, ...]:
        """A row; of scores those that the query sees, and whether the others are -infinity, however many there are."""
        if self.recipe.operator != "attention.index_scores":
            return (row,)
        seen = self.tokens[unit][1] + 1
        return row[:seen], (row[seen:] == -torch.inf).all()

    def arguments(self, subject: Subject, side: Side) -> dict[str, Any]:
        """The arguments of the first call."""
        assert subject.partner is not None
        caches = self.filled_caches(subject.partner, side)
        return self.attention_arguments(side.calls[0], side, caches)


class WriteCase(PagedCase):
    """Units are tokens; what a side computes is what its calls leave in the cache, as unit 0, read by the partner.

    Raw caches are compared where the layout is the same, which is between two sides of one kernel.
    """

    def evaluate(self, subject: Subject, side: Side) -> Results:
        """Write in the order of the side's calls; the bytes of both caches."""
        with circumstances(threads=side.threads, fresh=side.fresh):
            caches = self.empty_caches(side.filler, subject.device)
            for units in side.calls:
                subject.call(self._arguments(units, side, caches))
        return {0: tuple(cache.to("cpu") for cache in caches.values())}

    def arguments(self, subject: Subject, side: Side) -> dict[str, Any]:
        """The arguments of the first call."""
        return self._arguments(side.calls[0], side, self.empty_caches(side.filler, subject.device))

    def read_back(self, subject: Subject, side: Side) -> Results:
        """Write everything, then attend with the partner: what the cache is for."""
        assert subject.partner is not None
        caches = self.empty_caches(side.filler, subject.device)
        for units in side.calls:
            subject.call(self._arguments(units, side, caches))
        everything = tuple(range(len(self.tokens)))
        (out,) = subject.partner.call(self.attention_arguments(everything, side, caches))
        return {unit: (out[unit].to("cpu"),) for unit in self.subjects}

    def _arguments(self, units: Sequence[int], side: Side, caches: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        device = caches[self.family.caches[0]].device
        index = torch.tensor(units, dtype=torch.int64)
        slots = self.slots(units, side.pages)
        written = {role: self.rows[role][index] for role in self.family.written}
        if side.padding:
            # Tokens that go nowhere stand first, in the middle of nothing.
            slots = torch.cat((torch.full((side.padding,), -1, dtype=torch.int64), slots))
            for role, rows in written.items():
                nowhere = torch.full((side.padding, *rows.shape[1:]), torch.nan, dtype=rows.dtype)
                written[role] = torch.cat((nowhere, rows))
        placed = {role: place(rows.to(device), side.layout).view for role, rows in written.items()}
        return {**placed, **caches, "slots": slots.to(device)}
