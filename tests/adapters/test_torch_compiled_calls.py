"""The public functions inside of ``torch.compile``: the same results and gradients as outside, in one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import collectives.torch as public

pytestmark = pytest.mark.mpi


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


CALLS: dict[str, Callable[[Any], Any]] = {
    "allreduce": lambda x: public.allreduce(x),
    "allreduce with everything": lambda x: public.allreduce(
        x, None, "all", public.Compression.bf16, public.Sum, 0.5, 3.0
    ),
    "allreduce, average": lambda x: public.allreduce(x, average=False),
    "grouped_allreduce": lambda x: sum(public.grouped_allreduce([x, x * 2], op=public.Max)),
    "allgather": lambda x: public.allgather(x),
    "grouped_allgather": lambda x: torch.cat(public.grouped_allgather([x, x * 2])),
    "broadcast": lambda x: public.broadcast(x, public.size() - 1),
    "alltoall": lambda x: public.alltoall(torch.cat([x] * public.size())),
    "reducescatter": lambda x: public.reducescatter(x, op=public.Sum, compression=public.Compression.fp16),
    "grouped_reducescatter": lambda x: torch.cat(public.grouped_reducescatter([x, x * 2])),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_calls_that_are_differentiable(hvd: Any, call: Callable[[Any], Any]) -> None:
    torch.manual_seed(hvd.rank())
    x = torch.randn(4, 3)
    found = []
    for function in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        leaf = x.clone().requires_grad_()
        y = function(leaf * 2)
        ((hvd.rank() + 1) * y**2).sum().backward()
        found.append((y.detach(), leaf.grad))
    torch.testing.assert_close(found[1], found[0])


def test_calls_in_place(hvd: Any) -> None:
    def step(x: Any, y: Any, z: Any) -> Any:
        hvd.allreduce_(x, op=hvd.Sum)
        hvd.broadcast_(y, 0)
        hvd.grouped_allreduce_([z, x], op=hvd.Max)
        return x + y + z

    tensors = [torch.full((3,), float(hvd.rank() + i)) for i in range(3)]
    copies = [tensor.clone() for tensor in tensors]
    expected = step(*copies)
    result = torch.compile(step, backend="aot_eager", fullgraph=True)(*tensors)
    assert torch.equal(result, expected)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True))


def test_splits(hvd: Any) -> None:
    splits = torch.arange(hvd.size(), dtype=torch.int32)
    rows = torch.full((int(splits.sum()), 2), float(hvd.rank()))
    swap = torch.compile(lambda rows: hvd.alltoall(rows, splits), backend="aot_eager", fullgraph=True)
    got, received = swap(rows)
    assert received.dtype == torch.int32 and received.tolist() == [hvd.rank()] * hvd.size()
    assert torch.equal(got[:, 0], torch.arange(hvd.size()).repeat_interleave(hvd.rank()).float())


def test_what_a_graph_cannot_hold_is_refused(hvd: Any) -> None:
    with pytest.raises(Exception, match="expected None inside of"):
        torch.compile(lambda x: hvd.allreduce(x, algorithm="ring"), backend="aot_eager", fullgraph=True)(torch.ones(3))


IGNORING: dict[str, Callable[[Any], Any]] = {
    "allreduce_": lambda x: public.allreduce_(x, algorithm="ring"),
    "grouped_allreduce_": lambda x: public.grouped_allreduce_([x], algorithm="ring")[0],
    "broadcast_": lambda x: public.broadcast_(x, 0, algorithm="direct"),
    "grouped_allgather": lambda x: public.grouped_allgather([x], algorithm="ring")[0],
    "grouped_reducescatter": lambda x: public.grouped_reducescatter([x], algorithm="ring")[0],
}


@pytest.mark.parametrize("call", IGNORING.values(), ids=IGNORING)
def test_a_graph_of_other_operations_leaves_the_choice_to_the_engine(hvd: Any, call: Callable[[Any], Any]) -> None:
    x = torch.full((4,), float(hvd.rank()))
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x.clone()), call(x.clone()))


STATE: dict[str, Callable[[Any], Any]] = {
    "broadcast_object": lambda x: x + public.broadcast_object(public.rank() + 1),
    "allgather_object": lambda x: x + sum(public.allgather_object(1)),
    "broadcast_parameters": lambda x: public.broadcast_parameters([x], 0) or x + 1,
    "broadcast_optimizer_state": lambda x: public.broadcast_optimizer_state(torch.optim.SGD([x], lr=1.0), 0) or x + 1,
    "grouped_allgather": lambda x: torch.cat(public.grouped_allgather([x, x * 2])),
}


@pytest.mark.parametrize("call", STATE.values(), ids=STATE)
def test_calls_that_end_a_graph(hvd: Any, call: Callable[[Any], Any]) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=False):
        x = torch.full((3,), float(hvd.rank()))
        assert torch.equal(torch.compile(call, backend="aot_eager")(x.clone()), call(x.clone()))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
