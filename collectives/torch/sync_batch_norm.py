"""Batch normalisation over the batches of all ranks, on the CPU and on GPUs.

A rank's batch of a few large images gives poor estimates of mean and variance; the batches of all ranks give better
ones. The forward pass gathers every rank's mean, deviation and count, and the backward pass sums two numbers per
channel; `collectives.torch.batch_norm` has the arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from collectives.base.errors import InvalidArgumentError
from collectives.base.reduce_op import Op
from collectives.frontends.layer_numbers import NumberedLayers
from collectives.torch import compiled
from collectives.torch.batch_norm import Cpu, Gpu, channels, dense, traced_statistics
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.runtime import global_process_set, world_of
from collectives.worlds.world import World


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation of inputs of shape (batch, channels, ...), with statistics over the batches of all ranks.

    In training every rank calls it, and goes backward through it, in the same order. Evaluation, and training on one
    rank, are those of ordinary batch normalisation. The gradients of weight and bias cover this rank's batch alone:
    `DistributedOptimizer` combines them over the ranks.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype: as for `torch.nn.BatchNorm2d`.
        process_set: the ranks whose batches belong together; all by default.

    Raises (in the forward pass, on every rank):
        InvalidArgumentError: the input has fewer than two dimensions or other channels; or there is only one value per
        channel. MismatchError: the ranks' channels, devices or orders of layers differ.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        process_set: ProcessSet | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_set = None if process_set is global_process_set else process_set

    def forward(self, input: Any) -> torch.Tensor:
        """Normalise; see the class."""
        if not self.training:
            return super().forward(input)
        world = world_of(self.process_set)
        if world.size == 1:
            return super().forward(input)
        if torch.compiler.is_compiling():
            return self._traced(input, world)
        label = _labels.of(world, self)
        with world.refusing(f"{label.name}.forward"):
            self._check_input_dim(input)
        normalise: Any = _Normalise.apply
        return normalise(input, self.weight, self.bias, *self._running(), self.eps, world, label)

    def _running(self) -> tuple[Any, Any, Any]:
        """The running statistics, if there are any, and their momentum for another batch."""
        if not self.track_running_stats:
            return None, None, 0.0
        mean: Any = self.running_mean
        tracked: Any = self.num_batches_tracked
        tracked.add_(1)
        if self.momentum is not None:
            return mean, self.running_var, self.momentum
        # A number, as torch's kernels need it; a graph has a tensor.
        count = tracked.to(mean.dtype) if torch.compiler.is_compiling() else tracked.item()
        return mean, self.running_var, 1.0 / count

    def _traced(self, input: Any, world: World) -> Any:
        """The same in a graph: one collective, as an operator for `torch.compile`, and differentiable operations."""
        self._check_input_dim(input)
        running = self._running()
        # Every rank's row by a sum, because a graph needs to know the shape of its result.
        own_row = functional.pad(traced_statistics(input)[None], (0, 0, world.rank, world.size - world.rank - 1))
        process_set = 0 if self.process_set is None else self.process_set
        (rows,) = compiled.allreduce([own_row], False, Op.SUM, process_set=process_set)
        torch._assert_async(
            rows[:, -1].sum() > 1, "Expected more than 1 value per channel when training, on all ranks together"
        )
        mean, invstd = Cpu.merge(input, rows, *running, self.eps)
        scale = invstd if self.weight is None else invstd * self.weight
        result = (input - channels(mean, input)) * channels(scale, input)
        return (result if self.bias is None else result + channels(self.bias, input)).to(input.dtype)

    def __getstate__(self) -> dict[str, Any]:
        # A process set refers to the world, which cannot be copied or pickled with the module; its number can, and
        # means the same.
        number = getattr(self.process_set, "process_set_id", None)
        return self.__dict__ if number is None else {**self.__dict__, "process_set": number}

    def _check_input_dim(self, input: Any) -> None:
        if input.dim() < 2:
            raise InvalidArgumentError(
                f"input: expected at least 2 dimensions (batch, channels, ...), got shape {tuple(input.shape)} [F87]"
            )

    @classmethod
    def convert_sync_batchnorm(cls, module: Any, process_set: ProcessSet | None = None) -> torch.nn.Module:
        """Replace every batch normalisation in a module, of any dimension, by this one.

        The new layers keep the parameters and buffers of the old ones: convert before or after making the optimizer.

        Args:
            module: changed in place; a layer that is used in several places stays one.
            process_set: as for the class.

        Returns:
            The module; or, if it is a batch normalisation itself, what replaces it.

        Raises:
            InvalidArgumentError: a lazy batch normalisation that has not seen any input yet.
        """
        return _convert(cls, module, process_set, {})


def _convert(kind: type[SyncBatchNorm], module: Any, process_set: ProcessSet | None, done: dict[int, Any]) -> Any:
    if id(module) in done:
        return done[id(module)]
    result = done[id(module)] = _counterpart(kind, module, process_set) if isinstance(module, _BatchNorm) else module
    for name, child in module.named_children():
        result.add_module(name, _convert(kind, child, process_set, done))
    return result


def _counterpart(kind: type[SyncBatchNorm], module: Any, process_set: ProcessSet | None) -> SyncBatchNorm:
    lazy: Any = module
    if isinstance(module, LazyModuleMixin) and lazy.has_uninitialized_params():
        raise InvalidArgumentError(
            f"module: {module} does not know its number of channels yet; run the model once before you convert it [F88]"
        )
    result = kind(
        module.num_features,
        module.eps,
        module.momentum,
        module.affine,
        module.track_running_stats,
        process_set=process_set,
    )
    result.weight, result.bias = module.weight, module.bias
    result.running_mean, result.running_var = module.running_mean, module.running_var
    result.num_batches_tracked = module.num_batches_tracked
    result.training = module.training
    return result


# ---- names


class _Label:
    """Names the operations of one layer, by its number and, in backward, by that of its use in a step.

    A pass of one layer or use is never matched with that of another: ranks that take another path get an error, not
    wrong numbers. Uses are counted anew in each step, so that names recur and the engine has them cached.
    """

    def __init__(self, number: int) -> None:
        self.name = f"sync_batch_norm.{number}"
        self._uses = 0

    def use(self) -> str:
        """The name of the backward pass of a use."""
        self._uses += 1
        return f"{self.name}.backward.{self._uses - 1}"

    def step(self) -> None:
        """Note a backward pass: later uses belong to the next step."""
        self._uses = 0


_labels = NumberedLayers(_Label)


# ---- the function


class _Normalise(torch.autograd.Function):
    """One collective in each direction, and the arithmetic of the device between them."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Any,
        weight: Any,
        bias: Any,
        running_mean: Any,
        running_var: Any,
        momentum: float,
        eps: float,
        world: World,
        label: _Label,
    ) -> Any:
        device = Gpu if input.is_cuda else Cpu
        input = dense(input)
        rows = world.allgather(device.statistics(input, eps)[None], name=f"{label.name}.forward")
        for per_channel in (running_mean, weight):
            if per_channel is not None and len(per_channel) != input.size(1):
                # On all ranks, or the rows would have differed.
                raise InvalidArgumentError(
                    f"input: expected {len(per_channel)} channels, got shape {tuple(input.shape)} [F89]"
                )
        counts = rows[:, -1].tolist()
        ctx.empty = sum(counts) == 0
        if sum(counts) == 1:
            raise InvalidArgumentError(
                f"rank {world.ranks[world.rank]}: Expected more than 1 value per channel when training, got input size"
                f" {tuple(input.shape)} here and one value on all {world.size} ranks together [F90]"
            )
        if ctx.empty:
            return input.clone()
        if not all(counts):
            rows = rows[[rank for rank, count in enumerate(counts) if count]]
        mean, invstd = device.merge(input, rows, running_mean, running_var, momentum, eps)
        ctx.save_for_backward(input, weight, mean, invstd, rows[:, -1])
        ctx.device, ctx.world, ctx.label = device, world, label
        ctx.name = label.use() if ctx.needs_input_grad[0] else ""
        return device.normalise(input, weight, bias, mean, invstd, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        none = (None,) * 6
        if ctx.empty:
            return gradient, None, None, *none
        input, weight, mean, invstd, counts = ctx.saved_tensors
        gradient = dense(gradient, input)
        sums, of_weight, of_bias = ctx.device.sums(gradient, input, mean, invstd, weight, ctx.needs_input_grad[:3])
        of_input = None
        if ctx.needs_input_grad[0]:
            ctx.label.step()
            sums = ctx.world.allreduce_(sums, op=Op.SUM, name=ctx.name)
            of_input = ctx.device.gradient(gradient, input, mean, invstd, weight, sums, counts)
        return of_input, of_weight, of_bias, *none
