"""Which operations fail when every rank waits for another: those of the ranks that are known to be behind, or all."""

from __future__ import annotations

import sys
import threading

import pytest

from collectives import deadlock
from collectives.deadlock import Place, Stack, Wait, before, failing
from collectives.negotiation import Request

LOOP = ((100, 200),)


def place(line: int, function: str = "main", at: int | None = None, loops: tuple[tuple[int, int], ...] = ()) -> Place:
    return Place(("train.py", function, 1), line, line if at is None else at, loops)


def wait(name: str | int, *stack: Place) -> Wait:
    return Wait(name, Request("allreduce", name if isinstance(name, str) else None), stack)


def fails(waits: list[list[Wait]], passed: dict[str, set[int]] | None = None, known: str = "", joined: tuple[int, ...] = ()) -> set[object]:
    asking = {wait.key: {rank for rank, mine in enumerate(waits) if wait in mine} for mine in waits for wait in mine}
    return set(failing(waits, asking, passed or {}, known, joined))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((place(3),), (place(4),), True),
        ((place(4),), (place(3),), False),
        ((place(3),), (place(3),), None),
        ((place(3), place(9, "step")), (place(3), place(12, "step")), True),
        ((place(3), place(9, "step")), (place(4), place(2, "step")), True),
        ((place(3), place(9, "step")), (place(3), place(12, "check")), None),
        ((place(3), place(9, "step")), (place(3),), None),
        ((place(3, at=120, loops=LOOP),), (place(4, at=140, loops=LOOP),), None),
        ((place(3, at=120, loops=LOOP),), (place(9, at=240),), True),
        ((), (place(3),), None),
    ],
)
def test_which_place_comes_first(one: Stack, other: Stack, expected: bool | None) -> None:
    assert before(one, other) is expected
    assert before(other, one) is (None if expected is None else not expected)


def test_all_fail_without_evidence() -> None:
    assert fails([[wait("a")], [wait("b")]]) == {"a", "b"}
    assert fails([[wait("a", place(3))], [wait("b", place(3))]]) == {"a", "b"}
    assert fails([[wait("a", place(3))], [wait("b", place(4)), wait("c", place(5))]]) == {"a", "b", "c"}


def test_what_comes_last_in_the_program_goes_on() -> None:
    a, b, c = wait("a", place(3)), wait("b", place(4)), wait("c", place(5))
    assert fails([[a], [b]]) == fails([[b], [a]]) == {"a"}
    assert fails([[c], [a], [b], [c]]) == {"a", "b"}
    assert fails([[a], [], [b]], joined=(1,)) == {"a"}
    assert fails([[a], [], [b]]) == {"a", "b"}


@pytest.mark.parametrize("known", ["a", "b"])
def test_a_name_that_was_carried_out_before_says_nothing(known: str) -> None:
    assert fails([[wait("a", place(3))], [wait("b", place(4))]], known=known) == {"a", "b"}
    assert fails([[wait(0, place(3))], [wait("b", place(4))]]) == {0, "b"}


def test_who_comes_to_a_name_that_the_other_has_waited_for_is_behind() -> None:
    assert fails([[wait("b")], [wait("c")]], {"b": {1}}) == {"b"}
    assert fails([[wait("b")], [wait(7)]], {"b": {1}}) == {"b"}
    assert fails([[wait("b")], [wait("c")]], {"b": {0}}) == {"b", "c"}
    assert fails([[wait("b")], [wait("c")]], {"b": {1}, "c": {0}}) == {"b", "c"}
    assert fails([[wait("b")], [wait("c")]], {"b": {1}}, known="b") == {"b", "c"}
    assert fails([[wait("b")], [], [wait("c")]], {"b": {1}}, joined=(1,)) == {"b", "c"}


def test_messages_name_what_each_rank_waits_for_and_who_has_not_asked() -> None:
    waits = [[wait("a", place(3, "step"))], [wait("b")], []]
    text = str(deadlock.error(7, waits, {"a": {0}, "b": {1, 2}}, {"a"}, (3, 7, 9)))
    assert text.startswith("rank 7: ") and "'a' / 'b'" in text
    assert "rank 3: waits for allreduce(name='a') at train.py:3 in step, for which rank 7, 9 has not asked\n" in text
    assert "rank 7: waits for allreduce(name='b'), for which rank 3 has not asked, and goes on waiting for it\n" in text
    assert "rank 9: waits for nothing\n" in text
    assert "order of calls" not in text
    assert "order of calls" in str(deadlock.error(0, [[wait(0)], [wait("b")]], {0: {0}, "b": {1}}, {0, "b"}, (0, 1)))


def test_where_a_thread_waits_is_read_from_its_stack() -> None:
    entered, over = threading.Event(), threading.Event()

    def waiting(handle: object) -> None:
        entered.set()
        over.wait()

    def program(handle: object) -> None:
        for _ in range(1):
            waiting(handle)

    handle = object()
    thread = threading.Thread(target=program, args=(handle,))
    thread.start()
    entered.wait()
    try:
        places = deadlock.stacks(waiting.__code__, "handle")[id(handle)]
    finally:
        over.set()
        thread.join()
    by_name = {place.function[1]: place for place in places}
    assert [place.function[1] for place in places][-2:] == ["program", "waiting"]
    assert by_name["program"].line == program.__code__.co_firstlineno + 2 and len(by_name["program"].loops) == 1
    assert by_name["waiting"].loops == () and by_name["waiting"].function[0] == sys._getframe().f_code.co_filename
