"""`bench numerics` and `bench transformers`: two sides do the same work in turns."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from tokenspeed.cli.main import cli

SMALL = ["--batch-size", "2", "--input-len", "8", "--output-len", "3", "--prefill-len", "16", "--rounds", "2"]


def measured(command: str, model: str, *more: str, status: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(cli, ["bench", command, model, *SMALL, "--json", *more])
    assert result.exit_code == status, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    return report


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("command", "sides"), [("numerics", ("auto", "rl_bitwise")), ("transformers", ("transformers", "tokenspeed"))]
)
def test_reports_both_sides(command: str, sides: tuple[str, str]) -> None:
    report = measured(command, "tiny", "--threads", "1")
    assert [row["work"] for row in report["rows"]] == ["prefill", "decode, batch 2"]
    for row in report["rows"]:
        assert row["lowest_round"] <= row["ratio"] <= row["highest_round"]
        assert all(row[f"{side}_tokens_per_second"] > 0 for side in sides)
    assert report["cores"] >= 1


@pytest.mark.usefixtures("one_thread")
def test_a_ratio_below_the_bound_is_an_error() -> None:
    measured("numerics", "tiny", "--threads", "1", "--at-least", "1000", status=1)
