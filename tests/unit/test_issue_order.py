"""The turn: one holder at a time has work under way, and who never ends is told of."""

from __future__ import annotations

import threading

import pytest

from collectives.base.errors import CollectiveTimeoutError, RankFailedError
from collectives.transport.cuda.issue_order import Turn


class Holder:
    def __init__(self) -> None:
        self.at_work = threading.Event()
        self.asked = threading.Event()

    def busy(self) -> bool:
        self.asked.set()
        return self.at_work.is_set()


def nothing() -> None:
    """No peer has failed."""


def test_whoever_comes_first_has_it_and_keeps_it() -> None:
    turn, holder = Turn(), Holder()
    assert not turn.needed and not turn.reported
    holder.at_work.set()
    for _ in range(3):
        turn.take(holder.busy, 3, 0.0, nothing)


def test_it_is_given_up_when_nothing_is_under_way() -> None:
    turn, first, second = Turn(), Holder(), Holder()
    turn.take(first.busy, 3, 0.0, nothing)
    turn.take(second.busy, 3, 0.0, nothing)
    assert first.asked.is_set()
    second.at_work.set()
    with pytest.raises(CollectiveTimeoutError, match=r"rank 3: .*did not end within 0 s.*COLLECTIVES_TIMEOUT"):
        turn.take(first.busy, 3, 0.0, nothing)


def test_one_waits_until_the_others_work_is_done() -> None:
    turn, first, second = Turn(), Holder(), Holder()
    turn.take(first.busy, 3, 0.0, nothing)
    first.at_work.set()
    has_it = threading.Event()

    def wait() -> None:
        turn.take(second.busy, 3, 20.0, nothing)
        has_it.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert first.asked.wait(20)
    assert not has_it.is_set()
    first.at_work.clear()
    assert has_it.wait(20)
    thread.join(20)
    second.at_work.set()
    with pytest.raises(CollectiveTimeoutError):
        turn.take(first.busy, 3, 0.01, nothing)


def test_of_many_that_want_it_one_at_a_time_is_at_work() -> None:
    turn, lock = Turn(), threading.Lock()
    inside, turns = 0, 0

    def work() -> None:
        nonlocal inside, turns
        holder = Holder()
        for _ in range(20):
            # Before it takes the turn, as `Accelerator.take_turn` does: the next one may ask at once
            holder.at_work.set()
            turn.take(holder.busy, 3, 20.0, nothing)
            with lock:
                inside += 1
                assert inside == 1
            with lock:
                inside -= 1
                turns += 1
            holder.at_work.clear()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert turns == 80, "somebody was not alone"


def test_who_waits_for_the_turn_learns_that_a_peer_has_failed() -> None:
    turn, first, second = Turn(), Holder(), Holder()
    turn.take(first.busy, 0, 0.0, nothing)
    first.at_work.set()

    def check() -> None:
        raise RankFailedError("rank 1 has failed")

    with pytest.raises(RankFailedError, match="rank 1"):
        turn.take(second.busy, 0, 20.0, check)
