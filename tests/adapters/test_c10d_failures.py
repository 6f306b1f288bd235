"""What fails over our backend raises on every rank, wherever a program waits, and the next operations are right."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed")

import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives as functional  # noqa: E402
from mpi4py import MPI  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from collectives.base.errors import CollectiveTimeoutError, MismatchError, NotInitializedError, RankFailedError  # noqa: E402
from collectives.c10d import work as c10d_work  # noqa: E402
from tests.adapters.c10d_ranks import default_group, rank, size  # noqa: E402
from tests.support.interrupting import interrupted  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[Any]:
    with default_group(timeout=timedelta(seconds=20)) as group:
        yield group


@pytest.fixture(autouse=True)
def works_afterwards(world: Any) -> Iterator[None]:
    """No operation of a test is left over on some rank, and the numbers of the next ones are right."""
    yield
    check_sum()


def check_sum(group: Any = None) -> None:
    for tensor in (torch.full((5,), rank() + 1.0), torch.full((50_000,), rank() + 1.0)):
        dist.all_reduce(tensor, group=group)
        assert (tensor == size() * (size() + 1) / 2).all()


def wait_for_two(tensor: Any) -> None:
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(tensor)
        dist.all_reduce(torch.ones(3))
    manager.wait()


def wait_for_a_block(tensor: Any) -> None:
    fine = torch.full((3,), rank() + 1.0)
    with pytest.raises(MismatchError), dist._coalescing_manager(device=torch.device("cpu")):
        dist.broadcast(tensor, 0)
        dist.all_reduce(fine)
    assert (fine == size() * (size() + 1) / 2).all()  # the block has ended, and with it all of its operations
    raise MismatchError


def share(tensor: Any) -> None:
    dist.reduce_scatter_tensor(torch.empty_like(tensor), torch.cat([tensor] * size()))


ORIGINAL: dict[str, Callable[[Any], Any]] = {
    "sync": dist.all_reduce,
    "async": lambda tensor: dist.all_reduce(tensor, async_op=True).wait(),
    "result": lambda tensor: dist.all_reduce(tensor, async_op=True).result(),
    "functional": lambda tensor: functional.wait_tensor(functional.all_reduce(tensor, "sum", dist.group.WORLD)),
    "grouped": lambda tensor: dist.group.WORLD.allreduce_coalesced([torch.ones(3), tensor]).wait(),
    "coalesced": wait_for_two,
    "block": wait_for_a_block,
    "broadcast": lambda tensor: dist.broadcast(tensor, 0),
    "reduce": lambda tensor: dist.reduce(tensor, 0),
    "reduce_scatter": share,
    "all_gather": lambda tensor: dist.all_gather_into_tensor(torch.cat([tensor] * size()), tensor),
}


def tensor_unlike(difference: str) -> Any:
    return (
        torch.ones(4 + rank()) if difference == "count" else torch.ones(4, dtype=(torch.half, torch.int8)[rank() % 2])
    )


@pytest.mark.parametrize("difference", ["count", "dtype"])
@pytest.mark.parametrize("how", ORIGINAL)
def test_a_mismatch_is_raised_as_what_it_is(how: str, difference: str) -> None:
    with pytest.raises(MismatchError):
        ORIGINAL[how](tensor_unlike(difference))


@pytest.mark.parametrize("difference", ["count", "dtype"])
def test_a_future_raises_as_often_as_it_is_waited_for(difference: str) -> None:
    work = dist.all_reduce(tensor_unlike(difference), async_op=True)
    future = work.get_future()
    continued = future.then(lambda done: done.value()[0])
    for each in (future, continued, future):
        with pytest.raises(RuntimeError, match="MismatchError: rank"):
            each.wait()
    with pytest.raises(MismatchError):
        work.wait()
    assert work.is_completed() and not work.is_success() and isinstance(work.exception(), MismatchError)
    assert work.get_future_result().wait() == 3


def test_every_operation_that_fails_is_told_of() -> None:
    works = [dist.all_reduce(torch.ones(k + 1 + rank() * (k % 2)), async_op=True) for k in range(20)]
    for k, work in reversed([*enumerate(works)]):
        if k % 2:
            with pytest.raises(MismatchError):
                work.wait()
        else:
            work.wait()


def gradients(model: Any, seed: int, by: int | None = None) -> list[Any]:
    """Those of one backward pass with rank ``by``'s batch, this one's by default."""
    model.zero_grad()
    numbers = torch.Generator().manual_seed(10 * seed + (rank() if by is None else by))
    model(torch.randn(4, 6, generator=numbers)).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def check_gradients(model: Any, seed: int) -> None:
    plain = torch.nn.Linear(6, 3)
    plain.load_state_dict(model.module.state_dict())
    each = [gradients(plain, seed, by) for by in range(size())]
    for found, parts in zip(gradients(model, seed), zip(*each, strict=True), strict=True):
        torch.testing.assert_close(found, torch.stack(parts).mean(0))


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}])
def test_backward_of_ddp_raises_and_the_same_object_goes_on(options: dict[str, bool]) -> None:
    model = DistributedDataParallel(torch.nn.Linear(6, 3), **options)
    for seed in (0, 1):  # buckets are made anew, by a broadcast, in the second pass
        check_gradients(model, seed)
    for seed in (2, 3):
        first = dist.all_reduce(torch.ones(2), async_op=True) if rank() == 0 else None  # meets the others' bucket
        with pytest.raises(RuntimeError, match="MismatchError: rank"):
            gradients(model, seed)
        with pytest.raises(MismatchError):
            (first or dist.all_reduce(torch.ones(5), async_op=True)).wait()
        check_sum()  # after what the failed pass has left in flight: which parameters were used
        check_gradients(model, seed)


def test_a_hook_of_ddp_raises_and_the_same_object_goes_on() -> None:
    differing = 0

    def hook(_: Any, bucket: Any) -> Any:
        buffer = torch.ones(3 + rank()) if differing else bucket.buffer().div_(size())
        return dist.all_reduce(buffer, async_op=True).get_future().then(lambda done: done.value()[0])

    hook.__annotations__.clear()  # torch wants its own, and no texts
    model = DistributedDataParallel(torch.nn.Linear(6, 3))
    model.register_comm_hook(None, hook)
    for seed in range(3):
        differing = 1
        with pytest.raises(RuntimeError, match="MismatchError: rank"):
            gradients(model, seed)
        differing = 0
        check_gradients(model, seed)


def parts(tensor: Any) -> list[Any]:
    return [tensor.clone() for _ in range(size())]


CALLS: dict[str, Callable[[Any], Any]] = {
    "all_reduce": dist.all_reduce,
    "broadcast": lambda tensor: dist.broadcast(tensor, 0),
    "reduce": lambda tensor: dist.reduce(tensor, 0),
    "all_gather": lambda tensor: dist.all_gather(parts(tensor), tensor),
    "reduce_scatter": lambda tensor: dist.reduce_scatter(tensor.clone(), parts(tensor)),
    "gather": lambda tensor: dist.gather(tensor, parts(tensor) if rank() == 0 else None, 0),
    "scatter": lambda tensor: dist.scatter(tensor.clone(), parts(tensor) if rank() == 0 else None, 0),
    "all_to_all": lambda tensor: dist.all_to_all(parts(tensor), parts(tensor)),
    "all_reduce, async": lambda tensor: dist.all_reduce(tensor, async_op=True).wait(),
    "coalesced": wait_for_two,
}
UNFIT: dict[str, Callable[[], Any]] = {
    "layout": lambda: torch.eye(3).to_sparse_csr(),
    "dtype": lambda: torch.quantize_per_tensor(torch.ones(3, 3), 0.1, 0, torch.qint8),
}


@pytest.mark.parametrize("unfit", UNFIT)
@pytest.mark.parametrize("call", CALLS)
def test_what_one_rank_refuses_raises_on_every_rank(call: str, unfit: str) -> None:
    with pytest.raises((TypeError, ValueError, MismatchError)) as caught:
        CALLS[call](UNFIT[unfit]() if rank() == 0 else torch.ones(3, 3))
    assert rank() == 0 or "rank 0" in str(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda wrong: dist.all_gather([torch.zeros(3)] * (size() + wrong), torch.zeros(3)),
        lambda wrong: dist.all_gather_into_tensor(torch.zeros(3 * size() + wrong), torch.zeros(3)),
        lambda wrong: dist.reduce_scatter(torch.zeros(3), [torch.zeros(3)] * (size() + wrong)),
        lambda wrong: dist.reduce_scatter_tensor(torch.zeros(3), torch.zeros(3 * size() + wrong)),
        lambda wrong: dist.all_to_all_single(torch.zeros(size() + wrong), torch.zeros(size())),
        lambda wrong: dist.all_to_all([torch.zeros(3)] * (size() + wrong), [torch.zeros(3)] * size()),
        lambda wrong: dist.scatter(torch.zeros(3), [torch.zeros(3)] * (size() + wrong) if rank() == 0 else None),
        lambda wrong: dist.gather(torch.zeros(3), [torch.zeros(3)] * (size() + wrong) if rank() == 0 else None),
    ],
)
def test_wrong_numbers_on_one_rank_raise_on_every_rank(call: Callable[[int], Any]) -> None:
    with pytest.raises((ValueError, MismatchError)):
        call(rank() == 0)


def test_rows_that_another_rank_does_not_send_are_told_of() -> None:
    rows = 2 * size()
    received = [1, 3] + [2] * (size() - 2) if rank() == 0 else [2] * size()
    out, whole = torch.zeros(rows), torch.zeros(rows)
    if rank() == 0:
        with pytest.raises(MismatchError, match=r"expected \[1, 3"):
            dist.all_to_all_single(out, whole, received, [2] * size())
    else:
        dist.all_to_all_single(out, whole, received, [2] * size())


def test_a_bound_of_a_wait_passes_and_a_later_wait_returns() -> None:
    if rank() == 0:
        works = [dist.all_reduce(torch.ones(count), async_op=True) for count in (3, 40_000)]
        for work in works * 2:
            with pytest.raises(TimeoutError, match="it continues"):
                work.wait(timedelta(milliseconds=50))
            assert not work.is_completed() and work.exception() is None
        for other in range(1, size()):
            dist.send(torch.ones(1), other)
        for work in works:
            assert work.wait(timedelta(seconds=30))
    else:
        dist.recv(torch.zeros(1), 0)
        for count in (3, 40_000):
            dist.all_reduce(torch.ones(count))


@pytest.mark.parametrize(
    "call",
    [
        lambda group: dist.all_reduce(torch.ones(3), group=group),
        lambda group: dist.all_reduce(torch.ones(40_000), group=group, async_op=True).wait(),
        lambda group: dist.recv(torch.ones(3), 1, group),
    ],
    ids=["all_reduce", "async", "recv"],
)
def test_an_error_of_a_timeout_says_what_to_raise(call: Any) -> None:
    group = dist.new_group(timeout=timedelta(milliseconds=300))
    if rank() == 0:
        with pytest.raises(
            CollectiveTimeoutError, match=r"waited 0.3 s.* raise timeout= of init_process_group or new_group"
        ):
            call(group)
    MPI.COMM_WORLD.Barrier()
    dist.destroy_process_group(group)


def test_the_bound_of_a_group_can_be_changed(world: Any) -> None:
    group = dist.new_group()
    check_sum(group)
    if rank() == 0:
        group.set_timeout(timedelta(milliseconds=100))
        for call in (
            lambda: dist.all_reduce(torch.ones(3), group=group),
            lambda: dist.broadcast(torch.ones(3), 0, group),
        ):
            with pytest.raises(TimeoutError, match="it continues"):
                call()
    dist.barrier()
    if rank():
        dist.all_reduce(torch.ones(3), group=group)
        dist.broadcast(torch.ones(3), 0, group)
    else:
        group.set_timeout(timedelta(seconds=30))
    check_sum(group)
    dist.destroy_process_group(group)


def test_calls_after_the_end_of_a_group_raise() -> None:
    group = dist.new_group()
    check_sum(group)
    assert group.errored() is None
    dist.barrier()
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True) if rank() == 0 else None
    future = work.get_future() if work else None
    dist.destroy_process_group(group)
    if work is not None:
        with pytest.raises((NotInitializedError, RankFailedError)):
            work.wait()
        with pytest.raises(RuntimeError, match=r"NotInitializedError|RankFailedError"):
            future.wait()
    for call in (group.barrier, lambda: group.allreduce([torch.ones(3)]), lambda: group.send([torch.ones(1)], 0)):
        with pytest.raises(NotInitializedError):
            call()
    assert isinstance(group.errored(), NotInitializedError)
    group.shutdown()
    group.abort()


def test_an_abort_ends_what_the_others_wait_for() -> None:
    group = dist.new_group()
    check_sum(group)
    works = [dist.all_reduce(torch.ones(count), group=group, async_op=True) for count in (3, 40_000) if rank()]
    futures = [work.get_future() for work in works]
    if rank() == 0:
        group.abort()
        with pytest.raises(NotInitializedError):
            group.allreduce([torch.ones(3)])
    for work, future in zip(works, futures, strict=True):
        with pytest.raises(RuntimeError, match=r"RankFailedError: .*rank 0"):
            future.wait()
        with pytest.raises(RankFailedError, match="rank 0"):
            work.wait()
    if rank():
        with pytest.raises(RankFailedError, match="rank 0"):
            dist.all_reduce(torch.ones(3), group=group)
        assert isinstance(group.errored(), RankFailedError)
    assert group.errored() is not None
    dist.destroy_process_group(group)


def test_the_future_of_a_complete_work_is_complete_wherever_an_interrupt_comes() -> None:
    for at in itertools.count(1):
        work = c10d_work.Work([torch.ones(5)])
        if not interrupted(work.get_future, at, [c10d_work.__file__]):
            break
        assert work.get_future().done()
    assert at > 20
