"""A trainer's rectangle becomes ragged sequences with positions from 0, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenspeed.trainer.layout import Layout, make_layout

CPU = torch.device("cpu")


def layout(shape: tuple[int, int], **options: Any) -> Layout:
    return make_layout(
        shape, CPU, **{key: torch.tensor(value) if key != "past" else value for key, value in options.items()}
    )


def test_plain_rows() -> None:
    found = layout((2, 20))
    assert found.query_rows is None
    assert found.key_rows is None
    assert found.query_starts.tolist() == [0, 20, 40]
    assert found.context_lens.tolist() == [20, 20]
    assert found.page_tables.tolist() == [[0, 1], [2, 3]]
    assert found.slots.tolist() == [*range(20), *range(32, 52)]
    assert found.pages == 4
    assert found.position_ids.tolist() == [list(range(20))] * 2


def test_padding_on_either_side() -> None:
    found = layout((3, 4), attention_mask=[[0, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]])
    assert found.query_rows is not None
    assert found.query_rows.tolist() == [2, 3, 4, 5, 6]
    assert found.position_ids.tolist() == [[0, 0, 0, 1], [0, 1, 2, 0], [0, 0, 0, 0]]
    assert found.query_starts.tolist() == [0, 2, 5]


def test_packed_by_positions_and_padded() -> None:
    found = layout((1, 7), attention_mask=[[1, 1, 1, 1, 1, 1, 0]], position_ids=[[0, 1, 2, 0, 1, 0, 0]])
    assert found.context_lens.tolist() == [3, 2, 1]
    assert found.slots.tolist() == [0, 1, 2, 16, 17, 32]


def test_one_row_of_positions_for_all() -> None:
    for positions in ([0, 1, 0], [[0, 1, 0]]):
        assert layout((2, 3), position_ids=positions).context_lens.tolist() == [2, 1, 2, 1]


def test_packed_by_lengths() -> None:
    found = layout((1, 6), cu_seq_lens=[0, 4, 6])
    assert found.context_lens.tolist() == [4, 2]
    assert found.position_ids.tolist() == [[0, 1, 2, 3, 0, 1]]


def test_behind_a_cache() -> None:
    found = layout((2, 1), past=3, attention_mask=[[0, 1, 1, 1], [1, 1, 1, 1]], position_ids=[[2], [3]])
    assert found.key_rows is not None
    assert found.key_rows.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert found.query_rows is None
    assert found.query_starts.tolist() == [0, 1, 2]
    assert found.context_lens.tolist() == [3, 4]


def test_finished_rows_have_no_queries() -> None:
    found = layout((2, 1), past=2, attention_mask=[[1, 1, 0], [1, 1, 1]])
    assert found.query_starts.tolist() == [0, 0, 1]
    assert found.context_lens.tolist() == [2, 3]


@pytest.mark.parametrize(
    ("shape", "options", "reason"),
    [
        ((1, 4), {"attention_mask": [[1, 0, 1, 1]]}, "row 0 of attention_mask has a hole"),
        ((1, 3), {"attention_mask": [[1, 2, 2]]}, "1 for tokens and 0 for padding, and nothing else"),
        ((1, 3), {"attention_mask": [[1, 1]]}, "attention_mask is"),
        ((1, 3), {"attention_mask": [[0, 1, 1]], "position_ids": [[0, 1, 2]]}, r"\[0,1\] at 1, the engine at 0"),
        ((1, 3), {"position_ids": [[1, 2, 3]]}, r"\[0,0\] at 1, the engine at 0"),
        ((2, 3), {"cu_seq_lens": [0, 6]}, "batch of one row"),
        ((1, 3), {"cu_seq_lens": [0, 2]}, "should rise from 0 to the 3 tokens"),
        ((1, 3), {"cu_seq_lens": []}, "should rise from 0 to the 3 tokens"),
        ((0, 3), {}, "the batch is empty: 0 rows of 3 tokens"),
        ((2, 0), {}, "the batch is empty: 2 rows of 0 tokens"),
        ((2, 3), {"position_ids": [[0, 1]] * 2}, r"position_ids is \[2, 2\], expected \[2, 3\]"),
        ((2, 3), {"position_ids": [[[0, 1, 2]] * 2] * 3}, r"position_ids is \[3, 2, 3\], expected \[2, 3\]"),
        ((1, 3), {"cu_seq_lens": [0, 3], "past": 1}, "together with a cache"),
        ((2, 5), {"attention_mask": [[1] * 5, [0, 0, 1, 1, 1]], "max_positions": 4}, "5 tokens, .* ends at 4"),
    ],
)
def test_refused(shape: tuple[int, int], options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        layout(shape, **options)
