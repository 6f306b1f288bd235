"""What happens to operations on GPU tensors when a rank dies, raises or disagrees, on emulated GPUs: under mpirun."""

from __future__ import annotations

import time
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

def refused(kind, text, call):
    try:
        call()
    except kind as error:
        assert text in str(error) and f"rank {rank}" in str(error), error
    else:
        raise SystemExit("no error")

def goes_on():
    check(hvd.allreduce(full(rank), op=hvd.Sum), sum(range(size)))
    assert device.violations == [] and device.failure is None, (device.violations, device.failure)

goes_on()
"""
BOUND = 20.0

WAYS = {
    "cuda-ipc": {"COLLECTIVES_DEVICE_HOST_UNTIL": "0"},
    "host": {"COLLECTIVES_DEVICE_TRANSPORT": "host"},
    "hosts": {"COLLECTIVES_DEVICE_HOST_UNTIL": "0", "COLLECTIVES_LOCAL_SIZE": "2"},
}
MEDIA = pytest.mark.parametrize(("way", "mpi"), [("cuda-ipc", "openmpi"), ("host", "mpich"), ("hosts", "openmpi")])


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


@MEDIA
def test_the_others_end_when_a_rank_is_killed(way: str, mpi: str) -> None:
    program = """
handles = [hvd.allreduce_async_(full(rank, 100_000), name=f"tensor {k}") for k in range(4)]
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
for handle in handles:
    maker.host(hvd.synchronize(handle))
maker.host(hvd.allreduce(full(rank)))
print("went on", flush=True)
"""
    started = time.monotonic()
    result = run_ranks(3, PREAMBLE + program, mpi=mpi, env=WAYS[way], timeout=60, expect=None)
    assert result.returncode != 0
    assert time.monotonic() - started < BOUND, str(result)
    assert not any("went on" in text for text in result.ranks), str(result)


@pytest.mark.parametrize("way", WAYS)
def test_mistakes_are_told_and_nothing_is_touched(way: str) -> None:
    """All in one program, which goes on after each."""
    program = """
def unchanged(call):
    # Rank 1 gives what lies in host memory.
    mine = np.full(1000, float(rank), np.float32) if rank == 1 else full(rank)
    refused(hvd.MismatchError, "device", lambda: call(mine))
    assert (mine == 1).all() if rank == 1 else (maker.host(mine) == rank).all()
    goes_on()

unchanged(lambda tensor: hvd.allreduce_(tensor, op=hvd.Sum))
unchanged(lambda tensor: hvd.synchronize(hvd.allreduce_async_(tensor, op=hvd.Sum, name="tensor")))
unchanged(lambda tensor: hvd.broadcast_(tensor, 0))
unchanged(lambda tensor: hvd.allgather(tensor))
unchanged(lambda tensor: hvd.grouped_allreduce_([full(rank), tensor], op=hvd.Sum))
assert hvd.allreduce(np.ones(3), op=hvd.Sum)[0] == size

for asynchronous in (False, True):
    def allreduce(tensor, **forced):
        if asynchronous:
            return hvd.synchronize(hvd.allreduce_async_(tensor, **forced))
        return hvd.allreduce_(tensor, **forced)

    mine = full(rank)
    refused(hvd.TransportError, "NCCL is not emulated among processes", lambda: allreduce(mine, transport="nccl"))
    goes_on()
    # Where another transport is forced by the environment, it is the algorithm that does not fit.
    refused((hvd.TransportError, hvd.InvalidArgumentError), "NCCL", lambda: allreduce(mine, algorithm="native"))
    refused(hvd.InvalidArgumentError, "fastest", lambda: allreduce(mine, algorithm="fastest"))
    refused(hvd.InvalidArgumentError, "pigeon", lambda: allreduce(mine, transport="pigeon"))
    goes_on()
    # One rank alone asks for something that no rank could have, or for something else than the others.
    refused(hvd.InvalidArgumentError if rank == 1 else hvd.MismatchError, "pigeon",
            lambda: allreduce(mine, transport="pigeon" if rank == 1 else None))
    refused(hvd.MismatchError, "transport", lambda: allreduce(mine, transport="host" if rank == 1 else None))
    refused(hvd.MismatchError, "algorithm", lambda: allreduce(mine, algorithm="ring" if rank == 1 else None))
    check(mine, rank)
    goes_on()
hvd.shutdown()
left = {what: number for what, number in device.held().items() if number}
assert left == {}, left
print("correct", flush=True)
"""
    result = run_ranks(3, PREAMBLE + program, env=WAYS[way], timeout=60)
    assert all("correct" in text for text in result.ranks), str(result)


@pytest.mark.parametrize(
    ("ending", "mpi"),
    [("", "openmpi"), ("hvd.shutdown()", "mpich"), ("del tensor; import gc; gc.collect()", "openmpi")],
    ids=["ends", "shuts-down", "drops"],
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
