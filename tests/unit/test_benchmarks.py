"""The benchmarks' definitions, tables, plot, and whole runs of one rank, which need no MPI."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import benchmarks.allgather
import benchmarks.allreduce
import benchmarks.alltoall
import benchmarks.broadcast
import benchmarks.reducescatter
import benchmarks.sendrecv
from benchmarks import table
from benchmarks.collective import Case, Collective, Unavailable
from benchmarks.floor import floor
from benchmarks.measure import Summary, bandwidth
from benchmarks.record import Record
from benchmarks.values import Values

ROOT = Path(__file__).resolve().parents[2]
ALL = {
    "allreduce": benchmarks.allreduce.ALLREDUCE,
    "allgather": benchmarks.allgather.ALLGATHER,
    "broadcast": benchmarks.broadcast.BROADCAST,
    "reducescatter": benchmarks.reducescatter.REDUCESCATTER,
    "alltoall": benchmarks.alltoall.ALLTOALL,
    "sendrecv": benchmarks.sendrecv.SENDRECV,
}


def flags(text: str) -> list[str]:
    """The words of a command line."""
    return text.split()


def run(*words: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def record(**changes: Any) -> Record:
    known: dict[str, Any] = {
        "collective": "allreduce",
        "contestant": "collectives",
        "mode": "in-place",
        "size": 4_000_000,
        "count": 1_000_000,
        "dtype": "float32",
        "op": "sum",
        "root": -1,
        "ranks": 4,
        "factor": 1.5,
        "wrong": 0,
        "time": Summary(1000.0, 900.0, 1100.0, 800.0),
        "limit": 850.0,
    }
    return Record(**{**known, **changes})


@pytest.mark.parametrize(
    ("name", "factor", "limit", "parts"),
    [
        ("allreduce", 1.5, 1200, (1, 1)),
        ("allgather", 0.75, 900, (1, 4)),
        ("broadcast", 1.0, 900, (1, 1)),
        ("reducescatter", 0.75, 900, (4, 1)),
        ("alltoall", 0.75, 900, (4, 4)),
        ("sendrecv", 1.0, 1200, (1, 1)),
    ],
)
def test_definitions_for_four_ranks(name: str, factor: float, limit: int, parts: tuple[int, int]) -> None:
    collective = ALL[name]
    assert collective.factor(4) == factor
    assert collective.limit(1200, 4) == limit
    assert (collective.send_parts(4), collective.receive_parts(4)) == parts
    assert collective.count(1200, 4, 4) * max(parts) * 4 == 1200
    assert collective.count(1, 8, 4) == 1, "at least one element"


@pytest.mark.parametrize("collective", ALL.values(), ids=list(ALL))
def test_expected_results_against_a_plain_model(collective: Collective) -> None:
    """Each collective's check accepts what NumPy says is right, on every rank, and counts one changed element as
    one."""
    size, count, root = 3, 1000, 1
    values = Values(np.dtype(np.float32), "sum" if collective.reduces else "none", size)
    inputs = [np.empty(count * collective.send_parts(size), np.float32) for _ in range(size)]
    for rank, array in enumerate(inputs):
        values.fill(array, rank)
    for rank in range(size):
        mine = slice(rank * count, (rank + 1) * count)
        result = {
            "allreduce": lambda: sum(inputs),
            "allgather": lambda: np.concatenate(inputs),
            "broadcast": lambda: inputs[root].copy(),
            "reducescatter": lambda mine=mine: sum(array[mine] for array in inputs),
            "alltoall": lambda mine=mine: np.concatenate([array[mine] for array in inputs]),
            "sendrecv": lambda rank=rank: inputs[rank - 1].copy(),
        }[collective.name]()
        case = Case(values.dtype, values.op, root, rank, size, count, inputs[rank], np.asarray(result))
        assert collective.wrong(case, values, np.asarray(result)) == 0
        result[-1] += 1
        assert collective.wrong(case, values, np.asarray(result)) == 1


def test_bandwidth_and_percent_of_limit() -> None:
    found = record()
    assert bandwidth(1_000_000_000, 1e6) == 1.0
    assert found.algbw == 4.0
    assert found.busbw == 6.0
    assert found.percent_of_limit == 85.0
    assert record(limit=None).percent_of_limit is None
    assert record(time=None).busbw == 0.0


def test_row_has_nccl_tests_columns() -> None:
    words = table.row(record(mode="out-of-place"), record()).split()
    assert words[:5] == ["4000000", "1000000", "float", "sum", "-1"]
    assert words[5:9] == ["1000.00", "4.00", "6.00", "0"]
    assert words[9:13] == ["1000.00", "4.00", "6.00", "0"]
    assert words[13:] == ["850.00", "85", "85"]
    assert table.row(record(mode="out-of-place"), None).split()[9:13] == ["N/A"] * 4
    title = table.header(ALL["allreduce"], 20, 5).splitlines()
    assert title[-2].strip("#").split() == [
        *("size", "count", "type", "redop", "root"),
        *("time", "algbw", "busbw", "#wrong") * 2,
        *("time", "out", "in"),
    ]
    assert len(table.row(record(mode="out-of-place"), record())) == len(title[-1])
    assert "one memcpy of S bytes on every rank at once" in "".join(title)


def test_closing_lines() -> None:
    assert "# Out of bounds values : 0 OK" in table.closing([record()])
    assert "# Avg bus bandwidth    : 6" in table.closing([record()])
    assert "# Out of bounds values : 3 FAILED" in table.closing([record(wrong=3)])
    assert "not checked" in table.closing([record(wrong=None)])


def test_comparison_shows_ratios_and_their_mean() -> None:
    peer = record(contestant="mpi", ratio=Summary(4.0, 3.0, 5.0, 2.0))
    other = record(contestant="mpi", ratio=Summary(1.0, 1.0, 1.0, 1.0), size=8)
    text = table.comparison(
        [record(), peer, record(size=8), other, record(contestant="gloo", time=None, unavailable="no")]
    )
    assert "4.00    3.00    5.00" in text
    assert "mpi, in-place: 2.00 x ours (geometric mean of 2 rows)" in text
    assert "gloo" not in text


def test_floor_copies_what_it_says() -> None:
    source, target = np.arange(10, dtype=np.uint8), np.zeros(10, np.uint8)
    floor(source, target, 6)()
    assert list(target) == [0, 1, 2, 3, 4, 5, 0, 0, 0, 0]
    with pytest.raises(Unavailable, match="single rank"):
        floor(source, target, 0)


def test_plot_writes_png_and_svg(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.plot import plot, short_bytes

    records = [
        record(contestant=name, size=size, mode=mode).as_dict()
        for name in ("collectives", "mpi", "memcpy")
        for size in (1 << 16, 1 << 20)
        for mode in ("out-of-place", "in-place")
    ]
    content = {"benchmark": "allreduce", "ranks": 2, "machine": {"mpi": "", "processor": "x"}, "records": records}
    png, svg = plot(content, tmp_path / "curves.png")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in svg.read_text()
    plot({**content, "records": []}, tmp_path / "empty.png")
    assert [short_bytes(value) for value in (4, 65536, 1 << 26, 1 << 30)] == ["4", "64K", "64M", "1G"]


@pytest.mark.parametrize("name", ALL)
def test_one_rank_runs_without_a_launcher(name: str, tmp_path: Path) -> None:
    written = tmp_path / "results.json"
    done = run(
        f"benchmarks.{name}", *flags("-b 4 -e 4K -f 32 -n 2 -w 1 -d float,half,bfloat16,int32"), "--json", str(written)
    )
    assert "# Out of bounds values : 0 OK" in done.stdout
    assert "# Avg bus bandwidth" in done.stdout
    assert "\x1b" not in done.stderr, "a progress bar, and no terminal"
    content = json.loads(written.read_text())
    assert content["benchmark"] == name
    assert content["ranks"] == 1
    assert content["machine"]["cores"] >= 1
    ours = [found for found in content["records"] if found["contestant"] == "collectives"]
    assert {found["dtype"] for found in ours} == {"float32", "float16", "bfloat16", "int32"}
    assert all(found["wrong"] == 0 and found["time"]["median"] > 0 for found in ours)


def test_both_kinds_of_memory_in_one_run(tmp_path: Path) -> None:
    written = tmp_path / "results.json"
    sizes = flags("-b 4 -e 4K -f 1024 -n 2 -w 1")
    done = run("benchmarks.broadcast", *sizes, "--memory", "mapped,private", "--json", str(written))
    assert "# Out of bounds values : 0 OK" in done.stdout
    assert "memory mapped,private" in done.stdout
    records = json.loads(written.read_text())["records"]
    assert [found["contestant"] for found in records] == ["collectives", "collectives, private", "memcpy"] * 4
    assert all(found["wrong"] == 0 for found in records if found["contestant"] != "memcpy")
    assert all(found["ratio"] for found in records if found["contestant"] == "collectives, private")


def test_the_prototype_says_what_it_needs() -> None:
    done = run("benchmarks.allreduce", *flags("-b 4 -e 4 -n 1 -w 0 --peers prototype"))
    assert "# prototype: needs two ranks on one host; there are 1" in done.stdout


def test_errors_of_a_program(tmp_path: Path) -> None:
    assert "--nonsense" in run("benchmarks.alltoall", "--nonsense", expect=2).stderr
    assert "3 is not a rank" in run("benchmarks.broadcast", "-r", "3", expect=2).stderr
    assert "GiB" in run("benchmarks.allreduce", "-b", "900000G", "-e", "900000G", expect=2).stderr
    (tmp_path / "bad.json").write_text("{}")
    assert "bad.json" in run("benchmarks.plot", str(tmp_path / "bad.json"), str(tmp_path / "x.png"), expect=2).stderr


def test_latency_and_memory_of_one_rank(tmp_path: Path) -> None:
    both = flags("--memory private,mapped --persistent")
    run("benchmarks.latency", "-e", "64", "-n", "2", "-m", "5", *both, "--json", str(tmp_path / "latency.json"))
    found = json.loads((tmp_path / "latency.json").read_text())["records"]
    assert [row["size"] for row in found] == [4, 16, 64]
    names = {"collectives", "persistent", "collectives, mapped", "persistent, mapped"}
    assert all(set(row["contestants"]) == names for row in found), found
    done = run("benchmarks.memory", *flags("-b 64K -e 256K -n 100"), "--json", str(tmp_path / "memory.json"))
    assert "resident memory grew by" in done.stdout
    assert len(json.loads((tmp_path / "memory.json").read_text())["records"]) == 3


@pytest.mark.slow
def test_example_trains(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    saved = tmp_path / "digits.npz"
    command = [sys.executable, str(ROOT / "examples/numpy_digits.py"), "--epochs", "12", "--save", str(saved)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    with np.load(saved) as result:
        assert result["history.test_accuracy"][-1] > 0.95
        assert result["history.loss"][-1] < result["history.loss"][0] / 4
