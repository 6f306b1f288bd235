"""Messages within one call: each is received whole, or left to the ordinary way as it came."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives.base.dtypes import SUPPORTED
from collectives.base.errors import TransportError
from collectives.transport.base import Array
from collectives.transport.host.at_once import RingsAtOnce
from collectives.transport.host.rings import DONE, EAGER, READY, Post, Reader, Writer, post_bytes
from collectives.transport.point_to_point import DTYPE_CODE, Outgoing

RANKS = 2
LOOKS = 3


class Ends:
    """Rank 0 sends through ``writer``, rank 1 receives; the memory of READY messages is ``lent``."""

    def __init__(self) -> None:
        pages = [memoryview(bytearray(post_bytes(RANKS))) for _ in range(RANKS)]
        first, second = (Post(page, RANKS) for page in pages)
        self.writer, self.reader = Writer(first, second, 0, 1), Reader(second, first, 1, 0)
        self.waiting: dict[int, Any] = {}
        self.told: list[tuple[int, int]] = []
        self.ended: list[int] = []
        self.begun: list[Outgoing] = []
        self.lent: Array | None = None
        self.sender = RingsAtOnce(
            {1: self.writer}, {}, self.waiting, self.begun.append, self.fetch, self.tell, self.end
        )
        self.back = Writer(second, first, 1, 0)
        self.receiver = RingsAtOnce(
            {0: self.back}, {0: self.reader}, {}, self.begun.append, self.fetch, self.tell, self.end
        )

    def fetch(self, source: int, where: int, into: Array, nbytes: int) -> None:
        if self.lent is None:
            raise TransportError("no memory")
        into[:nbytes] = self.lent.view(np.uint8)

    def tell(self, source: int, number: int) -> None:
        self.told.append((source, number))

    def end(self, source: int, reader: Reader, header: tuple[int, ...]) -> None:
        self.ended.append(header[3])


@pytest.mark.parametrize("dtype", SUPPORTED, ids=str)
@pytest.mark.parametrize("shape", ((), (0,), (1,), (5,), (2, 3), (100, 10)))
def test_a_message_is_received_into_the_first_elements(dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    ends = Ends()
    mine = (np.arange(np.prod(shape)) % 90).astype(dtype).reshape(shape)
    for length in (mine.size, mine.size + 3):
        into = np.full(length, 1, dtype)
        assert ends.sender.send(1, 7, mine)
        assert ends.receiver.receive(0, 7, into, LOOKS)
        np.testing.assert_array_equal(into[: mine.size], mine.reshape(-1))
        np.testing.assert_array_equal(into[mine.size :], np.ones(length - mine.size, dtype))
        assert not ends.receiver.receive(0, 7, into, LOOKS), "nothing is left"


def test_what_does_not_fit_stays_first_in_the_ring() -> None:
    ends = Ends()
    assert ends.sender.send(1, 7, np.arange(10.0))
    for tag, into in ((8, np.zeros(10)), (7, np.zeros(9)), (7, np.zeros(10, np.int64))):
        assert not ends.receiver.receive(0, tag, into, LOOKS)
        assert not into.any()
    into = np.zeros((2, 5))
    assert ends.receiver.receive(0, 7, into, LOOKS)
    np.testing.assert_array_equal(into.reshape(-1), np.arange(10.0))


def test_a_message_is_not_sent_where_it_would_wait_or_overtake() -> None:
    ends = Ends()
    assert not ends.sender.send(0, 0, np.zeros(1)), "this rank has no ring for itself"
    ends.waiting[1] = "a message that waits for room"
    assert not ends.sender.send(1, 0, np.zeros(1))
    ends.waiting.clear()
    sent = 0
    while ends.sender.send(1, 0, np.full(1000, sent)):
        sent += 1
    into = np.zeros(1000, int)
    for number in range(sent):
        assert ends.receiver.receive(0, 0, into, LOOKS)
        assert (into == number).all()
    assert sent > 1 and not ends.receiver.receive(0, 0, into, LOOKS)


def test_a_payload_that_lies_with_its_sender_is_fetched_and_confirmed() -> None:
    ends = Ends()
    numbers = (7, 3, 80, DTYPE_CODE["float64"], 1, 1 << 62)
    assert ends.writer.push(READY, numbers, (10,))
    into = np.zeros(12)
    assert not ends.receiver.receive(0, 7, into, LOOKS), "its error is the ordinary way's"
    assert not ends.told
    ends.lent = np.arange(10.0)
    assert ends.receiver.receive(0, 7, into, LOOKS)
    np.testing.assert_array_equal(into, [*range(10), 0, 0])
    assert ends.told == [(0, 3)]


def test_no_payload_is_fetched_whose_sender_cannot_be_told() -> None:
    ends = Ends()
    ends.lent, into = np.arange(10.0), np.zeros(10)
    assert ends.writer.push(READY, (7, 3, 80, DTYPE_CODE["float64"], 1, 1 << 62), (10,))
    while ends.back.has_room():
        assert ends.back.push(EAGER, (0, 0, 0, 0, 0, 0))
    assert not ends.back.push(DONE, (0, 3, 0, 0, 0, 0))
    assert not ends.receiver.receive(0, 7, into, LOOKS)
    assert not into.any() and not ends.told


def test_a_large_message_is_begun() -> None:
    ends = Ends()
    large = np.zeros((2, ends.writer.most_payload), np.uint8)
    message = ends.sender.send(1, 7, large)
    assert isinstance(message, Outgoing) and ends.begun == [message]
    assert (message.peer, message.tag, message.shape) == (1, 7, large.shape)
    assert np.shares_memory(message.array, large) and message.array.ndim == 1


def test_parts_are_left_to_the_ordinary_way() -> None:
    ends = Ends()
    assert ends.writer.push(EAGER, (7, 1, 80, DTYPE_CODE["float64"], 1, 40), (10,), np.zeros(40, np.uint8))
    assert not ends.receiver.receive(0, 7, np.zeros(10), LOOKS)


def test_the_ends_of_own_messages_are_handled_on_the_way() -> None:
    ends = Ends()
    for number in (1, 2):
        assert ends.writer.push(DONE, (0, number, 0, 0, 0, 0))
    assert ends.sender.send(1, 7, np.ones(1))
    into = np.zeros(1)
    assert ends.receiver.receive(0, 7, into, LOOKS)
    assert ends.ended == [1, 2] and into[0] == 1


def test_confirming_ends_before_another_record() -> None:
    ends = Ends()
    message = Outgoing(0, 0, np.ones(1), (1,))
    assert not ends.receiver.confirm(message, LOOKS)
    assert ends.sender.send(1, 7, np.ones(1))
    assert ends.writer.push(DONE, (0, 1, 0, 0, 0, 0))
    assert not ends.receiver.confirm(message, LOOKS)
    assert not ends.ended
    assert ends.receiver.receive(0, 7, np.zeros(1), LOOKS)
    assert not ends.receiver.confirm(message, LOOKS), "this one is of another message"
    assert ends.ended == [1]
