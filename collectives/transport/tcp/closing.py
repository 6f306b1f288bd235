"""The end of connections whose peer may not have read everything yet.

The system answers data for a closed socket, unread or not yet arrived, with a reset, and then drops what it has not
sent yet: the last message of a rank that leaves would be lost because a peer is a call ahead.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress

from collectives.transport import backoff

_UNSENT = 0x5411
"""SIOCOUTQ, equal to TIOCOUTQ: bytes that the peer's system has not acknowledged."""
_SCRAP = 1 << 16


def close_all(sockets: Iterable[socket.socket], within: float) -> None:
    """Close connections once the peers' systems have all that was sent on them: what has arrived there can be read even
    after a reset.

    Args:
        sockets: connected and non-blocking; what arrives on them is dropped.
        within: seconds, after which they are closed all the same.
    """
    left: list[socket.socket] = []
    for sock in sockets:
        try:
            sock.shutdown(socket.SHUT_WR)
            left.append(sock)
        except OSError:  # it is closed, or has been reset
            sock.close()

    def all_done() -> bool:
        for sock in list(left):
            if _is_done(sock):
                left.remove(sock)
                sock.close()
        return not left

    backoff.poll(all_done, within)
    for sock in left:
        sock.close()


def _is_done(sock: socket.socket) -> bool:
    """Drop some of what has arrived: a peer that goes on sending must not keep this rank here. Returns whether the
    peer's system has everything, or the connection has ended."""
    try:
        with suppress(BlockingIOError):
            sock.recv(_SCRAP)
        unsent: int = struct.unpack("i", fcntl.ioctl(sock, _UNSENT, bytes(4)))[0]
    except OSError:
        return True
    return unsent == 0
