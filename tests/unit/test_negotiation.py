"""Requests: their words, signatures, texts and messages. What ranks conclude from them: test_coordinator.py."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.engine import negotiation
from collectives.engine.negotiation import Frame, Ledger, Request
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World


def request(name: str | None, shape: tuple[int, ...] = (4,), **more: object) -> Request:
    return Request("allreduce", name, "float32", shape, op="sum", **more)  # type: ignore[arg-type]


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


def test_a_shape_that_changes_is_news_and_meets_the_others_bit() -> None:
    ledger = Ledger(2, 8)
    news = Frame(0, True, False, False)
    old, new = request("a"), request("a", (9,))
    ledger.remember([("a", old, old.signature())])
    assert ledger.position("a", new.signature()) is None
    response = ledger.respond([Frame(0b1, False, False, False), news], [[], [("a", new)]])
    assert response.refused == [("a", [old, new])]
    response = ledger.respond([news] * 2, [[("a", new)], [("a", new)]])
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


def test_messages_name_the_tensor_and_every_ranks_request() -> None:
    text = str(negotiation.mismatch(7, [request("w"), request("w", (5,)), None], (3, 7, 9)))
    assert (
        text.startswith("rank 7")
        and "'w'" in text
        and "on shape" in text
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
    assert "  rank 3: waits for A (not submitted by ranks 7, 9)\n" in text
    assert "B (not submitted by rank 3) and for C (not submitted by ranks 3, 9)\n" in text
    assert "  rank 9: waits for nothing\n" in text


class Name(str, enum.Enum):
    LOSS = "loss"


@pytest.mark.parametrize("name", [np.str_("loss"), Name.LOSS])
def test_a_text_counts_by_its_characters(name: Any) -> None:
    plain, other = Request("allreduce", "loss", algorithm="loss"), Request("allreduce", name, algorithm=name)
    assert plain == other and plain.signature() == other.signature()
    assert type(other.name) is str and type(other.algorithm) is str


@pytest.mark.parametrize("name", [np.str_("loss"), Name.LOSS])
def test_ranks_may_name_a_tensor_by_different_kinds_of_str(name: Any) -> None:
    def run(world: World) -> None:
        for step in range(3):
            tensor = np.full(3, world.rank + step, np.float32)
            assert (world.allreduce_async(tensor, name="loss" if world.rank else name).wait(10) == 0.5 + step).all()
            assert (world.allreduce(tensor, name=name, prescale_factor=np.float64(2)) == 1 + 2 * step).all()

    thread_groups.run(2, run, make_world=World)
