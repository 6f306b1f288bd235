"""Compression of JAX arrays: built-in halves inside the engine where it can, other compressors around the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from collectives.tensors.compression import BUILT_IN, BF16Compressor, Compression, FP16Compressor, check

Restore = Callable[[list[Any]], list[Any]]
"""Decompresses the results of a call."""
_WIRES = {FP16Compressor: "float16", BF16Compressor: "bfloat16"}


def in_engine(compression: Any, tensors: list[Any]) -> tuple[str | None, list[Any], Restore]:
    """Compress for an operation that has built-in compression.

    Returns:
        The dtype in which the engine sends the tensors (None: their own), the tensors, and the function that restores
        the results.
    """
    if compression is None or _is_built_in(compression):
        return _WIRES.get(compression), tensors, list
    return None, *around_call(compression, tensors)


def around_call(compression: Any, tensors: list[Any]) -> tuple[list[Any], Restore]:
    """Compress for an operation without compression; returns the compressed tensors, and what restores the results."""
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
    def narrow(tensor: Any) -> Any:
        wide = jnp.issubdtype(tensor.dtype, jnp.floating) and tensor.dtype.itemsize > 2
        return tensor.astype(wire) if wide else tensor

    def restore(results: list[Any]) -> list[Any]:
        return [result.astype(tensor.dtype) for result, tensor in zip(results, tensors, strict=True)]

    return [narrow(tensor) for tensor in tensors], restore


def _is_built_in(compression: Any) -> bool:
    return any(compression is built_in for built_in in BUILT_IN)
