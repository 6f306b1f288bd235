"""Ranks as forked processes of this host, without MPI: a world in a few milliseconds, whose ranks outlive a rank that
is killed.

    run(3, program)         # program(world) on three processes; raises what the first of them raised

They share memory as ranks under mpirun do (`collectives.transport.shared_memory`) and have no messages. What MPI
carries at set-up goes through a pair of sockets for every two ranks.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import select
import socket
import struct
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from collectives.base.config import Config
from collectives.base.errors import CollectiveTimeoutError, RankFailedError, in_words
from collectives.transport import shared_memory
from collectives.transport.board_control import BoardControl
from collectives.transport.group import Group
from collectives.world import World

_LENGTH = struct.Struct("<q")
_Key = tuple[Any, ...]


class _Links:
    """Sockets from one rank to every other. Several groups exchange through them, from several threads: each message
    carries the key of its group."""

    def __init__(self, links: Mapping[int, socket.socket], timeout: float) -> None:
        self._links = links
        self._timeout = timeout
        self._inbox: dict[tuple[int, _Key], deque[Any]] = {}
        self._lock = threading.Lock()

    def send(self, peer: int, key: _Key, value: Any) -> None:
        data = pickle.dumps((key, value))
        try:
            with self._lock:
                self._links[peer].sendall(_LENGTH.pack(len(data)) + data)
        except OSError:
            raise RankFailedError(f"rank {peer} has died") from None

    def receive(self, peer: int, key: _Key, check: Callable[[], None]) -> Any:
        deadline = time.monotonic() + self._timeout
        while True:
            with self._lock:
                box = self._inbox.setdefault((peer, key), deque())
                if not box and select.select([self._links[peer]], [], [], 0)[0]:
                    arrived, value = self._read(peer)
                    self._inbox.setdefault((peer, arrived), deque()).append(value)
                if box:
                    return box.popleft()
            check()
            if time.monotonic() > deadline:
                raise CollectiveTimeoutError(f"waited {self._timeout:g} s for a description from rank {peer}")
            select.select([self._links[peer]], [], [], 0.001)

    def _read(self, peer: int) -> tuple[_Key, Any]:
        head = self._read_bytes(peer, _LENGTH.size)
        key, value = pickle.loads(self._read_bytes(peer, *_LENGTH.unpack(head)))
        return key, value

    def _read_bytes(self, peer: int, count: int) -> bytes:
        parts = b""
        while len(parts) < count:
            try:
                part = self._links[peer].recv(count - len(parts))
            except OSError:
                part = b""
            if not part:
                raise RankFailedError(f"rank {peer} has died")
            parts += part
        return parts


def _connect(rank: int, members: Sequence[int], links: _Links, config: Config, key: _Key) -> Group:
    """The group of some ranks; collective over them. ``rank`` is the number in the group, ``members`` those of the
    outermost one."""
    size = len(members)
    control: BoardControl | None = None

    def exchange(value: Any) -> list[Any]:
        try:
            values = [value] * size
            for place, member in enumerate(members):
                if place != rank:
                    links.send(member, key, value)
            for place, member in enumerate(members):
                if place != rank:
                    values[place] = links.receive(member, key, lambda: memory and memory.board.check())
            return values
        except BaseException as error:
            if control is not None:
                control.fail(f"{type(error).__name__}: {error}")
            raise

    memory: Any = None
    memory = shared_memory.connect(rank, size, tuple(range(size)), exchange, timeout=config.timeout)
    assert memory is not None, "memory cannot be shared here"
    memory.board.names = tuple(members)
    control = BoardControl(memory.board, exchange)
    divided = 0

    def split(chosen: Sequence[int]) -> Group | None:
        nonlocal divided
        divided += 1
        places = sorted(chosen)
        if rank not in places:
            return None
        inner = [members[place] for place in places]
        return _connect(places.index(rank), inner, links, config, (*key, divided, *places))

    hosts = (tuple(range(size)),)
    return Group(rank, size, hosts, control, memory, None, split, tuple(members), memory.close, config)


@dataclass
class Ended:
    """How a rank ended: its exit status as of `os.waitstatus_to_exitcode`, what it returned, or what it raised."""

    status: int = 0
    result: Any = None
    error: BaseException | None = None
    text: str = ""


@dataclass
class _Ranks:
    pids: list[int] = field(default_factory=list)
    pipes: list[int] = field(default_factory=list)


def start(
    size: int,
    program: Callable[[World], Any],
    config: Config,
    timeout: float,
    afterwards: Callable[[Any], Any] | None = None,
) -> _Ranks:
    """Fork the ranks; `finish` waits for them. ``afterwards`` gets what the program has returned when the world has
    ended and is garbage, and returns the rank's result."""
    pairs = {(a, b): socket.socketpair() for a in range(size) for b in range(a + 1, size)}
    ranks = _Ranks()
    sys.stdout.flush()
    sys.stderr.flush()
    for rank in range(size):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            links = {b if a == rank else a: ends[a != rank] for (a, b), ends in pairs.items() if rank in (a, b)}
            for ends in pairs.values():
                for end in ends:
                    if end not in links.values():
                        end.close()
            for pipe in (reading, *ranks.pipes):
                os.close(pipe)
            _be_a_rank(rank, size, _Links(links, config.timeout), program, afterwards, config, writing, timeout)
        os.close(writing)
        ranks.pids.append(child)
        ranks.pipes.append(reading)
    for ends in pairs.values():
        for end in ends:
            end.close()
    return ranks


def _be_a_rank(
    rank: int,
    size: int,
    links: _Links,
    program: Callable[[World], Any],
    afterwards: Callable[[Any], Any] | None,
    config: Config,
    writing: int,
    timeout: float,
) -> None:
    """Run the program, tell of its end, and end."""
    faulthandler.dump_traceback_later(timeout, exit=True)
    group = world = None
    told = Ended()
    try:
        group = _connect(rank, range(size), links, config, ("all",))
        world = World(group, config)
        result = program(world)
        world.shutdown()
        group = world = None
        gc.collect()
        told.result = afterwards(result) if afterwards is not None else result
    except BaseException as error:
        told.error, told.text = error, traceback.format_exc()
        if group is not None:
            group.control.fail(in_words(rank, error))
    try:
        data = pickle.dumps(told)
        pickle.loads(data)
    except Exception:
        told.result, told.error = None, AssertionError(told.text or "a result that cannot be pickled")
        data = pickle.dumps(told)
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(data)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def finish(ranks: _Ranks) -> list[Ended]:
    """Wait for all ranks, which end by themselves within their timeout."""
    ended = [Ended() for _ in ranks.pids]

    def reap(rank: int) -> None:
        # At once: a process that has ended looks alive to the other ranks until its parent has taken note of it.
        with os.fdopen(ranks.pipes[rank], "rb") as file:
            data = file.read()
        _, status = os.waitpid(ranks.pids[rank], 0)
        ended[rank] = pickle.loads(data) if data else Ended()
        ended[rank].status = os.waitstatus_to_exitcode(status)

    reapers = [threading.Thread(target=reap, args=(rank,)) for rank in range(len(ended))]
    for reaper in reapers:
        reaper.start()
    for reaper in reapers:
        reaper.join()
    for one in ended:
        if one.error is None and one.status:
            one.error = AssertionError(f"a rank ended with {one.status}, by a signal if below 0, or because it hung")
    return ended


def run(
    size: int, program: Callable[[World], Any], *, config: Config | None = None, timeout: float = 60.0
) -> list[Any]:
    """Call ``program(world)`` on ``size`` processes, and return the results in rank order.

    Raises:
        BaseException: that of the lowest rank whose failure was not caused by another's; a rank that does not end
            within ``timeout`` seconds prints its stacks and counts as failed.
    """
    ended = finish(start(size, program, config or Config(timeout=30), timeout))
    errors = [one.error for one in ended if one.error is not None]
    if errors:
        chosen = next((error for error in errors if not isinstance(error, RankFailedError)), errors[0])
        raise chosen from AssertionError("\n".join(one.text for one in ended if one.text))
    return [one.result for one in ended]
