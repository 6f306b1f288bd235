"""A listening socket that hands over the connections of processes that have proved that they hold the job's key.

Everything else is refused: it has a few seconds and a few bytes, and is the first to go where there is a crowd.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Callable
from contextlib import suppress

from collectives.base.errors import CollectivesError
from collectives.base.logging import logger
from collectives.transport import authentication
from collectives.transport.service import Service

Accepted = Callable[[bytes, socket.socket], None]

MOST_UNPROVED = 128
"""Connections that have not proved the key; a further one takes the place of the oldest."""
PROVE_WITHIN = 5.0
"""Seconds for the proof."""
_BACKLOG = 512
_PAUSE = 0.1


class Listener:
    """Accepts connections on one address.

    Args:
        service: in whose thread it works.
        host, port: to listen on; port 0: any that is free.
        key: the job's.
        accepted: called in the service's thread with the hello and the socket (non-blocking, TCP_NODELAY) of every
            connection that has proved the key; owns the socket.

    Attributes:
        address: host and port that it listens on.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(self, service: Service, host: str, port: int, key: bytes, accepted: Accepted) -> None:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen(_BACKLOG)
            self._socket.setblocking(False)
        except BaseException:
            self._socket.close()
            raise
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._service, self._key, self._accepted = service, key, accepted
        self._unproved: dict[asyncio.Task[bytes | None], None] = {}
        self._refused = 0
        service.owns(self._socket)
        self._serving = service.start(self._serve())

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._socket)
            except OSError:  # out of descriptors, or the connection has ended before it was accepted
                await asyncio.sleep(_PAUSE)
                continue
            self._service.owns(sock)
            sock.setblocking(False)
            if len(self._unproved) >= MOST_UNPROVED:
                oldest = next(iter(self._unproved))
                del self._unproved[oldest]
                oldest.cancel()
            task = loop.create_task(self._admit(sock))
            self._unproved[task] = None
            task.add_done_callback(functools.partial(self._settle, sock))

    async def _admit(self, sock: socket.socket) -> bytes | None:
        """The hello of a connection, or None if it is refused."""
        try:
            hello = await asyncio.wait_for(authentication.verify(sock, self._key), PROVE_WITHIN)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return hello
        except (OSError, EOFError, asyncio.TimeoutError, CollectivesError) as error:
            self._refused += 1
            if self._refused & (self._refused - 1) == 0:  # the 1st, 2nd, 4th, 8th: a flood must not fill the log
                logger.info("refused %d connections to %s:%d, lately because: %s", self._refused, *self.address, error)
            return None

    def _settle(self, sock: socket.socket, task: asyncio.Task[bytes | None]) -> None:
        # Not in `_admit`, which never begins if it is cancelled at once.
        self._unproved.pop(task, None)
        hello = None if task.cancelled() else task.result()
        if hello is None:
            sock.close()
        else:
            self._accepted(hello, sock)

    def close(self) -> None:
        """Stop listening. Connections that were handed over stay open."""
        self._serving.cancel()
        with suppress(RuntimeError):  # the service has ended
            self._service.call(self._close)

    def _close(self) -> None:
        for task in list(self._unproved):
            task.cancel()
        self._socket.close()


async def dial(service: Service, host: str, port: int, key: bytes, hello: bytes) -> socket.socket:
    """Connect to a listener and prove the key; to be run in the service's thread.

    Returns:
        The connected socket, non-blocking, TCP_NODELAY.

    Raises:
        OSError: nobody listens there, or the connection ended. TransportError: see `authentication.prove`.
    """
    loop = asyncio.get_running_loop()
    family, kind, protocol, _, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
    sock = socket.socket(family, kind, protocol)
    proved = False
    try:
        service.owns(sock)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.sock_connect(sock, address)
        try:
            await authentication.prove(sock, key, hello)
        except EOFError:
            raise ConnectionResetError("the connection was closed before the key was proved") from None
        proved = True
        return sock
    finally:
        if not proved:
            sock.close()
