"""Messages over TCP: what is sent arrives, in order, both ways at once, and a death is named."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from collectives.base.errors import CollectiveTimeoutError, RankFailedError
from collectives.transport.tcp import tcp_channel
from collectives.transport.tcp.tcp_channel import TcpChannel
from collectives.transport.tcp.tcp_messages import LANES_FROM, TcpMessages
from tests.support.emulated import loopback_links
from tests.support.emulated.loopback_links import LoopbackLinks, raised


def pattern(sender: int, receiver: int, number: int, size: int) -> Any:
    return np.arange(size, dtype=np.int64) * 7 + 1_000_003 * sender + 10_007 * receiver + number


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("size", [2, 5])
def test_all_messages_between_all_ranks_arrive_in_order(size: int, lanes: int) -> None:
    lengths = [0, 1, 5, LANES_FROM // 8 - 1, LANES_FROM // 8, 200_003, 3]

    def rank(channel: TcpChannel, links: LoopbackLinks) -> None:
        messages, me = TcpMessages(channel, links, lanes), channel.rank
        others = [peer for peer in range(size) if peer != me]
        for _ in range(3):
            into = {(p, i): np.zeros(n, np.int64) for p in others for i, n in enumerate(lengths)}
            for (peer, _), block in into.items():
                messages.post_receive(peer, block)
            for number, length in enumerate(lengths):
                for peer in others:
                    messages.post_send(peer, pattern(me, peer, number, length))
            messages.drain()
            for (peer, number), block in into.items():
                np.testing.assert_array_equal(block, pattern(peer, me, number, lengths[number]))

    assert not raised(loopback_links.run(size, rank))


def test_large_messages_both_ways_at_once_do_not_wait_for_each_other() -> None:
    def rank(channel: TcpChannel, links: LoopbackLinks) -> bool:
        messages, peer = TcpMessages(channel, links, 2), 1 - channel.rank
        mine, theirs = pattern(channel.rank, peer, 0, 6_000_000), np.zeros(6_000_000, np.int64)
        messages.post_send(peer, mine)
        messages.post_receive(peer, theirs)
        messages.drain()
        return bool((theirs == pattern(peer, channel.rank, 0, 6_000_000)).all())

    assert loopback_links.run(2, rank) == [True, True]


def test_a_message_is_awaited_while_later_ones_have_not_been_sent() -> None:
    first_used = threading.Event()

    def rank(channel: TcpChannel, links: LoopbackLinks) -> None:
        messages, peer = TcpMessages(channel, links), 1 - channel.rank
        if channel.rank == 0:
            blocks = [np.zeros(100, np.int64) for _ in range(2)]
            arrivals = [messages.post_receive(peer, block) for block in blocks]
            messages.await_arrival(arrivals[0])
            assert blocks[0][99] == pattern(1, 0, 0, 100)[99]
            first_used.set()
            messages.await_arrival(arrivals[1])
            assert blocks[1][99] == pattern(1, 0, 1, 100)[99]
        else:
            messages.post_send(peer, pattern(1, 0, 0, 100))
            messages.drain()
            assert first_used.wait(20)
            messages.post_send(peer, pattern(1, 0, 1, 100))
            messages.drain()

    assert not raised(loopback_links.run(2, rank))


def test_the_first_bytes_of_a_message_are_used_before_the_rest_is_sent() -> None:
    first_used = threading.Event()

    def rank(channel: TcpChannel, links: LoopbackLinks) -> None:
        messages, peer, whole = TcpMessages(channel, links), 1 - channel.rank, pattern(1, 0, 0, 300)
        if channel.rank == 0:
            block = np.zeros(300, np.int64)
            arrival = messages.post_receive(peer, block)
            messages.await_arrival(arrival, 800)
            np.testing.assert_array_equal(block[:100], whole[:100])
            first_used.set()
            messages.await_arrival(arrival)
            np.testing.assert_array_equal(block, whole)
        else:
            messages.post_send(peer, whole[:100])
            messages.drain()
            assert first_used.wait(20)
            messages.post_send(peer, whole[100:])
            messages.drain()

    assert not raised(loopback_links.run(2, rank))


def test_ranks_that_open_their_lanes_in_a_circle_do_not_wait_for_each_other() -> None:
    def rank(channel: TcpChannel, links: LoopbackLinks) -> int:
        # Rank 2 waits for what rank 0 has posted before it dials rank 1, for whom rank 0 would wait.
        messages, me, block = TcpMessages(channel, links), channel.rank, np.zeros(1, np.int64)
        large = np.full(2_000_000, 5, np.int64)
        into = np.zeros_like(large)
        if me == 0:
            messages.post_send(2, large)
            messages.post_receive(1, block)
        elif me == 1:
            messages.post_receive(2, block)
            messages.drain()
            messages.post_send(0, block)
        else:
            messages.post_receive(0, into)
            messages.drain()
            messages.post_send(1, into[-1:])
        messages.drain()
        return int(block[0])

    assert loopback_links.run(3, rank) == [5, 5, 0]


def test_a_rank_whose_connections_end_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_channel, "CAUSE_SHOWS_WITHIN", 0.05)

    def rank(channel: TcpChannel, links: LoopbackLinks, sends: bool) -> None:
        messages, peer = TcpMessages(channel, links), 1 - channel.rank
        block = np.zeros(4_000_000, np.int64)
        messages.post_receive(peer, block[:1])
        messages.post_send(peer, block[:1])
        messages.drain()
        if channel.rank == 1:
            messages.close()
        elif sends:
            messages.post_send(peer, block)
        else:
            messages.post_receive(peer, block)
        messages.drain()

    for sends in (True, False):
        results = loopback_links.run(2, lambda channel, links, sends=sends: rank(channel, links, sends))
        assert isinstance(results[0], RankFailedError) and "rank 0: rank 1 has failed" in str(results[0])


def test_a_wait_is_bounded_and_names_the_rank() -> None:
    ended = threading.Event()

    def rank(channel: TcpChannel, links: LoopbackLinks) -> None:
        messages = TcpMessages(channel, links)
        if channel.rank == 0:
            messages.post_receive(1, np.zeros(3))
            with pytest.raises(CollectiveTimeoutError, match=r"rank 0: waited 0.2 s for a block from .*\(1\)"):
                messages.drain()
            ended.set()
        else:
            assert ended.wait(20)

    assert not raised(loopback_links.run(2, rank, timeout=0.2))
