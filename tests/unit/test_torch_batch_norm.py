"""The arithmetic between the collectives of `SyncBatchNorm`, for shards in one process: on the CPU, and as GPUs do it.

Where there is no GPU, torch's kernels are played by what their names promise, called by the real kernels' argument
names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from collectives.torch.batch_norm import Cpu, Gpu, dense  # noqa: E402

EPS, MOMENTUM = 1e-3, 0.3


def other_dims(input: Any) -> list[int]:
    return [dim for dim in range(input.dim()) if dim != 1]


def wide(values: Any, input: Any) -> Any:
    return values.view(-1, *(1,) * (input.dim() - 2))


def batch_norm_stats(input: Any, eps: float) -> Any:
    var, mean = torch.var_mean(input, other_dims(input), correction=0)
    return mean, (var + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    input: Any, mean: Any, invstd: Any, running_mean: Any, running_var: Any, momentum: float, eps: float, counts: Any
) -> Any:
    assert mean.is_contiguous() and invstd.is_contiguous() and counts.dim() == 1 and len(counts) == len(mean)
    assert running_mean is None or counts.dtype == running_mean.dtype
    weights = counts[:, None] / counts.sum()
    merged = (weights * mean).sum(0)
    var = (weights * (invstd**-2 - eps + (mean - merged) ** 2)).sum(0)
    if running_mean is not None:
        running_mean += momentum * (merged - running_mean)
        running_var += momentum * (var * counts.sum() / (counts.sum() - 1) - running_var)
    return merged, (var + eps).rsqrt()


def batch_norm_elemt(input: Any, weight: Any, bias: Any, mean: Any, invstd: Any, eps: float) -> Any:
    scaled = (input - wide(mean, input)) * wide(invstd, input)
    return scaled if weight is None else scaled * wide(weight, input) + wide(bias, input)


def batch_norm_backward_reduce(
    grad_out: Any, input: Any, mean: Any, invstd: Any, weight: Any, input_g: bool, weight_g: bool, bias_g: bool
) -> Any:
    total = grad_out.sum(other_dims(input))
    weighted = (grad_out * (input - wide(mean, input))).sum(other_dims(input))
    sums = (total, weighted) if input_g else (None, None)
    return *sums, weighted * invstd if weight_g else None, total if bias_g else None


def batch_norm_backward_elemt(
    grad_out: Any, input: Any, mean: Any, invstd: Any, weight: Any, sum_dy: Any, sum_dy_xmu: Any, count: Any
) -> Any:
    assert count.dtype is torch.int32 and sum_dy.is_contiguous() and sum_dy_xmu.is_contiguous()
    n = count.sum()
    centred = grad_out - wide(sum_dy / n, input) - (input - wide(mean, input)) * wide(invstd**2 * sum_dy_xmu / n, input)
    return centred * wide(invstd if weight is None else invstd * weight, input)


KERNELS: list[Callable[..., Any]] = [
    batch_norm_stats,
    batch_norm_gather_stats_with_counts,
    batch_norm_elemt,
    batch_norm_backward_reduce,
    batch_norm_backward_elemt,
]


@pytest.fixture(params=["cpu", "gpu"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "cpu":
        return Cpu
    for kernel in KERNELS:
        monkeypatch.setattr(torch, kernel.__name__, kernel)
    return Gpu


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_the_kernels_are_called_as_torch_has_them(kernel: Callable[..., Any]) -> None:
    schema = getattr(torch.ops.aten, kernel.__name__).default._schema
    assert [argument.name for argument in schema.arguments] == list(
        kernel.__code__.co_varnames[: kernel.__code__.co_argcount]
    )


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("rows", [[4, 4], [1, 5, 2], [0, 3, 0, 1]], ids=str)
def test_shards_make_what_the_whole_batch_makes(device: Any, rows: list[int], affine: bool) -> None:
    torch.manual_seed(0)
    weight, bias = (torch.randn(3, dtype=torch.float64) for _ in range(2)) if affine else (None, None)
    whole = torch.randn(sum(rows), 3, 4, 5, dtype=torch.float64) * 3 + 7
    slopes = torch.randn_like(whole)
    leaves = [each.clone().requires_grad_() for each in (whole, weight, bias) if each is not None]
    running = [torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)]
    wanted = torch.nn.functional.batch_norm(leaves[0], *running, *(leaves[1:] or (None, None)), True, MOMENTUM, EPS)
    gradients = torch.autograd.grad((wanted * slopes).sum(), leaves)

    shards, parts = whole.split(rows), slopes.split(rows)
    table = torch.stack([device.statistics(shard, EPS) for shard in shards])
    assert table.shape == (len(rows), 7) and table[:, -1].tolist() == [count * 20 for count in rows]
    table = table[table[:, -1] > 0]
    outputs, sums, merged = [], [], []
    for shard, part in zip(shards, parts, strict=True):
        mine = [torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)]
        mean, invstd = device.merge(shard, table, *mine, MOMENTUM, EPS)
        torch.testing.assert_close(mine, running, rtol=1e-10, atol=1e-10)
        outputs.append(device.normalise(shard, weight, bias, mean, invstd, EPS))
        sums.append(device.sums(part, shard, mean, invstd, weight, (True, affine, affine)))
        merged.append((mean, invstd))
    torch.testing.assert_close(torch.cat(outputs), wanted, rtol=1e-10, atol=1e-10)
    for number in range(1, len(leaves)):
        torch.testing.assert_close(sum(each[number] for each in sums), gradients[number], rtol=1e-10, atol=1e-10)
    total = sum(each[0] for each in sums)
    found = [
        device.gradient(part, shard, *both, weight, total, table[:, -1])
        for part, shard, both in zip(parts, shards, merged, strict=True)
    ]
    torch.testing.assert_close(torch.cat(found), gradients[0], rtol=1e-10, atol=1e-10)


def test_only_what_is_needed_is_made(device: Any) -> None:
    for count in (0, 4):
        batch, mean = torch.ones(count, 3), torch.zeros(3)
        for needs in ((True, False, False), (False, True, False), (False, False, True)):
            _, of_weight, of_bias = device.sums(batch, batch, mean, mean + 1, mean + 1, needs)
            assert (of_weight is not None, of_bias is not None) == needs[1:]


def test_memory_without_gaps_as_another_has_it() -> None:
    image = torch.randn(2, 3, 4, 5)
    for layout, like in (
        (torch.channels_last, image.contiguous(memory_format=torch.channels_last)),
        (torch.contiguous_format, image),
        (torch.contiguous_format, image.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)),
    ):
        for tensor in (
            image,
            image.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
            torch.ones(()).expand(2, 3, 4, 5),
        ):
            found = dense(tensor, like)
            assert found.is_contiguous(memory_format=layout) and torch.equal(found, tensor)
    assert dense(image) is image and dense(image[:, :, ::2]).is_contiguous()
