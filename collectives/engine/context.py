"""The context of a world's tasks: transports, plans, memory, counters."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.base.errors import TransportError
from collectives.engine.host_requests import HostRequestCache
from collectives.engine.request_cache import CachedRequest
from collectives.plan.builder import Plans
from collectives.plan.executor import Executor
from collectives.plan.planner import Planner
from collectives.tensors import reduction
from collectives.tensors.result_pool import ResultPool
from collectives.transport.base import Array, Control
from collectives.transport.group import Group

if TYPE_CHECKING:
    from collectives.engine.timeline import Timeline


@dataclass(slots=True)
class Statistics:
    """Counters of a world. Bytes are of this rank's tensors."""

    rounds: int = 0
    """Negotiation rounds."""
    unanimous: int = 0
    """Rounds in which all ranks proposed the same."""
    compared: int = 0
    """Rounds after which the ranks compared what they have."""
    exchanged: int = 0
    """Comparisons in which a rank told a new request in full."""
    tensors: int = 0
    buckets: int = 0
    """Tasks carried out; a bucket of fused tensors is one."""
    plans_made: int = 0
    """Lists of several operations that were planned."""
    bytes_reduced: int = 0
    bytes_packed: int = 0
    """Copied into a buffer or window, and out of it."""
    steps: int = 0
    """Steps of the program: one ends when a named operation comes that it has had already."""

    def count_step(self, entry: CachedRequest) -> None:
        """Note that a named operation has come, and count a step if it is in the present one for the second time."""
        if entry.last_step == self.steps:
            self.steps += 1
        entry.last_step = self.steps

    def count_alone(self, operations: int, nbytes: int) -> None:
        """Count operations of ``nbytes`` in all, each of which was carried out in a round of its own."""
        self.rounds += operations
        self.unanimous += operations
        self.tensors += operations
        self.buckets += operations
        self.bytes_reduced += nbytes

    def copy(self) -> Statistics:
        """The counters as they are now."""
        return Statistics(**{field.name: getattr(self, field.name) for field in fields(self)})


@dataclass(eq=False)
class Context:
    """What the tasks of one world share."""

    group: Group
    executor: Executor
    entries: HostRequestCache
    plans: Plans
    planner: Planner
    pool: ResultPool

    def __post_init__(self) -> None:
        self.rank, self.size = self.group.rank, self.group.size
        self.control: Control = self.group.control
        self.statistics = Statistics()
        self.timeline: Timeline | None = None
        self.device_tasks: Callable[[Sequence[CachedRequest]], Sequence[tuple[Any, Sequence[int]]]] = _no_devices
        """Makes the tasks for requests on device tensors that may be fused, each with the positions of its requests."""
        self.release_devices: Callable[[], int] = _nothing
        """Unmaps the peers' device memory. Returns the bytes."""
        self.joined = False
        """Whether this rank contributes neutral elements, to which no factor is applied."""
        self.quietly = _quiet_runner()
        self._buffer = np.empty(0, np.uint8)

    def buffer(self, count: int, dtype: np.dtype[Any]) -> Array:
        """The buffer that tasks share, one after the other, as ``count`` elements."""
        if self._buffer.nbytes < count * dtype.itemsize:
            self._buffer = np.empty(-(-count * dtype.itemsize // 4096) * 4096, np.uint8)
        return self._buffer[: count * dtype.itemsize].view(dtype)

    def meet(self, token: int, words: Sequence[int] | memoryview = ()) -> None:
        """Synchronise all ranks within an operation that they have agreed on.

        Raises:
            TransportError: they are at different places, which must not happen.
        """
        if not self.control.agree(token, words):
            raise TransportError(
                f"rank {self.rank}: the ranks are at different steps of an operation that all agreed on; check that "
                "all hosts have the same version of collectives (collectivesrun --doctor) [R32]"
            )

    def make_room(self) -> int:
        """Have every rank unmap its peers' device memory. All ranks call it; all have done so when it returns.

        Returns:
            The bytes that this rank no longer maps.

        Raises:
            TransportError: on every rank, if one of them cannot.
        """
        released, problem = 0, ""
        try:
            released = self.release_devices()
        except Exception as error:  # the others are in the exchange, whatever it is
            problem = f"{type(error).__name__}: {error}"
        problem = next(filter(None, self.control.exchange(problem)), "") if self.size > 1 else problem
        if problem:
            raise TransportError(f"rank {self.rank}: device memory cannot be released: {problem} [G15]")
        return released

    def release(self) -> None:
        """Drop the windows and the memory that tasks use."""
        self.entries.release()
        self.executor.release()
        self._buffer = np.empty(0, np.uint8)
        del self.executor, self.entries, self.plans

    def run_quietly(self, warns: bool, run: Callable[..., object], *arguments: Any) -> None:
        """``run(*arguments)``, without NumPy's warnings if its kernels may emit some."""
        # Not around the caller's waits: a context admits one thread at a time.
        if warns:
            self.quietly(run, *arguments)
        else:
            run(*arguments)


def _nothing() -> int:
    """Release nothing: the world has no device."""
    return 0


def _no_devices(entries: Sequence[CachedRequest]) -> Sequence[tuple[Any, Sequence[int]]]:
    raise TransportError("internal error: got an operation on a GPU tensor in a world without a GPU [G35]")


def _quiet_runner() -> Callable[..., Any]:
    """A function that calls another without NumPy's floating-point warnings.

    NumPy 2 keeps its error state in a context variable: a context in which it is off, made once and entered by the
    driving thread, costs a twentieth of `numpy.errstate`. NumPy 1 needs the latter.
    """
    if int(np.__version__.split(".")[0]) >= 2:
        context = contextvars.copy_context()
        context.run(np.seterr, all="ignore")
        return context.run

    def run(function: Callable[..., Any], *arguments: Any) -> Any:
        with reduction.quiet():
            return function(*arguments)

    return run
