"""The PyTorch interface takes Horovod's arguments, in Horovod's order, with its defaults; and what belongs to no rank
in particular."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

pytest.importorskip("torch")

import collectives.torch as hvd
from collectives.torch.handles import Derived

_REDUCING = "average=None name=None op=None prescale_factor=1.0 postscale_factor=1.0 process_set"
_BLOCKING = "average=None name=None compression=none op=None prescale_factor=1.0 postscale_factor=1.0 process_set"
_SCATTERING = "name=None op=Average process_set prescale_factor=1.0 postscale_factor=1.0"
_SCATTERING_BLOCKING = "name=None compression=none op=Average process_set prescale_factor=1.0 postscale_factor=1.0"

HOROVODS = {
    "allreduce": f"tensor {_BLOCKING}",
    "allreduce_": f"tensor {_REDUCING}",
    "allreduce_async": f"tensor {_REDUCING}",
    "allreduce_async_": f"tensor {_REDUCING}",
    "grouped_allreduce": f"tensors {_BLOCKING}",
    "grouped_allreduce_": f"tensors {_REDUCING}",
    "grouped_allreduce_async": f"tensors {_REDUCING}",
    "grouped_allreduce_async_": f"tensors {_REDUCING}",
    "sparse_allreduce_async": "tensor name op process_set",
    "allgather": "tensor name=None process_set",
    "allgather_async": "tensor name=None process_set",
    "grouped_allgather": "tensors name=None process_set",
    "grouped_allgather_async": "tensors name=None process_set",
    "broadcast": "tensor root_rank name=None process_set",
    "broadcast_": "tensor root_rank name=None process_set",
    "broadcast_async": "tensor root_rank name=None process_set",
    "broadcast_async_": "tensor root_rank name=None process_set",
    "alltoall": "tensor splits=None name=None process_set",
    "alltoall_async": "tensor splits=None name=None process_set",
    "reducescatter": f"tensor {_SCATTERING_BLOCKING}",
    "reducescatter_async": f"tensor {_SCATTERING}",
    "grouped_reducescatter": f"tensors {_SCATTERING_BLOCKING}",
    "grouped_reducescatter_async": f"tensors {_SCATTERING}",
    "poll": "handle",
    "synchronize": "handle",
    "join": "device=-1",
    "barrier": "process_set",
}
"""Of Horovod 0.28; where no default is given, it is the set of all ranks for process_set, and none at all for
others."""

_DEFAULTS = {"None": None, "1.0": 1.0, "-1": -1, "none": hvd.Compression.none, "Average": hvd.Average}


@pytest.mark.parametrize("name", HOROVODS)
def test_arguments_are_horovods(name: str) -> None:
    found = list(inspect.signature(getattr(hvd, name)).parameters.values())
    expected: list[tuple[str, Any]] = []
    for word in HOROVODS[name].split():
        argument, _, default = word.partition("=")
        missing = hvd.global_process_set if argument == "process_set" else inspect.Parameter.empty
        expected.append((argument, _DEFAULTS[default] if default else missing))
    assert [(p.name, p.default) for p in found[: len(expected)]] == expected
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in found[: len(expected)])
    # What is ours comes behind, and is never in the way of a position.
    extras = {p.name for p in found[len(expected) :]}
    assert extras <= {"algorithm", "transport", "stream", "timeout", "process_set"}
    assert all(p.default is not inspect.Parameter.empty for p in found[len(expected) :])


def test_every_name_is_there() -> None:
    assert set(HOROVODS) <= set(hvd.__all__)
    assert all(hasattr(hvd, name) for name in hvd.__all__)


def test_handles_that_are_none() -> None:
    for function in (hvd.poll, hvd.synchronize):
        with pytest.raises(TypeError, match="handle: expected"):
            function(7)


class Landed:
    """A handle of an operation that is done, or never will be."""

    def __init__(self, result: Any, done: bool = True) -> None:
        self.result, self.done = result, done
        self.timeouts: list[float | None] = []

    def poll(self) -> bool:
        return self.done

    def wait(self, timeout: float | None = None) -> Any:
        self.timeouts.append(timeout)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def test_a_derived_handle_makes_its_result_once() -> None:
    made: list[int] = []

    def make(a: int) -> int:
        made.append(a)
        return a + 2

    landed: Any = Landed(1)
    handle: Any = Derived(landed, make)
    assert handle.poll() and made == []
    assert hvd.synchronize(handle) == handle() == handle.wait(5) == 3
    assert made == [1]
    assert landed.timeouts == [None, None, 5]


def test_a_derived_handle_fails_as_often_as_it_is_asked() -> None:
    landed: Any = Landed(RuntimeError("not today"), done=False)
    handle: Any = Derived(landed, lambda a: a)
    assert not hvd.poll(handle)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not today"):
            hvd.synchronize(handle)


@pytest.mark.parametrize(
    ("name", "arguments", "keywords", "said"),
    [
        ("allreduce_async", (), {}, "missing a required argument: 'tensor'"),
        ("grouped_allreduce_async_", ([1.0], True), {"average": False}, "multiple values for argument 'average'"),
        ("broadcast_async", (1.0,), {}, "missing a required argument: 'root_rank'"),
        ("allgather_async", (1.0, "rows", None, 4), {}, "too many positional arguments"),
    ],
)
def test_an_asynchronous_call_that_does_not_fit_is_refused_under_its_name(
    name: str, arguments: tuple[Any, ...], keywords: dict[str, Any], said: str
) -> None:
    with pytest.raises(TypeError, match=rf"^{name}\(\) {said}"):
        getattr(hvd, name)(*arguments, **keywords)
