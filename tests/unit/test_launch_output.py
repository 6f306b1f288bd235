"""What comes out of the MPI launcher is told apart: the ranks' output, their records, and the launcher's own words."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from collectives.launch.output import Output
from collectives.launch.rank import frames
from collectives.launch.records import culprit

TRACE = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\nValueError: {}\n'


class Job:
    """An `Output` that is given frames, and what it has written by the end."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.files = [folder / "stdout", folder / "stderr"]
        self._fds = [os.open(file, os.O_RDWR | os.O_CREAT) for file in self.files]
        self._source, self._sink = os.pipe()
        self.output = Output(3, targets=self._fds, **options)
        self.output.attach(self._source)

    def raw(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._sink, data[: 32 << 10]) :]
            self.turn()

    def turn(self) -> None:
        readable = [self._source]
        self.output.turn(readable, self.output.waiting()[1])

    def say(self, rank: int, kind: str, text: str | bytes) -> None:
        data = text.encode() if isinstance(text, str) else text
        for frame in frames(str(rank), kind.encode(), data):
            self.raw(frame)

    def fail(self, rank: int, kind: str, text: str = "", at: float = 0.0, **more: Any) -> None:
        entry = {"rank": rank, "code": 1, "text": text, "time": time.time() + at, "host": "h", **more}
        self.say(rank, kind, json.dumps(entry) + "\n")

    def hang_up(self) -> None:
        """The launcher's end of the pipe is closed."""
        os.close(self._sink)
        self.turn()
        self._sink = os.open(os.devnull, os.O_WRONLY)

    def end(self, *, of_a_rank: bool = True) -> tuple[str, str]:
        self.output.end(culprit(self.output.records.per_rank()) if of_a_rank else None)
        while sinks := self.output.waiting()[1]:
            self.output.turn([], sinks)
        out, err = (file.read_bytes().decode(errors="replace") for file in self.files)
        return out, err

    def close(self) -> None:
        for fd in (*self._fds, self._source, self._sink):
            os.close(fd)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.close()


def test_any_bytes_arrive_as_they_were(tmp_path: Path) -> None:
    job = Job(tmp_path, tag=False)
    everything = bytes(range(256)) * 40 + b"\x10" * 5000 + b"\n" * 5000
    assert all(len(frame) <= 4096 and frame.count(b"\n") == 1 for frame in frames("1", b"o", everything))
    job.say(1, "o", everything)
    job.end()
    job.close()
    assert job.files[0].read_bytes() == everything


def test_frames_of_ranks_that_come_in_pieces_are_put_together(job: Job) -> None:
    mixed = b"".join(frame for rank in "012" for frame in frames(rank, b"o", b"line of %s\n" % rank.encode()))
    for begin in range(0, len(mixed), 7):
        job.raw(mixed[begin : begin + 7])
    assert job.end()[0] == "[0] line of 0\n[1] line of 1\n[2] line of 2\n"


def test_the_traceback_of_the_cause_comes_last_and_once_and_those_of_its_consequences_not_at_all(job: Job) -> None:
    job.say(1, "e", "before\n" + TRACE.format("no good"))
    job.say(0, "e", TRACE.format("rank 1 has failed"))
    job.fail(1, "r", TRACE.format("no good"))
    job.fail(0, "r", TRACE.format("rank 1 has failed"), consequence=True)
    job.say(1, "o", "saved\n")
    job.raw(b"MPI_ABORT was invoked on rank 1\n")
    job.fail(1, "x", at=0.1)
    job.fail(2, "x", at=0.2, code=143)
    out, err = job.end()
    assert out == "[1] saved\n" and err.startswith(
        "[1] before\n\ncollectivesrun: rank 0 failed as a consequence of the failure below (--verbose"
    )
    assert err.endswith("collectivesrun: rank 1 on h failed with exit code 1 [L9]:\n" + TRACE.format("no good"))
    assert err.count("Traceback") == 1 and "MPI_ABORT" not in err


def test_the_job_ends_with_the_command_that_explains_the_first_failure(job: Job) -> None:
    for rank in range(3):
        job.fail(rank, "r", TRACE.format(f"{rank} disagrees [M{rank + 1}]"), at=0.1 * (rank - 1) ** 2)
    err = job.end()[1]
    assert err.endswith("1 disagrees [M2]\nFor cause and cure: collectives explain M2\n")
    assert err.count("collectives explain") == 1


def test_verbose_shows_all_of_it(tmp_path: Path) -> None:
    job = Job(tmp_path, verbose=True)
    job.say(0, "e", TRACE.format("rank 1 has failed"))
    job.fail(0, "r", TRACE.format("rank 1 has failed"), consequence=True)
    job.say(
        1, "e", "Abort(1) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 1) - process 1\n"
    )
    job.fail(1, "x")
    job.raw(b"=== BAD TERMINATION\n")
    err = job.end()[1]
    job.close()
    assert "[0] ValueError: rank 1 has failed\n" in err and "BAD TERMINATION" in err and "Abort(1)" in err


def test_a_traceback_that_ends_no_rank_is_shown_in_its_place(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.say(0, "e", TRACE.format("handled"))
    now = time.monotonic() + 2
    monkeypatch.setattr(time, "monotonic", lambda: now)
    job.turn()
    job.say(0, "e", "and on\n")
    assert job.end()[1] == "".join(f"[0] {line}\n" for line in [*TRACE.format("handled").splitlines(), "and on"])


def test_a_traceback_from_before_the_hooks_is_the_reason(job: Job) -> None:
    job.say(2, "e", TRACE.format("early"))
    job.fail(2, "x")
    assert job.end()[1] == "\ncollectivesrun: rank 2 on h failed with exit code 1 [L9]:\n" + TRACE.format("early")


@pytest.mark.parametrize("record", ["none", "x"])
def test_a_consequence_whose_own_record_never_came_is_left_out_too(record: str, job: Job) -> None:
    job.fail(1, "r", TRACE.format("no good"))
    job.say(0, "e", TRACE.format("x").replace("ValueError", "collectives.RankFailedError"))
    if record == "x":
        job.fail(0, "x", at=1.0)
    err = job.end()[1]
    assert (
        "rank 0 failed as a consequence of the failure below (" in err
        and err.count("Traceback") == 1
        and err.endswith("ValueError: no good\n")
    )


def test_a_second_cause_is_shown_too(job: Job) -> None:
    for rank in (0, 2):
        job.say(rank, "e", TRACE.format(f"own error {rank}"))
        job.fail(rank, "r", TRACE.format(f"own error {rank}"), at=rank)
    err = job.end()[1]
    assert (
        "[2] ValueError: own error 2\n" in err
        and err.endswith("ValueError: own error 0\n")
        and err.count("own error 0") == 1
    )


def test_the_launchers_words_are_shown_if_no_rank_failed(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.raw(b"a warning\n")
    assert not job.files[1].read_text()
    now = time.monotonic() + 2
    monkeypatch.setattr(time, "monotonic", lambda: now)
    job.turn()
    job.turn()
    assert job.files[1].read_text() == "a warning\n"
    job.raw(b"ssh: no route to host\n")
    assert job.end()[1] == "a warning\nssh: no route to host\n"


def test_a_frame_right_behind_the_launchers_words_is_found(job: Job) -> None:
    job.raw(b"a banner\n\0" + frames("1", b"o", b"out\n")[0] + b"words" + frames("1", b"o", b"more\n")[0])
    assert job.end() == ("[1] out\n[1] more\n", "a banner\nwords\n")


@pytest.mark.parametrize("hung_up", [False, True])
def test_last_words_without_a_line_feed_are_shown(hung_up: bool, job: Job) -> None:
    job.raw(frames("1", b"o", b"out\n")[0] + b"ssh: no route to host")
    if hung_up:
        job.hang_up()
    assert job.end() == ("[1] out\n", "ssh: no route to host\n")
    assert not job.output.waiting()[0]


@pytest.mark.parametrize(
    "prefix",
    [
        b"[1,0]<stderr>: ",
        b"[1,1]<stderr>:",
        b"[Sun Nov 22 15:44:32 2026][1,0]<stderr>: ",
        b"Sun Nov  1 15:44:32 2026[1,0]<stderr>:",
        b"[prterun-host-77@1,0][host:78]<stderr>: ",
        b"[1] ",
    ],
)
def test_the_launchers_own_tags_are_left_out(prefix: bytes, job: Job) -> None:
    job.raw(prefix + frames("1", b"o", b"out\n")[0] + prefix + b"words\n")
    assert job.end() == ("[1] out\n", f"{prefix.decode()}words\n")


@pytest.mark.parametrize("odd", ["\ud83d", "\udcff"], ids=["half a character", "a byte"])
def test_a_traceback_that_is_no_text_is_shown_as_python_shows_it(odd: str, job: Job) -> None:
    text = TRACE.format(f"no {odd}")
    job.say(1, "e", text.encode(errors="backslashreplace"))
    job.fail(1, "r", text)
    err = job.end()[1]
    assert err.endswith(f"ValueError: no \\u{ord(odd):x}\n") and err.count("Traceback") == 1


def test_one_interrupted_rank_shows_where(job: Job) -> None:
    for rank in (2, 0, 1):
        text = TRACE.format("").replace("ValueError: ", "KeyboardInterrupt") if rank < 2 else TRACE.format("other")
        job.say(rank, "e", text)
        job.fail(rank, "x", text, code=130)
    job.output.interrupted = True
    err = job.end(of_a_rank=False)[1]
    assert "[0] KeyboardInterrupt\n" in err and "[2] ValueError: other\n" in err and "[1]" not in err
    assert "collectivesrun: interrupted along with rank 0: rank 1 (--verbose shows where)\n" in err


def test_a_reader_that_does_not_read_holds_up_the_ranks_and_nothing_else(job: Job) -> None:
    job.say(0, "o", b"x" * 99 + b"\n")
    for _ in range(40):
        job.output._take(0, b"o", (b"x" * 999 + b"\n") * 40)
    sources, sinks = job.output.waiting()
    assert not sources and len(sinks) == 1
