"""Gradients that are moved into the arena, and those that stay because the program would notice."""

from __future__ import annotations

import copy
import io
import mmap
import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import collectives

torch = pytest.importorskip("torch")

from collectives.torch import gradient_memory  # noqa: E402
from collectives.torch.gradient_memory import GradientPlace  # noqa: E402

COUNT = 1000


def parameter() -> Any:
    return torch.nn.Parameter(torch.zeros(COUNT))


def backward(param: Any, value: float) -> None:
    (param * torch.full((COUNT,), value)).sum().backward()


def is_mapped(param: Any) -> bool:
    return collectives.is_mapped(param.grad)


def in_graph(grad: Any) -> Any:
    leaf = torch.ones(COUNT, requires_grad=True)
    return leaf, (grad * leaf).sum()


HOLDERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tensor": (lambda grad: grad, lambda held: held),
    "view": (lambda grad: grad.view(10, 100), lambda held: held),
    "detached": (lambda grad: grad.detach(), lambda held: held),
    "part": (lambda grad: grad[3:5], lambda held: held),
    "array": (lambda grad: grad.numpy(), lambda held: held),
    "dlpack": (lambda grad: np.from_dlpack(grad), lambda held: held),
    "memoryview": (lambda grad: memoryview(grad.numpy())[4:], lambda held: held),
    "storage": (lambda grad: grad.untyped_storage(), lambda held: torch.zeros(0).set_(held)),
    "graph": (in_graph, lambda held: torch.autograd.grad(held[1], held[0])[0]),
}
"""What may hold a gradient, and how its values are read there."""
holders = pytest.mark.parametrize(("hold", "read"), HOLDERS.values(), ids=HOLDERS)


def test_a_gradient_is_moved_and_remains_the_same_object() -> None:
    param, addresses = parameter(), set()
    place = GradientPlace(param)
    for step in range(3):
        param.grad = None
        backward(param, step + 1.0)
        number, version = id(param.grad), param.grad._version
        place.move()
        assert is_mapped(param) and id(param.grad) == number and param.grad._version == version
        assert torch.equal(param.grad, torch.full((COUNT,), step + 1.0))
        assert param.grad.untyped_storage().nbytes() == 4 * COUNT and param.grad.storage_offset() == 0
        addresses.add(param.grad.data_ptr())
    assert len(addresses) == 1


def test_a_gradient_is_moved_in_the_hook_that_follows_it() -> None:
    param, moved = parameter(), []
    place = GradientPlace(param)

    def hook(param: Any) -> None:
        place.move()
        moved.append(is_mapped(param))

    param.register_post_accumulate_grad_hook(hook)
    for _ in range(2):
        param.grad = None
        backward(param, 1.0)
    assert moved == [True, True]


def test_what_accumulates_stays() -> None:
    param = parameter()
    place = GradientPlace(param)
    backward(param, 1.0)
    place.move()
    at = param.grad.data_ptr()
    backward(param, 2.0)
    place.move()
    param.grad.zero_()
    backward(param, 3.0)
    place.move()
    assert param.grad.data_ptr() == at and torch.equal(param.grad, torch.full((COUNT,), 3.0))


@holders
def test_a_gradient_that_something_else_holds_stays(hold: Callable[[Any], Any], read: Callable[[Any], Any]) -> None:
    param = parameter()
    place = GradientPlace(param)
    backward(param, 1.0)
    at = param.grad.data_ptr()
    held = hold(param.grad)
    place.move()
    assert param.grad.data_ptr() == at and not is_mapped(param)
    del held
    place.move()
    assert is_mapped(param)


@holders
def test_an_earlier_gradient_that_something_holds_keeps_its_values(
    hold: Callable[[Any], Any], read: Callable[[Any], Any]
) -> None:
    param = parameter()
    place = GradientPlace(param)
    backward(param, 1.0)
    place.move()
    at, held = param.grad.data_ptr(), hold(param.grad)
    param.grad = None
    backward(param, 2.0)
    place.move()
    assert is_mapped(param) and param.grad.data_ptr() != at
    assert torch.equal(param.grad, torch.full((COUNT,), 2.0))
    assert set(np.asarray(read(held)).reshape(-1).tolist()) == {1.0}


def test_gradients_that_are_not_moved() -> None:
    class Own(torch.Tensor):
        pass

    table = torch.nn.Parameter(torch.zeros(4, 3))
    torch.nn.functional.embedding(torch.tensor([1]), table, sparse=True).sum().backward()
    graph = parameter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the cycle
        (graph * graph).sum().backward(create_graph=True)
    transposed = torch.nn.Parameter(torch.zeros(4, 3).t())
    transposed.sum().backward()
    own = parameter()
    own.grad = torch.zeros(COUNT).as_subclass(Own)
    nothing, empty = parameter(), torch.nn.Parameter(torch.zeros(0))
    empty.sum().backward()
    for param in (table, graph, transposed, own, nothing, empty):
        before = param.grad
        GradientPlace(param).move()
        assert param.grad is before
        assert before is None or before.is_sparse or not before.numel() or not collectives.is_mapped(before)


def test_a_gradient_of_another_shape_or_dtype_gets_another_place() -> None:
    param = parameter()
    place = GradientPlace(param)
    for data in (torch.zeros(7), torch.zeros(COUNT, dtype=torch.bfloat16), torch.zeros(2, 3, dtype=torch.complex64)):
        param.grad = None
        param.data = data
        param.sum().abs().backward() if data.is_complex() else param.sum().backward()
        expected = param.grad.clone()
        place.move()
        assert is_mapped(param) and param.grad.dtype is data.dtype and torch.equal(param.grad, expected)


def test_without_memory_that_can_be_mapped_gradients_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def private(self: Any, shape: Any, dtype: Any) -> Any:
        asked.append(shape)
        return np.empty(shape, dtype)

    monkeypatch.setattr(type(gradient_memory.arena), "empty", private)
    param = parameter()
    place = GradientPlace(param)
    for _ in range(2):
        param.grad = None
        backward(param, 1.0)
        at = param.grad.data_ptr()
        place.move()
        assert param.grad.data_ptr() == at
    assert len(asked) == 1


def test_copies_are_private_and_no_larger_than_the_gradient() -> None:
    param = parameter()
    backward(param, 1.0)
    GradientPlace(param).move()
    assert is_mapped(param)
    twin = copy.deepcopy(param.grad)
    file = io.BytesIO()
    torch.save(param.grad, file)
    file.seek(0)
    loaded = torch.load(file)
    for grad in (twin, loaded):
        assert torch.equal(grad, param.grad) and not collectives.is_mapped(grad)
        assert grad.untyped_storage().nbytes() == 4 * COUNT


def test_a_forked_child_keeps_the_gradients_that_it_was_forked_with() -> None:
    param = parameter()
    place = GradientPlace(param)
    backward(param, 1.0)
    place.move()
    at = param.grad.data_ptr()
    wakes, wake = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(wakes, 1)
        os._exit(0 if param.grad.numpy().tolist() == [1.0] * COUNT else 1)
    param.grad = None
    backward(param, 2.0)
    place.move()
    moved = param.grad.data_ptr()
    os.write(wake, b".")
    _, status = os.waitpid(child, 0)
    os.close(wakes)
    os.close(wake)
    assert os.waitstatus_to_exitcode(status) == 0
    assert is_mapped(param) and moved != at and torch.equal(param.grad, torch.full((COUNT,), 2.0))


def test_a_gradient_that_torch_has_shared_with_a_process_keeps_its_values() -> None:
    param = parameter()
    place = GradientPlace(param)
    backward(param, 1.0)
    place.move()
    param.grad.share_memory_()
    shared, nbytes = param.grad.untyped_storage()._share_fd_cpu_()
    with open(shared, "rb", closefd=False) as file, mmap.mmap(file.fileno(), nbytes, prot=mmap.PROT_READ) as theirs:
        param.grad = None
        backward(param, 2.0)
        place.move()
        assert is_mapped(param) and torch.equal(param.grad, torch.full((COUNT,), 2.0))
        assert theirs[:4] == np.float32(1).tobytes()


def test_memory_goes_back_with_the_place_and_the_gradient() -> None:
    from collectives.tensors.arena import arena

    param = parameter()
    place = GradientPlace(param)
    backward(param, 1.0)
    place.move()
    at = param.grad.data_ptr()
    del place
    assert torch.equal(param.grad, torch.ones(COUNT))
    del param
    again = [arena.empty(COUNT, np.float32) for _ in range(3)]
    assert at in [array.ctypes.data for array in again]
