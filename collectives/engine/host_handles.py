"""Handles of operations on tensors in host memory, and the delivery of their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from collectives.base.errors import MismatchError
from collectives.engine.handles import EMPTY, Handle
from collectives.engine.host_requests import HostRequestCache
from collectives.engine.request_cache import CachedRequest
from collectives.tensors import arrays, halves, reduction
from collectives.tensors.arrays import View
from collectives.tensors.result_pool import ResultPool
from collectives.transport.base import Array


class HostHandles:
    """Makes the handles of one world for tensors in host memory; see `collectives.engine.requests.Handles`."""

    def __init__(self, requests: HostRequestCache, pool: ResultPool) -> None:
        self.requests = requests
        self._pool = pool

    def in_place(self, entry: CachedRequest, view: View, tensor: Any, stores: bool = True) -> Handle:
        source = view.array
        if stores:
            return Handle(entry, source, source, store, (view, tensor), writes=view)
        return Handle(entry, source, source, _unchanged, (view, tensor), reads=view)

    def out_of_place(
        self, entry: CachedRequest, view: View, shape: tuple[int, ...], out: Array | None = None
    ) -> Handle:
        written = None if out is None else arrays.view(out)
        if out is None:
            out = self._pool.empty(shape, view.dtype)
        return Handle(entry, view.array, out.reshape(-1), wrap, (view, out), reads=view, writes=written)

    def gathered(
        self,
        entry: CachedRequest,
        view: View,
        rows: Sequence[int],
        finish: Callable[[Any, Any], Any] | None = None,
        out: Array | None = None,
    ) -> Handle:
        def deliver(handle: Handle) -> Any:
            _, gathered, handle.gathered = handle.keep  # by the task, which has made the result
            if out is not None and (gathered.size or out.size) and not np.may_share_memory(gathered, out):
                raise MismatchError(
                    f"{handle.title}: expected {out.size} elements from all ranks together, the size of out, but the "
                    f"ranks sent {gathered.size}; pass an out of that size [M2]"
                )
            result = view.wrap(gathered)
            return result if finish is None else finish(result, handle.gathered)

        written = None if out is None else arrays.view(out)
        return Handle(
            entry, view.array, EMPTY if out is None else out, deliver, view, rows=rows, reads=view, writes=written
        )

    def compressed(
        self,
        keywords: Mapping[str, Any],
        view: View,
        tensor: Any,
        average: bool | None,
        in_place: bool,
        wire: np.dtype[Any],
        out: Array | None,
        parts: tuple[tuple[int, ...], ...],
    ) -> Handle:
        """An all-reduce whose tensor travels as a half, of dtype ``wire``."""
        packed = self._pool.empty(view.array.size, wire)
        halves.cast(view.array, packed)
        small = arrays.view(packed.reshape(view.shape))
        entry = self.requests.reducing("allreduce", small, average, keywords, parts)
        written = view if in_place else None if out is None else arrays.view(out)
        if out is None:
            out = view.array.reshape(view.shape) if in_place else self._pool.empty(view.shape, view.dtype)
        return Handle(entry, packed, packed, _widen, (view, out, tensor if in_place else None), writes=written)

    def filled(self, shape: tuple[int, ...], dtype: np.dtype[Any], value: Any) -> View:
        return arrays.view(np.full(shape, value, dtype))

    def run_alone(self, handle: Handle) -> None:
        entry = handle.entry
        if entry.request.collective in ("allgather", "alltoall"):
            rows = sum(handle.rows)
            shape = (rows, *(entry.request.shape or ()))
            fits = handle.out is not EMPTY and handle.out.size == handle.source.size
            out = handle.out.reshape(shape) if fits else self._pool.empty(shape, entry.dtype)
            np.copyto(out.reshape(-1), handle.source)
            handle.keep = (handle.keep, out, [rows])
        else:
            self.scale(entry, handle.source, handle.out)

    def mark(self, handle: Handle) -> None:
        """Host memory has no streams."""

    def scale(self, entry: CachedRequest, source: Array, out: Array) -> None:
        """Single-rank path: apply pre- and post-scale, copying if out of place."""
        with reduction.quiet():
            if entry.prescale is not None:
                entry.prescale(source, out)
            elif out is not source:
                np.copyto(out, source)
            if entry.finish is not None:
                entry.finish(out, out)


def wrap(handle: Handle) -> Any:
    view, out = handle.keep
    return view.wrap(out)


def store(handle: Handle) -> Any:
    view, tensor = handle.keep
    if view.copied:
        view.store()
    return tensor


def itself(handle: Handle) -> Any:
    """The array that was reduced in place, of which no view was made."""
    return handle.keep


def _unchanged(handle: Handle) -> Any:
    """The root's own tensor, which was only read."""
    return handle.keep[1]


def _widen(handle: Handle) -> Any:
    """Bring the result back from its compressed form."""
    view, out, tensor = handle.keep
    halves.cast(handle.out, out.reshape(-1))
    if tensor is None:
        return view.wrap(out)
    if view.copied:
        view.store()
    return tensor
