"""From a device request to a device plan: the schedules, layouts and programs of the host, bound to kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.base.reduce_op import Op
from collectives.cuda.launches import SPACES, DevicePlan, LaunchBinder
from collectives.cuda.planner import DeviceChoice
from collectives.device.kernels import Combination, Kernels, Scaling
from collectives.plan.builder import Builder
from collectives.plan.lowering import compile_program
from collectives.plan.planner import Placement, medium_between
from collectives.plan.program import Layout, Medium
from collectives.schedules.algorithm import Algorithm
from collectives.schedules.schedule import Schedule
from collectives.transport.cuda.cuda_ipc import WORDS

_ALIGN = 256
"""Bytes: blocks begin at multiples of it."""


class DevicePlans(Builder[DeviceChoice, DevicePlan]):
    """Makes the device plans of one world. The ``kernel`` of its methods is an `Op`, the ``finish`` a `Scaling`."""

    def __init__(self, placement: Placement, kernels: Kernels) -> None:
        super().__init__(placement)
        self._kernels = kernels

    def _compile(
        self,
        algorithm: Algorithm,
        schedule_of: Callable[[int], Schedule],
        layout: Layout,
        dtype: np.dtype[Any],
        choice: DeviceChoice,
        kernel: Op | None,
        finish: Scaling | None,
    ) -> DevicePlan:
        largest = max(layout.sizes)
        align = max(1, _ALIGN // dtype.itemsize)
        block = max(1, -(-largest // choice.segments))
        block = min(-(-block // align) * align, largest)
        segments = -(-largest // block)
        over_nccl = choice.transport == "nccl"
        between = medium_between(self._placement, Medium.MESSAGE if over_nccl else Medium.DIRECT)
        program = compile_program(schedule_of, self._rank, layout, block, between, False, False)

        def combine(
            shapes: Sequence[tuple[int, int, int]], scaled: bool, ranks: Sequence[Sequence[int]]
        ) -> Combination:
            return self._kernels.combination(kernel, dtype, shapes, finish if scaled else None, choice.stepwise, ranks)

        merges = algorithm.owner_pushes and choice.transport == "cuda-ipc"
        binder = LaunchBinder(program, self._rank, self._size, dtype, block, segments, combine, merges)
        parts = f", {segments} segments" if segments > 1 else ""
        return binder.plan(
            pipelined=choice.pipelined,
            least_words=0 if self._placement.one_host or over_nccl else SPACES * WORDS,
            description=f"{algorithm.name} over {choice.transport}{parts}",
        )
