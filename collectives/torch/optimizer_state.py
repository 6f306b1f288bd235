"""Broadcast of an optimizer's state.

The root sends its objects pickled, without the tensors in them, and then the tensors, into those of the other ranks. So
the state may have any structure, no rank needs to take a step beforehand to create it, and numbers keep their types.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, NamedTuple

import torch

from collectives.base.errors import InvalidTypeError
from collectives.frontends.agreement import agree
from collectives.frontends.broadcasts import agreed_root
from collectives.tensors import detection
from collectives.torch.compiled import untraced
from collectives.torch.state import Tensors, describe, move
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.runtime import global_process_set


@untraced
def broadcast_optimizer_state(
    optimizer: Any, root_rank: int, model: Any = None, process_set: ProcessSet = global_process_set
) -> None:
    """Copy the root's optimizer state to every rank: the state of each parameter, and the options of the groups.

    No optimizer takes a step, and parameters and gradients stay as they are; but with ``COLLECTIVES_GRADIENTS=horovod``
    an optimizer without state gives parameters that require gradients and have none a gradient of zeros, as Horovod
    does. Numbers, None and other picklable objects keep their types. Tensors are written in place if this rank has one
    of the same shape, dtype and device, else created: on the CPU if the root's is there, else on the device of the
    parameter. Options that only this rank has stay.

    Args:
        optimizer: of any kind (`torch.optim`'s, `DistributedOptimizer`, others with ``param_groups`` and ``state``); of
            the same class, with the same groups of parameters, on every rank.
        root_rank: the root, by its number among all ranks.
        model: its sparse embeddings get sparse gradients of zeros; otherwise not needed.
        process_set: the ranks that take part.

    Raises:
        InvalidTypeError: not an optimizer; or the root's state contains a sparse tensor, or cannot be pickled.
        MismatchError: the ranks' optimizers or roots differ; raised on every rank before anything is changed, and
            names the first difference.

    Example:
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1 * (hvd.rank() + 1))
        >>> hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        >>> optimizer.param_groups[0]["lr"]
        0.1
    """
    label = "broadcast_optimizer_state"
    world, root, _ = agreed_root(label, root_rank, process_set, lambda: (None, layout(optimizer)))
    if world.config.gradients == "horovod" and not optimizer.state:
        _make_gradients(optimizer, model)
    if world.rank == root:
        try:
            data, tensors = take_apart(optimizer)
        except Exception as error:
            raise world.refused(
                InvalidTypeError(f"{label}: the optimizer's state cannot be sent to the other ranks: {error} [F59]"),
                f"{label}.length",
            ) from error
        world.broadcast_bytes(data, root, name=label)
    else:
        received = world.broadcast_bytes(b"", root, name=label)
    with world.ahead_of(label):
        if world.rank != root:
            state, tensors = put_together(received.tobytes(), optimizer)
        places = {name: describe(name, tensor) for name, tensor in tensors.items()}
    agree(world, label, places)  # the next operations are broadcasts of these tensors by these names
    move(world, label, root, tensors)
    if world.rank != root:
        state.store(optimizer)


def _make_gradients(optimizer: Any, model: Any) -> None:
    """Gradients of zeros where there are none: Horovod's programs may read them before the first backward pass."""
    modules = [] if model is None else model.modules()
    sparse = {
        id(module.weight)
        for module in modules
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse
    }
    for parameter in _parameters(optimizer):
        if parameter.requires_grad and parameter.grad is None:
            zeros = torch.zeros_like(parameter, requires_grad=False)
            is_sparse = isinstance(optimizer, torch.optim.SparseAdam) or id(parameter) in sparse
            parameter.grad = zeros.to_sparse(1) if is_sparse else zeros


class _TensorPlace(NamedTuple):
    """The description of one of the root's tensors, in place of it in the pickled state.

    Attributes:
        beside: the number of a parameter on the same device, its own if possible; None: there is none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    device: str
    beside: int | None


class OptimizerState(NamedTuple):
    """An optimizer's state, with numbers in place of parameters; `store` gives it to an optimizer."""

    options: list[dict[str, Any]]
    of_parameters: dict[int, Any]
    other: dict[Any, Any]

    @classmethod
    def of(cls, optimizer: Any) -> OptimizerState:
        parameters = _parameters(optimizer)
        return cls(
            [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups],
            {
                number: optimizer.state[parameter]
                for number, parameter in enumerate(parameters)
                if parameter in optimizer.state
            },
            {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)},
        )

    def store(self, optimizer: Any) -> None:
        for group, options in zip(optimizer.param_groups, self.options, strict=True):
            group.update(options)
        for number, parameter in enumerate(_parameters(optimizer)):
            optimizer.state.pop(parameter, None)
            if number in self.of_parameters:
                optimizer.state[parameter] = self.of_parameters[number]
        optimizer.state.update(self.other)

    def tensors(self) -> Tensors:
        """The tensors that are an option or an entry of a parameter's state, by name; not those nested deeper."""
        owners = {f"param_groups[{number}]": options for number, options in enumerate(self.options)}
        owners |= {
            f"state[{number}]": values for number, values in self.of_parameters.items() if isinstance(values, dict)
        }
        by_name = {f"{owner}[{key!r}]": value for owner, values in owners.items() for key, value in values.items()}
        return {name: value for name, value in by_name.items() if isinstance(value, torch.Tensor)}


def _parameters(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def layout(optimizer: Any) -> dict[str, str]:
    """Descriptions that must be equal on every rank."""
    if not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")):
        raise InvalidTypeError(
            f"optimizer: expected an optimizer with param_groups and state, got {detection.describe(optimizer)} [F16]"
        )
    groups = [group["params"] for group in optimizer.param_groups]
    return {
        "the optimizer": f"{type(optimizer).__name__} with {len(groups)} parameter groups",
        **{f"param_groups[{number}]": f"{len(group)} parameters" for number, group in enumerate(groups)},
        **{
            f"param_groups[{number}]['params'][{index}]": describe(f"parameter {index}", parameter)
            for number, group in enumerate(groups)
            for index, parameter in enumerate(group)
        },
    }


def take_apart(optimizer: Any) -> tuple[bytes, Tensors]:
    """The pickled state, and the tensors that were in it."""
    state, parameters = OptimizerState.of(optimizer), _parameters(optimizer)
    names = {id(tensor): name for name, tensor in state.tensors().items()}
    owners = {
        id(value): number
        for number, values in state.of_parameters.items()
        if isinstance(values, dict)
        for value in values.values()
    }
    tensors: Tensors = {}
    places: dict[int, _TensorPlace] = {}

    def place_of(tensor: Any) -> _TensorPlace:
        if id(tensor) not in places:
            name = names.get(id(tensor), f"tensor {len(tensors)}")
            describe(name, tensor)
            owner = owners.get(id(tensor))
            candidates = range(len(parameters)) if owner is None else [owner]
            beside = next((number for number in candidates if parameters[number].device == tensor.device), None)
            tensors[name] = tensor
            places[id(tensor)] = _TensorPlace(name, tuple(tensor.shape), tensor.dtype, str(tensor.device), beside)
        return places[id(tensor)]

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
            return tuple(place_of(obj)) if isinstance(obj, torch.Tensor) else None

    file = io.BytesIO()
    Pickler(file, pickle.HIGHEST_PROTOCOL).dump(state)
    return file.getvalue(), tensors


def put_together(data: bytes, optimizer: Any) -> tuple[OptimizerState, Tensors]:
    """The state of `take_apart`, with an optimizer's own tensors where they fit, and these tensors, still to be
    filled."""
    parameters, own_tensors = _parameters(optimizer), OptimizerState.of(optimizer).tensors()
    tensors: Tensors = {}
    taken: set[int] = set()

    def tensor_at(place: _TensorPlace) -> Any:
        if place.name not in tensors:
            beside = None if place.beside is None else parameters[place.beside]
            device = torch.device(place.device) if beside is None else beside.device
            tensor = own_tensors.get(place.name)
            fits = tensor is not None and (tuple(tensor.shape), tensor.dtype, tensor.device) == (
                place.shape,
                place.dtype,
                device,
            )
            # A tensor that is used twice here, such as a shared learning rate, may be two tensors on the root.
            if not fits or id(tensor) in taken:
                tensor = _new(place, device, beside)
            taken.add(id(tensor))
            tensors[place.name] = tensor
        return tensors[place.name]

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            return tensor_at(_TensorPlace(*pid))

    state: OptimizerState = Unpickler(io.BytesIO(data)).load()
    return state, tensors


def _new(place: _TensorPlace, device: Any, beside: Any) -> Any:
    """A tensor to fill; with the strides of its parameter, if it is one number for each of the parameter's."""
    if beside is not None and tuple(beside.shape) == place.shape:
        return torch.empty_like(beside, dtype=place.dtype, requires_grad=False)
    return torch.empty(place.shape, dtype=place.dtype, device=device)
