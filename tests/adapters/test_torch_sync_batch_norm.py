"""Batch normalisation over all ranks against plain batch normalisation of all batches in one."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from collectives.base.errors import InvalidArgumentError, MismatchError

CHANNELS = 3
SHAPES = {"1d": (), "1d, length": (7,), "2d": (4, 5), "3d": (2, 3, 4)}
PLAIN = {0: torch.nn.BatchNorm1d, 1: torch.nn.BatchNorm1d, 2: torch.nn.BatchNorm2d, 3: torch.nn.BatchNorm3d}


def batches(rows: list[int], shape: tuple[int, ...], dtype: Any = torch.float64, step: int = 0) -> list[Any]:
    """A batch for each rank, far from zero, with another mean on each rank."""
    generator = torch.Generator().manual_seed(17 + step)
    return [
        (
            torch.randn(count, CHANNELS, *shape, generator=generator, dtype=torch.float64) * (1 + rank)
            + 30 * rank
            + step
        ).to(dtype)
        for rank, count in enumerate(rows)
    ]


def of_all(hvd: Any, tensor: Any) -> Any:
    return sum(hvd.allgather_object(tensor))


def layer(plain: bool, dims: int, hvd: Any, dtype: Any = torch.float64, **options: Any) -> Any:
    module = (
        PLAIN[dims](CHANNELS, dtype=dtype, **options) if plain else hvd.SyncBatchNorm(CHANNELS, dtype=dtype, **options)
    )
    if module.affine:
        with torch.no_grad():
            module.weight.copy_(torch.tensor([0.5, -2.0, 3.0]))
            module.bias.copy_(torch.tensor([1.0, 0.0, -4.0]))
    return module


def compare(hvd: Any, mine: Any, plain: Any, inputs: list[Any], dims: int, steps: int = 2, **tolerance: Any) -> None:
    """The same outputs, gradients and running statistics, step after step."""
    rank = hvd.rank()
    bounds = [sum(each.size(0) for each in inputs[:number]) for number in range(len(inputs) + 1)]
    here = slice(bounds[rank], bounds[rank + 1])
    for step in range(steps):
        whole = (torch.cat(inputs) * (1 + step)).requires_grad_()
        part = (inputs[rank] * (1 + step)).requires_grad_()
        slopes = torch.randn(whole.shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(
            whole.dtype
        )
        wanted, found = plain(whole), mine(part)
        assert found.dtype == wanted.dtype and found.shape == part.shape
        (wanted * slopes).sum().backward()
        (found * slopes[here]).sum().backward()
        torch.testing.assert_close(found, wanted[here], **tolerance)
        torch.testing.assert_close(part.grad, whole.grad[here], **tolerance)
    for name, parameter in mine.named_parameters():
        total = of_all(hvd, parameter.grad)
        torch.testing.assert_close(total, plain.get_parameter(name).grad, **tolerance)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(mine.get_buffer(name), buffer, **tolerance)
        everyone = hvd.allgather_object(mine.get_buffer(name))
        assert all(torch.equal(each, everyone[0]) for each in everyone)


EXACT = {"rtol": 1e-10, "atol": 1e-10}


@pytest.mark.parametrize("rows", ["even", "uneven", "empty"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_equals_plain_batch_norm_over_all_batches(hvd: Any, shape: tuple[int, ...], rows: str) -> None:
    counts = {
        "even": [4] * hvd.size(),
        "uneven": list(range(2, 2 + hvd.size())),
        "empty": [0] * (hvd.size() - 1) + [3],
    }[rows]
    dims = len(shape)
    compare(hvd, layer(False, dims, hvd), layer(True, dims, hvd), batches(counts, shape), dims, **EXACT)


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": None},
        {"momentum": 0.7},
        {"track_running_stats": False},
        {"affine": False},
        {"eps": 0.5, "momentum": 0.0},
    ],
    ids=str,
)
def test_its_options_mean_the_same(hvd: Any, options: dict[str, Any]) -> None:
    inputs = batches([3 + rank for rank in range(hvd.size())], (2, 3))
    compare(hvd, layer(False, 2, hvd, **options), layer(True, 2, hvd, **options), inputs, 2, steps=3, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(hvd: Any, dtype: Any) -> None:
    inputs = batches([4] * hvd.size(), (3, 3), dtype)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.2}
    # With parameters in float32, as under autocast, and with parameters of the input's dtype.
    for of_parameters in dict.fromkeys((torch.float32, dtype)):
        mine, plain = layer(False, 2, hvd, of_parameters), layer(True, 2, hvd, of_parameters)
        compare(hvd, mine, plain, inputs, 2, steps=1, **tolerance)


def test_a_mean_far_from_zero_costs_no_accuracy(hvd: Any) -> None:
    inputs = [each + 10_000 for each in batches([64] * hvd.size(), (3, 3))]
    exact = torch.nn.functional.batch_norm(torch.cat(inputs), None, None, training=True).split(64)[hvd.rank()]
    found = hvd.SyncBatchNorm(CHANNELS, affine=False)(inputs[hvd.rank()].float())
    torch.testing.assert_close(
        found.double(), exact, rtol=0, atol=0.02
    )  # float32 tells neighbours at 10,000 apart by 0.001


def test_autocast(hvd: Any) -> None:
    inputs = batches([4] * hvd.size(), (3, 3), torch.float32)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(CHANNELS, CHANNELS, 1), torch.nn.BatchNorm2d(CHANNELS))
    twin = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted, found = model(torch.cat(inputs)), twin(inputs[hvd.rank()])
    assert found.dtype is wanted.dtype is torch.bfloat16
    torch.testing.assert_close(found, wanted[4 * hvd.rank() :][:4], rtol=0.05, atol=0.05)
    found.sum().backward()
    assert twin[1].weight.grad.dtype is torch.float32


def test_channels_last_stay_last(hvd: Any) -> None:
    for shape, layout in (((4, 5), torch.channels_last), ((2, 3, 4), torch.channels_last_3d)):
        inputs = [each.contiguous(memory_format=layout) for each in batches([2] * hvd.size(), shape)]
        mine = layer(False, len(shape), hvd)
        output = mine(inputs[hvd.rank()].clone().requires_grad_())
        assert output.is_contiguous(memory_format=layout)
        compare(hvd, layer(False, len(shape), hvd), layer(True, len(shape), hvd), inputs, len(shape), **EXACT)
        output.sum().backward()  # what arrives is neither: one number for all elements


def test_evaluation_is_ordinary_and_meets_nobody(hvd: Any) -> None:
    for options in ({}, {"track_running_stats": False}):
        mine, plain = layer(False, 2, hvd, **options).eval(), layer(True, 2, hvd, **options).eval()
        batch = batches([2 + rank for rank in range(hvd.size())], (4, 5))[hvd.rank()]
        if hvd.rank() == 0:
            torch.testing.assert_close(mine(batch), plain(batch), **EXACT)


def test_layers_used_several_times_in_a_step(hvd: Any) -> None:
    inputs = batches([3 + rank for rank in range(hvd.size())], (2,))
    mine = torch.nn.ModuleList([layer(False, 1, hvd), layer(False, 1, hvd)])
    plain = torch.nn.ModuleList([layer(True, 1, hvd), layer(True, 1, hvd)])
    whole, part = torch.cat(inputs).requires_grad_(), inputs[hvd.rank()].clone().requires_grad_()
    start = sum(each.size(0) for each in inputs[: hvd.rank()])
    rows = slice(start, start + part.size(0))
    for _ in range(2):
        wanted = [norm(norm(whole * factor) ** 2).pow(3).sum() for factor, norm in ((1, plain[0]), (2, plain[1]))]
        found = [norm(norm(part * factor) ** 2).pow(3).sum() for factor, norm in ((1, mine[0]), (2, mine[1]))]
        sum(wanted).backward()
        sum(found).backward()
    torch.testing.assert_close(part.grad, whole.grad[rows], **EXACT)
    for name, parameter in mine.named_parameters():
        torch.testing.assert_close(of_all(hvd, parameter.grad), plain.get_parameter(name).grad, **EXACT)


def test_backward_passes_in_another_order_are_an_error_and_no_wrong_numbers(hvd: Any) -> None:
    norm, x = layer(False, 1, hvd), batches([3] * hvd.size(), (2,))[hvd.rank()].requires_grad_()
    losses = [(norm(x * factor) ** 3).sum() for factor in (1, 2)]
    with pytest.raises(MismatchError, match=r"sync_batch_norm\.\d+\.backward\.[01]"):
        losses[hvd.rank() == 0].backward()
    hvd.barrier()
    norm(x).sum().backward()  # and the next step is in order


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(hvd: Any, reentrant: bool) -> None:
    inputs = batches([3] * hvd.size(), (2, 2))
    torch.manual_seed(0)
    plain = torch.nn.Sequential(
        torch.nn.Conv2d(CHANNELS, CHANNELS, 1), torch.nn.BatchNorm2d(CHANNELS), torch.nn.Tanh()
    ).double()
    mine = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    whole, part = torch.cat(inputs).requires_grad_(), inputs[hvd.rank()].clone().requires_grad_()
    plain(whole).pow(2).sum().backward()
    checkpoint(mine, part, use_reentrant=reentrant).pow(2).sum().backward()
    torch.testing.assert_close(part.grad, whole.grad[3 * hvd.rank() :][:3], **EXACT)
    for name, parameter in mine.named_parameters():
        torch.testing.assert_close(of_all(hvd, parameter.grad), plain.get_parameter(name).grad, **EXACT)


def test_a_frozen_input_and_frozen_parameters(hvd: Any) -> None:
    inputs = batches([3] * hvd.size(), (2,))
    for frozen in ("input", "parameters", "bias"):
        mine, plain = layer(False, 1, hvd), layer(True, 1, hvd)
        whole, part = torch.cat(inputs), inputs[hvd.rank()].clone()
        for module, tensor in ((mine, part), (plain, whole)):
            tensor.requires_grad_(frozen != "input")
            module.weight.requires_grad_(frozen != "parameters")
            module.bias.requires_grad_(frozen == "input")
            module(tensor).pow(3).sum().backward()
        if frozen == "input":
            assert part.grad is None
        else:
            torch.testing.assert_close(part.grad, whole.grad[3 * hvd.rank() :][:3], **EXACT)
        if frozen == "parameters":
            assert mine.weight.grad is None
        else:
            torch.testing.assert_close(of_all(hvd, mine.weight.grad), plain.weight.grad, **EXACT)
        assert (mine.bias.grad is None) is (frozen != "input")


def test_one_value_per_channel_on_all_ranks_together_is_too_few(hvd: Any) -> None:
    last = hvd.rank() == hvd.size() - 1
    norm = hvd.SyncBatchNorm(CHANNELS)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        norm(torch.ones(1 if last else 0, CHANNELS))
    if hvd.size() > 1:  # one on each rank is enough
        output = norm(torch.full((1, CHANNELS), float(hvd.rank()) ** 2))
        assert torch.isfinite(output).all() and output.sum() != 0
        assert torch.isfinite(norm.running_var).all()
    before = norm.running_mean.clone()
    empty = torch.ones(0, CHANNELS, requires_grad=True)
    output = norm(empty)
    assert output.shape == (0, CHANNELS) and torch.equal(norm.running_mean, before)
    output.sum().backward()


def test_wrong_inputs_are_refused_on_every_rank(hvd: Any) -> None:
    norm = hvd.SyncBatchNorm(CHANNELS)
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        norm(torch.ones(CHANNELS))
    hvd.barrier()
    if hvd.size() > 1:
        for module in (norm, hvd.SyncBatchNorm(CHANNELS, track_running_stats=False)):
            with pytest.raises(ValueError, match=r"expected 3 channels, got shape \(2, 4\)"):
                module(torch.ones(2, CHANNELS + 1))
        odd = hvd.rank() == 0
        with pytest.raises(MismatchError, match=r"sync_batch_norm\.\d+\.forward"):
            norm(torch.ones(2, CHANNELS + odd))
        with pytest.raises(InvalidArgumentError if odd else MismatchError, match="at least 2 dimensions"):
            norm(torch.ones(CHANNELS) if odd else torch.ones(2, CHANNELS))
        hvd.barrier()
    assert norm(torch.ones(2, CHANNELS) + hvd.rank()).shape == (2, CHANNELS)


def test_a_second_derivative_is_refused(hvd: Any) -> None:
    x = torch.randn(4, CHANNELS, requires_grad=True)
    (gradient,) = torch.autograd.grad(hvd.SyncBatchNorm(CHANNELS)(x).pow(3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_a_process_set(hvd: Any, pair: Any) -> None:
    inputs = batches([2 + rank for rank in range(hvd.size())], (4,))
    if pair.included():
        members = [inputs[0], inputs[-1]]
        mine = hvd.SyncBatchNorm.convert_sync_batchnorm(layer(True, 1, hvd), pair)
        wanted = layer(True, 1, hvd)(torch.cat(members)).split([len(each) for each in members])[pair.rank()]
        torch.testing.assert_close(mine(inputs[hvd.rank()]), wanted, **EXACT)
        torch.testing.assert_close(copy.deepcopy(mine)(inputs[hvd.rank()]), wanted, **EXACT)
        torch.testing.assert_close(pickle.loads(pickle.dumps(mine))(inputs[hvd.rank()]), wanted, **EXACT)
    else:
        with pytest.raises(ValueError, match="is not in"):
            hvd.SyncBatchNorm(CHANNELS, process_set=pair)(inputs[hvd.rank()])
    everyone = hvd.SyncBatchNorm(CHANNELS, process_set=hvd.global_process_set, dtype=torch.float64)
    assert copy.deepcopy(everyone)(inputs[hvd.rank()]).shape == inputs[hvd.rank()].shape


def test_models_are_converted(hvd: Any) -> None:
    shared = torch.nn.BatchNorm1d(CHANNELS, eps=0.1, momentum=None)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, CHANNELS),
        shared,
        torch.nn.Sequential(torch.nn.BatchNorm2d(5, affine=False), torch.nn.SyncBatchNorm(6), shared),
        torch.nn.BatchNorm3d(7, track_running_stats=False),
        torch.nn.GroupNorm(1, 8),
    )
    shared.eval()
    names = list(model.state_dict())
    weight, mean = shared.weight, shared.running_mean
    assert hvd.SyncBatchNorm.convert_sync_batchnorm(model) is model
    norms = [module for module in model.modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)]
    assert [type(each) for each in norms] == [hvd.SyncBatchNorm] * 4 and [each.num_features for each in norms] == [
        3,
        5,
        6,
        7,
    ]
    assert model[1] is model[2][2] and model[1].weight is weight and model[1].running_mean is mean
    assert (model[1].eps, model[1].momentum, model[1].training, model[2][0].training) == (0.1, None, False, True)
    assert model[2][0].weight is None and model[3].running_mean is None
    assert list(model.state_dict()) == names
    alone = hvd.SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm2d(5))
    assert type(alone) is hvd.SyncBatchNorm
    with pytest.raises(ValueError, match="does not know its number of channels yet"):
        hvd.SyncBatchNorm.convert_sync_batchnorm(torch.nn.LazyBatchNorm1d())


def test_copies_and_layers_that_are_gone_do_not_disturb_names(hvd: Any) -> None:
    """Copies are layers of their own; and a layer that only one rank makes, or forgets, changes no name on it."""
    if hvd.rank() == 0:
        hvd.SyncBatchNorm(CHANNELS).eval()(torch.ones(2, CHANNELS))
    original = hvd.SyncBatchNorm(CHANNELS)
    for _ in range(3):
        twin = copy.deepcopy(original)
        x = torch.full((2, CHANNELS), float(hvd.rank()), requires_grad=True)
        (original(x) + twin(x)).pow(2).sum().backward()
        assert torch.equal(original.running_mean, twin.running_mean)
        if hvd.rank() == 0:
            del twin
