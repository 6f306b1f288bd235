"""Heartbeats between the ranks of a job, and notices that a rank gives about itself.

Every two ranks have one connection of their own. The thread of the job's service beats and listens on it, also while
the program computes, so that a rank that dies is noticed whatever the others do:

    the connection closes        the rank has died, unless it has left before: known at once
    silence                      its host or its network is down, or its process is stopped: known after the timeout

A notice (the rank has failed, leaves, or waits in a call) belongs to a group. It is sent by the thread that gives it,
and is there before anything that this rank sends later on the same connection: a rank that fails and then leaves is
never taken for one that has left only.

Each frame is sealed (see `authentication`). An interrupt may cause one to be sent twice, the only repetition that is
accepted.

A rank beats five times per timeout. Silence is counted in beats of the rank that listens: when it was stopped itself,
its peers are not blamed for the time in which it did not listen. A silent rank is pinged by new connections: while the
network is down, TCP waits twice as long before each attempt to send again, so that an old connection may stay silent
for twice as long as the network.
"""

from __future__ import annotations

import asyncio
import hmac
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from collectives.base.errors import RankFailedError, TransportError
from collectives.base.exclusion import Lock, attempted, exclusive
from collectives.transport import backoff
from collectives.transport.tcp.authentication import SEAL_BYTES
from collectives.transport.tcp.notices import VALUE, Notice, Notices

if TYPE_CHECKING:
    from collectives.transport.tcp.authentication import Connection
    from collectives.transport.tcp.mesh import Mesh
    from collectives.transport.tcp.service import Running

_CHANNEL = "heart"
_BEATS = 5
"""Beats per timeout."""
_PINGED_FROM = 2
"""Beats of silence from which the peer is pinged."""
_HEAD = struct.Struct("<IB")
"""Of a frame: the number of bytes that follow, and its kind: a beat, a loss, or a `Notice` or `VALUE`, which have the
group's name, a zero byte, and a text. Its seal comes behind them."""
_DIED = "has died: its connection closed without an error message; see its output, and whether the system killed it"
_TOLD_WITHIN = 1.0
"""Seconds for which connections that are closed may wait until the system has taken all notices."""
_MOST_EARLY = 256
"""Groups that other ranks have made already, and this one has not. Ranks make one group after the other."""
_TEXT_BYTES = 16 << 10
_NAME_BYTES = 1 << 10
_READ_BYTES = 64 << 10
_BEAT = _HEAD.pack(0, 0)
_LOST = 1


class _Peer:
    """The connection to one rank."""

    def __init__(self, rank: int, connection: Connection) -> None:
        self.rank = rank
        self.socket = connection
        self.inbox = bytearray()
        self.silent = 0
        """This rank's beats since it has last heard of the peer."""
        self.ping: asyncio.Task[None] | None = None
        self.lost = ""
        """A sentence about its death or its end; empty while the connection stands."""
        self.closed = False
        self._outbox: deque[bytes] = deque()
        self._leaving = memoryview(b"")
        """What the system has not taken of the first frame, and of its seal."""
        self._sending: Lock = threading.RLock()

    def pending(self) -> bool:
        self.flush()
        return bool(self._outbox)

    def send(self, frame: bytes) -> None:
        """Send a frame without waiting, from any thread, or from a signal handler that interrupts this method."""
        if not self.closed:
            self._outbox.append(frame)
            self.flush()

    def flush(self) -> None:
        """Send what the system takes; the next beat goes on with the rest."""
        # Who finds the lock taken has put its frame where the owner will find it: the owner looks after its release.
        sent: bool | None = True
        while self._outbox and sent:
            sent = attempted(self._sending, 0.0, self._send_outbox)

    def _send_outbox(self) -> bool:
        """Returns whether everything was sent that was there, or never will be."""
        try:
            seal = self.socket.sent
            while self._outbox:
                frame = self._outbox[0]
                if not self._leaving:
                    self._leaving = memoryview(frame + seal.of(frame))
                self._leaving = self._leaving[self.socket.send(self._leaving) :]
                if not self._leaving:
                    seal.number += 1  # first: a frame may come twice, but no number be left out
                    self._outbox.popleft()
        except BlockingIOError:
            return False
        except OSError:
            self._outbox.clear()  # reading the connection tells why
        return True

    def beat(self) -> None:
        if self._outbox:
            self.flush()
        else:
            self.send(_BEAT)

    def close(self) -> None:
        self.closed = True
        self.socket.close()


class Heart:
    """One rank's connections for beats and notices. Collective over the ranks of the mesh; raises as `Mesh.open`.

    Args:
        timeout: seconds of silence after which a rank counts as dead, the setting ``peer_timeout``. A process none of
            whose threads can run for so long, because an extension keeps Python's lock, is silent too.
        within: seconds for which the ranks wait for each other here.
    """

    def __init__(self, mesh: Mesh, timeout: float, within: float, check: Callable[[], object] = lambda: None) -> None:
        self.rank = mesh.rank
        self._mesh, self._service = mesh, mesh.service
        self._timeout, self._interval = timeout, timeout / _BEATS
        self._peers: dict[int, _Peer] = {}
        self._groups: dict[str, Notices] = {}
        self._early: dict[str, dict[tuple[int, int], str]] = {}
        """By group that this rank has not made yet: the notices and values that have come already, by rank and kind."""
        self._lock = threading.RLock()  # a signal handler may interrupt its owner
        self._serving: Running[None] | None = None
        try:
            for peer in range(mesh.size):
                if peer != self.rank:
                    self._peers[peer] = _Peer(peer, mesh.open(peer, _CHANNEL, within, check))
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        self._serving = self._service.start(self._serve())

    @exclusive
    def notices(self, group: str, members: Sequence[int]) -> Notices:
        """The notices of a group that this rank is a member of; the same ones in every call. ``group`` is a name
        that is never used again; ``members`` are ranks of the mesh, in the order of the group's ranks."""
        assert 0 < len(group.encode()) <= _NAME_BYTES and "\0" not in group, group
        if group in self._groups:
            return self._groups[group]
        notices = Notices(self, group, members)
        for (rank, kind), text in self._early.pop(group, {}).items():
            notices.deliver(rank, kind, text)
        for peer in self._peers.values():
            if peer.lost:
                notices.lose(peer.rank, peer.lost, silent=False)
        self._groups[group] = notices
        return notices

    def tell(self, notices: Notices, notice: Notice, text: str) -> None:
        self._send(notices, _frame(notices, notice, text))

    def offer(self, notices: Notices, text: str) -> None:
        """Give the other members of a group a value of an exchange."""
        self._send(notices, _frame(notices, VALUE, text, whole=True))

    def _send(self, notices: Notices, frame: bytes) -> None:
        for peer in self._others(notices):
            peer.send(frame)

    def has_told(self, notices: Notices) -> bool:
        return not any(peer.pending() for peer in self._others(notices))

    def _others(self, notices: Notices) -> list[_Peer]:
        return [self._peers[member] for member in notices.members if member != self.rank]

    @exclusive
    def forget(self, notices: Notices) -> None:
        """Drop the notices of a group that is over, once nothing more can come for it."""
        if notices.closed and notices.all_left():
            self._groups.pop(notices.group, None)

    def abandon(self, group: str, members: Sequence[int], error: BaseException) -> None:
        """Close the connections, because this rank fails to make a group. Its other members are told why."""
        self.notices(group, members).tell(Notice.FAILED, f"{type(error).__name__}: {error}")
        self.close()

    def close(self) -> None:
        """Close the connections, once the system has taken what was told; groups that this rank has not left see its
        death."""
        backoff.poll(lambda: not any(peer.pending() and not peer.lost for peer in self._peers.values()), _TOLD_WITHIN)
        for notices in list(self._groups.values()):
            notices.gone.update(place for place, member in enumerate(notices.members) if member != self.rank)
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.cancel()
        else:
            for peer in self._peers.values():
                peer.close()

    # ---- in the service's thread

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        for peer in self._peers.values():
            loop.add_reader(peer.socket, self._read, peer)
        try:
            while True:
                for peer in list(self._peers.values()):
                    self._beat(peer)
                await asyncio.sleep(self._interval)
        finally:
            for peer in self._peers.values():
                if peer.ping is not None:
                    peer.ping.cancel()
                self._close(peer)

    def _beat(self, peer: _Peer) -> None:
        if peer.closed or peer.lost:
            return
        peer.beat()
        peer.silent += 1
        if peer.silent > _BEATS:  # the first of them came right after the last sign of life
            self._lose(
                peer,
                f"has been silent for {self._timeout:g} s: its host or network is down, or its process is stopped "
                f"(COLLECTIVES_PEER_TIMEOUT sets how long a rank may be silent) [R7]",
                silent=True,
            )
        elif peer.silent >= _PINGED_FROM:
            if peer.ping is not None:
                peer.ping.cancel()  # a connection attempt, too, is repeated more and more seldom
            peer.ping = asyncio.get_running_loop().create_task(self._ping(peer))

    async def _ping(self, peer: _Peer) -> None:
        try:
            await self._mesh.ping(peer.rank, self._interval)
            peer.silent = 0
        except RankFailedError:
            self._lose(peer, _DIED)
        except TransportError:
            return  # the next beat tries again

    def _read(self, peer: _Peer) -> bool:
        """Take in what has arrived. Returns whether there was something."""
        try:
            data = peer.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        peer.silent = 0
        peer.inbox += data
        try:
            self._take(peer)
        except ValueError as error:
            self._lose(peer, f"has sent an invalid message ({error}) [R8]")
            for notices in list(self._groups.values()):  # it would take this rank for dead
                peer.send(_frame(notices, Notice.FAILED, f"RankFailedError: {peer.lost}"))
            data = b""
        if not data:
            self._close(peer)
            self._lose(peer, _DIED)
        return True

    def _take(self, peer: _Peer) -> None:
        """Deliver the notices that have arrived whole."""
        inbox = peer.inbox
        while len(inbox) >= _HEAD.size:
            length, kind = _HEAD.unpack_from(inbox)
            if kind != VALUE and length > _NAME_BYTES + 1 + _TEXT_BYTES:
                raise ValueError(f"kind {kind}, {length} bytes")  # now: beats would fill them up, and be signs of life
            end = _HEAD.size + length
            if len(inbox) < end + SEAL_BYTES:
                return
            frame, seal = bytes(inbox[:end]), bytes(inbox[end : end + SEAL_BYTES])
            body, sealed = frame[_HEAD.size :], peer.socket.received
            del inbox[: end + SEAL_BYTES]  # before it is acted on, which may read this connection further
            if not hmac.compare_digest(seal, sealed.of(frame)):
                if sealed.number and hmac.compare_digest(seal, sealed.of(frame, behind=1)):
                    continue  # the one before, again
                raise ValueError("its signature is wrong: something between the hosts alters the data of the ranks")
            sealed.number += 1
            if kind == _LOST:
                self._adopt(body)
            elif kind:
                self._deliver(peer.rank, kind, body)

    def _deliver(self, rank: int, number: int, body: bytes) -> None:
        name, _, text = body.partition(b"\0")
        if number != VALUE and (len(name) > _NAME_BYTES or len(text) > _TEXT_BYTES):
            raise ValueError(f"kind {number}, {len(name)} and {len(text)} bytes")
        group, kind = name.decode(), number if number == VALUE else Notice(number)
        said = text.decode("utf-8", "replace")
        with self._lock:
            notices = self._groups.get(group)
            if notices is None:
                if group not in self._early and len(self._early) >= _MOST_EARLY:
                    raise ValueError(f"of a further group, {group}, besides {_MOST_EARLY} that this rank has not made")
                self._early.setdefault(group, {})[rank, kind] = said
                return
            notices.deliver(rank, kind, said)
        self.forget(notices)

    def _adopt(self, body: bytes) -> None:
        """Take over what another rank has found out about a third: then all name it, and not those that stop because
        of it."""
        rank, silent, how = body.decode("utf-8", "replace").split(" ", 2)
        lost = self._peers.get(int(rank))
        if lost is None:
            return
        while not lost.closed and self._read(lost):
            pass  # what it has said itself comes first, and so does the end of its connection
        # Also where that is to end yet: the system closes the connections of a process one after the other, and the
        # ranks that have noticed fail meanwhile.
        self._lose(lost, how, bool(int(silent)), first=False)

    def _lose(self, peer: _Peer, how: str, silent: bool = False, first: bool = True) -> None:
        """Note the end of a peer; ``first``: this rank has found it out, and tells the others if it is a death."""
        if peer.lost:
            return
        peer.lost = f"rank {peer.rank} on {self._mesh.names[peer.rank]} {how}"
        with self._lock:
            groups = list(self._groups.values())
            if first and any(notices.misses(peer.rank, silent) for notices in groups):
                body = f"{peer.rank} {silent:d} {how}".encode()
                for other in self._peers.values():
                    if other is not peer and not other.lost:
                        other.send(_HEAD.pack(len(body), _LOST) + body)
            for notices in groups:
                notices.lose(peer.rank, peer.lost, silent)
        for notices in groups:
            self.forget(notices)

    def _close(self, peer: _Peer) -> None:
        if not peer.closed:
            asyncio.get_running_loop().remove_reader(peer.socket)
            peer.close()


def _frame(notices: Notices, kind: int, text: str, whole: bool = False) -> bytes:
    data = text.encode("utf-8", "replace")
    body = notices.group.encode() + b"\0" + (data if whole else data[-_TEXT_BYTES:])
    return _HEAD.pack(len(body), kind) + body
