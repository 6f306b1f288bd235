"""Every call of torch.distributed over our backend: results, layouts, dtypes, groups, asynchronous works."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed")

import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives as functional  # noqa: E402
from torch._C._distributed_c10d import (  # noqa: E402
    AllgatherOptions,
    AllreduceOptions,
    GatherOptions,
    ReduceOp,
    ReduceOptions,
    ScatterOptions,
)

from collectives.base.errors import MismatchError  # noqa: E402
from tests.adapters.c10d_ranks import default_group, rank, size  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[Any]:
    with default_group() as group:
        yield group


def of(other: int, count: int = 4, dtype: Any = torch.float32) -> Any:
    """Rank ``other``'s numbers."""
    return (torch.arange(count) % 3 + other + 1).to(dtype)


def every(count: int = 4, dtype: Any = torch.float32) -> list[Any]:
    return [of(other, count, dtype) for other in range(size())]


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_tensors_without_elements(shape: tuple[int, ...]) -> None:
    n, part = size(), torch.zeros(shape)
    whole = torch.zeros(shape[0] * n, *shape[1:])
    for is_async in (False, True):
        works = [
            dist.all_gather_into_tensor(whole, part, async_op=is_async),
            dist.all_gather([part.clone() for _ in range(n)], part, async_op=is_async),
            dist.all_reduce(part, async_op=is_async),
            dist.broadcast(part, 0, async_op=is_async),
            dist.reduce(part, 0, async_op=is_async),
            dist.reduce_scatter_tensor(part, whole, async_op=is_async),
            dist.reduce_scatter(part, [part.clone() for _ in range(n)], async_op=is_async),
            dist.all_to_all_single(whole, whole.clone(), async_op=is_async),
            dist.all_to_all([part.clone() for _ in range(n)], [part.clone() for _ in range(n)], async_op=is_async),
            dist.gather(part, [part.clone() for _ in range(n)] if rank() == 0 else None, 0, async_op=is_async),
            dist.scatter(part, [part.clone() for _ in range(n)] if rank() == 0 else None, 0, async_op=is_async),
        ]
        for work in works:
            assert work is None or work.wait()
    gathered = functional.all_gather_into_tensor_coalesced([part, of(rank())], dist.group.WORLD)
    assert (gathered[0] + 0).shape == whole.shape and torch.equal(gathered[1] + 0, torch.cat(every()))


def test_views_that_negate_their_memory() -> None:
    def negated() -> Any:
        return torch.complex(of(rank()), of(rank())).conj().imag

    total = -torch.stack(every()).sum(0)
    for tensor in (negated(), torch._neg_view(of(rank()))):
        assert tensor.is_neg()
        dist.all_reduce(tensor)
        assert torch.equal(tensor.resolve_neg(), total)
        dist.broadcast(tensor, 0)
        part = torch._neg_view(torch.zeros(4))
        dist.reduce_scatter_tensor(part, torch.cat([tensor.resolve_neg()] * size()))
        assert torch.equal(part.resolve_neg(), total * size())
    gathered = torch.empty(4 * size())
    dist.all_gather_into_tensor(gathered, negated())
    assert torch.equal(gathered, -torch.cat(every()))


def test_nan_in_an_input_is_found_where_torch_is_asked_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DIST_NAN_CHECK", "1")
    checked = dist.new_group()
    tensor = of(rank())
    dist.all_reduce(tensor, group=checked)
    assert torch.equal(tensor, torch.stack(every()).sum(0))
    dist.all_reduce(torch.ones(3, dtype=torch.int64), group=checked)
    bad, last = of(rank()), size() - 1
    if rank() == last:
        bad[1] = float("nan")
    calls = [
        lambda: dist.all_reduce(bad, group=checked),
        lambda: dist.all_gather_into_tensor(torch.empty(4 * size()), bad, group=checked),
        lambda: dist.all_gather([torch.empty(4) for _ in range(size())], bad, group=checked),
        lambda: dist.broadcast(bad, last, group=checked),
        lambda: dist.all_to_all([torch.empty(4) for _ in range(size())], [bad] * size(), group=checked),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=f"NaN found in input tensor of shape .* on rank {last}"):
            call()
    if last:
        received = torch.full((4,), float("nan")) if rank() else of(0)
        dist.broadcast(received, 0, group=checked)
        assert torch.equal(received, of(0))
    dist.destroy_process_group(checked)


def test_torch_knows_the_backend(world: Any) -> None:
    assert dist.get_backend() == "collectives" and (dist.get_rank(), dist.get_world_size()) == (rank(), size())
    assert world.name() == "collectives" and world.group_name == "0"
    assert dist.get_process_group_ranks(world) == list(range(size()))


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8]
)
@pytest.mark.parametrize("count", [0, 1, 1000, 100_000])
def test_all_reduce_sums(count: int, dtype: Any, is_async: bool) -> None:
    tensor = of(rank(), count, dtype)
    work = dist.all_reduce(tensor, async_op=is_async)
    if is_async:
        assert work.wait() and work.is_completed() and work.is_success() and work.result()[0] is tensor
    assert torch.equal(tensor, torch.stack(every(count, torch.float64)).sum(0).to(dtype))


def reduced(name: str, tensors: list[Any]) -> Any:
    both = {
        "SUM": lambda a, b: a + b,
        "PRODUCT": lambda a, b: a * b,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": lambda a, b: a & b,
        "BOR": lambda a, b: a | b,
        "BXOR": lambda a, b: a ^ b,
    }[name]
    total = tensors[0]
    for tensor in tensors[1:]:
        total = both(total, tensor)
    return total


@pytest.mark.parametrize("name", ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool])
def test_every_operation(name: str, dtype: Any) -> None:
    tensor = of(rank(), 6, torch.int32) * 5 % 7
    everything = [(part * 5 % 7) for part in every(6, torch.int32)]
    if dtype is torch.bool:
        tensor, everything = tensor > 3, [part > 3 for part in everything]
        if name in ("SUM", "PRODUCT"):
            name, expected = name, reduced("BOR" if name == "SUM" else "BAND", everything)
        else:
            expected = reduced({"MIN": "BAND", "MAX": "BOR"}.get(name, name), everything)
    else:
        expected = reduced(name, everything)
    dist.all_reduce(tensor, getattr(ReduceOp, name))
    assert torch.equal(tensor, expected)


def test_averages_and_sums_that_are_multiplied_before() -> None:
    tensor = of(rank())
    dist.all_reduce(tensor, ReduceOp.AVG)
    assert torch.allclose(tensor, torch.stack(every()).mean(0))
    tensor = of(rank())
    dist.all_reduce(tensor, torch.distributed._make_nccl_premul_sum(0.25))
    assert torch.equal(tensor, torch.stack(every()).sum(0) * 0.25)


def test_bits_of_floating_point_numbers_are_refused_on_every_rank() -> None:
    with pytest.raises(TypeError, match="expected integers or bools"):
        dist.all_reduce(torch.ones(3), ReduceOp.BAND)
    dist.barrier()


def test_strides_do_not_matter() -> None:
    base = torch.zeros(4, 6)
    column = base[:, 1]
    column.copy_(of(rank()))
    dist.all_reduce(column)
    assert torch.equal(column, torch.stack(every()).sum(0)) and base.count_nonzero() == 4
    transposed = of(rank(), 6).view(2, 3).t()
    dist.broadcast(transposed, 1)
    assert torch.equal(transposed, of(1, 6).view(2, 3).t())
    gathered = [torch.zeros(8)[::2] for _ in range(size())]
    dist.all_gather(gathered, of(rank()))
    assert all(map(torch.equal, gathered, every()))
    whole = torch.zeros(2 * size(), 2).t()
    dist.all_gather_into_tensor(whole, of(rank()))
    assert torch.equal(whole.reshape(-1), torch.cat(every()))


def test_tensors_that_require_grad() -> None:
    parameter = torch.nn.Parameter(of(rank()))
    dist.all_reduce(parameter)
    dist.broadcast(parameter, 0)
    assert torch.equal(parameter.detach(), torch.stack(every()).sum(0))


def test_complex_numbers() -> None:
    tensor = torch.complex(of(rank()), -of(rank()))
    dist.all_reduce(tensor)
    total = torch.stack(every()).sum(0)
    assert torch.equal(tensor, torch.complex(total, -total))


def test_broadcast_and_reduce_from_and_to_every_rank() -> None:
    for root in range(size()):
        tensor = of(rank())
        dist.broadcast(tensor, root)
        assert torch.equal(tensor, of(root))
        tensor = of(rank())
        dist.reduce(tensor, root)
        assert torch.equal(tensor, torch.stack(every()).sum(0) if rank() == root else of(rank()))


@pytest.mark.parametrize("count", [1, 1000, 100_000])
def test_gathers_into_one_tensor_and_into_lists(count: int) -> None:
    whole = torch.zeros(count * size())
    dist.all_gather_into_tensor(whole, of(rank(), count))
    assert torch.equal(whole, torch.cat(every(count)))
    part = whole[rank() * count : (rank() + 1) * count]  # in place, as FSDP has it
    part.add_(1)
    dist.all_gather_into_tensor(whole, part)
    assert torch.equal(whole, torch.cat(every(count)) + 1)
    parts = [torch.zeros(count + other) for other in range(size())]  # of different sizes, which gloo refuses
    dist.all_gather(parts, of(rank(), count + rank()))
    assert all(torch.equal(part, of(other, count + other)) for other, part in enumerate(parts))


def test_gathers_of_ranks_that_wait_in_different_ways() -> None:
    for turn in range(3 * size()):
        whole = torch.zeros(5 * size())
        work = dist.all_gather_into_tensor(whole, of(rank() + turn, 5), async_op=turn % size() == rank())
        if work is not None:
            work.wait()
        assert torch.equal(whole, torch.cat([of(other + turn, 5) for other in range(size())]))
        if turn % 2:
            with pytest.raises(MismatchError, match="expected"):
                dist.all_gather_into_tensor(torch.zeros((4 + rank()) * size()), of(rank(), 4 + rank()))


@pytest.mark.parametrize("count", [1, 1000, 100_000])
def test_reduce_scatter_of_one_tensor_and_of_lists(count: int) -> None:
    whole, out = torch.cat([of(rank() + share, count) for share in range(size())]), torch.zeros(count)
    dist.reduce_scatter_tensor(out, whole)
    expected = torch.stack([of(other + rank(), count) for other in range(size())]).sum(0)
    assert torch.equal(out, expected)
    dist.reduce_scatter_tensor(out, whole, ReduceOp.AVG)
    assert torch.allclose(out, expected / size())
    shares = [torch.full((count + share,), float(rank() + share)) for share in range(size())]
    out = torch.zeros(count + rank())
    dist.reduce_scatter(out, shares)
    assert torch.equal(out, torch.full((count + rank(),), float(sum(range(size())) + size() * rank())))


def test_gather_and_scatter_at_every_root() -> None:
    for root in range(size()):
        parts = [torch.zeros(4) for _ in range(size())] if rank() == root else None
        dist.gather(of(rank()), parts, root)
        assert parts is None or all(map(torch.equal, parts, every()))
        out = torch.zeros(4)
        dist.scatter(out, [of(root + other) for other in range(size())] if rank() == root else None, root)
        assert torch.equal(out, of(root + rank()))


def test_all_to_all_of_rows_and_of_lists() -> None:
    out = torch.zeros(size(), 2)
    dist.all_to_all_single(out, torch.stack([torch.full((2,), 10.0 * rank() + to) for to in range(size())]))
    assert torch.equal(out[:, 0], torch.tensor([10.0 * source + rank() for source in range(size())]))
    sent = [rank() + to for to in range(size())]
    received = [source + rank() for source in range(size())]
    out = torch.zeros(sum(received), 3)
    dist.all_to_all_single(out, torch.full((sum(sent), 3), float(rank())), received, sent)
    assert torch.equal(out[:, 1], torch.cat([torch.full((count,), float(s)) for s, count in enumerate(received)]))
    outs = [torch.zeros(source + 1) for source in range(size())]
    dist.all_to_all(outs, [torch.full((rank() + 1,), float(to)) for to in range(size())])
    assert all(torch.equal(out, torch.full((source + 1,), float(rank()))) for source, out in enumerate(outs))


def test_objects() -> None:
    objects: list[Any] = [None] * size()
    dist.all_gather_object(objects, {"rank": rank()})
    assert objects == [{"rank": other} for other in range(size())]
    found = ["x" * 1000 if rank() == 1 else None, rank()]
    dist.broadcast_object_list(found, 1)
    assert found == ["x" * 1000, 1]


def test_messages_of_every_kind() -> None:
    following, previous = (rank() + 1) % size(), (rank() - 1) % size()
    into = torch.zeros(100_000)
    sending = dist.isend(of(rank(), 100_000), following, tag=3)  # before the receive: a send never blocks
    assert dist.recv(into, previous, tag=3) == previous
    sending.wait()
    assert torch.equal(into, of(previous, 100_000))
    sending = dist.isend(of(rank()), following)
    small = torch.zeros(2, 4).t()[:, 0]
    assert dist.recv(small) == previous and torch.equal(small, of(previous))
    sending.wait()
    out = torch.zeros(4)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, of(rank()), following), dist.P2POp(dist.irecv, out, previous)]
    )
    for work in works:
        work.wait()
    assert torch.equal(out, of(previous))


def test_coalesced_calls(world: Any) -> None:
    tensors = [of(rank()), of(rank(), 2000)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert all(torch.equal(t, torch.stack(every(len(t))).sum(0)) for t in tensors)
    wholes = [torch.zeros(4 * size()), torch.zeros(7 * size())]
    with dist._coalescing_manager():
        for whole in wholes:
            dist.all_gather_into_tensor(whole, of(rank(), len(whole) // size()))
    assert all(torch.equal(whole, torch.cat(every(len(whole) // size()))) for whole in wholes)
    with dist._coalescing_manager(device=torch.device("cpu")):
        for tensor in tensors:
            dist.broadcast(tensor, 0)
    opts = AllreduceOptions()
    world.allreduce_coalesced([of(rank()), of(rank())], opts).wait()


def test_groups_of_some_ranks_are_made_by_them_alone() -> None:
    last = list(range(1, size()))
    if rank():
        group = dist.new_group(last, use_local_synchronization=True)
        tensor = of(rank())
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor, torch.stack(every()[1:]).sum(0))
        dist.broadcast(tensor, size() - 1, group=group)
        dist.destroy_process_group(group)
    again = [dist.new_group([0, size() - 1]) for _ in range(2)]  # two groups of the same ranks are two groups
    if rank() in (0, size() - 1):
        tensors = [of(rank()), of(rank(), 7)]
        works = [
            dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in zip(tensors, again, strict=True)
        ]
        for work in reversed(works):
            work.wait()
        assert torch.equal(tensors[1], of(0, 7) + of(size() - 1, 7))
    dist.barrier()


def test_functional_collectives_and_compiled_ones(world: Any) -> None:
    total = torch.stack(every()).sum(0)
    assert torch.equal(functional.all_reduce(of(rank()), "sum", world) + 0, total)
    assert torch.equal(functional.all_gather_tensor(of(rank()), 0, world) + 0, torch.cat(every()))
    shared = functional.reduce_scatter_tensor(torch.cat([of(rank())] * size()), "sum", 0, world)
    assert torch.equal(shared + 0, total)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(tensor: Any) -> Any:
        return functional.all_reduce(tensor * 2, "sum", world) + 1

    assert torch.equal(step(of(rank())), 2 * total + 1)


def test_the_future_of_a_work_that_was_waited_for_is_complete() -> None:
    """torchft attaches its continuations then, and expects them to run at once."""
    work = dist.all_reduce(of(rank()), async_op=True)
    assert work.wait() and work.get_future().done()


def test_futures_complete_by_themselves_and_continue() -> None:
    tensors = [of(rank(), count) for count in (3, 1000, 50_000)]
    futures = [dist.all_reduce(tensor, async_op=True).get_future() for tensor in tensors]
    doubled = [future.then(lambda done: done.value()[0] * 2) for future in futures]
    for future, tensor in zip(doubled, tensors, strict=True):
        assert torch.equal(future.wait(), torch.stack(every(len(tensor))).sum(0) * 2)

    def again(done: Any) -> Any:  # a continuation may wait for an operation of its own
        return dist.all_reduce(done.value()[0], async_op=True).get_future().wait()[0]

    chained = dist.all_reduce(of(rank()), async_op=True).get_future().then(again)
    assert torch.equal(chained.wait(), torch.stack(every()).sum(0) * size())


def test_the_profiler_shows_operations() -> None:
    with torch.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(of(rank()))
        dist.all_reduce(of(rank()), async_op=True).wait()
    shown = [event for event in profile.events() if event.name == "collectives:all_reduce"]
    assert len(shown) == 2 and all(event.input_shapes == [[4]] for event in shown)


def test_direct_calls_of_the_group(world: Any) -> None:
    tensor = of(rank())
    world.allreduce(tensor, ReduceOp.MAX).wait()
    assert torch.equal(tensor, of(size() - 1))
    whole = [torch.zeros(4 * size())]
    world.all_gather_single_coalesced(whole, [of(rank())], AllgatherOptions()).wait()
    assert torch.equal(whole[0], torch.cat(every()))


def test_direct_calls_of_one_tensor_with_root_operation_and_timeout(world: Any) -> None:
    """c10d's second signatures, without options."""
    largest, total = of(size() - 1), torch.stack(every()).sum(0)
    within = timedelta(seconds=60)
    for call in (
        lambda tensor: world.allreduce(tensor, op=ReduceOp.MAX),
        lambda tensor: world.allreduce([tensor], ReduceOp.MAX, within),
        lambda tensor: world.allreduce(tensor=tensor, op=ReduceOp.MAX),
        lambda tensor: world.broadcast(tensor, root=size() - 1),
        lambda tensor: world.broadcast(tensor, size() - 1, within),
    ):
        tensor = of(rank())
        call(tensor).wait()
        assert torch.equal(tensor, largest)
    tensor = of(rank())
    world.reduce(tensor, root=1).wait()
    assert torch.equal(tensor, total if rank() == 1 else of(rank()))
    parts = [torch.zeros(4) for _ in range(size())]
    world.allgather(input_tensor=of(rank()), output_tensors=parts, timeout=within).wait()
    assert all(map(torch.equal, parts, every()))
    parts = [torch.zeros(4) for _ in range(size())]
    world.gather(parts if rank() == 1 else [], of(rank()), root=1).wait()
    assert rank() != 1 or all(map(torch.equal, parts, every()))
    out = torch.zeros(4)
    world.scatter(out, every() if rank() == 1 else [], 1).wait()
    assert torch.equal(out, of(rank()))
    world.reduce_scatter(out, every(), op=ReduceOp.MAX).wait()
    assert torch.equal(out, of(rank()))
    world.reduce_scatter(out, every()).wait()
    assert torch.equal(out, of(rank()) * size())
    whole = torch.zeros(4 * size())
    world.all_gather_single(output=whole, input=of(rank())).wait()
    assert torch.equal(whole, torch.cat(every()))
    swapped = torch.zeros(size())
    world.alltoall_base(swapped, torch.arange(float(size())) + 10 * rank(), [], [], timeout=within).wait()
    assert torch.equal(swapped, 10 * torch.arange(float(size())) + rank())
    world.barrier(timeout=within).wait()
    world.monitored_barrier(within)


def test_results_are_stored_in_inference_mode() -> None:
    """Whichever thread completes the operation: a tensor that was made in the mode is written in it alone."""
    with torch.inference_mode():
        parts, part = [torch.zeros(4) for _ in range(size())], of(rank())
        future = dist.all_gather(parts, part, async_op=True).get_future()
    future.wait()
    assert all(map(torch.equal, parts, every()))


def test_parts_of_another_dtype_are_refused(world: Any) -> None:
    """They are not converted in silence."""
    parts = [torch.zeros(4, dtype=torch.float64) for _ in range(size())]
    for call in (
        lambda: dist.all_gather_coalesced([[part] for part in parts], [of(rank())]),
        lambda: world.allgather([parts], [of(rank())]).wait(),
        lambda: world.alltoall(parts, every()).wait(),
    ):
        with pytest.raises(TypeError, match=r"expected tensors of dtype torch.float32.* got torch.float64"):
            call()
    dist.barrier()


@pytest.mark.parametrize("root", [-1, 99])
def test_a_root_that_is_no_rank_is_refused(world: Any, root: int) -> None:
    parts = [torch.zeros(4) for _ in range(size())]
    for name, make, tensors in (
        ("reduce", ReduceOptions, ([of(rank())],)),
        ("gather", GatherOptions, ([parts], [of(rank())])),
        ("scatter", ScatterOptions, ([torch.zeros(4)], [parts])),
    ):
        opts = make()
        opts.rootRank = root
        with pytest.raises(ValueError, match=f"{name}: root: expected a rank from 0 to {size() - 1}, got {root}"):
            getattr(world, name)(*tensors, opts)
    dist.barrier()


def test_lists_without_tensors_are_refused(world: Any) -> None:
    for call in (
        lambda: world.allreduce([]),
        lambda: world.allreduce_coalesced([]),
        lambda: world.broadcast([], 0),
        lambda: world.allgather([], []),
        lambda: world.allgather([[torch.zeros(4)] * size()] * 2, [of(rank())]),
    ):
        with pytest.raises(ValueError, match="expected"):
            call()
    dist.barrier()


def test_arguments_that_do_not_fit_are_named(world: Any) -> None:
    with pytest.raises(ValueError, match=f"expected {size()} tensors, one for each rank; got 1"):
        dist.all_gather([torch.zeros(4)], of(rank()))
    shares = [torch.zeros(2 + share) for share in range(size())]
    with pytest.raises(ValueError, match=f"expected {2 + rank()} elements, as in this rank's tensor"):
        dist.reduce_scatter(torch.zeros(9), shares)
    with pytest.raises(ValueError, match="cannot be divided evenly"):
        dist.all_to_all_single(torch.zeros(size() + 1), torch.zeros(size() + 1))
    with pytest.raises(ValueError, match="expected None for the backend collectives"):
        dist.new_group(pg_options=object())
    dist.barrier()


def test_a_sparse_sum() -> None:
    tensor = torch.sparse_coo_tensor([[0, rank()]], [1.0, 2.0], (size() + 1,))
    dist.all_reduce(tensor)
    expected = torch.zeros(size() + 1)
    for other in range(size()):
        expected[0] += 1
        expected[other] += 2
    assert torch.equal(tensor.to_dense(), expected) and tensor.layout is torch.sparse_coo


def test_a_wait_has_a_bound_and_the_operation_goes_on() -> None:
    if rank() == 0:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        with pytest.raises(TimeoutError, match="it continues"):
            work.wait(timedelta(milliseconds=200))
        dist.send(torch.ones(1), 1, tag=9)
        work.wait()
    else:
        if rank() == 1:
            dist.recv(torch.zeros(1), 0, tag=9)
        dist.all_reduce(torch.ones(3))


def test_groups_on_one_host_open_no_connections() -> None:
    def sockets() -> int:
        count = 0
        for descriptor in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # it is closed already
                count += os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
        return count

    dist.barrier()
    before = sockets()
    groups = [dist.new_group() for _ in range(4)]
    for group in groups:
        tensor = of(rank())
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor, torch.stack(every()).sum(0))
    assert sockets() <= before
    for group in groups:
        dist.destroy_process_group(group)


def test_a_group_takes_no_shared_memory_before_it_is_used() -> None:
    def resident() -> int:
        """Bytes of the groups' boards and windows that this process has touched."""
        total, ours = 0, False
        with open("/proc/self/smaps") as maps:
            for line in maps:
                if not line.partition(" ")[0].endswith(":"):
                    ours = "/memfd:collectives" in line
                elif ours and line.startswith("Rss:"):
                    total += int(line.split()[1]) << 10
        return total

    before = resident()
    groups = [dist.new_group() for _ in range(4)]
    assert resident() - before < 4 << 20
    for group in groups:
        tensor = of(rank(), 100_000)
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor, torch.stack(every(100_000)).sum(0))
        dist.destroy_process_group(group)
