"""What failed first: the cause is told from its consequences."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import pytest

from collectives.launch import records
from collectives.launch.records import Record, Records

NOW = 1_000_000.0
TRACE = "Traceback (most recent call last):\n  ...\nError: {}\n"


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW)


@pytest.fixture
def job() -> Records:
    return Records()


def add(job: Records, kind: str, rank: int, code: int, at: float, text: str = "", host: str = "", **more: Any) -> None:
    entry = {"rank": rank, "code": code, "text": text, "time": NOW + at, "host": host or socket.gethostname(), **more}
    job.add(rank, json.dumps(entry).encode() + b"\n", inside=kind == "rank")


def first(job: Records) -> Record:
    found = records.culprit(job.per_rank())
    assert found is not None
    return found


def test_nothing_failed(job: Records) -> None:
    assert records.culprit(job.per_rank()) is None and not job


def test_the_earliest_failure_is_the_cause(job: Records) -> None:
    add(job, "end", 0, 5, 2.0)
    add(job, "end", 1, 7, 1.0)
    assert (first(job).rank, first(job).code) == (1, 7) and job


def test_a_rank_that_failed_because_of_another_is_not(job: Records) -> None:
    add(job, "rank", 0, 1, 1.0, consequence=True)
    add(job, "end", 0, 1, 1.5)
    add(job, "end", 1, 137, 2.0)
    assert first(job).rank == 1


def test_a_rank_that_was_terminated_is_not(job: Records) -> None:
    add(job, "end", 0, 143, 1.0)
    add(job, "end", 1, 7, 1.1)
    assert first(job).rank == 1


def test_what_the_rank_wrote_itself_counts_more(job: Records) -> None:
    add(job, "rank", 0, 1, 1.0, "Traceback (most recent call last):\n  ...\nValueError: x\n", consequence=False)
    add(job, "end", 0, 137, 2.0, "killed at the end")
    assert first(job).code == 1
    assert str(first(job)).endswith("ValueError: x")


def test_the_first_record_of_a_rank_counts(job: Records) -> None:
    add(job, "rank", 4, 3, 1.0)
    add(job, "rank", 4, 5, 0.5)
    assert first(job).code == 3


def test_records_that_come_in_pieces_are_put_together(job: Records) -> None:
    data = json.dumps({"rank": 2, "code": 9, "text": "", "time": NOW, "host": "h"}).encode() + b"\n"
    assert job.add(2, data[:10], inside=True) is None
    assert job.add(2, data[10:], inside=True) == first(job)


@pytest.mark.parametrize(("skew", "rank"), [(0.4, 0), (500.0, 1)])
def test_a_clock_that_is_wrong_is_not_believed(job: Records, skew: float, rank: int) -> None:
    add(job, "end", 0, 5, 0.1)
    add(job, "end", 1, 5, skew, host="elsewhere")
    assert first(job).rank == rank


def test_the_reason_for_sys_exit_stands_on_stderr(job: Records) -> None:
    add(job, "rank", 0, 2, 1.0, "sys.exit(2)\n", consequence=False)
    assert (
        str(first(job))
        == f"collectivesrun: rank 0 on {socket.gethostname()} failed with exit code 2 [L9]:\nsys.exit(2)"
    )
    notice = b"Abort(2) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 2)\n"
    job.hear(0, b"usage: train.py\ntrain.py: error: no ")
    job.hear(0, b"data\n" + notice)
    assert str(first(job)).endswith("usage: train.py\ntrain.py: error: no data")


def test_the_last_of_stderr_is_kept(job: Records) -> None:
    for _ in range(100):
        job.hear(0, b"x" * 9_999 + b"\n")
    job.hear(0, b"last\n")
    assert len(job._heard[0]) == records._KEPT and job._heard[0].endswith(b"x\nlast\n")


def test_damaged_records_are_passed_over(job: Records) -> None:
    job.add(0, b"{\n[]\n", inside=True)
    add(job, "end", 2, 9, 3.0)
    assert first(job).rank == 2


def test_signals_are_named() -> None:
    assert str(Record(3, 137, "", 0.0, "h")) == "collectivesrun: rank 3 on h was killed by signal 9 (SIGKILL) [L8]"


def test_only_the_last_traceback_is_shown_with_its_causes() -> None:
    text = (
        "noise\nTraceback (most recent call last):\n  handled\nOSError: handled\nmore noise\n"
        "Traceback (most recent call last):\n  a\nKeyError: 'a'\n\nDuring handling of the above exception, another "
        "exception occurred:\n\n"
        "Traceback (most recent call last):\n  b\nValueError: b\n"
    )
    shown = str(Record(0, 1, text, 0.0, "h"))
    assert "KeyError: 'a'" in shown and shown.endswith("ValueError: b")
    assert "noise" not in shown and "OSError" not in shown


def test_a_traceback_of_another_rank_is_not_shown_as_this_ones() -> None:
    said = (
        "collectives.RankFailedError: rank 0: rank 3 has failed [R2]:\nTraceback (most recent call last):\n"
        "ValueError: x"
    )
    text = f"Traceback (most recent call last):\n  here\n{said}\n"
    record = Record(0, 1, text, NOW, "pod-0", consequence=True)
    assert str(record) == f"collectivesrun: rank 0 on pod-0 failed with exit code 1 [L9]:\n{said}"


@pytest.mark.parametrize(
    ("code", "text", "more", "explained"),
    [
        (1, TRACE.format("unequal [M1]:\n  shapes"), {}, "M1"),
        (1, "warned [T60]\n" + TRACE.format("refused [A8]"), {}, "A8"),
        (1, TRACE.format("no code"), {}, ""),
        (2, "usage: train.py", {}, ""),
        (2, "collectives bench: got 'circle' [U1]", {}, "U1"),
        (137, "warned [T60]", {}, "L8"),
        (3, "", {}, "L9"),
        (1, f"RankFailedError: rank 0: rank 3 has failed [R2]:\n{TRACE.format('x')}", dict(consequence=True), "R2"),
        (1, "host h is lost [L64]:\nclosed", dict(lost=True), "L64"),
    ],
)
def test_a_failure_names_the_command_that_explains_it(
    code: int, text: str, more: dict[str, Any], explained: str
) -> None:
    line = f"For cause and cure: collectives explain {explained}" if explained else ""
    assert Record(0, code, text, NOW, "h", **more).how_explained() == line


def test_a_script_that_lacks_horovod_is_told_how_to_run_unchanged() -> None:
    text = "Traceback (most recent call last):\n  ...\nModuleNotFoundError: No module named 'horovod'\n"
    assert "--as-horovod" in Record(0, 1, text, NOW, "h").how_explained()


RANK_1_LEFT = dict(text=TRACE.format("rank 1 has shut down or ended while this rank waits for it"), consequence=True)


@pytest.mark.parametrize(
    ("failed", "code", "said"),
    [
        # One rank makes a call fewer; MPI's launcher ends it, at which it may say anything, or nothing.
        ("0", 1, [("rank", 0, 1, 1.0, RANK_1_LEFT), ("end", 1, 143, 5.0, dict(ended=5.0))]),
        ("0", 1, [("rank", 0, 1, 1.0, RANK_1_LEFT), ("end", 1, 143, 5.0, {})]),
        ("0", 1, [("rank", 0, 1, 1.0, RANK_1_LEFT), ("end", 1, 137, 6.0, dict(ended=5.0))]),
        (
            "0",
            1,
            [
                ("rank", 0, 1, 1.0, RANK_1_LEFT),
                ("rank", 1, 1, 5.1, dict(text=TRACE.format("in a handler of SIGTERM"))),
                ("end", 1, 1, 5.2, dict(ended=5.0)),
            ],
        ),
        # The ranks wait for one that does not come; both are ended.
        (
            "2",
            1,
            [
                ("rank", 3, 1, 3.1, dict(text=TRACE.format("waited 3 s for rank 1"), consequence=True)),
                ("rank", 2, 1, 3.0, dict(text=TRACE.format("waited 3 s for rank 1"), consequence=True)),
                ("end", 1, 143, 5.0, dict(ended=5.0)),
            ],
        ),
        # A rank dies, in any way, before or after the others have noticed.
        ("1", 137, [("end", 1, 137, 1.0, {}), ("rank", 0, 1, 1.1, RANK_1_LEFT)]),
        ("1", 139, [("rank", 0, 1, 1.0, RANK_1_LEFT), ("end", 1, 139, 1.1, {})]),
        ("1", 3, [("rank", 0, 1, 1.0, RANK_1_LEFT), ("end", 1, 3, 1.1, {}), ("end", 0, 143, 5.0, dict(ended=5.0))]),
        ("1", 143, [("end", 1, 143, 1.0, {}), ("rank", 0, 1, 1.1, RANK_1_LEFT)]),
        ("1", 143, [("end", 1, 143, 1.0, dict(ended=0.9)), ("rank", 0, 1, 1.1, RANK_1_LEFT)]),
        # It says why, before the launcher ends it, or fails before it could say anything.
        ("1", 1, [("rank", 1, 1, 1.0, dict(text=TRACE.format("x"))), ("end", 1, 143, 5.0, dict(ended=5.0))]),
        ("1", 1, [("end", 1, 1, 1.0, {}), ("end", 0, 143, 1.5, dict(ended=1.4))]),
        ("1", 3, [("rank", 1, 3, 1.0, dict(text="sys.exit(3)\n")), ("end", 0, 143, 1.5, dict(ended=1.4))]),
    ],
)
def test_the_first_ranks_own_words_count_whatever_the_launcher_does_to_the_others(
    failed: str, code: int, said: list[tuple[Any, ...]], job: Records
) -> None:
    for order in (said, said[::-1]):
        job = Records()
        for kind, rank, exit_code, at, more in order:
            more = {**more, **({"ended": NOW + more["ended"]} if "ended" in more else {})}
            add(job, kind, rank, exit_code, at, **more)
        assert (str(first(job).rank), first(job).code) == (failed, code)


def test_when_a_rank_was_ended_goes_with_its_clock(job: Records) -> None:
    add(job, "rank", 1, 1, 500.0, "x", host="elsewhere")
    add(job, "end", 1, 143, 501.0, host="elsewhere", ended=NOW + 500.5)
    add(job, "rank", 0, 1, 0.5, "y", consequence=True)
    assert (first(job).rank, first(job).code) == (1, 1)


def test_a_rank_that_ends_well_has_not_failed(job: Records) -> None:
    add(job, "end", 1, 0, 2.0)
    add(job, "end", 0, 0, 1.0)
    assert not job and not job.ranks() and records.culprit(job.per_rank()) is None
    assert job.first_done is not None and job.first_done.rank == 0


def test_a_rank_that_has_joined_and_tells_of_no_end_was_cut_short(job: Records) -> None:
    for rank in range(3):
        job.add(rank, b"\n", inside=True)
    add(job, "end", 1, 0, 2.0)
    add(job, "end", 2, 7, 2.0)
    assert job.cut_short() == {0}
    add(job, "end", 0, 0, 3.0)
    assert not job.cut_short()
