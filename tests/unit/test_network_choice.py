"""The choice between two networks: the quicker one, alike on all ranks, whatever a single rank has measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from collectives.transport.mpi.network_choice import SIZES, choose, ratio


class Clock:
    """Shows how much was spent."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Network:
    """A wiring of two ranks, each of whose operations takes the time that it was given.

    Args:
        latency: seconds of a round of words and of a block.
        rate: seconds of a byte.
        exchange: what the channel does with this rank's value.
    """

    def __init__(
        self, clock: Clock, latency: float, rate: float, exchange: Callable[[Any], list[Any]] = lambda value: [value]
    ) -> None:
        self.clock, self.latency, self.rate = clock, latency, rate
        self.channel: Any = self
        self.messages: Any = self
        self.rank, self.size, self.name = 0, 2, "network"
        self.exchange = exchange
        self.moved = [0, 0]
        self.first = True

    def words(self) -> Network:
        return self

    def post(self, token: int, words: object) -> None:
        self.clock.now += self.latency

    def test(self, spin: bool) -> bool:
        return False

    def wait(self) -> None:
        pass

    def post_receive(self, peer: int, into: Any) -> None:
        assert peer == 1
        self.moved[0] += into.nbytes

    def post_send(self, peer: int, block: Any) -> None:
        assert peer == 1
        self.moved[1] += block.nbytes
        self.clock.now += self.latency + block.nbytes * self.rate

    def drain(self) -> None:
        self.clock.now += 5.0 if self.first else 0.0  # connections are made
        self.first = False


@pytest.mark.parametrize(
    ("latency", "rate", "second"), [(1e-6, 1e-9, True), (1e-3, 1e-9, False), (2e-6, 1e-6, False), (8e-5, 1e-10, True)]
)
def test_the_quicker_one_is_chosen(latency: float, rate: float, second: bool) -> None:
    clock = Clock()
    one, two = Network(clock, 5e-5, 1e-9), Network(clock, latency, rate)
    assert choose(one, two, clock) is (two if second else one)  # type: ignore[type-var]
    assert one.moved == two.moved and one.moved[0] == one.moved[1] > sum(SIZES)


def test_all_ranks_decide_alike_by_the_slowest() -> None:
    """To this rank the second is twice as quick, to its peer it is much slower."""
    peers = [[1.0, 9.0]] * len(SIZES)
    for told in (lambda mine: [mine, peers], lambda mine: [peers, mine]):
        clock = Clock()
        one, two = Network(clock, 2e-5, 2e-9, told), Network(clock, 1e-5, 1e-9)
        assert choose(one, two, clock) is one  # type: ignore[type-var]


def test_every_size_counts_as_much() -> None:
    """A quarter of the time for words makes up for twice the time for blocks, although these take far longer."""
    assert ratio([[[4e-5, 1e-5], [1e-2, 2e-2]]]) == pytest.approx(0.5**0.5)
    assert ratio([[[1e-5, 1e-5], [1e-2, 2e-2]], [[1e-6, 2e-5], [3e-2, 1e-2]]]) == pytest.approx((2 * 2 / 3) ** 0.5)
