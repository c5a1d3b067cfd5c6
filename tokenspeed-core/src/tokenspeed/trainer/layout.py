"""Which rows of a trainer's batch are which token of which sequence.

A trainer hands over a rectangle [B,S]: one sequence in a row, padded left or right, or several packed one after another
(told apart by `position_ids` that start again, or by `cu_seq_lens_q`). The engine's operators want ragged sequences
with positions from 0. `Layout` is the translation, made once for a forward pass and read by every layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tokenspeed.kernels.operators import PAGE_SIZE


@dataclass(frozen=True)
class Layout:
    """Indices of one forward pass over B rows of S query columns and L key columns (L > S when a cache is read).

    `position_ids` int64[B,S] (0 for padding). `query_rows` int64[Tq] are the tokens among B*S rows and `key_rows`
    int64[Tk] those among B*L, both sequence after sequence; None where that is every row in order. `longest` is the
    length of the longest sequence. The others are the arguments of `cache.write` and `attention.paged` over a cache of
    `pages` pages made for this pass.
    """

    position_ids: torch.Tensor
    query_rows: torch.Tensor | None
    key_rows: torch.Tensor | None
    key_columns: int
    longest: int
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    page_tables: torch.Tensor
    slots: torch.Tensor
    pages: int

    @property
    def paging(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """Query starts, context lengths, page tables, slots and pages: as `trainer.operators` take them."""
        return self.query_starts, self.context_lens, self.page_tables, self.slots, self.pages

    def of_queries(self, rows: torch.Tensor) -> torch.Tensor:
        """The query tokens among rows [B*S,...]: [Tq,...]."""
        return rows if self.query_rows is None else rows[self.query_rows]

    def of_keys(self, rows: torch.Tensor) -> torch.Tensor:
        """The key tokens among rows [B*L,...]: [Tk,...]."""
        return rows if self.key_rows is None else rows[self.key_rows]

    def padded(self, queries: torch.Tensor, count: int) -> torch.Tensor:
        """The opposite of `of_queries` for `count` = B*S rows, with zeros where there is padding."""
        if self.query_rows is None:
            return queries
        return queries.new_zeros(count, *queries.shape[1:]).index_copy(0, self.query_rows, queries)


def make_layout(
    shape: tuple[int, int],
    device: torch.device,
    *,
    past: int = 0,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens: torch.Tensor | None = None,
    max_positions: int | None = None,
) -> Layout:
    """The layout of a batch of `shape` (B, S) behind `past` cached columns.

    `attention_mask` [B, past + S] is 1 for tokens and 0 for padding. Raises ValueError where there is no token, where a
    row does not hold whole sequences, where one is longer than `max_positions`, or where `position_ids` place a token
    elsewhere than the engine would.
    """
    batch, columns = shape
    if not batch or not columns:
        raise ValueError(f"the batch is empty: {batch} rows of {columns} tokens; leave the call out, or pad it")
    real = _real(attention_mask, batch, past + columns)
    given = None if position_ids is None else _positions(position_ids, batch, columns)
    if past and (cu_seq_lens is not None):
        raise ValueError("cu_seq_lens_q was given together with a cache; packed sequences start without one")
    resets = given if given is not None and not past else None
    key_rows = np.flatnonzero(real)
    starts = _starts(real, key_rows, resets, cu_seq_lens)
    lengths = np.diff(np.append(starts, len(key_rows)))
    longest = int(lengths.max(initial=0))
    if max_positions is not None and longest > max_positions:
        raise ValueError(
            f"a sequence has {longest} tokens, the engine's context ends at {max_positions} (max_position_embeddings)"
        )
    positions = np.arange(len(key_rows)) - np.repeat(starts, lengths)

    is_query = key_rows % (past + columns) >= past
    query_rows = key_rows[is_query] // (past + columns) * columns + key_rows[is_query] % (past + columns) - past
    full = np.zeros((batch, columns), dtype=np.int64)
    full.reshape(-1)[query_rows] = positions[is_query]
    _check_positions(given, full, query_rows)
    counts = np.add.reduceat(is_query, starts) if len(starts) else np.zeros(0, dtype=np.int64)
    pages = -(-lengths // PAGE_SIZE)
    first_page = np.cumsum(pages) - pages
    width = int(pages.max(initial=1))
    return Layout(
        position_ids=torch.from_numpy(full).to(device),
        query_rows=_rows(query_rows, batch * columns, device),
        key_rows=_rows(key_rows, real.size, device),
        key_columns=past + columns,
        longest=longest,
        query_starts=_ints(np.concatenate(([0], np.cumsum(counts))), device),
        context_lens=_ints(lengths, device),
        page_tables=_ints(first_page[:, None] + np.arange(width), device),
        slots=torch.from_numpy(np.repeat(first_page * PAGE_SIZE, lengths) + positions).to(device),
        pages=int(pages.sum()),
    )


def _real(mask: torch.Tensor | None, batch: int, columns: int) -> np.ndarray:
    """bool[B,L]: which columns hold tokens."""
    if mask is None:
        return np.ones((batch, columns), dtype=bool)
    if mask.shape != (batch, columns):
        raise ValueError(
            f"attention_mask is {list(mask.shape)}, expected {[batch, columns]}: 1 for tokens, 0 for padding"
        )
    values = mask.cpu().numpy()
    if not np.isin(values, (0, 1)).all():
        raise ValueError("attention_mask should hold 1 for tokens and 0 for padding, and nothing else")
    return values.astype(bool)


def _positions(position_ids: torch.Tensor, batch: int, columns: int) -> np.ndarray:
    """int64[B,S]; one row may stand for all."""
    if position_ids.shape not in ((batch, columns), (1, columns), (columns,)):
        raise ValueError(f"position_ids is {list(position_ids.shape)}, expected {[batch, columns]}")
    return position_ids.expand(batch, columns).cpu().numpy()


def _starts(
    real: np.ndarray, rows: np.ndarray, position_ids: np.ndarray | None, cu_seq_lens: torch.Tensor | None
) -> np.ndarray:
    """Where, among the tokens in order, each sequence begins."""
    if cu_seq_lens is not None:
        bounds = cu_seq_lens.cpu().numpy().astype(np.int64)
        if (
            real.shape[0] != 1
            or not real.all()
            or not len(bounds)
            or bounds[0] != 0
            or bounds[-1] != len(rows)
            or (np.diff(bounds) < 1).any()
        ):
            raise ValueError(
                f"cu_seq_lens_q should rise from 0 to the {real.shape[1]} tokens of a batch of one row without padding"
            )
        return bounds[:-1]
    gaps = np.diff(rows) != 1
    new_row = np.diff(rows // real.shape[1]) != 0
    begins = gaps | new_row
    if position_ids is not None:
        begins = begins | (np.diff(position_ids.reshape(-1)[rows]) != 1)
    elif (gaps & ~new_row).any():
        row = int(rows[:-1][gaps & ~new_row][0]) // real.shape[1]
        raise ValueError(
            f"row {row} of attention_mask has a hole: a row holds one sequence, padded left or right; give "
            "position_ids that start again at 0 for several sequences in a row"
        )
    return np.flatnonzero(np.concatenate(([True], begins))) if len(rows) else np.zeros(0, dtype=np.int64)


def _check_positions(given: np.ndarray | None, expected: np.ndarray, rows: np.ndarray) -> None:
    """Refuse positions other than the engine's, which count from the first token of a sequence."""
    if given is None:
        return
    wrong = rows[given.reshape(-1)[rows] != expected.reshape(-1)[rows]]
    if len(wrong):
        row, column = divmod(int(wrong[0]), expected.shape[1])
        raise ValueError(
            f"position_ids place the token at [{row},{column}] at {int(given[row, column])}, the engine at "
            f"{int(expected[row, column])}: a sequence begins at its first token; leave position_ids out unless "
            "sequences are packed"
        )


def _rows(rows: np.ndarray, total: int, device: torch.device) -> torch.Tensor | None:
    return None if len(rows) == total else torch.from_numpy(rows).to(device)


def _ints(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32)).to(device)
