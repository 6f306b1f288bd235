"""Which operations fail when every rank waits for another: those of the ranks that are known to be behind, or all."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest

from collectives.engine import deadlock
from collectives.engine.deadlock import BlockedCall, CallSite, Stack, before, failing
from collectives.engine.negotiation import Request

LOOP = (100, 200)


def place(
    line: int, function: str = "main", at: int | None = None, loop: tuple[int, int] | None = None, calls: str = "step"
) -> CallSite:
    return CallSite(("train.py", function, 1), line, line if at is None else at, loop, frozenset([calls]))


def wait(name: str | int, *stack: CallSite) -> BlockedCall:
    return BlockedCall(name, Request("allreduce", name if isinstance(name, str) else None), stack)


def fails(
    waits: list[list[BlockedCall]],
    passed: dict[str, set[int]] | None = None,
    known: str = "",
    joined: tuple[int, ...] = (),
) -> set[object]:
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
        ((place(3, at=120, loop=LOOP),), (place(4, at=140, loop=LOOP),), None),
        ((place(3, at=120, loop=LOOP),), (place(9, at=240),), True),
        ((place(3, at=120, loop=LOOP), place(9, "step")), (place(3, at=120, loop=LOOP), place(12, "step")), None),
        ((place(3, at=120), place(9, "step")), (place(3, at=140), place(12, "step")), None),
        ((place(3, calls="map"), place(9, "step")), (place(3, calls="map"), place(12, "step")), None),
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


def test_names_in_a_loop_do_not_tell_who_is_behind() -> None:
    b, c = wait("b", place(3, at=120, loop=LOOP)), wait("c", place(4, at=140, loop=LOOP))
    assert fails([[b], [c]], {"b": {1}}) == {"b", "c"}
    assert fails([[b], [wait("c", place(3, at=120, loop=LOOP))]], {"b": {1}}) == {"b"}  # one place, whose names change
    assert fails([[b], [wait("c", place(9, at=240))]], {"b": {1}}) == {"b"}
    mapped = place(3, calls="map")
    assert fails([[wait("b", mapped, place(7, "step"))], [wait("c", mapped, place(8, "step"))]], {"b": {1}}) == {
        "b",
        "c",
    }
    assert fails([[wait("b", mapped, place(7, "test_b"))], [wait("c", mapped, place(8, "test_c"))]], {"b": {1}}) == {
        "b"
    }


def stack_of(program: Callable[[Callable[[], None]], None], in_thread: bool = False) -> Stack:
    """Where a thread is when ``program`` calls its argument."""
    found: list[Stack] = []

    def waiting(handle: object) -> None:
        found.append(deadlock.stacks(waiting.__code__, "handle")[id(handle)])

    def wait() -> None:
        waiting(object())

    if in_thread:
        thread = threading.Thread(target=program, args=(wait,))
        thread.start()
        thread.join()
    else:
        program(wait)
    (only,) = found
    names = [place.function[1] for place in only]
    return only[names.index("stack_of") + 1 :] if not in_thread else only


def test_where_a_thread_waits_is_read_from_its_stack() -> None:
    def program(wait: Callable[[], None]) -> None:
        for _ in range(1):
            wait()

    stack = stack_of(program)
    assert [place.function[1] for place in stack] == ["program", "wait", "waiting"]
    assert stack[0].line == program.__code__.co_firstlineno + 2 and stack[0].loop is not None
    assert stack[1].loop is None and stack[1].function[0] == sys._getframe().f_code.co_filename
    thread = stack_of(program, in_thread=True)
    assert thread[-3:] == stack and thread[0].loop is not None


def test_an_exception_handler_belongs_to_the_loop_around_it() -> None:
    def program(wait: Callable[[], None]) -> None:
        for step in range(2):
            try:
                if step and wanted == "tried":
                    wait()
                raise ValueError
            except ValueError:
                if step and wanted == "handled":
                    wait()
            if step and wanted == "later":
                wait()

    stacks = {}
    for wanted in ("tried", "handled", "later"):
        stacks[wanted] = stack_of(program)
    for one in stacks.values():
        for other in stacks.values():
            assert before(one, other) is None and one[0].loop == other[0].loop is not None


@pytest.mark.skipif(sys.version_info < (3, 11), reason="a call's place in its line is not known")
def test_what_c_calls_may_be_called_again() -> None:
    def step(which: int, wait: Callable[[], None]) -> None:
        if which == 1:
            wait()
        if which == 2:
            wait()

    def directly(which: int) -> Callable[[Callable[[], None]], None]:
        def program(wait: Callable[[], None]) -> None:
            step(which, wait)

        return program

    def mapped(which: int) -> Callable[[Callable[[], None]], None]:
        def program(wait: Callable[[], None]) -> None:
            list(map(step, [which], [wait]))

        return program

    assert before(stack_of(directly(1)), stack_of(directly(2))) is True
    assert before(stack_of(mapped(1)), stack_of(mapped(2))) is None
