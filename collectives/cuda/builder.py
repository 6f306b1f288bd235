"""From a device request to a device plan: the same schedules, layouts and programs as on the host, bound to kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.base.reduce_op import Op
from collectives.cuda.launches import SPACES, DevicePlan, LaunchBinder
from collectives.cuda.planner import DeviceChoice
from collectives.device.kernels import Combination, Kernels, Scaling
from collectives.plan import layouts
from collectives.plan.lowering import Layout, Medium, compile_program
from collectives.plan.planner import Placement
from collectives.schedules import registry
from collectives.transport.cuda_ipc import WORDS


class DevicePlans:
    """Makes the device plans of one world.

    Args:
        placement: of the ranks.
        kernels: of this rank's device.
    """

    def __init__(self, placement: Placement, kernels: Kernels) -> None:
        self._placement = placement
        self._kernels = kernels
        self._rank, self._size = placement.rank, placement.size

    def allreduce(
        self, count: int, dtype: np.dtype[Any], op: Op, choice: DeviceChoice, finish: Scaling | None
    ) -> DevicePlan:
        """``count`` elements, at the same places in input and output."""
        chunks = self._chunks("allreduce", choice)
        return self._compile("allreduce", layouts.whole((count,), dtype, chunks), dtype, choice, op, finish)

    def reducescatter(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], op: Op, choice: DeviceChoice, finish: Scaling | None
    ) -> DevicePlan:
        """A chunk per rank, of its rows; the output is that chunk alone."""
        return self._compile("reducescatter", layouts.scattered(shape, self._size), dtype, choice, op, finish)

    def broadcast(self, count: int, dtype: np.dtype[Any], root: int, choice: DeviceChoice) -> DevicePlan:
        """As for `allreduce`."""
        chunks = self._chunks("broadcast", choice, root)
        return self._compile("broadcast", layouts.whole((count,), dtype, chunks), dtype, choice, root=root)

    def allgather(self, sizes: Sequence[int], dtype: np.dtype[Any], choice: DeviceChoice) -> DevicePlan:
        """A chunk of ``sizes[r]`` elements from each rank r."""
        return self._compile("allgather", layouts.gathered(sizes), dtype, choice)

    def alltoall(self, sizes: Sequence[int], dtype: np.dtype[Any], choice: DeviceChoice) -> DevicePlan:
        """Chunk i * N + j goes from rank i to rank j."""
        return self._compile("alltoall", layouts.exchanged(sizes, self._size), dtype, choice)

    def _chunks(self, collective: str, choice: DeviceChoice, root: int = 0) -> int:
        algorithm = registry.find(collective, choice.algorithm)
        return algorithm.schedules(self._placement.hosts, root)(self._rank).chunks

    def _compile(
        self,
        collective: str,
        layout: Layout,
        dtype: np.dtype[Any],
        choice: DeviceChoice,
        op: Op | None = None,
        finish: Scaling | None = None,
        root: int = 0,
    ) -> DevicePlan:
        largest = max(layout.sizes)
        align = max(1, 256 // dtype.itemsize)
        block = max(1, -(-largest // choice.segments))
        block = min(-(-block // align) * align, largest)
        segments = -(-largest // block)
        between = self._between(choice)
        algorithm = registry.find(collective, choice.algorithm)
        program = compile_program(
            algorithm.schedules(self._placement.hosts, root),
            self._rank,
            layout,
            block,
            between,
            False,
            False,
        )

        def combine(shapes: Sequence[tuple[int, int, int]], scaled: bool) -> Combination:
            return self._kernels.combination(op, dtype, shapes, finish if scaled else None)

        merges = algorithm.owner_pushes and choice.transport == "cuda-ipc"
        binder = LaunchBinder(program, self._rank, self._size, dtype, block, segments, combine, merges)
        parts = f", {segments} segments" if segments > 1 else ""
        return binder.plan(
            pipelined=choice.pipelined,
            least_words=0 if self._placement.one_host or choice.transport == "nccl" else SPACES * WORDS,
            description=f"{choice.algorithm} over {choice.transport}{parts}",
        )

    def _between(self, choice: DeviceChoice) -> Callable[[int, int], Medium]:
        if choice.transport == "nccl":
            return lambda a, b: Medium.MESSAGE
        host_of = {rank: number for number, host in enumerate(self._placement.hosts) for rank in host}
        return lambda a, b: Medium.DIRECT if host_of[a] == host_of[b] else Medium.MESSAGE
