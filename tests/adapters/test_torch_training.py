"""Options of the optimizer, and every optimizer of torch: recipes as in test_torch_recipes.py."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.adapters.torch_recipes import INPUTS, OUTPUTS, Alone, Model, Side, batches, momentum, network, recipe, train

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"lr": 0.02, "foreach": True},
    "AdamW": {"lr": 0.02, "amsgrad": True, "fused": True},
    "Adagrad": {"lr": 0.05, "foreach": False},
    "Adadelta": {"lr": 1.0},
    "Adamax": {"lr": 0.02},
    "ASGD": {"lr": 0.1},
    "NAdam": {"lr": 0.02},
    "RAdam": {"lr": 0.05},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
    "Rprop": {"lr": 0.02},
    "Adafactor": {"lr": 0.05},
    "Muon": {"lr": 0.05},
}


def without_biases() -> Model:
    """Muon takes matrices only."""
    model = network()
    for layer in model[::2]:
        layer.bias = None
    return model


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(hvd: Any, name: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")

    def program(side: Side, model: Model) -> None:
        optimizer = side.optimizer(getattr(torch.optim, name)(model.parameters(), **OPTIMIZERS[name]), model)
        assert isinstance(optimizer, getattr(torch.optim, name))
        train(side, model, optimizer)

    recipe(without_biases if name == "Muon" else network, views=False)(program)(hvd, False)


def with_options(side: Side, model: Model, **options: Any) -> None:
    train(side, model, side.optimizer(momentum(model.parameters()), model, **options))


def with_lists(side: Side, model: Model) -> None:
    parameters = list(model.parameters())  # of which 3 and 4 are in no list
    with_options(side, model, groups=[[parameters[0], parameters[5]], [parameters[2], parameters[1]]])


test_single_precision = recipe(partial(network, torch.float32))(with_options)
test_predivide_factor_above_1 = recipe()(partial(with_options, gradient_predivide_factor=4.0))
test_one_group = recipe()(partial(with_options, groups=1))
test_more_groups_than_parameters = recipe()(partial(with_options, groups=99))
test_lists_of_parameters = recipe()(with_lists)


@recipe()
def test_without_names(side: Side, model: Model) -> None:
    layers = [{"params": model[0].parameters(), "lr": 0.2}, {"params": model[2:].parameters()}]
    train(side, model, side.optimizer(torch.optim.SGD(layers, lr=0.1)))


@recipe()
def test_sum_is_the_average_times_the_ranks(side: Side, model: Model) -> None:
    alone = isinstance(side, Alone)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (side.size if alone else 1), momentum=0.9)
    train(side, model, side.optimizer(optimizer, model, **({} if alone else {"op": side.hvd.Sum})))


@recipe()
def test_groups_and_several_backward_passes_a_step(side: Side, model: Model) -> None:
    optimizer = side.optimizer(momentum(model.parameters()), model, backward_passes_per_step=2, groups=2)
    data = batches()
    for pair in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        for batch in pair:
            side.loss(model, side.rows(batch)).backward()
        optimizer.step()


class Branches(nn.Module):
    """One layer twice in a forward, one that only some calls use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first, self.twice, self.sometimes, self.last = (
            nn.Linear(*widths, dtype=torch.float64) for widths in ((INPUTS, 8), (8, 8), (8, 8), (8, OUTPUTS))
        )

    def forward(self, inputs: Any, branch: bool = True) -> Any:
        rows = torch.tanh(self.twice(torch.tanh(self.twice(torch.tanh(self.first(inputs))))))
        return self.last(torch.tanh(self.sometimes(rows) if branch else rows))


def branching(side: Side, model: Model, **options: Any) -> None:
    """The last rank never uses the branch, the others in every other step; who does not, adds zeros to the average."""
    optimizer = side.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, **options)
    for step, batch in enumerate(batches()):
        optimizer.zero_grad()
        for rank, part in side.parts(batch):
            used = step % 2 == 0 and (rank < side.size - 1 or side.size == 1)
            side.loss(partial(model, branch=used), part).backward()
        optimizer.step()


test_shared_and_sometimes_unused_parameters = recipe(Branches)(branching)
test_shared_and_sometimes_unused_parameters_in_groups = recipe(Branches)(partial(branching, groups=2))


@recipe()
def test_loading_into_an_optimizer_in_use(side: Side, model: Model) -> None:
    optimizer, start = side.optimizer(momentum(model.parameters()), model), copy.deepcopy(model.state_dict())
    fresh = copy.deepcopy(optimizer.state_dict())
    if not isinstance(side, Alone):
        train(side, model, optimizer)
        model.load_state_dict(start)
        optimizer.load_state_dict(fresh)
    train(side, model, optimizer)


class Twins(nn.Module):
    """Two parameters whose gradients are made to be one tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = (nn.Linear(INPUTS, width, bias=False, dtype=torch.float64) for _ in range(2))
        self.last = nn.Linear(width, OUTPUTS, dtype=torch.float64)

    def forward(self, inputs: Any) -> Any:
        return self.last(torch.tanh(self.first(inputs)) * self.second(inputs)) / 10


def sharing_a_gradient(side: Side, model: Model) -> None:
    """A sum, because averaging what is averaged already would change nothing."""
    alone = isinstance(side, Alone)
    plain = torch.optim.SGD(model.parameters(), lr=0.1 if alone else 0.1 / side.size, momentum=0.9)
    optimizer = side.optimizer(plain, model, **({} if alone else {"op": side.hvd.Sum}))
    model.first.weight.grad = model.second.weight.grad = torch.zeros_like(model.first.weight)
    for batch in batches():
        optimizer.zero_grad(set_to_none=False)
        side.loss(model, side.rows(batch)).backward()
        assert model.first.weight.grad is model.second.weight.grad
        optimizer.step()


test_tiny_parameters_that_share_a_gradient = recipe(partial(Twins, 8), views=False)(sharing_a_gradient)
test_packed_parameters_that_share_a_gradient = recipe(partial(Twins, 500), views=False)(sharing_a_gradient)
test_large_parameters_that_share_a_gradient = recipe(partial(Twins, 30_000), views=False)(sharing_a_gradient)
