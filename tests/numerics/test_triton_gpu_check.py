"""`scripts/gpu_check.py` where there is no GPU: it measures nothing and claims nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpu_check
from gpu_check import Clock, Row

SCRIPT = Path(gpu_check.__file__)


def test_without_a_gpu_nothing_is_written(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", str(result)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "nothing was measured" in done.stderr
    assert not result.exists()


def test_what_was_not_measured_is_blank_and_says_why() -> None:
    table = gpu_check.render([Row("gemm", "1 x 2", 0.5, "x", ">= 0.9"), Row("gemm", "3 x 4", note="out of time")])
    measured, blank = table.splitlines()[1:]
    assert measured.split() == ["gemm", "1", "x", "2", "0.500", "x", ">=", "0.9"]
    assert blank.split() == ["gemm", "3", "x", "4", "out", "of", "time"]


def test_an_engine_that_refuses_leaves_every_number_blank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "run", lambda *_: (2, "starting\nrefused: no such device\n"))
    rows = list(gpu_check.engine(Clock(10), Path("nowhere"), 1000.0))
    assert [row.value for row in rows] == [None] * 11
    assert "refused: no such device" in rows[0].note
    assert not gpu_check.all_held(rows)


def test_engine_rates_become_a_ratio_and_a_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(10**6))

    def answer(command: list[str], timeout: float) -> tuple[int, str]:
        if "verify" in command:
            return 0, "everything is equal"
        speed = 400 if "auto" in command else 150 if "--no-decode-graphs" in command else 300
        rates = ((1, 100), (64, speed))
        decode = [{"batch": batch, "decode_tokens_per_second": rate} for batch, rate in rates]
        # What the command writes to standard error stands behind the JSON, and perhaps something before it.
        return 0, "reading {weights}\n" + json.dumps({"decode": decode}, indent=2) + "\nUserWarning: {slow}\n"

    monkeypatch.setattr(gpu_check, "run", answer)
    values = {row.name: row.value for row in gpu_check.engine(Clock(10), tmp_path, 1.0)}
    assert values["rl-bitwise / auto, batch 64"] == 0.75
    assert values["recorded / not recorded, batch 64"] == 2
    assert values["numerics verify --quick"] == 1
    assert values["rl-bitwise, batch 1, share of bandwidth"] == pytest.approx(10)


def test_failed_and_skipped_tests_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "bad": (1, "E assert 1 == 2\n2 failed, 70 passed, 1 skipped in 9.1s\n"),
        "good": (0, "3 passed in 1s\n"),
        "slow": (124, "took longer than 150 s"),
    }
    monkeypatch.setattr(gpu_check, "run", lambda command, _: answers[Path(command[-1]).stem])
    rows = list(gpu_check.conformance(Clock(10), [Path(f"{name}.py") for name in answers]))
    assert [row.value for row in rows] == [70, 3, 3, 0, None, None]
    assert "assert 1 == 2" in rows[0].output
    assert [gpu_check.all_held(rows[at : at + 2]) for at in (0, 2, 4)] == [False, True, False]


def test_every_file_of_gpu_tests_is_run_but_that_of_the_kit() -> None:
    names = {file.name for file in gpu_check.gpu_tests()}
    assert gpu_check.KIT_TESTS not in names
    assert names | {gpu_check.KIT_TESTS} == {file.name for file in gpu_check.TESTS.glob("test_*.py")}


def test_a_part_that_breaks_off_takes_no_other_with_it() -> None:
    def rows() -> Iterator[Row]:
        yield Row("gemm", "first", 1.0)
        raise RuntimeError("no memory\nfor the second")

    first, last = gpu_check.guarded("gemm", rows())
    assert first.value == 1
    assert (last.name, last.value, last.note) == ("broke off", None, "for the second")
    assert gpu_check.all_held([first])
    assert not gpu_check.all_held([first, last])


def test_the_kit_reports_each_kernel_and_one_that_did_not_end_is_blank(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"good": (0, "1 passed"), "bad": (1, "0 passed, 1 failed"), "slow": (124, "took longer than 90 s")}
    monkeypatch.setattr(gpu_check, "run", lambda command, _: answers[command[command.index("--kernel") + 1]])
    rows = list(gpu_check.kit(Clock(10), list(answers)))
    assert [(row.name, row.value) for row in rows] == [("good", 1.0), ("bad", 0.0), ("slow", None)]
    assert rows[2].note == "took longer than 90 s"
    assert [gpu_check.all_held([row]) for row in rows] == [True, False, False]


def test_the_parts_leave_time_to_measure_and_verify() -> None:
    most = gpu_check.TESTS_SECONDS + gpu_check.KIT_SECONDS + gpu_check.RUN_SECONDS * len(gpu_check.RUNS)
    assert most <= gpu_check.BUDGET_SECONDS - 40 < 8 * 60
