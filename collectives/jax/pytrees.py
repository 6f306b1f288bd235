"""Pytrees: the arrays in them, and back.

None is no leaf and stays where it is; NumPy arrays, Python numbers and
other frameworks' tensors with DLPack (torch, CuPy, TensorFlow) become JAX arrays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from collectives.base import dtypes
from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.jax import compat
from collectives.tensors import detection

Rebuild = Callable[[list[Any]], Any]


def leaves(tree: Any, argument: str = "tensor") -> tuple[list[Any], Rebuild, bool]:
    """The arrays in a pytree, what puts others into their places, and whether it is more than a single leaf.

    Raises:
        InvalidTypeError: a leaf that is no array of numbers which the engine knows, or lies on several devices.
        InvalidArgumentError: a JAX array that was deleted or donated.
    """
    found, structure = jax.tree_util.tree_flatten(tree)
    for number, leaf in enumerate(found):
        try:
            found[number] = _array(leaf)
        except _Refused as refusal:
            path = jax.tree_util.keystr(jax.tree_util.tree_flatten_with_path(tree)[0][number][0])
            raise refusal.kind(f"{argument}{path}: {refusal}") from None
    # A container without a leaf is one node to JAX, as a leaf is.
    return found, structure.unflatten, not found or not jax.tree_util.treedef_is_leaf(structure)


class _Refused(Exception):
    def __init__(self, kind: type[Exception], text: str) -> None:
        super().__init__(text)
        self.kind = kind


def _array(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        if not isinstance(leaf, (np.ndarray, np.generic, bool, int, float, complex)):
            leaf = _through_dlpack(leaf)
        try:
            leaf = jnp.asarray(leaf)
        except (TypeError, OverflowError) as error:
            raise _Refused(InvalidTypeError, f"JAX cannot hold it: {error}") from None
    elif not compat.is_tracer(leaf):
        if leaf.is_deleted():
            raise _Refused(InvalidArgumentError, "this array was deleted, or donated to a compiled function")
        if not leaf.is_fully_replicated:
            raise _Refused(
                InvalidTypeError,
                f"expected an array on one device, or replicated over several, got one that is sharded over "
                f"{len(leaf.sharding.device_set)}"
                f" ({leaf.sharding}); collectives.jax combines whole arrays: pass jax.device_put(array, device), or "
                f"call it inside jax.jit",
            )
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise _Refused(
            InvalidTypeError,
            "random keys are no numbers; pass jax.random.key_data(key), and jax.random.wrap_key_data the result",
        )
    try:
        dtypes.name(leaf.dtype)
    except InvalidTypeError as error:
        raise _Refused(InvalidTypeError, str(error)) from None
    return leaf


def _through_dlpack(leaf: Any) -> Any:
    """Another framework's tensor as a JAX array; of the same memory if JAX takes it. Nothing is recorded for its
    framework's gradients."""
    if not hasattr(leaf, "__dlpack__"):
        expected = "a jax.Array, a NumPy array, a number or a tensor with DLPack"
        raise _Refused(
            InvalidTypeError, f"expected {expected}, got {detection.describe(leaf)}; leave it out of the tree"
        )
    if str(getattr(leaf, "device", "")) == "meta":
        raise _Refused(
            InvalidTypeError,
            f"expected a tensor with elements, got a {detection.describe(leaf)} {detection.NO_ELEMENTS}",
        )
    leaf = leaf.detach() if getattr(leaf, "requires_grad", False) else leaf
    try:
        return jnp.from_dlpack(leaf)
    except Exception as error:
        with contextlib.suppress(Exception):  # JAX has no strides, and takes nothing that is read-only
            return jnp.array(np.from_dlpack(leaf))
        raise _Refused(InvalidTypeError, f"{detection.describe(leaf)} cannot be read through DLPack: {error}") from None
