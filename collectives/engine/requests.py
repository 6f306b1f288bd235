"""The door of a world: what a caller passes becomes a handle, or is refused.

Below it there are views, entries and handles only. A handle made here has not been submitted yet, and nothing has left
the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from collectives.base import dtypes
from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.base.reduce_op import Op
from collectives.engine import arguments, overlaps
from collectives.engine.handles import Handle
from collectives.engine.negotiation import Request
from collectives.engine.request_cache import CachedRequest, RequestCache
from collectives.schedules import partition
from collectives.tensors import arrays, compression, halves, reduction
from collectives.tensors.arrays import View
from collectives.tensors.result_pool import ResultPool
from collectives.transport.base import Array

if TYPE_CHECKING:
    from collectives.tensors.cuda_tensors import DeviceView

EMPTY = np.empty(0)


class DeviceRequests(Protocol):
    """What makes the handles for tensors on GPUs: `collectives.cuda.requests`, of which nothing is imported before the
    first such tensor."""

    def allreduce(
        self,
        view: DeviceView,
        tensor: Any,
        average: bool | None,
        op: Op | None,
        name: str | None,
        prescale: float,
        postscale: float,
        compressor: Any,
        algorithm: str | None,
        transport: str | None,
        in_place: bool,
    ) -> Handle: ...

    def reducescatter(
        self,
        view: DeviceView,
        op: Op | None,
        name: str | None,
        prescale: float,
        postscale: float,
        algorithm: str | None,
        transport: str | None,
    ) -> Handle: ...

    def broadcast(
        self,
        view: DeviceView,
        tensor: Any,
        root: int,
        name: str | None,
        algorithm: str | None,
        transport: str | None,
        in_place: bool,
    ) -> Handle: ...

    def allgather(self, view: DeviceView, name: str | None, algorithm: str | None, transport: str | None) -> Handle: ...

    def alltoall(
        self, view: DeviceView, splits: Any, name: str | None, algorithm: str | None, transport: str | None
    ) -> Handle: ...

    def neutral(self, request: Request) -> Handle: ...

    def alone(self, handle: Handle) -> None: ...


class HandleFactory:
    """Makes the handles of one world.

    Args:
        rank, size: of the world.
        entries: of the world.
        pool: where results come from.
        devices: the door for tensors on GPUs.
    """

    def __init__(
        self, rank: int, size: int, entries: RequestCache, pool: ResultPool, devices: Callable[[], DeviceRequests]
    ) -> None:
        self._rank, self._size = rank, size
        self._devices = devices
        self._entries = entries
        self._pool = pool

    def allreduce(
        self,
        tensor: Any,
        average: bool | None,
        op: Op | None,
        name: str | None,
        prescale: float,
        postscale: float,
        compressor: Any,
        algorithm: str | None,
        transport: str | None,
        stream: Any,
        in_place: bool,
        out: Array | None = None,
        parts: tuple[tuple[int, ...], ...] = (),
    ) -> Handle:
        """An all-reduce.

        Args:
            out: a C-contiguous array of the tensor's shape and dtype for the result, in place of one from the pool.
            parts: the shapes of the tensors that lie one behind the other in this one, which must be alike on every
                rank.
        """
        view = arrays.view(tensor, writable=in_place, stream=stream)
        what, how = (average, op, name, prescale, postscale), (algorithm, transport)
        if compressor is not None and not any(compressor is known for known in compression.BUILT_IN):
            return self._compressed_by(compressor, view, tensor, in_place, what, how, stream)
        if not isinstance(view, View):
            return self._devices().allreduce(
                view, tensor, average, op, name, prescale, postscale, compressor, algorithm, transport, in_place
            )
        if compressor is not None and compressor is not compression.Compression.none:
            return self._compressed(view, tensor, compressor, in_place, what, how, out, parts)
        entry = self._entries.reducing(
            "allreduce", view, average, op, name, prescale, postscale, algorithm, transport, parts
        )
        source = view.array
        if in_place:
            return Handle(entry, source, source, store, (view, tensor), writes=view)
        written = None if out is None else arrays.view(out)
        if out is None:
            out = self._pool.empty(view.shape, view.dtype)
        return Handle(entry, source, out.reshape(-1), wrap, (view, out), reads=view, writes=written)

    def _compressed(
        self,
        view: View,
        tensor: Any,
        compressor: Any,
        in_place: bool,
        what: tuple[bool | None, Op | None, str | None, float, float],
        how: tuple[str | None, str | None],
        out: Array | None,
        parts: tuple[tuple[int, ...], ...],
    ) -> Handle:
        """An all-reduce whose tensor travels as a half."""
        average, op, name, prescale, postscale = what
        wire = compressor.wire(view.dtype)
        if wire is None:
            return self.allreduce(
                tensor, average, op, name, prescale, postscale, None, *how, None, in_place, out, parts
            )
        packed = self._pool.empty(view.array.size, wire)
        halves.cast(view.array, packed)
        small = arrays.view(packed.reshape(view.shape))
        entry = self._entries.reducing("allreduce", small, average, op, name, prescale, postscale, *how, parts)
        written = view if in_place else None if out is None else arrays.view(out)
        if out is None:
            out = view.array.reshape(view.shape) if in_place else self._pool.empty(view.shape, view.dtype)
        return Handle(entry, packed, packed, restore, (view, out, tensor if in_place else None), writes=written)

    def _compressed_by(
        self,
        compressor: Any,
        view: View | DeviceView,
        tensor: Any,
        in_place: bool,
        what: tuple[bool | None, Op | None, str | None, float, float],
        how: tuple[str | None, str | None],
        stream: Any,
    ) -> Handle:
        """An all-reduce whose tensor travels in a form that only a compressor of the caller's knows."""
        average, op, name, prescale, postscale = what
        compression.check(compressor)
        compressed, context = compressor.compress(tensor)
        inner = self.allreduce(compressed, average, op, name, prescale, postscale, None, *how, stream, False)
        written = view if in_place else None

        def decompress(result: Any) -> Any:
            result = compressor.decompress(result, context)
            if not in_place:
                return result
            back = arrays.view(result)
            if back.array.size != view.array.size or isinstance(back, View) is not isinstance(view, View):
                raise InvalidArgumentError(
                    f"compression: decompress returned {back}, expected {view.array.size} elements where the tensor "
                    f"is, on the CPU or a GPU"
                )
            if isinstance(view, View):
                np.copyto(view.array, back.array, casting="unsafe")
            else:
                view.fill(back)
            view.store()
            return tensor

        if inner.fence is not None:
            inner.fence.then(decompress)
            inner.writes = written
            return inner
        deliver = lambda handle: decompress(inner.deliver(handle))  # noqa: E731
        return Handle(inner.entry, inner.source, inner.out, deliver, inner.keep, reads=inner.reads, writes=written)

    def reducescatter(
        self,
        tensor: Any,
        op: Op | None,
        name: str | None,
        prescale: float,
        postscale: float,
        algorithm: str | None,
        transport: str | None,
        stream: Any,
    ) -> Handle:
        view = arrays.view(tensor, stream=stream)
        if not isinstance(view, View):
            return self._devices().reducescatter(view, op, name, prescale, postscale, algorithm, transport)
        arguments.with_rows(view, "reducescatter")
        entry = self._entries.reducing("reducescatter", view, None, op, name, prescale, postscale, algorithm, transport)
        out = self._pool.empty(self._share(view.shape), view.dtype)
        return Handle(entry, view.array, out.reshape(-1), wrap, (view, out), reads=view)

    def broadcast(
        self,
        tensor: Any,
        root: int,
        name: str | None,
        algorithm: str | None,
        transport: str | None,
        stream: Any,
        in_place: bool,
    ) -> Handle:
        view = arrays.view(tensor, writable=in_place, stream=stream)
        if not isinstance(view, View):
            return self._devices().broadcast(view, tensor, root, name, algorithm, transport, in_place)
        entry = self._entries.broadcasting(view, root, name, algorithm, transport)
        if in_place:
            if self._rank == root:
                return Handle(entry, view.array, view.array, keep, (view, tensor), reads=view)
            return Handle(entry, view.array, view.array, store, (view, tensor), writes=view)
        out = self._pool.empty(view.shape, view.dtype)
        return Handle(entry, view.array, out.reshape(-1), wrap, (view, out), reads=view)

    def allgather(
        self, tensor: Any, name: str | None, algorithm: str | None, transport: str | None, stream: Any
    ) -> Handle:
        view = arrays.view(tensor, stream=stream)
        if not isinstance(view, View):
            return self._devices().allgather(view, name, algorithm, transport)
        arguments.with_rows(view, "allgather")
        entry = self._entries.gathering("allgather", view, name, algorithm, transport)
        return Handle(entry, view.array, EMPTY, gathered, view, rows=(view.shape[0],), reads=view)

    def alltoall(
        self, tensor: Any, splits: Any, name: str | None, algorithm: str | None, transport: str | None, stream: Any
    ) -> Handle:
        view = arrays.view(tensor, stream=stream)
        if not isinstance(view, View):
            return self._devices().alltoall(view, splits, name, algorithm, transport)
        arguments.with_rows(view, "alltoall")
        rows = arguments.splits(splits, view.shape[0], self._size)
        entry = self._entries.gathering("alltoall", view, name, algorithm, transport)
        if splits is None:
            return Handle(entry, view.array, EMPTY, gathered, view, rows=rows, reads=view)

        def with_splits(handle: Handle) -> Any:
            counts = np.array(handle.keep[2], np.int64)
            alike = hasattr(splits, "dtype") and splits.dtype == counts.dtype
            return gathered(handle), arrays.view(splits).wrap(counts) if alike else counts

        return Handle(entry, view.array, EMPTY, with_splits, view, rows=rows, reads=view)

    def group(self, collective: str, name: str | None, members: Sequence[Handle]) -> Handle:
        """Operations that are carried out, and complete, together. Each reads what its tensor holds now, also where
        they share memory."""
        entry = self._entries.group(collective, name, [member.entry for member in members])
        for place, member in enumerate(members):
            member.place, member.key = place, name or ""
        handle = Handle(entry, EMPTY, EMPTY, together, None, members)
        overlaps.separate(handle)
        return handle

    def tensors(self, given: Any) -> list[Any]:
        """The tensors of a group."""
        if isinstance(given, (list, tuple)):
            return list(given)
        raise InvalidTypeError(f"tensors: expected a list or tuple of tensors, got {type(given).__name__}")

    def meeting(
        self,
        collective: str,
        *,
        name: str | None = None,
        ranks: tuple[int, ...] | None = None,
        what: str | None = None,
        detail: str = "",
    ) -> Handle:
        """An operation without a tensor: a barrier, or the mark of a call that this rank had to refuse ("invalid").

        Its ``ranks`` and ``what`` else it says must be alike on every rank.
        """
        entry = (
            self._entries.meeting()
            if collective == "barrier"
            else self._entries.plain(collective, name, ranks, what, detail)
        )
        return Handle(entry, EMPTY, EMPTY, nothing)

    def neutral(self, request: Request) -> Handle:
        """What a rank that has run out of data contributes: elements that change nothing, or no rows."""
        if request.members:
            return self.group(request.collective, request.name, [self.neutral(member) for member in request.members])
        if request.dtype is None or request.shape is None:
            return Handle(
                self._entries.plain(request.collective, request.name, request.shape, request.op), EMPTY, EMPTY, nothing
            )
        if request.device is not None:
            return self._devices().neutral(request)
        dtype, shape = dtypes.resolve(request.dtype), request.shape
        how = (request.algorithm, request.transport)
        if request.collective in ("allgather", "alltoall"):
            view = arrays.view(np.empty((0, *shape), dtype))
            entry = self._entries.gathering(request.collective, view, request.name, *how)
            return Handle(
                entry, view.array, EMPTY, nothing, rows=(0,) * (1 if request.collective == "allgather" else self._size)
            )
        if request.root is not None:
            view = arrays.view(np.zeros(shape, dtype))
            return Handle(
                self._entries.broadcasting(view, request.root, request.name, *how), view.array, view.array, nothing
            )
        op = Op(request.op)
        view = arrays.view(np.full(shape, 0 if op is Op.ADASUM else reduction.identity(op, dtype), dtype))
        what = op, request.name, request.prescale, request.postscale
        entry = self._entries.reducing(request.collective, view, None, *what, *how, request.parts)
        out = view.array if request.collective == "allreduce" else np.empty(self._share(shape), dtype).reshape(-1)
        return Handle(entry, view.array, out, nothing)

    def _share(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this rank's rows."""
        return (partition.rows(shape[0], self._size)[self._rank], *shape[1:])

    # ---- a world of one rank
    # ----------------------------------------------------------------------------------------------------

    def alone(self, handle: Handle) -> Handle:
        """Complete an operation without anybody else."""
        for member in handle.members:
            self.alone(member)
        entry: CachedRequest = handle.entry
        if entry.on_device:
            self._devices().alone(handle)
        elif entry.request.collective in ("allgather", "alltoall"):
            rows = sum(handle.rows)
            out = self._pool.empty((rows, *(entry.request.shape or ())), entry.dtype)
            np.copyto(out.reshape(-1), handle.source)
            handle.keep = (handle.keep, out, [rows])
        elif not handle.members:
            self.copy(entry, handle.source, handle.out)
        if not handle.members:
            handle.finish()
        else:
            handle.result, handle.done = together(handle), True
        return handle

    def copy(self, entry: CachedRequest, source: Array, out: Array) -> None:
        """What one rank makes of a tensor."""
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


def keep(handle: Handle) -> Any:
    """The root's own tensor, which nobody has written to."""
    return handle.keep[1]


def restore(handle: Handle) -> Any:
    """Out of its compressed form."""
    view, out, tensor = handle.keep
    halves.cast(handle.out, out.reshape(-1))
    if tensor is None:
        return view.wrap(out)
    if view.copied:
        view.store()
    return tensor


def gathered(handle: Handle) -> Any:
    view, out, handle.gathered = handle.keep
    return view.wrap(out)


def together(handle: Handle) -> list[Any]:
    for member in handle.members:
        if member.error is not None:
            raise member.error
    return [member.result for member in handle.members]


def nothing(handle: Handle) -> None:
    """An operation that gives nothing back."""
