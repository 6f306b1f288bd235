"""Showing what ranks write: whole lines with tags, never mixed, and lines that have no end yet."""

from __future__ import annotations

import os
import pty
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from collectives.launch import screen
from collectives.launch.screen import Screen, Stream, Tags, Terminal

TAGS = {0: b"[0] ", 1: b"[1] "}


def feed(shown: Screen, *parts: tuple[int, bytes]) -> bytes:
    """What is shown of the parts, each of a rank."""
    for rank, data in parts:
        shown.feed(rank, TAGS[rank], data)
    data = bytes(shown.pending)
    shown.pending.clear()
    return data


@pytest.fixture
def stream() -> Stream:
    return Stream(os.open(os.devnull, os.O_WRONLY))


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setattr(screen, "size", lambda fd: (24, 40))
    ours, theirs = pty.openpty()
    yield Terminal(theirs)
    os.close(ours)
    os.close(theirs)


def on_screen(data: bytes) -> list[str]:
    """What stands on a terminal after these bytes: line feeds, carriage returns and erased lines are understood."""
    rows = [""]
    column = 0
    for match in re.finditer(r"\x1b\[2K|\n|\r|[^\x1b\n\r]", re.sub(r"\x1b\[[0-9;?]*[a-zJ]", "", data.decode())):
        text = match.group()
        if text == "\n":
            rows.append("")
            column = 0
        elif text == "\r":
            column = 0
        elif text == "\x1b[2K":
            rows[-1] = ""
        else:
            rows[-1] = rows[-1].ljust(column)[:column] + text + rows[-1][column + 1 :]
            column += 1
    return rows


def test_lines_are_tagged(stream: Stream) -> None:
    assert feed(stream, (0, b"a\nb\n"), (1, b"c\n\n"), (0, b"d\r\n")) == b"[0] a\n[0] b\n[1] c\n[1] \n[0] d\r\n"


def test_lines_that_come_in_pieces_are_whole(stream: Stream) -> None:
    assert (
        feed(stream, (0, b"one "), (1, b"three\nfo"), (0, b"two\n"), (1, b"ur\n"))
        == b"[1] three\n[0] one two\n[1] four\n"
    )


def test_a_prompt_is_shown_after_a_moment_and_broken_by_another_rank(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert feed(stream, (0, b"Name? ")) == b""
    stream.settle()
    assert not stream.pending
    now = time.monotonic() + 2
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stream.settle()
    assert feed(stream) == b"[0] Name? "
    assert feed(stream, (1, b"x\n"), (0, b"more"), (0, b"\n")) == b"\n[1] x\n[0] more\n"


def test_a_file_never_has_half_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Stream(os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT))
    now = time.monotonic() + 9
    assert feed(shown, (0, b"half ")) == b""
    monkeypatch.setattr(time, "monotonic", lambda: now)
    shown.settle()
    assert feed(shown, (1, b"x\n"), (0, b"a line\n")) == b"[1] x\n[0] half a line\n"


def test_a_shown_beginning_goes_on_where_nobody_came_between(stream: Stream) -> None:
    feed(stream, (0, b"Name? "))
    stream.settle(all_of_it=False)
    stream._reveal(0)
    assert feed(stream, (0, b"Ada"), (0, b"\nnext\n")) == b"[0] Name? Ada\n[0] next\n"


def test_a_line_without_an_end_is_ended_at_the_end(stream: Stream) -> None:
    feed(stream, (0, b"half"))
    stream.settle(all_of_it=True)
    assert feed(stream) == b"[0] half\n"


def test_a_line_of_any_length_is_passed_on(stream: Stream) -> None:
    assert feed(stream, (0, b"x" * 200_000), (1, b"z\n"), (0, b"y\n")) == b"[1] z\n[0] " + b"x" * 200_000 + b"y\n"
    longest = b"x" * (16 << 20)
    assert feed(stream, (0, longest), (1, b"z\n"), (0, b"x"), (1, b"z\n")) == b"[1] z\n[0] " + longest + b"x\n[1] z\n"


def test_without_tags_lines_are_as_they_are(stream: Stream) -> None:
    tag = Tags(4, wanted=False).of(3, colour=True)
    stream.feed(3, tag, b"a\nb")
    stream.feed(0, tag, b"c\n")
    stream.settle(all_of_it=True)
    assert feed(stream) == b"a\nc\nb"
    stream.feed(None, b"", b"words\n")
    assert feed(stream) == b"\nwords\n"


def test_tags_are_as_wide_as_the_largest() -> None:
    assert Tags(12, wanted=True).of(3, colour=False) == b"[ 3] "
    assert Tags(4, wanted=True).of(3, colour=True) == b"\x1b[35m[3]\x1b[0m "
    assert Tags(1, wanted=True).of(0, colour=True) == b""
    assert (Tags(12, wanted=True).columns, Tags(12, wanted=False).columns) == (5, 0)


def test_a_bar_stays_below_the_lines_of_others(terminal: Terminal) -> None:
    data = feed(terminal, (0, b"\rbar 10%"), (1, b"a line\n"), (0, b"\rbar 20%"), (1, b"another\n"))
    assert on_screen(data) == ["[1] a line", "[1] another", "[0] bar 20%"]
    assert on_screen(data + feed(terminal, (0, b"\rdone   \n"))) == ["[1] a line", "[1] another", "[0] done   ", ""]


def test_the_tag_of_a_bar_is_drawn_with_it(terminal: Terminal) -> None:
    parts = [b"\x1b[?25lbar 1", b"\r\x1b[2K\x1b[91mbar 2", b"\r\x1b[2K", b"bar 3", b"\r", b"bar 4\x1b[?25h\n"]
    data = feed(terminal, *((0, part) for part in parts))
    assert on_screen(data) == ["[0] bar 4", ""] and b"[0] \x1b[91mbar 2" in data and b"\x1b[?25h" in data


def test_two_bars_take_turns_and_neither_is_lost(terminal: Terminal) -> None:
    data = feed(terminal, (0, b"\rfirst 1"), (1, b"\rsecond 1"), (0, b"\rfirst 2"), (1, b"\rsecond 2\n"))
    assert on_screen(data) == ["[1] second 2", "[0] first 2"]


def test_a_prompt_is_shown_at_once_on_a_terminal(terminal: Terminal) -> None:
    assert feed(terminal, (0, b"Name? ")) == b"[0] Name? "
    assert on_screen(b"[0] Name? " + feed(terminal, (1, b"hello\n"))) == ["[1] hello", "[0] Name? "]


def test_a_line_wider_than_the_terminal_is_left_where_it_is(terminal: Terminal) -> None:
    data = feed(terminal, (0, b"x" * 100), (1, b"a\n"), (0, b"!\n"))
    assert on_screen(data) == ["[0] " + "x" * 100, "[1] a", "[0] " + "x" * 100 + "!", ""]


def test_nobody_reads_any_more() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    shown = Stream(writer)
    feed(shown, (0, b"a\n"))
    shown.pending += b"a\n"
    shown.write()
    shown.feed(0, b"", b"b\n")
    assert shown.broken and not shown.pending
    os.close(writer)
