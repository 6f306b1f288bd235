"""Bruck's allgather over connections, and the words and exchanges that it carries."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from collectives.base.errors import CollectiveTimeoutError, RankFailedError
from collectives.transport.host.board import max_words
from collectives.transport.tcp import tcp_channel
from collectives.transport.tcp.network_control import NetworkControl
from collectives.transport.tcp.tcp_channel import TcpChannel, TcpWords
from tests.support.emulated import loopback_links
from tests.support.emulated.loopback_links import raised


def control_of(channel: TcpChannel) -> NetworkControl:
    control = NetworkControl(channel, TcpWords(channel), channel.exchange, None)
    channel.check = lambda: control.check(deep=True)
    return control


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_every_rank_gets_every_ranks_words_in_many_calls(size: int) -> None:
    def rank(channel: TcpChannel, links: Any) -> list[Any]:
        control, got = control_of(channel), []
        for call in range(40):
            count = call * 7 % 30
            words = [1000 * call + 100 * channel.rank + number for number in range(count)]
            assert control.agree(call + 1, words)
            got.append([list(control.words_of(peer)) for peer in range(size)])
        return got

    expected = [
        [[1000 * call + 100 * peer + number for number in range(call * 7 % 30)] for peer in range(size)]
        for call in range(40)
    ]
    assert loopback_links.run(size, rank) == [expected] * size


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_ranks_that_propose_different_things_all_see_it_and_go_on(size: int) -> None:
    def rank(channel: TcpChannel, links: Any) -> list[Any]:
        control, got = control_of(channel), []
        for call in range(60):
            odd = call % 3 == 1 and channel.rank == call % size
            # A rank with other words than the rest: fewer, none, or the most that there may be.
            count = (0, 3, max_words(size))[call % 9 // 3] if odd else 5
            got.append(control.agree(2 if odd else 1, [channel.rank] * count))
            if not got[-1]:
                got.append(channel.exchange((channel.rank, "x" * (channel.rank * 1000 + call))))
            else:
                assert [control.words_of(peer)[4] for peer in range(size)] == list(range(size))
        return got

    results = loopback_links.run(size, rank)
    assert not raised(results)
    assert results == [results[0]] * size
    assert [result for result in results[0] if result is False] == [False] * 20
    assert [(peer, "x" * (peer * 1000 + 1)) for peer in range(size)] in results[0]


def test_words_stay_valid_while_peers_are_a_call_ahead() -> None:
    def rank(channel: TcpChannel, links: Any) -> list[Any]:
        control, got = control_of(channel), []
        for call in range(50):
            control.agree(1, memoryview(bytearray([channel.rank + call] * 80)).cast("q"))
            mine = [control.words_of(peer) for peer in range(channel.size)]
            control.enter(2, [7] * 10)  # the next one
            got += [bytes(words)[0] for words in mine]
            while control.look() is None:
                pass
        return got

    expected = [peer + call for call in range(50) for peer in range(3)]
    assert loopback_links.run(3, rank) == [expected] * 3


def test_more_than_the_buffers_take_travels_both_ways() -> None:
    def rank(channel: TcpChannel, links: Any) -> Any:
        return [len(text) for text in channel.exchange("x" * (20_000_000 + channel.rank))]

    assert loopback_links.run(3, rank) == [[20_000_000, 20_000_001, 20_000_002]] * 3


def test_a_rank_that_is_elsewhere_is_named_as_is_what_may_be_between() -> None:
    """A record that is said to carry a tensor is not sealed: it need not be the peer's."""

    def rank(channel: TcpChannel, links: Any) -> Any:
        if channel.rank == 0:
            return channel.exchange("here")
        return control_of(channel).agree(1, memoryview(bytes(8)))

    error, same = loopback_links.run(2, rank)
    assert isinstance(error, RankFailedError) and not same
    assert "rank 0: rank 1 made another call" in str(error) and "between the hosts" in str(error)


def test_a_connection_that_ends_without_a_word_is_a_failure_of_that_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_channel, "CAUSE_SHOWS_WITHIN", 0.05)

    def rank(channel: TcpChannel, links: Any) -> None:
        control = control_of(channel)
        control.agree(1)
        if channel.rank == 1:
            channel.close()
            return
        control.agree(2)

    results = loopback_links.run(2, rank)
    assert isinstance(results[0], RankFailedError) and "rank 0: rank 1 has failed" in str(results[0])


def test_a_rank_that_left_or_failed_is_named_with_its_reason() -> None:
    def rank(channel: TcpChannel, links: Any) -> None:
        control = control_of(channel)
        control.agree(1)
        if channel.rank == 2:
            control.fail("ValueError: it broke")
            control.leave()
            return
        control.agree(2)

    results = loopback_links.run(3, rank)
    for error in results[:2]:
        assert isinstance(error, RankFailedError) and "rank 2 has failed:\nValueError: it broke" in str(error)

    def leaves(channel: TcpChannel, links: Any) -> None:
        control = control_of(channel)
        control.agree(1)
        if channel.rank == 0:
            control.leave()
            return
        control.agree(2)

    results = loopback_links.run(2, leaves)
    assert isinstance(results[1], RankFailedError) and "rank 0 has shut down or ended" in str(results[1])


def test_a_missing_rank_is_known_to_those_that_wait_and_the_wait_is_bounded() -> None:
    missing: dict[int, list[int]] = {}
    known = threading.Event()

    def rank(channel: TcpChannel, links: Any) -> None:
        control = control_of(channel)
        if channel.rank == 2:
            assert known.wait(20)
            control.agree(1)
            return
        control.enter(1)
        while missing.get(channel.rank) != [2]:
            assert control.look() is None
            control.check(deep=True)
            missing[channel.rank] = control.missing()
            time.sleep(0.01)
        if len(missing) == 2 and list(missing.values()) == [[2], [2]]:
            known.set()
        while not control.look():
            control.relax()

    assert not raised(loopback_links.run(3, rank))

    def waits(channel: TcpChannel, links: Any) -> None:
        if channel.rank == 0:
            with pytest.raises(CollectiveTimeoutError, match=r"waited 0\.2 s for every rank to enter the call"):
                control_of(channel).agree(1)
            known.set()
        else:
            assert known.wait(20)

    known.clear()
    assert not raised(loopback_links.run(2, waits, timeout=0.2))
