"""Differences between JAX's versions (0.4.31 and later), and uses of its non-public parts, each with its reason.

Primitives, their rules and lowerings are made with `jax.extend.core` and `jax.interpreters`, which JAX provides for
extensions.
"""

from __future__ import annotations

import importlib
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


def _optional(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


_core: Any = jax.core
_extend = _optional("jax.extend.core")
Primitive: Any = getattr(_extend, "Primitive", None) or _core.Primitive  # in jax.core before 0.4.36
ffi = _optional("jax.ffi")
"""None before 0.5; XLA's older runtime aborts when a foreign function is passed a token."""


# ---- tracing


def _tracing() -> Callable[[], bool]:
    """Return the function that tells whether operations are traced, including those on concrete arrays.

    No public function does. Versions with neither of two non-public ones execute the cheapest operation and inspect its
    result.
    """
    under_jit = getattr(_extend, "unsafe_am_i_under_a_jit_DO_NOT_USE", None)
    if under_jit is not None:
        return lambda: bool(under_jit())
    clean = getattr(_core, "trace_state_clean", None)
    if clean is not None:
        return lambda: not clean()
    return lambda: isinstance(jax.numpy.zeros(()), Tracer)


tracing = _tracing()
"""Whether operations are traced at present, including those on concrete arrays."""


def primitive(name: str) -> Any:
    """Return a new JAX primitive with several results."""
    made = Primitive(name)
    made.multiple_results = True
    return made


def no_tangent(value: Any) -> Any:
    """Return a symbolic zero tangent; of float0 for integers and bools."""
    moves = jax.numpy.issubdtype(value.dtype, jax.numpy.inexact)
    return ad.Zero(ShapedArray(value.shape, value.dtype if moves else jax.dtypes.float0))


# ---- arrays

_MAY_ALIAS = {"may_alias": True} if "may_alias" in inspect.signature(jax.device_put).parameters else {}


def adopt(arrays: Sequence[Any], places: Sequence[Any] | None = None) -> list[Any]:
    """Return NumPy arrays as JAX arrays, without a copy if they are aligned to 64 bytes (from 0.4.32 on).

    Args:
        arrays: must not be written to any more.
        places: the sharding of each; None: JAX's default device.
    """
    if not arrays:
        return []
    return list(jax.device_put(list(arrays), None if places is None else list(places), **_MAY_ALIAS))


def committed(array: Any) -> bool:
    """Whether the program has placed an array on its device explicitly."""
    return bool(array._committed if not hasattr(array, "committed") else array.committed)


def key_kind(key: Any) -> str:
    """Return the implementation of a random key, by the name that `jax.random.wrap_key_data` takes."""
    kind = jax.random.key_impl(key)  # before 0.4.36 no name
    return kind if isinstance(kind, str) else str(key.dtype._impl.name)


def forget_effects() -> None:
    """Drop the token of a failed ordered program, with whose error all later ones would fail.

    No public function does.
    """
    try:
        from jax._src.dispatch import runtime_tokens

        runtime_tokens.clear()
    except (ImportError, AttributeError):
        return


# ---- lowering


def _ordered_effect() -> Any:
    """Return the effect that keeps collectives in program order.

    JAX has no public constructor of ordered effects, but public functions that have one. That of an ordered debugging
    callback is allowed in control flow, under `jax.checkpoint` and in custom derivatives; that of an `io_callback` is
    not. A subclass can also be allowed in programs for several devices, whose collectives run on one of them, while
    debugging callbacks stay forbidden there.
    """
    (effect,) = jax.make_jaxpr(lambda: jax.debug.callback(lambda: None, ordered=True))().effects
    kind = type("CollectiveEffect", (type(effect),), {"__repr__": lambda self: "a collective of collectives.jax"})
    try:
        from jax._src.effects import shardable_ordered_effects
    except ImportError:  # JAX refuses such programs
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
    """Register a lowering rule that is applied anew at every occurrence of the primitive."""
    mlir.register_lowering(primitive, rule, platform=platform, **_NOT_CACHED)


def register_ffi_target(name: str, make: Callable[[tuple[int, int]], Any]) -> bool:
    """Register a C function with XLA on the CPU. Returns False where XLA does not support it.

    Args:
        make: returns the function for a version of XLA's interface; it is kept for the life of the process.
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
    """Lower to a call of ``function(*arrays) -> arrays``, by the mechanism of `jax.experimental.io_callback`."""
    spread = devices(ctx) > 1 and bool(ctx.avals_out)
    made = [*ctx.avals_out, _VERDICT] if spread else ctx.avals_out
    placing = _on_one_device(ctx, made)

    def lower(token: Any) -> tuple[Any, Any]:
        called = _with_verdict(function, ctx.avals_out) if spread else function
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
    """Lower to a call of a registered function with the attribute ``call``, and a token as last operand and result.

    Args:
        in_place: each result replaces its operand in memory, unless an operand is an argument of the program: XLA
            copies arguments first, as it does operands that are used later.
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
    """Return the number of this process's devices that the program is lowered for."""
    where = ctx.module_context.axis_context
    mesh_size = where.mesh.size if hasattr(where, "mesh") else 1
    return int(getattr(where, "num_devices", mesh_size) or 1)


def _on_one_device(ctx: Any, results: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments that keep a callback on one of several devices; XLA gathers its operands there."""
    several = devices(ctx)
    if several == 1:
        return {}
    sharding_of = getattr(_optional("jax._src.callback"), "_callback_op_sharding", None)
    if not hasattr(ctx.module_context.axis_context, "device_assignment"):
        raise InvalidArgumentError(
            f"collectives.jax: a collective was called inside pmap or shard_map over {several} devices: each device "
            "would call it, but a rank must call it once. Combine the devices' values inside (jax.lax.pmean), and "
            "call it outside: on one device's value (y[0] of pmap's result y), or within jax.jit on the whole "
            "result; or start a rank for each device [F65]"
        )
    if (
        sharding_of is None
        or "axis_sizes" not in inspect.signature(getattr(jax.sharding, "AbstractMesh", None) or tuple).parameters
    ):
        raise InvalidArgumentError(
            f"collectives.jax: this version of JAX is too old for a collective in a program for {several} devices; "
            "upgrade JAX, or call it outside jit on arrays that are on one device or replicated, or start a rank for "
            "each device [F66]"
        )
    return {"sharding": sharding_of(ctx.module_context.axis_context, None, results)}


def _replicated(ctx: Any, results: Sequence[Any]) -> Any:
    """Replicate the results of one device to all devices of the program.

    The last result is the verdict, by which each device fails for itself: if one failed alone, the others would wait
    for its data until XLA aborts the process.
    """
    mesh = jax.sharding.AbstractMesh((devices(ctx),), ("device",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def spread(*arrays: Any) -> list[Any]:
        *made, verdict = (jax.lax.with_sharding_constraint(each, place) for each in arrays)
        well = _verdict_p.bind(verdict)[0] == 0
        return [jax.numpy.where(well, each, jax.numpy.zeros_like(each)) for each in made]

    lowered = mlir.lower_fun(spread, multiple_results=True)
    return lowered(ctx.replace(avals_in=[*ctx.avals_out, _VERDICT], tokens_out=None), *results)


_VERDICT = ShapedArray((), np.dtype(np.int32))
"""The outcome of a callback: 0 for success, else the key of its exception in `_failures`."""
_FAILURES = 64
_failures: dict[int, Exception] = {}
"""The most recent failures, which devices may still raise."""
_numbers = itertools.count()


def _with_verdict(function: Callable[..., Any], results: Sequence[Any]) -> Callable[..., Any]:
    """Wrap a callback so that it returns a verdict as well, and zeros instead of raising."""

    def wrapped(*arrays: Any) -> tuple[Any, ...]:
        try:
            return (*function(*arrays), np.int32(0))
        except Exception as error:
            logger.error("in a program for several devices: %s: %s", type(error).__name__, error)
            verdict = next(_numbers) % _FAILURES + 1
            _failures[verdict] = error
            return (*(np.zeros(each.shape, each.dtype) for each in results), np.int32(verdict))

    return wrapped


def _raise_failure(verdict: Any) -> tuple[Any]:
    number = int(np.asarray(verdict))
    if number:
        raise _failures[number]
    return (np.int32(0),)


def _lower_verdict(ctx: Any, verdict: Any) -> Any:
    """Lower to a callback without side effects, which XLA runs on every device."""
    results, _, _ = mlir.emit_python_callback(
        ctx, _raise_failure, None, [verdict], ctx.avals_in, ctx.avals_out, has_side_effect=False, returns_token=False
    )
    return results


_verdict_p = primitive("collective_verdict")
_verdict_p.def_abstract_eval(lambda verdict: [verdict])
register_lowering(_verdict_p, _lower_verdict)


def _in_order(ctx: Any, lower: Callable[[Any], tuple[Any, Any]], ordered: bool) -> Any:
    """Lower an operation on tokens: in the program's chain of effects, or else in that of its block."""
    if ordered:
        results, token = lower(ctx.tokens_in.get(ORDERED))
        ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({ORDERED: token})))
        return results
    chain = ctx.module_context.cached_primitive_lowerings.setdefault(_CHAIN, [])  # kept until the module is complete
    block = mlir.ir.InsertionPoint.current.block
    place = next((place for place, (other, _) in enumerate(chain) if other == block), None)
    results, token = lower(stablehlo.create_token() if place is None else chain[place][1])
    if place is not None:
        del chain[place]
    chain.append((block, token))
    return results
