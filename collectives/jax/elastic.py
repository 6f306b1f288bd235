"""Elastic training with JAX: ``hvd.elastic``; see `collectives.elastic`.

Example:
    import collectives.jax as hvd

    hvd.init()
    state = hvd.elastic.JaxState(params=params, optimizer_state=optimizer.init(params), step=0)

    @hvd.elastic.run
    def train(state):
        while state.step < 1000:
            state.params, state.optimizer_state, loss = step(state.params, state.optimizer_state, batch())
            state.step += 1
            state.commit()

    train(state)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from collectives.elastic import HostsUpdatedInterrupt, ObjectState, run
from collectives.elastic.object_state import Attributes
from collectives.elastic.shadow import Entry, Part
from collectives.jax import compat, eager, pytrees

__all__ = ["HostsUpdatedInterrupt", "JaxState", "ObjectState", "run"]


class _Attributes(Attributes):
    """Attributes with JAX's arrays in them, which begin alike on all ranks, at the same places of their trees."""

    def described(self) -> Mapping[str, str]:
        trees = {name: getattr(self._owner, name) for name in self._names}
        leaves = jax.tree_util.tree_flatten_with_path(trees)[0]
        arrays = {
            f"attribute {path[0].key}{jax.tree_util.keystr(path[1:])}": f"{leaf.dtype} of shape {leaf.shape}"
            for path, leaf in leaves
            if isinstance(leaf, jax.Array)
        }
        return {**super().described(), **arrays}

    def kind(self, value: Any) -> str | None:
        if not isinstance(value, jax.Array):
            return super().kind(value)
        return f"jax {compat.key_kind(value)}" if _is_key(value) else "jax"

    def entry(self, tensor: Any) -> Entry:
        if not isinstance(tensor, jax.Array):
            return super().entry(tensor)
        data = jax.eval_shape(jax.random.key_data, tensor) if _is_key(tensor) else tensor
        return Entry(data.dtype.name, data.shape, data.size * data.dtype.itemsize)

    def copy(self, tensor: Any, view: Any) -> None:
        if isinstance(tensor, jax.Array):
            pytrees.check_whole(tensor)
            tensor = jax.random.key_data(tensor) if _is_key(tensor) else tensor
        np.copyto(view, np.asarray(tensor))

    def renewed(self, view: Any, kind: str, like: Any) -> Any:
        if not kind.startswith("jax"):
            return super().renewed(view, kind, like)
        # A copy: JAX may take an array's memory for its own.
        array = eager.placed([view.copy()], [like] if isinstance(like, jax.Array) else [])[0]
        return jax.random.wrap_key_data(array, impl=kind.removeprefix("jax ")) if " " in kind else array

    def writeable(self, tensor: Any) -> bool:
        return not isinstance(tensor, jax.Array) and super().writeable(tensor)


def forget_programs() -> None:
    """Drop compiled programs, which have the earlier rank and size in them, and the order in which the next ones follow
    those that have failed."""
    eager.wait_for_effects()
    jax.clear_caches()


class JaxState(ObjectState):
    """A state of pytrees: parameters, an optimizer's state, random keys, NumPy arrays, numbers.

    Each keyword becomes an attribute, as in `ObjectState`. JAX's arrays, anywhere in them, must begin with the same
    shapes and dtypes on all ranks; `restore` and `sync` make new ones, on the devices of those in their places. The
    arrays that were saved may be donated.

    Raises:
        InvalidTypeError: a value cannot be pickled, or an array is sharded over several devices.

    Example:
        state = hvd.elastic.JaxState(params={"w": jnp.zeros((3, 3))}, step=0)
    """

    def __init__(self, **kwargs: Any) -> None:
        self._names = tuple(kwargs)
        super().__init__(**kwargs)

    def _attributes(self, names: Sequence[str]) -> Part:
        return _Attributes(self, names)

    def reset(self) -> None:
        """Drop compiled programs; see `forget_programs`."""
        forget_programs()

    def settle(self) -> None:
        """Wait for the computations of the arrays. Raises the error of one that has failed."""
        eager.wait_for_effects()
        leaves = jax.tree.leaves([getattr(self, name) for name in self._names])
        # The state may still name arrays that the program has donated.
        jax.block_until_ready([leaf for leaf in leaves if not (isinstance(leaf, jax.Array) and leaf.is_deleted())])

    def save(self) -> None:
        """Copy the state to host memory; see `ObjectState.save`."""
        eager.wait_for_effects()  # the arrays' computations may contain collectives, which come before the commit's
        super().save()


def _is_key(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jax.dtypes.prng_key))
