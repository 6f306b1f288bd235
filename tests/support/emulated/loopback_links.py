"""A job's network of ranks that are threads: connected pairs of sockets in place of dialled ones."""

from __future__ import annotations

import concurrent.futures
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from collectives.base.errors import CollectiveTimeoutError, RankFailedError
from collectives.transport.tcp.authentication import Connection, Seal
from collectives.transport.tcp.notices import Notice
from collectives.transport.tcp.tcp_channel import TcpChannel


class LoopbackLinks:
    """One rank's end; as `collectives.transport.tcp.mesh.Links`, but a connection is made by the first to want it."""

    def __init__(self, rank: int, size: int, made: dict[Any, Connection], lock: threading.Lock) -> None:
        self.rank, self.size = rank, size
        self._made, self._lock = made, lock

    def open(self, peer: int, channel: str) -> Connection:
        ends = tuple(sorted((self.rank, peer)))
        with self._lock:
            if (channel, ends, self.rank) not in self._made:
                with socket.create_server(("127.0.0.1", 0)) as server:
                    pair = socket.create_connection(server.getsockname()), server.accept()[0]
                for rank, each in zip(ends, pair, strict=True):
                    sock = Connection(fileno=each.detach())
                    keys = (b"up", b"down") if rank == ends[0] else (b"down", b"up")
                    sock.sent, sock.received = map(Seal, keys)
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    sock.setblocking(False)
                    self._made[channel, ends, rank] = sock
            return self._made.pop((channel, ends, self.rank))

    dial = open

    def take(self, peer: int, channel: str) -> Connection | None:
        """None before the peer has dialled."""
        with self._lock:
            return self._made.pop((channel, (self.rank, peer), self.rank), None)


class SharedNotices:
    """A group's notices among threads."""

    def __init__(self, rank: int, everybody: list[SharedNotices]) -> None:
        self._rank, self._everybody = rank, everybody
        self.failed: dict[int, str] = {}
        self.left: dict[int, int] = {}
        self.here: dict[int, int] = {}
        everybody.append(self)

    def tell(self, notice: Notice, text: str) -> None:
        for other in self._everybody:
            if other is not self:
                getattr(other, notice.name.lower())[self._rank] = text if notice is Notice.FAILED else int(text)

    def leave(self, calls: int) -> None:
        self.tell(Notice.LEFT, str(calls))

    def quiet(self) -> bool:
        return True

    def departed(self) -> set[int]:
        return set(self.left)

    def look_for_failures(self) -> None:
        for peer, text in list(self.failed.items()):
            raise RankFailedError(f"rank {self._rank}: rank {peer} has failed:\n{text}")

    def close(self) -> None:
        pass


def run(
    size: int, function: Callable[[TcpChannel, LoopbackLinks], Any], *, timeout: float = 20.0, spins: int = 1
) -> list[Any]:
    """Call ``function(channel, mesh)`` on a thread for each rank. Returns results, or exceptions, in rank order."""
    made: dict[Any, Connection] = {}
    lock = threading.Lock()
    everybody: list[SharedNotices] = []
    links = [LoopbackLinks(rank, size, made, lock) for rank in range(size)]
    notices = [SharedNotices(rank, everybody) for rank in range(size)]

    def body(rank: int) -> Any:
        channel = TcpChannel(links[rank], timeout, range(size), notices[rank], spins)
        try:
            channel.connect()
            return function(channel, links[rank])
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
