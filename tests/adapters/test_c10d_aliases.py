"""Large tensors that are all-reduced again get memory that peers map, at their address, and nobody sees it."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed")

import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from collectives.c10d import aliases as module  # noqa: E402
from collectives.c10d.aliases import FROM_BYTES, aliases  # noqa: E402
from collectives.tensors.arena import arena  # noqa: E402
from tests.adapters.c10d_ranks import default_group, rank, size  # noqa: E402

COUNT = 300_001  # of float32: more than FROM_BYTES, and not whole pages


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[Any]:
    with default_group() as group:
        yield group


def of(other: int, step: int, dtype: Any = torch.float32, count: int = COUNT) -> Any:
    return ((torch.arange(count) % 7 + 1) * (other + 1) + step).to(dtype)


def reduce(tensor: Any, step: int, is_async: bool = True) -> None:
    """Give the tensor this rank's numbers, all-reduce it, and check the sum."""
    tensor.copy_(of(rank(), step, tensor.dtype, tensor.numel()))
    work = dist.all_reduce(tensor, async_op=is_async)
    if is_async:
        work.wait()
    assert torch.equal(tensor, summed(step, tensor.dtype, tensor.numel()))


def summed(step: int, dtype: Any = torch.float32, count: int = COUNT) -> Any:
    return torch.stack([of(other, step, torch.float64, count) for other in range(size())]).sum(0).to(dtype)


def aliased(dtype: Any = torch.float32) -> Any:
    """A tensor whose memory peers map, with the sums of step 1."""
    tensor = torch.empty(COUNT, dtype=dtype)
    for step in range(2):
        reduce(tensor, step)
    assert aliases.of(tensor) is not None
    return tensor


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32])
def test_values_and_address_stay(dtype: Any, is_async: bool) -> None:
    tensor = torch.empty(FROM_BYTES // 2 + 1, dtype=dtype)
    address, part = tensor.data_ptr(), tensor[5:9]
    for step in range(4):
        reduce(tensor, step, is_async)
        assert tensor.data_ptr() == address and torch.equal(part, tensor[5:9])
    memory = aliases.of(tensor).tensor
    assert arena.locate(memory.data_ptr(), memory.nbytes) and torch.equal(memory, tensor)
    tensor[COUNT // 2] = 99
    assert memory[COUNT // 2] == 99


def test_arrays_over_the_tensor_see_what_is_reduced() -> None:
    tensor = aliased()
    array = tensor.numpy()
    array[:] = of(rank(), 3).numpy()
    dist.all_reduce(tensor, async_op=True).wait()
    assert torch.equal(tensor, summed(3)) and (array == summed(3).numpy()).all()


def test_what_is_not_all_of_a_storage_or_not_allocated_by_torch_stays_where_it_is() -> None:
    whole = torch.empty(2 * COUNT)
    shared = torch.empty(COUNT).share_memory_()
    for tensor in (whole[:COUNT], torch.from_numpy(torch.empty(COUNT).numpy()), shared, torch.empty(1000)):
        for step in range(3):
            reduce(tensor, step)
            assert aliases.of(tensor) is None


def test_memory_goes_back_when_the_tensor_is_dropped() -> None:
    tensor = aliased()
    alias = aliases.of(tensor)
    block, piece, start, end = alias.tensor, alias._piece, alias._start, alias._end
    del tensor
    gc.collect()
    aliases.of(torch.empty(COUNT))  # a large tensor: what nothing else holds goes
    assert alias not in aliases._aliases.values() and alias.is_alone
    assert all(other_end <= start or end <= other for other, other_end, _ in module.ranges_of(piece.descriptor))
    del alias
    others = [torch.full((COUNT,), float(number)) for number in range(4)]
    block.fill_(2)
    assert all((other == number).all() for number, other in enumerate(others))
    for step in range(3):
        reduce(others[0], step)


def test_a_child_has_the_values_of_the_fork_and_shares_nothing() -> None:
    tensor = aliased()
    to_child, to_parent = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.read(to_child[0], 1)  # the parent has written
            status = 0 if torch.equal(tensor, summed(1)) else 2
            tensor.fill_(-1)
        finally:
            os.write(to_parent[1], b"x")
            os._exit(status)
    assert not aliases._aliases[tensor.data_ptr()].is_mapped and torch.equal(tensor, summed(1))
    tensor.fill_(5)
    os.write(to_child[1], b"x")
    os.read(to_parent[0], 1)
    assert (tensor == 5).all()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for descriptor in (*to_child, *to_parent):
        os.close(descriptor)
    for step in range(3):
        reduce(tensor, step)
    assert aliases.of(tensor) is not None


def test_a_second_fork_keeps_what_was_written_after_the_first() -> None:
    tensor = aliased()
    for value in (3, 4):
        child = os.fork()
        if child == 0:
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(tensor, summed(1)) if value == 3 else (tensor == 3).all()
        tensor.fill_(value)
    reduce(tensor, 5)


def test_a_fork_during_an_operation() -> None:
    tensor = aliased()
    tensor.copy_(of(rank(), 4))
    work = dist.all_reduce(tensor, async_op=True)
    child = os.fork()
    if child == 0:
        os._exit(0)
    work.wait()
    os.waitpid(child, 0)
    assert torch.equal(tensor, summed(4))


def test_a_storage_that_is_moved_leaves_no_shared_memory_to_a_child() -> None:
    tensor = aliased()
    alias = aliases.of(tensor)
    start, end = alias._start, alias._end
    tensor.share_memory_()
    assert tensor.data_ptr() != alias.address and torch.equal(tensor, summed(1))
    for step in range(3):
        reduce(tensor, step)
    assert aliases.of(tensor) is None and aliases._moved == [alias]
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    ranges = module.ranges_of(alias._piece.descriptor)
    assert ranges and all(other_end <= start or end <= other for other, other_end, _ in ranges)
    assert not aliases._moved


@pytest.mark.parametrize("view", [False, True])
def test_ddp_trains_as_over_private_memory(view: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> tuple[list[Any], int]:
        torch.manual_seed(1)
        layers = torch.nn.Sequential(torch.nn.Linear(300, 1000), torch.nn.ReLU(), torch.nn.Linear(1000, 500))
        model = DistributedDataParallel(layers, gradient_as_bucket_view=view, bucket_cap_mb=1.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):  # buckets are made anew in the second
            optimizer.zero_grad()
            inputs = torch.randn(4, 300, generator=torch.Generator().manual_seed(10 * step + rank()))
            model(inputs).square().mean().backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()], len(aliases._aliases)

    parameters, moved = trained()
    assert moved
    monkeypatch.setattr(aliases, "of", lambda flat: None)
    expected, _ = trained()
    for one, other in zip(parameters, expected, strict=True):  # three ranks may add in another order
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_tensors_outlive_their_group() -> None:
    group = dist.new_group()
    tensor = torch.empty(COUNT)
    for step in range(3):
        tensor.copy_(of(rank(), step))
        dist.all_reduce(tensor, group=group, async_op=True).wait()
    dist.destroy_process_group(group)
    assert torch.equal(tensor, summed(2))
    for step in range(3):
        reduce(tensor, step)


def test_where_the_system_refuses_tensors_stay_private(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no more mappings")

    monkeypatch.setattr(module, "map_fixed", refuse)
    tensor = torch.empty(COUNT)
    for step in range(4):
        reduce(tensor, step)
    assert aliases.of(tensor) is None
