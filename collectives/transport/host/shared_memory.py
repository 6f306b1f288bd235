"""Memory shared by the processes of one host: a board and a window per rank, and direct reads where the system allows.

Each rank makes an anonymous file in memory, which its peers map through ``/proc/PID/fd``: it has no name, so that
``kill -9`` leaves nothing behind. Where that is refused, a file in ``/dev/shm`` serves, unlinked as soon as all peers
have mapped it. Each method is tried before it is used: every rank reads back a random token that its peer wrote.
"""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from collectives.base.errors import TransportError
from collectives.transport.base import WINDOW_BYTES, Array, MemoryTransport
from collectives.transport.host.board import FAILED, Board, board_bytes
from collectives.transport.host.direct_read import DirectRead, admit, ancestors
from collectives.transport.host.mapped_memory import MappedMemory
from collectives.transport.host.memory_endpoint import MemoryEndpoint
from collectives.transport.host.rings import Post, post_bytes

Exchange = Callable[[Any], list[Any]]
Move = Callable[[int, int, int, int], None]

_PREFAULT_UP_TO = 8
_SPINS = 2000
_TOKEN_BYTES = 16
_probed: list[tuple[Array, Array]] = []
"""Memory that peers access to try direct reads. What an exception has ended stays: a peer may come to it later."""


class SharedMemory:
    """`base.MemoryTransport` among processes of one host; made by `connect`."""

    name = "shared memory"

    def __init__(
        self,
        board: Board,
        windows: Sequence[Array | None],
        reader: DirectRead | None,
        mapped: MappedMemory | None,
        posts: Sequence[memoryview | None],
        mappings: Sequence[mmap.mmap],
    ) -> None:
        self.board = board
        self.windows = windows
        self.reads_private = reader is not None
        self.mapped = mapped
        self._posts = posts
        self._mappings = mappings
        # Bound to the reader's methods themselves: these two are called for every block.
        self.fetch: Move = reader.fetch if reader is not None else _refuse
        self.store: Move = reader.store if reader is not None else _refuse

    def endpoint(self) -> MemoryEndpoint:
        """This rank's end of the point-to-point messages between the ranks of this host."""
        board, ranks = self.board, len(self._mappings)
        pids = [board.process_of(peer) if post is not None else 0 for peer, post in enumerate(self._posts)]
        reader = None
        if self.reads_private:
            reader = DirectRead(pids)  # one of its own: the engine's is its driving thread's
            reader.explain = board.explain
        posts = [None if post is None else Post(post, ranks) for post in self._posts]
        return MemoryEndpoint(board, posts, reader, self.mapped)

    def close(self) -> None:
        self.windows = ()
        if self.mapped is not None:
            self.mapped.close()
        self.board.release()
        for post in filter(None, self._posts):
            post.release()
        for mapping in self._mappings:
            # A window that is still referenced keeps its mapping; the process's end frees it.
            with suppress(BufferError):
                mapping.close()


def _refuse(peer: int, address: int, own: int, nbytes: int) -> None:
    raise TransportError(
        f"the memory of rank {peer} cannot be reached: it could not be mapped (the log has the reason), and this "
        "system does not allow direct reads; raise the limits of open files and mappings, or set COLLECTIVES_ARENA=0 "
        "on all ranks [N13]"
    )


def connect(
    rank: int,
    size: int,
    local: Sequence[int],
    exchange: Exchange,
    *,
    timeout: float,
    part_of: MemoryTransport | None = None,
) -> SharedMemory | None:
    """Share memory among the ranks of each host; collective over the group. None on every rank if memory cannot be
    shared on some host. Direct reads are enabled only if they work between all ranks that share a host.

    Args:
        exchange: gathers every rank's value on every rank of the group.
        timeout: seconds that a later wait may last.
        part_of: the memory of a group that has these ranks and others, which has shown whether direct reads work. Of a
            part, of which there may be hundreds, memory is taken page by page when it is first used, and not now.
    """
    for make in (_anonymous_file, _named_file):
        memory = _share(make, rank, size, local, exchange, timeout, part_of)
        if memory is not None:
            return memory
    return None


def _anonymous_file(nbytes: int) -> tuple[int, str]:
    handle = os.memfd_create("collectives", os.MFD_CLOEXEC)
    os.ftruncate(handle, nbytes)
    return handle, f"/proc/{os.getpid()}/fd/{handle}"


def _named_file(nbytes: int) -> tuple[int, str]:
    directory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    handle, path = tempfile.mkstemp(prefix="collectives-", dir=directory)
    try:
        os.posix_fallocate(handle, 0, nbytes)  # a full /dev/shm raises here, not as SIGBUS in the first write
    except OSError:
        os.close(handle)
        os.unlink(path)
        raise
    return handle, path


def _share(
    make: Callable[[int], tuple[int, str]],
    rank: int,
    size: int,
    local: Sequence[int],
    exchange: Exchange,
    timeout: float,
    part_of: MemoryTransport | None,
) -> SharedMemory | None:
    """`connect` by files that are made with ``make``; None on every rank if any rank could not map one."""
    before = board_bytes(size) + WINDOW_BYTES
    nbytes = before + post_bytes(len(local))
    secret = secrets.token_bytes(_TOKEN_BYTES)
    populate = part_of is None
    handle, path, own = -1, "", None
    mappings: list[mmap.mmap | None] = []
    views: list[memoryview | None] = []
    board: Board | None = None
    memory: SharedMemory | None = None
    try:
        # Only what the system raises is suppressed: a signal handler may raise anything, anywhere.
        with suppress(OSError, AttributeError):
            handle, path = make(nbytes)
            own = _map(handle, nbytes, populate)
            own[nbytes - _TOKEN_BYTES :] = secret
        offers = exchange((path if own is not None else "", secret, os.getpid()))
        mappings = [None] * size
        works = own is not None
        if works:
            mappings[rank] = own
            ahead = populate and len(local) <= _PREFAULT_UP_TO
            works = all([_map_peer(mappings, peer, offers[peer], nbytes, ahead) for peer in local if peer != rank])
        pids = [offer[2] if peer in local else 0 for peer, offer in enumerate(offers)]
        if works:
            views = [None if mapping is None else memoryview(mapping) for mapping in mappings]
            pages = [None if view is None else view[: board_bytes(size)] for view in views]
            spins = _SPINS if len(local) <= (os.cpu_count() or 1) else 20
            board = Board(pages, rank, timeout=timeout, spins=spins, processes=pids)
        if not all(exchange(works)):
            return None
        assert board is not None
        if part_of is None:
            reader = _probe_direct_reads(rank, local, pids, exchange)
        else:
            reader = DirectRead(pids) if part_of.reads_private else None
        if reader is not None:
            reader.explain = board.explain
        mapped = MappedMemory(board) if make is _anonymous_file else None  # pieces are anonymous files too
        windows = [
            None if view is None else np.frombuffer(view, np.uint8, WINDOW_BYTES, board_bytes(size)) for view in views
        ]
        posts = [None if view is None else view[before:] for view in views]
        every = [mapping for mapping in mappings if mapping is not None]
        memory = SharedMemory(board, windows, reader, mapped, posts, every)
        return memory
    except BaseException as error:
        if board is not None:  # peers may have got further, and look nowhere else
            board.mark(FAILED, f"{type(error).__name__}: {error}")
        raise
    finally:
        if handle >= 0:
            if not path.startswith("/proc/"):
                with suppress(OSError):
                    os.unlink(path)
            os.close(handle)
        if memory is None:
            if board is not None:
                board.release()
            for mapping in (own, *mappings):
                if mapping is not None:
                    with suppress(BufferError):  # a view of it goes with this call
                        mapping.close()


def _map_peer(
    mappings: list[mmap.mmap | None], peer: int, offer: tuple[str, bytes, int], nbytes: int, ahead: bool
) -> bool:
    path, secret, _ = offer
    if not path:
        return False
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        if os.fstat(handle).st_size < nbytes:  # another process's file, by the same path
            return False
        mapping = _map(handle, nbytes, ahead)
    except OSError:
        return False
    finally:
        os.close(handle)
    mappings[peer] = mapping
    return bytes(mapping[nbytes - _TOKEN_BYTES : nbytes]) == secret


def _map(handle: int, nbytes: int, populate: bool) -> mmap.mmap:
    return mmap.mmap(handle, nbytes, flags=mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if populate else 0))


def _probe_direct_reads(rank: int, local: Sequence[int], pids: Sequence[int], exchange: Exchange) -> DirectRead | None:
    """Try to read and write every peer's private memory; None on every rank if any rank could not."""
    size = len(pids)
    secret = np.frombuffer(secrets.token_bytes(8), np.int64).copy()
    inbox = np.zeros(size, np.int64)
    _probed.append((secret, inbox))
    facts = exchange((ancestors(os.getpid()), secret.ctypes.data, int(secret[0]), inbox.ctypes.data))
    admit([facts[peer][0] for peer in local])
    exchange(None)  # all have admitted their peers
    reader = None
    works = False
    seen = np.zeros(1, np.int64)
    try:
        reader = DirectRead(pids)
        works = True
        for peer in local:
            _, address, expected, letters = facts[peer]
            if peer != rank:
                reader.fetch(peer, address, seen.ctypes.data, 8)
                works = works and int(seen[0]) == expected
                reader.store(peer, letters + 8 * rank, secret.ctypes.data, 8)
    except TransportError:
        works = False
    exchange(None)  # all have written to their peers
    works = works and all(int(inbox[peer]) == facts[peer][2] for peer in local if peer != rank)
    _probed.pop()
    return reader if all(exchange(works)) else None
