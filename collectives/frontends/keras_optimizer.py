"""Shared by distributed optimizers of Keras 3 and of ``tf_keras``."""

from __future__ import annotations

from collections.abc import Mapping
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


def checked_layers(local_layers: Any, layer_class: type, class_name: str) -> list[Any]:
    """Return the layers of the argument ``local_layers``: None, a layer, or a collection of layers.

    Args:
        layer_class, class_name: Keras's ``Layer``, and its name in messages.

    Raises:
        InvalidArgumentError: something else than a layer.
    """
    layers = [local_layers] if isinstance(local_layers, layer_class) else list(local_layers or ())
    for layer in layers:
        if not isinstance(layer, layer_class):
            raise InvalidArgumentError(
                f"local_layers: all local layers must be of {class_name} type, got {detection.describe(layer)}"
            )
    return layers
