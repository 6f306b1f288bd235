"""From a request to a plan: chunks, places, the planner's choice, and a program bound to it.

The chunks of a tensor, their sizes and where they lie in each rank's input and output follow from what all ranks know
alike, so that every rank makes the same plan without asking.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.base import dtypes, logging
from collectives.fusion import Lists, Pieces
from collectives.plan import layouts
from collectives.plan.binder import Plan
from collectives.plan.executor import Executor, stride_for
from collectives.plan.fast_paths import Kernel, Scale
from collectives.plan.lowering import Layout, Medium, compile_program, window_blocks
from collectives.plan.planner import Choice, Placement, medium_between
from collectives.schedules import registry
from collectives.transport.base import SLOT_BYTES

Shape = tuple[int, ...]

_ALIGN = 64


class Plans:
    """Makes the plans of one world.

    Args:
        placement: of the ranks.
        executor: that will run them.
    """

    def __init__(self, placement: Placement, executor: Executor) -> None:
        self._placement = placement
        self._executor = executor
        self._rank, self._size = placement.rank, placement.size

    def allreduce(
        self, shape: Shape, dtype: np.dtype[Any], choice: Choice, kernel: Kernel, finish: Scale | None
    ) -> Plan:
        """The tensor in as many chunks as the algorithm wants, at the same places in input and output, on every
        rank."""
        chunks = self._chunks("allreduce", choice)
        return self._compile("allreduce", layouts.whole(shape, dtype, chunks), dtype, choice, kernel, finish)

    def fused(
        self,
        pieces: Pieces,
        lists: Lists | None,
        dtype: np.dtype[Any],
        choice: Choice,
        kernel: Kernel,
        finish: Scale | None,
    ) -> Plan:
        """An all-reduce of several tensors as one, through windows, or with ``lists`` over direct reads."""
        chunks = self._chunks("allreduce", choice)
        layout = layouts.whole((pieces.total,), dtype, chunks)
        return self._compile(
            "allreduce", layout, dtype, choice, kernel, finish, pieces=None if lists else pieces, lists=lists
        )

    def reducescatter(
        self, shape: Shape, dtype: np.dtype[Any], choice: Choice, kernel: Kernel, finish: Scale | None
    ) -> Plan:
        """A chunk per rank, of its rows; the output is that chunk alone."""
        return self._compile("reducescatter", layouts.scattered(shape, self._size), dtype, choice, kernel, finish)

    def broadcast(self, shape: Shape, dtype: np.dtype[Any], root: int, choice: Choice) -> Plan:
        """As for `allreduce`."""
        chunks = self._chunks("broadcast", choice, root)
        return self._compile("broadcast", layouts.whole(shape, dtype, chunks), dtype, choice, root=root)

    def allgather(self, sizes: Sequence[int], dtype: np.dtype[Any], choice: Choice) -> Plan:
        """A chunk of ``sizes[r]`` elements from each rank r, which is the whole of its input."""
        return self._compile("allgather", layouts.gathered(sizes), dtype, choice)

    def alltoall(self, sizes: Sequence[int], dtype: np.dtype[Any], choice: Choice) -> Plan:
        """Chunk i * N + j goes from rank i to rank j; inputs are ordered by receiver, outputs by sender."""
        return self._compile("alltoall", layouts.exchanged(sizes, self._size), dtype, choice)

    def tell(self, collective: str, count: int, dtype: np.dtype[Any], choice: Choice, how: str) -> None:
        """Log that ``count`` elements in all will travel so, and why; on one rank, because it is the same on all."""
        if self._rank == 0 and logging.logger.isEnabledFor(logging.LEVELS["debug"]):
            nbytes = count * dtype.itemsize
            logging.logger.debug(
                "%s of %d bytes of %s: %s (%s)", collective, nbytes, dtypes.name(dtype), how, choice.why
            )

    def _chunks(self, collective: str, choice: Choice, root: int = 0) -> int:
        """The number of chunks of the chosen algorithm."""
        algorithm = registry.find(collective, choice.algorithm)
        return algorithm.schedules(self._placement.hosts, root)(self._rank).chunks

    def _compile(
        self,
        collective: str,
        layout: Layout,
        dtype: np.dtype[Any],
        choice: Choice,
        kernel: Kernel | None = None,
        finish: Scale | None = None,
        root: int = 0,
        pieces: Pieces | None = None,
        lists: Lists | None = None,
    ) -> Plan:
        algorithm = registry.find(collective, choice.algorithm)
        schedule_of = algorithm.schedules(self._placement.hosts, root)
        between = medium_between(self._placement, choice.medium)
        staged = choice.medium is Medium.WINDOW
        largest = max(layout.sizes)
        block = min(max(1, choice.block_bytes // dtype.itemsize), largest)
        slot = SLOT_BYTES // dtype.itemsize
        # Every rank must come to the same block, and so to the same number of segments: the fullest window of all
        # decides.
        fullest = max(
            window_blocks(schedule_of, rank, layout, between, staged, algorithm.versioned) for rank in range(self._size)
        )
        if fullest * block > slot:
            align = max(1, _ALIGN // dtype.itemsize)
            block = slot // fullest // align * align or max(1, slot // fullest)
        program = compile_program(
            schedule_of, self._rank, layout, block, between, staged, algorithm.versioned, pieces is not None
        )
        segments = -(-largest // block)
        stride = stride_for(len(program.rounds), segments, choice.overlap, fullest > 0)
        # Addresses of outputs are not known yet when the ranks agree on sizes.
        reads_outputs = algorithm.passes_on and choice.medium is Medium.DIRECT
        fused = "fused " if pieces is not None or lists is not None else ""
        how = f"{fused}{choice.algorithm} over {choice.medium.value}"
        description = f"{how}, {segments} segments of {block * dtype.itemsize} bytes per chunk"
        if pieces is not None:
            starts = layout.inputs(self._rank)
            pieces.unstaged = [
                (starts[chunk], layout.sizes[chunk]) for chunk in program.unstaged if layout.sizes[chunk]
            ]
        self.tell(collective, sum(layout.sizes), dtype, choice, description)
        return self._executor.bind(
            program,
            dtype,
            block,
            segments,
            stride,
            staged,
            kernel,
            finish,
            description,
            reads_outputs,
            pieces,
            lists,
        )
