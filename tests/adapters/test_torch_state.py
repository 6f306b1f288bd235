"""The same start on every rank: parameters, the state of every optimizer of torch, and objects."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import collectives
from collectives.base.errors import InvalidArgumentError, InvalidTypeError, MismatchError
from collectives.frontends import broadcasts
from collectives.torch import optimizer_state
from collectives.torch.optimizer import DistributedOptimizer
from collectives.worlds import runtime
from tests.adapters.test_torch_training import OPTIMIZERS as TRAINED

LARGE = 1 << 17  # elements of float32: more than what travels packed


class Net(torch.nn.Module):
    """Small and large parameters, one of them with channels last, a buffer, and two names for one weight."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.convolution = torch.nn.Conv2d(3, 4, 3)
        self.convolution.to(memory_format=torch.channels_last)
        self.norm = torch.nn.BatchNorm2d(4)
        self.large = torch.nn.Parameter(torch.randn(LARGE))
        self.head = torch.nn.Linear(4, 4, bias=False)
        self.tied = self.head
        self.register_buffer("seen", torch.tensor(seed))


SOURCES: dict[str, Callable[[Any], Any]] = {
    "state_dict": lambda model: model.state_dict(),
    "list of pairs": lambda model: list(model.named_parameters()),
    "list": lambda model: list(model.parameters()),
    "named_parameters": lambda model: model.named_parameters(),
    "parameters": lambda model: model.parameters(),
    "pairs without names": lambda model: [(None, parameter) for parameter in model.parameters()],
}


def equal(found: Any, wanted: Any) -> bool:
    """The same type and bits, deep down."""
    if isinstance(wanted, torch.Tensor):
        alike = type(found) is type(wanted) and found.dtype == wanted.dtype and found.shape == wanted.shape
        return bool(alike and torch.equal(found.nan_to_num(), wanted.nan_to_num()))
    if isinstance(wanted, dict):
        return (
            type(found) is type(wanted)
            and found.keys() == wanted.keys()
            and all(equal(found[key], wanted[key]) for key in wanted)
        )
    if isinstance(wanted, (list, tuple)):
        return type(found) is type(wanted) and len(found) == len(wanted) and all(map(equal, found, wanted))
    return type(found) is type(wanted) and found == wanted


def on_all(hvd: Any, call: Callable[[], Any], said: str, kinds: tuple[type[Exception], ...] = (MismatchError,)) -> None:
    """The call fails on every rank, with an error of one of these kinds that says so; and ranks are in step
    afterwards."""
    with pytest.raises(kinds) as error:
        call()
    assert said in str(error.value), str(error.value)
    hvd.barrier()


# ---- parameters


@pytest.mark.parametrize("source", SOURCES)
def test_parameters_become_the_roots_in_place(hvd: Any, source: str) -> None:
    for root in {0, hvd.size() - 1}:
        model, wanted = Net(10 + hvd.rank()), Net(10 + root)
        addresses = [parameter.data_ptr() for parameter in model.parameters()]
        versions = [parameter._version for parameter in model.parameters()]
        assert hvd.broadcast_parameters(SOURCES[source](model), root_rank=root) is None
        for (name, parameter), right in zip(model.named_parameters(), wanted.parameters(), strict=True):
            assert torch.equal(parameter, right) and parameter.requires_grad, name
        assert (int(model.seen) == 10 + root) is (source == "state_dict" or hvd.rank() == root)
        assert addresses == [parameter.data_ptr() for parameter in model.parameters()]
        assert model.convolution.weight.is_contiguous(memory_format=torch.channels_last)
        changed = [
            parameter._version > version for parameter, version in zip(model.parameters(), versions, strict=True)
        ]
        assert all(changed) if hvd.rank() != root else not any(changed)


def test_a_graph_that_needs_the_old_values_says_so(hvd: Any) -> None:
    for size in (3, LARGE):
        parameter = torch.nn.Parameter(torch.full((size,), 1.0 + hvd.rank()))
        loss = (parameter**2).sum()
        hvd.broadcast_parameters([parameter], 0)
        if hvd.rank() == 0:
            loss.backward()
            assert torch.equal(parameter.grad, torch.full((size,), 2.0))
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_dtypes_and_layouts(hvd: Any) -> None:
    def make(rank: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(rank)
        numbers = torch.randn(6, LARGE, generator=generator)
        tensors = {
            "flags": numbers[0, :3] > 0,
            "count": torch.tensor(1000 + rank),
            "complex": torch.complex(numbers[0, :5], numbers[1, :5]),
            "empty": torch.empty(0, 3),
            "transposed": numbers[:, :5].t(),
            "strided": numbers[:3, ::7],
            "large, strided": numbers[:, ::2],
            "large, channels last": numbers[:, : LARGE // 2]
            .reshape(6, 8, 64, -1)
            .contiguous(memory_format=torch.channels_last),
        }
        for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.float8_e4m3fn):
            tensors[f"{dtype}"] = numbers[2, :5].to(dtype)
            tensors[f"large {dtype}"] = numbers.to(dtype)
        with torch.inference_mode():
            tensors["inference"] = numbers[4, :9] * 1
        return tensors

    mine, wanted = make(hvd.rank()), make(hvd.size() - 1)
    if hvd.rank() == 0:
        mine = dict(reversed(mine.items()))
    strides = {name: tensor.stride() for name, tensor in mine.items()}
    hvd.broadcast_parameters(mine, hvd.size() - 1)
    for name, right in wanted.items():
        found = mine[name]
        bits = (
            (found, right)
            if right.dtype is not torch.float8_e4m3fn
            else (found.view(torch.uint8), right.view(torch.uint8))
        )
        assert torch.equal(*bits) and found.stride() == strides[name], name


def test_the_layout_may_differ_between_ranks(hvd: Any) -> None:
    for shape in ((2, 3, 4, 5), (2, 32, 64, 64)):
        image = torch.full(shape, float(hvd.rank())) + torch.arange(shape[3])
        layout = torch.channels_last if hvd.rank() % 2 else torch.contiguous_format
        image = image.contiguous(memory_format=layout)
        hvd.broadcast_parameters([image], 0)
        assert torch.equal(image, torch.arange(shape[3], dtype=torch.float32).expand(shape))
        assert image.is_contiguous(memory_format=layout)


def test_what_is_no_tensor_is_passed_over(hvd: Any) -> None:
    weight = torch.full((3,), float(hvd.rank()))
    hvd.broadcast_parameters({"weight": weight, "_extra_state": {"step": 3}, "missing": None, "version": 2}, 0)
    assert torch.equal(weight, torch.zeros(3))
    weight = torch.full((3,), float(hvd.rank()))
    hvd.broadcast_parameters(iter([None, weight]), 0)
    assert torch.equal(weight, torch.zeros(3))
    hvd.broadcast_parameters({}, 0)
    hvd.broadcast_parameters([], 0)


def test_many_small_tensors_travel_together(hvd: Any) -> None:
    tensors = [torch.full((2, 3 + number % 5), float(hvd.rank())) for number in range(161)]
    before = collectives.world().statistics
    hvd.broadcast_parameters(tensors, 0)
    after = collectives.world().statistics
    assert after.rounds - before.rounds < 10
    assert all(not tensor.any() for tensor in tensors)


def test_small_tensors_that_fill_several_buffers(hvd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcasts, "BUFFER_BYTES", 1000)
    dtypes = (torch.float32, torch.uint8, torch.float64)
    tensors = [
        torch.full((number % 90,), 10 * hvd.rank() + number % 7, dtype=dtypes[number % 3]) for number in range(120)
    ]
    hvd.broadcast_parameters(tensors, hvd.size() - 1)
    for number, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full_like(tensor, 10 * (hvd.size() - 1) + number % 7)), number


def test_parameters_that_differ_in_shape_or_name_are_named_on_every_rank(hvd: Any) -> None:
    odd = hvd.rank() == hvd.size() - 1
    mine = float(hvd.rank())
    last = hvd.size() - 1
    for size in (3, LARGE):
        params = {"a": torch.full((2,), mine), "b": torch.full((size + odd,), mine), "c": torch.full((size,), mine)}
        said = f"tensor 'b' is not the same on every rank: float32 of shape ({size},) on cpu on rank"
        on_all(hvd, lambda params=params: hvd.broadcast_parameters(params, 0), said)
        assert all((tensor == mine).all() for tensor in params.values())
        on_all(hvd, lambda params=params: hvd.broadcast_parameters(params, 0), f"({size + 1},) on cpu on rank {last}.")
    params = {"a": torch.full((2,), mine), "extra" if odd else "other": torch.full((2,), mine)}
    on_all(
        hvd,
        lambda: hvd.broadcast_parameters(params, 0),
        "tensor 'other' is not the same on every rank: float32 of shape (2,)",
    )
    on_all(hvd, lambda: hvd.broadcast_parameters(params, 0), f"; absent on rank {last}")
    on_all(
        hvd,
        lambda: hvd.broadcast_parameters([torch.ones(2)] * (2 + odd), 0),
        "tensor '[2]' is not the same on every rank: absent on",
    )
    kind = torch.float64 if odd else torch.float32
    on_all(
        hvd, lambda: hvd.broadcast_parameters([torch.ones(2, dtype=kind)], 0), "float64 of shape (2,) on cpu on rank"
    )
    on_all(
        hvd,
        lambda: hvd.broadcast_parameters([torch.ones(2)], int(odd)),
        "root_rank is not the same on every rank: rank 0 on rank",
    )
    assert all((tensor == mine).all() for tensor in params.values())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (3, "params: expected a mapping of names to tensors (a state_dict), or an iterable of tensors"),
        (torch.ones(3), "got torch.Tensor"),
        ("weight", "got str"),
        ([("a", torch.ones(1)), ("a", torch.ones(1))], "params: expected unique names, got 'a' twice"),
        (
            {"state": {}, "param_groups": []},
            "params: expected tensors, but none of the 2 values is a tensor; the first is state, a dict",
        ),
        ([torch.ones(3).expand(2, 3)], "share memory"),
        (
            [torch.ones(1), (torch.ones(1), torch.ones(1))],
            "expected tensors or (name, tensor) pairs, got a tuple among them",
        ),
        ([torch.ones(1), 3.0], "expected tensors or (name, tensor) pairs, got a float among them"),
    ],
)
def test_what_are_no_parameters_is_refused(hvd: Any, wrong: Any, said: str) -> None:
    on_all(hvd, lambda: hvd.broadcast_parameters(wrong, 0), said, (ValueError,))


def test_tensors_out_of_reach_are_refused(hvd: Any) -> None:
    for wrong, said in ((torch.ones(3, device="meta"), "meta"), (torch.eye(3).to_sparse(), "to_dense()")):
        on_all(hvd, lambda wrong=wrong: hvd.broadcast_parameters([wrong], 0), said, (TypeError,))
    on_all(hvd, lambda: hvd.broadcast_parameters([torch.ones(3)], hvd.size()), "root_rank", (ValueError,))


def test_a_mistake_on_one_rank_is_an_error_on_all(hvd: Any) -> None:
    params = 3 if hvd.rank() == 1 else [torch.ones(3)]
    on_all(
        hvd,
        lambda: hvd.broadcast_parameters(params, 0),
        "expected",
        (InvalidArgumentError if hvd.rank() == 1 else MismatchError,),
    )


def test_what_one_rank_has_no_memory_for_is_told_to_all(hvd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the operations that a call is made of; and the next call is in step."""
    odd = hvd.rank() == hvd.size() - 1
    model = Net(hvd.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=hvd.rank() + 1.0, momentum=0.5)

    def none_left(*arguments: Any, **keywords: Any) -> Any:
        raise MemoryError("none left")

    calls: list[tuple[Any, str, Callable[[], Any]]] = [
        (torch, "cat", lambda: hvd.broadcast_parameters(model.state_dict(), 0)),
        (optimizer_state, "put_together", lambda: hvd.broadcast_optimizer_state(optimizer, 0)),
        (
            torch.Tensor,
            "coalesce",
            lambda: hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), "sparse", hvd.Sum).wait(),
        ),
    ]
    for owner, name, call in calls:
        with monkeypatch.context() as patch:
            if odd:
                patch.setattr(owner, name, none_left)
            on_all(hvd, call, "none left", (MemoryError if odd else MismatchError,))
        call()
    for name, parameter in Net(0).named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_parameters_within_a_process_set(hvd: Any, pair: Any) -> None:
    model, last = Net(hvd.rank()), hvd.size() - 1
    if pair.included():
        hvd.broadcast_parameters(model.named_parameters(), last, pair)
    for name, parameter in Net(last if pair.included() else hvd.rank()).named_parameters():
        assert torch.equal(model.get_parameter(name), parameter)
    if pair.included():
        with pytest.raises(
            MismatchError, match=rf"\(3,\) on cpu on rank 0; float32 of shape \(4,\) on cpu on rank {last}"
        ):
            hvd.broadcast_parameters([torch.ones(3 + (hvd.rank() == last))], 0, process_set=pair)


# ---- optimizers

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    **{
        name: functools.partial(getattr(torch.optim, name), **options)
        for name, options in TRAINED.items()
        if name != "Muon" and hasattr(torch.optim, name)
    },
    "SGD, plain": lambda params: torch.optim.SGD(params, lr=0.1),
    "AdamW, its rate a tensor": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01), foreach=False),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.5, max_iter=3, history_size=4),
    "SparseAdam": lambda params: torch.optim.SparseAdam(params),
}


def parameters(seed: int) -> list[Any]:
    torch.manual_seed(seed)
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    return [torch.nn.Parameter(each) for each in (torch.randn(4, 3), torch.randn(5), image)]


def train(optimizer: Any, params: list[Any], seed: int) -> None:
    """A step with gradients that only the seed decides."""
    generator = torch.Generator().manual_seed(seed)
    slopes = [torch.randn(parameter.shape, generator=generator) for parameter in params]

    def closure() -> Any:
        for parameter, slope in zip(params, slopes, strict=True):
            gradient = (slope + 0.1 * parameter.detach()).to(parameter.dtype)
            parameter.grad = gradient.to_sparse() if isinstance(optimizer, torch.optim.SparseAdam) else gradient
        return sum((parameter.detach() * slope).sum() for parameter, slope in zip(params, slopes, strict=True))

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


@pytest.mark.parametrize("steps", [(2, 0), (2, 1), (0, 2)], ids=["root only", "both", "others only"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_state_becomes_the_roots_and_training_goes_on_alike(hvd: Any, kind: str, steps: tuple[int, int]) -> None:
    root = hvd.size() - 1
    is_root = hvd.rank() == root
    params = parameters(1)
    optimizer = OPTIMIZERS[kind](params)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    for step in range(steps[0 if is_root else 1]):
        train(optimizer, params, 100 * hvd.rank() + step)
    if is_root:
        optimizer.param_groups[0].update(lr=0.25, weight_decay=0.125, betas=(0.5, 0.75, None), note={"of": [1, "x"]})
    before = [parameter.detach().clone() for parameter in params]
    held = {
        (number, key): value
        for number, parameter in enumerate(params)
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    everyone = hvd.allgather_object(optimizer.state_dict())
    assert all(equal(each, everyone[root]) for each in everyone)
    assert equal(optimizer.param_groups[0]["betas"], (0.5, 0.75, None)) and equal(optimizer.param_groups[0]["lr"], 0.25)
    assert all(torch.equal(*both) for both in zip(params, before, strict=True))
    assert not steps[0] or kind == "SGD, plain" or len(optimizer.state) > 0
    for number, parameter in enumerate(params):
        for key, value in optimizer.state.get(parameter, {}).items():
            old = held.get((number, key))
            if isinstance(value, torch.Tensor) and isinstance(old, torch.Tensor) and old.shape == value.shape:
                assert value is old
    if kind.startswith("Adam") and "max" not in kind and steps[0]:
        assert optimizer.state[params[2]]["exp_avg"].is_contiguous(memory_format=torch.channels_last)
    for group in optimizer.param_groups:
        del group["note"]
        group["betas"] = group["betas"][:2]
    hvd.broadcast_parameters(params, root)
    train(optimizer, params, 7)
    mine = [parameter.detach() for parameter in params]
    assert all(equal(each, mine) for each in hvd.allgather_object(mine))


def test_groups_options_and_extra_keys(hvd: Any) -> None:
    params = parameters(0)
    optimizer = torch.optim.SGD(
        [{"params": params[:1], "lr": 0.1 + hvd.rank()}, {"params": params[1:], "lr": 7 + hvd.rank()}], lr=1
    )
    optimizer.param_groups[1][f"only on {hvd.rank()}"] = hvd.rank()
    hvd.broadcast_optimizer_state(optimizer, 0, None, hvd.global_process_set)
    assert [equal(group["lr"], right) for group, right in zip(optimizer.param_groups, (0.1, 7), strict=True)] == [
        True,
        True,
    ]
    assert (
        optimizer.param_groups[1]["only on 0"] == 0 and optimizer.param_groups[1][f"only on {hvd.rank()}"] == hvd.rank()
    )
    assert optimizer.param_groups[0]["params"] == params[:1]


def test_a_learning_rate_shared_here_is_not_shared_where_the_roots_are_two(hvd: Any) -> None:
    params, shared = parameters(0), torch.tensor(5.0)
    rates = [torch.tensor(0.5), torch.tensor(0.25)] if hvd.rank() == 0 else [shared, shared]
    groups = [{"params": params[:1], "lr": rates[0]}, {"params": params[1:], "lr": rates[1]}]
    optimizer = torch.optim.Adam(groups, lr=torch.tensor(1.0))
    hvd.broadcast_optimizer_state(optimizer, 0)
    first, second = (group["lr"] for group in optimizer.param_groups)
    assert (float(first), float(second)) == (0.5, 0.25)
    assert first is rates[0]


class Custom(torch.optim.Optimizer):
    """State of any structure: nested tensors, the same tensor twice, keys that are no parameters."""

    def fill(self, value: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                shared = torch.full((3,), value, dtype=torch.bfloat16)
                history = collections.deque([torch.full((2,), value), None], maxlen=4)
                self.state[parameter] = {
                    "history": history,
                    "both": (shared, [shared]),
                    "large": torch.full((LARGE,), value),
                }
        self.state["global"] = collections.OrderedDict(step=int(value), norm=torch.tensor(value))


def test_state_of_any_structure(hvd: Any) -> None:
    params = parameters(0)
    optimizer = Custom(params, {"lr": 0.1})
    if hvd.rank() == 0:
        optimizer.fill(4.0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    for parameter in params:
        state = optimizer.state[parameter]
        assert type(state["history"]) is collections.deque and state["history"].maxlen == 4
        assert torch.equal(state["history"][0], torch.full((2,), 4.0)) and state["history"][1] is None
        assert state["both"][0] is state["both"][1][0] and torch.equal(
            state["both"][0], torch.full((3,), 4.0, dtype=torch.bfloat16)
        )
        assert torch.equal(state["large"], torch.full((LARGE,), 4.0))
    assert type(optimizer.state["global"]) is collections.OrderedDict
    assert equal(dict(optimizer.state["global"]), {"step": 4, "norm": torch.tensor(4.0)})


def test_a_distributed_optimizer_does_not_step(hvd: Any) -> None:
    params = parameters(3)
    inner = torch.optim.Adam(params, lr=0.5)
    if hvd.rank() == 0:
        train(inner, params, 1)
    hvd.broadcast_parameters(params, 0)
    named = [(f"p{number}", parameter) for number, parameter in enumerate(params)]
    optimizer = DistributedOptimizer(inner, named_parameters=named)
    before = [parameter.detach().clone() for parameter in params]
    for parameter in params:
        parameter.grad = None
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert all(torch.equal(*both) for both in zip(params, before, strict=True))
    assert all(parameter.grad is None for parameter in params)
    states = hvd.allgather_object(optimizer.state_dict())
    assert len(states[0]["state"]) == 3 and all(equal(each, states[0]) for each in states)


def test_horovods_gradients_of_zeros_before_the_first_step(hvd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world = runtime.world_of(hvd.global_process_set)
    model = torch.nn.ModuleList(
        [torch.nn.Linear(2, 2), torch.nn.Embedding(4, 2, sparse=True), torch.nn.Linear(2, 2).requires_grad_(False)]
    )
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, 0, model)
    assert all(param.grad is None for param in model.parameters())
    monkeypatch.setattr(world, "config", replace(world.config, gradients="horovod"))
    hvd.broadcast_optimizer_state(optimizer, 0, model)
    layer, table, frozen = model
    assert torch.equal(layer.weight.grad, torch.zeros(2, 2)) and frozen.weight.grad is None and not optimizer.state
    assert table.weight.grad.is_sparse and not table.weight.grad.to_dense().any()
    (layer(torch.ones(1, 2)).sum() + table(torch.tensor([1])).sum()).backward()
    optimizer.step()
    torch.testing.assert_close(layer.bias.grad, torch.ones(2))
    given = layer.weight.grad
    hvd.broadcast_optimizer_state(optimizer, 0, model)
    assert layer.weight.grad is given


def test_optimizers_that_differ_are_refused_on_every_rank(hvd: Any) -> None:
    odd = hvd.rank() == hvd.size() - 1
    params = parameters(0)
    fewer = torch.optim.SGD(params[: 2 + (not odd)], lr=0.1)
    on_all(
        hvd,
        lambda: hvd.broadcast_optimizer_state(fewer, 0),
        "param_groups[0] is not the same on every rank: 3 parameters on rank",
    )
    other = (torch.optim.Adam if odd else torch.optim.SGD)(params, lr=0.1)
    on_all(
        hvd,
        lambda: hvd.broadcast_optimizer_state(other, 0),
        "the optimizer is not the same on every rank: SGD with 1 parameter groups",
    )
    reshaped = torch.optim.SGD([torch.nn.Parameter(torch.ones(3 + odd))], lr=0.1)
    on_all(
        hvd,
        lambda: hvd.broadcast_optimizer_state(reshaped, 0),
        "param_groups[0]['params'][0] is not the same on every rank: float32",
    )


def test_what_is_no_optimizer_or_cannot_be_sent_is_refused(hvd: Any) -> None:
    on_all(hvd, lambda: hvd.broadcast_optimizer_state([], 0), "optimizer: expected an optimizer", (TypeError,))
    params = parameters(0)
    for option in (lambda: 0, torch.eye(2).to_sparse()):
        optimizer = torch.optim.SGD(params, lr=0.1)
        if hvd.rank() == 0:
            optimizer.param_groups[0]["wrong"] = option
        kind, said = (
            (InvalidTypeError, "state cannot be sent to the other ranks")
            if hvd.rank() == 0
            else (MismatchError, "state cannot be sent to the other ranks")
        )
        on_all(hvd, lambda optimizer=optimizer: hvd.broadcast_optimizer_state(optimizer, 0), said, (kind,))


def test_optimizers_within_a_process_set(hvd: Any, pair: Any) -> None:
    params = parameters(0)
    optimizer = torch.optim.Adam(params, lr=0.1 + hvd.rank())
    train(optimizer, params, hvd.rank())
    wanted = hvd.broadcast_object(optimizer.state_dict(), hvd.size() - 1)
    if pair.included():
        hvd.broadcast_optimizer_state(optimizer, hvd.size() - 1, process_set=pair)
        assert equal(optimizer.state_dict(), wanted)
    else:
        assert optimizer.param_groups[0]["lr"] == 0.1 + hvd.rank()


# ---- objects


def test_objects(hvd: Any, pair: Any) -> None:
    mine = {
        "rank": hvd.rank(),
        "weights": [torch.full((2, 2), float(hvd.rank())).bfloat16()],
        "rest": "x" * 1000 * hvd.rank(),
    }
    for root in range(hvd.size()):
        found = hvd.broadcast_object(mine, root, "settings")
        assert found["rank"] == root and torch.equal(found["weights"][0], torch.full((2, 2), root).bfloat16())
        assert len(found["rest"]) == 1000 * root and (found is mine) is (root == hvd.rank())
    assert hvd.broadcast_object(mine)["rank"] == 0
    everyone = hvd.allgather_object(mine, "all")
    assert [each["rank"] for each in everyone] == list(range(hvd.size()))
    assert all(torch.equal(each["weights"][0], torch.full((2, 2), each["rank"]).bfloat16()) for each in everyone)
    if pair.included():
        assert hvd.broadcast_object(mine, hvd.size() - 1, process_set=pair)["rank"] == hvd.size() - 1
        assert [each["rank"] for each in hvd.allgather_object(mine, None, pair)] == [0, hvd.size() - 1]
