"""Numbers of layers, alike on all ranks, which name the operations of each layer."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, Generic, TypeVar

from collectives.worlds.world import World

Value = TypeVar("Value")


class NumberedLayers(Generic[Value]):
    """Numbers the layers of each world in the order of their first use. Layers do not keep their numbers, because
    copies of them are other layers.

    Args:
        make: returns what `of` returns for the layer of a number.
    """

    def __init__(self, make: Callable[[int], Value]) -> None:
        self._make = make
        self._layers: MutableMapping[World, tuple[Iterator[int], MutableMapping[Any, Value]]]
        self._layers = weakref.WeakKeyDictionary()

    def of(self, world: World, layer: Any) -> Value:
        """The value of a layer; the same as long as the world and the layer exist."""
        if world not in self._layers:
            # Not numbered by how many values there are: ranks collect dropped layers at different times.
            self._layers[world] = itertools.count(), weakref.WeakKeyDictionary()
        numbers, values = self._layers[world]
        if layer not in values:
            values[layer] = self._make(next(numbers))
        return values[layer]
