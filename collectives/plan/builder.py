"""From a request to a plan: the algorithm's schedules, a layout of the tensor's chunks, and a program bound to it.

All of it follows from facts that all ranks share, so that every rank makes the same plan without communicating.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from collectives.base import dtypes, logging
from collectives.fusion import Pieces
from collectives.plan import layouts
from collectives.plan.bucket_loop import BucketLoop
from collectives.plan.executor import Executor, stride_for
from collectives.plan.lowering import compile_program, window_blocks
from collectives.plan.plan import Plan
from collectives.plan.planner import DIRECT_BLOCK_BYTES, MAPPED_BLOCK_BYTES, Choice, Placement, medium_between
from collectives.plan.program import Layout, Medium
from collectives.schedules import registry
from collectives.schedules.algorithm import Algorithm
from collectives.schedules.schedule import Schedule
from collectives.transport.base import SLOT_BYTES

Shape = tuple[int, ...]

_ALIGN = 64
"""Bytes: blocks in windows begin at cache lines."""


class _Chosen(Protocol):
    @property
    def algorithm(self) -> str: ...


C = TypeVar("C", bound=_Chosen)
P = TypeVar("P")


class Builder(ABC, Generic[C, P]):
    """Makes plans of type P from choices of type C, for each collective.

    In all methods ``kernel`` combines two blocks and ``finish`` scales a reduced one (None: not at all); `_compile`
    alone reads them.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._rank, self._size = placement.rank, placement.size

    def allreduce(self, shape: Shape, dtype: np.dtype[Any], choice: C, kernel: Any, finish: Any) -> P:
        """A tensor of ``shape``, in as many chunks as the algorithm has."""
        return self._plan("allreduce", _whole(shape, dtype), dtype, choice, kernel, finish)

    def reducescatter(self, shape: Shape, dtype: np.dtype[Any], choice: C, kernel: Any, finish: Any) -> P:
        """A tensor of ``shape``, of whose rows each rank keeps its share."""
        return self._plan(
            "reducescatter", lambda chunks: layouts.scattered(shape, chunks), dtype, choice, kernel, finish
        )

    def broadcast(self, shape: Shape, dtype: np.dtype[Any], root: int, choice: C) -> P:
        """A tensor of ``shape``, in as many chunks as the algorithm has."""
        return self._plan("broadcast", _whole(shape, dtype), dtype, choice, root=root)

    def allgather(self, sizes: Sequence[int], dtype: np.dtype[Any], choice: C) -> P:
        """``sizes[r]`` elements from each rank r."""
        return self._plan("allgather", lambda chunks: layouts.gathered(sizes), dtype, choice)

    def alltoall(self, sizes: Sequence[int], dtype: np.dtype[Any], choice: C) -> P:
        """``sizes[i * N + j]`` elements from rank i to rank j; inputs by receiver, outputs by sender."""
        return self._plan("alltoall", lambda chunks: layouts.exchanged(sizes, self._size), dtype, choice)

    def _plan(
        self,
        collective: str,
        layout_of: Callable[[int], Layout],
        dtype: np.dtype[Any],
        choice: C,
        kernel: Any = None,
        finish: Any = None,
        root: int = 0,
        **fused: Any,
    ) -> P:
        algorithm = registry.find(collective, choice.algorithm)
        schedule_of = algorithm.schedules(self._placement.hosts, root)
        layout = layout_of(schedule_of(self._rank).chunks)
        return self._compile(algorithm, schedule_of, layout, dtype, choice, kernel, finish, **fused)

    @abstractmethod
    def _compile(
        self,
        algorithm: Algorithm,
        schedule_of: Callable[[int], Schedule],
        layout: Layout,
        dtype: np.dtype[Any],
        choice: C,
        kernel: Any,
        finish: Any,
    ) -> P:
        """Lower the schedules and bind the program."""


def _whole(shape: Shape, dtype: np.dtype[Any]) -> Callable[[int], Layout]:
    return lambda chunks: layouts.whole(shape, dtype, chunks)


class Plans(Builder[Choice, Plan]):
    """Makes the plans of one world for host memory, which ``executor`` runs; their descriptions call what carries
    messages ``network``."""

    def __init__(self, placement: Placement, executor: Executor, network: str) -> None:
        super().__init__(placement)
        self._executor = executor
        self._network = network

    def fused(self, pieces: Pieces, dtype: np.dtype[Any], choice: Choice, kernel: Any, finish: Any) -> Plan:
        """An all-reduce of several tensors as one, through windows."""
        return self._plan("allreduce", _whole((pieces.total,), dtype), dtype, choice, kernel, finish, pieces=pieces)

    def bucket_loop(self, pieces: Pieces, dtype: np.dtype[Any], kernel: Any, finish: Any) -> BucketLoop:
        """An all-reduce of several tensors as one, where they lie."""
        layout = layouts.whole((pieces.total,), dtype, self._size)
        why = "where the tensors of all ranks are mapped"
        self.log_choice("allreduce", pieces.total, dtype, "fused direct over mapped", why)
        if self._placement.reads_private:
            why = "for other tensors, unless windows are measured to be faster"
            self.log_choice("allreduce", pieces.total, dtype, "fused direct over direct-read", why)
        start, size = layout.inputs(self._rank)[self._rank], layout.sizes[self._rank]
        blocks = MAPPED_BLOCK_BYTES // dtype.itemsize, DIRECT_BLOCK_BYTES // dtype.itemsize
        return self._executor.bucket_loop(pieces, dtype, start, size, *blocks, kernel, finish)

    def log_choice(self, collective: str, count: int, dtype: np.dtype[Any], how: str, why: str) -> None:
        """Log how ``count`` elements in all will travel, and why; on rank 0 alone, because all ranks do the same."""
        if self._rank == 0 and logging.logger.isEnabledFor(logging.LEVELS["debug"]):
            nbytes = count * dtype.itemsize
            logging.logger.debug("%s of %d bytes of %s: %s (%s)", collective, nbytes, dtypes.name(dtype), how, why)

    def _compile(
        self,
        algorithm: Algorithm,
        schedule_of: Callable[[int], Schedule],
        layout: Layout,
        dtype: np.dtype[Any],
        choice: Choice,
        kernel: Any,
        finish: Any,
        pieces: Pieces | None = None,
    ) -> Plan:
        between, versioned = medium_between(self._placement, choice.medium), algorithm.versioned
        staged = choice.medium is Medium.WINDOW
        largest = max(layout.sizes)
        block = min(max(1, choice.block_bytes // dtype.itemsize), largest)
        slot = SLOT_BYTES // dtype.itemsize
        # The fullest window of all ranks decides, so that all come to the same block and number of segments.
        fullest = max(
            window_blocks(schedule_of, rank, layout, between, staged, versioned) for rank in range(self._size)
        )
        if fullest * block > slot:
            align = max(1, _ALIGN // dtype.itemsize)
            block = slot // fullest // align * align or max(1, slot // fullest)
        packed = pieces is not None
        program = compile_program(schedule_of, self._rank, layout, block, between, staged, versioned, packed)
        segments = -(-largest // block)
        stride = stride_for(len(program.rounds), segments, choice.overlap, fullest > 0)
        # The addresses of outputs are not known yet when the ranks agree on sizes.
        reads_outputs = algorithm.passes_on and choice.medium.in_place
        fused = "fused " if packed else ""
        medium = self._network if choice.medium is Medium.MESSAGE and self._network else choice.medium.value
        how = f"{fused}{algorithm.name} over {medium}"
        description = f"{how}, {segments} segments of {block * dtype.itemsize} bytes per chunk"
        if pieces is not None:
            starts, sizes = layout.inputs(self._rank), layout.sizes
            pieces.unstaged = [(starts[chunk], sizes[chunk]) for chunk in program.unstaged if sizes[chunk]]
        self.log_choice(algorithm.collective, sum(layout.sizes), dtype, description, choice.why)
        plan = self._executor.bind(
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
            choice.medium is Medium.MAPPED,
            fullest > 0,
        )
        if choice.medium.in_place and not self._placement.one_host:
            # A rank that is alone on its host has no peer to tell, but all enter the round with equally many words.
            plan.needs_addresses = any(len(host) > 1 for host in self._placement.hosts)
        if algorithm.owner_pushes and choice.medium is Medium.MAPPED:
            start, size = layout.inputs(self._rank)[self._rank], layout.sizes[self._rank]
            plan.rest = tuple(cut for cut in (slice(start), slice(start + size, sum(layout.sizes))) if cut.stop)
        return plan
