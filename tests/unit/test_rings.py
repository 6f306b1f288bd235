"""Records through a ring: what is put in comes out, in order, however full the ring gets."""

from __future__ import annotations

from collections import deque

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from collectives.transport.host.rings import Post, Reader, Writer, post_bytes, ring_bytes

RANKS = 1000
"""So many that the rings are small."""


def ends() -> tuple[Writer, Reader]:
    pages = [memoryview(bytearray(post_bytes(RANKS))) for _ in range(2)]
    first, second = (Post(page, RANKS) for page in pages)
    return Writer(first, second, 0, 1), Reader(second, first, 1, 0)


@given(st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 4), st.integers(0, 2000)), st.just(None)), max_size=60))
def test_what_is_put_in_comes_out(steps: list[tuple[int, int] | None]) -> None:
    """None takes a record; a pair puts one in, with so many numbers and so many bytes."""
    writer, reader = ends()
    inside: deque[tuple[tuple[int, ...], tuple[int, ...], bytes]] = deque()
    for number, step in enumerate([*steps, *[None] * 60]):
        if step is None:
            header = reader.next()
            assert (header is None) == (not inside)
            if header is not None:
                numbers, further, data = inside.popleft()
                assert header[0] == 7 and header[2:] == numbers
                assert reader.further(len(further)) == further
                assert bytes(reader.payload(len(further), len(data))) == data
                reader.take()
            continue
        count, nbytes = step
        numbers, further = (number, -number, nbytes, count, 1 << 62, 0), tuple(range(number, number + count))
        payload = np.arange(number, number + nbytes).astype(np.uint8)
        if writer.push(7, numbers, further, payload):
            inside.append((numbers, further, payload.tobytes()))
        else:
            assert inside, "an empty ring has room"
    assert not inside


def test_a_full_ring_refuses_until_a_record_was_taken() -> None:
    writer, reader = ends()
    payload = np.zeros(writer.most_payload, np.uint8)
    pushed = 0
    while writer.push(1, (pushed, 0, 0, 0, 0, 0), (), payload):
        pushed += 1
    assert pushed >= 2
    assert reader.next() is not None
    reader.take()
    assert writer.push(1, (pushed, 0, 0, 0, 0, 0), (), payload)


def test_rings_are_bounded_together() -> None:
    assert ring_bytes(1) == ring_bytes(32) > ring_bytes(64) > ring_bytes(512) == ring_bytes(100_000)
    assert all(post_bytes(ranks) % 4096 == 0 for ranks in (1, 3, 64, 1000))
