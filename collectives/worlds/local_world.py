"""`local_world`: ranks that are threads of this process.

While one exists, the default world and `global_process_set` are those of the calling thread's rank: each of the two
objects gets a class that looks every attribute up in the rank of the thread. Without a local world nothing is looked
up, and no call is slower.

Frameworks carry out part of a rank's work in threads of their own. What may run there is made by a thread that has a
rank, and keeps the rank's number (`number_of_rank`, `as_rank`, `bound`). A thread without a rank is refused.
"""

from __future__ import annotations

import inspect
import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Generic, TypeVar

from collectives.base import logging
from collectives.base.config import Config
from collectives.base.errors import (
    CollectiveTimeoutError,
    InvalidArgumentError,
    InvalidTypeError,
    NotInitializedError,
    RankFailedError,
    in_words,
)
from collectives.base.exclusion import exclusively
from collectives.transport.threads import thread_groups
from collectives.worlds.default_world import DefaultWorld, default, global_process_set
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.world import World

Returned = TypeVar("Returned")

END_WITHIN = 30.0
"""Seconds within which the other ranks end once one has failed."""

entering: list[Callable[[int, int], AbstractContextManager[Any]]] = []
"""Contexts in which every rank's thread runs, made of its number (`number_of_rank`) and its rank; adapters add theirs,
which give each rank a device of its own."""

_numbers = itertools.count(1)
_ranks: dict[int, _Rank] = {}
"""The ranks whose function runs, by the numbers that `number_of_rank` returns."""
_changing = threading.RLock()


class _Rank(DefaultWorld):
    """The default world of the threads of one rank, in one run."""

    def __init__(self, number: int, world: World) -> None:
        super().__init__(ProcessSet(None))
        self.number, self.rank, self.own_world = number, world.rank, world
        self.adopt(world)

    @contextmanager
    def as_one_rank(self, asked: Any) -> Iterator[None]:
        if self.world is None:
            raise NotInitializedError(
                "init(): this rank called shutdown(), and cannot join its local world again; leave out shutdown() [W12]"
            )
        with super().as_one_rank(asked):
            yield


_rank_of_thread: ContextVar[_Rank | None] = ContextVar("collectives_rank", default=None)


def _own_rank() -> _Rank:
    rank = _rank_of_thread.get()
    if rank is None:
        raise NotInitializedError(
            f"thread {threading.current_thread().name!r} belongs to no rank of the local world; call collectives in "
            "the function that you pass to run(). A thread that this function starts belongs to its rank if it runs "
            "in a copy of the context: Thread(target=contextvars.copy_context().run, args=(function,)) [W13]"
        )
    return rank


def _of_thread(kind: type, select: Callable[[], Any]) -> type:
    """A subclass whose instances stand for what ``select()`` returns in the calling thread."""

    class OfThread(kind):  # type: ignore[misc]  # its type is not known when it is checked
        def __getattribute__(self, name: str) -> Any:
            return object.__getattribute__(self, name) if name.startswith("__") else getattr(select(), name)

        def __setattr__(self, name: str, value: object) -> None:
            setattr(select(), name, value)

    return OfThread


_STAND_INS = (
    (default, DefaultWorld, _of_thread(DefaultWorld, _own_rank)),
    (global_process_set, ProcessSet, _of_thread(ProcessSet, lambda: _own_rank().all_ranks)),
)
"""The two objects that are the calling thread's, with their classes outside and within a local world."""


# ---- for adapters: work of a rank in other threads


def number_of_rank() -> int:
    """A number of the calling thread's rank that no other rank of this process ever has; 0 without a local world.

    Raises:
        NotInitializedError: there is a local world, and the thread belongs to no rank.
    """
    return 0 if type(default) is DefaultWorld else _own_rank().number


@contextmanager
def as_rank(number: int) -> Iterator[None]:
    """Have the calling thread belong to the rank of a `number_of_rank`; 0: leave it as it is.

    Raises:
        NotInitializedError: the rank's local world has ended.
        InvalidArgumentError: the thread belongs to another rank.
    """
    if not number:
        yield
        return
    rank, own = _ranks.get(number), _rank_of_thread.get()
    if own is not None and own.number != number:
        raise InvalidArgumentError(
            f"rank {own.rank} uses an object that another rank of the local world made; make one on every rank, in "
            "the function that you pass to run() [W14]"
        )
    if rank is None:
        raise NotInitializedError("this object was made in a local world that has ended; make a new one [W15]")
    token = _rank_of_thread.set(rank)
    try:
        yield
    finally:
        _rank_of_thread.reset(token)


def bound(function: Callable[..., Returned]) -> Callable[..., Returned]:
    """A function that belongs to the calling thread's rank in whichever thread it runs."""
    number = number_of_rank()
    if not number:
        return function

    @wraps(function)
    def call(*arguments: Any) -> Returned:
        with as_rank(number):
            return function(*arguments)

    return call


# ---- the local world


@contextmanager
def local_world(size: int) -> Iterator[LocalWorld]:
    """Run several ranks as threads of this process, each with its own device.

        with collectives.local_world(2) as world:
            losses = world.run(train)

    Within the `with` block, only the functions that you pass to `LocalWorld.run` may call collectives. Reads the
    environment (see `Config`). There is no launcher, no MPI and no network.

    The ranks share the interpreter's lock: Python code runs on one core at a time. If the process has several devices,
    adapters that are already imported give each rank one of them as its default: TensorFlow's logical devices, JAX's
    devices. With torch, select ``collectives.local_device()``.

    Args:
        size: the number of ranks.

    Yields:
        The local world, whose `run` calls a function on every rank.

    Raises:
        InvalidTypeError, InvalidArgumentError: ``size`` is not a number of ranks; `init` has been called; or a local
            world already exists.

    Example:
        with collectives.local_world(4) as world:
            results = world.run(train)
    """
    try:
        size = int(size.__index__())
    except AttributeError:
        raise InvalidTypeError(f"local_world: size: expected a number of ranks, got {size!r} [W16]") from None
    if size < 1:
        raise InvalidArgumentError(f"local_world: size: expected at least 1 rank, got {size} [W17]")
    world = exclusively(_changing, _begun, size)
    try:
        yield world
    finally:
        exclusively(_changing, _stand_in, False)


def _begun(size: int) -> LocalWorld:
    if type(default) is not DefaultWorld:
        raise InvalidArgumentError(
            "local_world: this process already has a local world; leave its `with` block first [W18]"
        )
    if default.world is not None or default.joining:
        raise InvalidArgumentError(
            "local_world: init() has made this process a rank; call shutdown() first, and call init() only in the "
            "function that you pass to run() [W19]"
        )
    world = LocalWorld(size)
    logging.configure(world.config.log_level)
    _stand_in(True)
    return world


def _stand_in(within: bool) -> None:
    """Give the objects that are the calling thread's in a local world their classes within one, or outside."""
    for standing, *classes in _STAND_INS:
        object.__setattr__(standing, "__class__", classes[within])


class LocalWorld:
    """Ranks that are threads of this process; made by `local_world`.

    Attributes:
        size: the number of ranks.
        config: of their worlds.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.config = Config.from_environment()
        self._numbers = [next(_numbers) for _ in range(size)]
        self._threads: list[threading.Thread] = []

    def run(self, function: Callable[..., Returned], timeout: float = math.inf) -> list[Returned]:
        """Call a function on every rank, each in a new thread, in a new world.

        Args:
            function: takes the rank's `World`, or nothing. In it, ``collectives.rank()``, ``allreduce`` and all other
                functions, also those of adapters, act for that rank; ``init()`` does nothing.
            timeout: seconds after which the run is ended.

        Returns:
            The function's results, by rank.

        Raises:
            RankFailedError: a rank raised; the message names the rank and the error, and ``__cause__`` is its
                exception. The other ranks' calls have failed by then.
            CollectiveTimeoutError: ``timeout`` has passed.
            InvalidArgumentError: the `with` block has ended, or an earlier run has not.
        """
        return exclusively(_changing, self._run, function).results(timeout)

    def _run(self, function: Callable[..., Returned]) -> _Run[Returned]:
        if type(default) is DefaultWorld:
            raise InvalidArgumentError("run: the local world has ended; call run() inside the `with` block [W20]")
        running = [thread.name for thread in self._threads if thread.is_alive()]
        if running:
            raise InvalidArgumentError(
                f"run: an earlier run() is still running: {', '.join(running)}; wait until it ends [W21]"
            )
        groups = thread_groups.connect(self.size, timeout=self.config.timeout)
        worlds = [World(group, self.config) for group in groups]
        run = _Run(function, [_Rank(*each) for each in zip(self._numbers, worlds, strict=True)])
        self._threads = run.threads
        return run


class _Run(Generic[Returned]):
    """One call of a function on every rank."""

    def __init__(self, function: Callable[..., Returned], ranks: Sequence[_Rank]) -> None:
        self._function, self._ranks = function, ranks
        self._takes_world = _requires_argument(function)
        self._returned: dict[int, Returned] = {}
        self._errors: list[tuple[int, BaseException]] = []
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._running = {rank.rank for rank in ranks}
        self._until = math.inf
        self.threads = [
            threading.Thread(target=self._body, args=(rank,), name=f"rank {rank.rank}", daemon=True) for rank in ranks
        ]

    def results(self, timeout: float) -> list[Returned]:
        """See `LocalWorld.run`."""
        self._until = time.monotonic() + timeout
        try:
            for thread in self.threads:
                thread.start()
            self._wait()
            if self._running and not self._errors:
                raise CollectiveTimeoutError(f"run: {self._unfinished()} within {timeout:g} s [W22]")
        except BaseException as error:
            for rank in self._ranks:
                rank.own_world.fail(f"the run was ended: {in_words(rank.rank, error)}")
            self._until = time.monotonic() + END_WITHIN
            self._wait()
            raise
        if self._errors:
            failed, first = self._errors[0]
            since = f" ({self._unfinished()} after that)" if self._running else ""
            text = f"rank {failed} of the local world raised {in_words(failed, first)}{since} [W23]"
            raise RankFailedError(text) from first
        return [self._returned[rank.rank] for rank in self._ranks]

    def _wait(self) -> None:
        """Wait until all ranks have ended, or ``_until``."""
        while self._running:
            seconds = self._until - time.monotonic()
            try:
                ended = self._ended.get(timeout=max(0.0, seconds) if seconds < math.inf else None)
            except queue.Empty:
                return
            self._running.remove(ended)
            self.threads[ended].join(END_WITHIN)  # it has nothing left to do; the next run asks whether it is alive

    def _unfinished(self) -> str:
        return f"{', '.join(f'rank {rank}' for rank in sorted(self._running))} did not end"

    def _body(self, rank: _Rank) -> None:
        """Call the function, in the thread of a rank."""
        _rank_of_thread.set(rank)
        logging.rank_of_thread.set(rank.rank)
        _ranks[rank.number] = rank
        try:
            with ExitStack() as contexts:
                contexts.callback(rank.own_world.shutdown)
                for enter in entering:
                    contexts.enter_context(enter(rank.number, rank.rank))
                try:
                    arguments = (rank.own_world,) if self._takes_world else ()
                    self._returned[rank.rank] = self._function(*arguments)
                except BaseException as error:  # raised in `results`; contexts may wait for the other ranks
                    self._errors.append((rank.rank, error))
                    rank.own_world.fail(in_words(rank.rank, error))
        except BaseException as error:
            self._errors.append((rank.rank, error))
        finally:
            if self._errors:
                self._until = min(self._until, time.monotonic() + END_WITHIN)
            del _ranks[rank.number]
            self._ended.put(rank.rank)


def _requires_argument(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:  # some built-in functions have no signature
        return False
    return False
