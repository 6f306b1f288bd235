"""Flatten pytrees into JAX arrays, and rebuild them.

None is not a leaf and stays in place. NumPy arrays, Python numbers and other frameworks' tensors with DLPack (torch,
CuPy, TensorFlow) become JAX arrays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from collectives.base import dtypes
from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.tensors import detection

Rebuild = Callable[[list[Any]], Any]
"""Puts other arrays into the places of a pytree's leaves."""
NUMBERS = (np.ndarray, np.generic, bool, int, float, complex)
"""Types of leaves, besides JAX arrays, that JAX converts by itself."""
_ADVICE = "; collectives.jax combines whole arrays: pass jax.device_put(array, device), or call it inside jax.jit"


def leaves(tree: Any, argument: str = "tensor") -> tuple[list[Any], Rebuild, bool]:
    """Flatten a pytree.

    Args:
        argument: the name of the tree in error messages.

    Returns:
        The leaves as JAX arrays, the function that rebuilds the tree, and whether it is more than a single leaf.

    Raises:
        InvalidTypeError: a leaf is not an array of a supported dtype, or is sharded over several devices.
        InvalidArgumentError: a JAX array was deleted or donated.
    """
    structure: Any
    arrays, structure = jax.tree_util.tree_flatten(tree)
    for number, leaf in enumerate(arrays):
        try:
            arrays[number] = _array(leaf)
        except (InvalidTypeError, InvalidArgumentError) as error:
            path = jax.tree_util.keystr(jax.tree_util.tree_flatten_with_path(tree)[0][number][0])
            raise type(error)(f"{argument}{path}: {error}") from None
    # JAX also calls the structure of an empty container a leaf.
    return arrays, structure.unflatten, not arrays or not jax.tree_util.treedef_is_leaf(structure)


def check_whole(array: jax.Array, advice: str = "") -> None:
    """Check that a JAX array has all of its elements on one device; ``advice`` ends the message if it is sharded."""
    if array.is_deleted():
        raise InvalidArgumentError(
            "this array was deleted, or donated to a compiled function; do not donate an array that you use again [T49]"
        )
    if not array.is_fully_replicated:
        raise InvalidTypeError(
            "expected an array on one device, or replicated over several, got one that is sharded over "
            f"{len(array.sharding.device_set)} devices ({array.sharding}){advice} [T50]"
        )


def _array(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        if not isinstance(leaf, NUMBERS):
            leaf = _from_dlpack(leaf)
        try:
            leaf = jnp.asarray(leaf)
        except (TypeError, OverflowError) as error:
            raise InvalidTypeError(f"JAX cannot represent it: {error} [T1]") from None
    elif not isinstance(leaf, Tracer):
        check_whole(leaf, _ADVICE)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise InvalidTypeError(
            "random keys are not numbers; pass jax.random.key_data(key), and wrap the result with "
            "jax.random.wrap_key_data [T19]"
        )
    dtypes.name(leaf.dtype)
    return leaf


def _from_dlpack(leaf: Any) -> Any:
    """Return another framework's tensor as a JAX array, of the same memory if JAX accepts it, detached from the
    framework's gradients."""
    if not hasattr(leaf, "__dlpack__"):
        raise InvalidTypeError(
            "expected a jax.Array, a NumPy array, a number or a tensor with DLPack, got "
            f"{detection.describe(leaf)}; leave it out of the tree [T2]"
        )
    if str(getattr(leaf, "device", "")) == "meta":
        raise InvalidTypeError(
            f"expected a tensor with elements, got a {detection.describe(leaf)} {detection.NO_ELEMENTS} [T38]"
        )
    leaf = leaf.detach() if getattr(leaf, "requires_grad", False) else leaf
    try:
        return jnp.from_dlpack(leaf)
    except Exception as error:
        with contextlib.suppress(Exception):  # JAX refuses strided and read-only memory, of which NumPy makes a copy
            return jnp.array(np.from_dlpack(leaf))
        raise InvalidTypeError(f"{detection.describe(leaf)} cannot be read through DLPack: {error} [T3]") from None
