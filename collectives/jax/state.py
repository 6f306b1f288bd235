"""Initial synchronisation: broadcast parameters and objects, so that every rank starts from the same state.

The ranks first compare a 16-byte digest of what they pass, so that a model that was built differently on some rank is an
error on all of them before anything is sent. Arrays of 256 KiB and more are then sent in place, smaller ones packed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from collectives import api
from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.engine import arguments
from collectives.frontends.agreement import agree
from collectives.jax import eager, pytrees
from collectives.jax.dispatch import require_eager
from collectives.jax.operations import Tree
from collectives.process_sets import ProcessSet
from collectives.runtime import global_process_set, root_in, world_of
from collectives.tensors import detection
from collectives.world import World

_ALONE_FROM = 256 << 10
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
    """
    require_eager(_LABEL)
    eager.wait_for_effects()
    world = world_of(process_set)
    number = root_in(process_set, root_rank, _LABEL)
    try:
        root = arguments.root(number, world.size)
        pairs, structure = jax.tree_util.tree_flatten_with_path(params)
        arrays = {f"params{jax.tree_util.keystr(path)}": leaf for path, leaf in pairs}
        keys = {name: jax.random.key_impl(leaf) for name, leaf in arrays.items() if _is_key(leaf)}
        plain = {name: _plain(name, leaf) for name, leaf in arrays.items()}
    except Exception as error:
        raise world.refused(error, _LABEL) from None
    layout = {name: f"{array.dtype} of shape {array.shape}" for name, array in plain.items()}
    kinds = {f"the kind of random keys in {name}": str(kind) for name, kind in keys.items()}
    # Small arrays are packed in this order.
    order = hashlib.blake2b(repr(list(layout)).encode(), digest_size=8).hexdigest()
    agree(
        world,
        _LABEL,
        {"root_rank": f"rank {root_rank}", **layout, **kinds, "the order of the leaves (a digest)": order},
    )
    moved = _moved(world, root, plain)
    given = eager.placed(list(moved.values()), list(arrays.values()))
    results = {
        name: jax.random.wrap_key_data(result, impl=keys[name]) if name in keys else result
        for name, result in zip(moved, given, strict=True)
    }
    return structure.unflatten([results[name] for name in arrays])


def broadcast_object(
    obj: Tree, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tree:
    """Send the root's object, anything that pickle supports, to every rank. The root gets the object that it passed."""
    require_eager("broadcast_object")
    eager.wait_for_effects()
    return api.broadcast_object(obj, root_rank, name=name, process_set=process_set)


def allgather_object(obj: Tree, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Tree]:
    """Send every rank's object to every rank; returns them in rank order."""
    require_eager("allgather_object")
    eager.wait_for_effects()
    return api.allgather_object(obj, name=name, process_set=process_set)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _plain(name: str, leaf: Any) -> np.ndarray[Any, Any]:
    """Return a leaf as a NumPy array, in the dtype that JAX gives it; of a random key its data.

    Raises:
        InvalidTypeError, InvalidArgumentError: not an array, sharded, or deleted.
    """
    if not isinstance(leaf, jax.Array):
        if not isinstance(leaf, pytrees.NUMBERS):
            raise InvalidTypeError(
                f"{name}: expected an array or a number, got {detection.describe(leaf)}; leave it out of the tree"
            )
        return np.asarray(jnp.asarray(leaf))
    try:
        pytrees.check_whole(leaf)
    except (InvalidTypeError, InvalidArgumentError) as error:
        raise type(error)(f"{name}: {error}") from None
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _moved(world: World, root: int, arrays: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the root's arrays. They are sent as bytes, whatever their dtypes."""
    large = [name for name, array in arrays.items() if array.nbytes >= _ALONE_FROM]
    small = [name for name in arrays if name not in large]
    pack = f"{_LABEL}.packed"
    results = {}
    with world.composed([*(f"{_LABEL}.{name}" for name in large), *([pack] if small else [])]) as begin:
        flat = {name: np.ascontiguousarray(array).reshape(-1).view(np.uint8) for name, array in arrays.items()}
        handles = {name: world.broadcast_async(flat[name], root, name=begin(f"{_LABEL}.{name}")) for name in large}
        if small:
            packed = np.concatenate([flat[name] for name in small])
            together = world.broadcast(packed, root, name=begin(pack))
    if small:
        ends = np.cumsum([flat[name].nbytes for name in small])
        # Copies, because a view of another dtype needs aligned memory.
        results = {name: part.copy() for name, part in zip(small, np.split(together, ends[:-1]), strict=True)}
    results |= {name: handle.wait() for name, handle in handles.items()}
    return {name: results[name].view(array.dtype).reshape(array.shape) for name, array in arrays.items()}
