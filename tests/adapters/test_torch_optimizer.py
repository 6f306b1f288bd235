"""`DistributedOptimizer`: its hooks, buckets and refusals. (That training gives the right parameters:
test_torch_training.py.)"""

from __future__ import annotations

import copy
import gc
import pickle
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.tensor

import collectives
from collectives.torch.buckets import SMALL


class Net(torch.nn.Module):
    """Two layers of small parameters, one of which is not always used, and one large parameter."""

    def __init__(self, large: int = SMALL // 4 + 7) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 5)
        self.second = torch.nn.Linear(5, 2)
        self.large = torch.nn.Parameter(torch.zeros(large))

    def forward(self, x: Any, whole: bool = True) -> Any:
        hidden = self.first(x)
        return (self.second(hidden) if whole else hidden).sum() + (self.large * x.sum()).sum()


def net(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def batch(rank: int, step: int = 0) -> Any:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(1000 * step + rank))


def expected(model: Net, ranks: range, step: int = 0, *, total: bool = False) -> list[Any]:
    """The gradients of a copy of the model, averaged over the ranks' batches."""
    twin = copy.deepcopy(model)
    for param in twin.parameters():
        param.grad = None
    for rank in ranks:
        (twin(batch(rank, step)) / (1 if total else len(ranks))).backward()
    return [param.grad for param in twin.parameters()]


def check(model: Net, gradients: list[Any]) -> None:
    for (name, param), wanted in zip(model.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(param.grad, wanted, msg=lambda text, name=name: f"{name}: {text}")


def wrap(hvd: Any, model: Net, **options: Any) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options)


def check_step(hvd: Any, model: Net, optimizer: Any) -> None:
    """The gradients of a backward pass are averaged over all ranks."""
    wanted = expected(model, range(hvd.size()))
    model(batch(hvd.rank())).backward()
    optimizer.synchronize()
    check(model, wanted)


@pytest.mark.mpi(min_size=2)
def test_a_second_synchronize_does_nothing(hvd: Any) -> None:
    model = net()
    optimizer = wrap(hvd, model, op=hvd.Sum)
    wanted = expected(model, range(hvd.size()), total=True)
    model(batch(hvd.rank())).backward()
    optimizer.synchronize()
    optimizer.synchronize()
    check(model, wanted)
    with pytest.warns(
        UserWarning, match=r"^optimizer.step\(\) called without optimizer.skip_synchronize\(\) context after"
    ):
        optimizer.step()
    check(model, wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_the_class_is_the_optimizers(hvd: Any) -> None:
    model = net()
    bare = torch.optim.AdamW(model.parameters(), lr=0.25, betas=(0.5, 0.75))
    optimizer = hvd.DistributedOptimizer(bare, model.named_parameters())
    assert isinstance(optimizer, torch.optim.AdamW) and type(optimizer).__name__ == "AdamW"
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.75) and optimizer.defaults["lr"] == 0.25
    assert optimizer.state is bare.state


@pytest.mark.parametrize("views", [False, True])
def test_what_nobody_used_keeps_no_gradient(hvd: Any, views: bool) -> None:
    model = net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5),
        model.named_parameters(),
        gradient_as_bucket_view=views,
    )
    for step in range(3):
        optimizer.zero_grad()
        before = model.second.weight.detach().clone()
        model(batch(hvd.rank(), step), whole=step == 1).backward()
        optimizer.step()
        changed = not torch.equal(before, model.second.weight)
        assert changed is (step == 1)
        if not views or hvd.size() > 1:
            assert (model.second.weight.grad is None) is (step != 1)


@pytest.mark.mpi(min_size=2)
def test_zero_grad_in_flight_and_too_many_passes_are_refused(hvd: Any) -> None:
    model = net()
    optimizer = wrap(hvd, model, backward_passes_per_step=2)
    model(batch(hvd.rank())).backward()
    with pytest.raises(AssertionError, match=r"zero_grad\(\) was called after loss.backward\(\)"):
        optimizer.zero_grad()
    model(batch(hvd.rank())).backward()
    with pytest.raises(AssertionError, match=r"at most 2 backward passes \(backward_passes_per_step\)"):
        model(batch(hvd.rank())).backward()
    with pytest.raises(ValueError, match="changed between"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(1)
    check_step(hvd, model, optimizer)


def test_kinds_of_options(hvd: Any) -> None:
    model = net()
    bare, named = torch.optim.SGD(model.parameters(), lr=0.1), list(model.named_parameters())
    assert hvd.DistributedOptimizer(bare, named, backward_passes_per_step=np.int64(2)).backward_passes_per_step == 2
    assert hvd.DistributedOptimizer(bare, named, groups=[torch.nn.ParameterList(model.second.parameters())])
    with pytest.warns(DeprecationWarning, match="groups"):
        hvd.DistributedOptimizer(bare, named, num_groups=2)


def test_refusals(hvd: Any) -> None:
    model = net()
    bare = torch.optim.SGD(model.parameters(), lr=0.1)
    named = list(model.named_parameters())
    for wrong, arguments in {
        "sequence of tuples": {"named_parameters": model.parameters()},
        "must be unique. Found duplicates: large": {"named_parameters": [*named, named[0]]},
        r"1 of 5, of shapes \(16391,\)": {"named_parameters": named[1:]},
        "not supported with op != Average": {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
        "expected an integer of at least 1": {"backward_passes_per_step": 0},
        "non-negative integer": {"groups": -1},
        "consist of torch.Tensor": {"groups": [[model.large, "large"]]},
        "only appear once": {"groups": [[model.large], [model.large]]},
        "wrapped already": {"optimizer": hvd.DistributedOptimizer(bare)},
    }.items():
        with pytest.raises(ValueError, match=wrong):
            hvd.DistributedOptimizer(**{"optimizer": bare, **arguments})
    with pytest.raises(TypeError, match="compression: expected"):
        hvd.DistributedOptimizer(bare, compression="fp16")
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(hvd.DistributedOptimizer(bare))
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(hvd.DistributedOptimizer(bare))


@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_parameters_without_memory_of_their_own_are_refused(hvd: Any, op: str) -> None:
    try:
        from torch.distributed.tensor import distribute_tensor
    except ImportError:  # torch 2.4
        from torch.distributed._tensor import distribute_tensor
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        spread = torch.nn.Parameter(distribute_tensor(torch.ones(2), mesh))
    finally:
        torch.distributed.destroy_process_group()
    unreal = torch.nn.Parameter(torch.empty(2, device="meta"))
    lazy = torch.nn.LazyLinear(2).weight
    refused = [
        ("a DTensor.*FSDP", spread),
        (r"on the meta device.*to_empty\(device='cpu'\)", unreal),
        ("run a forward pass first", lazy),
    ]
    for wrong, param in refused:
        with pytest.raises(TypeError, match=f"parameter 'it': expected .*{wrong}"):
            hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.1), [("it", param)], op=getattr(hvd, op))
        with pytest.raises(TypeError, match=f"it: expected .*{wrong}"):
            hvd.broadcast_parameters({"it": param}, root_rank=0)


def test_names_of_parameters(hvd: Any) -> None:
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.first.parameters(), lr=0.1), model.named_parameters())
    optimizer.add_param_group({"params": [model.large]})
    assert [optimizer._parameter_names[p] for p in (*model.first.parameters(), model.large)] == [
        "first.weight", "first.bias", "allreduce.noname.1.0"
    ]  # fmt: skip


@pytest.mark.mpi(min_size=2)
def test_an_optimizer_that_is_gone_leaves_no_hooks(hvd: Any) -> None:
    model = net()
    for _ in range(2):
        optimizer = wrap(hvd, model)
        gc.collect()
        assert len(model.large._post_accumulate_grad_hooks) <= 2
        del optimizer
        gc.collect()
    assert not model.large._post_accumulate_grad_hooks
    model(batch(hvd.rank())).backward()


@pytest.mark.mpi(min_size=2)
def test_a_mismatch_is_raised_everywhere_and_the_next_step_works(hvd: Any) -> None:
    model = net(large=SMALL if hvd.rank() == 0 else SMALL + 1)
    optimizer = wrap(hvd, model)
    model(batch(hvd.rank())).backward()
    with pytest.raises(collectives.MismatchError, match="large"):
        optimizer.step()
    model.large = torch.nn.Parameter(torch.zeros(SMALL))
    optimizer = wrap(hvd, model)
    model.zero_grad()
    check_step(hvd, model, optimizer)


@pytest.mark.mpi(min_size=2)
def test_a_sparse_gradient_that_nobody_has_after_a_refused_step(hvd: Any) -> None:
    table, layer = torch.nn.Embedding(10, 3, sparse=True), torch.nn.Linear(SMALL // 4, 1, bias=False)
    named = [("table", table.weight), ("layer", layer.weight)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in named], lr=1.0), named, sparse_as_dense=True)
    layer.weight.grad = kept = torch.zeros_like(layer.weight)
    (table(torch.tensor([hvd.rank()])).sum() + layer(torch.ones(SMALL // 4)).sum()).backward()
    kept.mul_(2)
    with pytest.raises(ValueError, match="changed between"):
        optimizer.step()
    optimizer.zero_grad()
    layer(torch.full((SMALL // 4,), float(hvd.rank()))).sum().backward()
    optimizer.synchronize()
    assert table.weight.grad is None
    assert torch.equal(layer.weight.grad, torch.full_like(layer.weight, (hvd.size() - 1) / 2))


def test_adasum_combines_steps(hvd: Any) -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Adasum)
    if hvd.size() > 1:
        with pytest.raises(AssertionError, match="not supported when using Adasum"):
            optimizer.skip_synchronize()
    # Orthogonal steps are added, equal ones averaged.
    (weight[hvd.rank() % 4] * (hvd.rank() + 1)).backward()
    optimizer.step()
    orthogonal = torch.tensor([-(rank + 1.0) if rank < hvd.size() else 0.0 for rank in range(4)])
    torch.testing.assert_close(weight.detach(), orthogonal)
    optimizer.zero_grad()
    weight.sum().backward()
    optimizer.step()
    torch.testing.assert_close(weight.detach(), orthogonal - 1)


@pytest.mark.mpi(min_size=2)
def test_adasum_restores_the_parameters_after_a_mismatch(hvd: Any) -> None:
    weight = torch.nn.Parameter(torch.full((4 + (hvd.rank() == 0),), 3.0))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Adasum)
    weight.sum().backward()
    with pytest.raises(collectives.MismatchError):
        optimizer.step()
    assert torch.equal(weight.detach(), torch.full_like(weight, 3.0))


@pytest.mark.mpi(min_size=2)
def test_a_process_set_trains_by_itself(hvd: Any) -> None:
    pair = hvd.add_process_set([0, 1])
    try:
        model = net()
        optimizer = wrap(hvd, model, process_set=pair)
        ranks = range(2) if hvd.rank() < 2 else range(hvd.rank(), hvd.rank() + 1)
        wanted = expected(model, ranks)
        model(batch(hvd.rank())).backward()
        optimizer.synchronize()
        check(model, wanted)
    finally:
        hvd.remove_process_set(pair)


@pytest.mark.mpi(min_size=2)
def test_a_user_compressor_sees_every_gradient(hvd: Any) -> None:
    seen = []

    class Halves:
        @staticmethod
        def compress(tensor: Any) -> tuple[Any, Any]:
            seen.append(tuple(tensor.shape))
            return tensor / 2, tensor.dtype

        @staticmethod
        def decompress(tensor: Any, context: Any) -> Any:
            return (tensor * 2).to(context)

    model = net()
    optimizer = wrap(hvd, model, compression=Halves)
    check_step(hvd, model, optimizer)
    assert sorted(seen) == sorted(tuple(param.shape) for param in model.parameters())


@pytest.mark.parametrize("views", [False, True])
def test_layouts_and_dtypes(hvd: Any, views: bool) -> None:
    torch.manual_seed(0)
    weights = [
        torch.nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)),
        torch.nn.Parameter(torch.randn(6, 4).t()),
        torch.nn.Parameter(torch.randn(5, dtype=torch.float64)),
        torch.nn.Parameter(torch.randn(7).to(torch.bfloat16)),
        torch.nn.Parameter(torch.randn(())),
        torch.nn.Parameter(torch.randn(0, 3)),
    ]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0), gradient_as_bucket_view=views)
    factors = [torch.arange(weight.numel(), dtype=weight.dtype).reshape(weight.shape) for weight in weights]
    sum(
        (weight * factor).sum().double() * 2 * (hvd.rank() + 1) for weight, factor in zip(weights, factors, strict=True)
    ).backward()
    optimizer.synchronize()
    for weight, factor in zip(weights, factors, strict=True):
        assert weight.grad.dtype == weight.dtype and weight.grad.stride() == weight.stride()
        torch.testing.assert_close(weight.grad, factor * (hvd.size() + 1))


@pytest.mark.mpi(min_size=2)
def test_memory_formats_that_differ_between_ranks(hvd: Any) -> None:
    """Elements are matched by index, not by their order in a rank's memory; of tiny, small and large gradients."""
    shapes = [(4, 3, 2, 2), (32, 16, 3, 3), (64, 64, 3, 3)]
    formats = [torch.contiguous_format, torch.channels_last]
    weights = [torch.nn.Parameter(torch.zeros(shape).to(memory_format=formats[hvd.rank() % 2])) for shape in shapes]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0), op=hvd.Sum)
    factors = [torch.arange(weight.numel(), dtype=torch.float32).reshape(weight.shape) for weight in weights]
    for _ in range(2):
        optimizer.zero_grad()
        sum((weight * factor).sum() for weight, factor in zip(weights, factors, strict=True)).backward()
        optimizer.synchronize()
        for weight, factor in zip(weights, factors, strict=True):
            assert weight.grad.stride() == weight.stride()
            assert torch.equal(weight.grad, factor * hvd.size())


class Scaled(torch.optim.SGD):
    """An optimizer of a user's own, whose ``step`` takes more than a closure."""

    def step(self, closure: Any = None, times: int = 1, *, factor: float) -> Any:
        for group in self.param_groups:
            group["lr"] = factor
        for _ in range(times):
            loss = super().step(closure)
        return loss


class Unclosed(torch.optim.SGD):
    """Another, whose ``step`` takes no closure and whose first argument is a number."""

    def step(self, factor: float = 1.0) -> Any:
        for group in self.param_groups:
            group["lr"] = factor
        return super().step()


@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_a_users_step_gets_its_own_arguments(hvd: Any, op: str) -> None:
    size = hvd.size()

    def stepped(optimizer_class: Any, *arguments: Any, closed: bool = False, **keywords: Any) -> float:
        weight = torch.nn.Parameter(torch.zeros(()))
        optimizer = hvd.DistributedOptimizer(optimizer_class([weight], lr=1.0), op=getattr(hvd, op))

        def closure() -> Any:
            optimizer.zero_grad()
            loss = weight * (1.0 + (hvd.rank() if op == "Average" else 0))
            loss.backward()
            return loss

        if not closed:
            closure()
        optimizer.step(*((closure,) if closed else ()), *arguments, **keywords)
        return weight.item()

    slope = (size + 1) / 2 if op == "Average" else 1.0  # Adasum of parallel vectors of one length is their average
    assert stepped(Scaled, factor=0.5) == -0.5 * slope
    assert stepped(Scaled, None, 3, factor=0.5) == -1.5 * slope
    assert stepped(Scaled, factor=0.25, closed=True) == -0.25 * slope
    assert stepped(Scaled, 2, factor=0.25, closed=True) == -0.5 * slope
    assert stepped(Unclosed) == -slope
    assert stepped(Unclosed, 0.5) == stepped(Unclosed, factor=0.5) == -0.5 * slope


def adasum(rows: Any) -> Any:
    """Of a power of two of vectors."""
    while len(rows) > 1:
        a, b = rows[0::2], rows[1::2]
        dots = (a * b).sum(1, keepdim=True)
        rows = (1 - dots / (2 * a.square().sum(1, keepdim=True))) * a + (
            1 - dots / (2 * b.square().sum(1, keepdim=True))
        ) * b
    return rows[0]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("unscales", [False, True])
def test_all_ranks_skip_a_step_of_adasum_that_overflows_on_one(hvd: Any, unscales: bool) -> None:
    size = 1 << (hvd.size().bit_length() - 1)
    gradients = torch.randn(3, hvd.size(), 6, generator=torch.Generator().manual_seed(0)).double()
    weight, bias = (torch.nn.Parameter(torch.zeros(n).double()) for n in (6, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight, bias], lr=1.0), op=hvd.Adasum)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    expected = torch.zeros(6).double()
    for step in range(4):
        optimizer.zero_grad()
        loss = (weight * gradients[step % 3, hvd.rank()]).sum()
        scaler.scale(loss * (float("inf") if step == 1 and hvd.rank() == hvd.size() - 1 else 1.0)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (1024.0 if step == 0 else 512.0)
        if step != 1:
            expected -= adasum(gradients[step % 3])
        if size == hvd.size():
            torch.testing.assert_close(weight.detach(), expected)
    for other in hvd.allgather_object(weight.detach()):
        torch.testing.assert_close(weight.detach(), other, rtol=0, atol=0)
    assert type(weight) is torch.nn.Parameter


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_leaves_out_a_step_of_adasum_is_told_everywhere(hvd: Any) -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Adasum)
    for _ in range(1 if hvd.rank() else 2):  # of two backward passes rank 0 uses the second
        optimizer.zero_grad()
        weight.sum().backward()
    with pytest.raises(collectives.MismatchError, match=r"at different steps of Adasum.*\[M21\]"):
        optimizer.step()
    assert not weight.any()
    weight.grad = None
    weight.sum().backward()  # in a further step the ranks are together again
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((4,), -1.0))


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"groups": 2}, {"op": "Adasum"}], ids=repr)
def test_parameters_in_another_order_on_each_rank_are_matched_by_name(hvd: Any, options: dict[str, Any]) -> None:
    """Tiny, small and large ones, three of a shape; one of each is used by no rank, and keeps its value."""
    shapes = [(2,), (40, 50), (200, 200)]
    named = [(f"{at}.{number}", shape) for at in range(4) for number, shape in enumerate(shapes)]
    random.Random(hvd.rank()).shuffle(named)
    params = {name: torch.nn.Parameter(torch.full(shape, 2.0)) for name, shape in named}
    factors = [1.0] * hvd.size() if "op" in options else [rank + 1.0 for rank in range(hvd.size())]
    options = {**options, **({"op": hvd.Adasum} if "op" in options else {})}
    bare = torch.optim.SGD(params.values(), lr=1.0, weight_decay=0.5)
    optimizer = hvd.DistributedOptimizer(bare, params.items(), **options)
    for step in range(1, 3):
        optimizer.zero_grad()
        used = [int(name[0]) * param.sum() for name, param in params.items() if name[0] != "0"]
        (sum(used) * factors[hvd.rank()]).backward()
        optimizer.step()
        for name, param in params.items():
            slope = int(name[0]) * sum(factors) / hvd.size()
            expected = 2.0 if not slope else 1.0 - slope if step == 1 else 0.5 - 1.5 * slope
            torch.testing.assert_close(param.detach(), torch.full_like(param, expected), msg=name)
