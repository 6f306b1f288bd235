"""The arithmetic of batch normalisation over several ranks, between its collectives: on the CPU and on GPUs.

    forward    statistics of the rank's batch  -> gathered ->  merge  ->  normalise
    backward   sums over the rank's batch      -> summed   ->  gradient

Means and deviations of the ranks are merged as by Chan, Golub and LeVeque (1979), which is stable, and exact for
batches of different sizes. On GPUs torch's own kernels do it, as for `torch.nn.SyncBatchNorm`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


def dense(tensor: Any, like: Any = None) -> Any:
    """A contiguous tensor, with channels first or last as in ``like``, by default as it is."""
    like = tensor if like is None else like
    for layout in (torch.channels_last, torch.channels_last_3d):
        if like.is_contiguous(memory_format=layout):
            return tensor.contiguous(memory_format=layout)
    return tensor.contiguous()


def traced_statistics(input: Any) -> Any:
    """`Cpu.statistics` by operations that autograd and `torch.compile` support."""
    others = [0, *range(2, input.dim())]
    if not input.numel():
        zeros = input.sum(others, dtype=torch.float64)  # of the input, so that backward meets the other ranks here too
        return torch.cat([zeros, zeros, zeros.new_zeros(1)])
    var, mean = torch.var_mean(input.to(_accuracy(input)), others, correction=0)
    return _row(input, mean, var)


class Cpu:
    """By torch's kernels of plain batch normalisation, with a variance of 1 where the scale has it already.

    In float64 for inputs of float64, else in float32; what ranks exchange of their statistics is always float64.
    """

    @staticmethod
    def statistics(input: Any, eps: float) -> Any:
        """Mean and sum of squared deviations of each channel, and the number of values in one."""
        if not input.numel():
            return torch.zeros(2 * input.size(1) + 1, dtype=torch.float64)
        mean, var = torch.batch_norm_update_stats(input.to(_accuracy(input)), None, None, 0.0)
        return _row(input, mean, var)

    @staticmethod
    def merge(
        input: Any, rows: Any, running_mean: Any, running_var: Any, momentum: float, eps: float
    ) -> tuple[Any, Any]:
        """Mean and 1/sqrt(variance + eps) over all ranks; moves the running statistics toward them."""
        means, deviations = rows[:, :-1].chunk(2, dim=1)
        counts = rows[:, -1:]
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        deviation = (deviations + counts * (means - mean) ** 2).sum(0)
        if running_mean is not None:
            with torch.no_grad():
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
                running_var.lerp_((deviation / (total - 1)).to(running_var.dtype), momentum)
        return mean.to(_accuracy(input)), (deviation / total + eps).rsqrt().to(_accuracy(input))

    @staticmethod
    def normalise(input: Any, weight: Any, bias: Any, mean: Any, invstd: Any, eps: float) -> Any:
        scale = invstd if weight is None else invstd * weight
        shift = None if bias is None else bias.to(mean.dtype)
        return functional.batch_norm(input, mean, torch.ones_like(mean), scale, shift, False, 0.0, 0.0)

    @staticmethod
    def sums(gradient: Any, input: Any, mean: Any, invstd: Any, weight: Any, needs: Any) -> tuple[Any, Any, Any]:
        """The concatenated sums over the batch of the gradient, and of the gradient times the deviation; and the
        gradients of weight and bias."""
        if input.numel():
            how = None, mean, torch.ones_like(mean), None, None, False, 0.0, (False, True, True)
            _, weighted, total = torch.ops.aten.native_batch_norm_backward(gradient, input, *how)
        else:  # that kernel crashes on empty inputs
            weighted = total = torch.zeros_like(mean)
        of_weight = (weighted * invstd).to(weight.dtype) if needs[1] else None
        return torch.cat([total, weighted]), of_weight, total.to(weight.dtype) if needs[2] else None

    @staticmethod
    def gradient(gradient: Any, input: Any, mean: Any, invstd: Any, weight: Any, sums: Any, counts: Any) -> Any:
        """The gradient of the input."""
        total, weighted = (sums / -counts.sum()).to(mean.dtype).chunk(2)
        scale = invstd if weight is None else invstd * weight
        # scale * (gradient - its mean - its part along the input), all but the first term as a batch normalisation.
        affine = scale * invstd**2 * weighted, scale * total
        along = functional.batch_norm(input.to(mean.dtype), mean, torch.ones_like(mean), *affine, False, 0.0, 0.0)
        return along.addcmul_(gradient.to(mean.dtype), channels(scale, input)).to(input.dtype)


class Gpu:
    """torch's kernels, which exchange 1/sqrt(variance + eps) in place of deviations; the methods are those of `Cpu`."""

    @staticmethod
    def statistics(input: Any, eps: float) -> Any:
        channels = input.size(1)
        if not input.numel():
            return torch.zeros(2 * channels + 1, dtype=_accuracy(input), device=input.device)
        mean, invstd = torch.batch_norm_stats(input, eps)
        return torch.cat([mean, invstd, mean.new_full((1,), input.numel() // channels)])

    @staticmethod
    def merge(
        input: Any, rows: Any, running_mean: Any, running_var: Any, momentum: float, eps: float
    ) -> tuple[Any, Any]:
        means, invstds = (part.contiguous() for part in rows[:, :-1].chunk(2, dim=1))
        counts = rows[:, -1].to(means.dtype if running_mean is None else running_mean.dtype)
        mean, invstd = torch.batch_norm_gather_stats_with_counts(
            input, means, invstds, running_mean, running_var, momentum, eps, counts.contiguous()
        )
        return mean, invstd

    @staticmethod
    def normalise(input: Any, weight: Any, bias: Any, mean: Any, invstd: Any, eps: float) -> Any:
        return (
            torch.batch_norm_elemt(input, weight, bias, mean, invstd, eps) if input.numel() else torch.empty_like(input)
        )

    @staticmethod
    def sums(gradient: Any, input: Any, mean: Any, invstd: Any, weight: Any, needs: Any) -> tuple[Any, Any, Any]:
        if not input.numel():
            none = None if weight is None else torch.zeros_like(weight)
            return mean.new_zeros(2 * mean.numel()), none if needs[1] else None, none if needs[2] else None
        total, weighted, of_weight, of_bias = torch.batch_norm_backward_reduce(
            gradient, input, mean, invstd, weight, *needs
        )
        return (
            torch.cat([total, weighted]) if needs[0] else None,
            of_weight if needs[1] else None,
            of_bias if needs[2] else None,
        )

    @staticmethod
    def gradient(gradient: Any, input: Any, mean: Any, invstd: Any, weight: Any, sums: Any, counts: Any) -> Any:
        if not input.numel():
            return torch.zeros_like(input)
        total, weighted = (part.contiguous() for part in sums.chunk(2))
        scale = None if weight is None else weight.to(mean.dtype)
        return torch.batch_norm_backward_elemt(
            gradient, input, mean, invstd, scale, total, weighted, counts.to(torch.int32)
        )


def _accuracy(input: Any) -> Any:
    return torch.float64 if input.dtype is torch.float64 else torch.float32


def _row(input: Any, mean: Any, var: Any) -> Any:
    count = input.numel() // input.size(1)
    return torch.cat([mean.double(), var.double() * count, mean.new_full((1,), count, dtype=torch.float64)])


def channels(values: Any, input: Any) -> Any:
    """One value per channel, in a shape that broadcasts to an input's."""
    return values.view(1, -1, *(1,) * (input.dim() - 2))
