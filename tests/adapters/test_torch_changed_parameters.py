"""Parameters and gradients that the program changes after `DistributedOptimizer` has laid out its buckets for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import collectives
from collectives.torch import backward_reducer
from collectives.torch.buckets import SMALL, TINY

both = pytest.mark.parametrize("views", [False, True], ids=["gradients", "views"])
SIZES = {"tiny": 3, "packed": TINY // 4 + 3, "large": SMALL // 2 + 5}
"""Numbers of elements of parameters whose gradients are combined in different buckets."""


def pattern(param: Any) -> Any:
    """1 and 2 in turns, in the shape of a parameter."""
    return (torch.arange(param.numel()) % 2 + 1).view(param.shape)


def dtype_of_gradient(param: Any) -> Any:
    return getattr(param, "grad_dtype", None) or param.dtype


class Net(torch.nn.Module):
    """Two parameters of each size, used in a product."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, size in SIZES.items():
            for twin in (1, 2):
                setattr(self, f"{name}{twin}", torch.nn.Parameter(torch.full((size,), float(twin), dtype=dtype)))

    def loss(self, factor: float) -> Any:
        """Its gradients are the factor and twice the factor, in turns."""
        return sum((pattern(p).to(dtype_of_gradient(p)) * p * factor).sum() for p in self.parameters())


def wrap(hvd: Any, model: Any, views: bool = False, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), op=hvd.Sum, gradient_as_bucket_view=views, **options
    )


def backward(hvd: Any, model: Any, factor: float = 1.0) -> None:
    model.loss(factor * (hvd.rank() + 1)).backward()


def total(hvd: Any) -> float:
    return hvd.size() * (hvd.size() + 1) / 2


def check(model: Any, times: float, factor: float = 1.0) -> None:
    """Every gradient is the sum of the ranks', without rounding, in its parameter's dtype."""
    for name, param in model.named_parameters():
        dtype = dtype_of_gradient(param)
        assert param.grad.dtype is dtype, name
        assert torch.equal(param.grad.double(), pattern(param) * torch.tensor(factor, dtype=dtype).double() * times), (
            name
        )


@both
@pytest.mark.parametrize("one_core", [False, True])
@pytest.mark.parametrize(
    ("before", "after", "factor"),
    [
        (torch.float16, torch.float32, 1e5),
        (torch.bfloat16, torch.float32, 1 + 2**-20),
        (torch.float32, torch.float64, 1 + 2**-40),
        (torch.float32, torch.bfloat16, 0.5),
    ],
    ids=str,
)
def test_a_model_converted_after_wrapping(
    hvd: Any, monkeypatch: pytest.MonkeyPatch, before: Any, after: Any, factor: float, views: bool, one_core: bool
) -> None:
    """While gradients leave in the backward pass, and while they are held back."""
    monkeypatch.setattr(backward_reducer, "holds_back", lambda world: one_core)
    model = Net(before)
    optimizer = wrap(hvd, model, views)
    for step in range(5):
        optimizer.zero_grad()
        if step == 1:
            model.to(after)
        backward(hvd, model, factor if step else 0.5)
        check(model, total(hvd), factor if step else 0.5)
        optimizer.step()


@both
def test_half_a_model_converted_after_wrapping(hvd: Any, views: bool) -> None:
    model = Net()
    optimizer = wrap(hvd, model, views)
    for name, param in model.named_parameters():
        if name.endswith("2"):
            param.grad = None
            param.data = param.data.double()
    for _ in range(4):
        backward(hvd, model, 1 + 2**-40)
        check(model, total(hvd), 1 + 2**-40)
        optimizer.step()
        optimizer.zero_grad()


def test_a_dtype_for_gradients_chosen_after_wrapping(hvd: Any) -> None:
    model = Net(torch.bfloat16)
    if not hasattr(model.tiny1, "grad_dtype"):
        pytest.skip(f"torch {torch.__version__} has no grad_dtype")
    optimizer = wrap(hvd, model)
    for param in model.parameters():
        param.grad_dtype = torch.float32
    for users in (range(hvd.size()), range(hvd.size()), range(1)):
        optimizer.zero_grad()
        if hvd.rank() in users:
            backward(hvd, model, 1 + 2**-20)
        optimizer.synchronize()
        check(model, sum(rank + 1 for rank in users), 1 + 2**-20)
        with optimizer.skip_synchronize():
            optimizer.step()


@both
@pytest.mark.parametrize("reshape", [lambda p: p.repeat(2), lambda p: p[:1], lambda p: p.repeat(2).view(2, -1)])
def test_parameters_resized_after_wrapping(hvd: Any, views: bool, reshape: Callable[[Any], Any]) -> None:
    model = Net()
    optimizer = wrap(hvd, model, views)
    for step in range(3):
        if step == 1:
            for param in model.parameters():
                param.grad = None
                param.data = reshape(param.data)
        backward(hvd, model)
        check(model, total(hvd))
        optimizer.step()
        optimizer.zero_grad()


@both
@pytest.mark.parametrize("used", [True, False], ids=["used", "unused"])
@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("what", ["dtype", "shape"])
def test_a_parameter_that_one_rank_has_changed_is_named_on_every_rank(
    hvd: Any, views: bool, kind: str, what: str, used: bool
) -> None:
    model = Net()
    optimizer = wrap(hvd, model, views)
    changed = getattr(model, f"{kind}2")
    if hvd.rank() == 1:
        changed.grad = None
        changed.data = changed.data.double() if what == "dtype" else changed.data.view(1, -1)
    sum(p.sum() for name, p in model.named_parameters() if used or hvd.rank() == 0 or name != f"{kind}2").backward()
    with pytest.raises(collectives.MismatchError, match=f"rank {hvd.rank()} has '{kind}2', of ") as failure:
        optimizer.step()
    assert ("float64" if what == "dtype" else f"(1, {SIZES[kind]})") in str(failure.value)
    changed.grad = None
    changed.data = torch.zeros(SIZES[kind])
    optimizer.zero_grad()
    backward(hvd, model)
    check(model, total(hvd))


@both
def test_a_parameter_whose_tensor_torch_has_swapped_is_named(hvd: Any, views: bool) -> None:
    """Its hook stayed with the other tensor, so that a read before ``step()`` would not wait for the other ranks."""
    model = Net()
    optimizer = wrap(hvd, model, views)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    optimizer.zero_grad()
    backward(hvd, model)
    with pytest.raises(collectives.InvalidArgumentError, match=r"gradient of '.*set_swap_module_params_on_conversion"):
        optimizer.step()
    model.zero_grad()
    newer = wrap(hvd, model, views)
    backward(hvd, model)
    check(model, total(hvd))
    newer.step()


def test_views_whose_strides_differ_between_ranks_are_refused(hvd: Any) -> None:
    weight = torch.zeros(4, 3)
    params = [torch.nn.Parameter(weight.t() if hvd.rank() else weight.t().contiguous())]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), gradient_as_bucket_view=True)
    (params[0] * torch.arange(12.0).view(3, 4)).sum().backward()
    with pytest.raises(collectives.MismatchError, match=r"noname.0.0', of .* strides \(.*, .*\); rank"):
        optimizer.step()


def test_ranks_that_have_wrapped_different_parameters_are_told_by_their_names(hvd: Any) -> None:
    names = ["a", "m", "z"] if hvd.rank() == 0 else ["a", "y"]
    params = [torch.nn.Parameter(torch.zeros(3)) for _ in names]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), zip(names, params, strict=True))
    sum(param.sum() for param in params).backward()
    with pytest.raises(collectives.MismatchError, match=r"(?s)a to z, 3 parameters.*a to y, 2 parameters") as failure:
        optimizer.step()
    assert "order of gradients" in str(failure.value)


@pytest.mark.parametrize("frozen", [False, True], ids=["added", "unfrozen"])
def test_a_parameter_that_one_rank_has_besides_is_named_on_every_rank(hvd: Any, frozen: bool) -> None:
    first, second = (torch.nn.Parameter(torch.zeros(SIZES["large"])) for _ in range(2))
    second.requires_grad_(not frozen)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, second] if frozen else [first], lr=1.0))
    if hvd.rank() == 0:
        second.requires_grad_() if frozen else optimizer.add_param_group({"params": [second]})
    (first.sum() + second.sum()).backward()
    with pytest.raises(collectives.MismatchError, match=rf"noname.{'0.1' if frozen else '1.0'}', of "):
        optimizer.step()
    hvd.barrier()


# ---- what the program does to gradients that are views

Change = Callable[[Any, Any], None]


def set_data(param: Any, value: Any) -> None:
    param.grad.data = value


def set_gradient(param: Any, value: Any) -> None:
    param.grad = value


def write(param: Any, value: Any) -> None:
    param.grad.data.copy_(value)


CHANGES = [set_data, set_gradient, write]


@both
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_clipped_gradients_do_not_return_in_the_next_steps(
    hvd: Any, views: bool, change: Change, to_none: bool
) -> None:
    model = Net()
    start = [param.detach().clone() for param in model.parameters()]
    optimizer = wrap(hvd, model, views)
    for step in range(1, 4):
        optimizer.zero_grad(set_to_none=to_none)
        backward(hvd, model, 2.0)
        for param in model.parameters():
            change(param, param.grad.clamp(-3, 3))
        optimizer.step()
        for param, first in zip(model.parameters(), start, strict=True):
            wanted = (pattern(param) * 2 * total(hvd)).clamp(-3, 3)
            assert torch.equal(param.detach(), first - step * wanted)


@both
@pytest.mark.parametrize("change", CHANGES)
def test_gradients_that_the_program_has_computed_itself(hvd: Any, views: bool, change: Change) -> None:
    model = Net()
    optimizer = wrap(hvd, model, views)
    for step in range(3):
        optimizer.zero_grad()
        for number, param in enumerate(model.parameters()):
            value = torch.arange(param.numel()).remainder(7).float() * (hvd.rank() + 1 + number + step)
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            change(param, value)
        optimizer.synchronize()
        for number, param in enumerate(model.parameters()):
            times = sum(rank + 1 + number + step for rank in range(hvd.size()))
            assert torch.equal(param.grad, torch.arange(param.numel()).remainder(7).float() * times)
        with optimizer.skip_synchronize():
            optimizer.step()


@both
def test_a_gradient_that_a_kept_tensor_moves_elsewhere_in_flight_is_refused(hvd: Any, views: bool) -> None:
    model = Net()
    optimizer = wrap(hvd, model, views)
    model.large1.grad = kept = torch.zeros_like(model.large1) if not views else model.large1.grad
    backward(hvd, model)
    kept.data = torch.zeros_like(kept)
    with pytest.raises(ValueError, match=r"gradient of 'large1'.*between backward"):
        optimizer.step()
    optimizer.zero_grad()
    backward(hvd, model)
    check(model, total(hvd))
