"""Accumulation windows that end before the number of backward passes that was announced, on all ranks or on some, as at
the end of an epoch: what the program does to gradients before ``step()`` it does to those of all ranks."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

Windows = Sequence[Sequence[int]]
MOST = 0.3
"""The norm that gradients are clipped to."""


def make() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 200), torch.nn.Tanh(), torch.nn.Linear(200, 1)).double()


def loss_of(model: Any, rank: int, number: int) -> Any:
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * number + rank)).double()
    return model(inputs * (rank + 1)).square().mean()


def clip(model: Any) -> Any:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), MOST)


def wrapped(hvd: Any, model: Any, passes: int, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), backward_passes_per_step=passes, **options)


def alone(size: int, windows: Callable[[int], Windows]) -> tuple[list[Any], Any]:
    """What one process has that takes the mean of all ranks' losses: the norms, and the model."""
    model, norms = make(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(len(windows(0))):
        optimizer.zero_grad()
        sum(loss_of(model, rank, number) / size for rank in range(size) for number in windows(rank)[step]).backward()
        norms.append(clip(model))
        optimizer.step()
    return norms, model


def check(hvd: Any, model: Any, norms: Sequence[Any], windows: Callable[[int], Windows]) -> None:
    expected_norms, expected = alone(hvd.size(), windows)
    assert min(expected_norms) > MOST
    torch.testing.assert_close(list(norms), expected_norms)
    torch.testing.assert_close(list(model.parameters()), list(expected.parameters()))


def short_on_all(rank: int) -> Windows:
    return (0, 1, 2), (3, 4), (5, 6, 7)


def short_on_the_last(rank: int) -> Windows:
    return (0, 1, 2), ((3,) if rank else (3, 4, 5)), (6, 7, 8)


def of_one_pass(rank: int) -> Windows:
    return (0,), (1, 2, 3)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"algorithm": "reproducible"}], ids=repr)
@pytest.mark.parametrize("windows", [short_on_all, short_on_the_last, of_one_pass])
def test_clipping(hvd: Any, windows: Callable[[int], Windows], options: dict[str, Any]) -> None:
    model, norms = make(), []
    optimizer = wrapped(hvd, model, 4 if "algorithm" in options else 3, **options)
    for window in windows(hvd.rank()):
        optimizer.zero_grad()
        for number in window:
            loss_of(model, hvd.rank(), number).backward()
        norms.append(clip(model))
        optimizer.step()
    check(hvd, model, norms, windows)
    assert all(type(param) is torch.nn.Parameter for param in model.parameters())


@pytest.mark.parametrize("windows", [short_on_all, short_on_the_last])
def test_clipping_in_a_closure(hvd: Any, windows: Callable[[int], Windows]) -> None:
    """As Lightning does it: the last pass is the closure's."""
    model, norms = make(), []
    optimizer = wrapped(hvd, model, 3)
    for window in windows(hvd.rank()):
        optimizer.zero_grad()
        for number in window[:-1]:
            loss_of(model, hvd.rank(), number).backward()

        def closure(number: int = window[-1]) -> Any:
            loss = loss_of(model, hvd.rank(), number)
            loss.backward()
            norms.append(clip(model))
            return loss.detach()

        optimizer.step(closure)
    check(hvd, model, norms, windows)


@pytest.mark.parametrize("unscales", [False, True])
def test_an_overflow_on_one_rank(hvd: Any, unscales: bool) -> None:
    """All ranks skip the step, and scale alike."""
    model = make()
    optimizer = wrapped(hvd, model, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
    for step, window in enumerate([(0, 1), (2,), (3, 4), (5,)]):
        optimizer.zero_grad()
        for number in window:
            overflows = step == 1 and hvd.rank() == hvd.size() - 1
            scaler.scale(loss_of(model, hvd.rank(), number) * (float("inf") if overflows else 1.0)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (64.0 if step == 0 else 32.0)
    ranks = hvd.allgather_object([param.detach() for param in model.parameters()])
    for params in ranks:
        torch.testing.assert_close(params, ranks[0], rtol=0, atol=0)
        assert all(param.isfinite().all() for param in params)


def test_a_parameter_that_one_rank_has_used_in_a_short_window(hvd: Any) -> None:
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), backward_passes_per_step=2)
    (params[0].sum() + (params[1].sum() if hvd.rank() == 0 else 0)).backward()
    assert all(param.grad is not None for param in params)
    torch.nn.utils.clip_grad_value_(params, 0.75)
    optimizer.step()
    assert [param[0].item() for param in params] == pytest.approx([-0.75, -min(0.75, 1 / hvd.size())])


@pytest.mark.parametrize(
    "options",
    [{}, {"op": "Sum"}, {"op": "Max"}, {"algorithm": "reproducible"}],
    ids=repr,
)
def test_reading_between_the_passes_of_a_window(hvd: Any, options: dict[str, str]) -> None:
    """It combines what there is; a further pass adds to means, and is refused otherwise."""
    weight = torch.nn.Parameter(torch.zeros(3))
    op = getattr(hvd, options.get("op", "Average"))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), op=op, backward_passes_per_step=4, algorithm=options.get("algorithm")
    )
    mean = (hvd.size() + 1) / 2
    (weight.sum() * (hvd.rank() + 1)).backward()
    assert weight.grad[0] == {"Sum": mean * hvd.size(), "Max": hvd.size()}.get(options.get("op", ""), mean)
    if options:
        with pytest.raises(AssertionError, match=r"a backward pass came after the gradients were combined.*\[F23\]"):
            weight.sum().backward()
        return
    for _ in range(2):
        (weight.sum() * (hvd.rank() + 1)).backward()
    torch.nn.utils.clip_grad_value_([weight], 2.5 * mean)
    optimizer.step()
    assert weight[0].item() == -2.5 * mean


def test_copies_and_compilation_between_two_passes_combine_nothing(hvd: Any) -> None:
    """Each on one rank alone, which holds gradients of its own yet."""
    model = make()
    optimizer = wrapped(hvd, model, 2)
    compiled = torch.compile(model, backend="eager")
    run = (model, compiled)[hvd.rank() == hvd.size() - 1]
    for step in range(2):
        loss_of(model, hvd.rank(), 2 * step).backward()
        if hvd.rank() == 0:
            copied = copy.deepcopy(model)
            assert all(type(param) is torch.nn.Parameter for param in copied.parameters())
            torch.save(model, io.BytesIO())
        loss_of(run, hvd.rank(), 2 * step + 1).backward()
        norm = clip(model)
        optimizer.step()
        if step == 0:
            expected, _ = alone(hvd.size(), lambda rank: ((0, 1),))
            torch.testing.assert_close(norm, expected[0])
        optimizer.zero_grad()
