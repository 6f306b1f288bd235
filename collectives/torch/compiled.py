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
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from collectives.base.errors import InvalidArgumentError
from collectives.base.reduce_op import Op
from collectives.frontends import adjoints
from collectives.tensors.compression import compress_all, is_built_in, wire_name
from collectives.torch import operators
from collectives.torch.arguments import Choices
from collectives.torch.autograd import refuse_transforms_in_graph
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.runtime import world_of

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")

_HELD = ("algorithm", "transport")
_NONE: Choices = {}


def allreduce(
    tensor: Any,
    op: Op,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    compressor: Any = None,
    process_set: ProcessSet | int = 0,
    choices: Choices = _NONE,
) -> Any:
    """`collectives.torch.allreduce` in a graph.

    Args:
        tensor: any shape, dtype and strides that the engine takes. Left unchanged.
        op, name, prescale, postscale: as there; there is no ``average``.
        compressor: None, a built-in one, or any other whose methods can be traced.
        process_set: the ranks that take part, or their set's number.
        choices: further keywords of the call.

    Returns:
        A new contiguous tensor.
    """
    how, where = (op.value, name, prescale, postscale), _where(process_set, choices)
    if compressor is None or is_built_in(compressor):
        return torch.ops.collectives.allreduce(tensor, *how, wire_name(compressor), *where)
    (compressed,), restore = compress_all(compressor, [tensor])
    return restore([torch.ops.collectives.allreduce(compressed, *how, None, *where)])[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    op: Op,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    compressor: Any = None,
    process_set: ProcessSet | int = 0,
    choices: Choices = _NONE,
) -> list[Any]:
    """`collectives.torch.grouped_allreduce` in a graph, as one node; arguments as for `allreduce`."""
    how, where = (op.value, name, prescale, postscale), _where(process_set, choices)
    if compressor is None or is_built_in(compressor):
        return list(torch.ops.collectives.grouped_allreduce(list(tensors), *how, wire_name(compressor), *where))
    compressed, restore = compress_all(compressor, tensors)
    return restore(torch.ops.collectives.grouped_allreduce(compressed, *how, None, *where))


def reducescatter(
    tensor: Any,
    op: Op,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet | int = 0,
    choices: Choices = _NONE,
) -> Any:
    """`collectives.torch.reducescatter` in a graph: this rank's rows of the reduced tensor."""
    world = world_of(process_set)
    rows = (
        tensor.shape[0] + world.size - 1 - world.rank
    ) // world.size  # as `partition.rows`, of a number that may be a symbol
    how = op.value, name, prescale, postscale
    return torch.ops.collectives.reducescatter(tensor, *how, rows, *_where(process_set, choices))


def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet | int = 0, choices: Choices = _NONE) -> Any:
    """`collectives.torch.allgather` in a graph: every rank's rows."""
    return torch.ops.collectives.allgather(tensor, name, None, *_where(process_set, choices))


def broadcast(
    tensor: Any, root: int, name: str | None = None, process_set: ProcessSet | int = 0, choices: Choices = _NONE
) -> Any:
    """`collectives.torch.broadcast` in a graph; ``root`` is a number within the process set."""
    return torch.ops.collectives.broadcast(tensor, root, name, *_where(process_set, choices))


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet | int = 0,
    choices: Choices = _NONE,
) -> tuple[Any, Any]:
    """`collectives.torch.alltoall` in a graph.

    Args:
        splits: rows for each rank, a tensor or a sequence of integers; None: the same for all.

    Returns:
        The rows received, and how many from each rank: int64, on the CPU.
    """
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


def _where(process_set: ProcessSet | int, choices: Choices) -> tuple[int, str | None, str | None]:
    """A process set's number, an algorithm and a transport, which a graph can hold.

    Raises:
        InvalidArgumentError: any other keyword, which it cannot.
        UnsupportedError: the call is within a transform of torch.func.
    """
    refuse_transforms_in_graph()
    others = [keyword for keyword, value in choices.items() if keyword not in _HELD and value is not None]
    if others:
        raise InvalidArgumentError(
            f"{others[0]}: expected None inside of torch.compile, whose graph holds {' and '.join(_HELD)} alone; "
            "call the function outside of the graph (torch.compiler.disable)"
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
    ctx.how = op, name and f"{name}.gradient", prescale, postscale
    ctx.grouped = isinstance(x, (list, tuple))
    if not adjoints.is_linear(Op(op)):
        ctx.save_for_backward(*(x if ctx.grouped else [x]))


def _back_through_allreduce(ctx: Any, gradient: Any) -> Any:
    ops = torch.ops.collectives
    if operators.repeats_in_backward(ctx.how[0], ctx.where[0]):
        run = ops.grouped_allreduce if ctx.grouped else ops.allreduce
        return run(gradient, *ctx.how, ctx.last, *ctx.where), *(None,) * 8
    gradients = gradient if ctx.grouped else [gradient]
    results = ops.adjoint_of_allreduce(gradients, list(ctx.saved_tensors), *ctx.how, ctx.where[0])
    return results if ctx.grouped else results[0], *(None,) * 8


def _note_reducescatter(ctx: Any, inputs: Any, output: Any) -> None:
    _note_reduction(ctx, inputs, output)
    ctx.rows = inputs[0].shape[0]


def _back_through_reducescatter(ctx: Any, gradient: Any) -> Any:
    x = None if adjoints.is_linear(Op(ctx.how[0])) else ctx.saved_tensors[0]
    run = torch.ops.collectives.adjoint_of_reducescatter
    return run(gradient, x, *ctx.how, ctx.rows, ctx.where[0]), *(None,) * 8


def _note_allgather(ctx: Any, inputs: Any, output: Any) -> None:
    x, name, _, process_set, *_ = inputs
    ctx.how = name and f"{name}.gradient", x.shape[0], process_set


def _back_through_allgather(ctx: Any, gradient: Any) -> Any:
    return torch.ops.collectives.own_rows(gradient, *ctx.how), *(None,) * 5


def _note_broadcast(ctx: Any, inputs: Any, output: Any) -> None:
    _, root, name, process_set, *_ = inputs
    ctx.how = root, name and f"{name}.gradient", process_set


def _back_through_broadcast(ctx: Any, gradient: Any) -> Any:
    return torch.ops.collectives.at_root(gradient, *ctx.how), *(None,) * 5


def _note_alltoall(ctx: Any, inputs: Any, output: Any) -> None:
    x, _, name, _, ranks, process_set, *_ = inputs
    ctx.how = name and f"{name}.gradient", x.shape[0], ranks, process_set, None, None
    ctx.save_for_backward(output[1])


def _back_through_alltoall(ctx: Any, gradients: Any) -> Any:
    return torch.ops.collectives.alltoall(gradients[0], ctx.saved_tensors[0], *ctx.how)[0], *(None,) * 7


# ---- registration


def _like(x: Any, *_: Any) -> Any:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _with_rows(x: Any, rows: Any) -> Any:
    """Of as many rows as that; None: of as many as the run will tell."""
    return x.new_empty((torch.library.get_ctx().new_dynamic_size() if rows is None else rows, *x.shape[1:]))


def _define(
    schema: str, run: Callable[..., Any], shape: Callable[..., Any], note: Any = None, back: Any = None
) -> None:
    """Register an operator with torch.

    Args:
        schema: its name and signature.
        run: the implementation.
        shape: the same arguments to empty results.
        note, back: its autograd.
    """
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
    _note_reducescatter,
    _back_through_reducescatter,
)
_define(
    f"allgather(Tensor x, str? name, SymInt? rows, {_WHERE}) -> Tensor",
    operators.allgather,
    lambda x, name, rows, *_: _with_rows(x, rows),
    _note_allgather,
    _back_through_allgather,
)
_define(
    f"broadcast(Tensor x, int root, str? name, {_WHERE}) -> Tensor",
    operators.broadcast,
    _like,
    _note_broadcast,
    _back_through_broadcast,
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
    "own_rows(Tensor gradient, str? name, SymInt rows, int process_set) -> Tensor",
    operators.own_rows,
    lambda gradient, name, rows, process_set: _with_rows(gradient, rows),
)
_define("at_root(Tensor gradient, int root, str? name, int process_set) -> Tensor", operators.at_root, _like)
_define(
    f"adjoint_of_allreduce(Tensor[] gradients, Tensor[] xs, {_REDUCES}, int process_set) -> Tensor[]",
    operators.adjoint_of_allreduce,
    lambda gradients, xs, *_: [_like(x) for x in xs],
)
_define(
    f"adjoint_of_reducescatter(Tensor gradient, Tensor? x, {_REDUCES}, SymInt rows, int process_set) -> Tensor",
    operators.adjoint_of_reducescatter,
    lambda gradient, x, op, name, prescale, postscale, rows, process_set: _with_rows(gradient, rows),
)
