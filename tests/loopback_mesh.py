"""A job's network of ranks that are threads: connected pairs of sockets in place of dialled ones."""

from __future__ import annotations

import concurrent.futures
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from collectives.base.errors import CollectiveTimeoutError, RankFailedError
from collectives.transport.channel import FAILURE_TAG, HERE_TAG, LEAVE_TAG
from collectives.transport.tcp_channel import TcpChannel


class LoopbackMesh:
    """One rank's end; as `collectives.transport.mesh.Mesh`, but that a connection is made when the first of the two
    ranks wants it."""

    def __init__(self, rank: int, size: int, pairs: dict[Any, socket.socket], lock: threading.Lock) -> None:
        self.rank, self.size = rank, size
        self._pairs, self._lock = pairs, lock
        self._served: list[tuple[str, Callable[[int, str, socket.socket], None]]] = []

    def open(
        self, peer: int, channel: str, timeout: float, check: Callable[[], object] = lambda: None
    ) -> socket.socket:
        low, high = sorted((self.rank, peer))
        with self._lock:
            if (channel, low, high, self.rank) not in self._pairs:
                with socket.create_server(("127.0.0.1", 0)) as server:
                    made = socket.create_connection(server.getsockname()), server.accept()[0]
                for rank, sock in zip((low, high), made, strict=True):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    sock.setblocking(False)
                    self._pairs[channel, low, high, rank] = sock
            return self._pairs.pop((channel, low, high, self.rank))

    dial = open

    def serve(self, prefix: str, served: Callable[[int, str, socket.socket], None]) -> None:
        """Connections are taken by `arrivals`."""
        self._served.append((prefix, served))

    def arrivals(self) -> None:
        """Hand over what peers have dialled on the served channels."""
        with self._lock:
            for channel, low, high, rank in list(self._pairs):
                for prefix, served in self._served:
                    if rank == self.rank == low and channel.startswith(prefix):
                        served(high, channel, self._pairs.pop((channel, low, high, rank)))


class SharedNotices:
    """A group's notices among threads."""

    def __init__(self, rank: int, everybody: list[SharedNotices]) -> None:
        self._rank, self._everybody = rank, everybody
        self.failed: dict[int, str] = {}
        self.left: dict[int, int] = {}
        self.here: dict[int, int] = {}
        self.gone: set[int] = set()
        everybody.append(self)

    def tell(self, tag: int, text: str) -> None:
        for other in self._everybody:
            if other is not self:
                if tag == FAILURE_TAG:
                    other.failed[self._rank] = text
                else:
                    {LEAVE_TAG: other.left, HERE_TAG: other.here}[tag][self._rank] = int(text)

    def look_for_failures(self) -> None:
        for peer, text in list(self.failed.items()):
            raise RankFailedError(f"rank {self._rank}: rank {peer} has failed:\n{text}")

    def close(self) -> None:
        pass


def run(
    size: int, function: Callable[[TcpChannel, LoopbackMesh], Any], *, timeout: float = 20.0, spins: int = 1
) -> list[Any]:
    """Call ``function(channel, mesh)`` on a thread for each rank. Returns results, or exceptions, in rank order."""
    pairs: dict[Any, socket.socket] = {}
    lock, everybody = threading.Lock(), []  # type: ignore[var-annotated]
    meshes = [LoopbackMesh(rank, size, pairs, lock) for rank in range(size)]
    notices = [SharedNotices(rank, everybody) for rank in range(size)]

    def body(rank: int) -> Any:
        channel = TcpChannel(meshes[rank], "0", range(size), timeout, range(size), notices[rank], spins)
        try:
            return function(channel, meshes[rank])
        except BaseException as error:
            return error
        finally:
            channel.close()

    with concurrent.futures.ThreadPoolExecutor(size) as pool:
        running = [pool.submit(body, rank) for rank in range(size)]
        done = concurrent.futures.wait(running, timeout=60)
        if done.not_done:
            raise CollectiveTimeoutError("a rank did not end")
    return [each.result() for each in running]


def raised(results: Sequence[Any]) -> list[Any]:
    """The exceptions among the results."""
    return [result for result in results if isinstance(result, BaseException)]
