"""Initial synchronisation: broadcast parameters and objects, so that every rank starts from the same state.

`collectives.frontends.broadcasts` compares what the ranks pass, and sends it.
"""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from collectives import api
from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.frontends.broadcasts import ALONE_FROM, ArrayMemory, agreed_root, broadcast_in_place
from collectives.jax import eager, pytrees
from collectives.jax.dispatch import require_eager
from collectives.jax.operations import Tree
from collectives.tensors import detection
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.runtime import global_process_set, world_of
from collectives.worlds.world import World

_LABEL = "broadcast_parameters"


def broadcast_parameters(params: Tree, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> Tree:
    """Copy the root's parameters to every rank: a model's, an optimizer's state, or any other pytree.

    Args:
        params: a pytree of JAX arrays (random keys too), NumPy arrays and numbers; of the same structure, shapes and
            dtypes on every rank.
        root_rank: the root, by its number among all ranks.
        process_set: the ranks that take part.

    Returns:
        A new pytree of the same structure, with JAX arrays. None stays None.

    Raises:
        InvalidTypeError: a leaf that is not an array, or is sharded over several devices.
        InvalidArgumentError: called inside of a function that is being compiled; use `broadcast` there.
        MismatchError: the ranks' parameters or roots differ; raised on every rank, and names the first difference.

    Example:
        >>> hvd.broadcast_parameters({"w": jnp.array([float(hvd.rank())])}, root_rank=1)
        {'w': Array([1.], dtype=float32)}
    """
    require_eager(_LABEL)
    eager.wait_for_effects()

    def prepare() -> tuple[_Parameters, dict[str, str]]:
        parameters = _Parameters(params, world_of(process_set))
        return parameters, parameters.described()

    world, root, parameters = agreed_root(_LABEL, root_rank, process_set, prepare)
    if world.rank == root:
        for name, array in parameters.arrays.items():
            parameters.results[name][...] = array
    broadcast_in_place(world, _LABEL, root, parameters.results, ArrayMemory())
    return parameters.rebuilt()


def broadcast_object(
    obj: Tree, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tree:
    """Send the root's object, anything that pickle supports, to every rank. The root gets the object that it passed.

    Example:
        >>> hvd.broadcast_object({"from": hvd.rank()}, root_rank=1)
        {'from': 1}
    """
    require_eager("broadcast_object")
    eager.wait_for_effects()
    return api.broadcast_object(obj, root_rank, name=name, process_set=process_set)


def allgather_object(obj: Tree, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Tree]:
    """Send every rank's object to every rank; returns them in rank order.

    Example:
        >>> hvd.allgather_object(hvd.rank())
        [0, 1]
    """
    require_eager("allgather_object")
    eager.wait_for_effects()
    return api.allgather_object(obj, name=name, process_set=process_set)


class _Parameters:
    """A flattened pytree.

    Attributes:
        leaves: by path.
        keys: the implementations of the random keys among them.
        arrays: the leaves as NumPy arrays, possibly views of JAX's memory.
        results: uninitialised arrays of the same shapes and dtypes, in memory that JAX can adopt.
    """

    def __init__(self, params: Any, world: World) -> None:
        self._structure: Any
        pairs, self._structure = jax.tree_util.tree_flatten_with_path(params)
        self.leaves = {f"params{jax.tree_util.keystr(path)}": leaf for path, leaf in pairs}
        self.keys = {name: jax.random.key_impl(leaf) for name, leaf in self.leaves.items() if _is_key(leaf)}
        self.arrays = {name: _plain(name, leaf) for name, leaf in self.leaves.items()}
        self.results = {name: _empty_like(array, world) for name, array in self.arrays.items()}

    def described(self) -> dict[str, str]:
        """What must be equal on every rank."""
        layout = {name: f"{array.dtype} of shape {array.shape}" for name, array in self.arrays.items()}
        kinds = {f"the kind of random keys in {name}": str(kind) for name, kind in self.keys.items()}
        # Small arrays are packed in this order.
        order = hashlib.blake2b(repr(list(layout)).encode(), digest_size=8).hexdigest()
        return {**layout, **kinds, "the order of the leaves (a digest)": order}

    def rebuilt(self) -> Any:
        """The pytree of the results, on the devices of its leaves."""
        placed = eager.placed(list(self.results.values()), list(self.leaves.values()))
        return self._structure.unflatten(
            jax.random.wrap_key_data(array, impl=self.keys[name]) if name in self.keys else array
            for name, array in zip(self.leaves, placed, strict=True)
        )


def _empty_like(array: np.ndarray[Any, Any], world: World) -> np.ndarray[Any, Any]:
    if array.nbytes < ALONE_FROM:
        return np.empty(array.shape, array.dtype)
    memory: np.ndarray[Any, Any] = world.memory(array.nbytes, np.dtype(np.uint8))
    return memory.view(array.dtype).reshape(array.shape)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _plain(name: str, leaf: Any) -> np.ndarray[Any, Any]:
    """Return a leaf as a NumPy array, in the dtype that JAX gives it; of a random key its data."""
    if not isinstance(leaf, jax.Array):
        if not isinstance(leaf, pytrees.NUMBERS):
            raise InvalidTypeError(
                f"{name}: expected an array or a number, got {detection.describe(leaf)}; leave it out of the tree [F49]"
            )
        return np.asarray(jnp.asarray(leaf))
    try:
        pytrees.check_whole(leaf)
    except (InvalidTypeError, InvalidArgumentError) as error:
        raise type(error)(f"{name}: {error}") from None
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
