"""What ranks conclude from what they have: alike on all of them, whatever order they submit in."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.engine import negotiation
from collectives.engine.negotiation import Frame, Ledger, Request


def request(name: str | None, shape: tuple[int, ...] = (4,), **more: object) -> Request:
    return Request("allreduce", name, "float32", shape, op="sum", **more)  # type: ignore[arg-type]


def frame(bits: int = 0, news: bool = False, joined: bool = False, stuck: bool = False) -> Frame:
    return Frame(bits, news, joined, stuck)


@given(st.integers(0, 2**200 - 1), st.booleans(), st.booleans(), st.booleans())
def test_a_frame_survives_as_words(bits: int, news: bool, joined: bool, stuck: bool) -> None:
    mine = Frame(bits, news, joined, stuck)
    words = mine.to_words(200)
    assert len(words) == 1 + 4
    assert Frame.from_words(words) == mine
    assert Frame.from_words(words.tolist()) == mine


@given(st.sampled_from([f.name for f in dataclasses.fields(Request)]))
def test_everything_but_the_detail_is_in_the_signature(field: str) -> None:
    first = request("a")
    other = {
        "collective": "allgather",
        "root": 1,
        "members": (first,),
        "shape": (5,),
        "prescale": 2.0,
        "postscale": 2.0,
    }
    second = dataclasses.replace(first, **{field: other.get(field, "other")})
    assert (first.signature() == second.signature()) == (field == "detail")
    assert (first == second) == (field == "detail")


def test_what_all_have_told_is_ready_in_the_order_of_telling() -> None:
    ledger = Ledger(2, 8)
    a, b, c = (request(name) for name in "abc")
    response = ledger.respond([frame(news=True)] * 2, [[("b", b), ("a", a)], [("a", a), ("c", c), ("b", b)]])
    assert response.ready == [("b", b), ("a", a)] and response.refused == []
    assert ledger.respond([frame()] * 2, ()).ready == response.ready, "what was not carried out is still ready"
    ledger.settle("a")
    ledger.settle("b")
    response = ledger.respond([frame(news=True)] * 2, [[("c", c)], []])
    assert response.ready == [("c", c)]


def test_what_all_ask_for_differently_is_refused_with_everybodys_request() -> None:
    ledger = Ledger(2, 8)
    mine, theirs = request("a"), request("a", (5,))
    response = ledger.respond([frame(news=True)] * 2, [[("a", mine)], [("a", theirs)]])
    assert response.ready == [] and response.refused == [("a", [mine, theirs])]
    assert not ledger.told("a")


def test_a_bit_stands_for_what_was_carried_out_before() -> None:
    ledger = Ledger(2, 8)
    requests = [(name, request(name), request(name).signature()) for name in "abc"]
    ledger.remember(requests)
    positions = [ledger.position(name, signature) for name, _, signature in requests]
    assert positions == [0, 1, 2]
    response = ledger.respond([frame(0b110), frame(0b011)], ())
    assert response.ready == [("b", requests[1][1])]


def test_a_shape_that_changes_is_news_and_meets_the_others_bit() -> None:
    ledger = Ledger(2, 8)
    old, new = request("a"), request("a", (9,))
    ledger.remember([("a", old, old.signature())])
    assert ledger.position("a", new.signature()) is None
    response = ledger.respond([frame(0b1), frame(0, news=True)], [[], [("a", new)]])
    assert response.refused == [("a", [old, new])]
    response = ledger.respond([frame(news=True)] * 2, [[("a", new)], [("a", new)]])
    assert response.ready == [("a", new)]
    ledger.remember([("a", new, new.signature())])
    assert ledger.position("a", new.signature()) == 0 and ledger.position("a", old.signature()) is None


def test_the_entry_that_was_not_used_for_longest_makes_room() -> None:
    ledger = Ledger(2, 2)
    a, b, c = ((name, request(name), request(name).signature()) for name in "abc")
    for known in (a, b, a, c):
        ledger.remember([known])
    assert (
        ledger.position("a", a[2]) is not None
        and ledger.position("b", b[2]) is None
        and ledger.position("c", c[2]) is not None
    )


def test_a_joined_rank_is_not_waited_for() -> None:
    ledger = Ledger(3, 8)
    a = request("a")
    response = ledger.respond([frame(news=True), frame(joined=True), frame(news=True)], [[("a", a)], [], [("a", a)]])
    assert response.ready == [("a", a)]


def test_what_was_carried_out_is_no_longer_told() -> None:
    """A rank tells; then all propose the same and carry it out. The next time it is new again."""
    ledger = Ledger(2, 8)
    a = request("a")
    assert ledger.respond([frame(news=True), frame()], [[("a", a)], []]).ready == []
    ledger.settle("a")
    assert ledger.respond([frame(), frame(news=True)], [[], [("a", a)]]).ready == []


@settings(max_examples=200)
@given(
    st.lists(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=5, unique=True), max_size=30), st.integers(1, 5)
)
def test_caches_stay_alike_although_some_ranks_skip_what_changes_nothing(
    batches: list[list[str]], capacity: int
) -> None:
    careful, quick = Ledger(2, capacity), Ledger(2, capacity)
    generations: dict[tuple[str, ...], int] = {}
    for names in batches:
        requests = [(name, request(name), request(name).signature()) for name in names]
        careful.remember(requests)
        careful.remember(requests[:1] if len(names) == 1 else requests)
        batch = tuple(names)
        if generations.get(batch) != quick.generation:
            quick.remember(requests)
            generations[batch] = quick.generation if len(names) <= capacity else -1
        if len(names) > capacity:
            quick.remember(requests)
        for name in "abcdefg":
            signature = request(name).signature()
            assert careful.position(name, signature) == quick.position(name, signature)
            known = careful.position(name, signature)
            assert known is None or 0 <= known < capacity


def test_messages_name_the_tensor_and_every_ranks_request() -> None:
    text = str(negotiation.mismatch(7, [request("w"), request("w", (5,)), None], (3, 7, 9)))
    assert (
        text.startswith("rank 7")
        and "'w'" in text
        and "in shape" in text
        and "rank 3:" in text
        and "rank 9" not in text
    )
    group = Request("grouped_allreduce", "g", members=(request(None), request(None, (2, 2))))
    text = str(negotiation.mismatch(0, [group, dataclasses.replace(group, members=group.members[:1])]))
    assert "members" in text and "2 tensors: float32[4], float32[2, 2]" in text and "1 tensors" in text


def test_ranks_that_wait_for_each_other_are_called_by_their_names() -> None:
    text = str(
        negotiation.deadlock(7, [[("a", "A")], [("b", "B"), (3, "C")], []], {"a": {0}, "b": {1, 2}, 3: {1}}, (3, 7, 9))
    )
    assert text.startswith("rank 7: ")
    assert "  rank 3: waits for A, for which rank 7, 9 has not asked\n" in text
    assert "B, for which rank 3 has not asked; and for C, for which rank 3, 9 has not asked\n" in text
    assert "  rank 9: waits for nothing\n" in text
