"""The collectives as methods of a world: each makes a handle, or is refused, and begins it or waits for it.

A refused argument is told to the other ranks as well, so that they stay in step: each of them gets an exception, and
the next call works.
"""

from __future__ import annotations

import contextlib
import importlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from collectives.base.errors import CollectivesError, InvalidTypeError, MismatchError, RankFailedError, in_words
from collectives.base.reduce_op import Op
from collectives.engine.engine import Engine
from collectives.engine.handles import Handle
from collectives.engine.request_cache import RequestCache
from collectives.engine.requests import HandleFactory, store, wrap
from collectives.tensors import arrays, consistency
from collectives.tensors.result_pool import ResultPool

if TYPE_CHECKING:
    from collectives.cuda.backend import DeviceBackend

Tensor = TypeVar("Tensor")


class Operations:
    """What the ranks of a group can do together; `collectives.world.World` has all that it needs."""

    rank: int
    size: int
    ranks: tuple[int, ...]
    _door: HandleFactory
    _engine: Engine
    _entries: RequestCache
    _pool: ResultPool
    _use_devices: Callable[[], DeviceBackend]

    def memory(self, count: int, dtype: Any) -> Any:
        """Memory for results that an adapter passes as ``out``: 1-D, uninitialised, aligned to 64 bytes, used again
        when it is dropped."""
        return self._pool.aligned(count, dtype)

    # ---- all-reduce
    # ----------------------------------------------------------------------------------------------------------

    def allreduce(
        self,
        tensor: Tensor,
        average: bool | None = None,
        *,
        op: Op | None = None,
        name: str | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        compression: Any = None,
        algorithm: str | None = None,
        transport: str | None = None,
        stream: Any = None,
        out: Any = None,
    ) -> Tensor:
        """See `collectives.allreduce`; ``out`` is an adapter's memory for the result, see `HandleFactory.allreduce`."""
        if compression is not None or op is Op.ADASUM or arrays.on_device(tensor, stream):
            return self._wait(
                name,
                lambda: self._door.allreduce(
                    tensor,
                    average,
                    op,
                    name,
                    prescale_factor,
                    postscale_factor,
                    compression,
                    algorithm,
                    transport,
                    stream,
                    False,
                    out,
                ),
            )
        try:
            view: arrays.View = arrays.view(tensor)  # type: ignore[assignment]  # what is on a device was sent elsewhere above
            entry = self._entries.reducing(
                "allreduce", view, average, op, name, prescale_factor, postscale_factor, algorithm, transport
            )
            if out is None:
                out = self._pool.empty(view.shape, view.dtype)
        except Exception as error:
            raise self.refused(error, name) from None
        flat = out.reshape(-1)
        if self.size == 1:
            self._check_state()
            self._door.copy(entry, view.array, flat)
            return view.wrap(out)
        # The frequent case, written out: no handle is made if the ranks meet at once.
        handle = self._engine.run(entry, view.array, flat, wrap, (view, out))
        return view.wrap(out) if handle is None else handle.wait()

    def allreduce_(
        self,
        tensor: Tensor,
        average: bool | None = None,
        *,
        op: Op | None = None,
        name: str | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        compression: Any = None,
        algorithm: str | None = None,
        transport: str | None = None,
        stream: Any = None,
    ) -> Tensor:
        """See `collectives.allreduce_`."""
        if compression is not None or op is Op.ADASUM or arrays.on_device(tensor, stream):
            return self._wait(
                name,
                lambda: self._door.allreduce(
                    tensor,
                    average,
                    op,
                    name,
                    prescale_factor,
                    postscale_factor,
                    compression,
                    algorithm,
                    transport,
                    stream,
                    True,
                ),
            )
        try:
            view: arrays.View = arrays.view(tensor, writable=True)  # type: ignore[assignment]  # as above
            entry = self._entries.reducing(
                "allreduce", view, average, op, name, prescale_factor, postscale_factor, algorithm, transport
            )
        except Exception as error:
            raise self.refused(error, name) from None
        source = view.array
        if self.size == 1:
            self._check_state()
            self._door.copy(entry, source, source)
        else:
            handle = self._engine.run(entry, source, source, store, (view, tensor))
            if handle is not None:
                return handle.wait()
        if view.copied:
            view.store()
        return tensor

    def allreduce_async(
        self,
        tensor: Tensor,
        average: bool | None = None,
        *,
        op: Op | None = None,
        name: str | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        compression: Any = None,
        algorithm: str | None = None,
        transport: str | None = None,
        stream: Any = None,
    ) -> Handle[Tensor]:
        """See `collectives.allreduce_async`."""
        try:
            handle = self._marked(
                self._door.allreduce(
                    tensor,
                    average,
                    op,
                    name,
                    prescale_factor,
                    postscale_factor,
                    compression,
                    algorithm,
                    transport,
                    stream,
                    False,
                )
            )
        except Exception as error:
            raise self.refused(error, name) from None
        return self._submit(handle)

    def allreduce_async_(
        self,
        tensor: Tensor,
        average: bool | None = None,
        *,
        op: Op | None = None,
        name: str | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        compression: Any = None,
        algorithm: str | None = None,
        transport: str | None = None,
        stream: Any = None,
    ) -> Handle[Tensor]:
        """See `collectives.allreduce_async_`."""
        try:
            handle = self._marked(
                self._door.allreduce(
                    tensor,
                    average,
                    op,
                    name,
                    prescale_factor,
                    postscale_factor,
                    compression,
                    algorithm,
                    transport,
                    stream,
                    True,
                )
            )
        except Exception as error:
            raise self.refused(error, name) from None
        return self._submit(handle)

    def grouped_allreduce(
        self, tensors: Sequence[Tensor], average: bool | None = None, **keywords: Any
    ) -> list[Tensor]:
        """See `collectives.grouped_allreduce`; ``out`` and ``parts`` are sequences as in `HandleFactory.allreduce`, for
        adapters."""
        return self._group_of_allreduces(tensors, average, False, **keywords).wait()

    def grouped_allreduce_(
        self, tensors: Sequence[Tensor], average: bool | None = None, **keywords: Any
    ) -> list[Tensor]:
        """See `collectives.grouped_allreduce_`."""
        return self._group_of_allreduces(tensors, average, True, **keywords).wait()

    def grouped_allreduce_async(
        self, tensors: Sequence[Tensor], average: bool | None = None, **keywords: Any
    ) -> Handle[list[Tensor]]:
        """See `collectives.grouped_allreduce_async`."""
        return self._group_of_allreduces(tensors, average, False, **keywords)

    def grouped_allreduce_async_(
        self, tensors: Sequence[Tensor], average: bool | None = None, **keywords: Any
    ) -> Handle[list[Tensor]]:
        """See `collectives.grouped_allreduce_async_`."""
        return self._group_of_allreduces(tensors, average, True, **keywords)

    def _group_of_allreduces(
        self,
        tensors: Sequence[Any],
        average: bool | None,
        in_place: bool,
        *,
        op: Op | None = None,
        name: str | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        compression: Any = None,
        algorithm: str | None = None,
        transport: str | None = None,
        stream: Any = None,
        out: Sequence[Any] | None = None,
        parts: Sequence[Any] | None = None,
    ) -> Handle:
        try:
            how = (
                average,
                op,
                None,
                prescale_factor,
                postscale_factor,
                compression,
                algorithm,
                transport,
                stream,
                in_place,
            )
            given = self._door.tensors(tensors)
            members = [
                self._door.allreduce(tensor, *how, result, shapes)
                for tensor, result, shapes in zip(
                    given, out or (None,) * len(given), parts or ((),) * len(given), strict=True
                )
            ]
            handle = self._marked(self._door.group("grouped_allreduce", name, members))
        except Exception as error:
            raise self.refused(error, name) from None
        return self._submit(handle)

    # ---- the other collectives
    # -------------------------------------------------------------------------------------------------

    def reducescatter(
        self, tensor: Tensor, op: Op | None = Op.AVERAGE, *, name: str | None = None, **keywords: Any
    ) -> Tensor:
        """See `collectives.reducescatter`."""
        return self._wait(name, lambda: self._reducescatter(tensor, op, name, **keywords))

    def reducescatter_async(
        self, tensor: Tensor, op: Op | None = Op.AVERAGE, *, name: str | None = None, **keywords: Any
    ) -> Handle[Tensor]:
        """See `collectives.reducescatter_async`."""
        return self._begin(name, lambda: self._reducescatter(tensor, op, name, **keywords))

    def grouped_reducescatter(
        self, tensors: Sequence[Tensor], op: Op | None = Op.AVERAGE, *, name: str | None = None, **keywords: Any
    ) -> list[Tensor]:
        """See `collectives.grouped_reducescatter`."""
        return self.grouped_reducescatter_async(tensors, op, name=name, **keywords).wait()

    def grouped_reducescatter_async(
        self, tensors: Sequence[Tensor], op: Op | None = Op.AVERAGE, *, name: str | None = None, **keywords: Any
    ) -> Handle[list[Tensor]]:
        """See `collectives.grouped_reducescatter_async`."""

        def make() -> Handle:
            members = [self._reducescatter(tensor, op, None, **keywords) for tensor in self._door.tensors(tensors)]
            return self._door.group("grouped_reducescatter", name, members)

        return self._begin(name, make)

    def _reducescatter(
        self,
        tensor: Any,
        op: Op | None,
        name: str | None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        algorithm: str | None = None,
        transport: str | None = None,
        stream: Any = None,
    ) -> Handle:
        return self._door.reducescatter(
            tensor, op, name, prescale_factor, postscale_factor, algorithm, transport, stream
        )

    def broadcast(
        self,
        tensor: Tensor,
        root_rank: int,
        *,
        name: str | None = None,
        algorithm: str | None = None,
        transport: str | None = None,
        stream: Any = None,
    ) -> Tensor:
        """See `collectives.broadcast`."""
        return self._wait(
            name, lambda: self._door.broadcast(tensor, root_rank, name, algorithm, transport, stream, False)
        )

    def broadcast_(
        self,
        tensor: Tensor,
        root_rank: int,
        *,
        name: str | None = None,
        algorithm: str | None = None,
        transport: str | None = None,
        stream: Any = None,
    ) -> Tensor:
        """See `collectives.broadcast_`."""
        return self._wait(
            name, lambda: self._door.broadcast(tensor, root_rank, name, algorithm, transport, stream, True)
        )

    def broadcast_async(
        self,
        tensor: Tensor,
        root_rank: int,
        *,
        name: str | None = None,
        algorithm: str | None = None,
        transport: str | None = None,
        stream: Any = None,
    ) -> Handle[Tensor]:
        """See `collectives.broadcast_async`."""
        return self._begin(
            name, lambda: self._door.broadcast(tensor, root_rank, name, algorithm, transport, stream, False)
        )

    def broadcast_async_(
        self,
        tensor: Tensor,
        root_rank: int,
        *,
        name: str | None = None,
        algorithm: str | None = None,
        transport: str | None = None,
        stream: Any = None,
    ) -> Handle[Tensor]:
        """See `collectives.broadcast_async_`."""
        return self._begin(
            name, lambda: self._door.broadcast(tensor, root_rank, name, algorithm, transport, stream, True)
        )

    def allgather(
        self,
        tensor: Tensor,
        *,
        name: str | None = None,
        algorithm: str | None = None,
        transport: str | None = None,
        stream: Any = None,
    ) -> Tensor:
        """See `collectives.allgather`."""
        return self._wait(name, lambda: self._door.allgather(tensor, name, algorithm, transport, stream))

    def allgather_async(
        self,
        tensor: Tensor,
        *,
        name: str | None = None,
        algorithm: str | None = None,
        transport: str | None = None,
        stream: Any = None,
    ) -> Handle[Tensor]:
        """See `collectives.allgather_async`."""
        return self._begin(name, lambda: self._door.allgather(tensor, name, algorithm, transport, stream))

    def grouped_allgather(self, tensors: Sequence[Tensor], *, name: str | None = None, **keywords: Any) -> list[Tensor]:
        """See `collectives.grouped_allgather`."""
        return self.grouped_allgather_async(tensors, name=name, **keywords).wait()

    def grouped_allgather_async(
        self,
        tensors: Sequence[Tensor],
        *,
        name: str | None = None,
        algorithm: str | None = None,
        transport: str | None = None,
        stream: Any = None,
    ) -> Handle[list[Tensor]]:
        """See `collectives.grouped_allgather_async`."""

        def make() -> Handle:
            members = [
                self._door.allgather(tensor, None, algorithm, transport, stream)
                for tensor in self._door.tensors(tensors)
            ]
            return self._door.group("grouped_allgather", name, members)

        return self._begin(name, make)

    def alltoall(
        self,
        tensor: Tensor,
        splits: Any = None,
        *,
        name: str | None = None,
        algorithm: str | None = None,
        transport: str | None = None,
        stream: Any = None,
    ) -> Tensor | tuple[Tensor, npt.NDArray[np.int64]]:
        """See `collectives.alltoall`."""
        return self._wait(name, lambda: self._door.alltoall(tensor, splits, name, algorithm, transport, stream))

    def alltoall_async(
        self,
        tensor: Any,
        splits: Any = None,
        *,
        name: str | None = None,
        algorithm: str | None = None,
        transport: str | None = None,
        stream: Any = None,
    ) -> Handle[Any]:
        """See `collectives.alltoall_async`."""
        return self._begin(name, lambda: self._door.alltoall(tensor, splits, name, algorithm, transport, stream))

    def barrier(self) -> None:
        """See `collectives.barrier`."""
        self._wait(None, lambda: self._door.meeting("barrier"))

    def broadcast_object(self, value: Tensor, root_rank: int = 0, *, name: str | None = None) -> Tensor:
        """See `collectives.broadcast_object`."""
        data = self._pickled(value, name and f"{name}.length") if self.rank == root_rank else b""
        buffer = self.broadcast_bytes(data, root_rank, name=name)
        return value if self.rank == root_rank else pickle.loads(buffer.data)

    def broadcast_bytes(self, data: bytes, root_rank: int, *, name: str | None = None) -> npt.NDArray[np.uint8]:
        """The root's ``data`` on every rank, whatever its length; two operations, the first called by ``name`` and
        "length"."""
        length = self.broadcast(np.array([len(data)], np.int64), root_rank, name=name and f"{name}.length")
        with self.ahead_of(name):
            buffer = np.empty(int(length[0]), np.uint8)
            buffer[: len(data)] = np.frombuffer(data, np.uint8)
        self.broadcast_(buffer, root_rank, name=name)
        return buffer

    def allgather_object(self, value: Tensor, *, name: str | None = None) -> list[Tensor]:
        """See `collectives.allgather_object`."""
        data = np.frombuffer(self._pickled(value, name and f"{name}.length"), np.uint8)
        lengths = self.allgather(np.array([len(data)], np.int64), name=name and f"{name}.length")
        everything = self.allgather(data, name=name)
        ends = np.cumsum(lengths)
        return [
            pickle.loads(everything[end - length : end].data)
            for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)
        ]

    def join(self) -> int:
        """See `collectives.join`."""
        self._check_state()
        return self._engine.join() if self.size > 1 else self.ranks[0]

    def check_consistency(self, tensors: Any) -> None:
        """See `collectives.check_consistency`."""
        self._check_state()
        try:
            mine = consistency.fingerprints(tensors)
        except Exception as error:
            raise self.refused(error, None) from None
        consistency.compare(self.ranks[self.rank], self.allgather_object(mine), self.ranks)

    # ---- handles
    # ---------------------------------------------------------------------------------------------------------------

    def poll(self, handle: Handle) -> bool:
        """See `collectives.poll`."""
        return _a_handle(handle).poll()

    def synchronize(self, handle: Handle[Tensor], timeout: float | None = None) -> Tensor:
        """See `collectives.synchronize`."""
        return _a_handle(handle).wait(timeout)

    def _begin(self, name: str | None, make: Callable[[], Handle]) -> Handle:
        """Make a handle and submit it; a refusal is told to the other ranks."""
        try:
            handle = self._marked(make())
        except Exception as error:
            raise self.refused(error, name) from None
        return self._submit(handle)

    def _marked(self, handle: Handle) -> Handle:
        """The handle; of tensors on a GPU behind the work that their streams have been given so far."""
        if handle.fence is not None or any(member.fence is not None for member in handle.members):
            self._use_devices().mark(handle)
        return handle

    def _submit(self, handle: Handle) -> Handle:
        if self.size == 1:
            self._check_state()
            return self._door.alone(handle)
        handle.locate()
        return self._engine.submit(handle)

    def _wait(self, name: str | None, make: Callable[[], Handle]) -> Any:
        """Make a handle and carry it out."""
        try:
            handle = self._marked(make())
        except Exception as error:
            raise self.refused(error, name) from None
        if self.size == 1:
            self._check_state()
            return self._door.alone(handle).wait()
        if self._engine.run(handle.entry, handle.source, handle.out, handle=handle) is None:
            self._engine._guarded(handle.finish)  # which may be a meeting of all ranks
        return handle.wait()

    # ---- refusals
    # ---------------------------------------------------------------------------------------------------------------

    def _check_state(self) -> None:
        if self._engine.refusal is not None:
            raise self._engine.refusal()

    def refused(self, error: Exception, name: Any) -> Exception:
        """A call whose arguments this rank refuses: the other ranks learn of it, and stay in step."""
        if self._engine.refusal is not None:
            return self._engine.refusal()
        self._tell(error, name)
        if isinstance(error, CollectivesError) and not str(error).startswith("rank "):
            subject = f"tensor {name!r}: " if isinstance(name, str) else ""
            error.args = (f"rank {self.ranks[self.rank]}: {subject}{error}",)
        return error

    @contextlib.contextmanager
    def ahead_of(self, name: str | None) -> Iterator[None]:
        """Something of this rank's own, such as taking memory, after which every rank goes on with the operation
        ``name``.

        If it fails, the other ranks are told in place of that operation, and stay in step.
        """
        try:
            yield
        except BaseException as error:
            self._tell(error, name)
            raise

    @contextlib.contextmanager
    def composed(self, names: Iterable[str]) -> Iterator[Callable[[str], str]]:
        """Carry out operations of ``names``, on which the ranks have agreed, without waiting for one before the next is
        begun.

        Where something fails meanwhile, or an operation does, the other ranks are told in place of all that have not
        been begun. They do likewise, as soon as one of theirs fails, so that nothing is left over.

        Yields:
            A function to pass each name through when its operation is begun.
        """
        left = dict.fromkeys(names)

        def begin(name: str) -> str:
            del left[name]
            return name

        try:
            yield begin
        except BaseException as error:
            for name in left:
                self._tell(error, name, always=True)
            raise

    def _tell(self, error: BaseException, name: Any, always: bool = False) -> None:
        """Submit the mark of a call that this rank cannot make, unless every rank knows, or is told ``always``."""
        if (
            self._engine.refusal is not None
            or self.size == 1
            or (isinstance(error, (MismatchError, RankFailedError)) and not always)
        ):
            return
        mark = self._door.meeting(
            "invalid", name=name if isinstance(name, str) else None, detail=in_words(self.ranks[self.rank], error)
        )
        with contextlib.suppress(
            CollectivesError
        ):  # an operation of that name is in flight, and goes on; or the world has just failed
            self._engine.submit(mark)

    def _pickled(self, value: Any, name: str | None) -> bytes:
        try:
            return _dumps(value)
        except Exception as error:
            raise self.refused(
                InvalidTypeError(f"object: {type(value).__name__} cannot be pickled: {error}"), name
            ) from error


def _dumps(value: Any) -> bytes:
    """By cloudpickle what pickle cannot: lambdas, and what is defined in a function or in the program itself."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        try:
            dumps = importlib.import_module("cloudpickle").dumps
        except ImportError:
            raise error from None
        data: bytes = dumps(value)
        return data


def _a_handle(handle: Any) -> Handle:
    if not isinstance(handle, Handle):
        raise InvalidTypeError(f"handle: expected what an asynchronous operation returned, got {type(handle).__name__}")
    return handle
