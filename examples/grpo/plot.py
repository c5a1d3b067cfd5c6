"""Draw the runs below a folder: reward, and the tokens whose log-probability differs between engine and trainer.

    python examples/grpo/plot.py build/grpo --output grpo.png

Every folder in it with a `steps.csv` is a run, named after the folder.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

WINDOW = 5
"""Steps over which the reward is averaged for the thick line."""


def read(file: Path) -> dict[str, list[float]]:
    """Columns of numbers."""
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    return {name: [float(row[name]) for row in rows] for name in rows[0] if name != "fingerprint"}


def smooth(values: list[float]) -> list[float]:
    """Mean of the last `WINDOW` values."""
    return [sum(values[max(0, i - WINDOW + 1) : i + 1]) / min(i + 1, WINDOW) for i in range(len(values))]


def draw(runs: dict[str, dict[str, list[float]]]) -> Any:
    """The figure."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.8), constrained_layout=True)
    for index, (name, run) in enumerate(runs.items()):
        color = f"C{index}"
        left.plot(run["step"], run["reward"], color=color, alpha=0.25)
        left.plot(run["step"], smooth(run["reward"]), color=color, label=name)
        share = [100 * a / b for a, b in zip(run["differing_tokens"], run["tokens"], strict=True)]
        middle.plot(run["step"], share, color=color)
        right.plot(run["step"], run["max_abs_difference"], color=color)
    left.set(title="reward (share of right sums)", xlabel="step", ylim=(0, 1))
    middle.set(title="tokens that differ, %", xlabel="step", ylim=(-4, 104))
    right.set(title="max |logprob difference|", xlabel="step")
    right.set_yscale("symlog", linthresh=1e-6)
    right.set_ylim(-5e-7, 5)
    left.legend(loc="lower right", fontsize="small")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, default=Path("grpo.png"))
    options = parser.parse_args()
    runs = {file.parent.name: read(file) for file in sorted(options.folder.glob("*/steps.csv"))}
    draw(runs).savefig(options.output, dpi=110)
    print(f"{options.output}: {', '.join(runs)}")


if __name__ == "__main__":
    main()
