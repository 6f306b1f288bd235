"""Worlds of other shapes: pretended hosts, messages only, windows only, subsets, several inits, no MPI library at
all."""

from __future__ import annotations

import sys

import pytest

from tests.support.launching.mpirun import IMPLEMENTATIONS, ROOT, run_command, run_ranks

SCENARIOS = ROOT / "tests" / "mpi" / "test_world.py"
MESSAGES = ROOT / "tests" / "mpi" / "test_point_to_point.py"


def test_pretended_hosts() -> None:
    run_ranks(3, SCENARIOS, env={"COLLECTIVES_LOCAL_SIZE": "2"}, timeout=150)


def test_messages_only() -> None:
    run_ranks(3, SCENARIOS, mpi="mpich", env={"COLLECTIVES_TRANSPORT": "mpi"}, timeout=150)


@pytest.mark.parametrize("mpi", IMPLEMENTATIONS)
def test_point_to_point_messages_through_mpi(mpi: str) -> None:
    run_ranks(3, MESSAGES, mpi=mpi, env={"COLLECTIVES_LOCAL_SIZE": "1", "COLLECTIVES_NETWORK": "mpi"}, timeout=150)


def test_ranks_know_where_they_are() -> None:
    program = """
import collectives.horovod as hvd
from mpi4py import MPI
hvd.init()
rank = MPI.COMM_WORLD.rank
assert (hvd.rank(), hvd.size()) == (rank, 5)
assert (hvd.local_rank(), hvd.local_size()) == (rank % 2, 2 if rank < 4 else 1)
assert (hvd.cross_rank(), hvd.cross_size()) == (rank // 2, 3 if rank % 2 == 0 else 2)
assert not hvd.is_homogeneous()
"""
    run_ranks(5, program, env={"COLLECTIVES_LOCAL_SIZE": "2"}, timeout=60)


@pytest.mark.parametrize("mpi", IMPLEMENTATIONS)
def test_init_again_and_the_programs_own_mpi(mpi: str) -> None:
    program = """
import numpy as np
from mpi4py import MPI
import collectives as hvd

comm = MPI.COMM_WORLD
request = comm.irecv(source=(comm.rank + 1) % comm.size, tag=3)
for attempt in range(5):
    assert not hvd.is_initialized()
    hvd.init()
    hvd.init()
    assert hvd.is_initialized() and hvd.size() == comm.size
    assert hvd.allreduce(comm.rank, average=False) == sum(range(comm.size))
    hvd.shutdown()
    hvd.shutdown()
    for call in (hvd.rank, hvd.barrier, lambda: hvd.allreduce(1.0)):
        try:
            call()
        except hvd.NotInitializedError as error:
            assert isinstance(error, ValueError) and isinstance(error, RuntimeError) and "shut down" in str(error)
        else:
            raise AssertionError("not refused")
comm.send("mine", dest=(comm.rank - 1) % comm.size, tag=3)
assert request.wait() == "mine"
assert comm.allreduce(1) == comm.size and not MPI.Is_finalized()

half = comm.Split(comm.rank % 2, comm.rank)
hvd.init(half)
assert (hvd.rank(), hvd.size()) == (half.rank, half.size)
assert hvd.allreduce(comm.rank, average=False) == sum(range(comm.rank % 2, comm.size, 2))
hvd.shutdown()
if comm.rank in (0, 2):
    hvd.init([2, 0])
    assert hvd.size() == 2 and hvd.rank() == {2: 0, 0: 1}[comm.rank]
    assert (hvd.allgather(np.array([comm.rank])) == [2, 0]).all()
    hvd.shutdown()
for wrong, kind in (([0, 9], ValueError), ("abc", TypeError), (3, TypeError)):
    try:
        hvd.init(wrong)
    except kind as error:
        assert isinstance(error, hvd.CollectivesError) and "comm" in str(error)
    else:
        raise AssertionError("not refused")
"""
    run_ranks(4, program, mpi=mpi, timeout=60)


def test_one_rank_needs_neither_launcher_nor_mpi() -> None:
    program = """
import sys
sys.modules["mpi4py.MPI"] = None  # as if no MPI library could be loaded
sys.modules.pop("mpi4py.MPI")
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "mpi4py.MPI":
            raise RuntimeError("cannot load MPI library")
sys.meta_path.insert(0, Blocker())
import numpy as np
import collectives as hvd
hvd.init()
assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_size()) == (0, 1, 0, 1)
x = np.arange(5.0)
assert (hvd.allreduce(x) == x).all() and (hvd.allgather(x) == x).all() and (hvd.broadcast(x, 0) == x).all()
assert (hvd.reducescatter(x) == x).all() and (hvd.alltoall(x) == x).all()
assert (hvd.allreduce_(x.copy(), postscale_factor=2.0) == 2 * x).all()
assert hvd.allgather_object("a") == ["a"] and hvd.broadcast_object("b") == "b"
hvd.barrier()
assert "mpi4py.MPI" not in sys.modules
"""
    run_command([sys.executable, "-c", program])


def test_settings_that_differ_between_ranks_are_named_on_every_rank() -> None:
    program = """
import os
os.environ["COLLECTIVES_SEGMENT"] = "4K" if os.environ.get("OMPI_COMM_WORLD_RANK") == "1" else "8K"
import collectives as hvd
try:
    hvd.init()
except hvd.MismatchError as error:
    assert "COLLECTIVES_SEGMENT differs" in str(error) and "rank 0: 8192, rank 1: 4096" in str(error), error
    print("named")
"""
    result = run_ranks(2, program, timeout=40)
    assert all("named" in text for text in result.ranks), str(result)
