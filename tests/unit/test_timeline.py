"""The timeline: a file that is whole at any moment, whoever writes to it, and lanes on which spans nest."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import logging
import os
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.base.errors import InvalidArgumentError
from collectives.engine import timeline, trace_file
from collectives.engine.timeline import Timeline, align, read

WORDS = 'wait for “ranks” \\ "\n\t\u2028 \ud800'


def of(events: list[dict[str, Any]], *phases: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] in phases]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


def test_a_rank_is_a_process_and_a_track_a_thread(path: Path) -> None:
    recorder = Timeline(path, 3, host="node1", offset=0.5)
    recorder.span("engine", "pack", 1.0, 1.25, bytes=4096, tensors=["a", "b"])
    recorder.span("rounds", "round 0", 1.0, 1.125)
    recorder.span("engine", "unpack", 1.25, 1.5)
    recorder.close()
    names = {(event["name"], event["tid"]): event["args"] for event in of(read(path), "M")}
    assert names["process_name", 0] == {"name": "rank 3 (node1)"}
    assert names["process_sort_index", 0] == {"sort_index": 3}
    assert (names["thread_name", 1], names["thread_name", 2]) == ({"name": "engine"}, {"name": "rounds"})
    pack, first, unpack = of(read(path), "X")
    args = {"bytes": 4096, "tensors": ["a", "b"]}
    assert pack == {
        "ph": "X",
        "pid": 3,
        "tid": 1,
        "cat": "engine",
        "ts": 1.5e6,
        "dur": 0.25e6,
        "name": "pack",
        "args": args,
    }
    assert (first["tid"], first["dur"], unpack["tid"], unpack["ts"]) == (2, 0.125e6, 1, 1.75e6)


def test_async_spans_have_ids_of_their_own(path: Path) -> None:
    recorders = [Timeline(path, rank, first=rank == 0) for rank in range(3)]
    for rank, recorder in enumerate(recorders):
        recorder.async_span("negotiate", "layer1.weight", 1.0, 2.0 + rank, ranks=3)
        recorder.async_span("negotiate", "layer1.bias", 1.5, 3.0)
        recorder.close()
    begins, ends = of(read(path), "b"), of(read(path), "e")
    assert len({event["id"] for event in begins}) == 6
    length = {event["id"]: event["ts"] for event in ends}
    assert [length[event["id"]] - event["ts"] for event in begins if event["name"] == "layer1.weight"] == [
        1e6,
        2e6,
        3e6,
    ]
    assert begins[0]["args"] == {"ranks": 3}


def test_a_mark_is_a_moment_of_the_rank(path: Path) -> None:
    recorder = Timeline(path, 1)
    recorder.mark("cycle", 2.0, number=7)
    recorder.close()
    (mark,) = of(read(path), "i")
    assert (mark["pid"], mark["s"], mark["ts"], mark["args"]) == (1, "p", 2e6, {"number": 7})


def test_any_text_and_any_value_is_json(path: Path) -> None:
    recorder = Timeline(path, 0, host=WORDS)
    values = {"whole": np.int64(3), "nan": float("nan"), "odd": {(1, 2): 3}, "thing": Path("x")}
    for key, value in values.items():
        recorder.span(WORDS, WORDS, 0.0, 1.0, **{key: value})
    recorder.async_span(WORDS, WORDS, 0.0, 1.0)
    recorder.close()
    assert path.read_text(encoding="ascii").startswith("[\n")
    events = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert [event["args"] for event in of(events, "X")] == [
        {"whole": 3},
        {"nan": "nan"},
        {"odd": "{(1, 2): 3}"},
        {"thing": "x"},
    ]
    assert {event["name"] for event in of(events, "X", "b", "e")} == {WORDS}


def test_no_nanosecond_is_lost_after_years_of_uptime(path: Path) -> None:
    recorder = Timeline(path, 0)
    recorder.mark("then", 2.0**27)
    recorder.close()
    assert '"ts":134217728000000.000,' in path.read_text()
    assert timeline._us(10**19 + 1) == "10000000000000000.001"


Spans = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda pair: (pair[0] / 8, (pair[0] + pair[1]) / 8)),
    max_size=30,
)


@given(spans=Spans)
def test_spans_on_one_thread_nest(tmp_path_factory: pytest.TempPathFactory, spans: list[tuple[float, float]]) -> None:
    path = tmp_path_factory.mktemp("lanes") / "trace.json"
    recorder = Timeline(path, 0)
    for begin, end in spans:
        recorder.span("engine", "work", begin, end)
    recorder.close()
    threads: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in of(read(path), "X"):
        threads[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert sorted((begin / 1e6, end / 1e6) for lane in threads.values() for begin, end in lane) == sorted(spans)
    for lane in threads.values():
        for (begin, end), (start, stop) in itertools.permutations(lane, 2):
            assert not begin < start < end < stop


def test_spans_that_overlap_get_another_lane_of_the_track(path: Path) -> None:
    recorder = Timeline(path, 0)
    for begin, end in ((0.0, 2.0), (1.0, 3.0), (2.0, 4.0)):
        recorder.span("engine", "work", begin, end)
    recorder.close()
    assert [event["tid"] for event in of(read(path), "X")] == [1, 2, 1]
    assert [event["args"]["name"] for event in of(read(path), "M") if event["name"] == "thread_name"] == [
        "engine",
        "engine (2)",
    ]


def test_too_many_tracks_are_recorded_beside_the_tracks(path: Path) -> None:
    recorder = Timeline(path, 0)
    for number in range(250):
        recorder.span(f"queue {number}", "waits", 0.0, 1.0)
    recorder.span("queue 0", "waits", 1.0, 2.0)
    recorder.close()
    events = read(path)
    assert len({event["tid"] for event in of(events, "X")}) == 200
    assert [event["args"]["track"] for event in of(events, "b")] == [f"queue {number}" for number in range(200, 250)]
    assert of(events, "X")[-1]["tid"] == 1


def test_what_was_recorded_is_in_the_file_a_moment_later(path: Path) -> None:
    """Although nothing else is recorded, and nobody asks for it."""
    recorder = Timeline(path, 0)
    for name in ("first", "second"):
        recorder.mark(name, 0.0)
        deadline = time.monotonic() + 10
        while not any(event["name"] == name for event in json.loads(path.read_text())):
            assert time.monotonic() < deadline, path.read_text()
            time.sleep(timeline._PERIOD)  # the file is another thread's, and shows nothing before
    recorder.mark("third", 0.0)
    recorder.flush()
    assert [event["name"] for event in of(read(path), "i")] == ["first", "second", "third"]


def test_a_timeline_that_is_dropped_or_closed_leaves_no_thread(path: Path) -> None:
    before = set(threading.enumerate())
    kept, dropped = Timeline(path, 0), Timeline(path, 1, first=False)
    assert len(set(threading.enumerate()) - before) == 2
    kept.close()
    del dropped
    deadline = time.monotonic() + 10
    while set(threading.enumerate()) - before:
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(timeline._PERIOD)  # they end when they have been told


def test_what_waits_to_be_written_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "_PERIOD", 3600.0)
    monkeypatch.setattr(timeline, "_MOST_BYTES", 10_000)
    recorder = Timeline(path, 0)
    most = 0
    for number in range(3000):
        recorder.span("engine", "work", number, number + 1, text="x" * 100)
        most = max(most, recorder._waiting_bytes)
    assert 9_000 < most < 10_000
    recorder.flush()
    assert len(of(json.loads(path.read_text()), "X")) == 3000


def test_while_another_rank_writes_it_is_put_off_but_not_for_ever(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "_PERIOD", 3600.0)
    monkeypatch.setattr(timeline, "_PATIENCE", 0.0)
    monkeypatch.setattr(timeline, "_MOST_BYTES", 1000)
    recorder = Timeline(path, 0)
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        recorder.mark("put off", 0.0)
        recorder.flush()
        assert of(read(path), "i") == []
        recorder.mark("x" * 1000, 0.0)
        assert [event["name"][0] for event in of(read(path), "i")] == ["p", "x"]
    recorder.mark("later", 0.0)
    recorder.flush()
    assert [event["name"][0] for event in of(read(path), "i")] == ["p", "x", "l"]


def test_tensors_are_processes_of_the_trace_alike_on_all_ranks(path: Path) -> None:
    recorders = [Timeline(path, rank, first=rank == 0) for rank in range(2)]
    for rank, recorder in enumerate(recorders):
        recorder.tick("all", "allreduce.a", 1.0 + rank)
        recorder.tick("some", "allreduce.a", 1.0)
    recorders[0].phase("all", "allreduce.a", "NEGOTIATE_ALLREDUCE", 1.0, 2.0)
    recorders[0].phase("all", "allreduce.a", "ALLREDUCE", 2.0, 2.5, dtype="float32", shape="[3]")
    for recorder in recorders:
        recorder.close()
    events = json.loads(path.read_text())
    rows = {event["pid"] for event in of(events, "M") if event["args"].get("name") == "allreduce.a"}
    assert len(rows) == 2 and min(rows) >= timeline.FIRST_ROW
    assert {event["pid"] for event in of(events, "X", "B", "E")} == rows
    (row,) = {event["pid"] for event in of(events, "B")}
    ticks = [(event["name"], event["ts"], event["dur"]) for event in of(events, "X") if event["pid"] == row]
    assert sorted(ticks) == [("0", 1e6, 0), ("1", 2e6, 0)]
    phases = [(event["ph"], event["ts"], event.get("name"), event.get("args")) for event in of(events, "B", "E")]
    assert phases == [
        ("B", 1e6, "NEGOTIATE_ALLREDUCE", None),
        ("E", 2e6, None, {}),
        ("B", 2e6, "ALLREDUCE", None),
        ("E", 2.5e6, None, {"dtype": "float32", "shape": "[3]"}),
    ]


def test_too_many_tensors_have_no_rows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "_MOST_ROWS", 2)
    recorder = Timeline(path, 0)
    for number in (0, 1, 2, 1):
        recorder.phase("", f"allreduce.{number}", "ALLREDUCE", number, number + 1)
    recorder.close()
    events = read(path)
    assert [event["ts"] for event in of(events, "B")] == [0.0, 1e6, 1e6]
    assert len([event for event in of(events, "M") if event["pid"]]) == 4


def test_many_ranks_write_one_file_from_many_threads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "_PERIOD", 1e-4)
    recorders = [Timeline(path, rank, first=rank == 0) for rank in range(4)]

    def record(recorder: Timeline, thread: int) -> None:
        for number in range(200):
            recorder.span(f"thread {thread}", "work", number, number + 0.5, number=number)

    threads = [
        threading.Thread(target=record, args=(recorder, thread)) for recorder in recorders for thread in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for recorder in recorders:
        recorder.close()
    found = sorted(
        (event["pid"], event["cat"], event["args"]["number"]) for event in of(json.loads(path.read_text()), "X")
    )
    assert found == sorted(
        (rank, f"thread {thread}", number) for rank in range(4) for thread in range(2) for number in range(200)
    )


def test_only_the_first_rank_empties_the_file(path: Path) -> None:
    path.write_text("old")
    first, second = Timeline(path, 0), Timeline(path, 1, first=False)
    second.close()
    first.close()
    assert {event["pid"] for event in json.loads(path.read_text())} == {0, 1}


def test_a_rank_that_does_not_see_the_first_ones_file_begins_its_own(path: Path) -> None:
    Timeline(path, 5, first=False).close()
    assert {event["pid"] for event in json.loads(path.read_text())} == {5}


def test_after_close_nothing_is_recorded(path: Path) -> None:
    recorder = Timeline(path, 0)
    recorder.close()
    before = path.read_bytes()
    recorder.span("engine", "late", 0.0, 1.0)
    recorder.async_span("negotiate", "late", 0.0, 1.0)
    recorder.mark("late", 0.0)
    recorder.flush()
    recorder.close()
    assert path.read_bytes() == before


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"rank 2: the timeline '.*nowhere/trace.json' cannot be written: No such file"
    ):
        Timeline(tmp_path / "nowhere" / "trace.json", 2)


def test_a_full_disk_ends_the_timeline_and_nothing_else(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Timeline(path, 0)

    def full(file: int, data: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(trace_file.os, "pwrite", full)
    with caplog.at_level(logging.WARNING, "collectives"):
        for _ in range(3):
            recorder.mark("x", 0.0)
            recorder.flush()
        recorder.close()
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["No space left on device [W58]"]


def test_a_write_that_is_cut_short_goes_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Timeline(path, 0)
    whole = os.pwrite
    monkeypatch.setattr(trace_file.os, "pwrite", lambda file, data, at: whole(file, data[:7], at))
    recorder.mark("all of it", 1.0)
    recorder.close()
    assert of(json.loads(path.read_text()), "i")[0]["name"] == "all of it"


@pytest.mark.parametrize("rest", ["", ",", ',\n{"ph":"X","na', ',\n{"ph":"X","na' + "x" * 3000, ",\n"])
def test_what_a_killed_writer_has_left_is_cut_off(path: Path, rest: str) -> None:
    path.write_text('[\n{"ph":"M"},\n{"ph":"i","name":"before"},\n{"ph":"i","name":"cut"}' + rest)
    recorder = Timeline(path, 1, first=False)
    recorder.mark("after", 1.0)
    recorder.close()
    assert {event["name"] for event in of(json.loads(path.read_text()), "i")} >= {"before", "after"}


def test_where_there_are_no_locks_lines_are_appended(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "_try_lock", lambda file: None)
    recorders = [Timeline(path, rank, first=rank == 0) for rank in range(2)]
    for recorder in (*recorders, *recorders):
        recorder.mark("there", 0.0)
        recorder.flush()
    assert sorted(event["pid"] for event in of(read(path), "i")) == [0, 0, 1, 1]
    assert path.read_text().count("[\n") == 1


@pytest.mark.parametrize("end", ["", "]", "\n]\n", ",", ",\n", ",\n{", ',\n{"ph":"X","na', ',\n{"a":1}\n{"ph":"i","p'])
def test_a_trace_is_read_however_it_ends(path: Path, end: str) -> None:
    path.write_text('[\n{"ph":"M"},\n{"ph":"i"}' + end)
    assert [event.get("ph") for event in read(path)][:2] == ["M", "i"]


def test_a_torn_line_in_the_middle_is_left_out(path: Path) -> None:
    path.write_text('[\n{"ph":"M"},\n{"ph":"X","dur{"ph":"X"},\n[\n7,\n{"ph":"i"},\n')
    assert [event["ph"] for event in read(path)] == ["M", "i"]
    path.write_text("")
    assert read(path) == []


def test_traces_of_several_hosts_can_be_put_together(tmp_path: Path, path: Path) -> None:
    for rank in range(2):
        Timeline(tmp_path / f"{rank}.json", rank).close()
    path.write_text("".join((tmp_path / f"{rank}.json").read_text() for rank in range(2)))
    assert {event["pid"] for event in read(path)} == {0, 1}


def test_ranks_on_one_host_share_a_clock() -> None:
    calls = []

    def exchange(value: object) -> list[object]:
        calls.append(value)
        return [value] * 3

    assert align(exchange) == 0.0
    assert len(calls) == 1


class TwoHosts:
    """Rank 0 and this rank with clocks that differ by ``ahead``; each step of either rank takes a while of true
    time."""

    def __init__(self, ahead: float, delays: list[float]) -> None:
        self.ahead, self.delays = ahead, itertools.cycle(delays)
        self.time, self.rank_0_left, self.place = 100.0, 100.0, True

    def now(self) -> float:
        self.time += next(self.delays)
        return self.time - self.ahead

    def exchange(self, value: object) -> list[object]:
        if self.place:
            self.place = False
            return [("another host",), value]
        # Rank 0 reads its clock and enters; both leave after both have entered.
        reading = self.rank_0_left + next(self.delays)
        entered = max(self.time, reading)
        self.time, self.rank_0_left = entered + next(self.delays), entered + next(self.delays)
        return [reading, value]


@given(ahead=st.floats(-1e4, 1e4), delays=st.lists(st.floats(1e-6, 1e-2), min_size=1, max_size=40))
def test_clocks_of_hosts_are_aligned_to_within_a_round(ahead: float, delays: list[float]) -> None:
    # Two steps of this rank and two of rank 0 lie between the bounds, at most.
    assert align((hosts := TwoHosts(ahead, delays)).exchange, hosts.now) == pytest.approx(
        ahead, abs=2 * max(delays) + 1e-9
    )


def test_an_undisturbed_round_is_enough() -> None:
    quick, slow = [1e-6] * 5, [0.05, 0.002, 0.03, 0.007, 0.011]
    hosts = TwoHosts(1234.5, slow * 3 + quick * 5 + slow * 20)
    assert align(hosts.exchange, hosts.now) == pytest.approx(1234.5, abs=1e-5)


def test_rank_0_keeps_its_clock() -> None:
    assert align(lambda value: [value, ("another host",)] if isinstance(value, tuple) else [value, 77.0]) == 0.0
