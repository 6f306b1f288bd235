"""Broadcasts of parameters and objects, for an equal initial state on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from collectives import api
from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.frontends.broadcasts import agreed_root, broadcast_in_place
from collectives.tensors import detection
from collectives.torch import memory
from collectives.torch.compiled import untraced
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.runtime import global_process_set
from collectives.worlds.world import World

Object = TypeVar("Object")

Tensors = dict[str, Any]
"""By name."""


@untraced
def broadcast_parameters(params: Any, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Copy the root's parameters to every rank, in place.

    Args:
        params: a ``state_dict()`` or another mapping of names to tensors; or any iterable of tensors or of (name,
            tensor) pairs, such as ``model.named_parameters()``, ``model.parameters()`` or a list of either. Tensors may
            have any dtype and strides, and may require gradients; None, and other values of a mapping or pair, are
            skipped. The same names (or numbers of tensors without names), shapes and dtypes on every
            rank, in any order.
        root_rank: the root, by its number among all ranks.
        process_set: the ranks that take part.

    Raises:
        InvalidArgumentError: ``params`` is something else, or two tensors have the same name.
        InvalidTypeError: a sparse tensor, or one that is neither on the CPU nor on a GPU.
        MismatchError: the ranks' parameters or roots differ; raised on every rank before anything is changed, and
            names the first difference.

    Example:
        >>> weights = {"w": torch.full((2,), float(hvd.rank()))}
        >>> hvd.broadcast_parameters(weights, root_rank=1)
        >>> weights["w"]
        tensor([1., 1.])
    """
    label = "broadcast_parameters"

    def prepare() -> tuple[Tensors, dict[str, str]]:
        tensors = dict(sorted(_named(params).items()))
        return tensors, {f"tensor {name!r}": describe(name, tensor) for name, tensor in tensors.items()}

    world, root, tensors = agreed_root(label, root_rank, process_set, prepare)
    move(world, label, root, tensors)


@untraced
def broadcast_object(
    obj: Object, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Object:
    """Copy the root's object to every rank.

    Args:
        obj: an object that pickle supports, tensors included; ignored on other ranks.
        root_rank, process_set: as for `broadcast_parameters`.
        name: of the operation; unnamed calls are matched by their order.

    Returns:
        The object; on the root the same object that was passed.

    Raises:
        InvalidTypeError: the object cannot be pickled.

    Example:
        >>> hvd.broadcast_object({"from": hvd.rank()}, root_rank=1)
        {'from': 1}
    """
    return api.broadcast_object(obj, root_rank, name=name, process_set=process_set)


@untraced
def allgather_object(
    obj: Object, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Object]:
    """Gather the ranks' objects, as a list in rank order; arguments and errors as for `broadcast_object`.

    Example:
        >>> hvd.allgather_object(hvd.rank())
        [0, 1]
    """
    return api.allgather_object(obj, name=name, process_set=process_set)


# ---- arguments


def _named(params: Any) -> Tensors:
    if isinstance(params, Mapping):
        pairs: list[tuple[Any, Any]] = list(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (torch.Tensor, str, bytes)):
        pairs = [item if isinstance(item, tuple) and len(item) == 2 else (None, item) for item in params]
        for first, value in pairs:
            if isinstance(first, torch.Tensor) or (
                first is None and value is not None and not isinstance(value, torch.Tensor)
            ):
                kind = detection.describe((first, value) if first is not None else value)
                raise InvalidArgumentError(
                    f"params: expected tensors or (name, tensor) pairs, got a {kind} among them [F60]"
                )
    else:
        raise InvalidArgumentError(
            "params: expected a mapping of names to tensors (a state_dict), or an iterable of tensors or of (name, "
            f"tensor) pairs; got {detection.describe(params)} [F61]"
        )
    tensors: Tensors = {}
    others = []
    for number, (key, value) in enumerate(pairs):
        name = f"[{number}]" if key is None else str(key)
        if not isinstance(value, torch.Tensor):
            others += [] if value is None else [f"{name}, a {detection.describe(value)}"]
        elif name in tensors:
            raise InvalidArgumentError(
                f"params: expected unique names, got {name!r} twice; give each tensor its own name [F62]"
            )
        else:
            tensors[name] = value
    if others and not tensors:
        raise InvalidArgumentError(
            f"params: expected tensors, but none of the {len(others)} values is a tensor; the first is {others[0]} "
            "[F63]"
        )
    return tensors


def describe(name: str, tensor: Any) -> str:
    """The properties of a tensor that must be equal on every rank; refuses one that cannot be broadcast in place."""
    refuse_unreachable(name, tensor)
    if tensor.layout is not torch.strided:
        raise InvalidTypeError(
            f"{name}: expected a dense tensor, got layout {tensor.layout}; pass {name}.to_dense() [T35]"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise detection.misplaced(tensor, name, str(tensor.device))
    if not tensor.is_contiguous() and detection.may_overlap(tensor.shape, tensor.stride(), 1):
        raise detection.overlapping(tensor, name, tensor.shape, tensor.stride())
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} of shape {tuple(tensor.shape)} on {tensor.device.type}"


def refuse_unreachable(what: str, tensor: Any) -> None:
    """Refuse a tensor that has no memory of its own on this rank."""
    if hasattr(tensor, "full_tensor"):  # only a DTensor, whose module has another name in torch 2.4
        raise InvalidTypeError(
            f"{what}: expected a tensor of this rank, got a DTensor, which torch.distributed divides among the ranks "
            "and reduces itself; with FSDP or tensor parallelism use the torch optimizer unwrapped, or pass "
            "tensor.full_tensor() [T42]"
        )
    if torch.nn.parameter.is_lazy(tensor):
        raise InvalidTypeError(
            f"{what}: expected a tensor with values, got a parameter of a lazy module, which has no shape yet; run a "
            "forward pass first [T43]"
        )
    if tensor.is_meta:
        raise InvalidTypeError(
            f"{what}: expected a tensor with values, got one on the meta device, which holds none; first call "
            "model.to_empty(device='cpu') and load or broadcast the parameters, then make the optimizer [T44]"
        )


# ---- moving tensors


def move(world: World, label: str, root: int, tensors: Tensors) -> None:
    """Broadcast tensors in place: the same names, shapes and dtypes in the same order on every rank."""
    with torch.inference_mode():  # else tensors made in inference mode could not be written
        broadcast_in_place(world, label, root, tensors, _Memory())
    if world.rank != root:
        for tensor in tensors.values():
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)  # the engine's writes are unknown to torch


class _Memory:
    """Access to the bytes of torch's tensors (`collectives.frontends.broadcasts.BroadcastMemory`)."""

    def whole(self, tensor: Any) -> Any:
        """The tensor, or the bytes of a dtype of 8 bits with a fraction, which the engine does not support."""
        fraction = tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point
        return tensor.detach().view(torch.uint8) if fraction else tensor

    def packed(self, tensors: Sequence[Any]) -> Any:
        parts = [each.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8) for each in tensors]
        if not parts[0].is_cpu:
            return torch.cat(parts)
        return torch.cat(parts, out=memory.empty(sum(part.numel() for part in parts), dtype=torch.uint8))

    def unpack(self, piece: Any, tensor: Any) -> None:
        tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))
