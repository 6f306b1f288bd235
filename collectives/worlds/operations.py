"""The collectives of one world: each makes a handle, and submits the operation or waits for it.

If a rank refuses the arguments of a call, the other ranks are told (`collectives.worlds.refusals`): each of them raises
an exception as well, and the next calls match again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from collectives.base.errors import InvalidTypeError
from collectives.base.reduce_op import Op
from collectives.engine.engine import Engine
from collectives.engine.handles import Handle
from collectives.engine.host_handles import itself, store, wrap
from collectives.engine.request_cache import CachedRequest
from collectives.engine.requests import HandleFactory
from collectives.engine.rows import GatheredRows
from collectives.tensors import arrays
from collectives.tensors.result_pool import ResultPool
from collectives.worlds import descriptions as describe
from collectives.worlds.refusals import Refusals
from collectives.worlds.variants import begun, blocking, documented

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from collectives.base.options import CallOptions, RarerReduceOptions, ReduceOptions, ScaleOptions

Tensor = TypeVar("Tensor")

_NDARRAY = np.ndarray


class Operations(Refusals):
    """What the ranks of a world do together. The methods take the keywords of the functions of `collectives.api` that
    they are named for, without ``process_set``. Results come from ``pool``.
    """

    def __init__(
        self, rank: int, ranks: Sequence[int], engine: Engine, handles: HandleFactory, pool: ResultPool
    ) -> None:
        super().__init__(rank, ranks, engine, handles)
        self._host = handles.host
        self._requests = handles.host.requests
        self._run, self._submit = engine.run, engine.submit
        self._known: Callable[[tuple[Any, ...]], CachedRequest | None] = (
            handles.host.requests.get if self.size > 1 else _nothing_known
        )
        self._pool = pool

    def _close(self) -> None:
        """Drop the caches, and with them views into the windows. Later calls are refused."""
        del self._requests, self._host
        self._handles.close()

    def memory(self, count: int, dtype: Any) -> Any:
        """A 1-D uninitialised array of the result pool, for an adapter to pass as ``out``; aligned to 64 bytes."""
        return self._pool.aligned(count, dtype)

    # ---- all-reduce

    def allreduce(
        self,
        tensor: Tensor,
        average: bool | None = None,
        *,
        op: Op | None = None,
        name: str | None = None,
        out: Any = None,
        shapes: tuple[tuple[int, ...], ...] = (),
        **rarer: Unpack[RarerReduceOptions],
    ) -> Tensor:
        """``out`` and ``shapes``: for adapters, as in `HandleFactory.allreduce`."""
        entry = None if rarer or shapes or out is not None else self._known_as(tensor, average, op, name)
        if entry is not None:
            return self._run_out_of_place(entry, tensor, tensor.shape)  # type: ignore[attr-defined]
        options: ReduceOptions = {"op": op, "name": name, **rarer}
        if _needs_handle(tensor, options):
            return self.carry_out(_allreduce, options, tensor, average, False, out, shapes)
        try:
            view: arrays.View = arrays.view(tensor)  # type: ignore[assignment]  # no device tensor comes here
            entry = self._requests.reducing("allreduce", view, average, options, shapes)
            if out is None:
                out = self._pool.empty(view.shape, view.dtype)
        except Exception as error:
            raise self.refused(error, name) from None
        flat = out.reshape(-1)
        if self.size == 1:
            self.check_state()
            self._host.scale(entry, view.array, flat)
            return view.wrap(out)
        handle = self._run(entry, view.array, flat, wrap, (view, out))
        return view.wrap(out) if handle is None else handle.wait()

    def allreduce_(
        self,
        tensor: Tensor,
        average: bool | None = None,
        *,
        op: Op | None = None,
        name: str | None = None,
        shapes: tuple[tuple[int, ...], ...] = (),
        **rarer: Unpack[RarerReduceOptions],
    ) -> Tensor:
        """``shapes``: for adapters, as in `HandleFactory.allreduce`."""
        entry = None if rarer or shapes else self._known_as(tensor, average, op, name)
        if entry is not None:
            array: Any = tensor  # as `_run_in_place`, without the call
            source = array if array.ndim == 1 else array.reshape(-1)
            handle = self._run(entry, source, source, store, (array, array))
            return tensor if handle is None else handle.wait()
        options: ReduceOptions = {"op": op, "name": name, **rarer}
        if _needs_handle(tensor, options):
            return self.carry_out(_allreduce, options, tensor, average, True, None, shapes)
        try:
            view: arrays.View = arrays.view(tensor, writable=True)  # type: ignore[assignment]  # as above
            entry = self._requests.reducing("allreduce", view, average, options, shapes)
        except Exception as error:
            raise self.refused(error, name) from None
        source = view.array
        if self.size == 1:
            self.check_state()
            self._host.scale(entry, source, source)
        else:
            handle = self._run(entry, source, source, store, (view, tensor))
            if handle is not None:
                return handle.wait()
        if view.copied:
            view.store()
        return tensor

    def allreduce_async_(
        self,
        tensor: Tensor,
        average: bool | None = None,
        *,
        op: Op | None = None,
        name: str | None = None,
        **rarer: Unpack[RarerReduceOptions],
    ) -> Handle[Tensor]:
        entry = None if rarer else self._known_as(tensor, average, op, name)
        if entry is None:
            options: ReduceOptions = {"op": op, "name": name, **rarer}
            return self.begin(describe.allreduce_, options, tensor, average)
        array: Any = tensor
        source = array if array.ndim == 1 else array.reshape(-1)
        handle = Handle(entry, source, source, itself, array, (), (), None, source)
        handle.locate()
        return self._submit(handle)

    allreduce_async = documented(
        """Begin an `allreduce` and return at once.

        Returns a handle, with `wait` and `poll`. The tensor must not change until the operation is done; other
        operations may read it meanwhile.

        Raises:
            InvalidArgumentError: an operation of this name is in flight, or one that writes this tensor's memory.
                Errors that only the ranks together can detect are raised by `Handle.wait`.
        """
    )(begun(describe.allreduce))

    def grouped_allreduce(
        self,
        tensors: Sequence[Tensor],
        average: bool | None = None,
        *,
        out: Sequence[Any] | None = None,
        shapes: Sequence[Any] | None = None,
        **options: Unpack[ReduceOptions],
    ) -> list[Tensor]:
        """``out`` and ``shapes``: for each tensor as in `HandleFactory.allreduce`, for adapters."""
        return self.carry_out(_grouped_allreduce, options, tensors, average, False, out, shapes)

    def grouped_allreduce_(
        self,
        tensors: Sequence[Tensor],
        average: bool | None = None,
        *,
        shapes: Sequence[Any] | None = None,
        **options: Unpack[ReduceOptions],
    ) -> list[Tensor]:
        """``shapes``: as for `grouped_allreduce`."""
        return self.carry_out(_grouped_allreduce, options, tensors, average, True, None, shapes)

    grouped_allreduce_async = begun(describe.grouped_allreduce)
    grouped_allreduce_async_ = begun(describe.grouped_allreduce_)

    # ---- the other collectives

    @documented(describe.reducescatter.__doc__)
    def reducescatter(self, tensor: Tensor, op: Op | None = Op.AVERAGE, **options: Unpack[ScaleOptions]) -> Tensor:
        keywords = {**options, "op": op}
        entry = self._known_as(
            tensor, None, op, options.get("name"), "reducescatter", (), *keywords, *keywords.values()
        )
        if entry is None:
            return self.carry_out(describe.reducescatter, options, tensor, op)
        return self._run_out_of_place(entry, tensor, self._handles.share(tensor.shape))  # type: ignore[attr-defined]

    reducescatter_async = begun(describe.reducescatter)
    grouped_reducescatter = blocking(describe.grouped_reducescatter)
    grouped_reducescatter_async = begun(describe.grouped_reducescatter)

    @documented(describe.broadcast.__doc__)
    def broadcast(self, tensor: Tensor, root_rank: int, **options: Unpack[CallOptions]) -> Tensor:
        entry = self._known_as(tensor, "broadcast", root_rank, *options, *options.values())
        if entry is None or type(root_rank) is not int:
            return self.carry_out(describe.broadcast, options, tensor, root_rank)
        return self._run_out_of_place(entry, tensor, tensor.shape)  # type: ignore[attr-defined]

    @documented(describe.broadcast_.__doc__)
    def broadcast_(self, tensor: Tensor, root_rank: int, **options: Unpack[CallOptions]) -> Tensor:
        entry = self._known_as(tensor, "broadcast", root_rank, *options, *options.values())
        if entry is None or type(root_rank) is not int:
            return self.carry_out(describe.broadcast_, options, tensor, root_rank)
        return self._run_in_place(entry, tensor)

    broadcast_async = begun(describe.broadcast)
    broadcast_async_ = begun(describe.broadcast_)
    grouped_broadcast = blocking(describe.grouped_broadcast)
    grouped_broadcast_ = blocking(describe.grouped_broadcast_)
    grouped_broadcast_async = begun(describe.grouped_broadcast)
    grouped_broadcast_async_ = begun(describe.grouped_broadcast_)

    @documented(describe.allgather.__doc__)
    def allgather(self, tensor: Tensor, **options: Unpack[CallOptions]) -> Tensor:
        entry = self._known_rows(tensor, "allgather", options)
        if entry is None:
            return self.carry_out(describe.allgather, options, tensor)
        array: Any = tensor
        gathered = GatheredRows((array.shape[0],), lambda: self._handles.allgather(options, tensor))
        handle = self._run(entry, array if array.ndim == 1 else array.reshape(-1), gathered, None, (array,))
        return gathered.array if handle is None else handle.wait()

    def allgather_into(self, out: npt.NDArray[Any], array: npt.NDArray[Any]) -> Sequence[int] | None:
        """`allgather` of one 1-D array into another. Returns the elements received from each rank, which are in ``out``
        if they are as many; None, and nothing is done, if no such request is known yet."""
        entry = self._known_rows(array, "allgather", {})
        if entry is None:
            return None
        gathered = GatheredRows(array.shape, lambda: self._handles.allgather({}, array, out), out)
        handle = self._run(entry, array, gathered, None, (array,))
        if handle is None:
            return gathered.received
        handle.wait()
        received: Sequence[int] = handle.gathered
        return received

    allgather_async = begun(describe.allgather)
    grouped_allgather = blocking(describe.grouped_allgather)
    grouped_allgather_async = begun(describe.grouped_allgather)

    @overload
    def alltoall(self, tensor: Tensor, splits: None = None, **options: Unpack[CallOptions]) -> Tensor: ...

    @overload
    def alltoall(
        self, tensor: Tensor, splits: Sequence[int] | npt.NDArray[Any], **options: Unpack[CallOptions]
    ) -> tuple[Tensor, npt.NDArray[np.int64]]: ...

    @documented(describe.alltoall.__doc__)
    def alltoall(
        self, tensor: Tensor, splits: Any = None, **options: Unpack[CallOptions]
    ) -> Tensor | tuple[Tensor, npt.NDArray[np.int64]]:
        array: Any = tensor
        entry = self._known_rows(array, "alltoall", options) if splits is None else None
        if entry is None or array.shape[0] % self.size:
            return self.carry_out(describe.alltoall, options, array, splits)
        rows = (array.shape[0] // self.size,) * self.size
        gathered = GatheredRows(rows, lambda: self._handles.alltoall(options, array, None))
        handle = self._run(entry, array if array.ndim == 1 else array.reshape(-1), gathered, None, (array,))
        return gathered.array if handle is None else handle.wait()

    alltoall_async = begun(describe.alltoall)

    def barrier(self) -> None:
        self.carry_out(lambda handles: handles.barrier(), {})

    def join(self) -> int:
        self.check_state()
        return self._engine.join() if self.size > 1 else self.ranks[0]

    def meet(
        self,
        operation: str,
        deliver: Callable[[Handle], Any] | None = None,
        *,
        ranks: tuple[int, ...] | None = None,
        what: str | None = None,
    ) -> Any:
        """Carry out an operation without a tensor, in the agreed order of all operations.

        Args:
            deliver: makes the result; called on every rank once all have called.
            ranks, what: must be equal on every rank.
        """
        return self.carry_out(
            lambda handles: handles.without_tensor(operation, ranks=ranks, what=what, deliver=deliver), {}
        )

    # ---- the frequent case: neither a view nor a handle is made

    def _known_as(self, tensor: Any, *key: Any) -> CachedRequest | None:
        """The request of an array that the engine can work on as it is, if it has come before; ``key`` is what stands
        behind dtype and shape in the request cache."""
        if type(tensor) is _NDARRAY and tensor.flags.carray:
            try:
                return self._known((tensor.dtype, tensor.shape, *key))
            except TypeError:  # an unhashable argument, which is refused when the request is made
                return None
        return None

    def _known_rows(self, tensor: Any, collective: str, options: CallOptions) -> CachedRequest | None:
        """`_known_as` for an allgather or an all-to-all."""
        if type(tensor) is _NDARRAY and tensor.ndim and tensor.flags.carray:
            try:
                return self._known((collective, tensor.dtype, tensor.shape[1:], *options, *options.values()))
            except TypeError:  # as above
                return None
        return None

    def _run_in_place(self, entry: CachedRequest, array: Any) -> Any:
        source = array if array.ndim == 1 else array.reshape(-1)
        handle = self._run(entry, source, source, store, (array, array))
        return array if handle is None else handle.wait()

    def _run_out_of_place(self, entry: CachedRequest, array: Any, shape: tuple[int, ...]) -> Any:
        try:
            result = self._pool.empty(shape, entry.dtype)
        except Exception as error:
            raise self.refused(error, entry.name) from None
        source, out = (array, result) if array.ndim == 1 else (array.reshape(-1), result.reshape(-1))
        handle = self._run(entry, source, out, wrap, (array, result))
        return result if handle is None else handle.wait()

    # ---- handles

    def poll(self, handle: Handle) -> bool:
        return _a_handle(handle).poll()

    def synchronize(self, handle: Handle[Tensor], timeout: float | None = None) -> Tensor:
        return _a_handle(handle).wait(timeout)

    def begin(self, make: Callable[..., Handle], options: CallOptions, *arguments: Any) -> Handle:
        """Submit the operation that ``make(handles, *arguments, **options)`` makes, or tell the other ranks why it is
        refused."""
        handle = self._made(make, options, *arguments)
        if self.size == 1:
            self.check_state()
            return self._handles.run_alone(handle)
        handle.locate()
        return self._engine.submit(handle)

    def carry_out(self, make: Callable[..., Handle], options: CallOptions, *arguments: Any) -> Any:
        """Carry out the operation that ``make(handles, *arguments, **options)`` makes, or tell the other ranks why it
        is refused."""
        handle = self._made(make, options, *arguments)
        if self.size == 1:
            self.check_state()
            return self._handles.run_alone(handle).wait()
        if self._engine.run(handle.entry, handle.source, handle.out, handle=handle) is None:
            self._engine.guarded(handle.finish)  # which may be a meeting of all ranks
        return handle.wait()

    def _made(self, make: Callable[..., Handle], options: CallOptions, *arguments: Any) -> Handle:
        """The handle of an operation; one on GPU tensors comes after the work that their streams have been given so
        far."""
        try:
            handle = make(self._handles, *arguments, **options)
            if handle.fence is not None or (handle.members and any(part.fence is not None for part in handle.members)):
                self._handles.devices().mark(handle)
        except Exception as error:
            raise self.refused(error, options.get("name")) from None
        return handle


def _allreduce(
    handles: HandleFactory, tensor: Any, average: bool | None, in_place: bool, out: Any, shapes: Any, **options: Any
) -> Handle:
    return handles.allreduce(options, tensor, average, in_place, out, shapes)


def _grouped_allreduce(
    handles: HandleFactory,
    tensors: Any,
    average: bool | None,
    in_place: bool,
    out: Sequence[Any] | None,
    shapes: Sequence[Any] | None,
    **options: Any,
) -> Handle:
    if out is None and shapes is None:
        return handles.grouped(options, handles.allreduce, tensors, average, in_place)
    each = zip(out or (None,) * len(tensors), shapes or ((),) * len(tensors), strict=True)
    return handles.grouped(options, handles.allreduce, tensors, average, in_place, each=each)


def _nothing_known(key: tuple[Any, ...]) -> None:
    """A world of one rank runs no operation through the engine."""


def _needs_handle(tensor: Any, options: ReduceOptions) -> bool:
    """Whether an all-reduce cannot take the path without a handle."""
    return (
        options.get("compression") is not None
        or options.get("parts") is not None
        or options.get("stream") is not None
        or (type(tensor) is not np.ndarray and arrays.on_device(tensor))
    )


def _a_handle(handle: Any) -> Handle:
    if not isinstance(handle, Handle):
        raise InvalidTypeError(
            f"handle: expected a handle that an asynchronous operation returned, got {type(handle).__name__} [A46]"
        )
    return handle
