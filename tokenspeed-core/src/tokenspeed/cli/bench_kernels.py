"""`tokenspeed bench kernels`: the selected kernel of each operator against the same work in plain torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from tokenspeed.cli.bench_options import counts_option
from tokenspeed.cli.options import NumberRange
from tokenspeed.cli.output import json_option, print_json, print_rich, print_table
from tokenspeed.cli.progress import counted

if TYPE_CHECKING:
    import torch

    from tokenspeed.kernels.case import Call, Case, Kernel
    from tokenspeed.kernels.spec import KernelSpec

_MIN_CALLS, _MAX_CALLS = 5, 5000


@click.command()
@click.option("--operator", "operators", multiple=True, help="May be repeated.  [default: all]")
@counts_option("--rows", "rows", (1, 2, 4, 8, 16, 32, 128, 512), "Tokens; may be repeated.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@click.option("--threads", type=click.IntRange(1), help="Of torch and kernels alike.  [default: torch's]")
@click.option("--seconds", type=NumberRange(0.0), default=0.3, show_default=True, help="For each row of the table.")
@json_option
def kernels(
    operators: tuple[str, ...],
    rows: tuple[int, ...],
    dtype: str,
    threads: int | None,
    seconds: float,
    as_json: bool,
) -> None:
    """Measure the kernels of this machine, call for call alternating with plain torch in one process.

    Times are medians in microseconds. Projections rotate over more weights than the caches hold; `of read` is their
    rate of reading weights against the best rate at which torch reads the same tensors.
    """
    import torch

    from tokenspeed.kernels.cases import CASES, cases

    if unknown := sorted(set(operators) - CASES.keys()):
        raise click.BadParameter(
            f"{', '.join(unknown)}: there are cases for {', '.join(CASES)}", param_hint="--operator"
        )
    if threads is not None:
        torch.set_num_threads(threads)
    bound = _BoundKernels()
    lines = [
        _measured(case, bound, seconds) for case in counted(cases(operators, rows, getattr(torch, dtype)), "measuring")
    ]
    if as_json:
        print_json({"threads": torch.get_num_threads(), "torch": torch.__version__, "dtype": dtype, "cases": lines})
        return
    print_rich(f"{torch.get_num_threads()} threads, torch {torch.__version__}, {dtype}")
    print_table(
        ("operator", "shape", "kernel", "us", "torch us", "torch / kernel", "GB/s", "of read", "GFLOP/s"),
        [_cells(line) for line in lines],
    )


class _BoundKernels:
    """Selects, imports and remembers kernels, as a start would."""

    def __init__(self) -> None:
        from tokenspeed.config_sources import allowed_plugins
        from tokenspeed.kernels.registry import KernelRegistry
        from tokenspeed.machine import read_machine
        from tokenspeed.plugins import load_plugins

        self._registry = KernelRegistry.from_plugins(load_plugins(allowed_plugins()))
        self._machine = read_machine()
        self._bound: dict[str, tuple[Kernel, str]] = {}

    def serve(self, case: Case) -> tuple[Kernel, str]:
        """The kernel that the case's need gets, and its name with the code variant. Raises StartRefused if none."""
        from tokenspeed.errors import StartRefused
        from tokenspeed.kernels.select import select

        selection = select([case.need], self._registry, self._machine)
        if selection.problems:
            raise StartRefused(selection.problems)
        spec = selection.choices[case.need]
        if spec.name not in self._bound:
            self._bound[spec.name] = _bind(spec)
        return self._bound[spec.name]


def _bind(spec: KernelSpec) -> tuple[Kernel, str]:
    from tokenspeed.kernels.case import Kernel
    from tokenspeed.numerics.plan import import_target

    prepare = import_target(spec.prepare_weights) if spec.prepare_weights else lambda weight: weight
    variant = f" ({import_target(spec.variant)()})" if spec.variant else ""
    return Kernel(import_target(spec.implementation), prepare), spec.name + variant


def _measured(case: Case, bound: _BoundKernels, seconds: float) -> dict[str, Any]:
    kernel, name = bound.serve(case)
    reads = _reading(case.memory)
    times = _alternate({"kernel": case.kernel(kernel), "torch": case.yardstick, **reads}, seconds)
    rate = case.read_bytes / times["kernel"] / 1e9
    line = {
        "operator": case.need.operator,
        "shape": case.shape,
        "kernel": name,
        "kernel_us": times["kernel"] * 1e6,
        "torch_us": times["torch"] * 1e6,
        "ratio": times["torch"] / times["kernel"],
        "gigabytes_per_second": rate,
        "gigaflops_per_second": case.flops / times["kernel"] / 1e9,
    }
    if reads:
        line["of_read_rate"] = rate / (case.memory[0].nbytes / min(times[way] for way in reads) / 1e9)
    return line


def _alternate(calls: Mapping[str, Call], seconds: float) -> dict[str, float]:
    """Median seconds of each call; the calls take turns, so that noise meets them alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for warm_up in range(2):
        for call in calls.values():
            call(warm_up)
    end, count = time.perf_counter() + seconds, 0
    while count < _MIN_CALLS or (time.perf_counter() < end and count < _MAX_CALLS):
        for name, call in calls.items():
            begin = time.perf_counter()
            call(count)
            times[name].append(time.perf_counter() - begin)
        count += 1
    return {name: statistics.median(taken) for name, taken in times.items()}


def _reading(tensors: Sequence[torch.Tensor]) -> dict[str, Call]:
    """Two ways in which torch reads the next of these tensors; the better one is the rate at which memory reads.

    They take turns with the kernel, because what other tenants of a machine leave of its memory rate changes by the
    second; each at its own place in the rotation, because what another call just read is still in a cache.
    """
    import torch

    if not tensors:
        return {}
    words = [tensor.view(-1).view(torch.int64) for tensor in tensors]
    floats = [tensor.view(-1).view(torch.float32) for tensor in tensors]
    third = len(tensors) // 3
    return {
        "sum": lambda i: words[(i + third) % len(words)].sum(),
        "dot": lambda i: torch.dot(floats[(i + 2 * third) % len(floats)], floats[(i + 2 * third) % len(floats)]),
    }


def _cells(line: Mapping[str, Any]) -> tuple[str, ...]:
    share = line.get("of_read_rate")
    return (
        line["operator"],
        line["shape"],
        line["kernel"],
        f"{line['kernel_us']:,.1f}",
        f"{line['torch_us']:,.1f}",
        f"{line['ratio']:.2f}",
        f"{line['gigabytes_per_second']:.1f}",
        "" if share is None else f"{share:.0%}",
        f"{line['gigaflops_per_second']:,.0f}" if line["gigaflops_per_second"] else "",
    )
