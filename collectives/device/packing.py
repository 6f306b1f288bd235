"""Fusion on a device: packs many tensors into one buffer, and unpacks it, by one kernel launch each.

    tensors   |  conv1.weight   |bn1|    |        layer1.conv1         |      anywhere in device memory
    tiles     |  0  |  1  |  2  | 3 |    |  4  |  5  |  6  |  7  |  8  |      up to 16 KB each, one per thread block
    buffer    |  conv1.weight   ~|bn1~   |        layer1.conv1         ~|     each tensor at a multiple of 128 bytes

A tile is part of one tensor, so all thread blocks have about the same work, however the tensors' sizes differ. The
blocks' tables lie in device memory: tiles and lengths are uploaded at once, addresses by the first call that has them.

The buffer may hold the tensors in another dtype: float32 and float64 as halves. Scaling is done in the tensors' dtype
(halves: in float32), before the single rounding when packing, and after unpacking.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.base import dtypes
from collectives.base.errors import InvalidTypeError
from collectives.device import kernel_sources
from collectives.device.kernel_sources import PACK_THREADS, TILE_BYTES
from collectives.device.kernels import Kernels, Scaling, bits, elements, scaling_argument, scaling_name
from collectives.device.protocol import Array, Device

_Dtype = np.dtype[Any]

_ALIGNMENT = 128
"""Bytes, of the narrower dtype: a cache line, and eight times what a thread moves at once."""
_SLOTS = 4
"""Address tables that are kept: programs reuse the same tensors, or alternate between a few sets."""


class Packing:
    """The layout of tensors in a buffer, and the two kernels that move them. Not thread-safe, and all calls name the
    same stream: a table of addresses is overwritten in the order of its uses.

    Args:
        counts: elements of each tensor.
        wire: the buffer's dtype: that of the tensors, or for float32 and float64 a half.
        prescale, finish: scaling when packing and when unpacking, or None.

    Attributes:
        offsets: int64, where each tensor begins in the buffer, in elements.
        total: elements of the buffer, including the gaps between tensors, which are neither written nor read.

    Raises:
        InvalidTypeError: ``wire`` is no such dtype.
    """

    def __init__(
        self,
        device: Device,
        kernels: Kernels,
        counts: Sequence[int],
        dtype: _Dtype,
        wire: _Dtype,
        prescale: Scaling | None = None,
        finish: Scaling | None = None,
    ) -> None:
        if dtype != wire and not (dtypes.is_half(wire) and dtype.kind == "f" and dtype.itemsize > 2):
            raise InvalidTypeError(
                f"packing: expected the tensors' own dtype in the buffer, or float16 or bfloat16 for float32 and "
                f"float64; got {dtypes.name(wire)} for {dtypes.name(dtype)} [G34]"
            )
        self._device = device
        step = _ALIGNMENT // min(dtype.itemsize, wire.itemsize)
        lengths = np.array(counts, np.int64)
        ends = np.cumsum(-(-lengths // step) * step, dtype=np.int64)
        self.offsets: Array = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: lengths.size]
        self.total = int(ends[-1]) if lengths.size else 0

        names = [_names(dtype, wire, scaling) for scaling in (prescale, finish)]
        width = elements(dtype)[1]
        tiles, extents = _tables(lengths * width, self.offsets * width, TILE_BYTES // (dtype.itemsize // width))
        self._blocks = len(tiles)
        self._tables = _upload(device, tiles, extents) if self._blocks else 0
        pack, unpack = kernel_sources.pack(*names[0]), kernel_sources.unpack(*names[1])
        self._pack = _Mover(device, kernels.function(pack), self._tables, tiles.nbytes, prescale)
        self._unpack = _Mover(device, kernels.function(unpack), self._tables, tiles.nbytes, finish)
        self._slots: dict[bytes, _Slot] = {}
        """By the addresses; the most recently used is last."""

    def pack(self, addresses: Array, buffer: int, stream: int) -> None:
        """Copy all tensors into the buffer, by one launch.

        Args:
            addresses: int64, of every tensor; multiples of the size of an element (of a complex number's parts).
                Tensors at multiples of 16 bytes move faster. Ignored for tensors without elements. May be changed as
                soon as this returns.
            buffer: the address of ``total`` elements, a multiple of 16 bytes.
        """
        if self._blocks:
            self._pack.launch(self._blocks, self._table(addresses, stream), buffer, stream)

    def unpack(self, buffer: int, addresses: Array, stream: int) -> None:
        """Copy the buffer into tensors, as `pack`."""
        if self._blocks:
            self._unpack.launch(self._blocks, self._table(addresses, stream), buffer, stream)

    def close(self) -> None:
        """Free the tables; the device has done all enqueued work."""
        for slot in self._slots.values():
            self._device.free(slot.table)
            self._device.destroy_event(slot.uploaded)
        self._slots.clear()
        if self._blocks:
            self._device.free(self._tables)
        self._blocks = 0

    def _table(self, addresses: Array, stream: int) -> int:
        """The address of a device table with these addresses."""
        device = self._device
        key = addresses.tobytes()
        slot = self._slots.pop(key, None)
        if slot is None:
            slot = self._free_slot(len(key))
            slot.staging[:] = np.frombuffer(key, np.uint8)
            device.copy(slot.table, slot.staging.ctypes.data, len(key), stream)
            device.record(slot.uploaded, stream)
        self._slots[key] = slot
        return slot.table

    def _free_slot(self, nbytes: int) -> _Slot:
        """The least recently used slot whose upload is done; a new one while there are few, or if none is done."""
        if len(self._slots) >= _SLOTS:
            for key, slot in self._slots.items():
                if self._device.passed(slot.uploaded):
                    return self._slots.pop(key)
        return _Slot(self._device, nbytes)


class _Slot:
    def __init__(self, device: Device, nbytes: int) -> None:
        self.staging = device.pinned(nbytes)
        self.table = device.allocate(nbytes)
        self.uploaded = device.create_event()


class _Mover:
    """One of the two kernels, with its arguments."""

    def __init__(self, device: Device, function: int, tables: int, extents: int, scaling: Scaling | None) -> None:
        self._device, self._function = device, function
        self._tiles = np.array([tables, tables + extents, 0, 0], np.int64)  # the structure Tiles of the templates
        self._scaling = scaling_argument(scaling)
        self._parameters = np.array([self._tiles.ctypes.data, self._scaling.ctypes.data], np.int64)
        self._parameters_at = self._parameters.ctypes.data

    def launch(self, blocks: int, addresses: int, buffer: int, stream: int) -> None:
        self._tiles[2], self._tiles[3] = addresses, buffer
        self._device.launch(self._function, (blocks, 1), PACK_THREADS, self._parameters_at, stream)


def _names(dtype: _Dtype, wire: _Dtype, scaling: Scaling | None) -> tuple[str, str, str]:
    """The names of a kernel's dtypes (tensors, buffer) and scaling; plain copies use unsigned integers."""
    if dtype == wire:
        name, _ = bits(dtype) if scaling is None else elements(dtype)
        return name, name, scaling_name(scaling)
    return dtypes.name(dtype), dtypes.name(wire), scaling_name(scaling)


def _tables(lengths: Array, offsets: Array, tile: int) -> tuple[Array, Array]:
    """The templates' structures Tile, one for each thread block, and Extent, one for each tensor."""
    tiles_of = -(-lengths // tile)
    tensors = np.repeat(np.arange(lengths.size), tiles_of)
    tiles = np.empty((tensors.size, 2), np.int32)
    tiles[:, 0] = tensors
    tiles[:, 1] = np.arange(tensors.size) - np.repeat(np.cumsum(tiles_of) - tiles_of, tiles_of)
    return tiles, np.stack([lengths, offsets], axis=1)


def _upload(device: Device, *tables: Array) -> int:
    """Copy tables to device memory, one after another; returns the address. Waits until it is done."""
    nbytes = sum(table.nbytes for table in tables)
    staging, target, stream = device.pinned(nbytes), device.allocate(nbytes), device.create_stream()
    staging[:] = np.concatenate([table.reshape(-1).view(np.uint8) for table in tables])
    device.copy(target, staging.ctypes.data, nbytes, stream)
    device.drain(stream)
    device.destroy_stream(stream)
    return target
