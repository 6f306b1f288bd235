"""What failed first: the cause is told from its consequences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from collectives import exits
from collectives.launch import records
from collectives.launch.records import Record


def write(run_dir: Path, kind: str, rank: int, code: int, time: float, text: str = "", **more: Any) -> None:
    entry = {"rank": rank, "code": code, "text": text, "time": time, "host": "h", **more}
    (run_dir / f"{kind}-{rank}.json").write_text(json.dumps(entry))


def first(run_dir: Path) -> Record:
    found = records.culprit(records.read(run_dir))
    assert found is not None
    return found


def test_nothing_failed(tmp_path: Path) -> None:
    assert records.culprit(records.read(tmp_path)) is None


def test_the_earliest_failure_is_the_cause(tmp_path: Path) -> None:
    write(tmp_path, "end", 0, 5, 2.0)
    write(tmp_path, "end", 1, 7, 1.0)
    assert (first(tmp_path).rank, first(tmp_path).code) == (1, 7)


def test_a_rank_that_failed_because_of_another_is_not(tmp_path: Path) -> None:
    write(tmp_path, "rank", 0, 1, 1.0, consequence=True)
    write(tmp_path, "end", 0, 1, 1.5)
    write(tmp_path, "end", 1, 137, 2.0)
    assert first(tmp_path).rank == 1


def test_a_rank_that_was_terminated_is_not(tmp_path: Path) -> None:
    write(tmp_path, "end", 0, 143, 1.0)
    write(tmp_path, "end", 1, 7, 1.1)
    assert first(tmp_path).rank == 1


def test_what_the_rank_wrote_itself_counts_more(tmp_path: Path) -> None:
    write(tmp_path, "end", 0, 137, 2.0, "killed at the end")
    write(tmp_path, "rank", 0, 1, 1.0, "Traceback (most recent call last):\n  ...\nValueError: x\n", consequence=False)
    assert first(tmp_path).code == 1
    assert str(first(tmp_path)).endswith("ValueError: x")


def test_the_reason_for_sys_exit_stands_on_stderr(tmp_path: Path) -> None:
    write(tmp_path, "rank", 0, 2, 1.0, "sys.exit(2)\n", consequence=False)
    assert str(first(tmp_path)) == "collectivesrun: rank 0 on h failed with exit code 2:\nsys.exit(2)"
    notice = "Abort(2) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 2)\n"
    (tmp_path / "stderr-0").write_text(f"usage: train.py\ntrain.py: error: no data\n{notice}")
    assert str(first(tmp_path)).endswith("train.py: error: no data")


def test_damaged_records_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "end-0.json").write_text("{")
    (tmp_path / "end-1.json").write_text("[]")
    write(tmp_path, "end", 2, 9, 3.0)
    assert first(tmp_path).rank == 2


def test_signals_are_named() -> None:
    assert str(Record(3, 137, "", 0.0, "h")) == "collectivesrun: rank 3 on h was killed by signal 9 (SIGKILL)"


def test_only_the_last_traceback_is_shown_with_its_causes() -> None:
    text = (
        "noise\nTraceback (most recent call last):\n  handled\nOSError: handled\nmore noise\n"
        "Traceback (most recent call last):\n  a\nKeyError: 'a'\n\nDuring handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n  b\nValueError: b\n"
    )
    shown = str(Record(0, 1, text, 0.0, "h"))
    assert "KeyError: 'a'" in shown and shown.endswith("ValueError: b")
    assert "noise" not in shown and "OSError" not in shown


def test_what_exits_writes_is_what_is_read(tmp_path: Path) -> None:
    exits.record(str(tmp_path), 4, exits.Failure(3, "the reason", consequence=True))
    found = first(tmp_path)
    assert (found.rank, found.code, found.text, found.consequence) == (4, 3, "the reason", True)
    exits.record(str(tmp_path), 4, exits.Failure(5, "a later one"))
    assert first(tmp_path).code == 3
    exits.record(str(tmp_path / "gone"), 4, exits.Failure(5, "nowhere to write"))
