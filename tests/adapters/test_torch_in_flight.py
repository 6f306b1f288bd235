"""Gradients that the program reads or changes between ``backward()`` and ``step()``; whole recipes are in
test_torch_recipes.py."""

from __future__ import annotations

import copy
import threading
import warnings
from typing import Any

import pytest
import torch

import collectives
from collectives.torch.buckets import SMALL
from tests.adapters.test_torch_holding_back import Net, batch


@pytest.mark.parametrize("which", [0, 1, 2])
def test_tiny_gradients_whichever_is_used(hvd: Any, which: int) -> None:
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0))
    (params[which].sum() * (hvd.rank() + 1)).backward()
    torch.nn.utils.clip_grad_value_(params, 1.25)
    optimizer.step()
    mean = min((hvd.size() + 1) / 2, 1.25)
    assert [param[0].item() for param in params] == [-mean if at == which else 0.0 for at in range(3)]


def test_an_optimizer_made_while_gradients_of_an_earlier_one_are_in_flight(hvd: Any) -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    weight.sum().backward()
    later = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    optimizer.step()
    del optimizer
    later.zero_grad()
    (weight.sum() * (hvd.rank() + 1)).backward()
    assert weight.grad[0] == (hvd.size() + 1) / 2
    assert type(weight) is torch.nn.Parameter


def test_clipping_in_the_first_step_after_unfreezing(hvd: Any) -> None:
    layer = torch.nn.Linear(3, 1).requires_grad_(False)
    numbers = torch.nn.Parameter(torch.arange(3), requires_grad=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([*layer.parameters(), numbers], lr=1.0))
    layer.requires_grad_(True)
    for _ in range(2):
        optimizer.zero_grad()
        (layer.bias.sum() * (hvd.rank() + 1)).backward()
        assert layer.bias.grad[0] == (hvd.size() + 1) / 2
        optimizer.step()


def test_clipping_after_passes_that_share_no_parameter(hvd: Any) -> None:
    """Each pass of the two is the last of its own half of the model."""
    models = [torch.nn.Linear(3, 2), torch.nn.Linear(2, 3)]
    weights = [param for model in models for param in model.parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0), backward_passes_per_step=2)
    for model in models:
        (model(torch.ones(1, model.in_features)).sum() * (hvd.rank() + 1)).backward()
    mean = (hvd.size() + 1) / 2
    norm = torch.nn.utils.clip_grad_norm_(weights, 1e9)
    assert norm.item() == pytest.approx(mean * (2 * 3 + 2 + 3 * 2 + 3) ** 0.5)
    optimizer.step()


def test_copies_of_a_model_whose_gradients_are_in_flight(hvd: Any) -> None:
    model = Net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    model(batch(hvd.rank(), 0)).backward()
    assert isinstance(model.large, torch.nn.Parameter)
    twin = copy.deepcopy(model)
    assert type(twin.large) is type(model.large) is torch.nn.Parameter
    optimizer.step()
    assert not torch.equal(twin.large, model.large)


def test_a_gradient_changed_through_a_tensor_kept_from_before_is_refused(hvd: Any) -> None:
    model = Net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for step in range(2):
        model.zero_grad(set_to_none=False)
        model(batch(hvd.rank(), step)).backward()
        if step == 0:
            kept = model.large.grad
            optimizer.step()
    kept.mul_(2)
    with pytest.raises(ValueError, match=r"gradient of 'large'.*changed between .* through a tensor obtained earlier"):
        optimizer.step()


def test_gradients_that_ranks_keep_where_others_have_moved_theirs(hvd: Any) -> None:
    """Large gradients are moved into mapped memory, except on the ranks whose program holds them."""
    model, kept, copies, in_hook = Net(), [], [], []
    model.large.register_post_accumulate_grad_hook(lambda param: in_hook.append(param.grad) if hvd.rank() else None)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters())
    reaches = collectives.world().planner.locates_tensors(model.large.nbytes)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(hvd.rank(), step)).backward()
        optimizer.step()
        assert collectives.is_mapped(model.large.grad) == (reaches and hvd.rank() == 0)
        assert not in_hook or in_hook[-1] is model.large.grad
        expected = torch.stack(
            [torch.autograd.grad(model(batch(rank, step)), model.large)[0] for rank in range(hvd.size())]
        )
        torch.testing.assert_close(model.large.grad, expected.mean(0), rtol=1e-4, atol=1e-6)
        kept.append(model.large.grad)
        copies.append(model.large.grad.clone())
    assert all(torch.equal(grad, copy) for grad, copy in zip(kept, copies, strict=True))


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_reading_between_two_backward_passes(hvd: Any, op: str) -> None:
    params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), op=getattr(hvd, op))
    (params[0].sum() * (hvd.rank() + 1)).backward()
    total = hvd.size() * (hvd.size() + 1) / 2
    assert params[0].grad[0] == (total / hvd.size() if op == "Average" else total)
    if op == "Sum":
        with pytest.raises(
            AssertionError, match=r"gradient of .*a backward pass came after the gradients were combined"
        ):
            params[1].sum().backward()
        return
    (params[1].sum() * (hvd.rank() + 1)).backward()
    optimizer.step()
    assert [param[0].item() for param in params] == [-total / hvd.size()] * 2


def test_a_rank_that_alone_reads_between_two_backward_passes_is_told_everywhere(hvd: Any) -> None:
    params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0))

    def losses() -> None:
        optimizer.zero_grad()
        params[0].sum().backward()
        if hvd.rank() == 0:
            assert params[0].grad is not None
        params[1].sum().backward()

    losses()
    with pytest.raises(collectives.MismatchError, match="gradients of different steps were combined"):
        if hvd.rank() == 0:
            optimizer.step()
        else:
            optimizer.step()
            losses()
            optimizer.step()


@pytest.mark.parametrize("explicit", [False, True])
def test_clipping_where_a_rank_has_had_no_backward_pass(hvd: Any, explicit: bool) -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))

    def train() -> None:
        if hvd.rank() > 0:
            (weight.sum() * hvd.size()).backward()
        if explicit:
            optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
        optimizer.step()

    if not explicit:
        with pytest.raises(
            collectives.MismatchError, match=r"1 had no backward pass and called only optimizer\.step\(\)"
        ):
            train()
        assert not weight.any()
        optimizer.zero_grad()
        return
    with warnings.catch_warnings(action="ignore"):
        train()
    torch.testing.assert_close(weight.detach(), torch.full((4,), -0.5))


@pytest.mark.parametrize("op", ["Average", "Sum", "Max"])
def test_backward_before_a_closure(hvd: Any, op: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=getattr(hvd, op))
    part = {"Average": (hvd.size() + 1) / 2, "Sum": hvd.size() * (hvd.size() + 1) / 2, "Max": float(hvd.size())}[op]

    def closure() -> Any:
        loss = weight.sum() * (hvd.rank() + 1)
        loss.backward()
        return loss

    closure()
    optimizer.step(closure)
    torch.testing.assert_close(weight.detach(), torch.full((3,), -2 * part))
    optimizer.zero_grad()
    if hvd.rank() == 0:
        closure()
    optimizer.step(closure)
    once = {"Average": 1 / hvd.size(), "Sum": 1.0, "Max": 1.0}[op]
    torch.testing.assert_close(weight.detach(), torch.full((3,), -3 * part - once))


def test_a_hook_that_reads_the_gradient_of_another_parameter_is_refused(hvd: Any) -> None:
    weight, bias = (torch.nn.Parameter(torch.full((SMALL,), 1.0)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight, bias], lr=1.0), groups=[[weight], [bias]])
    seen: list[Any] = []
    inputs = torch.ones(SMALL, requires_grad=True)
    inputs.register_hook(lambda gradient: seen.append(bias.grad))
    with pytest.raises(ValueError, match=r"gradient of .*1': a hook used it during the backward pass"):
        (inputs * weight + bias).sum().backward()
    assert not seen
    optimizer.step()
    assert bias[0] == 0


def test_another_thread_reads_during_the_backward_pass(hvd: Any) -> None:
    weight, bias = (torch.nn.Parameter(torch.zeros(SMALL)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight, bias], lr=1.0), groups=[[weight], [bias]])
    inputs = torch.ones(SMALL, requires_grad=True)
    refusals = []

    def watch() -> None:
        try:
            assert weight.grad is not None
        except ValueError as error:
            refusals.append(str(error))

    def hook(gradient: Any) -> None:
        if hvd.rank() == 0:
            thread = threading.Thread(target=watch)
            thread.start()
            thread.join(30)

    inputs.register_hook(hook)
    (inputs * weight + bias).sum().backward()
    assert len(refusals) == (hvd.rank() == 0)
    assert all("another thread read a gradient during a backward pass" in refusal for refusal in refusals)
    reader = threading.Thread(target=watch)
    reader.start()
    optimizer.step()
    reader.join(30)
    assert bias[0] == -1


def test_a_table_that_is_sparse_on_one_rank_and_dense_on_another(hvd: Any) -> None:
    table = torch.nn.Embedding(10, 3, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0))
    for _ in range(2):
        optimizer.zero_grad()
        (table.weight.sum() if hvd.rank() == 0 else table(torch.tensor([hvd.rank()])).sum()).backward()
        optimizer.synchronize()
        wanted = torch.full((10, 3), 1 / hvd.size())
        wanted[1 : hvd.size()] += 1 / hvd.size()
        torch.testing.assert_close(table.weight.grad.to_dense(), wanted)
        with optimizer.skip_synchronize():
            optimizer.step()
