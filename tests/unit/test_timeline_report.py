"""The report of a timeline: its numbers, and a page that needs nothing else."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.base.errors import InvalidArgumentError
from collectives.engine.timeline import Timeline, read
from collectives.launch import timeline_report, timeline_summary
from collectives.launch.timeline_summary import KINDS, parse

EVIL = "</script><script>alert(1)</script><!-- {{data}} & \u2028"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two ranks, 10 seconds: rank 1 submits "late" 3 seconds after rank 0, which waits for it; then a bucket of two
    tensors, twice."""
    path = tmp_path / "trace.json"
    recorders = [Timeline(path, rank, host=f"node{rank}", first=rank == 0) for rank in range(2)]
    for rank, recorder in enumerate(recorders):
        recorder.mark("CYCLE_START", 0.0)
        recorder.tick("", "allreduce.late", 1.0)
        recorder.phase(
            "", "allreduce.late", "NEGOTIATE_ALLREDUCE", 0.5, 11.0
        )  # a row for readers of Horovod's: no rank of the report
        recorder.async_span("negotiate", "late", 1.0 + 3 * rank, 5.0)
        recorder.async_span("negotiate", "soon", 1.0 - rank / 2, 2.0)
        recorder.span("engine", "pack", 5.0, 5.5)
        for begin in (5.5, 7.0):
            recorder.span(
                "engine",
                "allreduce ring over window",
                begin,
                begin + 1.0 + rank / 4,
                bytes=3 << 20,
                tensors=["late", "soon"],
            )
            recorder.span("rounds", "round 0", begin, begin + 1.0)
    recorders[0].span("engine", "wait for ranks [1]", 2.0, 5.0, missing=[1])
    recorders[1].span("engine", "unpack", 9.0, 10.0)
    for recorder in recorders:
        recorder.close()
    return path


class Page(HTMLParser):
    """The elements of a page, its tables as lists of texts, and what it refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.references: list[str] = []
        self.rows: list[list[str]] = []
        self.data = ""
        self._in_data = self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.references += [value or "" for key, value in attrs if key in ("src", "href", "action", "data", "srcset")]
        self._in_data = ("id", "data") in attrs
        if tag == "tr":
            self.rows.append([])
        self._in_cell = self._in_cell or tag in ("td", "th")
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._in_cell = False

    def handle_data(self, data: str) -> None:
        if self._in_data:
            self.data += data
        elif self._in_cell:
            self.rows[-1][-1] += data

    def drawing(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.data)
        return found


def page(path: Path) -> Page:
    report = path.with_name("report.html")
    timeline_report.write(path, report)
    return Page(report.read_text(encoding="utf-8"))


Engine = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 10), st.sampled_from([*KINDS[1:], "wait"])), min_size=1, max_size=12
)


@given(spans=Engine)
def test_each_moment_counts_once_and_for_what_says_most(spans: list[tuple[int, int, str]]) -> None:
    events = [
        {
            "ph": "X",
            "pid": 0,
            "tid": 1,
            "cat": "engine",
            "name": name,
            "ts": at,
            "dur": length,
            "args": {"missing": [1]} if name == "wait" else {},
        }
        for at, length, name in spans
    ]
    found = parse([*events, {"ph": "i", "pid": 0, "ts": 50.0}])
    expected = dict.fromkeys([*KINDS, "idle"], 0.0)
    for moment in range(int(found.begin), 50):
        active = {"waiting" if name == "wait" else name for at, length, name in spans if at <= moment < at + length}
        expected[next((kind for kind in KINDS if kind in active), "idle")] += 1.0
    assert timeline_summary.shares(found)[0] == pytest.approx(expected)


def test_who_was_last_is_unknown_if_the_ranks_submitted_unequally_often(tmp_path: Path) -> None:
    recorder = Timeline(tmp_path / "trace.json", 0)
    other = Timeline(tmp_path / "trace.json", 1, first=False)
    for begin in (0.0, 1.0):
        recorder.async_span("negotiate", "a", begin, begin + 1)
    other.async_span("negotiate", "a", 0.5, 1.0)
    recorder.close()
    other.close()
    assert timeline_summary.negotiations(parse(read(tmp_path / "trace.json")))[0].last == {}


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"ph": "X", "pid": 0},
        {"ph": "X", "pid": "x", "cat": "engine", "name": "n", "ts": 0, "dur": 1},
        {"ph": "e", "pid": 0, "cat": "c", "id": "1", "ts": 0},
        {"ph": "e", "pid": 0, "cat": [], "id": "1", "ts": 0},
        {"ph": "M", "pid": 0, "name": "process_name", "args": 3},
        {"ph": "b", "pid": 0, "cat": "c", "id": "never ends", "name": "n", "ts": 0},
        {"ph": "?", "pid": 0, "ts": 0},
    ],
)
def test_what_is_no_event_is_left_out(event: dict[str, Any]) -> None:
    found = parse([event])
    assert (found.spans, found.async_spans, found.names) == ([], [], {})


def test_odd_arguments_do_no_harm() -> None:
    common = {"ph": "X", "pid": 0, "cat": "engine", "name": "n", "ts": 0, "dur": 1}
    oddities: list[Any] = [None, [], "text", {"missing": 3}, {"missing": ["x"]}, {"tensors": 5, "bytes": "many"}]
    found = parse([{**common, "args": args} for args in oddities])
    assert len(found.spans) == len(oddities)
    assert timeline_summary.waited_for(found) == {}
    assert [(bucket.tensors, bucket.nbytes) for bucket in timeline_summary.buckets(found)] == [((), 0)]
    assert "No rank waited for another." in timeline_report.page(found, "t")


def test_the_tables_show_the_numbers(trace: Path) -> None:
    rows = page(trace).rows
    assert ["rank 0 (node0)", "", "2 s 20 %", "500 ms 5.0 %", "0 0.0 %", "3 s 30 %", "4.5 s 45 %"] in rows
    assert ["rank 0 waited", "3 s", "3 s"] in rows
    assert ["allreduce ring over window", "late, soon", "2", "3 MiB", "2", "1.12 s", "0.00 GB/s", "2.25 s"] in rows
    assert ["late", "2", "2.5 s", "4 s on rank 0", "rank 1 (100 %)"] in rows


def test_the_drawing_holds_all_lanes(trace: Path) -> None:
    drawing = page(trace).drawing()
    assert [(lane["rank"], lane["track"], lane["area"]) for lane in drawing["lanes"]] == [
        (rank, track, area)
        for rank in range(2)
        for track, area in (("engine", False), ("rounds", False), ("negotiate", True))
    ]
    engine = drawing["lanes"][0]
    assert [drawing["names"][name] for name in engine["name"]][:2] == ["wait for ranks [1]", "pack"]
    assert [drawing["kinds"][kind] for kind in engine["kind"]] == ["waiting", "pack", "communicate", "communicate"]
    assert (engine["begin"][0], engine["length"][0], drawing["duration"], drawing["marks"]["0"]) == (
        2e6,
        3e6,
        10e6,
        [0.0],
    )
    assert drawing["details"][engine["detail"][2]] == "3 MiB\ntensors (2): late, soon"


def test_touching_spans_lie_on_one_level_and_nested_ones_on_two(tmp_path: Path) -> None:
    recorder = Timeline(tmp_path / "trace.json", 0)
    # Sums of floats that miss the next begin by a rounding error.
    for number in range(100):
        recorder.span("rounds", "round", 1000.1 + number * 1.2345e-5, 1000.1 + (number + 1) * 1.2345e-5)
    recorder.span("engine", "outer", 1000.1, 1000.2)
    recorder.span("engine", "inner", 1000.1, 1000.15)
    recorder.close()
    engine, rounds = page(tmp_path / "trace.json").drawing()["lanes"]
    assert (engine["level"], set(rounds["level"])) == ([0, 1], {0})


def test_the_page_stands_by_itself(trace: Path) -> None:
    found = page(trace)
    text = trace.with_name("report.html").read_text(encoding="utf-8")
    assert found.references == []
    assert not re.search(r"https?://|@import|url\(|\bfetch\(|XMLHttpRequest|\{\{\w+\}\}", text)
    assert "default-src 'none'" in text


def test_names_cannot_break_the_page(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    plain, evil = Timeline(path, 0, host=EVIL), Timeline(path, 1, first=False)
    evil.span("engine", EVIL, 0.0, 1.0, tensors=[EVIL], bytes=1)
    evil.async_span("negotiate", EVIL, 0.0, 1.0)
    plain.span(EVIL, EVIL, 0.0, 1.0, other=EVIL)
    plain.close()
    evil.close()
    found = page(path)
    assert found.elements.count("script") == 2
    assert EVIL in found.drawing()["names"]
    assert any(EVIL in row for row in found.rows)


def test_what_is_not_drawn_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_report, "_MOST_DRAWN", 10)
    monkeypatch.setattr(timeline_report, "_MOST_RANKS", 2)
    path = tmp_path / "trace.json"
    for rank in range(3):
        recorder = Timeline(path, rank, first=rank == 0)
        for number in range(20):
            recorder.span("engine", "short", number, number + 0.01)
            recorder.span("rounds", "long", number, number + 0.5 + number / 100)
            recorder.async_span("negotiate", "a", number, number + 0.5)
            recorder.mark("CYCLE_START", number)
        for number in range(10):
            recorder.span(f"track {number}", "x", 0.0, 0.001)
        recorder.close()
    drawing = page(path).drawing()
    spans = [lane for lane in drawing["lanes"] if not lane["area"]]
    assert sum(len(lane["begin"]) for lane in spans) == 10
    assert {lane["track"] for lane in spans} == {"engine"}
    assert sum(map(len, drawing["marks"].values())) == 10
    text = path.with_name("report.html").read_text(encoding="utf-8")
    for said in (
        "the first 2 of 3 ranks",
        "10 of 100 spans",
        "10 of 40 waiting times",
        "one of 4 marks",
        "2 of 3 ranks.",
    ):
        assert said in text
    monkeypatch.undo()
    assert len({lane["track"] for lane in page(path).drawing()["lanes"]}) == 9
    assert "8 tracks of each rank; 12 more" in path.with_name("report.html").read_text(encoding="utf-8")


def test_the_command(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert timeline_report.main([str(trace)]) == 0
    assert capsys.readouterr().out.strip() == str(trace.with_suffix(".html"))
    assert trace.with_suffix(".html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert timeline_report.main([str(trace), str(trace.with_name("other.html"))]) == 0
    assert trace.with_name("other.html").exists()
    capsys.readouterr()
    assert timeline_report.main([str(trace), "--text"]) == 0
    shown = capsys.readouterr().out
    assert "Who waited for whom" in shown and "<" not in shown and "&" not in shown
    print(shown)


def test_mistakes_are_named(tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert timeline_report.main([str(tmp_path / "none.json")]) == 2
    assert "': No such file" in capsys.readouterr().err
    (tmp_path / "empty.json").write_text("[\n")
    with pytest.raises(InvalidArgumentError, match="has no events"):
        timeline_report.write(tmp_path / "empty.json", tmp_path / "r.html")
    with pytest.raises(InvalidArgumentError, match=r"cannot write the report .*: No such file"):
        timeline_report.write(trace, tmp_path / "nowhere" / "r.html")


def test_calls_without_a_name_are_added_up() -> None:
    """Each has a number of its own, which must not make a line for each of them."""
    events: list[dict[str, Any]] = []
    for number in range(3):
        names = [f"grouped_allreduce number {number}[{place}], unnamed" for place in range(2)]
        events.append(
            {
                "ph": "X",
                "pid": 0,
                "ts": number,
                "dur": 1,
                "cat": "engine",
                "name": "x",
                "args": {"tensors": names, "bytes": 8},
            }
        )
        common = {"pid": 0, "id": number, "cat": "negotiate", "name": f"allreduce number {number}, unnamed"}
        events += [{"ph": "b", "ts": number, **common}, {"ph": "e", "ts": number + 1, **common}]
    found = parse(events)
    (bucket,) = timeline_summary.buckets(found)
    assert bucket.tensors == ("grouped_allreduce[0], unnamed", "grouped_allreduce[1], unnamed") and bucket.times == 3
    (negotiation,) = timeline_summary.negotiations(found)
    assert negotiation.tensor == "allreduce, unnamed" and negotiation.times == 3
