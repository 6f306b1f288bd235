"""A listening socket that hands over the connections of processes that have proved that they hold the job's key.

Everything else is refused: it has a few seconds and a few bytes. Where there is a crowd, a connection of the source
that has most of them is dropped, at random: a source that opens more loses its own. A connection that is dropped
because room or time has run out, or because the listener ends, is reset, and one whose proof is wrong is closed, so
that the side that dials can tell whether to try again.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from collectives.base.errors import TransportError
from collectives.base.logging import logger
from collectives.transport.tcp import network
from collectives.transport.tcp.authentication import Connection, Verification, prove
from collectives.transport.tcp.service import Service

Accepted = Callable[[bytes, Connection], None]

MOST_UNPROVED = 128
"""Connections that have not proved the key; a further one takes the place of one of them."""
PROVE_WITHIN = 5.0
"""Seconds for the proof."""
DIAL_WITHIN = 10.0
"""Seconds to connect, and again for the proof, on the side that dials."""
_BACKLOG = 512
_PAUSE = 0.1
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with which a closed socket is reset."""


class _Unproved(NamedTuple):
    """What is known of a connection that has not proved the key."""

    source: str
    verification: Verification
    timer: asyncio.TimerHandle


class Listener:
    """Accepts connections on one address.

    Args:
        host, port: to listen on; port 0: any that is free.
        server: a socket that listens already, which precedes both, and belongs to this object then.
        accepted: called in the service's thread with the hello and the socket (non-blocking, TCP_NODELAY) of every
            connection that has proved the key; owns it.

    Attributes:
        address: host and port that it listens on.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(
        self,
        service: Service,
        host: str,
        port: int,
        key: bytes,
        accepted: Accepted,
        *,
        server: socket.socket | None = None,
    ) -> None:
        self._socket = server or listening(host, port)
        self._socket.setblocking(False)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._service, self._loop, self._key, self._accepted = service, service.loop, key, accepted
        self._paused: asyncio.TimerHandle | None = None
        self._unproved: dict[Connection, _Unproved] = {}
        self._refused = 0
        service.sockets.add(self._socket)
        service.call(service.loop.add_reader, self._socket, self._accept)

    def _accept(self) -> None:
        """Accept one connection; the others wait, so that a flood of them leaves time for what else the loop does."""
        try:
            accepted, address = self._socket.accept()
        except OSError:  # out of descriptors, or the connection has ended before it was accepted
            self._loop.remove_reader(self._socket)
            self._paused = self._loop.call_later(_PAUSE, self._loop.add_reader, self._socket, self._accept)
            return
        sock = Connection(fileno=accepted.detach())
        self._service.sockets.add(sock)
        sock.setblocking(False)
        if len(self._unproved) >= MOST_UNPROVED:
            self._make_room()
        timer = self._loop.call_later(PROVE_WITHIN, self._drop, sock)
        unproved = self._unproved[sock] = _Unproved(_source(address[0]), Verification(self._key), timer)
        self._loop.add_reader(sock, self._read, sock, unproved.verification)
        with suppress(OSError):  # it has ended, which reading tells
            sock.send(unproved.verification.greeting)

    def _make_room(self) -> None:
        crowds = Counter(one.source for one in self._unproved.values())
        most = max(crowds.values())
        self._drop(random.choice([sock for sock, one in self._unproved.items() if crowds[one.source] == most]))

    def _drop(self, sock: Connection) -> None:
        _reset_when_closed(sock)
        self._refuse(sock, "too many, or no proof in time")

    def _read(self, sock: Connection, verification: Verification) -> None:
        try:
            data = sock.recv(verification.missing)
            if not data:
                raise EOFError("the connection was closed")
            verification.take(data)
            if verification.missing:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.send(verification.proof)
        except BlockingIOError:
            return
        except (OSError, EOFError, TransportError) as error:
            self._refuse(sock, str(error))
            return
        sock.sent, sock.received = verification.sent, verification.received
        self._forget(sock)
        self._accepted(verification.hello, sock)

    def _refuse(self, sock: Connection, why: str) -> None:
        self._forget(sock)
        sock.close()
        self._refused += 1
        if self._refused & (self._refused - 1) == 0:  # the 1st, 2nd, 4th, 8th: a flood must not fill the log
            where = network.joined(*self.address)
            logger.info("refused %d connections to %s, most recently because: %s", self._refused, where, why)

    def _forget(self, sock: Connection) -> None:
        self._loop.remove_reader(sock)
        self._unproved.pop(sock).timer.cancel()

    def close(self) -> None:
        """Stop listening. Connections that were handed over stay open."""
        with suppress(RuntimeError):  # the service has ended
            self._service.call(self._close)

    def _close(self) -> None:
        if self._paused is not None:
            self._paused.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()
        for sock in list(self._unproved):
            self._forget(sock)
            _reset_when_closed(sock)
            sock.close()


def listening(host: str, port: int = 0) -> socket.socket:
    """A socket that listens on an address; port 0: any that is free. OSError: it cannot be listened on."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # counts where the host is "::"
    return socket.create_server((host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)


def _reset_when_closed(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


async def dial(
    service: Service, host: str, port: int, key: bytes, hello: bytes, connect_within: float = DIAL_WITHIN
) -> Connection:
    """Connect to a listener and prove the key; to be run in the service's thread. The connection is non-blocking, with
    TCP_NODELAY.

    Raises:
        TimeoutError: no answer within ``connect_within`` seconds.
        ConnectionRefusedError: no process listens there.
        ConnectionError: the connection has ended, or has stood still, before the key was proved: the listener may have
            too many.
        OSError: there is no route, or the name is unknown.
        TransportError: see `authentication.prove`.
    """
    sock = await _connect(service, host, port, connect_within)
    try:
        await asyncio.wait_for(prove(sock, key, hello), DIAL_WITHIN)
    except BaseException as error:
        sock.close()
        if isinstance(error, EOFError):
            raise ConnectionAbortedError("the connection was closed before the key was proved") from None
        if isinstance(error, asyncio.TimeoutError):
            raise ConnectionAbortedError(f"connected, but the key was not proved within {DIAL_WITHIN:g} s") from None
        raise
    return sock


def dialled(host: str, port: int, key: bytes, hello: bytes, connect_within: float = DIAL_WITHIN) -> Connection:
    """Do the same for a thread that has no service; the connection is blocking. Errors as of `dial`."""
    service = Service()
    try:
        sock = service.run(dial(service, host, port, key, hello, connect_within), connect_within + 2 * DIAL_WITHIN)
        service.sockets.discard(sock)
    finally:
        service.close()
    sock.setblocking(True)
    return sock


async def _connect(service: Service, host: str, port: int, seconds: float) -> Connection:
    """A connection to the first address of a name at which a process listens."""
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for place, (family, kind, protocol, _, address) in enumerate(addresses, 1):
        sock = Connection(family, kind, protocol)
        service.sockets.add(sock)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.wait_for(loop.sock_connect(sock, address), seconds)
            return sock
        except BaseException as error:
            sock.close()
            late = isinstance(error, asyncio.TimeoutError)  # which is no OSError before Python 3.11
            if place < len(addresses) and (late or isinstance(error, OSError)):
                continue
            if late:
                raise TimeoutError(f"no answer within {seconds:g} s") from None
            raise
    raise OSError(f"{host} has no address")


def _source(address: str) -> str:
    """What counts as one source: an IPv4 address, or the first half of an IPv6 address, since who has one has all of
    its second halves."""
    if "." in address:
        return address
    return ipaddress.IPv6Address(address.partition("%")[0]).exploded[:19]
