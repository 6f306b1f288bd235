"""What happens to operations on GPU tensors when a rank dies, raises or disagrees, on emulated GPUs: under mpirun."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes.test_engine_failures import MARKS
from tests.support.launching.mpirun import run_ranks

pytestmark = pytest.mark.usefixtures("kernels")

PREAMBLE = """
import os, signal, sys, time
import numpy as np
import collectives as hvd
from tests.support.emulated.ranks import own_device
from tests.support.scenarios.gpu_makers import EmulatedMaker

device = own_device(delays=None)
maker = EmulatedMaker(device)
hvd.init()
rank, size = hvd.rank(), hvd.size()

def full(value, count=1000):
    return maker.device(np.full(count, float(value), np.float32))

def check(tensor, value):
    assert (maker.host(tensor) == value).all(), maker.host(tensor)[:5]

def goes_on():
    check(hvd.allreduce(full(rank), op=hvd.Sum), sum(range(size)))
    assert device.violations == [] and device.failure is None, (device.violations, device.failure)

goes_on()
"""
BOUND = 20.0

WAYS = {
    "cuda-ipc": {"COLLECTIVES_DEVICE_HOST_UNTIL": "0"},
    "hosts": {"COLLECTIVES_DEVICE_HOST_UNTIL": "0", "COLLECTIVES_LOCAL_SIZE": "2"},
}
MEDIA = pytest.mark.parametrize(("way", "mpi"), [("cuda-ipc", "openmpi"), ("hosts", "mpich")])


@MEDIA
def test_the_others_are_told_when_a_rank_raises(way: str, mpi: str, tmp_path: Path) -> None:
    """Between operations that are in flight: all handles of the others that wait for it carry its traceback."""
    program = """
started = time.monotonic()
both = [hvd.allreduce_async_(full(rank, 10 ** k), op=hvd.Sum, name=f"both {k}") for k in range(6)]
if rank == 1:
    hvd.synchronize(both[0])
    until_marked("submitted 0")
    until_marked("submitted 2")
    raise ValueError("the model exploded")
tensor = full(rank)
late = [hvd.allreduce_async_(tensor, op=hvd.Sum, name="late"), hvd.allgather_async(full(rank), name="late too")]
mark(f"submitted {rank}")
for handle in late:
    try:
        hvd.synchronize(handle)
    except hvd.RankFailedError as error:
        assert "rank 1" in str(error) and "Traceback" in str(error) and "the model exploded" in str(error), error
    else:
        raise SystemExit("no error")
try:
    hvd.allreduce(full(rank))
except hvd.RankFailedError as error:
    assert time.monotonic() - started < 10, time.monotonic() - started
    print("told", flush=True)
"""
    result = run_ranks(
        3, PREAMBLE + MARKS + program, mpi=mpi, env=WAYS[way], timeout=60, expect=None, args=[str(tmp_path)]
    )
    assert result.returncode != 0
    assert all("told" in result.ranks[rank] for rank in (0, 2)), str(result)
    assert "the model exploded" in result.ranks[1]


@pytest.mark.parametrize(
    ("ending", "mpi"),
    [("hvd.shutdown()", "mpich"), ("del tensor; import gc; gc.collect()", "openmpi")],
    ids=["shuts-down", "drops"],
)
def test_a_program_may_end_while_the_gpu_is_at_work(ending: str, mpi: str) -> None:
    """What it has issued is done before the peers hear that it has left: they read its memory until then."""
    program = f"""
import threading
tensor = full(rank, 100_000)
gate = threading.Event()
if rank == 1:
    threading.Timer(0.5, gate.set).start()
    device.enqueue(device.current_stream(), gate.wait)
else:
    gate.set()
result = hvd.allreduce(tensor, op=hvd.Sum, transport="cuda-ipc")
if rank != 1:
    check(result, sum(range(size)))
    print("correct", flush=True)
{ending}
"""
    result = run_ranks(3, PREAMBLE + program, mpi=mpi, timeout=60)
    assert all("correct" in result.ranks[rank] for rank in (0, 2)), str(result)
    assert not any("Error" in text for text in result.ranks), str(result)
