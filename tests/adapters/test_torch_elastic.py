"""The state of torch models, optimizers and samplers, on several ranks; Horovod's scenarios among them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from collectives.base.errors import MismatchError
from collectives.elastic import HostsUpdatedInterrupt, HostUpdateResult


def linear(value: float, size: int = 2) -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(size, size))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def values(tensors: Any) -> set[float]:
    return {value for tensor in tensors for value in tensor.detach().reshape(-1).tolist()}


def step(model: Any, optimizer: Any, factor: float) -> None:
    optimizer.zero_grad()
    (model(torch.ones(1, 2)).sum() * factor).backward()
    optimizer.step()


def moments(optimizer: Any) -> set[float]:
    return values(state["exp_avg"] for state in optimizer.state.values())


def test_a_state_of_a_model_and_its_optimizer(hvd: Any) -> None:
    rank = hvd.rank()
    model = linear(1.0 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001 * hvd.size())
    state = hvd.elastic.TorchState(model, optimizer, batch=20 + rank, epoch=10 + rank)
    state.sync()
    assert (values(state.model.parameters()), state.batch, state.epoch) == ({1.0}, 20, 10)

    model.load_state_dict(linear(5.0).state_dict())
    state.batch, state.epoch = 21, 11
    state.restore()
    assert (values(model.parameters()), state.batch, state.epoch) == ({1.0}, 20, 10)

    model.load_state_dict(linear(5.0).state_dict())
    state.batch, state.epoch = 21, 11
    state.commit()
    state.restore()
    assert (values(model.parameters()), state.batch, state.epoch) == ({5.0}, 21, 11)


def test_a_sampler_is_dealt_again(hvd: Any) -> None:
    size, batch_size, per_rank = hvd.size(), 2, 8
    dataset = list(range(per_rank * size))
    sampler = hvd.elastic.ElasticSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)  # type: ignore[arg-type]
    state = hvd.elastic.TorchState(sampler=sampler)
    state.sync()
    assert (state.sampler.epoch, state.sampler.processed_num) == (0, 0)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, _ in enumerate(loader):
            sampler.record_batch(number, batch_size)
            assert sampler.processed_num == batch_size * (number + 1) * size
    assert len(list(loader)) == per_rank / batch_size  # processed samples are dealt again only when asked for

    sampler.set_epoch(2)
    for number in range(2):
        sampler.record_batch(number, batch_size)
    state.commit()
    for number in (2, 3):
        sampler.record_batch(number, batch_size)
    state.restore()
    assert sampler.processed_num == 2 * batch_size * size

    sampler.record_batch(2, batch_size)
    state.commit()
    state.sync()
    assert sampler.processed_num == 3 * batch_size * size
    assert len(sampler) == batch_size and len(list(loader)) == 1
    remaining = [index for share in hvd.allgather_object(list(sampler)) for index in share]
    assert sorted(remaining) == sorted(sampler.remaining_indices) and len(remaining) == batch_size * size

    sampler.set_epoch(3)
    assert len(sampler) == per_rank and len(list(loader)) == per_rank / batch_size


@pytest.mark.parametrize("holders", ["the first", "all but the first"])
@pytest.mark.parametrize("distributed", [False, True])
def test_a_newcomer_receives_what_its_optimizer_does_not_have_yet(hvd: Any, holders: str, distributed: bool) -> None:
    newcomer = (hvd.rank() == 0) is (holders == "all but the first")
    model = linear(2.0 + newcomer)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, batch=0)
    state.sync()
    step(model, optimizer, 1.0)
    optimizer.param_groups[0]["lr"] = 0.5
    state.batch = 1
    state.commit()
    if newcomer:
        model = linear(7.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        addresses = [parameter.data_ptr() for parameter in model.parameters()]
        state = hvd.elastic.TorchState(model, optimizer, batch=0)
        state.sync()
        assert addresses == [parameter.data_ptr() for parameter in model.parameters()]
    else:
        state.sync()
    assert state.batch == 1 and optimizer.param_groups[0]["lr"] == 0.5
    wanted, first = values(model.parameters()), moments(optimizer)
    everyone = hvd.allgather_object((wanted, first, [float(each["step"]) for each in optimizer.state.values()]))
    assert all(each == everyone[0] for each in everyone) and everyone[0][2] == [1.0, 1.0]
    if not newcomer:
        with torch.no_grad():
            next(model.parameters()).zero_()
        optimizer.state.clear()
    state.restore()
    assert values(model.parameters()) == wanted and moments(optimizer) == first


def test_restoring_drops_gradients_in_flight(hvd: Any) -> None:
    model = linear(1.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    state.restore()
    step(model, optimizer, 1.0 + hvd.rank())
    mean = 1.0 + (hvd.size() - 1) / 2
    assert values(model.parameters()) == {1.0 - mean}


def test_a_model_of_another_shape_is_named(hvd: Any) -> None:
    last = hvd.size() - 1
    model = linear(1.0 + hvd.rank(), 2 + (hvd.rank() == last))
    state = hvd.elastic.TorchState(model)
    with pytest.raises(MismatchError) as caught:
        state.sync()
    text = "model: tensor '0.weight' is not the same on every rank: float32 of shape (2, 2) on cpu on rank"
    assert text in str(caught.value) and f"float32 of shape (3, 3) on cpu on rank {last}" in str(caught.value)
    assert values(model.parameters()) == {1.0 + hvd.rank()}
    hvd.barrier()


def test_one_ranks_notice_interrupts_all(hvd: Any) -> None:
    state = hvd.elastic.TorchState(batch=0)
    state.commit()
    if hvd.rank() == hvd.size() - 1:
        state.on_hosts_updated(3, HostUpdateResult.removed)
    if hvd.rank() == 0:
        state.on_hosts_updated(2, HostUpdateResult.added)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.commit()
    assert not caught.value.skip_sync and state._last_updated_timestamp == 3
    state.on_hosts_updated(3, HostUpdateResult.removed)  # another rank has told it
    state.commit()


def test_tensors_and_arrays_among_the_attributes(hvd: Any) -> None:
    rank = hvd.rank()
    state = hvd.elastic.TorchState(
        mean=torch.full((3,), float(rank), dtype=torch.bfloat16),
        dates=np.array([rank], "datetime64[s]"),
        list=[torch.full((rank,), rank), np.full(2, rank)],
        empty=torch.empty(0, 3),
    )
    mean = state.mean
    state.sync()
    assert state.mean is mean and mean.tolist() == [0, 0, 0] and state.dates == np.array([0], "datetime64[s]")
    assert [each.tolist() for each in state.list] == [[], [0, 0]] and state.empty.shape == (0, 3)
    mean += 1
    state.restore()
    assert state.mean is mean and mean.tolist() == [0, 0, 0]


def test_another_model_is_saved_at_once(hvd: Any) -> None:
    state = hvd.elastic.TorchState(linear(1.0), epoch=1)
    state.epoch = 2
    state.model = linear(3.0, 4)
    with torch.no_grad():
        state.model[0].weight.zero_()
    state.restore()
    assert values(state.model.parameters()) == {3.0} and state.epoch == 1


class Counter:
    count = 0


@pytest.fixture
def registry(hvd: Any) -> Iterator[Any]:
    before = hvd.elastic.get_handler_registry()
    yield before
    hvd.elastic.set_handler_registry(before)


def test_a_handler_of_ones_own(hvd: Any, registry: Any) -> None:
    class CounterHandler(hvd.elastic.StateHandler):  # type: ignore[misc]
        saved = 0

        def save(self) -> None:
            self.saved = self.value.count

        def restore(self) -> None:
            self.value.count = self.saved

        def sync(self) -> None:
            self.value.count = hvd.broadcast_object(self.value.count)

    hvd.elastic.set_handler_registry([*registry, (Counter, CounterHandler)])
    state = hvd.elastic.TorchState(linear(1.0), counter=Counter())
    state.counter.count = 5 + hvd.rank()
    state.sync()
    assert state.counter.count == 5
    state.counter.count = 6
    state.restore()
    assert state.counter.count == 5
    state.counter = Counter()
    state.counter.count = 7
    state.restore()
    assert state.counter.count == 0
