"""Messages between ranks under mpirun: shared memory here, MPI where the hosts are taken to be several."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

import collectives
from collectives.base.errors import InvalidArgumentError
from tests.support.scenarios.point_to_point import SCENARIOS, Program, programs, run_program

pytestmark = pytest.mark.mpi
RANKS = {"openmpi": (1, 3), "mpich": (2,)}


def test_scenarios() -> None:
    collectives.init()
    for scenario in SCENARIOS:
        scenario(collectives.world())
        collectives.barrier()


@given(programs(4))
@settings(max_examples=25)
def test_a_program(program: Program) -> None:
    """On as many ranks as there are: a message from or to another one stays away."""
    world = collectives.world()
    kept = tuple(one for one in program.messages if max(one.source, one.target) < world.size)
    run_program(world, Program(world.size, kept, program.order, program.posted))


def test_the_functions_of_the_default_world() -> None:
    rank, size = collectives.rank(), collectives.size()
    following, before = (rank + 1) % size, (rank - 1) % size
    mine, into, status = np.full(3, rank), np.zeros(3, int), collectives.Status()
    handle = collectives.isend(mine, following, 1)
    receiving = collectives.irecv(into, before, 1)
    assert collectives.synchronize(receiving) is into and (into == before).all()
    collectives.synchronize(handle)
    assert collectives.poll(handle) and receiving.status.source == before
    got = collectives.sendrecv(mine, following, None, before, status=status)
    assert (got == before).all() and status.source == before
    collectives.send(mine, rank)
    assert (collectives.recv(None, collectives.ANY_SOURCE, collectives.ANY_TAG) == rank).all()


def test_ranks_of_a_process_set_are_those_of_the_whole_world() -> None:
    size = collectives.size()
    members = collectives.add_process_set(range(size - 1, -1, -2))
    if members.included():
        last, status = size - 1, collectives.Status()
        if collectives.rank() == last:
            for rank in members.ranks or ():
                collectives.send(np.array([rank]), rank, process_set=members)
        assert collectives.recv(None, last, process_set=members, status=status) == collectives.rank()
        assert status.source == last
        if size > 1:
            with pytest.raises(InvalidArgumentError, match="dst: expected a rank of"):
                collectives.send(np.zeros(1), size - 2, process_set=members)
    collectives.remove_process_set(members)
