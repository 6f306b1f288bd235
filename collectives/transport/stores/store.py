"""A key-value store over authenticated connections, at which ranks meet that know nothing of each other yet.

A value is bytes, and stays until the server ends. The client has the three methods of torch's stores that a rendezvous
needs: ``set``, ``get`` and ``wait``.

    request     operation (1 byte), seconds (8, float64), bytes of the keys (4), bytes of the value (4), keys, value
    answer      outcome (1 byte), bytes (4), value or text

Both end with their seal (see `authentication`).
Keys are separated by line feeds. A request is repeated after a broken connection: all of them may be.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from collectives.base.errors import CollectiveTimeoutError, InvalidArgumentError, TransportError
from collectives.base.exclusion import Parameters, Result, attempted, exclusively
from collectives.transport.backoff import Backoff
from collectives.transport.tcp import network
from collectives.transport.tcp.authentication import SEAL_BYTES, Connection, receive
from collectives.transport.tcp.listener import Listener, dial
from collectives.transport.tcp.service import Service

T = TypeVar("T")

MOST_VALUE = 8 << 20
"""Bytes of a value."""
MOST_KEY = 1 << 10
"""Bytes of a key."""
MOST_KEYS = 1 << 20
MOST_BYTES = 256 << 20
"""Bytes of all values and keys."""

_REQUEST = struct.Struct("<cdII")
_ANSWER = struct.Struct("<cI")
_SET, _GET, _WAIT = b"s", b"g", b"w"
_DONE, _ABSENT, _REFUSED = b"d", b"a", b"r"
_FRAME_WITHIN = 30.0
"""Seconds in which the rest of a frame must come, or an answer be taken."""
_WAIT_AT_ONCE = 10.0
"""Longest time of one request; a longer wait is several requests, so that the server drops clients that have ended."""
_CONNECT_WITHIN = 10.0
_FIRST_NAP, _LONGEST_NAP = 0.02, 0.5


class StoreServer:
    """Serves a store to who holds the job's key; arguments, ``address`` and errors as of `Listener`.

    Args:
        heard: is called with every key that a client sets and its value, in the service's thread.
        lost: likewise, with the key that a client has set last, when its connection has ended.
    """

    def __init__(
        self,
        service: Service,
        host: str,
        port: int,
        key: bytes,
        heard: Callable[[str, bytes], object] = lambda key, value: None,
        lost: Callable[[str], object] = lambda key: None,
    ) -> None:
        self._service, self._heard, self._lost = service, heard, lost
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        self._awaited: weakref.WeakValueDictionary[str, asyncio.Event] = weakref.WeakValueDictionary()
        self._clients: weakref.WeakSet[asyncio.Task[None]] = weakref.WeakSet()
        self._key, self._listeners = key, [Listener(service, host, port, key, self._accepted)]
        self.address = self._listeners[0].address

    def _accepted(self, hello: bytes, sock: Connection) -> None:
        if hello != _hello(sock.getsockname()[1]):
            sock.close()
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._clients.add(asyncio.get_running_loop().create_task(self._serve(sock)))

    async def _serve(self, sock: Connection) -> None:
        loop = asyncio.get_running_loop()
        last_set = ""
        try:
            while True:
                head = await receive(sock, _REQUEST.size)
                operation, seconds, key_bytes, value_bytes = _REQUEST.unpack(head)
                if max(key_bytes, value_bytes) > MOST_VALUE:
                    return
                rest = await asyncio.wait_for(_unsealed(sock, head, key_bytes + value_bytes), _FRAME_WITHIN)
                keys = rest[:key_bytes].decode().split("\n")
                last_set = keys[0] if operation == _SET else last_set
                outcome, answer = await self._carry_out(operation, keys, rest[key_bytes:], seconds)
                frame = _ANSWER.pack(outcome, len(answer)) + answer
                await asyncio.wait_for(loop.sock_sendall(sock, frame + sock.sent.next(frame)), _FRAME_WITHIN)
        except (OSError, EOFError, UnicodeDecodeError, asyncio.TimeoutError):
            pass
        finally:
            sock.close()
            if last_set:
                self._lost(last_set)

    async def _carry_out(
        self, operation: bytes, keys: Sequence[str], value: bytes, seconds: float
    ) -> tuple[bytes, bytes]:
        if operation == _SET:
            outcome = self._set(keys[0], value)
            self._heard(keys[0], value)
            return outcome
        if any(key not in self._values for key in keys):
            try:
                await asyncio.wait_for(self._arrived(keys), min(seconds, _WAIT_AT_ONCE))
            except asyncio.TimeoutError:
                return _ABSENT, b""
            if keys[0] not in self._values:
                return _ABSENT, b""  # dropped meanwhile
        return _DONE, self._values[keys[0]] if operation == _GET else b""

    def _set(self, key: str, value: bytes, bounded: bool = True) -> tuple[bytes, bytes]:
        old_value = self._values.get(key)
        grown = len(value) - len(old_value) if old_value is not None else len(value) + len(key)
        if bounded and (self._bytes + grown > MOST_BYTES or (old_value is None and len(self._values) >= MOST_KEYS)):
            return _REFUSED, f"the store is full: {len(self._values)} keys, {self._bytes} bytes".encode()
        self._bytes += grown
        self._values[key] = value
        if key in self._awaited:
            self._awaited[key].set()
        return _DONE, b""

    async def _arrived(self, keys: Sequence[str]) -> None:
        for key in keys:
            if key not in self._values:
                event = self._awaited.setdefault(key, asyncio.Event())
                await event.wait()

    def listen(self, host: str, port: int = 0) -> tuple[str, int]:
        """Listen on a further address, which is returned."""
        self._listeners.append(Listener(self._service, host, port, self._key, self._accepted))
        return self._listeners[-1].address

    def set(self, key: str, value: bytes) -> None:
        """Set a key, from any thread. What clients have filled the store with does not count: the process that serves
        it has to answer them."""
        self._service.call(self._set, key, value, False)

    def drop(self, prefix: str) -> None:
        """Forget all keys that begin so, from any thread."""
        self._service.call(self._drop, prefix)

    def forget(self, key: str) -> None:
        """Forget a key, if it is there, from any thread."""
        self._service.call(self._forget, key)

    def _drop(self, prefix: str) -> None:
        for key in [key for key in self._values if key.startswith(prefix)]:
            self._forget(key)

    def _forget(self, key: str) -> None:
        value = self._values.pop(key, None)
        if value is not None:
            self._bytes -= len(key) + len(value)

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._service.call(lambda: [task.cancel() for task in list(self._clients)])


class Store:
    """A client of a store. The methods may be called from any thread, one call at a time.

    Args:
        timeout: seconds that ``get`` waits for a key, and a ``wait`` without a timeout.
        service: in whose thread it works.
        answers_within: seconds that an answer may take.
    """

    def __init__(
        self,
        host: str,
        port: int,
        key: bytes,
        timeout: float,
        service: Service,
        answers_within: float = _FRAME_WITHIN,
    ) -> None:
        self.address = (host, port)
        self.timeout, self._answers_within = timeout, answers_within
        self._key, self._service = key, service
        self._sock: Connection | None = None
        self._lock = threading.RLock()
        self._closed = False

    def connect(self, timeout: float = _CONNECT_WITHIN) -> None:
        """Connect to the server, which the other methods do where that is needed.

        Raises:
            OSError: no process listens there, or none answers in time.
            TransportError: what listens there is no store of this job.
        """
        self._use(self._connect, timeout)

    def _connect(self, timeout: float) -> None:
        if self._sock is None:
            self._sock = self._dial(timeout)

    def set(self, key: str, value: bytes) -> None:
        """Set a key. InvalidArgumentError: the key or the value is too long. TransportError: the store has ended, or is
        full."""
        if len(key.encode()) > MOST_KEY or "\n" in key or len(value) > MOST_VALUE:
            raise InvalidArgumentError(
                f"store: expected a key of one line of at most {MOST_KEY} bytes and a value of at most {MOST_VALUE}, "
                f"got {len(key)} and {len(value)} [S33]"
            )
        self._use(self._ask, _SET, [key], value, 0.0)

    def get(self, key: str) -> bytes:
        """Wait for a key, and return its value. CollectiveTimeoutError: no process has set it within ``timeout``.
        TransportError: the store has ended."""
        return self._use(self._awaited, _GET, [key], self.timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set. Raises as `get`."""
        self._use(self._awaited, _WAIT, keys, self.timeout if timeout is None else timeout.total_seconds())

    def _awaited(self, operation: bytes, keys: Sequence[str], seconds: float) -> bytes:
        end = time.monotonic() + seconds
        while True:
            left = max(0.0, end - time.monotonic())
            value = self._ask(operation, keys, b"", min(left, _WAIT_AT_ONCE))
            if value is not None:
                return value
            if time.monotonic() >= end:
                named = ", ".join(keys[:4]) + (", ..." if len(keys) > 4 else "")
                raise CollectiveTimeoutError(f"store {self._where()}: waited {seconds:g} s for {named} [S23]")

    def _ask(self, operation: bytes, keys: Sequence[str], value: bytes, seconds: float) -> bytes | None:
        """One request; None if the keys are not all there. The connection is made anew if it was lost."""
        names = "\n".join(keys).encode()
        request = _REQUEST.pack(operation, seconds, len(names), len(value)) + names + value
        try:
            outcome, answer = self._answered(request, seconds + self._answers_within)
        except (OSError, EOFError) as error:
            raise TransportError(
                f"the store at {self._where()} does not answer, or the process that serves it has ended: {error} [S34]"
            ) from None
        if outcome == _REFUSED:
            raise TransportError(f"store {self._where()}: {answer.decode()} [S35]")
        return None if outcome == _ABSENT else answer

    def _answered(self, request: bytes, seconds: float) -> tuple[bytes, bytes]:
        sock, self._sock = self._sock, None  # an answer that arrives after an exception belongs to no request
        if sock is not None:
            try:
                answer = self._service.run(_exchange(sock, request), seconds)
                self._sock = sock
                return answer
            except (OSError, EOFError) as error:
                if isinstance(error, TimeoutError) and error.errno is None:
                    raise  # the connection is whole, and the server silent
        sock = self._dial(min(_CONNECT_WITHIN, self._answers_within))
        answer = self._service.run(_exchange(sock, request), seconds)
        self._sock = sock
        return answer

    def _dial(self, seconds: float) -> Connection:
        """Connect; anew where the server drops the connection because it has too many."""
        backoff = Backoff(_FIRST_NAP)
        end = backoff.begun + seconds
        while True:
            try:
                dialling = dial(self._service, *self.address, self._key, _hello(self.address[1]))
                return self._service.run(dialling, end - time.monotonic())
            except (ConnectionResetError, BrokenPipeError):
                backoff.look()
                if backoff.now + _LONGEST_NAP > end:
                    raise
            backoff.nap(_LONGEST_NAP, end)

    def _where(self) -> str:
        return network.joined(*self.address)

    def _use(
        self, act: Callable[Parameters, Result], *arguments: Parameters.args, **keywords: Parameters.kwargs
    ) -> Result:
        try:
            return exclusively(self._lock, act, *arguments, **keywords)
        finally:
            if self._closed:
                self.close()

    def close(self) -> None:
        """Close the connection; at the end of a call that another thread is in, without waiting for that."""
        self._closed = True
        attempted(self._lock, 0.0, self._close)

    def _close(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()


def _hello(port: int) -> bytes:
    """Names the port that was dialled: who listens on another one where the store could be cannot pass connections on
    to it, and change what is said."""
    return f"store {port}".encode()


async def _exchange(sock: Connection, request: bytes) -> tuple[bytes, bytes]:
    try:
        await asyncio.get_running_loop().sock_sendall(sock, request + sock.sent.next(request))
        head = await receive(sock, _ANSWER.size)
        outcome, length = _ANSWER.unpack(head)
        if length > MOST_VALUE:
            raise ConnectionError(f"it announced an answer of {length} bytes, which is too long")
        return outcome, await _unsealed(sock, head, length)
    except BaseException:
        sock.close()
        raise


async def _unsealed(sock: Connection, head: bytes, nbytes: int) -> bytes:
    """What follows the head of a frame. ConnectionError: something has changed the frame."""
    rest = await receive(sock, nbytes + SEAL_BYTES)
    if not hmac.compare_digest(rest[nbytes:], sock.received.next(head + rest[:nbytes])):
        raise ConnectionError("the data was altered on the way")
    return rest[:nbytes]
