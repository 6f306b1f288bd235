"""A world: the ranks of one group and all its state, from the first call to the last.

Its collectives (`collectives.worlds.operations`) make a handle of each call, or refuse its arguments; the engine brings
the ranks together and carries the operation out. A process set is a world of its own. A failure in the middle of a call
ends the world.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from collectives.base.config import Config
from collectives.base.errors import (
    CollectivesError,
    ForkedProcessError,
    InvalidArgumentError,
    InvalidTypeError,
    NotInitializedError,
    RankFailedError,
    TransportError,
    in_words,
    of_rank,
)
from collectives.base.exclusion import exclusive
from collectives.engine import timeline
from collectives.engine.context import Context, Statistics
from collectives.engine.engine import Engine
from collectives.engine.failure import release_settled
from collectives.engine.handles import Handle
from collectives.engine.host_handles import HostHandles
from collectives.engine.host_requests import HostRequestCache, NativeTransport
from collectives.engine.messages.transfers import Transfers
from collectives.engine.overlaps import InFlight
from collectives.engine.requests import HandleFactory
from collectives.engine.stall import Wait
from collectives.plan.builder import Plans
from collectives.plan.executor import Executor
from collectives.plan.planner import Placement, Planner
from collectives.schedules import registry
from collectives.tensors.arena import arena
from collectives.tensors.result_pool import ResultPool
from collectives.transport import backoff
from collectives.transport.cuda.issue_order import Turn
from collectives.transport.group import Group
from collectives.tuning.online import Tuning
from collectives.tuning.search import TunedSettings
from collectives.worlds.messages import Messages
from collectives.worlds.objects import Objects
from collectives.worlds.operations import Operations
from collectives.worlds.persistent_init import PersistentInit

if TYPE_CHECKING:
    from collectives.cuda.backend import DeviceBackend

_LEAVE_WITHIN = 2.0
_SETTLE_WITHIN = 30.0
_PUBLIC = {
    part: tuple(name for name in dir(part) if not name.startswith("_"))
    for part in (Operations, PersistentInit, Objects, Messages)
}
"""The methods that a world has of each of its parts."""


if TYPE_CHECKING:

    class _Parts(Operations, PersistentInit, Objects, Messages):
        """What a world's parts give it: their public attributes are its own."""

else:
    _Parts = object


class World(_Parts):
    """One rank of a group. Methods may be called from any thread.

    Args:
        turn: of this rank, if this is a process set of another world; orders the two worlds' uses of NCCL.

    Attributes:
        operations: its collectives; they are attributes of the world too, as are those of its other parts.
        rank, size: this rank and the number of ranks.
        local_rank, local_size: among the ranks of this host.
        cross_rank, cross_size: this host, and the number of hosts, among the ranks with this local rank.
        ranks: the ranks' numbers in the outermost world; messages call them by these.
        network: what carries messages between the ranks: "mpi", "tcp" or "threads"; empty where there is one rank.
        tuning: the search for better settings; None if there is none.
    """

    def __init__(
        self, group: Group, config: Config | None = None, *, turn: Turn | None = None, in_flight: InFlight | None = None
    ) -> None:
        release_settled()
        config = config or Config()
        if config.algorithm == registry.REPRODUCIBLE:  # only reductions have it
            config = replace(config, algorithm="auto", reproducible=True)
        self.config = config
        self.rank = group.rank
        self.size = group.size
        self.ranks = group.ranks
        local = group.local
        self.local_rank = local.index(group.rank)
        self.local_size = len(local)
        peers = [host for host in group.hosts if len(host) > self.local_rank]
        self.cross_rank = peers.index(local)
        self.cross_size = len(peers)
        self.is_homogeneous = len({len(host) for host in group.hosts}) == 1
        self.network = group.messages.name if group.messages is not None and group.size > 1 else ""
        self._group = group
        self._control = group.control
        self._pool = ResultPool(config.result_pool)
        placement = Placement(
            group.rank,
            group.size,
            group.hosts,
            shares_memory=group.memory is not None,
            reads_private=group.memory is not None and group.memory.reads_private,
            maps=group.memory is not None and group.memory.mapped is not None,
            carries=group.control.carries,
            network=self.network,
        )
        self.planner = Planner(
            placement,
            algorithm=config.algorithm,
            transport=config.transport,
            segment=config.segment,
            reproducible=config.reproducible,
        )
        executor = Executor(group)
        plans = Plans(placement, executor, self.network)
        native = group.messages if isinstance(group.messages, NativeTransport) else None
        requests = HostRequestCache(placement, self.planner, plans, native)
        self._context = Context(group, executor, requests, plans, self.planner, self._pool)
        self._devices: DeviceBackend | None = None
        self._lock = threading.RLock()
        host = HostHandles(requests, self._pool)
        handles = HandleFactory(self.rank, self.size, host, lambda: self._use_devices().handles)
        self._in_flight = InFlight() if in_flight is None else in_flight
        """Shared by a rank's process sets, whose operations may be given the same memory."""
        self._engine = Engine(
            self._context,
            config,
            group.ranks,
            handles.neutral,
            group.memory is not None and group.memory.name == "threads",
            self._in_flight,
        )
        self.operations = Operations(self.rank, self.ranks, self._engine, handles, self._pool)
        self._persistent = PersistentInit(self.operations, self._engine, handles)
        self._transfers = self._make_transfers()
        objects = Objects(self.operations, group.key)
        messages = Messages(self.rank, self.ranks, self._transfers)
        for part in (self.operations, self._persistent, objects, messages):
            for name in _PUBLIC[type(part)]:
                setattr(self, name, getattr(part, name))
        self.tuning = Tuning(self._engine, self.planner, config) if config.autotune and self.size > 1 else None
        self._children: list[World] = []
        self._turn = turn or Turn()
        self._recorder: timeline.Timeline | None = None
        """The timeline that this world has opened, and closes; its process sets write to it too."""
        _remember(self)

    def _make_transfers(self) -> Transfers:
        this = weakref.ref(self)  # a world must end without the garbage collector

        def failed(text: str) -> None:
            world = this()
            if world is not None:
                world.fail(text)

        return Transfers(self._group, self._engine, self._pool, self.config.timeout, failed)

    @exclusive
    def _use_devices(self) -> DeviceBackend:
        """The device backend, made when the first tensor on a GPU comes."""
        if self._devices is None:
            side = importlib.import_module("collectives.cuda.backend")
            this = weakref.ref(self)  # the thread that watches the GPU must not keep the world alive

            def failed(error: Exception) -> None:
                world = this()
                if world is not None:
                    world.fail(f"work on the GPU was aborted: {in_words(world.ranks[world.rank], error)}")

            self._devices = side.DeviceBackend(self._context, self.config, self.local_rank, self._turn, failed)
        return self._devices

    def beside(self, group: Group, config: Config) -> World:
        """A world of another group, whose operations may be given the same memory as this one's."""
        return World(group, config, turn=self._turn, in_flight=self._in_flight)

    # ---- process sets

    def add_process_set(self, ranks: Sequence[int]) -> World | None:
        """Make a world of some of this world's ranks; every rank of this world calls it.

        Returns:
            The new world, or None on ranks that are not in it.

        Raises:
            InvalidArgumentError: not ranks of this world, or one of them twice.
            MismatchError: the ranks' arguments differ.
            TransportError: on every rank, if one of them fails, for instance for lack of memory.
        """
        try:
            chosen = tuple(sorted(int(rank.__index__()) for rank in ranks))
            if not chosen or len(set(chosen)) != len(chosen) or not all(0 <= rank < self.size for rank in chosen):
                raise InvalidArgumentError(
                    f"ranks: expected distinct ranks from 0 to {self.size - 1}, got {list(ranks)} [W54]"
                )
        except AttributeError:
            raise self.refused(
                InvalidTypeError(f"ranks: expected a sequence of ranks, got {ranks!r} [W55]"), None
            ) from None
        except InvalidArgumentError as error:
            raise self.refused(error, None) from None

        def split(handle: Handle) -> World | None:
            group = self._group.split(chosen)
            self._turn.needed = True
            child, problem = None, ""
            try:
                child = None if group is None else self.beside(group, self.config)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            problem = self._first_of(problem)
            if problem:
                if child is not None:
                    child.shutdown()
                elif group is not None:
                    group.control.leave()
                    group.close()
                raise TransportError(
                    f"rank {self.ranks[self.rank]}: the process set {list(chosen)} cannot be made: {problem} [W56]"
                )
            return child

        child: World | None = self.operations.meet("add_process_set", split, ranks=chosen)
        if child is not None:
            child._context.timeline = self._context.timeline
            child._engine.set_obstacle("timeline", self._context.timeline is not None)
            self._children.append(child)
        return child

    def remove_process_set(self, ranks: Sequence[int], child: World | None) -> None:
        """Shut a process set down; every rank of this world calls it. ``child`` is the set's world, on its members."""
        self.operations.meet("remove_process_set", ranks=tuple(ranks))
        if child is not None:
            self._children.remove(child)
            child.shutdown()

    # ---- memory

    def empty_cache(self) -> int:
        """See `collectives.empty_cache`."""

        def release(_: Handle) -> int:
            released = self._context.make_room()  # first mappings of the peers' memory, then this rank's own
            self._pool.clear()
            arena.release()
            return released + (self._devices.accelerator.trim() if self._devices is not None else 0)

        released: int = self.operations.meet("empty_cache", release)
        return released

    # ---- tuning

    def tune(self, **start: Any) -> None:
        """Begin to search for better settings; every rank calls it, with the same arguments.

        Unlike the search by ``autotune`` of `Config`, it also changes settings that were set by hand.

        Args:
            start: initial settings, such as ``fusion_threshold=1 << 20``; names as in
                `collectives.tuning.search.TunedSettings`.
        """

        def begin(_: Handle) -> None:
            self.tuning = Tuning(self._engine, self.planner, self.config, start)

        unknown = start.keys() - TunedSettings.__dataclass_fields__.keys()
        if unknown:
            text = (
                f"tune: expected settings among {', '.join(TunedSettings.__dataclass_fields__)}; got {sorted(unknown)} "
                "[W59]"
            )
            raise self.refused(InvalidArgumentError(text), None)
        # Settings decide the plans: ranks with different ones would move different bytes.
        self.operations.meet("tune", begin, what=", ".join(f"{name}={start[name]!r}" for name in sorted(start)))

    # ---- the timeline

    def start_timeline(self, path: str | os.PathLike[str], mark_cycles: bool = False, *, goes_on: bool = False) -> None:
        """See `collectives.start_timeline`; ``goes_on``: in a file that an earlier world has begun."""
        try:
            name = os.fspath(path)
        except TypeError as error:
            raise self.refused(InvalidTypeError(f"path: {error} [W60]"), None) from None

        self.operations.meet("start_timeline", lambda _: self._open_timeline(name, mark_cycles, goes_on))

    def stop_timeline(self) -> None:
        """See `collectives.stop_timeline`."""
        for world in (self, *self._children):
            world._context.timeline = None
            world._engine.set_obstacle("timeline", False)
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.close()

    def _first_of(self, problem: str) -> str:
        """The first problem that any rank reports, with its rank; all ranks call it, with "" for none."""
        problems = self._control.exchange(problem) if self.size > 1 else [problem]
        return next((of_rank(self.ranks[peer], text) for peer, text in enumerate(problems) if text), "")

    def record(self, track: str, name: str, begin: float, **details: object) -> None:
        """Record a span of this rank, from ``begin`` on `time.monotonic` until now, if there is a timeline."""
        if self._recorder is not None:
            self._recorder.span(track, name, begin, time.monotonic(), **details)

    def _open_timeline(self, path: str, mark_cycles: bool, goes_on: bool) -> None:
        """On all ranks at once: rank 0 names and begins the file, the others append to it."""
        path, mark_cycles = self._control.exchange((path, mark_cycles))[0] if self.size > 1 else (path, mark_cycles)
        offset = timeline.align(self._control.exchange if self.size > 1 else lambda value: [value])
        recorder, problem = None, ""
        try:
            self.stop_timeline()
        except Exception as error:
            problem = str(error)
        for first in (True, False):
            if first == (self.rank == 0) and not problem:
                try:
                    recorder = timeline.Timeline(
                        path, self.rank, host=platform.node(), offset=offset, first=first and not goes_on
                    )
                except Exception as error:
                    problem = str(error)
            problem = self._first_of(problem)
        if problem:
            if recorder is not None:
                recorder.close()
            raise InvalidArgumentError(f"cannot start the timeline: {problem} [W61]")
        self._recorder = recorder
        for world in (self, *self._children):
            world._context.timeline = recorder
            world._engine.set_obstacle("timeline")
            world._engine.mark_cycles(mark_cycles)

    def bound_waits_of_sets(self, seconds: float, why: str) -> None:
        """End waits in its process sets with a CollectiveTimeoutError after so many seconds; ``why``: for its text."""
        for child in self._children:
            child._engine.bound_stalls(seconds, f"In the process set of ranks {list(child.ranks)}. {why}")

    def waits(self) -> list[Wait]:
        """What this rank waits for, in this world and its process sets; any thread may ask."""
        worlds = (self, *self._children)
        waits = [found for world in worlds for found in (world._engine.oldest(), world._transfers.awaited())]
        return [wait for wait in waits if wait is not None]

    @property
    def work_done(self) -> tuple[int, int]:
        """The operations that this rank has carried out, in this world and its process sets, and the program's steps,
        as `Statistics` counts both."""
        counters = [world.statistics for world in (self, *self._children)]
        return sum(each.tensors for each in counters), max(each.steps for each in counters)

    # ---- the end

    @property
    def failure(self) -> CollectivesError | None:
        """The error that every further call raises; None while the world can be used."""
        refusal = self._engine.refusal
        return None if refusal is None else refusal()

    @property
    def statistics(self) -> Statistics:
        """A copy of the counters of what this world has done so far."""
        return self._engine.statistics

    def shutdown(self) -> None:
        """Leave the group; later calls are refused, and operations in flight fail. Idempotent.

        Called by a signal handler in the middle of a collective or of a message, it only marks the world as failed,
        because these still use its memory.
        """
        engine = self._engine
        if engine.drives() or self._transfers.delivery.drives():
            self.fail("it was shut down in the middle of a call")
            return
        for child in self._children:
            child.shutdown()
        self._end()
        engine.await_background(_LEAVE_WITHIN)

    def _end(self) -> None:
        engine = self._engine
        with engine.paused(), self._transfers.delivery.held():
            if isinstance(engine.refusal, _ShutDown):
                return
            may_speak = self._may_speak()
            failed = engine.abandon() or engine.refusal is not None
            engine.refuse(_ShutDown(self.ranks[self.rank]))
            self.stop_timeline()
            if self.tuning is not None:
                self.tuning.close()
            if not may_speak:
                self._transfers.close()
                return
            # The GPU's work for the peers must be done before they see that this rank has left.
            settled = self._devices is not None and not failed and self._devices.accelerator.settle(_SETTLE_WITHIN)
            if self._devices is not None and settled:
                self._devices.accelerator.close()
            self._control.leave()
            self._transfers.close()
            if self._devices is None or not failed:  # the GPU may still work on what has failed
                engine.when_settled(partial(self._release, settled))

    def _release(self, settled: bool) -> None:
        """Give everything back; no peer touches this rank's memory any more. ``settled``: nor does this rank's GPU."""
        self._pool.clear()
        self._engine.release()
        # Peers that have left have this rank's device memory mapped no more.
        if self._devices is not None and settled and backoff.poll(self._control.all_left, _LEAVE_WITHIN):
            self._devices.free()
        self._persistent._close()
        self.operations._close()  # drops its views into the windows, so that they can be unmapped
        self._group.close()
        arena.release()

    def fail(self, text: str) -> None:
        """Tell the other ranks that this one is about to end; their waits raise a RankFailedError with ``text``."""
        rank = self.ranks[self.rank]
        self._engine.refuse_calls(lambda: RankFailedError(f"rank {rank}: this world has failed [R4]:\n{text}"))
        self._control.fail(text)
        for child in self._children:
            child.fail(text)

    def leave(self) -> None:
        """Tell the other ranks that this one will make no further call, even if the world has failed."""
        engine = self._engine
        with engine.paused(within=_LEAVE_WITHIN):
            if self._may_speak():
                failed = engine.abandon() or engine.refusal is not None
                if self._devices is not None and not failed:
                    self._devices.accelerator.settle(_SETTLE_WITHIN)
                self._control.leave()
                if engine.refusal is None:  # MPI is about to be finalised: nothing in flight may enter another round
                    engine.refuse(_ShutDown(self.ranks[self.rank]))
        engine.await_background(_LEAVE_WITHIN)
        for child in self._children:
            child.leave()
        self.stop_timeline()
        if self.tuning is not None:
            self.tuning.close()

    def all_left(self) -> bool:
        """Whether every other rank has left or died; ranks whose programs still handle a failure have not."""
        return self._control.all_left()

    def after_fork(self) -> None:
        """In a forked child: refuse all calls, and leave the parent's memory and MPI alone."""
        rank, parent = self.rank, os.getppid()
        self._context.timeline = None
        self._transfers.delivery.after_fork()
        self._engine.after_fork(
            lambda: ForkedProcessError(
                f"rank {rank}: a collective was called in a process forked from rank {rank} (process {parent}); "
                "only the process that called init() may communicate: use spawn, or keep collectives out of the child "
                "[W7]"
            )
        )

    def _may_speak(self) -> bool:
        """Whether this world may tell the other ranks anything: not after shutdown, and not in a forked child."""
        refusal = self._engine.refusal
        return refusal is None or not isinstance(refusal(), (NotInitializedError, ForkedProcessError))


class _ShutDown:
    """Makes the error of calls after `World.shutdown`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __call__(self) -> CollectivesError:
        return NotInitializedError(f"rank {self._rank}: this world was shut down; call collectives.init() again [W5]")


_worlds: list[weakref.ref[World]] = []
"""References without callbacks: an interrupt that is handled in one, when a world ends, would be lost."""


def _remember(world: World) -> None:
    """Have ``world.after_fork`` called in every child that is forked while the world exists."""
    for ended in [reference for reference in _worlds if reference() is None]:
        with contextlib.suppress(ValueError):  # another thread has removed it
            _worlds.remove(ended)
    _worlds.append(weakref.ref(world))


def _after_fork_in_child() -> None:
    for world in filter(None, [reference() for reference in _worlds]):
        world.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
