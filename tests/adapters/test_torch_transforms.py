"""The collectives within `torch.func`'s transforms and forward-mode differentiation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import collectives.torch as public
from collectives import InvalidTypeError
from collectives.base.errors import UnsupportedError

LINEAR: dict[str, Callable[[Any], Any]] = {
    "allreduce": lambda x: public.allreduce(x, op=public.Sum, name="sum", prescale_factor=3.0),
    "compressed": lambda x: public.allreduce(x, compression=public.Compression.bf16),
    "grouped_allreduce": lambda x: torch.cat(public.grouped_allreduce([x, x * 2])),
    "allgather": lambda x: public.allgather(x[: public.rank() + 1]),
    "grouped_allgather": lambda x: torch.cat(public.grouped_allgather([x, x * 2])),
    "broadcast": lambda x: public.broadcast(x, public.size() - 1),
    "alltoall": lambda x: public.alltoall(torch.cat([x] * public.size())),
    "alltoall, splits": lambda x: public.alltoall(x, [len(x), *[0] * (public.size() - 1)], "rows")[0],
    "reducescatter": lambda x: public.reducescatter(x, op=public.Sum),
    "grouped_reducescatter": lambda x: torch.cat(public.grouped_reducescatter([x, x * 2])),
}
OTHERS: dict[str, Callable[[Any], Any]] = {
    "largest": lambda x: public.allreduce(x, op=public.Max),
    "product": lambda x: public.allreduce(x, op=public.Product),
    "adasum": lambda x: public.allreduce(x, op=public.Adasum),
    "smallest rows": lambda x: public.reducescatter(x, op=public.Min),
}


def numbers(hvd: Any, *shape: int) -> Any:
    """Small integers, which every dtype and every order of a sum give exactly, different on every rank."""
    generator = torch.Generator().manual_seed(hvd.rank())
    return torch.randint(1, 9, shape, generator=generator).float()


def loss(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def of(x: Any) -> Any:
        y = run(x)
        return (y**2 * torch.arange(1.0, y.numel() + 1).reshape(y.shape)).sum()

    return of


def gradient(run: Callable[[Any], Any], x: Any) -> Any:
    """By autograd, without a transform."""
    leaf = x.clone().requires_grad_()
    loss(run)(leaf).backward()
    return leaf.grad


@pytest.mark.parametrize("run", [*LINEAR.values(), *OTHERS.values()], ids=[*LINEAR, *OTHERS])
def test_gradients(hvd: Any, run: Callable[[Any], Any]) -> None:
    x = numbers(hvd, 4, 3)
    expected = gradient(run, x)
    torch.testing.assert_close(grad(loss(run))(x), expected)
    value, back = vjp(loss(run), x)
    assert torch.equal(value, loss(run)(x))
    torch.testing.assert_close(back(torch.tensor(2.0))[0], 2 * expected)


@pytest.mark.parametrize("run", LINEAR.values(), ids=LINEAR)
def test_examples_are_vectorised(hvd: Any, run: Callable[[Any], Any]) -> None:
    xs = numbers(hvd, 4, 3, 2)
    torch.testing.assert_close(vmap(run, in_dims=2)(xs), torch.stack([run(x) for x in xs.unbind(2)]))
    torch.testing.assert_close(
        vmap(grad(loss(run)), in_dims=2)(xs), torch.stack([gradient(run, x) for x in xs.unbind(2)])
    )
    singles = numbers(hvd, 5)
    assert torch.equal(vmap(lambda x: hvd.allreduce(x, op=hvd.Max))(singles), hvd.allreduce(singles, op=hvd.Max))


@pytest.mark.parametrize("run", LINEAR.values(), ids=LINEAR)
def test_forward_mode(hvd: Any, run: Callable[[Any], Any]) -> None:
    x, tangent = numbers(hvd, 4, 3), numbers(hvd, 4, 3) + 1
    value, pushed = jvp(run, (x,), (tangent,))
    assert torch.equal(value, run(x))
    assert torch.equal(pushed, run(tangent))
    with forward_ad.dual_level():
        result = forward_ad.unpack_dual(run(forward_ad.make_dual(x, tangent)))
        assert torch.equal(result.primal, value) and torch.equal(result.tangent, pushed)
        assert torch.equal(run(x), value)


def test_jacobians_and_second_derivatives(hvd: Any) -> None:
    size, x = hvd.size(), numbers(hvd, 3)

    def cubes(x: Any) -> Any:
        return (hvd.allreduce(x, op=hvd.Sum) ** 3).sum()

    total = hvd.allreduce(x, op=hvd.Sum)
    # The loss is the sum of the ranks' losses.
    torch.testing.assert_close(jacrev(cubes)(x), 3 * size * total**2)
    torch.testing.assert_close(hessian(cubes)(x), torch.diag(6 * size * total) * 1.0 * size)
    torch.testing.assert_close(grad(lambda y: grad(cubes)(y).sum())(x), 6 * size**2 * total)
    torch.testing.assert_close(jacfwd(lambda x: hvd.allreduce(x, op=hvd.Sum))(x), torch.eye(3) * size)


def test_groups_of_which_some_have_no_gradient(hvd: Any) -> None:
    x, counts = numbers(hvd, 3), torch.arange(3) + hvd.rank()

    def run(x: Any) -> Any:
        first, second = hvd.grouped_allreduce([x, counts], op=hvd.Sum)
        return (first * second).sum()

    total = hvd.allreduce(counts, op=hvd.Sum)
    torch.testing.assert_close(grad(run)(x), hvd.size() * total.float())
    torch.testing.assert_close(jvp(run, (x,), (torch.ones(3),))[1], hvd.size() * total.sum().float())


@pytest.mark.parametrize("run", [OTHERS["largest"], OTHERS["product"]], ids=["largest", "product"])
def test_what_has_no_forward_derivative_is_refused(hvd: Any, run: Callable[[Any], Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"allreduce with op=.*reverse"):
        jvp(run, (numbers(hvd, 3),), (torch.ones(3),))


REFUSED: dict[str, tuple[type[Exception], str, Callable[[Any], Any]]] = {
    "in place": (
        InvalidTypeError, r"torch\.func .*collectives\.torch\.allreduce", lambda x: vmap(public.allreduce_)(x)
    ),
    "begun": (
        InvalidTypeError, r"torch\.func .*collectives\.torch\.allreduce", lambda x: vmap(public.allreduce_async)(x)
    ),
    **{
        f"{run.__name__} of numbers": (UnsupportedError, "at least one dimension", lambda x, f=run: vmap(f)(x[0]))
        for run in (public.allgather, public.reducescatter, public.alltoall)
    },
    "Adasum of examples": (UnsupportedError, "outside vmap", lambda x: vmap(OTHERS["adasum"])(x)),
    "recorded": (UnsupportedError, r"torch\.func\.jvp", lambda x: torch.func.linearize(public.allreduce, x)),
    "functionalized": (UnsupportedError, "functionalize", lambda x: torch.func.functionalize(public.allreduce)(x)),
    "in a graph": (
        Exception,
        # The compiler of torch 2.4 names only the type of an error.
        "UnsupportedError" if torch.__version__.startswith("2.4.") else r"torch\.compile cannot trace",
        lambda x: torch.compile(vmap(public.allreduce), backend="aot_eager", fullgraph=True)(x),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "message", "call"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_with_what_to_do(
    hvd: Any, kind: type[Exception], message: str, call: Callable[[Any], Any]
) -> None:
    with pytest.raises(kind, match=message):
        call(numbers(hvd, 2, 3))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
