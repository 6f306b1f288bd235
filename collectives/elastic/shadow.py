"""Copies of a state in host memory: two, of which one is always whole.

    part       a model, an optimizer, the plain attributes of a state: tensors by name, and the rest, pickled
    copy       of a part: its tensors one behind the other in one buffer, and the rest
    shadow     two copies of every part; `fill` writes the spare ones, `flip` makes them the current ones

A copy's buffer is allocated when the first tensors come, and again only if names, shapes or dtypes change: else saving
costs what ``memcpy`` costs. What interrupts `fill` leaves the current copies as they were. Buffers of one layout are
alike byte by byte on all ranks, so that they are transferred as they are (`collectives.elastic.transfer`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_ALIGNMENT = 64


class Entry(NamedTuple):
    """What is known of a tensor without its elements."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


class Part:
    """One part of a state. As it stands here, of NumPy arrays; frameworks replace `entry`, `view` and `copy`.

    Attributes:
        adapts: whether a rank takes another one's part whatever its own is like, once there is a state to take.
    """

    adapts = False

    def described(self) -> Mapping[str, str]:
        """What must be equal on all ranks, by subject; tensors whose shapes may change are left out."""
        return {}

    def read(self) -> tuple[Mapping[str, Any], bytes]:
        """The part's tensors by name, where they lie, and everything else, pickled."""
        raise NotImplementedError

    def write(self, tensors: Mapping[str, Any], rest: bytes) -> None:
        """Take over values that `read` has returned, here or on another rank. The tensors must be copied."""
        raise NotImplementedError

    def synced(self) -> None:
        """Called on all ranks after a synchronization, on those that have received nothing, too."""

    def entry(self, tensor: Any) -> Entry:
        """Describe a tensor."""
        return Entry(tensor.dtype.name, tensor.shape, tensor.nbytes)

    def view(self, raw: Bytes, entry: Entry) -> Any:
        """Contiguous memory as a tensor."""
        return raw.view(entry.dtype).reshape(entry.shape)

    def copy(self, tensor: Any, view: Any) -> None:
        """Copy a tensor's elements into a view."""
        np.copyto(view, tensor)


class Digest(NamedTuple):
    """Checksums of a copy: of its layout, of what is no tensor, and of each tensor."""

    layout: int
    rest: int
    tensors: list[int]


class Copy:
    """A copy of a part.

    Attributes:
        layout: the tensors in the buffer, in their order.
        buffer: their elements.
        raw, views: the buffer by tensor, as bytes and as tensors.
        rest: what is no tensor, pickled.
    """

    def __init__(self) -> None:
        self.layout: dict[str, Entry] = {}
        self.buffer: Bytes = np.empty(0, np.uint8)
        self.raw: dict[str, Bytes] = {}
        self.views: dict[str, Any] = {}
        self.rest = b""

    def fit(self, part: Part, layout: Mapping[str, Entry]) -> None:
        """Have memory for tensors of a layout."""
        if layout == self.layout and list(layout) == list(self.layout):
            return
        self.layout, self.raw, self.views = {}, {}, {}
        starts, end = {}, 0
        for name, entry in layout.items():
            starts[name] = end
            end += -(-entry.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.buffer = np.empty(end, np.uint8)
        for name, entry in layout.items():
            self.raw[name] = self.buffer[starts[name] :][: entry.nbytes]
            self.views[name] = part.view(self.raw[name], entry)
        self.layout = dict(layout)

    def fill(self, part: Part) -> None:
        """Copy what the part has now."""
        tensors, rest = part.read()
        self.fit(part, {name: part.entry(tensor) for name, tensor in tensors.items()})
        for name, tensor in tensors.items():
            part.copy(tensor, self.views[name])
        self.rest = rest

    def digest(self) -> Digest:
        """Checksums, by which ranks compare their copies."""
        layout, rest = repr(list(self.layout.items())).encode(), self.rest
        return Digest(zlib.crc32(layout), zlib.crc32(rest), [zlib.crc32(raw.data) for raw in self.raw.values()])


class Shadow:
    """Two copies of every part of a state.

    Example:
        shadow = Shadow({"model": part})
        shadow.fill()
        shadow.flip()       # committed
        shadow.restore()    # the part is as it was at `fill`
    """

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self.parts = dict(parts)
        self._copies = [{name: Copy() for name in parts} for _ in range(2)]
        self._current = 0

    @property
    def current(self) -> dict[str, Copy]:
        """The copies that are whole, by part."""
        return self._copies[self._current]

    @property
    def spare(self) -> dict[str, Copy]:
        """The copies that are not the current ones, by part."""
        return self._copies[1 - self._current]

    def fill(self) -> None:
        """Copy all parts into the spare copies."""
        for name, copy in self.spare.items():
            copy.fill(self.parts[name])

    def flip(self) -> None:
        """Make the spare copies the current ones."""
        self._current = 1 - self._current

    def restore(self, names: Iterable[str] | None = None) -> None:
        """Write the current copies into the parts; into all of them by default."""
        for name in self.parts if names is None else names:
            self.parts[name].write(self.current[name].views, self.current[name].rest)

    def replace(self, name: str) -> None:
        """Make what a part has now its current copy, and leave the other parts' as they are."""
        replacement = Copy()
        replacement.fill(self.parts[name])
        self._copies[self._current][name] = replacement
