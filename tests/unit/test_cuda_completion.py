"""What a caller's streams come after: told by the calls that a device is given."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from collectives.cuda.completion import Completion, Events, Fence

Calls = list[tuple[Any, ...]]


class Recorder:
    """Notes what it is given; nothing ever passes."""

    def __init__(self) -> None:
        self.calls: Calls = []
        self.made = 0

    def activate(self) -> None: ...

    def deactivate(self, previous: None) -> None: ...

    def create_event(self) -> int:
        self.made += 1
        return self.made

    def record(self, event: int, stream: int) -> None:
        self.calls.append(("record", event, stream))

    def wait(self, stream: int, event: int) -> None:
        self.calls.append(("wait", stream, event))

    def capturing(self, stream: int) -> bool:
        return False

    def passed(self, event: int) -> bool:
        return False


def fetched(copied: bool) -> Calls:
    """What a device is given when a result is fetched on stream 10 and then on stream 20; the operation's own stream is
    1."""
    device: Any = Recorder()
    streams = iter((10, 20))
    view: Any = SimpleNamespace(device=device, copied=copied, current_stream=lambda: next(streams))
    fence = Fence(view, lambda: device.calls.append(("store",)), lambda: None)
    fence.completion = Completion(Events(device), 1)
    for _ in range(2):
        fence.pass_through(set())
    return device.calls  # type: ignore[no-any-return]


def test_every_stream_on_which_a_result_is_fetched_comes_after_the_operation() -> None:
    assert fetched(copied=False) == [("record", 1, 1), ("wait", 10, 1), ("store",), ("wait", 20, 1)]


def test_who_fetches_later_comes_after_the_copy_into_a_strided_tensor() -> None:
    """The first to fetch it has it copied into the tensor, on its own stream."""
    assert fetched(copied=True) == [("record", 1, 1), ("wait", 10, 1), ("store",), ("record", 2, 10), ("wait", 20, 2)]


def test_an_event_goes_back_when_nobody_can_ask_any_more() -> None:
    device: Any = Recorder()
    events = Events(device)
    first = Completion(events, 1)
    number = first.event
    del first
    assert Completion(events, 1).event == number and device.made == 1


def test_an_interrupt_is_not_lost_in_what_gives_an_event_back(monkeypatch: pytest.MonkeyPatch) -> None:
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    device: Any = Recorder()
    events = Events(device)
    first = Completion(events, 1)

    def interrupt(*event: Any) -> Any:
        raise KeyboardInterrupt

    sys.settrace(interrupt)  # raises where a function of Python begins, as a signal does that came before
    del first
    sys.settrace(None)
    assert not ignored
    assert Completion(events, 1).event == 1 and device.made == 1


def test_work_that_was_aborted_gives_no_result() -> None:
    view: Any = SimpleNamespace(device=Recorder(), copied=False, current_stream=lambda: 10)
    fence = Fence(view, lambda: pytest.fail("a result was made"), lambda: RuntimeError("aborted"))
    with pytest.raises(RuntimeError, match="aborted"):
        fence.pass_through(set())
