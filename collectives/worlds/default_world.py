"""The state of the default world: the world that `collectives.init` makes, its process sets, and this process's job."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from collectives.base import interrupts, logging
from collectives.base.errors import InvalidArgumentError
from collectives.transport.stores.rendezvous import Asked
from collectives.worlds import elastic_jobs
from collectives.worlds.exit_hooks import Hooks
from collectives.worlds.known_sets import KnownSets
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.world import World

global_process_set = ProcessSet(None)
"""All ranks."""


class DefaultWorld:
    """The default world and its process sets: the one module-level state.

    Attributes:
        all_ranks: the process set of all its ranks.
        world: None before `init` and after `shutdown`.
        hooks: watch how the process ends.
        lock: of `init` and `shutdown`; reentrant, because a signal handler may shut down while its thread is in `init`.
        joining: whether `init` is connecting the ranks.
        told: the rank and size that the program has told `init`, under one key.
        known: its process sets.
        comm: as given to `init`.
        job: this process's part in an elastic job; None: its job is not elastic.
        was_shut_down: for the message of calls without a world.
        status: the thread that says where this rank is, for a launcher that asks for it.
        interrupted: whether `init` was left by an exception of another origin, so that the other ranks may wait in it.
    """

    def __init__(self, all_ranks: ProcessSet) -> None:
        self.all_ranks = all_ranks
        self.world: World | None = None
        self.hooks: Hooks | None = None
        self.lock = threading.RLock()
        self.joining = False
        self.told: dict[str, tuple[int | None, int | None]] = {}
        self.known = KnownSets(all_ranks)
        self.comm: Any = None
        self.job: elastic_jobs.Job | None = None
        self.was_shut_down = False
        self.status: threading.Thread | None = None
        self.interrupted = False

    @contextmanager
    def as_one_rank(self, asked: Asked) -> Iterator[None]:
        """Have this process be the rank that the program tells `init`, and no other.

        Raises:
            InvalidArgumentError: it is another one already, perhaps in another thread, for which the lock would wait.
        """
        if asked.rank is not None:
            world, identity = self.world, (asked.rank, asked.size)
            rank, size = self.told.setdefault("", identity) if world is None else (world.rank, world.size)
            if (rank, size) != identity:
                raise InvalidArgumentError(
                    f"init: rank={asked.rank}, size={asked.size}: this process is already rank {rank} of {size}, and "
                    "a process can be only one rank, however many threads it has. Start each rank in a process of its "
                    "own (under Dask: workers with one thread each, and one task for each worker), or call shutdown() "
                    "first; for ranks that are threads of one process, use collectives.local_world [W25]"
                )
        try:
            yield
        finally:
            if self.world is None and not self.joining:
                self.told.clear()

    def adopt(self, world: World) -> None:
        """Make a world the default one."""
        self.all_ranks.attach(0, world, world)
        self.was_shut_down = False
        self.world = world

    def forget(self) -> None:
        """Drop the world and its process sets."""
        self.known.forget()
        self.told.clear()
        self.world = self.comm = self.all_ranks.mpi_comm = None
        self.was_shut_down = True
        logging.place(None)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock, and let signal handlers raise only while this thread waits: so an interrupt leaves `init` with
        a world or without one, and `shutdown` with the world or without it."""
        with interrupts.deferred():
            interrupts.acquire(self.lock)
            try:
                yield
            finally:
                self.lock.release()


default = DefaultWorld(global_process_set)
