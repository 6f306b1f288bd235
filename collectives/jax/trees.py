"""Pytrees: the arrays in them, and back. None is no leaf and stays where it is; NumPy arrays and Python numbers become JAX arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from collectives import dtypes, foreign
from collectives.errors import InvalidArgumentError, InvalidTypeError
from collectives.jax import drift

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
    return found, structure.unflatten, not jax.tree_util.treedef_is_leaf(structure)


class _Refused(Exception):
    def __init__(self, kind: type[Exception], text: str) -> None:
        super().__init__(text)
        self.kind = kind


def _array(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        if not isinstance(leaf, (np.ndarray, np.generic, bool, int, float, complex)):
            raise _Refused(
                InvalidTypeError, f"expected a jax.Array, a NumPy array or a number, got {foreign.describe(leaf)}; leave it out of the tree"
            )
        try:
            leaf = jnp.asarray(leaf)
        except (TypeError, OverflowError) as error:
            raise _Refused(InvalidTypeError, f"JAX cannot hold it: {error}") from None
    elif not drift.is_tracer(leaf):
        if leaf.is_deleted():
            raise _Refused(InvalidArgumentError, "this array was deleted, or donated to a compiled function")
        if len(leaf.sharding.device_set) > 1:
            raise _Refused(
                InvalidTypeError,
                f"expected an array on one device, got one on {len(leaf.sharding.device_set)} ({leaf.sharding}); each rank reduces what it"
                " has on its own device: pass jax.device_put(array, device)",
            )
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise _Refused(
            InvalidTypeError, "random keys are no numbers; pass jax.random.key_data(key), and jax.random.wrap_key_data the result"
        )
    try:
        dtypes.name(leaf.dtype)
    except InvalidTypeError as error:
        raise _Refused(InvalidTypeError, str(error)) from None
    return leaf
