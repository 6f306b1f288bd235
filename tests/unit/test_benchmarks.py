"""The benchmarks: what they count as right and as wrong, their figures, and one run of each program on one rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from benchmarks import cluster, compare, hosts
from benchmarks.allgather import ALLGATHER
from benchmarks.allreduce import ALLREDUCE
from benchmarks.alltoall import ALLTOALL
from benchmarks.broadcast import BROADCAST
from benchmarks.gradients import Gradients
from benchmarks.models import elements, resnet50
from benchmarks.peers import PEERS
from benchmarks.reducescatter import REDUCESCATTER
from benchmarks.sendrecv import SENDRECV
from collectives.tools.bench import cli, device, table
from collectives.tools.bench.collective import Case, Collective
from collectives.tools.bench.measure import OURS, Record, Summary
from collectives.tools.bench.values import PERIOD, Values

ROOT = Path(__file__).resolve().parents[2]


def run(program: str, *words: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.{program}", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == expect, done.stdout + done.stderr
    return done


# ---- what is right ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("collective", "factor", "limit", "parts"),
    [
        (ALLREDUCE, 1.5, 1200, (1, 1)),
        (ALLGATHER, 0.75, 900, (1, 4)),
        (BROADCAST, 1.0, 900, (1, 1)),
        (REDUCESCATTER, 0.75, 900, (4, 1)),
        (ALLTOALL, 0.75, 900, (4, 4)),
        (SENDRECV, 1.0, 1200, (1, 1)),
    ],
)
def test_definitions_for_four_ranks(collective: Collective, factor: float, limit: int, parts: tuple[int, int]) -> None:
    assert (collective.factor(4), collective.limit(1200, 4)) == (factor, limit)
    assert (collective.send_parts(4), collective.receive_parts(4)) == parts
    assert collective.count(1200, 4, 4) * max(parts) * 4 == 1200
    assert collective.count(1, 8, 4) == 1, "at least one element"


@pytest.mark.parametrize("name", ["allreduce", "allgather", "broadcast", "reducescatter", "alltoall", "sendrecv"])
def test_expected_results_against_a_plain_model(name: str) -> None:
    """Each collective's check accepts what NumPy says is right, on every rank, and counts one changed element as
    one."""
    every = (ALLREDUCE, ALLGATHER, BROADCAST, REDUCESCATTER, ALLTOALL, SENDRECV)
    collective = next(found for found in every if found.name == name)
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
        }[name]()
        case = Case(values.dtype, values.op, root, rank, size, count, inputs[rank], np.asarray(result))
        assert collective.wrong(case, values, np.asarray(result)) == 0
        result[-1] += 1
        assert collective.wrong(case, values, np.asarray(result)) == 1


def filled(values: Values, count: int, rank: int) -> np.ndarray:
    out = np.empty(count, values.dtype)
    values.fill(out, rank)
    return out


@pytest.mark.parametrize("name", ["float32", "int32", "uint8", "bfloat16"])
def test_mistakes_are_counted(name: str) -> None:
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    for size in (2, 3, 5):
        values = Values(dtype, "sum", size)
        rows = np.array([filled(values, 1000, rank).astype(np.float64) for rank in range(size)])
        right = rows.sum(axis=0)
        lost, doubled, displaced = right - rows[1], right + rows[0], np.roll(right, 4)
        wrong = [values.wrong_reduced(each.astype(dtype)) for each in (lost, doubled, lost + rows[0], displaced)]
        assert min(wrong) > 800
        assert not (rows[0] == rows[1]).any()
    floats = Values(np.dtype(np.float32), "avg", 2)
    assert floats.wrong_reduced(np.full(10, np.nan, np.float32)) == 10
    # Values repeat after a period, and a tensor may begin anywhere in it.
    later = filled(values, 2 * PERIOD + 100, 1)[PERIOD + 5 :]
    assert values.wrong(later, 1, PERIOD + 5) == 0 < values.wrong(later, 0, PERIOD + 5)


def test_wrong_results_of_a_step_are_counted() -> None:
    shapes = {"first": (3, 5), "scalar": (), "second": (5,), "third": (5, 3), "last": (2, 2, 2)}
    ranks = [Gradients(shapes, rank, 2) for rank in range(2)]
    for rank in ranks:
        rank.fill()
    mine = ranks[0]
    sums = [np.sum([rank.tensors[index] for rank in ranks], axis=0) for index in range(len(shapes))]
    assert mine.wrong(sums) == mine.wrong([np.concatenate([array.reshape(-1) for array in sums])]) == 0
    assert mine.wrong(mine.tensors) > 0.9 * elements(shapes), "nothing was reduced"
    one_off = [array.copy() for array in sums]
    one_off[2][0] += 1
    assert mine.wrong(one_off) == 1
    third, first = mine.names.index("third"), mine.names.index("first")
    swapped = list(sums)
    swapped[third], swapped[first] = sums[first].reshape(5, 3), sums[third].reshape(3, 5)
    assert mine.wrong(swapped) >= 20, "the results of two tensors of one size went to each other"
    assert mine.wrong(sums[:-1]) > 0, "one is missing"


def test_the_models_gradients_are_resnet50s() -> None:
    torch_models = pytest.importorskip("benchmarks.torch_models")
    shapes = {name: tuple(found.shape) for name, found in torch_models.ResNet50().named_parameters()}
    assert shapes == resnet50() and elements(shapes) == 25_557_032


# ---- figures and tables ----------------------------------------------------------------------------------------------


def record(**changes: Any) -> Record:
    known: dict[str, Any] = {
        **{"collective": "allreduce", "contestant": "collectives", "mode": "in-place", "size": 4_000_000},
        **{"count": 1_000_000, "dtype": "float32", "op": "sum", "root": -1, "ranks": 4, "factor": 1.5, "wrong": 0},
        **{"time": Summary(1000.0, 900.0, 1100.0, 800.0), "limit": 850.0},
    }
    return Record(**{**known, **changes})


def test_row_has_nccl_tests_columns() -> None:
    words = table.row(record(mode="out-of-place"), record()).split()
    assert words[:5] == ["4000000", "1000000", "float", "sum", "-1"]
    assert words[5:9] == words[9:13] == ["1000.00", "4.00", "6.00", "0"]
    assert words[13:] == ["850.00", "85", "85"]
    assert table.row(record(mode="out-of-place"), None).split()[9:13] == ["N/A"] * 4
    title = table.header(ALLREDUCE, 20, 5).splitlines()
    assert len(table.row(record(mode="out-of-place"), record())) == len(title[-1])
    assert "# Avg bus bandwidth    : 6" in table.closing([record()])
    assert "# Out of bounds values : 3 FAILED" in table.closing([record(wrong=3)])
    peers = [record(contestant="mpi", ratio=Summary(*ratios)) for ratios in ((4.0, 3.0, 5.0, 2.0), (1.0,) * 4)]
    assert "mpi, in-place: 2.00 x ours (geometric mean of 2 rows)" in table.comparison([record(), *peers])


def test_figures_between_hosts() -> None:
    # The project's own figures: 53,687 microseconds for 64 MiB between two hosts, 201,327 for 16 MiB among four.
    assert round(hosts.line_rate(64 << 20, 2, hosts.rate("10gbit"))) == 53_687
    assert round(hosts.line_rate(16 << 20, 4, hosts.rate("1gbit"))) == 201_327
    names = [OURS, "mpi", "gloo"]
    times = {OURS: np.array([100.0, 200.0, 400.0]), "mpi": np.array([50.0, 150.0, 200.0])}
    shown = hosts.row(4096, names, times, None).split()
    assert shown == ["4096", "200", "(150-300)", "150", "(100-175)", "0.50x", "N/A", "N/A"]


def test_hosts_go_even_if_the_benchmark_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "tool"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n[ "$1" != on ] || exit 3\n')
    tool.chmod(0o755)
    monkeypatch.setenv(cluster.VARIABLE, str(tool))
    assert cluster.main(["--setup", "2x1", "-n", "1", "--peers", "mpi"]) == 3
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0] == "up 2 10gbit" and calls[1].startswith(f"on host1 {sys.executable} -m collectives.launch")
    assert calls[2:] == ["down"]


def test_plot_writes_png_and_svg(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from collectives.tools.bench.plot import plot

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


def test_memory_is_refused_with_figures() -> None:
    gib = 1 << 30
    assert device.check_memory(gib, False, 2, 6 * gib) is None
    problem = device.check_memory(gib, True, 2, 6 * gib)
    assert problem is not None
    assert all(part in problem for part in ("-e 1073741824", "2 ranks", "8.0 GiB", "6.0 GiB", "smaller -e"))


# ---- command lines ---------------------------------------------------------------------------------------------------


def test_flags_are_nccl_tests() -> None:
    def parse(words: str) -> cli.Settings:
        return cli.settings(cli.parser("benchmarks.allreduce", ALLREDUCE, PEERS), words.split())

    settings = parse("")
    assert (settings.sizes, settings.iterations, settings.warmup) == ((32 << 20,), 20, 5)
    assert (settings.dtypes, settings.ops, settings.memories) == (("float32",), ("sum",), ("private",))
    settings = parse("-b 64K -e 1M -f 4 -n 3 -w 0 -d half,int32 -o sum,avg -c 0 -z 0 --peers gloo,mpi --algorithm ring")
    assert settings.sizes == (65536, 262144, 1048576)
    assert (settings.dtypes, settings.ops) == (("float16", "int32"), ("sum", "avg"))
    assert (settings.peers, settings.algorithms) == (("gloo", "mpi"), ("ring",))
    assert (settings.iterations, settings.warmup, settings.check) == (3, 0, False)
    assert parse("-b 10 -e 30 -i 10").sizes == (10, 20, 30)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("-b 4x", "-b/--minbytes"),
        ("-b 2K -e 1K", "-e/--maxbytes"),
        ("-n 0", "-n/--iters"),
        ("-d quaternion", "quaternion"),
        ("-o mean", "mean"),
        ("--peers ,", "--peers"),
        ("--algorithm circle", "circle"),
        ("--json no/such/folder/file.json", "no/such/folder"),
        ("--device cuda", "argument --device: no driver: install one"),
        ("--device cuda --peers mpi", "does not run on --device"),
        ("--device cuda --memory private,mapped", "--memory: mapped is memory of the host"),
    ],
)
def test_a_wrong_flag_is_named(
    words: str, named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "why_not", lambda name: "no driver: install one" if words == "--device cuda" else None)
    with pytest.raises(SystemExit) as ended:
        cli.settings(cli.parser("benchmarks.allreduce", ALLREDUCE, PEERS), words.split())
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert named in shown.err and shown.err.count("error:") == 1 and shown.out == ""
    monkeypatch.setenv("PMI_RANK", "1")
    with pytest.raises(SystemExit):
        cli.settings(cli.parser("benchmarks.allreduce", ALLREDUCE, PEERS), words.split())
    assert capsys.readouterr() == ("", ""), "the other ranks stay silent"


def test_errors_of_a_program() -> None:
    assert "3 is not a rank" in run("broadcast", "-r", "3", expect=2).stderr
    assert "GiB" in run("allreduce", "-b", "900000G", "-e", "900000G", expect=2).stderr


# ---- whole runs ------------------------------------------------------------------------------------------------------

SIZES = "-b 4 -e 4K -f 32 -n 2 -w 1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "flags", "expected"),
    [
        ("allreduce", f"{SIZES} -d float,half,bfloat16,int32 --peers prototype", "# prototype: needs two ranks"),
        ("broadcast", f"{SIZES} --memory mapped,private", "memory mapped,private"),
        ("sendrecv", f"{SIZES} -d float,half,bfloat16,int32", "# Avg bus bandwidth"),
        ("latency", "-e 64 -n 2 -m 5 --memory private,mapped --persistent", "persistent, mapped"),
        ("memory", "-b 64K -e 256K -n 100", "resident memory grew by"),
        ("memory", "--operations 1000 --allocations 1000", "allocations"),
        ("gradients", "--model mlp -n 2 -w 1 --memory mapped,private --persistent", "persistent, private"),
        ("gradients", "--model small -n 2 -w 0 --blocking --out-of-place", "1000 tensors of one element"),
        ("overlap", "-b 64K -n 2 -w 1", "in synchronize"),
        ("waiting", "-s 0.1", "wake-ups a second"),
    ],
)
def test_one_rank_runs_without_a_launcher(program: str, flags: str, expected: str, tmp_path: Path) -> None:
    written = tmp_path / "results.json"
    done = run(program, *flags.split(), "--json", str(written))
    assert expected in done.stdout and "FAILED" not in done.stdout
    assert "\x1b" not in done.stderr, "a progress bar, and no terminal"
    content = json.loads(written.read_text())
    assert (content["benchmark"], content["ranks"]) == (program, 1)
    assert not any(found.get("wrong") for found in content.get("records", []))
    if flags.startswith(SIZES):
        assert "# Out of bounds values : 0 OK" in done.stdout
        ours = [found for found in content["records"] if found["contestant"] == "collectives"]
        assert ours and all(found["wrong"] == 0 and found["time"]["median"] > 0 for found in ours)


def test_the_page_of_peers_tells_each_peer_that_is_faster() -> None:
    def record(contestant: str, size: int, ratio: float) -> dict[str, Any]:
        median = {"median": ratio}
        return {"mode": "in-place", "contestant": contestant, "size": size, "time": {"median": 2.0}, "ratio": median}

    compared: list[compare.Compared] = []
    records = [
        *(record("collectives", size, 1) for size in (4, 1024)),
        *(record("collectives, private", size, 2) for size in (4, 1024)),
        record("mpi", 4, 0.5),
        record("mpi", 1024, 1.5),
    ]
    rows = compare.table({"An MPI": {"records": records}}, "allreduce", 2, compared)
    assert rows[2:4] == ["| 4 | 2.0 | 2.00 | 0.50 |", "| 1K | 2.0 | 2.00 | 1.50 |"]
    assert compare.counted(compared)[2:] == ["| An MPI | 1, 0, 3 | 0, 0, 0 | 0, 0, 0 |"]
    assert compare.losses(compared)[2:] == [
        "| allreduce, 2 ranks, mapped | 4 (up to 2.0 times) |",
        "| allreduce, 2 ranks, private | 4 to 1K (up to 4.0 times) |",
    ]
