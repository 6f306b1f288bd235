"""Ranks as threads of one process: the whole engine without MPI, for tests, notebooks and debuggers.

Threads share their memory, so windows are plain arrays and private memory is read by a plain copy. Hosts can be
simulated: ranks of different "hosts" exchange messages only, which are copies from the sender's block directly into the
receiver's.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from collectives.base.dtypes import SUPPORTED
from collectives.base.errors import CollectiveTimeoutError, InvalidArgumentError, RankFailedError, in_words
from collectives.transport import backoff
from collectives.transport.base import WINDOW_BYTES, Array, as_bytes
from collectives.transport.group import Group
from collectives.transport.host.board import Board, board_bytes
from collectives.transport.host.board_control import BoardControl
from collectives.transport.host.mapped_memory import MappedMemory
from collectives.transport.point_to_point import AtOnce, Incoming, Outgoing

EAGER_BYTES = 8 << 10
"""Payloads of point-to-point messages up to this size are copied by the sender, who is then done."""
Queue = deque[Callable[["ThreadEndpoint"], object]]
"""Functions that a rank calls in `ThreadEndpoint.poll`."""


def connect(
    size: int,
    *,
    hosts: Sequence[Sequence[int]] | None = None,
    reads_private: bool = True,
    timeout: float = 60.0,
    ranks: tuple[int, ...] | None = None,
) -> list[Group]:
    """Make the groups of ``size`` ranks, one for each thread.

    Args:
        size: number of ranks, at least 1.
        hosts: the ranks of each simulated host; all on one by default.
        reads_private: False disables direct reads of private memory, as some containers do.
        timeout: seconds that a rank waits for another.
        ranks: the ranks' numbers in messages; 0 to ``size`` - 1 by default.
    """
    if size < 1:
        raise InvalidArgumentError(f"size={size}: expected at least 1 rank [W10]")
    layout = tuple(tuple(host) for host in hosts) if hosts is not None else (tuple(range(size)),)
    if sorted(rank for host in layout for rank in host) != list(range(size)):
        raise InvalidArgumentError(f"hosts={layout}: expected each of the ranks 0 to {size - 1} once [W11]")
    control_pages = _pages(size)
    memory_pages = _pages(size)
    windows = [np.zeros(WINDOW_BYTES, np.uint8) for _ in range(size)]
    exchange = _Exchange(size, timeout)
    mailboxes: _Mailboxes = [[deque() for _ in range(size)] for _ in range(size)]
    queues = [Queue() for _ in range(size)]
    names = ranks or tuple(range(size))

    def split(rank: int, members: Sequence[int]) -> Group | None:
        """`Group.split`: the first member makes the groups of all, and the threads exchange them."""
        chosen = sorted(members)
        number = {member: place for place, member in enumerate(chosen)}
        made = None
        if rank == chosen[0]:
            parts = [tuple(number[member] for member in host if member in number) for host in layout]
            made = connect(
                len(chosen),
                hosts=[part for part in parts if part],
                reads_private=reads_private,
                timeout=timeout,
                ranks=tuple(names[member] for member in chosen),
            )
        groups = exchange.exchange(rank, made)[chosen[0]]
        return groups[number[rank]] if rank in number else None

    groups = []
    for rank in range(size):
        local = next(host for host in layout if rank in host)
        control_board = _board(control_pages, rank, timeout)
        board = _board([page if p in local else None for p, page in enumerate(memory_pages)], rank, timeout)
        board.also_check = control_board.check
        memory = ThreadMemory(
            board, [window if p in local else None for p, window in enumerate(windows)], reads_private
        )
        control = BoardControl(control_board, partial(exchange.exchange, rank))
        messages = ThreadMessages(rank, mailboxes, control_board, timeout)
        board.names = control_board.names = names
        parts, open_endpoint = partial(split, rank), partial(ThreadEndpoint, rank, queues, names)
        group = Group(rank, size, layout, control, memory, messages, parts, names, memory.close, None, open_endpoint)
        groups.append(group)
    return groups


class ThreadMemory:
    """`base.MemoryTransport` among threads."""

    name = "threads"

    def __init__(self, board: Board, windows: Sequence[Array | None], reads_private: bool) -> None:
        self.board = board
        self.windows = windows
        self.reads_private = reads_private
        self.mapped: MappedMemory | None = MappedMemory(board)

    def fetch(self, peer: int, address: int, into: int, nbytes: int) -> None:
        ctypes.memmove(into, address, nbytes)

    def store(self, peer: int, address: int, source: int, nbytes: int) -> None:
        ctypes.memmove(address, source, nbytes)

    def close(self) -> None:
        self.windows = ()
        if self.mapped is not None:
            self.mapped.close()


class ThreadMessages:
    """`base.MessageTransport` among threads: the receiver copies from the sender's block and marks it as read."""

    name = "threads"

    def __init__(self, rank: int, mailboxes: _Mailboxes, board: Board, timeout: float) -> None:
        self._rank, self._mailboxes, self._board, self._timeout = rank, mailboxes, board, timeout
        self._receives: deque[tuple[int, memoryview]] = deque()
        self._posted = self._received = 0
        self._sends: list[_Message] = []

    def post_receive(self, peer: int, into: Array) -> int:
        self._receives.append((peer, as_bytes(into)))
        self._posted += 1
        return self._posted

    def post_send(self, peer: int, block: Array) -> None:
        message = _Message(as_bytes(block))
        self._sends.append(message)
        self._mailboxes[self._rank][peer].append(message)

    def await_arrival(self, message: int, nbytes: int | None = None) -> None:
        while self._received < message:
            peer, into = self._receives.popleft()
            box = self._mailboxes[peer][self._rank]
            self._until(peer, lambda box=box: bool(box))  # type: ignore[misc]
            sent = box.popleft()
            into[:] = sent.block
            sent.read = True
            self._received += 1

    def drain(self) -> None:
        self.await_arrival(self._posted)
        for message in self._sends:
            self._until(None, lambda message=message: message.read)  # type: ignore[misc]
        self._sends.clear()

    def close(self) -> None:
        self._receives.clear()
        self._sends.clear()

    def _until(self, peer: int | None, done: Callable[[], bool]) -> None:
        backoff.wait(
            done,
            lambda deep: self._board.check(peer, done),
            self._timeout,
            lambda: f"rank {self._rank}: waited {self._timeout:g} s for a message from or to another rank [R26]",
            pause=_let_others_run,
        )


class ThreadEndpoint:
    """`point_to_point.Endpoint` among threads: the receiver copies from the sender's array. ``queues`` are those of all
    ranks, shared by all."""

    def __init__(self, rank: int, queues: Sequence[Queue], names: Sequence[int]) -> None:
        self.arrived: Callable[[Incoming], object] = lambda message: None
        self.at_once: AtOnce | None = None
        self._rank, self._queues, self._names = rank, queues, names

    def send(self, message: Outgoing) -> None:
        array = message.array
        eager = array.nbytes <= EAGER_BYTES
        payload = (array.copy() if eager else array, None if eager else message)
        envelope = Incoming(self._rank, message.tag, SUPPORTED[array.dtype], message.shape, array.nbytes, payload)
        self._queues[message.peer].append(lambda peer: peer.arrived(envelope))
        if eager:
            message.end()

    def poll(self) -> None:
        queue = self._queues[self._rank]
        while queue:
            queue.popleft()(self)

    def receive(self, message: Incoming, into: Array) -> None:
        array, origin = message.payload
        np.copyto(into[: message.nbytes], array.view(np.uint8))
        if origin is not None and origin.done:  # its send has failed, so that its memory may have been used again
            raise RankFailedError(
                f"rank {self._names[self._rank]}: rank {self._names[message.source]} has shut down or failed [R12]"
            )
        self._end(message)

    def refuse(self, message: Incoming, why: str) -> None:
        self._end(message, why)

    def _end(self, message: Incoming, refused: str = "") -> None:
        _, origin = message.payload
        message.payload = None
        message.end()
        if origin is not None:
            self._queues[message.source].append(lambda peer: _settle(origin, refused))

    @property
    def busy(self) -> bool:
        return False

    def close(self) -> None:
        self._queues[self._rank].clear()


def run(
    size: int,
    function: Callable[..., Any],
    *,
    hosts: Sequence[Sequence[int]] | None = None,
    reads_private: bool = True,
    timeout: float = 60.0,
    make_world: Callable[[Group], Any],
) -> list[Any]:
    """Call ``function(world)`` on ``size`` threads, each with its own rank. Returns the results in rank order.

    A thread that raises marks its rank as failed, so that the others end, too. Raises the error of the lowest rank
    whose failure was not caused by another rank's.
    """
    groups = connect(size, hosts=hosts, reads_private=reads_private, timeout=timeout)
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def body(rank: int) -> None:
        try:
            world = make_world(groups[rank])
            results[rank] = function(world)
            groups[rank].control.leave()
        except BaseException as error:  # raised in the caller below
            errors[rank] = error
            groups[rank].control.fail(in_words(rank, error))

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout * 2)
        if thread.is_alive():
            raise CollectiveTimeoutError(f"{thread.name} did not end within {timeout * 2:g} s [R27]")
    failures = [error for error in errors if error is not None]
    if failures:
        raise next((error for error in failures if not isinstance(error, RankFailedError)), failures[0])
    return results


@dataclass(slots=True)
class _Message:
    block: memoryview
    read: bool = False


_Mailboxes = list[list[deque[_Message]]]
"""A queue of messages for each sender and receiver."""


class _Exchange:
    """An all-gather of Python objects among the threads of a group."""

    def __init__(self, size: int, timeout: float) -> None:
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=timeout)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        try:
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise CollectiveTimeoutError(
                f"rank {rank}: not every rank took part in the first exchange between the ranks [R28]"
            ) from None
        return values


def _pages(size: int) -> list[memoryview]:
    return [memoryview(bytearray(board_bytes(size))) for _ in range(size)]


def _board(pages: Sequence[memoryview | None], rank: int, timeout: float) -> Board:
    # A thread that spins holds the GIL and so blocks the peer that it waits for: poll once, then yield.
    return Board(pages, rank, timeout=timeout, spins=1, pause=_let_others_run)


def _let_others_run() -> None:
    time.sleep(0)  # releases the GIL


def _settle(message: Outgoing, refused: str) -> None:
    message.refused = refused
    message.end()
