"""Recipes around the optimizer: mixed precision, clipping, accumulation, closures, schedulers, checkpoints."""

from __future__ import annotations

import copy
import warnings
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from collectives.base.errors import InvalidArgumentError
from tests.adapters.torch_recipes import (
    OUTPUTS,
    WIDTH,
    Alone,
    Model,
    Ranks,
    Side,
    batches,
    momentum,
    network,
    recipe,
    train,
)

single = partial(network, torch.float32)


# ---- mixed precision -------------------------------------------------------------------------------------------------


@recipe(single)
def test_amp_bfloat16(side: Side, model: Model) -> None:
    optimizer = side.optimizer(momentum(model.parameters()), model)
    for batch in batches(dtype=torch.float32):
        optimizer.zero_grad()
        for _, loss in side.halves(model, batch, torch.bfloat16):
            loss.backward()
        side.average(model)
        optimizer.step()


def scaled(
    side: Side, model: Model, optimizer: Any, *, synchronize: bool = False, clip: float = 0.0, passes: int = 1
) -> list[float]:
    """Train in float16 with a scaler. In the second step the last rank's gradients overflow: all ranks skip that
    step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        for number, batch in enumerate(batches(passes, dtype=torch.float32)):
            for rank, loss in side.halves(model, tuple(rows + step for rows in batch), torch.float16):
                if step == 1 and number == passes - 1 and rank == side.size - 1:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
        side.average(model)
        if synchronize:
            side.synchronize(optimizer)
        if clip:
            scaler.unscale_(optimizer)
            scales.append(nn.utils.clip_grad_norm_(model.parameters(), clip).nan_to_num(0, 0, 0))
        if synchronize:
            with side.skip_synchronize(optimizer):
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert 512.0 in scales
    return scales


@recipe(single)
def test_scaler_synchronize_unscale_and_clip(side: Side, model: Model) -> Any:
    """As Horovod's documentation has it."""
    return scaled(side, model, side.optimizer(momentum(model.parameters()), model), synchronize=True, clip=0.5)


@recipe(single)
def test_scaler_step(side: Side, model: Model) -> Any:
    """As torch's documentation has it."""
    return scaled(side, model, side.optimizer(momentum(model.parameters()), model))


@recipe(single)
def test_scaler_step_of_a_fused_optimizer(side: Side, model: Model) -> Any:
    """Fused optimizers unscale and skip by themselves."""
    return scaled(side, model, side.optimizer(momentum(model.parameters(), fused=True), model))


@recipe(single)
def test_scaler_unscale_and_clip(side: Side, model: Model) -> Any:
    return scaled(side, model, side.optimizer(momentum(model.parameters()), model), clip=0.5)


@recipe(single)
def test_scaler_and_accumulation(side: Side, model: Model) -> Any:
    return scaled(
        side, model, side.optimizer(momentum(model.parameters()), model, backward_passes_per_step=2), passes=2
    )


class Heads(nn.Module):
    """Two heads on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = network(last=WIDTH)
        self.heads = nn.ModuleList([nn.Linear(WIDTH, OUTPUTS, dtype=torch.float64) for _ in range(2)])

    def forward(self, inputs: Any, head: int = 0) -> Any:
        return self.heads[head](self.trunk(inputs))


# ---- clipping --------------------------------------------------------------------------------------------------------


def clipped(side: Side, model: Model, clip: Any, *, synchronize: bool) -> list[Any]:
    optimizer = side.optimizer(momentum(model.parameters()), model)
    results = []
    for batch in batches():
        optimizer.zero_grad()
        side.loss(model, side.rows(batch)).backward()
        if synchronize:
            side.synchronize(optimizer)
        results.append(clip(model.parameters()))
        if synchronize:
            with side.skip_synchronize(optimizer):
                optimizer.step()
        else:
            optimizer.step()
    return [result for result in results if result is not None]


def clamp(parameters: Any) -> None:
    """Past torch's version counters."""
    for parameter in parameters:
        parameter.grad.data.clamp_(-1e-3, 1e-3)


def clamp_arrays(parameters: Any) -> None:
    for parameter in parameters:
        array = parameter.grad.numpy()
        array.clip(-1e-3, 1e-3, out=array)


def norms_of_halves(parameters: Any) -> None:
    first, *others = parameters
    for part in ([first], others):
        nn.utils.clip_grad_norm_(part, 0.05, foreach=True)


def signs(parameters: Any) -> None:
    for parameter in parameters:
        parameter.grad = parameter.grad.sign() * 0.01


NORM = partial(nn.utils.clip_grad_norm_, max_norm=0.1)
VALUE = partial(nn.utils.clip_grad_value_, clip_value=1e-3)
test_clip_norm_after_synchronize = recipe()(partial(clipped, clip=NORM, synchronize=True))
test_clip_norm_before_step = recipe()(partial(clipped, clip=NORM, synchronize=False))
test_clip_value_before_step = recipe()(partial(clipped, clip=VALUE, synchronize=False))
test_clip_norms_of_halves_before_step = recipe()(partial(clipped, clip=norms_of_halves, synchronize=False))
test_gradients_replaced_before_step = recipe()(partial(clipped, clip=signs, synchronize=False))
test_clamp_of_data_before_step = recipe()(partial(clipped, clip=clamp, synchronize=False))
test_clamp_of_arrays_before_step = recipe()(partial(clipped, clip=clamp_arrays, synchronize=False))


@recipe()
def test_clip_in_a_hook_of_the_step(side: Side, model: Model) -> None:
    optimizer = side.optimizer(momentum(model.parameters()), model)
    optimizer.register_step_pre_hook(lambda *given: VALUE(model.parameters()))
    train(side, model, optimizer)


@recipe(Heads)
def test_norm_read_on_one_rank(side: Side, model: Model) -> None:
    """The last rank logs the norm of the gradients, of a head that only rank 0 has used, too; others do not look."""
    optimizer = side.optimizer(momentum(model.parameters()), model)
    for step, batch in enumerate(batches()):
        optimizer.zero_grad()
        for rank, part in side.parts(batch):
            side.loss(partial(model, head=int((rank == 0) == (step % 2 == 0))), part).backward()
        if isinstance(side, Ranks) and side.rank == side.size - 1:
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            assert len(gradients) == 10 or side.size == 1
            assert sum(map(torch.linalg.vector_norm, gradients)) > 0
        optimizer.step()


# ---- accumulation ----------------------------------------------------------------------------------------------------


@recipe()
def test_accumulation(side: Side, model: Model) -> None:
    """Three backward passes a step, then one."""
    optimizer = side.optimizer(momentum(model.parameters()), model, backward_passes_per_step=3)
    for step, batch in enumerate(batches()):
        if step == 2 and not isinstance(side, Alone):
            optimizer.set_backward_passes_per_step(1)
        optimizer.zero_grad()
        for number in range(3 if step < 2 else 1):
            side.loss(model, side.rows(tuple(rows + number for rows in batch))).backward()
        optimizer.step()


@recipe()
def test_accumulation_that_is_not_announced(side: Side, model: Model) -> None:
    """A second backward pass is refused on every rank; the step thereafter is right."""
    optimizer = side.optimizer(momentum(model.parameters()), model)
    batch, *rest = batches()
    side.refuses(partial(twice, side, model, batch), AssertionError, "raise backward_passes_per_step")
    with suppress(InvalidArgumentError):  # gradients that the second pass has changed on their way
        side.synchronize(optimizer)
    train(side, model, optimizer, data=rest)


def twice(side: Side, model: Model, batch: Any) -> None:
    for _ in range(2):
        side.loss(model, side.rows(batch)).backward()


@recipe(Heads)
def test_a_backward_pass_for_each_head(side: Side, model: Model) -> None:
    """Two passes go through the trunk, one through each head."""
    optimizer = side.optimizer(momentum(model.parameters()), model, backward_passes_per_step=2)
    for batch in batches():
        optimizer.zero_grad(set_to_none=False)
        for head in range(2):
            side.loss(partial(model, head=head), side.rows(batch)).backward()
        optimizer.step()


@recipe()
def test_gradient_penalty(side: Side, model: Model) -> None:
    """The norm of the gradient of each row's outputs is part of the loss."""
    optimizer = side.optimizer(momentum(model.parameters()), model)
    for inputs, targets in map(side.rows, batches()):
        inputs.requires_grad_()
        optimizer.zero_grad()
        outputs = model(inputs)
        (slopes,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        side.mean((outputs - targets).square().sum(1, keepdim=True) + slopes.square().sum(1, keepdim=True)).backward()
        optimizer.step()


# ---- closures --------------------------------------------------------------------------------------------------------


def with_closures(
    side: Side, model: Model, optimizer: Any, *, before: int = 0, factor: float = 1.0, clip: float = 0.0
) -> list[Any]:
    """A closure in every step, after so many backward passes of their own; it may clip, as Lightning's do."""
    losses = []
    for batch in batches():

        def closure(batch: Any = batch, clear: bool = not before) -> Any:
            if clear:
                optimizer.zero_grad()
            loss = side.loss(model, side.rows(batch)) * factor
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], clip)
            return loss

        optimizer.zero_grad()
        for number in range(before):
            (side.loss(model, side.rows(tuple(rows - number for rows in batch))) * factor).backward()
        losses.append(optimizer.step(closure))
    return losses


@recipe(tolerance={"rtol": 1e-5, "atol": 1e-7})
def test_lbfgs(side: Side, model: Model) -> Any:
    """The loss, which is averaged, decides when it stops and how far it goes."""
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, history_size=3, line_search_fn="strong_wolfe")
    return with_closures(side, model, side.optimizer(optimizer, model))


@recipe()
def test_closure_that_clips(side: Side, model: Model) -> Any:
    return with_closures(side, model, side.optimizer(momentum(model.parameters()), model), clip=0.1)


@recipe()
def test_closure_and_sum(side: Side, model: Model) -> None:
    """A sum, of losses that say how much of the mean each rank has."""
    options = {} if isinstance(side, Alone) else {"op": side.hvd.Sum}
    with_closures(side, model, side.optimizer(momentum(model.parameters()), model, **options), factor=1 / side.weight)


@recipe()
def test_backward_passes_and_closure_that_clips(side: Side, model: Model) -> None:
    with_closures(
        side, model, side.optimizer(momentum(model.parameters()), model, backward_passes_per_step=3), before=2, clip=0.1
    )


@recipe()
def test_backward_passes_and_closure_and_sum(side: Side, model: Model) -> None:
    options = {} if isinstance(side, Alone) else {"op": side.hvd.Sum, "backward_passes_per_step": 2}
    with_closures(
        side, model, side.optimizer(momentum(model.parameters()), model, **options), before=1, factor=1 / side.weight
    )


# ---- schedulers ------------------------------------------------------------------------------------------------------


def scheduled(side: Side, model: Model, make: Any, *, before: bool) -> list[float]:
    """With a scheduler that was made before wrapping or after it."""
    bare = momentum(model.parameters())
    scheduler = make(bare) if before else None
    optimizer = side.optimizer(bare, model)
    scheduler = scheduler or make(optimizer)
    rates = []
    for batch in batches():
        optimizer.zero_grad()
        side.loss(model, side.rows(batch)).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
            scheduler.step()
        rates += [optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]]
    assert len(set(rates)) > 2
    return rates


ONE_CYCLE = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.2, total_steps=6)
test_one_cycle_made_after_wrapping = recipe()(partial(scheduled, make=ONE_CYCLE, before=False))
test_one_cycle_made_before_wrapping = recipe()(partial(scheduled, make=ONE_CYCLE, before=True))


@recipe()
def test_scheduler_that_looks_at_the_loss(side: Side, model: Model) -> list[float]:
    """Every rank gives it the loss of all."""
    optimizer = side.optimizer(momentum(model.parameters()), model)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
    rates = []
    for batch in batches():
        optimizer.zero_grad()
        loss = side.loss(model, side.rows(batch))
        loss.backward()
        total = side.total(loss.detach() / side.weight)  # while gradients are on their way
        optimizer.step()
        scheduler.step(total)
        rates += [optimizer.param_groups[0]["lr"], scheduler.best]
    assert len(set(rates[::2])) > 1
    return rates


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def resumed(side: Side, model: Model, *, everywhere: bool) -> list[Any]:
    """Stop after two steps, and go on from a checkpoint that every rank loads, or rank 0, which broadcasts it."""

    def start(trained: Model) -> tuple[Any, Any]:
        optimizer = side.optimizer(torch.optim.AdamW(trained.parameters(), lr=0.02), trained)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    def train(trained: Model, optimizer: Any, scheduler: Any, data: Any) -> None:
        for batch in data:
            optimizer.zero_grad()
            side.loss(trained, side.rows(batch)).backward()
            optimizer.step()
            scheduler.step()

    first = copy.deepcopy(model)
    parts = start(first)
    train(first, *parts, batches()[:2])
    saved = copy.deepcopy([part.state_dict() for part in (first, *parts)])
    train(first, *parts, batches()[2:])  # lost
    optimizer, scheduler = start(model)
    if everywhere or isinstance(side, Alone) or side.rank == 0:
        for part, state in zip((model, optimizer, scheduler), saved, strict=True):
            part.load_state_dict(state)
    if not everywhere and isinstance(side, Ranks):
        side.hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        side.hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        scheduler.load_state_dict(side.hvd.broadcast_object(scheduler.state_dict(), root_rank=0))
    train(model, optimizer, scheduler, batches()[2:])
    return [optimizer.param_groups[0]["lr"]]


test_resume_on_every_rank = recipe()(partial(resumed, everywhere=True))
test_resume_on_rank_0 = recipe()(partial(resumed, everywhere=False))
