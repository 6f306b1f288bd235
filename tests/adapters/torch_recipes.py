"""Recipes: what programs do around a training step, on several ranks and on one process.

A recipe is one function that is run twice: on `Ranks`, where each rank has its own rows of every global batch and
optimizers are distributed; and `Alone`, where one process has all rows and optimizers are torch's own. Both must end
with the same parameters. Rows are dealt out by turns, 13 of them, so that ranks have different numbers of rows.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

ROWS, INPUTS, WIDTH, OUTPUTS, STEPS = 13, 8, 136, 3, 4
TOLERANCES = {torch.float64: {"rtol": 1e-9, "atol": 1e-10}, torch.float32: {"rtol": 1e-4, "atol": 1e-5}}

Model = Any
Batch = tuple[Any, ...]


def network(dtype: Any = torch.float64, last: int = OUTPUTS) -> Model:
    """Tiny parameters, small ones and large ones, which travel in different ways; the same weights on every rank."""
    torch.manual_seed(5)
    first, middle, final = (
        nn.Linear(*widths, dtype=dtype) for widths in ((INPUTS, WIDTH), (WIDTH, WIDTH), (WIDTH, last))
    )
    return nn.Sequential(first, nn.Tanh(), middle, nn.Tanh(), final)


def batches(count: int = STEPS, dtype: Any = torch.float64) -> list[Batch]:
    """The global batches: inputs and targets."""
    source = torch.Generator().manual_seed(9)
    return [
        tuple(torch.randn(ROWS, width, generator=source, dtype=dtype) for width in (INPUTS, OUTPUTS))
        for _ in range(count)
    ]


class Side:
    """What a recipe asks for; as one process answers.

    Attributes:
        size: the number of ranks among which rows are dealt.
        weight: by which a rank multiplies its part of a mean over all rows, because optimizers average over the ranks.
    """

    weight = 1

    def __init__(self, size: int) -> None:
        self.size = size

    def rows(self, batch: Batch) -> Batch:
        """This process's rows."""
        return batch

    def parts(self, batch: Batch) -> list[tuple[int, Batch]]:
        """Ranks and their rows: this rank's, or all; where ranks do different things, or rounding depends on the
        rows."""
        return [(rank, tuple(rows[rank :: self.size] for rows in batch)) for rank in range(self.size)]

    def optimizer(self, optimizer: Any, model: Model = None, **options: Any) -> Any:
        """Distributed, with the names of the model."""
        return optimizer

    def synchronize(self, optimizer: Any) -> None: ...

    def skip_synchronize(self, optimizer: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def refuses(self, attempt: Callable[[], Any], kind: type[Exception], match: str) -> None:
        """Insist on an error, on each of several ranks."""

    def total(self, number: Any) -> Any:
        """The sum over the ranks of a tensor."""
        return number

    def mean(self, values: Any, weight: int | None = None) -> Any:
        """This process's part of the mean over all rows."""
        return values.flatten(1).mean(1).sum() * (weight or self.weight) / ROWS

    def loss(self, model: Model, batch: Batch, weight: int | None = None) -> Any:
        """The mean square of the errors, of rows of this process."""
        return self.mean((model(batch[0]) - batch[1]).square(), weight)

    def halves(self, model: Model, batch: Batch, dtype: Any) -> Iterator[tuple[int, Any]]:
        """Ranks and the losses of their rows, computed in 16 bits: of each rank's rows by themselves, so that all is
        rounded alike."""
        for rank, part in self.parts(batch):
            with torch.autocast("cpu", dtype):
                loss = self.loss(model, part, self.size)
            yield rank, loss

    def average(self, model: Model) -> None:
        """Divide gradients that have added up over the parts."""


class Alone(Side):
    """One process that has all rows."""

    def average(self, model: Model) -> None:
        for parameter in model.parameters():
            parameter.grad /= self.size


class Ranks(Side):
    """One of several ranks."""

    def __init__(self, hvd: Any, **options: Any) -> None:
        super().__init__(hvd.size())
        self.hvd, self.rank, self.weight = hvd, hvd.rank(), hvd.size()
        self.options = options

    def rows(self, batch: Batch) -> Batch:
        return tuple(rows[self.rank :: self.size] for rows in batch)

    def parts(self, batch: Batch) -> list[tuple[int, Batch]]:
        return [(self.rank, self.rows(batch))]

    def optimizer(self, optimizer: Any, model: Model = None, **options: Any) -> Any:
        named = None if model is None else model.named_parameters()
        return self.hvd.DistributedOptimizer(optimizer, named_parameters=named, **{**self.options, **options})

    def synchronize(self, optimizer: Any) -> None:
        optimizer.synchronize()

    def skip_synchronize(self, optimizer: Any) -> AbstractContextManager[None]:
        return optimizer.skip_synchronize()

    def refuses(self, attempt: Callable[[], Any], kind: type[Exception], match: str) -> None:
        if self.size > 1:
            with pytest.raises(kind, match=match):
                attempt()

    def total(self, number: Any) -> Any:
        return self.hvd.allreduce(number, op=self.hvd.Sum)


def momentum(parameters: Any, **options: Any) -> Any:
    return torch.optim.SGD(parameters, **{"lr": 0.1, "momentum": 0.9, **options})


def train(side: Side, model: Model, optimizer: Any, forward: Any = None, data: Any = None) -> None:
    """The plainest loop."""
    for batch in data or batches(dtype=next(model.parameters()).dtype):
        optimizer.zero_grad()
        side.loss(forward or model, side.rows(batch)).backward()
        optimizer.step()


Program = Callable[[Side, Model], "Iterable[Any] | None"]


def recipe(
    model: Callable[[], Model] = network, tolerance: dict[str, float] | None = None, views: bool = True
) -> Callable[[Program], Callable[..., None]]:
    """Make a test of a program that trains a model and returns what else has to be alike, as numbers or tensors.

    Args:
        model: makes it, the same on every rank.
        tolerance: of the comparison; by default that of the parameters' dtype.
        views: try it with gradients that live in their buckets, too.
    """

    def decorate(program: Program) -> Callable[..., None]:
        @pytest.mark.parametrize("view", (False, True)[: 1 + views], ids=("gradients", "views")[: 1 + views])
        def test(hvd: Any, view: bool) -> None:
            initial = model()
            trained, reference = copy.deepcopy(initial), copy.deepcopy(initial)
            found = program(Ranks(hvd, gradient_as_bucket_view=view), trained)
            expected = program(Alone(hvd.size()), reference)
            accuracy = tolerance or TOLERANCES[next(initial.parameters()).dtype]
            torch.testing.assert_close(list(found or ()), list(expected or ()), **accuracy)
            torch.testing.assert_close(trained.state_dict(), reference.state_dict(), **accuracy)
            values = b"".join(parameter.detach().contiguous().numpy().tobytes() for parameter in trained.parameters())
            assert len(set(hvd.allgather_object(hashlib.sha256(values).hexdigest()))) == 1, (
                "the ranks' parameters differ"
            )
            for name, parameter in initial.named_parameters():
                assert not torch.equal(parameter, reference.get_parameter(name)), f"{name} was not trained"

        test.__doc__ = program.__doc__
        return test

    return decorate
