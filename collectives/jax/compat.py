"""What differs between JAX's versions, and what of JAX is not quite public: all in this file, each with its reason.
Holds from 0.4.31 on.

Primitives, their rules and lowerings are made with `jax.extend.core` and `jax.interpreters`, which JAX offers for that.
"""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad, mlir

from collectives.base.errors import InvalidArgumentError
from collectives.base.logging import logger
from collectives.jax.ffi import version_in

try:
    from jax.extend.core import Primitive
except ImportError:  # before 0.4.36
    from jax.core import Primitive

try:
    from jax import ffi
except ImportError:  # before 0.5; XLA's older runtime ends the process when a foreign function is given a token
    ffi = None


# ---- tracing
# ----------------------------------------------------------------------------------------------------------------------


def _tracing() -> Callable[[], bool]:
    """Whether operations are recorded at present and not carried out, also those on arrays that are there.

    Nothing public tells. Without the two functions that do, one asks for the cheapest operation and looks at what
    comes.
    """
    try:
        from jax.extend.core import unsafe_am_i_under_a_jit_DO_NOT_USE as under_jit
    except ImportError:
        clean = getattr(jax.core, "trace_state_clean", None)
        if clean is None:
            return lambda: isinstance(jax.numpy.zeros(()), Tracer)
        return lambda: not clean()
    return lambda: bool(under_jit())


tracing = _tracing()


def is_tracer(value: Any) -> bool:
    return isinstance(value, Tracer)


def primitive(name: str) -> Any:
    """A new operation of JAX's with several results."""
    made = Primitive(name)
    made.multiple_results = True
    return made


def shaped(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """What an abstract evaluation returns."""
    return ShapedArray(shape, dtype)


def no_tangent(value: Any) -> Any:
    """The tangent of what does not move."""
    moves = jax.numpy.issubdtype(value.dtype, jax.numpy.inexact)
    return ad.Zero(ShapedArray(value.shape, value.dtype if moves else jax.dtypes.float0))


# ---- arrays
# ----------------------------------------------------------------------------------------------------------------------

_MAY_ALIAS = {"may_alias": True} if "may_alias" in inspect.signature(jax.device_put).parameters else {}


def adopt(arrays: Sequence[Any], places: Sequence[Any] | None = None) -> list[Any]:
    """NumPy arrays that nobody is going to write to, as JAX arrays: without a copy where they are aligned to 64 bytes
    (from 0.4.32 on).

    Args:
        places: the sharding of each; where JAX puts new arrays if it is None.
    """
    if not arrays:
        return []
    return list(jax.device_put(list(arrays), None if places is None else list(places), **_MAY_ALIAS))


def committed(array: Any) -> bool:
    """Whether it has been put on its device by the program's wish."""
    return bool(array._committed if not hasattr(array, "committed") else array.committed)


def forget_effects() -> None:
    """After an ordered program has failed: later ones would wait for its token, and fail with its error, for ever.

    Nothing public clears it.
    """
    try:
        from jax._src.dispatch import runtime_tokens

        runtime_tokens.clear()
    except (ImportError, AttributeError):
        return


# ---- lowering
# ----------------------------------------------------------------------------------------------------------------------


def _ordered_effect() -> Any:
    """The effect that keeps what a program does in its order.

    JAX has no public way to make an ordered effect, but public functions that have one. That of an ordered debugging
    callback is allowed in control flow, under `jax.checkpoint` and in custom derivatives; that of an `io_callback` is
    not. A kind of its own may be allowed in programs for several devices as well, whose collectives are put on one of
    them; the debugging callbacks' kind stays forbidden there.
    """
    (effect,) = jax.make_jaxpr(lambda: jax.debug.callback(lambda: None, ordered=True))().effects
    kind = type("CollectiveEffect", (type(effect),), {"__repr__": lambda self: "a collective of collectives.jax"})
    try:
        from jax._src.effects import shardable_ordered_effects
    except ImportError:  # then such programs are refused by JAX
        return kind()
    shardable_ordered_effects.add_type(kind)
    return kind()


ORDERED = _ordered_effect()
_TOKEN = jax.make_jaxpr(lambda: jax.lax.create_token(0.0))().out_avals[0]
_NOT_CACHED = {"cacheable": False} if "cacheable" in inspect.signature(mlir.register_lowering).parameters else {}
_RETURNS_TOKEN = (
    {"returns_token": True} if "returns_token" in inspect.signature(mlir.emit_python_callback).parameters else {}
)
_CHAIN = "collectives.jax: the last token of each block"


def register_lowering(primitive: Any, rule: Callable[..., Any], platform: str | None = None) -> None:
    """A rule that is asked at every place where the primitive stands."""
    mlir.register_lowering(primitive, rule, platform=platform, **_NOT_CACHED)


def register_ffi_target(name: str, make: Callable[[tuple[int, int]], Any]) -> bool:
    """Make a C function known to XLA on the CPU; False where that cannot be.

    Args:
        make: of the version of XLA's interface the function; it lives for ever.
    """
    if ffi is None or "xla_cpu_use_thunk_runtime=false" in os.environ.get("XLA_FLAGS", ""):
        return False
    try:
        version = version_in(Path(ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text())
    except OSError:
        return False
    if version is None or version[0] != 0:
        return False
    _KEPT.append(make(version))
    ffi.register_ffi_target(name, ffi.pycapsule(_KEPT[-1]), platform="cpu")
    return True


_KEPT: list[Any] = []


def lower_as_callback(ctx: Any, function: Callable[..., Any], operands: Sequence[Any], ordered: bool) -> Any:
    """Lower to a call of ``function(*arrays) -> arrays``, by the means of `jax.experimental.io_callback`."""
    spread = devices(ctx) > 1 and bool(ctx.avals_out)
    made = [*ctx.avals_out, _VERDICT] if spread else ctx.avals_out
    placing = _on_one_device(ctx, made)

    def lower(token: Any) -> tuple[Any, Any]:
        called = _judged(function, ctx.avals_out) if spread else function
        results, token, _ = mlir.emit_python_callback(
            ctx.replace(avals_out=made),
            called,
            token,
            list(operands),
            ctx.avals_in,
            made,
            has_side_effect=True,
            **_RETURNS_TOKEN,
            **placing,
        )
        return results, token

    results = _in_order(ctx, lower, ordered)
    return _replicated(ctx, results) if spread else results


def lower_as_ffi_call(ctx: Any, target: str, operands: Sequence[Any], text: str, ordered: bool, in_place: bool) -> Any:
    """Lower to a call of a registered function, with the attribute ``call``; a token is the last operand, and the last
    result.

    Args:
        in_place: each result lies where the operand was, if that is something that the program has made. What it needs
            later is copied before, and so would be its own arguments.
    """
    in_place = in_place and not any(isinstance(operand, mlir.ir.BlockArgument) for operand in operands)
    aliases = {number: number for number in range(len(operands))} if in_place else {}
    whole = ctx.replace(avals_in=[*ctx.avals_in, _TOKEN], avals_out=[*ctx.avals_out, _TOKEN])

    def lower(token: Any) -> tuple[Any, Any]:
        *results, token = ffi.ffi_lowering(target, has_side_effect=True, operand_output_aliases=aliases)(
            whole, *operands, token, call=text
        )
        return results, token

    return _in_order(ctx, lower, ordered)


def devices(ctx: Any) -> int:
    """How many devices of this process the program that is being lowered is for."""
    where = ctx.module_context.axis_context
    return int(
        (where.num_devices if hasattr(where, "num_devices") else where.mesh.size if hasattr(where, "mesh") else 1) or 1
    )


def _on_one_device(ctx: Any, results: Sequence[Any]) -> dict[str, Any]:
    """How a callback is kept to one device of several: XLA brings it whole arrays, and takes the results to where they
    are needed.

    Raises:
        InvalidArgumentError: the program is written for each device by itself.
    """
    several = devices(ctx)
    if several == 1:
        return {}
    try:
        from jax._src.callback import _callback_op_sharding as sharding_of
    except ImportError:
        sharding_of = None
    if not hasattr(ctx.module_context.axis_context, "device_assignment"):
        raise InvalidArgumentError(
            f"collectives.jax: a collective inside of pmap or shard_map over {several} devices: every one of them "
            f"would call it, and a rank"
            " calls once. Call it outside, on what pmap or shard_map returns; or start a rank for each device"
        )
    if (
        sharding_of is None
        or "axis_sizes" not in inspect.signature(getattr(jax.sharding, "AbstractMesh", None) or tuple).parameters
    ):
        raise InvalidArgumentError(
            f"collectives.jax: a collective in a program for {several} devices, for which this version of JAX is too "
            f"old: call it outside"
            " jit, on arrays that lie on one device or are replicated, or start a rank for each device"
        )
    return {"sharding": sharding_of(ctx.module_context.axis_context, None, results)}


def _replicated(ctx: Any, results: Sequence[Any]) -> Any:
    """Results that every device of the program has, or none: those of one device alone would not go together with other
    arrays.

    The last one is the verdict, on which each device fails by itself: while one has failed alone, the others would wait
    for what it was to send them, until XLA ends the process.
    """
    mesh = jax.sharding.AbstractMesh((devices(ctx),), ("device",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def spread(*arrays: Any) -> list[Any]:
        *made, verdict = (jax.lax.with_sharding_constraint(each, place) for each in arrays)
        well = _sentence_p.bind(verdict)[0] == 0
        return [jax.numpy.where(well, each, jax.numpy.zeros_like(each)) for each in made]

    lowered = mlir.lower_fun(spread, multiple_results=True)
    return lowered(ctx.replace(avals_in=[*ctx.avals_out, _VERDICT], tokens_out=None), *results)


_VERDICT = ShapedArray((), np.dtype(np.int32))
"""0 if a callback has done well, else where in `_failures` its exception is."""
_FAILURES = 64
_failures: dict[int, Exception] = {}
"""The last so many, for as long as devices may still ask for them."""
_numbers = itertools.count()


def _judged(function: Callable[..., Any], results: Sequence[Any]) -> Callable[..., Any]:
    """A callback that returns a verdict, and zeros in place of raising."""

    def judged(*arrays: Any) -> tuple[Any, ...]:
        try:
            return (*function(*arrays), np.int32(0))
        except Exception as error:
            logger.error("in a program for several devices: %s: %s", type(error).__name__, error)
            verdict = next(_numbers) % _FAILURES + 1
            _failures[verdict] = error
            return (*(np.zeros(each.shape, each.dtype) for each in results), np.int32(verdict))

    return judged


def _sentence(verdict: Any) -> tuple[Any]:
    number = int(np.asarray(verdict))
    if number:
        raise _failures[number]
    return (np.int32(0),)


def _lower_sentence(ctx: Any, verdict: Any) -> Any:
    """Pure as far as XLA knows, so that it does not ask for one device."""
    results, _, _ = mlir.emit_python_callback(
        ctx, _sentence, None, [verdict], ctx.avals_in, ctx.avals_out, has_side_effect=False, returns_token=False
    )
    return results


_sentence_p = primitive("collective_verdict")
_sentence_p.def_abstract_eval(lambda verdict: [verdict])
register_lowering(_sentence_p, _lower_sentence)


def _in_order(ctx: Any, lower: Callable[[Any], tuple[Any, Any]], ordered: bool) -> Any:
    """Lower what takes a token and returns the next: along the program's chain of effects, or along the block that it
    stands in."""
    if ordered:
        results, token = lower(ctx.tokens_in.get(ORDERED))
        ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({ORDERED: token})))
        return results
    chain = ctx.module_context.cached_primitive_lowerings.setdefault(
        _CHAIN, []
    )  # lives as long as the module is being made
    block = mlir.ir.InsertionPoint.current.block
    place = next((place for place, (other, _) in enumerate(chain) if other == block), None)
    results, token = lower(stablehlo.create_token() if place is None else chain[place][1])
    if place is not None:
        del chain[place]
    chain.append((block, token))
    return results
