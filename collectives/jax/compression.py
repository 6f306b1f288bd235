"""What a compressor makes of JAX arrays: the engine's own halves in the engine, others' forms before and after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from collectives.tensors.compression import BUILT_IN, BF16Compressor, Compression, FP16Compressor, check

Restore = Callable[[list[Any]], list[Any]]
_WIRES = {FP16Compressor: "float16", BF16Compressor: "bfloat16"}


def inside(compression: Any, tensors: list[Any]) -> tuple[str | None, list[Any], Restore]:
    """For an operation that compresses by itself: the dtype in which tensors travel; the tensors, and what becomes of
    the results."""
    if compression is None or _is_built_in(compression):
        return _WIRES.get(compression), tensors, list
    return None, *outside(compression, tensors)


def outside(compression: Any, tensors: list[Any]) -> tuple[list[Any], Restore]:
    """For one that does not: the compressed tensors, and what becomes of the results."""
    if compression is None or compression is Compression.none:
        return tensors, list
    if _is_built_in(compression):
        return _halves(_WIRES[compression], tensors)
    check(compression)
    pairs = [compression.compress(tensor) for tensor in tensors]

    def restore(results: list[Any]) -> list[Any]:
        return [compression.decompress(result, context) for result, (_, context) in zip(results, pairs, strict=True)]

    return [compressed for compressed, _ in pairs], restore


def _halves(wire: str, tensors: list[Any]) -> tuple[list[Any], Restore]:
    def small(tensor: Any) -> Any:
        wide = jnp.issubdtype(tensor.dtype, jnp.floating) and tensor.dtype.itemsize > 2
        return tensor.astype(wire) if wide else tensor

    def restore(results: list[Any]) -> list[Any]:
        return [result.astype(tensor.dtype) for result, tensor in zip(results, tensors, strict=True)]

    return [small(tensor) for tensor in tensors], restore


def _is_built_in(compression: Any) -> bool:
    return any(compression is known for known in BUILT_IN)
