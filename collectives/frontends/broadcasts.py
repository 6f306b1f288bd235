"""Broadcasts of many tensors in place, for every framework: a model's parameters, an optimizer's state.

The ranks first compare what they pass, as a digest of 16 bytes, so that a model that was built differently on some rank
is an error on all of them before a tensor is touched. Then tensors from 256 KiB up are broadcast as they are, and the
small ones together in buffers: there an operation costs time, not its bytes (the 161 tensors of ResNet-50 on 2 ranks
take half the time that they take one by one).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from collectives.engine import arguments
from collectives.frontends.agreement import agree
from collectives.process_sets import ProcessSet
from collectives.runtime import root_in, world_of
from collectives.world import World

Prepared = TypeVar("Prepared")

ALONE_FROM = 256 << 10
"""Bytes from which a tensor gains nothing from being copied into a buffer with others."""
BUFFER_BYTES = 16 << 20
"""The most bytes of one such buffer."""


class TensorMemory(Protocol):
    """Access to the bytes of a framework's tensors, which have ``dtype.itemsize`` and ``nbytes``."""

    def whole(self, tensor: Any) -> Any:
        """The tensor, or a view of it, as `World.broadcast_` takes it."""

    def packed(self, tensors: Sequence[Any]) -> Any:
        """A new 1-D tensor of uint8 with the bytes of several tensors of one device."""

    def unpack(self, piece: Any, tensor: Any) -> None:
        """Write a piece of such a tensor, of uint8, into the tensor that it came from."""


class ArrayMemory:
    """Access to contiguous and writable NumPy arrays of any dtype."""

    def whole(self, tensor: Any) -> Any:
        return tensor.reshape(-1).view(np.uint8)

    def packed(self, tensors: Sequence[Any]) -> Any:
        return np.concatenate([self.whole(tensor) for tensor in tensors])

    def unpack(self, piece: Any, tensor: Any) -> None:
        self.whole(tensor)[:] = piece


def agreed_root(
    label: str,
    root_rank: int,
    process_set: ProcessSet,
    prepare: Callable[[], tuple[Prepared, Mapping[str, str]]],
) -> tuple[World, int, Prepared]:
    """Return when all ranks have prepared the same broadcasts from the same root.

    Args:
        label: what messages and operations are called by.
        root_rank: by its number among all ranks.
        process_set: the ranks that take part.
        prepare: returns what this rank passes, and what of it must be alike on every rank, by subject.

    Returns:
        The world of the process set, the root's rank in it, and what this rank has prepared.

    Raises:
        InvalidArgumentError: there is no such rank. What ``prepare`` raises is raised, and told to the other ranks.
        MismatchError: the ranks differ; raised on every rank, and names the first difference.
    """
    world = world_of(process_set)
    number = root_in(process_set, root_rank, label)
    try:
        root = arguments.root(number, world.size)
        prepared, described = prepare()
    except Exception as error:
        raise world.refused(error, label) from None
    agree(world, label, {"root_rank": f"rank {root_rank}", **described})
    return world, root, prepared


def broadcast_in_place(world: World, label: str, root: int, tensors: Mapping[str, Any], memory: TensorMemory) -> None:
    """Give every rank the root's tensors.

    Args:
        label: goes before the names of all operations.
        root: its rank in the world.
        tensors: by name; the same names, shapes and dtypes in the same order on every rank.
    """
    if world.size == 1:
        return
    large = {f"{label}.{name}": tensor for name, tensor in tensors.items() if tensor.nbytes >= ALONE_FROM}
    small = _buffers([tensor for tensor in tensors.values() if 0 < tensor.nbytes < ALONE_FROM])
    buffers = {f"{label}.packed[{number}]": members for number, members in enumerate(small)}
    with world.composed([*large, *buffers]) as begin:
        handles = [
            world.broadcast_async_(memory.whole(tensor), root, name=begin(name)) for name, tensor in large.items()
        ]
        for name, members in buffers.items():
            packed = memory.packed(members)
            world.broadcast_(packed, root, name=begin(name))
            at = 0
            for tensor in members if world.rank != root else ():
                memory.unpack(packed[at : at + tensor.nbytes], tensor)
                at += tensor.nbytes
    for handle in handles:
        handle.wait()


def _buffers(tensors: Sequence[Any]) -> Iterator[list[Any]]:
    """The tensors that share a buffer: of one device, and `BUFFER_BYTES` at most."""
    for device in dict.fromkeys(map(_device, tensors)):
        members: list[Any] = []
        filled = 0
        # Long elements first, so that each tensor begins at a multiple of its elements' size.
        here = (tensor for tensor in tensors if _device(tensor) == device)
        for tensor in sorted(here, key=lambda each: -each.dtype.itemsize):
            if members and filled + tensor.nbytes > BUFFER_BYTES:
                yield members
                members, filled = [], 0
            members.append(tensor)
            filled += tensor.nbytes
        yield members


def _device(tensor: Any) -> Any:
    return getattr(tensor, "device", None)
