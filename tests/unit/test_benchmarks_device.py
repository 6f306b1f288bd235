"""The benchmarks' GPU buffers, with a CuPy that is NumPy: what is written is read, what is timed is waited for, whole
runs come right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from benchmarks import cli, device, gradients
from benchmarks.allgather import ALLGATHER
from benchmarks.allreduce import ALLREDUCE
from benchmarks.alltoall import ALLTOALL
from benchmarks.broadcast import BROADCAST
from benchmarks.collective import IN_PLACE, Case, Collective, Unavailable
from benchmarks.device import HOST, Cuda
from benchmarks.floor import floor
from benchmarks.measure import alternate
from benchmarks.peers import Cupyx, TorchNccl, connect
from benchmarks.prototype import place_of
from benchmarks.reducescatter import REDUCESCATTER

ROOT = Path(__file__).resolve().parents[2]


class FakeArray(np.ndarray):  # type: ignore[type-arg]
    """What the benchmarks use of CuPy's arrays beside what NumPy's have."""

    def set(self, values: np.ndarray) -> None:
        self[...] = values

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(copy_from_device_async=lambda source, nbytes: np.copyto(self, source.array), array=self)


class FakeCupy(SimpleNamespace):
    """The module; counts synchronisations."""

    def __init__(self, gpus: int = 1, nccl: int = 23007) -> None:
        self.used: list[int] = []
        self.waits = 0
        stream = SimpleNamespace(synchronize=self._wait)
        runtime = SimpleNamespace(getDeviceCount=lambda: gpus, memGetInfo=lambda: (7 << 30, 8 << 30))
        self.cuda = SimpleNamespace(
            Device=lambda index: SimpleNamespace(use=lambda: self.used.append(index)),
            get_current_stream=lambda: stream,
            runtime=runtime,
            nccl=SimpleNamespace(available=nccl > 0, get_version=lambda: nccl),
        )

    def _wait(self) -> None:
        self.waits += 1

    def zeros(self, shape: Any, dtype: Any) -> FakeArray:
        return np.zeros(shape, dtype).view(FakeArray)

    def asnumpy(self, array: np.ndarray) -> np.ndarray:
        return np.array(array)


class OneRank:
    """The ranks of a run of one, or one of several that never meet."""

    def __init__(self, size: int = 1) -> None:
        self.rank, self.size, self.local_size = 0, size, size

    def barrier(self) -> None: ...

    def maximum(self, values: np.ndarray) -> np.ndarray:
        return values

    def agree(self, problem: str | None) -> str | None:
        return problem


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", fake.cuda.nccl)
    return fake


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.bool_, np.complex128])
def test_what_is_written_is_read(cupy: FakeCupy, dtype: Any) -> None:
    memory = Cuda(5)
    assert cupy.used == [0] and memory.available() == 7 << 30
    array = memory.zeros(1003, np.uint8)[: 1003 // 16 * 16].view(dtype)
    values = (np.arange(array.size) % 2).astype(dtype)
    memory.fill(array, lambda out: out.__setitem__(slice(None), values))
    found = memory.read(array)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, values)


def test_a_call_lasts_until_its_stream_is_done(cupy: FakeCupy) -> None:
    memory, order = Cuda(0), []
    calls = [lambda name=name: order.append((name, cupy.waits)) for name in "ab"]
    seconds = alternate(OneRank(), calls, 1, 3, lambda: None, memory=memory)  # type: ignore[arg-type]
    assert seconds.shape == (2, 3)
    rounds = {first + second for (first, _), (second, _) in zip(order[::2], order[1::2], strict=True)}
    assert len(order) == 8 and rounds == {"ab", "ba"}, "all in each round, in more than one order"
    waits = [count for _, count in order]
    # One wait before each call, for what spoils the caches, and one after it.
    assert np.diff(waits).tolist() == [2] * 7 and cupy.waits == waits[-1] + 1


def test_a_call_on_the_host_is_not_wrapped() -> None:
    call = object()
    assert HOST.finished(call) is call  # type: ignore[arg-type, comparison-overlap]


def test_the_limit_copies_within_the_device(cupy: FakeCupy) -> None:
    memory = Cuda(0)
    source, target = memory.zeros(100, np.uint8), memory.zeros(100, np.uint8)
    source[...] = 7
    copied = floor(source, target, 60, memory)()
    assert np.shares_memory(copied, target) and target.sum() == 7 * 60


@pytest.mark.parametrize(
    ("gpus", "nccl", "asked", "problem"),
    [
        (2, 22900, "", None),
        (1, 23007, "1", None),
        (1, 23007, "", "NCCL_MULTI_RANK_GPU_ENABLE"),
        (1, 22900, "1", "2.30"),
        (2, 0, "1", "pip install"),
    ],
)
def test_who_may_share_a_gpu(
    monkeypatch: pytest.MonkeyPatch, gpus: int, nccl: int, asked: str, problem: str | None
) -> None:
    fake = FakeCupy(gpus, nccl)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", fake.cuda.nccl)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", asked)
    found = Cuda(0).shared_by(2)
    assert found is None if problem is None else problem in str(found)
    if problem:
        reason = connect("cupyx", OneRank(2), Cuda(0))  # type: ignore[arg-type]
        assert isinstance(reason, str) and reason.startswith("cupyx: ") and problem in reason


class OneRankBackend:
    """cupyx.distributed's calls for one rank: the input is the result."""

    def all_reduce(self, source: np.ndarray, target: np.ndarray, op: str) -> None:
        target[...] = source

    def all_gather(self, source: np.ndarray, target: np.ndarray, count: int) -> None:
        target[:count] = source

    def reduce_scatter(self, source: np.ndarray, target: np.ndarray, count: int, op: str) -> None:
        target[...] = source[:count]

    def all_to_all(self, source: np.ndarray, target: np.ndarray) -> None:
        assert source.shape[0] == target.shape[0] == 1
        target[...] = source

    def broadcast(self, array: np.ndarray, root: int) -> None: ...


@pytest.mark.parametrize(
    "collective", [ALLREDUCE, ALLGATHER, BROADCAST, REDUCESCATTER, ALLTOALL], ids=lambda collective: collective.name
)
def test_cupyx_as_its_users_call_it(cupy: FakeCupy, collective: Collective) -> None:
    peer = Cupyx()
    peer.backend = OneRankBackend()
    send, work = (Cuda(0).zeros(12, np.float32) for _ in range(2))
    send[...] = work[...] = np.arange(12)
    case = Case(np.dtype(np.float32), "sum", 0, 0, 1, 12, send, work)
    for mode in collective.modes:
        if collective is BROADCAST and mode != IN_PLACE:
            continue
        np.testing.assert_array_equal(collective.cupyx(peer, case, mode)(), np.arange(12))
    halves = Case(
        np.dtype(ml_dtypes.bfloat16), "sum", 0, 0, 1, 6, send.view(ml_dtypes.bfloat16), work.view(ml_dtypes.bfloat16)
    )
    with pytest.raises(Unavailable, match="bfloat16"):
        collective.cupyx(peer, halves, IN_PLACE)


def test_torch_over_nccl_differs_from_gloo_in_the_backend_only() -> None:
    assert (TorchNccl.backend, TorchNccl.name, TorchNccl.calls) == ("nccl", "torch", "torch")


@pytest.mark.parametrize("words", ["--peers nccl", "--device cuda --peers mpi", "--device cuda --peers gloo"])
def test_peers_belong_to_devices(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "why_not", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        cli.settings(cli.parser("allreduce", True, False), words.split())
    assert ended.value.code == 2 and "does not run on --device" in capsys.readouterr().err


def test_mapped_memory_is_of_the_host(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "why_not", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        cli.settings(cli.parser("allreduce", True, False), ["--device", "cuda", "--memory", "private,mapped"])
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and "--memory: mapped is memory of the host" in shown and "--device cuda" in shown


def test_memory_that_other_ranks_can_map(monkeypatch: pytest.MonkeyPatch) -> None:
    (mapped,) = device.memories("cpu", 0, ("mapped",)).values()
    array = mapped.zeros((3, 5), np.float32)
    assert array.shape == (3, 5) and array.dtype == np.float32 and not array.any()
    array[1, 2] = 7
    place = place_of(array[1:])
    assert place is not None
    process, descriptor, offset = place
    assert process == os.getpid()
    found = np.frombuffer(os.pread(descriptor, 40, offset), np.float32)
    assert found[2] == 7 and np.count_nonzero(found) == 1
    assert mapped.zeros(0, np.uint8).size == 0


def test_private_memory_is_never_measured_as_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place_of(np.zeros(8 << 20, np.uint8)) is None
    monkeypatch.setattr(device.collectives, "empty", np.empty)
    with pytest.raises(MemoryError, match="private memory for 12 bytes"):
        device.Mapped().zeros(3, np.float32)


@pytest.mark.parametrize(
    "program", ["allreduce", "allgather", "broadcast", "reducescatter", "alltoall", "latency", "gradients"]
)
def test_without_a_gpu_each_says_so_in_one_line(program: str) -> None:
    run = (
        "import sys; from benchmarks import cli; cli.why_not = lambda device: 'no driver: install one';"
        f"import runpy; sys.argv = ['x', '--device', 'cuda']; runpy.run_module('benchmarks.{program}', "
        f"run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", run], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2 and done.stdout == "", done
    assert done.stderr.startswith(f"benchmarks.{program}: error: argument --device: no driver: install one"), (
        done.stderr
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        "allreduce -b 4 -e 64K -f 64 -n 2 -w 1 -o sum,avg -d float,bfloat16",
        "broadcast -b 4K -e 4K -n 2",
        "latency -m 3 -n 3",
    ],
)
def test_whole_runs(words: str) -> None:
    """One rank, on arrays that the engine takes for NumPy's."""
    program, *arguments = words.split()
    run = (
        "import runpy, sys; from tests.unit.test_benchmarks_device import FakeCupy; sys.modules['cupy'] = FakeCupy();"
        "from benchmarks import cli; cli.why_not = lambda device: None;"
        f"sys.argv = ['x', '--device', 'cuda', *{arguments!r}]; runpy.run_module('benchmarks.{program}', "
        f"run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", run], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if program != "latency":
        assert "device cuda" in done.stdout and "0 OK" in done.stdout, done.stdout


def test_the_gradients_step_on_the_device(cupy: FakeCupy) -> None:
    made = gradients.Gradients({"a": (3, 5), "b": (7,)}, 0, 1, device.memory("cuda", 0))  # type: ignore[arg-type]
    assert all(isinstance(tensor, FakeArray) for tensor in made.tensors)
    made.fill()
    assert made.wrong(made.tensors) == 0
    made.tensors[0][-1] += 1
    assert made.wrong(made.tensors) == 1
