"""Ranks as forked processes of this host, without MPI: a world in a few milliseconds, whose ranks outlive a rank that
is killed.

    run(3, program)                     # program(world) on three processes; raises what the first of them raised
    run(3, program, connect=by_tcp)     # the same, connected by TCP

They share memory as ranks under mpirun do (`collectives.transport.host.shared_memory`). What MPI carries at set-up goes
through a pair of sockets for every two ranks. Connected `by_pipes` they have no messages; connected `by_tcp` they have
all that ranks have that no MPI has started, except for a rendezvous.
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
from functools import partial
from typing import Any

from collectives.base.config import Config
from collectives.base.errors import CollectiveTimeoutError, RankFailedError, in_words
from collectives.transport.group import Group
from collectives.transport.host import shared_memory
from collectives.transport.host.board_control import BoardControl
from collectives.transport.tcp.authentication import make_key
from collectives.worlds.world import World

KEY = make_key()
"""Of the jobs whose ranks are connected by TCP."""
_LENGTH = struct.Struct("<q")
_Key = tuple[Any, ...]


class Links:
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

    def exchange(
        self, rank: int, members: Sequence[int], key: _Key, value: Any, check: Callable[[], object]
    ) -> list[Any]:
        """Gather the values of ``members``, of which this process is number ``rank``."""
        values = [value] * len(members)
        for place, member in enumerate(members):
            if place != rank:
                self.send(member, key, value)
        for place, member in enumerate(members):
            if place != rank:
                values[place] = self.receive(member, key, check)
        return values

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


Connect = Callable[[int, int, Links, Config], Group]
"""(rank, size, links, config) -> the group of all ranks; collective over them."""


def by_pipes(rank: int, size: int, links: Links, config: Config) -> Group:
    """Ranks that share memory and nothing else."""
    return _connect(rank, range(size), links, config, ("all",))


def by_tcp(rank: int, size: int, links: Links, config: Config) -> Group:
    """Ranks connected by TCP over loopback; ``config.local_size`` divides them into hosts."""
    from collectives.transport.tcp import tcp_groups

    def exchange(value: Any) -> list[Any]:
        return links.exchange(rank, range(size), ("tcp",), value, lambda: None)

    return tcp_groups.connect(exchange, rank, KEY, config)


def by_rendezvous(rank: int, size: int, links: Links, config: Config) -> Group:
    """Ranks that meet where ``config.rendezvous`` says, as processes do that a user has started."""
    from collectives.transport.stores import rendezvous
    from collectives.transport.tcp import tcp_groups

    environment = {"COLLECTIVES_RANK": str(rank), "COLLECTIVES_SIZE": str(size), "COLLECTIVES_KEY": KEY.hex()}
    place = rendezvous.find(environment, config)
    assert place is not None
    try:
        exchange = rendezvous.exchange_of(place, config)
        return tcp_groups.connect(exchange, rank, place.key, config, exchange.look_for_failures)
    finally:
        place.close()


def _connect(rank: int, members: Sequence[int], links: Links, config: Config, key: _Key) -> Group:
    """The group of some ranks; collective over them. ``rank`` is the number in the group, ``members`` those of the
    outermost one."""
    size = len(members)
    control: BoardControl | None = None

    def exchange(value: Any) -> list[Any]:
        try:
            return links.exchange(rank, members, key, value, lambda: memory and memory.board.check())
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
    return Group(rank, size, hosts, control, memory, None, split, tuple(members), memory.close, config, memory.endpoint)


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
    program: Callable[[Any], Any],
    config: Config,
    timeout: float,
    afterwards: Callable[[Any], Any] | None = None,
    *,
    connect: Connect = by_pipes,
    make_world: Callable[[Group, Config], Any] = World,
) -> _Ranks:
    """Fork the ranks; `finish` waits for them.

    Args:
        timeout: seconds after which a rank prints its stacks and ends; 0: the program watches itself.
        afterwards: gets what the program has returned when the world has ended and is garbage, and returns the rank's
            result.
        make_world: makes what the program gets: a world, or, of `group_alone`, the group.
    """
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
            _be_a_rank(
                rank,
                partial(connect, rank, size, Links(links, config.timeout), config),
                make_world,
                program,
                afterwards,
                config,
                writing,
                timeout,
            )
        os.close(writing)
        ranks.pids.append(child)
        ranks.pipes.append(reading)
    for ends in pairs.values():
        for end in ends:
            end.close()
    return ranks


def group_alone(group: Group, config: Config) -> Group:
    """What programs get that need no world."""
    return group


def _be_a_rank(
    rank: int,
    connect: Callable[[], Group],
    make_world: Callable[[Group, Config], Any],
    program: Callable[[Any], Any],
    afterwards: Callable[[Any], Any] | None,
    config: Config,
    writing: int,
    timeout: float,
) -> None:
    """Run the program, tell of its end, and end."""
    if timeout:
        faulthandler.dump_traceback_later(timeout, exit=True)
    group = world = None
    told = Ended()
    try:
        group = connect()
        world = make_world(group, config)
        result = program(world)
        world.shutdown() if isinstance(world, World) else world.close()
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
    size: int,
    program: Callable[[Any], Any],
    *,
    config: Config | None = None,
    timeout: float = 60.0,
    connect: Connect = by_pipes,
    make_world: Callable[[Group, Config], Any] = World,
) -> list[Any]:
    """Call ``program(world)`` on ``size`` processes, and return the results in rank order; see `start`.

    Raises:
        BaseException: that of the lowest rank whose failure was not caused by another's; a rank that does not end
            within ``timeout`` seconds prints its stacks and counts as failed.
    """
    return results_of(
        finish(start(size, program, config or Config(timeout=30), timeout, connect=connect, make_world=make_world))
    )


def results_of(ended: Sequence[Ended]) -> list[Any]:
    """What the ranks have returned, or an error as `run` raises it."""
    errors = [one.error for one in ended if one.error is not None]
    if errors:
        chosen = next((error for error in errors if not isinstance(error, RankFailedError)), errors[0])
        raise chosen from AssertionError("\n".join(one.text for one in ended if one.text))
    return [one.result for one in ended]
