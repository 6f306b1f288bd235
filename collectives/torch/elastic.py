"""Elastic training with PyTorch: ``hvd.elastic``; see `collectives.elastic`.

Example:
    import collectives.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(dataset)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)

    @hvd.elastic.run
    def train(state):
        while state.epoch < 10:
            for batch, samples in enumerate(torch.utils.data.DataLoader(dataset, 32, sampler=state.sampler)):
                ...
                state.sampler.record_batch(batch, 32)
                state.commit()
            state.commit()
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)

    train(state)
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from collectives import elastic
from collectives.base.errors import CollectivesError
from collectives.elastic import HostsUpdatedInterrupt, ObjectState, run
from collectives.elastic.object_state import Attributes
from collectives.elastic.sampler import SamplerPart
from collectives.elastic.shadow import Bytes, Entry, Part
from collectives.torch.optimizer_state import layout, put_together, take_apart
from collectives.torch.state import describe

__all__ = [
    "ElasticSampler",
    "HostsUpdatedInterrupt",
    "ModelStateHandler",
    "ObjectState",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "run",
    "set_handler_registry",
]


class ElasticSampler(elastic.ElasticSampler, torch.utils.data.Sampler[int]):
    __doc__ = elastic.ElasticSampler.__doc__


# ---- what is saved


class _TorchPart(Part):
    """A part whose tensors are torch's, on any device."""

    def entry(self, tensor: Any) -> Entry:
        return Entry(str(tensor.dtype), tuple(tensor.shape), tensor.nbytes)

    def view(self, raw: Bytes, entry: Entry) -> Any:
        dtype = getattr(torch, entry.dtype.removeprefix("torch."))
        return (
            torch.from_numpy(raw).view(dtype).view(entry.shape) if raw.size else torch.empty(entry.shape, dtype=dtype)
        )

    def copy(self, tensor: Any, view: Any) -> None:
        view.copy_(tensor)


class _Attributes(Attributes):
    """Plain attributes, with torch's tensors and NumPy's arrays in them. Parameters are pickled."""

    _torch = _TorchPart()

    def kind(self, value: Any) -> str | None:
        plain = type(value) is torch.Tensor and value.layout is torch.strided and not value.requires_grad
        return f"torch {value.device.type}" if plain else super().kind(value)

    def entry(self, tensor: Any) -> Entry:
        return self._torch.entry(tensor) if torch.is_tensor(tensor) else super().entry(tensor)

    def view(self, raw: Bytes, entry: Entry) -> Any:
        return self._torch.view(raw, entry) if entry.dtype.startswith("torch.") else super().view(raw, entry)

    def copy(self, tensor: Any, view: Any) -> None:
        if torch.is_tensor(view):
            self._torch.copy(tensor, view)
        else:
            super().copy(tensor, view)

    def renewed(self, view: Any, kind: str, like: Any) -> Any:
        if not torch.is_tensor(view):
            return super().renewed(view, kind, like)
        return view.to(like.device if torch.is_tensor(like) else kind.removeprefix("torch "), copy=True)

    def writeable(self, tensor: Any) -> bool:
        return torch.is_tensor(tensor) or super().writeable(tensor)


class StateHandler:
    """Saves, restores and synchronizes one value of a state; the base of a program's own handlers.

    Example:
        class CounterHandler(hvd.elastic.StateHandler):
            def save(self): self.saved = self.value.count
            def restore(self): self.value.count = self.saved
            def sync(self): self.value.count = hvd.broadcast_object(self.value.count)
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Copy the value."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make the value alike on all ranks, which all call it."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Take another value, and save it."""
        self.value = value
        self.save()


class ModelStateHandler(_TorchPart):
    """The parameters and buffers of a ``torch.nn.Module``, which are restored and received in place."""

    def __init__(self, model: Any) -> None:
        self.value = model

    def described(self) -> Mapping[str, str]:
        return {f"tensor {name!r}": describe(name, tensor) for name, tensor in self._tensors().items()}

    def read(self) -> tuple[Mapping[str, Any], bytes]:
        state = self.value.state_dict()
        other = {name: value for name, value in state.items() if not torch.is_tensor(value)}
        return self._tensors(), pickle.dumps(other)

    def write(self, tensors: Mapping[str, Any], rest: bytes) -> None:
        self.value.load_state_dict({**tensors, **pickle.loads(rest)})

    def _tensors(self) -> dict[str, Any]:
        return {name: value for name, value in self.value.state_dict().items() if torch.is_tensor(value)}


class OptimizerStateHandler(_TorchPart):
    """The state and the options of an optimizer, whether it has taken a step or not; gradients in flight are dropped
    when it is restored."""

    def __init__(self, optimizer: Any) -> None:
        self.value = optimizer

    def described(self) -> Mapping[str, str]:
        return layout(self.value)

    def read(self) -> tuple[Mapping[str, Any], bytes]:
        rest, tensors = take_apart(self.value)
        return tensors, rest

    def write(self, tensors: Mapping[str, Any], rest: bytes) -> None:
        if hasattr(self.value, "drop_gradients"):
            with suppress(CollectivesError):  # those of a world that has failed
                self.value.drop_gradients()
        state, own = put_together(rest, self.value)
        with torch.inference_mode():
            for name, tensor in own.items():
                tensor.copy_(tensors[name])
        state.store(self.value)


class SamplerStateHandler(SamplerPart):
    """An `ElasticSampler`, which deals its unprocessed indices again after each synchronization."""

    def __init__(self, sampler: ElasticSampler) -> None:
        super().__init__(lambda: self.value)
        self.value = sampler


_Registry = list[tuple[type, Any]]

_registry: _Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> _Registry:
    """The handlers of `TorchState`: pairs of a type, and what is called with a value of it; the first that fits."""
    return _registry


def set_handler_registry(registry: _Registry) -> None:
    """Replace the handlers, for states that are made from now on; see `StateHandler`.

    Args:
        registry: as `get_handler_registry` returns it.

    Example:
        registry = hvd.elastic.get_handler_registry()
        hvd.elastic.set_handler_registry([*registry, (Counter, CounterHandler)])
    """
    global _registry
    _registry = registry


# ---- the state


class TorchState(ObjectState):
    """A state of models, optimizers, samplers and plain attributes.

    Each keyword becomes an attribute: modules, optimizers and `ElasticSampler` s are saved by what they contain, and
    everything else as in `ObjectState`, torch's tensors included. A module or an optimizer that is assigned later is
    saved at once.

    Args:
        model: a ``torch.nn.Module``.
        optimizer: a ``torch.optim.Optimizer``, of `DistributedOptimizer` too. It need not have taken a step.

    Example:
        state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0)
        state.epoch += 1
        state.commit()
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        values = {**kwargs, "model": model, "optimizer": optimizer}
        handlers = {name: _handler(value) for name, value in values.items()}
        self._handlers = {name: handler for name, handler in handlers.items() if handler is not None}
        for name, handler in self._handlers.items():
            super().__setattr__(name, handler.value)
        self._own = [handler for handler in self._handlers.values() if not isinstance(handler, Part)]
        super().__init__(**{name: value for name, value in values.items() if name not in self._handlers})

    def _parts(self) -> Mapping[str, Part]:
        return {name: handler for name, handler in self._handlers.items() if isinstance(handler, Part)}

    def _attributes(self, names: Sequence[str]) -> Part:
        return _Attributes(self, names)

    def save(self) -> None:
        """Copy the state to host memory; see `ObjectState.save`."""
        for handler in self._own:
            handler.save()
        super().save()

    def restore(self) -> None:
        """Return to what was saved last; see `ObjectState.restore`."""
        for handler in self._own:
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Give all ranks the newest state; see `ObjectState.sync`."""
        super().sync()
        for handler in self._own:
            handler.sync()
            handler.save()

    def __setattr__(self, name: str, value: Any) -> None:
        handler = self.__dict__.get("_handlers", {}).get(name)
        super().__setattr__(name, value)
        if isinstance(handler, Part):
            handler.value = value  # type: ignore[attr-defined]
            self._shadow.replace(name)
        elif handler is not None:
            handler.set_value(value)


def _handler(value: Any) -> Any:
    for kind, make in _registry:
        if isinstance(value, kind):
            return make(value)
    return None
