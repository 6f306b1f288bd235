"""Buckets that wait for the end of the backward pass, as on one host where each rank has one core."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import collectives
from collectives.torch import backward_reducer
from collectives.torch.backward_reducer import BackwardReducer, holds_back
from collectives.torch.buckets import SMALL, GradientBucket

Change = Callable[[int, Any], None]
"""What a rank does before a step, with the model."""


class Net(torch.nn.Module):
    """Tiny, small and large parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tiny = torch.nn.Linear(6, 4)
        self.small = torch.nn.Parameter(torch.randn(4, 1000))
        self.large = torch.nn.Parameter(torch.randn(1000, SMALL // 2000))
        self.larger = torch.nn.Parameter(torch.randn(SMALL // 2000, 1000))

    def forward(self, x: Any, whole: bool = True) -> Any:
        hidden = self.tiny(x) @ self.small @ self.large / 1000
        return ((hidden @ self.larger / 10 if whole else hidden).tanh()).pow(2).mean()


def batch(rank: int, step: int) -> Any:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(100 * step + rank)) * (rank + 1)


def expected(hvd: Any, model: Any, step: int, passes: int, whole: Callable[[int], bool]) -> list[Any]:
    """The means of all ranks' gradients."""
    sums = [torch.zeros_like(param) for param in model.parameters()]
    for rank in range(hvd.size()):
        for number in range(passes):
            loss = model(batch(rank, 10 * step + number), whole(rank))
            found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
            for total, grad in zip(sums, found, strict=True):
                total += 0 if grad is None else grad
    return [total / hvd.size() for total in sums]


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The buckets that were held back, by name; they are, whatever cores there are."""
    monkeypatch.setattr(backward_reducer, "holds_back", lambda world: world.planner.placement.one_host)
    names: list[str] = []
    send = BackwardReducer._send

    def noted(self: BackwardReducer, bucket: GradientBucket) -> None:
        send(self, bucket)
        names.extend([bucket.name] * bucket.gathered)

    monkeypatch.setattr(BackwardReducer, "_send", noted)
    return names


def train(
    hvd: Any,
    steps: int,
    change: Change = lambda step, model: None,
    whole: Callable[[int, int], bool] = lambda rank, step: True,
    **options: Any,
) -> None:
    """Train, and compare every step's gradients with those that one process computes."""
    model = Net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), **options
    )
    passes = options.get("backward_passes_per_step", 1)
    for step in range(steps):
        wanted = expected(hvd, model, step, passes, functools.partial(whole, step=step))
        change(step, model)
        optimizer.zero_grad()
        for number in range(passes):
            model(batch(hvd.rank(), 10 * step + number), whole(hvd.rank(), step)).backward()
        for (name, param), mean in zip(model.named_parameters(), wanted, strict=True):
            torch.testing.assert_close(param.grad, mean, rtol=1e-4, atol=1e-6, msg=f"step {step}, {name}")
        optimizer.step()


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_every_bucket_waits_in_every_step(hvd: Any, gathered: list[str], views: bool, passes: int) -> None:
    train(hvd, 4, backward_passes_per_step=passes, gradient_as_bucket_view=views)
    assert gathered or not collectives.world().planner.placement.one_host
    assert all(gathered.count(name) == 4 for name in gathered)


def test_numbers_are_those_of_ordinary_operations(
    hvd: Any, gathered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for holds in (True, False):
        monkeypatch.setattr(backward_reducer, "holds_back", lambda world, holds=holds: holds)
        model = Net()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        for step in range(4):
            optimizer.zero_grad()
            model(batch(hvd.rank(), step)).backward()
            optimizer.step()
        found.append([param.detach().numpy().copy() for param in model.parameters()])
    for held, ordinary in zip(*found, strict=True):
        np.testing.assert_array_equal(held, ordinary)


def test_a_rank_that_keeps_its_gradients_where_autograd_put_them(hvd: Any, gathered: list[str]) -> None:
    kept: list[Any] = []

    def keep(step: int, model: Any) -> None:
        if step == 2 and hvd.rank() == 1:
            model.large.register_post_accumulate_grad_hook(lambda param: kept.append(param.grad))

    train(hvd, 4, keep)
    assert len(kept) == (2 if hvd.rank() == 1 else 0)


@pytest.mark.parametrize("take", [lambda grad: grad, lambda grad: grad[1], lambda grad: grad.numpy()])
def test_a_gradient_that_is_held_on_one_rank_is_left_alone(
    hvd: Any, gathered: list[str], take: Callable[[Any], Any]
) -> None:
    """The next gradient gets another place there."""
    held: list[tuple[Any, Any]] = []

    def hold(step: int, model: Any) -> None:
        if step == 3 and hvd.rank() == 1:
            held.extend(
                (taken, torch.as_tensor(taken).clone()) for taken in map(take, (model.large.grad, model.larger.grad))
            )

    train(hvd, 6, hold)
    for taken, copy in held:
        assert torch.equal(torch.as_tensor(taken), torch.as_tensor(copy))


def test_a_rank_without_some_gradient(hvd: Any, gathered: list[str]) -> None:
    train(hvd, 6, whole=lambda rank, step: step != 3 or rank == 0)


@pytest.mark.parametrize("op", ["Sum", "Max"])
def test_operations_and_process_sets(hvd: Any, gathered: list[str], op: str) -> None:
    everyone = hvd.add_process_set(list(range(hvd.size())))
    try:
        weight = torch.nn.Parameter(torch.zeros(SMALL))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), op=getattr(hvd, op), process_set=everyone
        )
        for _ in range(3):
            optimizer.zero_grad()
            (weight.sum() * (hvd.rank() + 1)).backward()
            optimizer.step()
        once = {"Sum": hvd.size() * (hvd.size() + 1) // 2, "Max": hvd.size()}[op]
        torch.testing.assert_close(weight.detach(), torch.full((SMALL,), -3.0 * once))
    finally:
        del optimizer
        hvd.remove_process_set(everyone)


def test_a_rank_that_holds_nothing_back(hvd: Any, gathered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_reducer, "holds_back", lambda world: hvd.rank() == 0)
    train(hvd, 3)
    assert len(gathered) == (9 if hvd.rank() == 0 else 3)  # all do in the first step


def test_ranks_that_join(hvd: Any, gathered: list[str]) -> None:
    weight = torch.nn.Parameter(torch.zeros(SMALL))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    for _ in range(2):
        for _ in range(3 + hvd.rank()):
            optimizer.zero_grad()
            weight.sum().backward()
            optimizer.step()
        hvd.join()
    hvd.broadcast_parameters([weight], hvd.size() - 1)
    steps = 3 + sum((hvd.size() - step) / hvd.size() for step in range(1, hvd.size()))
    torch.testing.assert_close(weight.detach(), torch.full((SMALL,), -2.0 * steps))


def test_buckets_are_held_back_where_each_rank_has_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    class Placement:
        one_host = True

    class World:
        local_size = 2
        planner = type("Planner", (), {"placement": Placement})

    world: Any = World()
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
    assert holds_back(world)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert not holds_back(world)
    world.local_size = 8
    assert holds_back(world)
    Placement.one_host = False
    assert not holds_back(world)
