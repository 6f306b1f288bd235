"""Messages between any two ranks over TCP.

Both ranks know the length of every message, and their order: a connection carries bytes and nothing else. Between two
ranks are a few connections, *lanes*, which are made when the first message is posted. Small messages take the first
lane, large ones are divided among all, alike on both sides.

Nothing moves while no thread waits, except what fits into the system's buffers.
"""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Callable

from collectives.base import interrupts
from collectives.base.config import setting_of
from collectives.base.errors import CollectiveTimeoutError
from collectives.transport.backoff import yield_core
from collectives.transport.base import Array, as_bytes
from collectives.transport.tcp.mesh import Links
from collectives.transport.tcp.tcp_channel import CLOSE_WITHIN, TcpChannel, close_all

LANES_FROM = 1 << 18
"""Bytes from which a message is divided among the lanes."""
_SEND_BYTES = 1 << 17
"""Bytes that are sent at once: between two sends this rank receives, so that both directions are in use."""
_SPINS = 30
"""Looks at the connections, between which the core is yielded, before this rank sleeps until something arrives."""
_FIRST_DOZE, _LONGEST_DOZE = 1.0, 50.0
"""Milliseconds of a sleep that an arrival ends; afterwards the peers are looked at."""
_CHANNEL = "data/"


class Arrival:
    """A message that is being received, of which ``left`` bytes have not arrived yet; ``divided``: it comes by several
    lanes, so that its first bytes may not be the first to arrive."""

    __slots__ = ("divided", "left", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = self.left = nbytes
        self.divided = False


class _Lane:
    """A connection with a peer, and what it is to carry."""

    __slots__ = ("incoming", "number", "outgoing", "peer", "sock")

    def __init__(self, peer: int, number: int) -> None:
        self.peer, self.number = peer, number
        self.sock: socket.socket | None = None
        self.outgoing: deque[memoryview] = deque()
        self.incoming: deque[tuple[memoryview, Arrival]] = deque()


class TcpMessages:
    """`base.MessageTransport` over TCP, with so many ``lanes`` to each peer, the same on all ranks."""

    name = "tcp"

    def __init__(self, channel: TcpChannel, links: Links, lanes: int = 1) -> None:
        self._channel, self._links, self._count = channel, links, lanes
        self._lanes: dict[int, list[_Lane]] = {}
        self._active: dict[_Lane, None] = {}
        """Lanes that have something to carry, in the order in which they got it."""
        self._spins = min(channel.spins, _SPINS)

    def post_receive(self, peer: int, into: Array) -> Arrival:
        arrival = Arrival(into.nbytes)
        for lane, part in self._divided(peer, as_bytes(into)):
            arrival.divided |= lane.number > 0
            lane.incoming.append((part, arrival))
            self._active[lane] = None
        return arrival

    def post_send(self, peer: int, block: Array) -> None:
        for lane, part in self._divided(peer, as_bytes(block)):
            idle = not lane.outgoing
            lane.outgoing.append(part)
            self._active[lane] = None
            if idle and lane.sock is not None:
                self._send(lane)

    def await_arrival(self, message: Arrival, nbytes: int | None = None) -> None:
        left = 0 if nbytes is None or message.divided else message.nbytes - nbytes
        if message.left > left:
            self._until(lambda: message.left <= left, "a block from another rank")

    def drain(self) -> None:
        if self._active:
            self._until(lambda: not self._active, "a block from or to another rank")

    def close(self) -> None:
        lanes = [lane.sock for lanes in self._lanes.values() for lane in lanes if lane.sock is not None]
        close_all(lanes, CLOSE_WITHIN)
        self._lanes.clear()
        self._active.clear()

    # ---- lanes

    def _divided(self, peer: int, block: memoryview) -> list[tuple[_Lane, memoryview]]:
        """The lanes that a message takes, each with its part of the message."""
        lanes = self._lanes.get(peer) or self._open(peer)
        if len(lanes) == 1 or len(block) < LANES_FROM:
            return [(lanes[0], block)] if block else []
        share = -(-len(block) // len(lanes))
        parts = [block[at : at + share] for at in range(0, len(block), share)]
        return list(zip(lanes, parts))  # noqa: B905 (a last lane may have no part)

    def _open(self, peer: int) -> list[_Lane]:
        """Make the lanes with a peer. This rank dials lower ones, and waits for no one: higher ones dial when they
        have something to send or to receive, until which the lanes carry nothing."""
        self._lanes[peer] = lanes = [_Lane(peer, number) for number in range(self._count)]
        for lane in lanes:
            if peer < self._links.rank:
                lane.sock = self._links.dial(peer, f"{_CHANNEL}{lane.number}")
        return lanes

    # ---- moving bytes

    def _until(self, done: Callable[[], bool], what: str) -> None:
        spins, nap, begun = 0, _FIRST_DOZE, 0.0
        channel = self._channel
        while not done():
            if self._move():
                spins, begun = 0, 0.0
                continue
            spins += 1
            if spins <= self._spins:
                yield_core()
                continue
            if begun == 0.0:
                begun, nap = time.monotonic(), _FIRST_DOZE
            if self._doze(nap):
                continue
            interrupts.check()
            channel.check()
            if time.monotonic() - begun > channel.timeout:
                peers = ", ".join(str(channel.names[peer]) for peer in sorted({lane.peer for lane in self._active}))
                raise CollectiveTimeoutError(
                    f"rank {channel.names[channel.rank]}: waited {channel.timeout:g} s for {what} ({peers}), which is "
                    "alive but has not made the same call; see what it is doing, or raise "
                    f"{setting_of(channel.timeout)} [R25]"
                )
            nap = min(2 * nap, _LONGEST_DOZE)

    def _move(self) -> bool:
        """Send and receive what can be. Returns whether any byte moved."""
        moved = False
        for lane in list(self._active):
            if lane.sock is None:
                lane.sock = self._links.take(lane.peer, f"{_CHANNEL}{lane.number}")
                if lane.sock is None:
                    continue
            if lane.outgoing and self._send(lane):
                moved = True
            if lane.incoming and self._receive(lane):
                moved = True
            if not (lane.outgoing or lane.incoming):
                del self._active[lane]
        return moved

    def _send(self, lane: _Lane) -> bool:
        sock, outgoing = lane.sock, lane.outgoing
        assert sock is not None
        moved = False
        try:
            while outgoing:
                block = outgoing[0]
                nbytes = min(len(block), _SEND_BYTES)
                sent = sock.send(block[:nbytes])
                moved = True
                if sent < len(block):
                    outgoing[0] = block[sent:]
                else:
                    outgoing.popleft()
                if sent < nbytes or lane.incoming:
                    break
        except BlockingIOError:
            pass
        except OSError:
            self._channel.lost(lane.peer)
        return moved

    def _receive(self, lane: _Lane) -> bool:
        sock, incoming = lane.sock, lane.incoming
        assert sock is not None
        moved = False
        try:
            while incoming:
                block, arrival = incoming[0]
                received = sock.recv_into(block)
                if received == 0:
                    self._channel.lost(lane.peer)
                moved = True
                arrival.left -= received
                if received < len(block):
                    incoming[0] = block[received:], arrival
                    break
                incoming.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._channel.lost(lane.peer)
        return moved

    def _doze(self, milliseconds: float) -> bool:
        """Sleep until a lane can go on, at most so long. Returns whether one can."""
        poll = select.poll()
        for lane in self._active:
            if lane.sock is None:
                milliseconds = min(milliseconds, _FIRST_DOZE)
            else:
                reads, writes = select.POLLIN if lane.incoming else 0, select.POLLOUT if lane.outgoing else 0
                poll.register(lane.sock, reads | writes)
        return bool(poll.poll(milliseconds))
