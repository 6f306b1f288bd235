"""Heartbeats and notices: what shows a death, what does not, and what a rank says about itself."""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from collectives.base.errors import CollectiveTimeoutError, RankFailedError, TransportError
from collectives.transport import backoff
from collectives.transport.mpi import mpi_heart
from collectives.transport.mpi.mpi_heart import MpiHeart
from collectives.transport.tcp import tcp_channel
from collectives.transport.tcp.heart import _HEAD, Heart
from collectives.transport.tcp.mesh import Mesh
from collectives.transport.tcp.notices import Notice
from collectives.transport.tcp.tcp_channel import TcpChannel

LONG = 30.0
"""A timeout that no test outlasts."""


def join(timeouts: Sequence[float]) -> list[tuple[Mesh, Heart]]:
    """Ranks of one process, each with a mesh and a heart."""
    size = len(timeouts)
    barrier, slots = threading.Barrier(size, timeout=20), [None] * size

    def of(rank: int) -> tuple[Mesh, Heart]:
        def exchange(value: Any) -> list[Any]:
            slots[rank] = value
            barrier.wait()
            said: list[Any] = list(slots)
            barrier.wait()
            return said

        mesh = Mesh(exchange, rank, None)
        return mesh, Heart(mesh, timeouts[rank], LONG)

    with concurrent.futures.ThreadPoolExecutor(size) as pool:
        return list(pool.map(of, range(size)))


@pytest.fixture
def ranks() -> Iterator[Callable[..., list[Heart]]]:
    """Gives a function that makes a rank of each timeout."""
    made: list[tuple[Mesh, Heart]] = []

    def make(*timeouts: float) -> list[Heart]:
        made.extend(join(timeouts))
        for _, heart in made:
            heart.start()
        return [heart for _, heart in made]

    yield make
    for mesh, heart in made:
        heart.close()
        mesh.close()


def soon(ready: Callable[[], object]) -> bool:
    return backoff.poll(ready, 20)


def test_notices_arrive_by_group_and_rank_also_before_the_group_is_made(ranks: Callable[..., list[Heart]]) -> None:
    zero, one, two = ranks(LONG, LONG, LONG)
    sender = two.notices("all.1", (1, 2))
    sender.tell(Notice.HERE, "7")
    sender.tell(Notice.FAILED, "ValueError: é" + "x" * 20_000)
    sender.tell(Notice.LEFT, "8")
    sender.tell(Notice.FAILED, "after leaving nothing is told")
    everybody = [heart.notices("all", range(3)) for heart in (zero, one, two)]
    everybody[2].tell(Notice.HERE, "3")
    assert soon(lambda: everybody[1].here == {2: 3} and everybody[0].here == {2: 3})  # sent later, so that all is there
    late = one.notices("all.1", (1, 2))
    assert late.here == {1: 7} and late.left == {1: 8} and late.all_left() and not late.gone
    assert late.failed == {1: "x" * 16384}, "the end of a long text"
    assert not everybody[1].failed and not everybody[1].left
    with pytest.raises(RankFailedError, match=r"^rank 1: rank 2 has failed \[R3\]:\nx+$"):
        late.look_for_failures()
    for notices in everybody:
        notices.look_for_failures()


def test_a_closed_connection_is_a_death_in_every_group_that_the_rank_has_not_left(
    ranks: Callable[..., list[Heart]],
) -> None:
    zero, one, two = ranks(LONG, LONG, LONG)
    groups = [[heart.notices(name, range(3)) for heart in (zero, one, two)] for name in ("a", "b", "c")]
    groups[1][2].tell(Notice.LEFT, "4")
    groups[2][2].tell(Notice.FAILED, "ValueError: no good")
    two.close()
    for a, b, c in zip(*(group[:2] for group in groups), strict=True):
        assert soon(lambda a=a, c=c: a.died and 2 in c.gone)
        assert b.left == {2: 4} and not b.failed and b.gone == {2}
        b.look_for_failures()
        assert c.failed == {2: "ValueError: no good"} and not c.died
        with pytest.raises(RankFailedError, match=r"^rank [01]: rank 2 on \S+ has died: its connection"):
            a.look_for_failures()
    assert zero.notices("d", (0, 2)).failed.keys() == {1}, "a death shows in groups that are made later"
    assert not zero.notices("e", (0, 1)).failed


def test_survivors_that_end_wait_only_until_all_of_them_do(
    ranks: Callable[..., list[Heart]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them has left its world, as where `init` has failed."""
    zero, one, two = ranks(LONG, LONG, LONG)
    channel: Any = SimpleNamespace(names=range(3))
    survivors = [MpiHeart(heart._mesh, heart, channel, LONG) for heart in (zero, one)]
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    try:
        two.close()
        assert soon(lambda: all(survivor.notices.died for survivor in survivors))
        ending = [threading.Thread(target=survivor.end_if_lost) for survivor in survivors]
        for thread in ending:
            thread.start()
        assert soon(lambda: not any(thread.is_alive() for thread in ending)) and ended == [0, 0]
    finally:
        for survivor in survivors:
            mpi_heart._watching.remove(survivor)


def test_silence_is_a_death_unless_a_new_connection_is_answered(
    ranks: Callable[..., list[Heart]], monkeypatch: pytest.MonkeyPatch
) -> None:
    zero, _ = ranks(0.5, 1000.0)  # rank 1 beats once in 200 s
    notices = zero.notices("all", range(2))
    pinged, answered = [], Mesh.ping

    async def ping(mesh: Mesh, peer: int, seconds: float) -> None:
        pinged.append(peer)
        if len(pinged) > 10:
            raise TransportError("no route to host")
        await answered(mesh, peer, seconds)

    monkeypatch.setattr(Mesh, "ping", ping)
    assert soon(lambda: len(pinged) == 10)
    assert not notices.failed, "silence beyond the timeout, while new connections were answered"
    assert soon(lambda: notices.failed)
    with pytest.raises(RankFailedError, match=r"^rank 0: rank 1 on \S+ has been silent for 0\.5 s: its host or netw"):
        notices.look_for_failures()
    assert pinged == [1] * len(pinged) and notices.gone == {1}


def test_a_rank_that_was_stopped_itself_blames_nobody(ranks: Callable[..., list[Heart]]) -> None:
    zero, _ = ranks(1.0, 1.0)
    notices = zero.notices("all", range(2))
    resumed = threading.Event()
    zero._service.call(lambda: (time.sleep(2.5), resumed.set()))
    assert resumed.wait(20)
    peer = zero._peers[1]
    assert soon(lambda: peer.silent >= 1), "it beats again"
    assert not notices.failed


def test_the_first_hand_reason_is_given(ranks: Callable[..., list[Heart]]) -> None:
    zero, one, two = ranks(LONG, LONG, LONG)
    mine, ones, twos = (heart.notices("all", range(3)) for heart in (zero, one, two))
    ones.tell(Notice.FAILED, "RankFailedError: rank 1: rank 2 has failed:\nValueError: no good")
    assert soon(lambda: mine.failed)
    with pytest.raises(RankFailedError, match=r"rank 1 has failed \[R3\]:\nRankFailedError: rank 1: rank 2 has failed"):
        mine.look_for_failures()
    twos.tell(Notice.FAILED, "ValueError: no good")
    assert soon(lambda: len(mine.failed) == 2)
    with pytest.raises(RankFailedError, match=r"^rank 0: rank 2 has failed \[R3\]:\nValueError: no good$"):
        mine.look_for_failures()
    one.close()
    assert soon(lambda: 1 in mine.gone)
    with pytest.raises(RankFailedError, match=r"^rank 0: rank 2 has failed"):
        mine.look_for_failures()


def test_telling_waits_for_no_peer_and_loses_nothing(ranks: Callable[..., list[Heart]]) -> None:
    zero, one = ranks(LONG, 2.0)
    mine, theirs = zero.notices("all", range(2)), one.notices("all", range(2))
    go_on = threading.Event()
    zero._service.call(go_on.wait, 20)
    for call in range(3000):
        theirs.tell(Notice.HERE, f"{call:0300}")
        theirs.tell(Notice.FAILED, "x" * 3000)
    theirs.tell(Notice.LEFT, "3000")
    assert not theirs.quiet() and not mine.left
    go_on.set()
    assert soon(lambda: mine.left == {1: 3000}) and mine.here == {1: 2999}
    assert soon(theirs.quiet)


def channel_of(heart: Heart, size: int) -> TcpChannel:
    """A rank's channel of a group without connections of its own."""
    links: Any = SimpleNamespace(rank=heart.rank, size=size)
    return TcpChannel(links, 20, range(size), heart.notices("all.1", range(size)))


def test_values_of_any_length_are_exchanged_over_the_hearts_connections(ranks: Callable[..., list[Heart]]) -> None:
    hearts = ranks(LONG, LONG, LONG)

    def rank(heart: Heart) -> list[list[Any]]:
        channel = channel_of(heart, 3)
        return [channel.exchange((heart.rank, call, "é" * (500_000 * heart.rank // (call + 1)))) for call in range(10)]

    expected = [[(peer, call, "é" * (500_000 * peer // (call + 1))) for peer in range(3)] for call in range(10)]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        assert list(pool.map(rank, hearts)) == [expected] * 3


def test_a_rank_that_leaves_ends_an_exchange_that_it_has_not_come_to(
    ranks: Callable[..., list[Heart]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_channel, "CAUSE_SHOWS_WITHIN", 0.1)
    zero, one, two = ranks(LONG, LONG, LONG)
    mine, theirs = channel_of(zero, 3), channel_of(one, 3)
    channel_of(two, 3).close()
    for channel in (mine, theirs):
        with pytest.raises(RankFailedError, match=r"rank 2 has failed .*left while this rank waited for it\) \[R10\]"):
            channel.exchange(channel.rank)


def test_an_exchange_ends_where_this_rank_has_closed_its_connections(
    ranks: Callable[..., list[Heart]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the default group is ended, and another group goes on."""
    monkeypatch.setattr(tcp_channel, "CAUSE_SHOWS_WITHIN", 0.1)
    zero, _ = ranks(LONG, LONG)
    mine = channel_of(zero, 2)
    zero.close()
    with pytest.raises(RankFailedError, match=r"^rank 0: rank 1 has failed .*R10"):
        mine.exchange(0)


def test_a_late_rank_is_named_by_those_that_exchange(ranks: Callable[..., list[Heart]]) -> None:
    zero, _, two = ranks(LONG, LONG, LONG)
    mine = channel_of(zero, 3)
    channel_of(two, 3)._notices.offer("2")
    assert soon(lambda: mine._notices.silent() == {0, 1})
    mine.timeout = 0.1
    with pytest.raises(CollectiveTimeoutError, match=r"for rank 1 to send its value in the group of ranks \[0, 1, 2\]"):
        mine.exchange(0)


def test_groups_that_are_over_are_forgotten(ranks: Callable[..., list[Heart]]) -> None:
    zero, one = ranks(LONG, LONG)
    mine, theirs = zero.notices("all.1", range(2)), one.notices("all.1", range(2))
    mine.tell(Notice.LEFT, "1")
    mine.close()
    assert "all.1" in zero._groups, "the other may still tell it something"
    theirs.tell(Notice.LEFT, "1")
    theirs.close()
    assert soon(lambda: not zero._groups and not one._groups)
    assert not zero._early and not one._early


@pytest.mark.parametrize("silent", [True, False])
def test_a_rank_that_hears_of_a_death_from_another_names_the_dead(
    ranks: Callable[..., list[Heart]], silent: bool
) -> None:
    """Also where the connection of the dead with another rank has ended, and that with this one has not yet."""
    zero, one, two = ranks(LONG, LONG, LONG)
    mine, ones, _ = (heart.notices("all", range(3)) for heart in (zero, one, two))
    one._service.call(one._lose, one._peers[2], "has been lost", silent)
    assert soon(lambda: ones.died)
    ones.tell(Notice.FAILED, "RankFailedError: rank 2 has been lost")
    assert soon(lambda: 1 in mine.failed)
    with pytest.raises(RankFailedError, match=r"^rank 0: rank 2 on \S+ has been lost$"):
        mine.look_for_failures()


def test_a_rank_that_gives_a_group_up_says_why(ranks: Callable[..., list[Heart]]) -> None:
    zero, one, two = ranks(LONG, LONG, LONG)
    mine = zero.notices("all", range(3))
    two.abandon("all", range(3), KeyboardInterrupt("in init()"))
    late = one.notices("all", range(3))
    for notices in (mine, late):
        assert soon(lambda notices=notices: notices.gone == {2})
        assert notices.failed == {2: "KeyboardInterrupt: in init()"} and not notices.died


def test_notices_of_groups_that_are_not_made_yet_are_bounded(ranks: Callable[..., list[Heart]]) -> None:
    zero, one = ranks(LONG, LONG)
    mine = zero.notices("all", range(2))
    for number in range(300):
        one.notices(f"all.{number}", range(2)).tell(Notice.HERE, "1")
    assert soon(lambda: mine.died)
    assert "has sent an invalid message" in mine.died[1] and len(zero._early) == 256


def test_a_notice_that_claims_to_be_too_long_is_not_awaited(ranks: Callable[..., list[Heart]]) -> None:
    """As where something on the way has changed its length: the beats that follow would be taken for the rest of it."""
    zero, one = ranks(LONG, LONG)
    mine = zero.notices("all", range(2))
    one._peers[0].send(_HEAD.pack(1 << 20, Notice.HERE))
    assert soon(lambda: mine.died)
    assert "has sent an invalid message (kind 4, 1048576 bytes)" in mine.died[1]
