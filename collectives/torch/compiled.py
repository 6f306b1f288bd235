"""Collectives inside ``torch.compile``: opaque custom operators, with shapes for the tracer and adjoints for autograd.

To the compiler ``torch.ops.collectives.allreduce(x, "average", ...) -> Tensor`` is opaque: when the compiled code runs,
the operator is a blocking call of the engine. The public functions call this module while
``torch.compiler.is_compiling()``; a model compiles as one graph (``fullgraph=True``), trains, and is compiled again for
other shapes, and when the world has another size or this rank another number.

    allreduce, broadcast    the input's shape
    reducescatter           this rank's share of the rows
    allgather, alltoall     rows that are unknown until the program runs; it may state more:
                            ``torch._check(gathered.shape[0] == 2 * x.shape[0])``
    allreduce_, ...         the operator, and a copy into the tensor

**Operations must not be removed or reordered.** If the compiler of one rank removed an operation whose result is unused
there, or moved it because the shapes differ there, the other ranks would wait for it. The operators therefore have an
ordered effect: the graph passes a token from one to the next, in the order of the program in forward and of autograd in
backward, and returns the last one. They are matched by order of call, as in eager mode, not by names made while
tracing, because one rank may be compiled again when the others are not.

Older torch has no such effects in backward. There the operators are marked as impure, which keeps them in the graph;
but Inductor still removes one whose result is unused, and may reorder independent ones, so that every rank must use the
same results. It also needs ``torch._dynamo.config.capture_dynamic_output_shape_ops = True`` for allgather and alltoall.

Torch refuses to compile a region under activation checkpointing that contains a collective, since backward would run it
again. Keep such a region out of the graph with ``torch.compiler.disable``.

The adjoints are those of `collectives.frontends.adjoints`, and are operators too, because backward is compiled as well.
In a compiled backward pass all of them run, with gradients of zeros where an output was not used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from collectives.base.errors import InvalidArgumentError
from collectives.base.reduce_op import Op
from collectives.frontends import adjoints
from collectives.tensors.compression import compress_all, is_built_in, wire_name
from collectives.torch import operators
from collectives.torch.autograd import refuse_transforms_in_graph
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.runtime import world_of

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")

_HELD = ("algorithm", "transport")
_NO_CHOICES: Mapping[str, Any] = {}


def allreduce(
    tensors: Sequence[Any],
    grouped: bool,
    op: Op,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    compressor: Any = None,
    process_set: ProcessSet | int = 0,
    choices: Mapping[str, Any] = _NO_CHOICES,
) -> list[Any]:
    """`collectives.torch.allreduce`, or `grouped_allreduce`, in a graph, as one node.

    Args:
        tensors: any shapes, dtypes and strides that the engine takes; one unless ``grouped``. Left unchanged.
        compressor: None, a built-in one, or any other whose methods can be traced.
        process_set: the ranks that take part, or their set's number.
        choices: further keywords of the call.

    Returns:
        New contiguous tensors.
    """
    how, where = (op.value, name, prescale, postscale), _where(process_set, choices)
    in_engine = compressor is None or is_built_in(compressor)
    wire = wire_name(compressor) if in_engine else None
    operands, restore = (list(tensors), list) if in_engine else compress_all(compressor, tensors)
    if grouped:
        return restore(torch.ops.collectives.grouped_allreduce(operands, *how, wire, *where))
    return restore([torch.ops.collectives.allreduce(operands[0], *how, wire, *where)])


def reducescatter(
    tensor: Any,
    op: Op,
    name: str | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet | int,
    choices: Mapping[str, Any],
) -> Any:
    """`collectives.torch.reducescatter` in a graph: this rank's rows of the reduced tensor."""
    world = world_of(process_set)
    # As `partition.rows`, of a number that may be a symbol.
    rows = (tensor.shape[0] + world.size - 1 - world.rank) // world.size
    how = op.value, name, prescale, postscale
    return torch.ops.collectives.reducescatter(tensor, *how, rows, *_where(process_set, choices))


def allgather(tensor: Any, name: str | None, process_set: ProcessSet | int, choices: Mapping[str, Any]) -> Any:
    """`collectives.torch.allgather` in a graph: every rank's rows."""
    return torch.ops.collectives.allgather(tensor, name, None, *_where(process_set, choices))


def broadcast(
    tensor: Any, root: int, name: str | None, process_set: ProcessSet | int, choices: Mapping[str, Any]
) -> Any:
    """`collectives.torch.broadcast` in a graph; ``root`` is a number within the process set."""
    return torch.ops.collectives.broadcast(tensor, root, name, *_where(process_set, choices))


def alltoall(
    tensor: Any, splits: Any, name: str | None, process_set: ProcessSet | int, choices: Mapping[str, Any]
) -> tuple[Any, Any]:
    """`collectives.torch.alltoall` in a graph; the rows received, and how many from each rank, as int64 on the CPU."""
    size = world_of(process_set).size
    if splits is not None and not isinstance(splits, torch.Tensor):
        splits = torch.tensor(list(splits), dtype=torch.int64)
    rows, received = torch.ops.collectives.alltoall(tensor, splits, name, None, size, *_where(process_set, choices))
    return rows, received


def stored(tensor: Any, result: Any) -> Any:
    """The tensor, with a result written into it: what an in-place operation is in a graph. Not differentiable."""
    with torch.no_grad():
        return tensor.copy_(result)


def untraced(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
    """Exclude a function from compiled graphs, because it begins or awaits an operation.

    The graph ends before it, and another begins after it; with ``fullgraph=True`` that is an error.
    """

    @functools.wraps(function)
    def call(*arguments: Arguments.args, **keywords: Arguments.kwargs) -> Returned:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*arguments, **keywords)  # a graph ends here: block instead
        return function(*arguments, **keywords)

    return call


def _where(process_set: ProcessSet | int, choices: Mapping[str, Any]) -> tuple[int, str | None, str | None]:
    """A process set's number, an algorithm and a transport, which a graph can hold.

    Raises:
        InvalidArgumentError: any other keyword, which it cannot.
        UnsupportedError: the call is within a transform of torch.func.
    """
    refuse_transforms_in_graph()
    others = [keyword for keyword, value in choices.items() if keyword not in _HELD and value is not None]
    if others:
        raise InvalidArgumentError(
            f"{others[0]}: expected None inside torch.compile, which supports only {' and '.join(_HELD)}; leave it "
            "out, or exclude the function from the graph with torch.compiler.disable [F81]"
        )
    if not isinstance(process_set, int):
        world_of(process_set)  # refuses one that was not added
        assert process_set.process_set_id is not None
        process_set = process_set.process_set_id
    return process_set, choices.get("algorithm"), choices.get("transport")


# ---- autograd
# In each pair the first stores what the second needs; arguments that are not tensors have None as gradient.


def _note_reduction(ctx: Any, inputs: Any, output: Any) -> None:
    x, op, name, prescale, postscale, ctx.last, *ctx.where = inputs
    ctx.how = op, _of_gradient(name), prescale, postscale
    ctx.grouped = isinstance(x, (list, tuple))
    ctx.rows = None if ctx.grouped or not x.dim() else x.shape[0]
    if not adjoints.is_linear(Op(op)):
        ctx.save_for_backward(*(x if ctx.grouped else [x]))


def _back_through_allreduce(ctx: Any, gradient: Any) -> Any:
    ops = torch.ops.collectives
    if operators.repeats_in_backward(ctx.how[0], ctx.where[0]):
        run = ops.grouped_allreduce if ctx.grouped else ops.allreduce
        return run(gradient, *ctx.how, ctx.last, *ctx.where), *(None,) * 8
    gradients = gradient if ctx.grouped else [gradient]
    results = ops.adjoint(gradients, list(ctx.saved_tensors), "allreduce", *ctx.how, None, 0, ctx.where[0])
    return results if ctx.grouped else results[0], *(None,) * 8


def _back_through_reducescatter(ctx: Any, gradient: Any) -> Any:
    about = list(ctx.saved_tensors), "reducescatter", *ctx.how, ctx.rows, 0, ctx.where[0]
    return torch.ops.collectives.adjoint([gradient], *about)[0], *(None,) * 8


def _note_allgather(ctx: Any, inputs: Any, output: Any) -> None:
    x, name, _, process_set, *_ = inputs
    ctx.about = [], "allgather", None, _of_gradient(name), 1.0, 1.0, x.shape[0], 0, process_set


def _note_broadcast(ctx: Any, inputs: Any, output: Any) -> None:
    _, root, name, process_set, *_ = inputs
    ctx.about = [], "broadcast", None, _of_gradient(name), 1.0, 1.0, None, root, process_set


def _back_through_copies(ctx: Any, gradient: Any) -> Any:
    return torch.ops.collectives.adjoint([gradient], *ctx.about)[0], *(None,) * 5


def _note_alltoall(ctx: Any, inputs: Any, output: Any) -> None:
    x, _, name, _, ranks, process_set, *_ = inputs
    ctx.how = _of_gradient(name), x.shape[0], ranks, process_set, None, None
    ctx.save_for_backward(output[1])


def _back_through_alltoall(ctx: Any, gradients: Any) -> Any:
    return torch.ops.collectives.alltoall(gradients[0], ctx.saved_tensors[0], *ctx.how)[0], *(None,) * 7


def _of_gradient(name: str | None) -> str | None:
    return name and f"{name}.gradient"


# ---- registration


def _like(x: Any, *_: Any) -> Any:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _with_rows(x: Any, rows: Any) -> Any:
    """Of as many rows as that; None: of as many as the run will tell."""
    return x.new_empty((torch.library.get_ctx().new_dynamic_size() if rows is None else rows, *x.shape[1:]))


def _define(
    schema: str, run: Callable[..., Any], shape: Callable[..., Any], note: Any = None, back: Any = None
) -> None:
    """Register an operator with torch: ``shape`` maps its arguments to empty results, ``note`` and ``back`` are its
    autograd."""
    name, _, signature = schema.partition("(")
    operator = torch.library.custom_op(f"collectives::{name}", run, mutates_args=(), schema="(" + signature)
    operator.register_fake(shape)
    if back is not None:
        operator.register_autograd(back, setup_context=note)
    overload = getattr(torch.ops.collectives, name).default
    if hasattr(torch.library, "_register_effectful_op"):
        library: Any = torch.library  # neither name is public
        library._register_effectful_op(overload, library.EffectType.ORDERED)
    else:
        torch.fx.node.has_side_effect(overload)


_REDUCES = "str op, str? name, float prescale, float postscale"
_WHERE = "int process_set, str? algorithm, str? transport"

_define(
    f"allreduce(Tensor x, {_REDUCES}, str? wire, {_WHERE}) -> Tensor",
    operators.allreduce,
    _like,
    _note_reduction,
    _back_through_allreduce,
)
_define(
    f"grouped_allreduce(Tensor[] xs, {_REDUCES}, str? wire, {_WHERE}) -> Tensor[]",
    operators.grouped_allreduce,
    lambda xs, *_: [_like(x) for x in xs],
    _note_reduction,
    _back_through_allreduce,
)
_define(
    f"reducescatter(Tensor x, {_REDUCES}, SymInt rows, {_WHERE}) -> Tensor",
    operators.reducescatter,
    lambda x, op, name, prescale, postscale, rows, *_: _with_rows(x, rows),
    _note_reduction,
    _back_through_reducescatter,
)
_define(
    f"allgather(Tensor x, str? name, SymInt? rows, {_WHERE}) -> Tensor",
    operators.allgather,
    lambda x, name, rows, *_: _with_rows(x, rows),
    _note_allgather,
    _back_through_copies,
)
_define(
    f"broadcast(Tensor x, int root, str? name, {_WHERE}) -> Tensor",
    operators.broadcast,
    _like,
    _note_broadcast,
    _back_through_copies,
)
_define(
    # A list, and not a pair: Inductor (2.13) loses sight of the unknown rows in a pair that has an effect.
    f"alltoall(Tensor x, Tensor? splits, str? name, SymInt? rows, SymInt ranks, {_WHERE}) -> Tensor[]",
    operators.alltoall,
    lambda x, splits, name, rows, ranks, *_: [
        _with_rows(x, rows),
        x.new_empty((ranks,), dtype=torch.int64, device="cpu"),
    ],
    _note_alltoall,
    _back_through_alltoall,
)
_define(
    "adjoint(Tensor[] gradients, Tensor[] xs, str collective, str? op, str? name, float prescale, float postscale, "
    "SymInt? rows, int root, int process_set) -> Tensor[]",
    operators.adjoint,
    lambda gradients, xs, collective, op, name, prescale, postscale, rows, *_: [
        _like(gradient) if rows is None else _with_rows(gradient, rows) for gradient in gradients
    ],
)
