"""What Triton asks of a device, answered by the emulator: `emulate("sm80")` makes it the one that kernels run on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget

from ptx_emulator import arithmetic, copies, matrix, memory, tensor_memory, warps
from ptx_emulator.machine import Block, Launch, Machine, Source, Step, run
from ptx_emulator.operands import Operands
from ptx_emulator.program import BARRIERS, Instruction, Program, parse
from tokenspeed_kernels_aok.triton import launch

TOGETHER = 4096
"""Threads that run in lockstep at most; blocks that copy on the side run one at a time."""

MULTIPROCESSORS = 3
"""Of the emulated GPU; few, so that persistent kernels go round."""

SHARED_LIMIT = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448}
"""Bytes of shared memory of a block, by architecture."""

_NUMBERS = itertools.count(1000)
_SCALARS = {"fp32": np.float32, "i1": np.uint32, "i32": np.int32, "u32": np.uint32, "i64": np.int64, "u64": np.uint64}


def assemble(program: Program) -> tuple[Block, ...]:
    """The program's blocks as functions of a machine. Raises NotImplementedError for an unknown instruction."""
    operands = Operands(program)
    return tuple(_block(block, program, operands) for block in program.blocks)


def _block(instructions: list[Instruction], program: Program, operands: Operands) -> Block:
    *body, last = instructions or [None]
    if last is not None and not last.ends_block:
        body, last = instructions, None
    steps = tuple(_step(instruction, operands) for instruction in body if instruction is not None)
    if last is None:
        return Block(steps)
    if last.opcode in BARRIERS:
        if last.operands != ("0",) or last.guard:
            raise NotImplementedError(f"{last}")
        return Block(steps, is_barrier=True)
    target = -1 if last.opcode == "ret" else program.labels[last.operands[0]]
    return Block(steps, target, _guard(last, operands))


def _guard(instruction: Instruction, operands: Operands) -> Source | None:
    if not instruction.guard:
        return None
    source = operands.source(instruction.guard, "pred")
    return (lambda m: ~source(m)) if instruction.is_negated else source


def _step(instruction: Instruction, operands: Operands) -> Step:
    for module in (arithmetic, warps, memory, copies, matrix, tensor_memory):
        step = module.build(instruction, operands)
        if step is not None:
            break
    else:
        raise NotImplementedError(f"the emulator does not know {instruction.opcode}")
    guard = _guard(instruction, operands)
    return step if guard is None else (lambda m: m.under(guard(m), step))


@cache
def assembled(ptx: str) -> tuple[tuple[Block, ...], Program]:
    """The blocks and the program of a kernel's PTX."""
    program = parse(ptx)
    return assemble(program), program


class EmulatedLauncher:
    """Launches one compiled kernel; Triton makes it and calls it."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self._types = list(source.signature.values())
        self._metadata = metadata

    def __call__(self, x: int, y: int, z: int, _stream: Any, ptx: str, *rest: Any) -> None:
        arguments = rest[4:]
        blocks, program = assembled(ptx)
        allocations: list[tuple[int, int]] = []
        maps = iter(self._metadata.tensordesc_meta or ())
        params: list[Any] = []
        for kind, value in zip(self._types, arguments, strict=True):
            if kind != "constexpr":
                params += _parameter(kind, value, maps, allocations)
        params += [np.uint64(0)] * (len(program.params) - len(params))  # scratch memory, of which no kernel has any
        assert self._metadata.global_scratch_size == 0
        described = Launch(
            self._metadata.target.arch,
            (x, y, z),
            32 * self._metadata.num_warps,
            -(-max(self._metadata.shared, 16) // 16) * 16,
            tuple(params),
            memory.GlobalMemory(allocations),
        )
        alone = any(opcode.startswith(("cp.async", "mbarrier", "wgmma", "tcgen05")) for opcode in program.opcodes())
        together = 1 if alone else max(TOGETHER // described.threads, 1)
        count = x * y * z
        with np.errstate(all="ignore"):
            for first in range(0, count, together):
                run(blocks, Machine(described, range(first, min(first + together, count))))


def _parameter(kind: str, value: Any, maps: Iterator[Any], allocations: list[tuple[int, int]]) -> list[Any]:
    """The parameters that one argument becomes, as unsigned scalars or a tensor map."""
    if kind.startswith("*"):
        if value is None:
            return [np.uint64(0)]
        storage = value.untyped_storage()
        allocations.append((storage.data_ptr(), storage.nbytes()))
        return [np.uint64(value.data_ptr())]
    if kind.startswith("tensordesc"):
        base, meta = value.base, next(maps)
        storage = base.untyped_storage()
        allocations.append((storage.data_ptr(), storage.nbytes()))
        size = base.element_size()
        tensor_map = copies.TensorMap(
            base.data_ptr(),
            size,
            tuple(meta["block_size"]),
            tuple(value.shape),
            value.strides[0] * size,
            meta["swizzle"],
        )
        return [tensor_map, *map(np.uint32, value.shape), *map(np.uint64, value.strides)]
    scalar = np.asarray(value, _SCALARS[kind])
    return [scalar.view(f"u{scalar.dtype.itemsize}")[()]]


class EmulatedDriver:
    """The active driver of Triton: one device of architecture `arch` (80 for sm80), memory of the CPU."""

    launcher_cls = EmulatedLauncher

    def __init__(self, arch: int, edit: Callable[[str], str]) -> None:
        self._arch = arch
        self._number = next(_NUMBERS)
        self._edit = edit
        self._ptx = ""
        self.utils = SimpleNamespace(
            get_device_properties=lambda _device: {"max_shared_mem": SHARED_LIMIT[arch]},
            load_binary=lambda _name, _binary, _shared, _device: (None, self._ptx, 0, 0, 1024),
        )

    def before_load(self, _module: Any, _function: Any, _name: str, files: dict[str, str], _hash: str) -> None:
        """A hook of Triton: `load_binary` gets machine code, and the PTX that it was made of lies beside it."""
        self._ptx = self._edit(next(Path(path).read_text() for name, path in files.items() if name.endswith(".ptx")))

    def get_current_target(self) -> GPUTarget:
        """The architecture to compile for."""
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        """A number of its own, since Triton keeps compiled kernels by it."""
        return self._number

    def get_current_stream(self, _device: int) -> int:
        """Everything happens at once."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where tensors are."""
        return torch.device("cpu")


@contextmanager
def emulate(arch: str, edit: Callable[[str], str] = lambda ptx: ptx) -> Iterator[None]:
    """Launch Triton's kernels on an emulated GPU of `arch`, as `sm90`, which the kernels of aok take for theirs.

    Enter it before the modules of those kernels are imported. `edit` changes the PTX of every kernel that is loaded.
    """
    driver = EmulatedDriver(int(arch[2:]), edit)
    hooks = triton.knobs.runtime.kernel_load_start_hook
    before = triton.runtime.driver._active
    hooks.add(driver.before_load)
    triton.runtime.driver.set_active(driver)
    try:
        with mock.patch.multiple(launch, arch_of=lambda _device: arch, multiprocessors=lambda _device: MULTIPROCESSORS):
            yield
    finally:
        hooks.remove(driver.before_load)
        triton.runtime.driver.set_active(before)
