"""The benchmarks of the engine: the models' shapes, the check of a step, the arithmetic, the tables; whole runs of one
rank."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import gradients, memory, overlap, tuning
from benchmarks.gradients import Gradients
from benchmarks.models import MODELS, elements, mlp, resnet50, small
from benchmarks.session import counters, per_step
from benchmarks.waiting import Usage

ROOT = Path(__file__).resolve().parents[2]
SHAPES = {"first": (3, 5), "scalar": (), "second": (5,), "third": (5, 3), "last": (2, 2, 2)}


def test_resnet50_is_what_its_paper_and_torchvision_say() -> None:
    shapes = resnet50()
    assert len(shapes) == 161
    assert elements(shapes) == 25_557_032
    assert next(iter(shapes)) == "conv1.weight" and shapes["conv1.weight"] == (64, 3, 7, 7)
    assert list(shapes)[-2:] == ["fc.weight", "fc.bias"]
    assert shapes["layer1.0.downsample.0.weight"] == (256, 64, 1, 1)
    assert shapes["layer3.5.conv2.weight"] == (256, 256, 3, 3)
    assert shapes["layer4.2.conv3.weight"] == (2048, 512, 1, 1)
    assert sum(len(shape) == 4 for shape in shapes.values()) == 53
    assert sum("downsample" in name for name in shapes) == 4 * 3


def test_the_other_models() -> None:
    assert {prod(shape) * 4 for shape in small().values()} == {1024}
    assert len(small()) == 1000
    assert max(prod(shape) for shape in mlp().values()) * 4 == 16 << 20
    assert len(mlp()) == 8
    assert set(MODELS) == {"resnet50", "small", "mlp"}


def reduced(size: int) -> tuple[Gradients, list[np.ndarray]]:
    """A rank's gradients and, from NumPy alone, the sums over all ranks."""
    ranks = [Gradients(SHAPES, rank, size) for rank in range(size)]
    for rank in ranks:
        rank.fill()
    return ranks[0], [np.sum([rank.tensors[index] for rank in ranks], axis=0) for index in range(len(SHAPES))]


def test_gradients_come_last_layer_first_in_memory_of_their_own() -> None:
    mine, _ = reduced(2)
    assert mine.names == list(SHAPES)[::-1]
    assert [tensor.shape for tensor in mine.tensors] == list(SHAPES.values())[::-1]
    assert mine.flat.size == elements(SHAPES)
    assert np.array_equal(np.concatenate([tensor.reshape(-1) for tensor in mine.tensors]), mine.flat)
    assert not any(np.shares_memory(mine.flat, tensor) for tensor in mine.tensors)
    mine.clear()
    assert not any(array.any() for array in (mine.flat, *mine.tensors))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_right_sums_are_right_in_pieces_and_in_one(size: int) -> None:
    mine, sums = reduced(size)
    assert mine.wrong(sums) == 0
    assert mine.wrong([np.concatenate([array.reshape(-1) for array in sums])]) == 0


def test_wrong_results_of_a_step_are_counted() -> None:
    mine, sums = reduced(2)
    assert mine.wrong(mine.tensors) > 0.9 * elements(SHAPES), (
        "nothing was reduced, and only a peer's zeros do not show it"
    )
    one_off = [array.copy() for array in sums]
    one_off[2][0] += 1
    assert mine.wrong(one_off) == 1
    third, first = mine.names.index("third"), mine.names.index("first")
    swapped = list(sums)
    swapped[third], swapped[first] = sums[first].reshape(5, 3), sums[third].reshape(3, 5)
    assert mine.wrong(swapped) >= 20, "the results of two tensors of one size went to each other"
    assert mine.wrong(sums[:-1]) > 0, "one is missing"


def test_the_peers_steps_reduce_every_tensor_once() -> None:
    mine, _ = reduced(2)
    seen: list[int] = []

    def allreduce(place: object, tensor: np.ndarray) -> None:
        seen.append(tensor.size)

    peer: Any = SimpleNamespace(comm=SimpleNamespace(Allreduce=allreduce), in_place=object())
    assert gradients.of_mpi(peer, mine)() is mine.tensors
    assert seen == [tensor.size for tensor in mine.tensors]
    seen.clear()
    assert gradients.of_flat(peer, mine)()[0] is mine.flat
    assert seen == [elements(SHAPES)]


def test_the_limit_copies_as_many_bytes() -> None:
    mine, _ = reduced(2)
    (copied,) = gradients.of_floor(mine)()
    assert copied.nbytes == mine.flat.nbytes
    assert not mine.flat.any()


def test_table_of_contestants() -> None:
    times = {"median": 20.0, "p25": 19.0, "p75": 21.0, "minimum": 18.0}
    ratios = {"median": 4.0, "p25": 3.5, "p75": 4.5, "minimum": 3.0}
    ours = {"contestant": "collectives", "time": times, "ratio": ratios, "bandwidth": 5.11, "wrong": 0}
    others = [{**ours, "contestant": "mpi", "wrong": 7}, {**ours, "contestant": "memcpy", "wrong": None}]
    title, *rows = gradients.table([ours, *others]).splitlines()
    assert title.strip("#").split() == ["contestant", "ms", "p25", "p75", "GB/s", "x", "ours", "p25", "p75", "#wrong"]
    assert rows[0].split() == ["collectives", "20.000", "19.000", "21.000", "5.11", "-", "-", "-", "0"]
    assert rows[1].split() == ["mpi", "20.000", "19.000", "21.000", "5.11", "4.00", "3.50", "4.50", "7"]
    assert rows[2].split()[-1] == "N/A"
    assert {len(row) for row in rows} == {len(title)}


def test_counters_are_copies_of_whole_numbers() -> None:
    class Statistics:
        __slots__ = ("_hidden", "note", "rounds", "tensors")

        def __init__(self) -> None:
            self.rounds, self.tensors, self.note, self._hidden = 10, 100, "text", 1

        def reset(self) -> None:
            """A method is no counter."""

    statistics = Statistics()
    before = counters(statistics)
    assert before == {"rounds": 10, "tensors": 100}
    statistics.rounds, statistics.tensors = 15, 905
    assert before["rounds"] == 10
    assert per_step(before, counters(statistics), 5) == {"rounds": 1.0, "tensors": 161.0}
    assert per_step({}, {"new": 5}, 5) == {"new": 1.0}


@pytest.mark.parametrize(
    ("both", "hidden"),
    [(10.0, 1.0), (15.0, 0.0), (12.5, 0.5), (20.0, -1.0)],
    ids=["all of it", "nothing", "half", "worse than one after the other"],
)
def test_hidden_share(both: float, hidden: float) -> None:
    assert overlap.hidden_share(5.0, 10.0, both) == hidden


def test_usage_between_two_moments() -> None:
    before, after = Usage(100.0, 7.0, 50), Usage(104.0, 8.0, 90)
    assert before.share(after) == 0.25
    assert before.wakes(after) == 10.0
    spent = Usage.now()
    assert overlap.run_python(1000) == sum(number & 7 for number in range(1000))
    assert Usage.now().processor >= spent.processor


def test_steps_while_tuning_are_all_shown() -> None:
    lines = tuning.lines_of(np.arange(1.0, 26.0), 10).splitlines()
    assert [line.split("|")[0].split() for line in lines] == [["1", "5.50"], ["11", "15.50"], ["21", "23.00"]]
    assert [float(word) for line in lines for word in line.split("|")[1].split()] == list(np.arange(1.0, 26.0))


def test_growth_is_looked_at_ten_times_over_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    monkeypatch.setattr(memory, "footprint", lambda: (1000 + 10 * len(calls), 7, 3 + len(calls) // 20))
    found = memory.grown(lambda: calls.append(None), 25)
    assert len(calls) == 26, "the first one only warms up"
    done = [25 * tenth // 10 for tenth in range(1, 11)]
    assert found == [[10 * calls, 0, (calls + 1) // 20] for calls in done]


def test_footprint_counts_mappings_and_descriptors() -> None:
    resident, mappings, descriptors = memory.footprint()
    assert resident > 1 << 20
    file = os.memfd_create("one more")
    os.ftruncate(file, 4096)
    # The mapping has a descriptor of its own.
    with mmap.mmap(file, 4096):
        _, more_mappings, more_descriptors = memory.footprint()
    os.close(file)
    assert more_mappings > mappings
    assert more_descriptors == descriptors + 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "flags", "expected"),
    [
        (
            "gradients",
            "--model mlp -n 2 -w 1 --peers memcpy --memory mapped,private --persistent",
            "persistent, private",
        ),
        ("gradients", "--model small -n 2 -w 0 --blocking --out-of-place", "1000 tensors of one element"),
        ("overlap", "-b 64K -n 2 -w 1", "in synchronize"),
        ("waiting", "-s 0.1", "wake-ups a second"),
        ("memory", "--operations 1000 --allocations 1000", "allocations"),
    ],
)
def test_one_rank_runs_without_a_launcher(program: str, flags: str, expected: str, tmp_path: Path) -> None:
    written = tmp_path / "results.json"
    command = [sys.executable, "-m", f"benchmarks.{program}", *flags.split(), "--json", str(written)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert expected in done.stdout
    content = json.loads(written.read_text())
    assert (content["benchmark"], content["ranks"]) == (program, 1)
    assert all(not record.get("wrong") for record in content.get("records", []))


def test_wrong_values_end_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        gradients, "ours", lambda mine, blocking, out_of_place: lambda: [array + 1 for array in mine.tensors]
    )
    with pytest.raises(SystemExit) as ended:
        gradients.main(["--model", "mlp", "-n", "1", "-w", "0"])
    assert ended.value.code == 1
