"""One rank's end of the messages between the ranks of a host, without processes."""

from __future__ import annotations

import numpy as np

from collectives.transport.host.board import Board, board_bytes
from collectives.transport.host.memory_endpoint import MemoryEndpoint
from collectives.transport.host.rings import Post, post_bytes
from collectives.transport.point_to_point import Incoming, Outgoing

RANKS = 2


def endpoints() -> list[MemoryEndpoint]:
    pages = [memoryview(bytearray(board_bytes(RANKS))) for _ in range(RANKS)]
    posts = [memoryview(bytearray(post_bytes(RANKS))) for _ in range(RANKS)]
    return [
        MemoryEndpoint(Board(pages, rank, timeout=1, spins=1), [Post(post, RANKS) for post in posts], None, None)
        for rank in range(RANKS)
    ]


def test_a_poll_ends_though_messages_keep_coming() -> None:
    """It handles what was there when it began."""
    sender, receiver = endpoints()
    came: list[int] = []

    def arrived(message: Incoming) -> None:
        came.append(message.tag)
        if len(came) < 1000:
            sender.send(Outgoing(1, len(came) + 2, np.ones(1), (1,)))

    receiver.arrived = arrived
    for tag in range(3):
        sender.send(Outgoing(1, tag, np.ones(1), (1,)))
    for most in (3, 6, 9):
        receiver.poll()
        assert came == list(range(most))
