"""The same start on every rank: parameters and objects as one rank has them; `optimizer_state` is built on it.

The ranks first show each other what they pass, as a digest of 16 bytes, so that a model or an optimizer that was built
differently on some rank is an error on all of them before a tensor is touched. Then tensors from 256 KiB up travel as
they are, and the many small ones together in buffers: what costs time there is an operation, not its bytes (the 161
tensors of ResNet-50 on 2 ranks: half the time that they take one by one).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from collectives import api, runtime
from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.engine import arguments
from collectives.frontends.agreement import agree
from collectives.process_sets import ProcessSet
from collectives.runtime import global_process_set
from collectives.tensors import detection
from collectives.torch.compiled import untraced
from collectives.world import World

Object = TypeVar("Object")

Tensors = dict[str, Any]
"""By name."""
_ALONE_FROM = 256 << 10
"""Bytes from which a tensor gains nothing from being copied into a buffer with others."""
_PACKED_BYTES = 16 << 20
"""The most bytes of one such buffer."""


@untraced
def broadcast_parameters(params: Any, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Give every rank the root's parameters, in place.

    Args:
        params: a ``state_dict()`` or another mapping of names to tensors; or any iterable of tensors or of (name,
            tensor) pairs, such as ``model.named_parameters()``, ``model.parameters()`` or a list of either. Tensors may
            have any dtype and strides, and may require gradients; None, and what a mapping or a pair holds that is no
            tensor, is passed over. The same names (or numbers of tensors without names), shapes and dtypes on every
            rank, in any order.
        root_rank: the rank whose parameters they are, by its number among all ranks.
        process_set: the ranks that take part.

    Raises:
        InvalidArgumentError: ``params`` is something else, or two tensors have the same name.
        InvalidTypeError: a sparse tensor, or one that is neither on the CPU nor on a GPU.
        MismatchError: the ranks' parameters or roots differ; raised on every rank, and names the first that does.
            Nothing was touched.
    """
    label = "broadcast_parameters"
    world = runtime.world_of(process_set)
    number = runtime.root_in(process_set, root_rank, label)
    try:
        root = arguments.root(number, world.size)
        tensors = dict(sorted(_named(params).items()))
        layout = {f"tensor {name!r}": describe(name, tensor) for name, tensor in tensors.items()}
    except Exception as error:
        raise world.refused(error, label) from None
    agree(world, label, {"root_rank": f"rank {root_rank}", **layout})
    move(world, label, root, tensors)


@untraced
def broadcast_object(
    obj: Object, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Object:
    """Give every rank the root's object.

    Args:
        obj: anything that pickle takes, tensors included; what other ranks pass is ignored.
        root_rank: the rank whose object it is, by its number among all ranks.
        name: of the operation; calls without names are matched by their order.
        process_set: the ranks that take part.

    Returns:
        The object; on the root the very one that was passed.

    Raises:
        InvalidTypeError: the object cannot be pickled.
    """
    return api.broadcast_object(obj, root_rank, name=name, process_set=process_set)


@untraced
def allgather_object(
    obj: Object, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Object]:
    """Give every rank every rank's object, as a list in rank order; arguments and errors as for `broadcast_object`."""
    return api.allgather_object(obj, name=name, process_set=process_set)


# ---- what the ranks pass


def _named(params: Any) -> Tensors:
    """The tensors by name."""
    if isinstance(params, Mapping):
        pairs: list[tuple[Any, Any]] = list(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (torch.Tensor, str, bytes)):
        pairs = [item if isinstance(item, tuple) and len(item) == 2 else (None, item) for item in params]
        for first, value in pairs:
            if isinstance(first, torch.Tensor) or (
                first is None and value is not None and not isinstance(value, torch.Tensor)
            ):
                kind = detection.describe((first, value) if first is not None else value)
                raise InvalidArgumentError(f"params: expected tensors or (name, tensor) pairs, got a {kind} among them")
    else:
        raise InvalidArgumentError(
            "params: expected a mapping of names to tensors (a state_dict), or an iterable of tensors or of (name, "
            "tensor) pairs; got"
            f" {detection.describe(params)}"
        )
    tensors: Tensors = {}
    others = []
    for number, (given, value) in enumerate(pairs):
        name = f"[{number}]" if given is None else str(given)
        if not isinstance(value, torch.Tensor):
            others += [] if value is None else [f"{name}, a {detection.describe(value)}"]
        elif name in tensors:
            raise InvalidArgumentError(f"params: expected names that differ, got {name!r} twice")
        else:
            tensors[name] = value
    if others and not tensors:
        raise InvalidArgumentError(
            f"params: expected tensors, got none among {len(others)} values; the first is {others[0]}"
        )
    return tensors


def describe(name: str, tensor: Any) -> str:
    """What must be alike on every rank.

    Raises:
        InvalidTypeError, InvalidArgumentError: a tensor that cannot be broadcast in place.
    """
    refuse_unreachable(name, tensor)
    if tensor.layout is not torch.strided:
        raise InvalidTypeError(f"{name}: expected a dense tensor, got layout {tensor.layout}; pass {name}.to_dense()")
    if tensor.device.type not in ("cpu", "cuda"):
        raise detection.misplaced(tensor, name, str(tensor.device))
    if not tensor.is_contiguous() and detection.may_overlap(tensor.shape, tensor.stride(), 1):
        raise detection.overlapping(tensor, name, tensor.shape, tensor.stride())
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} of shape {tuple(tensor.shape)} on {tensor.device.type}"


def refuse_unreachable(what: str, tensor: Any) -> None:
    """Refuse a tensor that has no memory of its own on this rank.

    Raises:
        InvalidTypeError: a DTensor, which is spread over ranks; or it is on the meta device, or of a lazy module, and
            holds no numbers.
    """
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(tensor, distributed.DTensor):
        raise InvalidTypeError(
            f"{what}: expected a tensor of this rank, got a DTensor, which torch.distributed keeps spread over ranks "
            f"and reduces "
            f"itself; use the torch optimizer as it is with FSDP and tensor parallelism, or pass full_tensor() of it"
        )
    if torch.nn.parameter.is_lazy(tensor):
        raise InvalidTypeError(
            f"{what}: expected numbers, got a parameter of a lazy module; run a forward pass first, which gives it a "
            f"shape"
        )
    if tensor.is_meta:
        raise InvalidTypeError(
            f"{what}: expected numbers, got a tensor on the meta device, which holds none; make it real first, by "
            f"model.to_empty(device='cpu') and loading or broadcasting parameters, and make the optimizer after that"
        )


# ---- moving tensors


def move(world: World, label: str, root: int, tensors: Tensors) -> None:
    """Broadcast tensors in place: the same names, shapes and dtypes in the same order on every rank."""
    if world.size == 1:
        return
    receives = world.rank != root
    alone = {name: tensor for name, tensor in tensors.items() if tensor.nbytes >= _ALONE_FROM}
    parts = list(_parts([tensor for tensor in tensors.values() if tensor.nbytes < _ALONE_FROM]))
    packs = [f"{label}.packed[{number}]" for number in range(len(parts))]
    # Tensors made in inference mode can be written in inference mode only, and all others there as well.
    with world.composed([*(f"{label}.{name}" for name in alone), *packs]) as begin, torch.inference_mode():
        handles = [
            world.broadcast_async_(_as_numbers(tensor), root, name=begin(f"{label}.{name}"))
            for name, tensor in alone.items()
        ]
        for name, part in zip(packs, parts, strict=True):
            packed = torch.cat([_bytes_of(tensor) for tensor in part])
            world.broadcast_(packed, root, name=begin(name))
            if receives:
                for tensor, piece in zip(part, packed.split([tensor.nbytes for tensor in part]), strict=True):
                    tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))
    for handle in handles:
        handle.wait()
    if receives:
        for tensor in alone.values():
            torch.autograd.graph.increment_version(tensor)  # torch saw nobody write to it


def _as_numbers(tensor: Any) -> Any:
    """A tensor as the engine takes it: that knows no numbers of 8 bits with a fraction, but moves bytes."""
    return (
        tensor.detach().view(torch.uint8) if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point else tensor
    )


def _bytes_of(tensor: Any) -> Any:
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


def _parts(tensors: Sequence[Any]) -> Iterator[list[Any]]:
    """The tensors that travel together: of one device, and few enough."""
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        part: list[Any] = []
        filled = 0
        # Long elements first, so that each tensor begins at a multiple of its elements' size.
        for tensor in sorted(
            (each for each in tensors if each.device == device), key=lambda each: -each.dtype.itemsize
        ):
            if part and filled + tensor.nbytes > _PACKED_BYTES:
                yield part
                part, filled = [], 0
            part.append(tensor)
            filled += tensor.nbytes
        yield part
