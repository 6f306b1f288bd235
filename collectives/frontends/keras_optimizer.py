"""Shared by distributed optimizers of Keras 3 and of ``tf_keras``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from collectives.base.errors import InvalidArgumentError
from collectives.tensors import detection


def distributed_class(mixin: type, optimizer_class: type, attributes: Mapping[str, Any]) -> Any:
    """Return a subclass of a mixin and an optimizer's class that is serialized as the optimizer's class.

    Keras saves what ``__class__`` returns, so that saved optimizers load without this package, also where classes are
    registered.

    Args:
        attributes: further attributes of the new class.
    """
    disguise = {name: getattr(optimizer_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    members = {**disguise, "__class__": property(lambda self: optimizer_class), **attributes}
    return type(optimizer_class.__name__, (mixin, optimizer_class), members)


def local_weights(local_layers: Any, layer_class: type | None = None) -> list[Any]:
    """Return the trainable weights of the argument ``local_layers``: None, a built layer, or a collection of these.

    Args:
        layer_class: Keras's ``Layer``; None accepts that of any Keras.

    Raises:
        InvalidArgumentError: not a layer, or not built.
    """
    if isinstance(local_layers, Iterable) and not hasattr(local_layers, "trainable_weights"):
        layers = list(local_layers)
    else:
        layers = [] if local_layers is None else [local_layers]
    for layer in layers:
        if not hasattr(layer, "trainable_weights") or not isinstance(layer, layer_class or object):
            package = "keras" if layer_class is None else layer_class.__module__.partition(".")[0]
            raise InvalidArgumentError(
                f"local_layers: all local layers must be of {package}.layers.Layer type, "
                f"got {detection.describe(layer)} [F47]"
            )
        if not getattr(layer, "built", True):
            raise InvalidArgumentError(
                f"local_layers: {layer!r} has no variables yet; build it, or call the model once, first [F48]"
            )
    return [weight for layer in layers for weight in layer.trainable_weights]
