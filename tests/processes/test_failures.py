"""What happens when a rank dies, raises, leaves, forks, is interrupted, or calls from two threads: under real
mpirun."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes.test_engine_failures import PREAMBLE
from tests.support.launching.mpirun import run_ranks
from tests.trials.interrupted import interrupt

BOUND = 20.0


def test_mpi_ends_without_messages_that_nobody_has_read() -> None:
    """Rank 0 ends long before rank 1, and neither calls shutdown(). UCX, under MPICH, complains of what it finds."""
    program = PREAMBLE + "time.sleep(0.5 * rank)\n"
    result = run_ranks(
        2, program, mpi="mpich", env={"COLLECTIVES_LOCAL_SIZE": "1", "MPIR_CVAR_NOLOCAL": "1"}, timeout=40
    )
    assert "UCX" not in str(result), str(result)


@pytest.mark.parametrize(("transport", "size"), [("direct-read", 3), ("window", 2), ("mpi", 3)])
def test_an_interrupt_in_the_middle_of_a_call_corrupts_nobody(transport: str, size: int) -> None:
    """Rank 1 is interrupted at many moments of in-place all-reduces, in every other world of those with handles, and
    then uses the memory that it freed."""
    program = f"""
class Interrupt(KeyboardInterrupt):
    pass

def on_alarm(number, frame):
    raise Interrupt("Ctrl-C")

signal.signal(signal.SIGALRM, on_alarm)
told = 0
for attempt in range(8):
    hvd.init()
    tensors, handles = [np.ones(400_000, np.float32) for _ in range(4)], []
    try:
        if rank == 1:
            signal.setitimer(signal.ITIMER_REAL, 0.002 + 0.0025 * attempt)
        while attempt % 2:
            hvd.allreduce_(tensors[0], average=True, transport="{transport}")
        while True:
            handles = [hvd.allreduce_async_(tensor, average=True, transport="{transport}") for tensor in tensors]
            for handle in handles:
                hvd.synchronize(handle)
    except Interrupt:
        assert rank == 1
    except hvd.RankFailedError as error:
        # Rank 1 fails if it is interrupted within a call, and leaves if between two.
        reasons = ("Interrupt", "rank 1 has shut down", "RankFailedError")
        assert any(reason in str(error) for reason in reasons), error
        told += 1
    del tensors, handles
    gc.collect()
    fresh = [np.full(400_000, 7.0, np.float32) for _ in range(8)]
    time.sleep(0.05)
    assert all((array == 7.0).all() for array in fresh)
    hvd.shutdown()
print("told", told)
sys.stdout.flush()
from mpi4py import MPI
# mpirun ends all ranks when the first one goes without finalising MPI, in which requests are pending.
MPI.COMM_WORLD.Barrier()
os._exit(0)
"""
    result = run_ranks(size, "import gc\n" + PREAMBLE + program, timeout=90, expect=None)
    assert all(f"told {0 if rank == 1 else 8}" in result.ranks[rank] for rank in range(size)), str(result)


@pytest.mark.parametrize("env", [{}, {"COLLECTIVES_LOCAL_SIZE": "1"}], ids=["memory", "hosts"])
def test_an_exchange_that_is_left_in_the_middle_leaves_nobody_in_it(env: dict[str, str], tmp_path: Path) -> None:
    """Rank 1 is interrupted while it gives its value, and lives on, far from MPI."""
    program = """
from dataclasses import dataclass
from collectives.base.interchange import exchangeable

@exchangeable
@dataclass
class Value:
    rank: int

    def __getattribute__(self, name):
        mark(f"{rank} is here")
        if rank == 1:
            until_marked("0 is here")
            until_marked("2 is here")
            raise KeyboardInterrupt
        return super().__getattribute__(name)

try:
    hvd.world()._control.exchange(Value(rank))
except KeyboardInterrupt:
    until_marked("0 is told")
    until_marked("2 is told")
except hvd.RankFailedError as error:
    assert "rank 1" in str(error) and "KeyboardInterrupt" in str(error), error
    print("told", flush=True)
    mark(f"{rank} is told")
    until_marked("0 is told")  # mpirun ends all ranks when the first one goes without finalising MPI
    until_marked("2 is told")
os._exit(0)
"""
    result = run_ranks(3, PREAMBLE + program, env=env, timeout=40, expect=None, args=[str(tmp_path)])
    assert all("told" in result.ranks[rank] for rank in (0, 2)), str(result)


@pytest.mark.parametrize(
    ("mpi", "ending", "code"),
    [("openmpi", "hvd.shutdown(); sys.exit(3)", 3), ("mpich", "raise KeyboardInterrupt", 130)],
    ids=["exits", "interrupted"],
)
def test_a_rank_that_ends_in_init_ends_the_job(mpi: str, ending: str, code: int) -> None:
    """While the others are yet to come: it must neither wait for them in MPI's finalisation, nor they for it."""
    program = f"""
import signal, sys, time
from mpi4py import MPI
import collectives as hvd

hvd.init  # whose first use imports the package

def on_alarm(number, frame):
    {ending}

if MPI.COMM_WORLD.Get_rank() == 1:
    signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
elif MPI.COMM_WORLD.Get_rank() == 0:
    time.sleep(30)
try:
    hvd.init()
finally:
    hvd.shutdown()  # must not make it forget that the others wait
"""
    assert run_ranks(3, program, mpi=mpi, timeout=28, expect=code).seconds < BOUND


@pytest.mark.parametrize(
    ("world", "env"),
    [("openmpi", {}), ("mpich", {"COLLECTIVES_LOCAL_SIZE": "1"}), ("tcp", {})],
    ids=["memory", "hosts", "without MPI"],
)
def test_init_may_be_interrupted_and_tried_again(world: str, env: dict[str, str]) -> None:
    """And calls and shutdown(): each rank is interrupted at random moments, while its peers wait for it."""
    result = interrupt(world, 3, 5, seed=0, timeout=120, env=env)
    assert "WRONG" not in f"{result.output}{result.ranks}", str(result)


def test_a_call_within_a_call_is_refused() -> None:
    """A signal handler that calls a collective, or shuts down, in the middle of one."""
    program = """
def on_alarm(number, frame):
    try:
        hvd.allreduce(data)
    except ValueError as error:
        assert "called a collective while the same thread was in one" in str(error), error
        print("refused")

if rank == 0:
    signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
else:
    time.sleep(1)
assert (hvd.allreduce(data, average=False) == sum(range(size))).all()
assert (hvd.allreduce(data, average=False) == sum(range(size))).all()
"""
    assert "refused" in run_ranks(2, PREAMBLE + program, timeout=40).ranks[0]
