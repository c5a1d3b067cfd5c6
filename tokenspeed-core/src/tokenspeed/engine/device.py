"""Where a step runs: memory that host and device share or copy between, reading back, and recorded decode steps.

The runner and the engine use a `Device` and know nothing else of GPUs; the scheduler and the models know not even that.
All work of an engine goes through one stream in the order in which it was issued, so whatever was issued later may
overwrite what earlier work reads.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np
import torch

from tokenspeed.errors import ConfigError
from tokenspeed.numerics.settings import GpuSettings

_log = logging.getLogger("tokenspeed.engine")

_HOST_BUFFERS = 2
"""Host sides of an arena on a GPU: one may still be copied from while the next step is written."""


class Arena(Protocol):
    """A block of bytes that the host writes once a step and the device reads."""

    @property
    def device(self) -> torch.Tensor:
        """uint8[size] on the device; its address never changes."""
        ...

    def begin(self) -> tuple[int, np.ndarray]:
        """A host side (its number, uint8[size]) that nothing reads any more; waits for that if it must."""
        ...

    def upload(self, size: int) -> None:
        """Let the device have the first `size` bytes of the host side that was begun."""
        ...


class Device(Protocol):
    """`asynchronous` devices run behind the host, so that a step may be issued before the last one was read back."""

    name: str
    asynchronous: bool

    def current(self) -> AbstractContextManager[Any]:
        """A context in which this device is the calling thread's; all that follows is called in one."""
        ...

    def arena(self, size: int) -> Arena:
        """A new arena of `size` bytes."""
        ...

    def read(self, *tensors: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        """Start copying tensors to the host. The function that is returned waits for them, once."""
        ...

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run `run` and record what it did on the device; calling the result does the same on the same memory."""
        ...

    def reclaim(self) -> str:
        """Give unused memory back after an allocation failed; how much is free, for a message."""
        ...


class SharedArena:
    """Host memory that is the device's."""

    def __init__(self, size: int) -> None:
        self.device = torch.zeros(size, dtype=torch.uint8)
        self._host = self.device.numpy()

    def begin(self) -> tuple[int, np.ndarray]:
        """The one side there is: whatever read it has run."""
        return 0, self._host

    def upload(self, size: int) -> None:
        """Nothing to do."""


class CpuDevice:
    """What is called has run when the call returns."""

    name = "cpu"
    asynchronous = False

    def current(self) -> AbstractContextManager[Any]:
        """Threads have no CPU of their own to leave."""
        return nullcontext()

    def arena(self, size: int) -> Arena:
        """Memory without a copy."""
        return SharedArena(size)

    def read(self, *tensors: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        """The tensors themselves."""
        return lambda: list(tensors)

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Nothing needs recording: the function runs again."""
        run()
        return run

    def reclaim(self) -> str:
        """A CPU keeps no pool."""
        return "the host is out of memory"


class CudaArena:
    """Pinned host sides in turn, one device side; an upload is one copy that the host does not wait for."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._sides = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in range(_HOST_BUFFERS)]
        self._arrays = [side.numpy() for side in self._sides]
        self._copied = [_event() for _ in range(_HOST_BUFFERS)]
        self._side = 0

    def begin(self) -> tuple[int, np.ndarray]:
        """The other side; its last copy ended a step ago, so that as a rule there is nothing to wait for."""
        self._side = (self._side + 1) % _HOST_BUFFERS
        self._copied[self._side].synchronize()
        return self._side, self._arrays[self._side]

    def upload(self, size: int) -> None:
        """Copy behind what was issued before, which may still read the last step's bytes."""
        self.device[:size].copy_(self._sides[self._side][:size], non_blocking=True)
        self._copied[self._side].record()


class CudaDevice:
    """The GPU that is current where it is opened, and its current stream.

    Graphs share one pool, since only one of them runs at a time.
    """

    name = "cuda"
    asynchronous = True

    def __init__(self) -> None:
        self._index = torch.cuda.current_device()
        self._device = torch.device("cuda", self._index)
        # One for every recording: torch's own belongs to the device on which the process recorded first.
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool: Any = None
        self._graphs: WeakSet[Any] = WeakSet()

    def current(self) -> AbstractContextManager[Any]:
        """Nothing to do, as a rule. But every thread has a current device of its own, which may be another one."""
        if torch.cuda.current_device() == self._index:
            return nullcontext()
        return torch.cuda.device(self._index)

    def arena(self, size: int) -> Arena:
        """Pinned on the host, persistent on the device."""
        return CudaArena(size, self._device)

    def read(self, *tensors: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        """Copies into pinned memory, and an event behind them."""
        copies = []
        for tensor in tensors:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copies.append(copy.copy_(tensor, non_blocking=True))
        done = _event()
        done.record()

        def wait() -> list[torch.Tensor]:
            done.synchronize()
            return copies

        return wait

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """A CUDA graph. `run` runs once before, on the side stream: kernels are compiled and loaded there."""
        if not self._graphs:
            # A pool ends with its last graph, and torch takes no further one into it.
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        self._side.wait_stream(torch.cuda.current_stream())
        # torch leaves the side stream current where a recording cannot be ended; this context does not.
        with torch.cuda.stream(self._side):
            run()
            torch.cuda.synchronize()
            shortage = ""
            # What other threads of the process do on the GPU meanwhile is no part of the step.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"):
                try:
                    run()
                except torch.OutOfMemoryError as error:
                    shortage = str(error)  # the recording ends first, as it should
        if shortage:
            raise torch.OutOfMemoryError(shortage)
        self._graphs.add(graph)
        replay: Callable[[], None] = graph.replay
        return replay

    def reclaim(self) -> str:
        """Empty torch's cache; free and whole memory of the GPU."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._index)
        return f"{free / 2**30:.2f} of {total / 2**30:.2f} GiB are free on the GPU now"


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def open_device(name: str) -> Device:
    """The device called `cpu` or `cuda`. Raises ConfigError for another name."""
    if name == "cpu":
        return CpuDevice()
    if name == "cuda":
        return CudaDevice()
    raise ConfigError(f"--device: {name!r} is not one of cpu, cuda")


def apply_settings(settings: GpuSettings) -> None:
    """Make this process compute as the envelope wants, before the engine's first product on the GPU.

    The environment is read by cuBLAS and NCCL when they start; `numerics.settings` checked that nothing contradicts it.
    What that means for a process which was in use before is logged as a warning, since nobody may look at the plan.
    """
    if settings.note:
        _log.warning(settings.note)
    os.environ.update(settings.environment)
    # Of torch's three ways the one after which the other two can still be read; the others make some of them raise.
    torch.set_float32_matmul_precision(settings.precision)
    if settings.precision == "highest":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
