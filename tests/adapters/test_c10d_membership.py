"""Groups whose members change: torchft's ``configure``, c10d's reconfiguration."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")
distributed = pytest.importorskip("torch.distributed")

import torch.distributed as dist  # noqa: E402
from mpi4py import MPI  # noqa: E402

from collectives import InvalidArgumentError, NotInitializedError, OperationError  # noqa: E402
from collectives.c10d import ProcessGroup, get_reconfigure_handle, reconfigure  # noqa: E402
from tests.adapters.c10d_ranks import BOUND, default_group, rank, size  # noqa: E402


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    group = ProcessGroup(timeout=BOUND)
    yield group
    MPI.COMM_WORLD.Barrier()
    group.shutdown()


@pytest.fixture(scope="module")
def handles(group: Any) -> list[str]:
    return MPI.COMM_WORLD.allgather(group.get_reconfigure_handle())


def total(group: Any) -> int:
    """The sum of what each member contributes, by which the members can be told."""
    tensor = torch.tensor([1 << rank()])
    group.allreduce([tensor]).wait()
    return int(tensor)


EVERYONE = (1 << size()) - 1


def test_a_group_without_members_says_so(group: Any) -> None:
    with pytest.raises(NotInitializedError, match="has no members yet"):
        group.allreduce(torch.ones(1))


def test_shrink_grow_reorder_merge_and_divide(group: Any, handles: list[str]) -> None:
    reconfigure(1, handles, group=group)
    assert total(group) == EVERYONE and (group.rank(), group.size()) == (rank(), size())
    if rank() < size() - 1:
        reconfigure(2, handles[:-1], group=group)
        assert total(group) == EVERYONE >> 1 and (group.rank(), group.size()) == (rank(), size() - 1)
    else:
        reconfigure(3, handles[-1:], group=group)
        assert total(group) == 1 << rank() and (group.rank(), group.size()) == (0, 1)
    reconfigure(4, handles[::-1], group=group)
    assert total(group) == EVERYONE and group.rank() == size() - 1 - rank()
    reconfigure(5, set(handles), group=group)
    assert total(group) == EVERYONE and group.rank() == sorted(handles).index(handles[rank()])


def test_a_number_that_was_used_and_foreign_handles_are_refused_and_the_group_stays(
    group: Any, handles: list[str]
) -> None:
    with pytest.raises(OperationError, match="uuid 5 was already used"):
        reconfigure(5, handles, group=group)
    with pytest.raises(InvalidArgumentError, match="that include this process's"):
        reconfigure(6, [handle for handle in handles if handle != handles[rank()]], group=group)
    assert total(group) == EVERYONE


def test_an_aborted_group_comes_back(group: Any, handles: list[str]) -> None:
    MPI.COMM_WORLD.Barrier()
    group.abort()
    with pytest.raises(NotInitializedError):
        group.allreduce(torch.ones(1))
    reconfigure(7, handles, timeout=timedelta(seconds=30), group=group)
    assert total(group) == EVERYONE and group.errored() is None


def test_who_has_not_heard_of_a_change_reaches_nothing_of_it(group: Any, handles: list[str]) -> None:
    """The last rank still believes in the old members while the others have a world of their own."""
    reconfigure(8, handles, group=group)
    assert total(group) == EVERYONE
    if rank() < size() - 1:
        reconfigure(9, handles[:-1], group=group)
        assert total(group) == EVERYONE >> 1
        MPI.COMM_WORLD.Barrier()
        assert total(group) == EVERYONE >> 1
    else:
        MPI.COMM_WORLD.Barrier()
        with pytest.raises(RuntimeError):
            total(group)
        assert group.errored() is not None


def test_the_default_group_may_change_and_torch_follows(handles: list[str]) -> None:
    with default_group() as world:
        own = MPI.COMM_WORLD.allgather(get_reconfigure_handle())
        reconfigure(1, own[::-1])
        assert dist.get_rank() == size() - 1 - rank() and total(world) == EVERYONE
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
        model(torch.ones(2, 3)).sum().backward()


def test_configure_as_torchft_calls_it(group: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank() == 0 else None
    port = MPI.COMM_WORLD.bcast(store.port if store is not None else None)
    for quorum in range(3):
        group.configure(f"127.0.0.1:{port}/quorum/{quorum}", f"replica {rank()}", rank(), size(), quorum)
        assert total(group) == EVERYONE
    MPI.COMM_WORLD.Barrier()


def test_nothing_grows_with_the_number_of_changes(group: Any, handles: list[str]) -> None:
    def counts() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = None
    for number in range(100, 112):
        reconfigure(number, handles, group=group)
        assert total(group) == EVERYONE
        before = before or (counts() if number == 103 else None)
    after = counts()
    assert before is not None and after[0] <= before[0] + 1 and after[1] <= before[1] + 4


def test_a_name_that_only_some_ranks_have_used_before_makes_a_group_of_all() -> None:
    """torch counts its groups anew with each default group."""
    for members in ([0, size() - 1], list(range(size()))):
        with default_group():
            part = dist.new_group(members)
            if rank() in members:
                assert total(part) == sum(1 << member for member in members)
