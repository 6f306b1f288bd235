"""The same start on every rank: parameters and objects as one rank has them.

The ranks first show each other what they pass, as a digest of 16 bytes, so that a model that was built differently on
some rank is an error on all of them before anything is sent. Then arrays from 256 KiB up travel as they are, and the
many small ones together.
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
from collectives.jax import eager
from collectives.jax.operations import Tree, outside
from collectives.process_sets import ProcessSet
from collectives.runtime import global_process_set, root_in, world_of
from collectives.tensors import detection
from collectives.world import World

_ALONE_FROM = 256 << 10
_LABEL = "broadcast_parameters"


def broadcast_parameters(params: Tree, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> Tree:
    """Give every rank the root's parameters: a model's, an optimizer's state, or any other pytree.

    Args:
        params: a pytree of JAX arrays (random keys too), NumPy arrays and numbers; of the same structure, shapes and
            dtypes on every rank.
        root_rank: the rank whose parameters they are, by its number among all ranks.
        process_set: the ranks that take part.

    Returns:
        A new pytree of the same structure, with JAX arrays. None stays None.

    Raises:
        InvalidTypeError: a leaf that is no array, or lies on several devices.
        InvalidArgumentError: called inside of a function that is being compiled: use `broadcast` there.
        MismatchError: the ranks' parameters or roots differ; raised on every rank, and names the first that does.
    """
    outside(_LABEL)
    eager.settle()
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
    # The small ones travel together, in this order.
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
    """Give every rank the root's object: anything that pickle takes, arrays included. On the root the very one that was
    passed."""
    outside("broadcast_object")
    eager.settle()
    return api.broadcast_object(obj, root_rank, name=name, process_set=process_set)


def allgather_object(obj: Tree, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Tree]:
    """Give every rank every rank's object, in rank order."""
    outside("allgather_object")
    eager.settle()
    return api.allgather_object(obj, name=name, process_set=process_set)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _plain(name: str, leaf: Any) -> np.ndarray[Any, Any]:
    """A leaf as NumPy has it, in the dtype that JAX gives it."""
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            raise InvalidArgumentError(f"{name}: this array was deleted, or donated to a compiled function")
        if not leaf.is_fully_replicated:
            devices = len(leaf.sharding.device_set)
            text = f"expected an array on one device, or replicated over several, got one that is sharded over {devices} ({leaf.sharding})"
            raise InvalidTypeError(f"{name}: {text}")
        return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    if not isinstance(leaf, (np.ndarray, np.generic, bool, int, float, complex)):
        raise InvalidTypeError(
            f"{name}: expected an array or a number, got {detection.describe(leaf)}; leave it out of the tree"
        )
    return np.asarray(jnp.asarray(leaf))


def _moved(world: World, root: int, arrays: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """The root's arrays. They travel as bytes, whatever they are made of."""
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
        # Copies, since an element may not begin in the middle of another's bytes.
        results = {name: part.copy() for name, part in zip(small, np.split(together, ends[:-1]), strict=True)}
    results |= {name: handle.wait() for name, handle in handles.items()}
    return {name: results[name].view(array.dtype).reshape(array.shape) for name, array in arrays.items()}
