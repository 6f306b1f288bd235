"""Handles from the arguments of calls.

A tensor is inspected once, here; all code below sees views, requests and handles only. Handles are made before they are
submitted, so that a refused argument leaves nothing to undo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from collectives.base import dtypes
from collectives.base.errors import InvalidArgumentError, InvalidTypeError, MismatchError, UnsupportedError
from collectives.base.options import CallOptions, ReduceOptions, ScaleOptions, complete
from collectives.base.reduce_op import Op
from collectives.engine import arguments, host_handles, overlaps
from collectives.engine.handles import EMPTY, Handle, no_result
from collectives.engine.host_handles import HostHandles
from collectives.engine.negotiation import Request
from collectives.engine.request_cache import RequestCache, TensorSpec
from collectives.schedules import fixed_tree, partition
from collectives.tensors import arrays, compression, reduction
from collectives.tensors.arrays import View

Keywords = Mapping[str, Any]
"""The keywords that a caller has given, without ``process_set``."""
Finish = Callable[[Any, Any], Any]
"""Makes the caller's result of a gathered tensor and the numbers of rows received."""

_ACCEPTED: dict[str, type[CallOptions]] = {"allreduce": ReduceOptions, "reducescatter": ScaleOptions}
"""The keywords of the methods that make reductions; the others take `CallOptions`."""


class Handles(Protocol):
    """Makes handles of operations on tensors in one kind of memory: `collectives.engine.host_handles.HostHandles`, or
    `collectives.cuda.handles.DeviceHandles`, which is imported when the first tensor on a GPU comes."""

    @property
    def requests(self) -> RequestCache[Any]: ...

    def in_place(self, entry: Any, view: Any, tensor: Any, stores: bool = True) -> Handle:
        """The result replaces the tensor's elements; ``stores`` is False where the tensor is only read."""

    def out_of_place(self, entry: Any, view: Any, shape: tuple[int, ...], out: Any = None) -> Handle:
        """The result, of this shape, is a new tensor, or ``out``."""

    def gathered(
        self, entry: Any, view: Any, rows: Sequence[int], finish: Finish | None = None, out: Any = None
    ) -> Handle:
        """The result's rows are known when the operation runs; this rank contributes ``rows``, to all or to each.
        ``out``: memory for them, on the host."""

    def filled(self, shape: tuple[int, ...], dtype: np.dtype[Any], value: Any) -> Any:
        """The view of a new tensor of equal elements."""

    def run_alone(self, handle: Handle) -> None:
        """Carry out an operation in a world of one rank."""

    def mark(self, handle: Handle) -> None:
        """Order the operation after the work that the caller's streams have been given so far."""


class HandleFactory:
    """Makes the handles of one world.

    Methods take the keywords that the caller has given as a mapping; `RequestCache` completes and checks them, and
    methods raise its errors.
    """

    def __init__(self, rank: int, size: int, host: HostHandles, devices: Callable[[], Handles]) -> None:
        self._rank, self._size = rank, size
        self.host = host
        self.devices = devices

    def close(self) -> None:
        """Drop the caches, and with them views into the windows; calls raise AttributeError from here on."""
        del self.host, self.devices

    def allreduce(
        self,
        keywords: Keywords,
        tensor: Any,
        average: bool | None,
        in_place: bool,
        out: Any = None,
        shapes: tuple[tuple[int, ...], ...] = (),
    ) -> Handle:
        """An all-reduce.

        Args:
            out: a C-contiguous array of the tensor's shape and dtype for the result, in place of one from the pool.
            shapes: the shapes of the tensors that are concatenated in this one; equal on every rank.
        """
        if keywords.get("parts") is not None:
            return self._of_parts(keywords, tensor, average, in_place, out)
        compressor = keywords.get("compression")
        if compressor is not None and not any(compressor is built_in for built_in in compression.BUILT_IN):
            return self._compressed_by(compressor, keywords, tensor, average, in_place)
        stream = keywords.get("stream")
        view = arrays.view(tensor, writable=in_place, stream=stream)
        if stream is not None:
            keywords = _without(keywords, "stream")
        handles = self._of(view)
        wire = compressor.wire(view.dtype) if compressor is not None and handles is self.host else None
        if wire is not None:
            return self.host.compressed(keywords, view, tensor, average, in_place, wire, out, shapes)
        entry = handles.requests.reducing("allreduce", view, average, keywords, shapes)
        if in_place:
            return handles.in_place(entry, view, tensor)
        return handles.out_of_place(entry, view, view.shape, out)

    def _of_parts(self, keywords: Keywords, tensor: Any, average: bool | None, in_place: bool, out: Any) -> Handle:
        """An all-reduce of parts by the fixed tree over all of them, of which the tensor has this rank's share.

        Subtrees are combined on the rank. Where that leaves one value on every rank, of as many parts on each but the
        last (in an average of halves on that, too, because means are weighted), the rest is the tree over the ranks: an
        all-reduce of these values. Elsewhere all ranks gather all values, and each combines the rest of the tree.
        """
        total, view = arguments.parts(keywords, self._size, self.host.requests.reproducible), arrays.view(tensor)
        if in_place or out is not None:
            raise InvalidArgumentError(
                "parts: the result has the shape of one part, so it does not fit into the input or out; call "
                "allreduce, without out [A74]"
            )
        if not isinstance(view, View):
            raise UnsupportedError(
                "parts: expected a tensor in host memory, got one on a GPU; copy it to the host [A75]"
            )
        shares = fixed_tree.shares(total, self._size)
        begin, end = shares[self._rank]
        if view.shape[:1] != (end - begin,):
            raise InvalidArgumentError(
                f"parts={total}: rank {self._rank} of {self._size} has parts {begin} to {end - 1}: expected a tensor "
                f"whose first dimension is {end - begin}, got shape {view.shape}; divide the parts as "
                "numpy.array_split does [A76]"
            )
        op = arguments.operation(keywords.get("op"), average)
        keywords = {key: value for key, value in keywords.items() if key not in ("op", "stream", "compression")}
        shape, dtype = view.shape[1:], view.dtype
        kernel = reduction.kernel(op, dtype)
        # One row, of which only the request is needed: it checks the arguments, and has the scalings.
        entry = self.host.requests.reducing(
            "allreduce", TensorSpec(shape, dtype), None, {**keywords, "op": op, "parts": total}
        )
        prescale = reduction.prescale(dtype, entry.request.prescale)
        parts = view.array.reshape(end - begin, -1)
        own = [fixed_tree.nodes(first, last, total) for first, last in shares]
        values = np.empty((len(own[self._rank]), parts.shape[1]), dtype)

        def combine(left: tuple[Any, int], right: tuple[Any, int]) -> tuple[Any, int]:
            """Combine two values, each with the number of parts in it."""
            (a, one), (b, other) = left, right
            reduction.weighted(kernel, one, other)(a, b, a)
            return a, one + other

        def part(leaf: fixed_tree.Range) -> tuple[Any, int] | None:
            if leaf[1] - leaf[0] > 1:
                return None
            value = parts[leaf[0] - begin].copy()
            if prescale is not None:
                prescale(value, value)
            return value, 1

        with reduction.quiet():
            for row, (first, last) in zip(values, own[self._rank], strict=True):
                row[...], _ = fixed_tree.evaluate(first, last, part, combine)
        alike = shares if reduction.weighs(kernel) else shares[:-1]
        if all(len(nodes) == 1 for nodes in own) and len({last - first for first, last in alike}) <= 1:
            flat = values.reshape(-1)
            return Handle(entry, flat, flat, host_handles.wrap, (view, flat.reshape(shape)))
        finish, ranges = entry.finish, [node for nodes in own for node in nodes]

        def deliver(gathered: Any, counts: Any) -> Any:
            if sum(counts) != len(ranges):
                raise MismatchError(
                    f"parts={total}: expected {len(ranges)} values from all ranks, got {sum(counts)}: a rank has "
                    "called join() and contributes no parts; give every rank its share of the parts [A77]"
                )
            rows = arrays.view(gathered).array.reshape(len(ranges), -1)
            found = {node: (row, node[1] - node[0]) for node, row in zip(ranges, rows, strict=True)}
            with reduction.quiet():
                whole, _ = fixed_tree.evaluate(0, total, found.get, combine)
                if finish is not None:
                    finish(whole, whole)
            return view.wrap(whole.copy().reshape(shape))

        gathering = self.host.requests.gathering_parts(entry)
        rows = arrays.view(values.reshape(len(values), *shape))
        return self.host.gathered(gathering, rows, (len(values),), deliver)

    def _compressed_by(
        self, compressor: Any, keywords: Keywords, tensor: Any, average: bool | None, in_place: bool
    ) -> Handle:
        """An all-reduce of the tensor that the caller's own compressor returns."""
        view, _ = _view(keywords, tensor, in_place)
        compression.check(compressor)
        compressed, context = compressor.compress(tensor)
        inner = self.allreduce(_without(keywords, "compression"), compressed, average, False)
        written = view if in_place else None

        def decompress(result: Any) -> Any:
            result = compressor.decompress(result, context)
            if not in_place:
                return result
            back = arrays.view(result)
            if back.array.size != view.array.size or isinstance(back, View) is not isinstance(view, View):
                raise InvalidArgumentError(
                    f"compression: decompress must return {view.array.size} elements on the tensor's own device (CPU "
                    f"or GPU), got {back} [A47]"
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

    def reducescatter(self, keywords: Keywords, tensor: Any, op: Op | None, out: Any = None) -> Handle:
        """A reduce-scatter; ``out``: as of `allreduce`, for this rank's rows."""
        view, keywords = _view(keywords, tensor)
        arguments.with_rows(view, "reducescatter")
        handles = self._of(view)
        entry = handles.requests.reducing("reducescatter", view, None, {**keywords, "op": op})
        return handles.out_of_place(entry, view, self.share(view.shape), out)

    def broadcast(self, keywords: Keywords, tensor: Any, root: int, in_place: bool) -> Handle:
        view, keywords = _view(keywords, tensor, in_place)
        handles = self._of(view)
        entry = handles.requests.broadcasting(view, root, keywords)
        if in_place:
            return handles.in_place(entry, view, tensor, stores=self._rank != root)
        return handles.out_of_place(entry, view, view.shape)

    def allgather(self, keywords: Keywords, tensor: Any, out: Any = None) -> Handle:
        """An allgather; ``out``: a contiguous array in host memory for the result, which has as many elements."""
        view, keywords = _view(keywords, tensor)
        arguments.with_rows(view, "allgather")
        handles = self._of(view)
        entry = handles.requests.gathering("allgather", view, keywords)
        return handles.gathered(entry, view, (view.shape[0],), out=out)

    def alltoall(self, keywords: Keywords, tensor: Any, splits: Any, out: Any = None) -> Handle:
        """An all-to-all; ``out``: as of `allgather`."""
        view, keywords = _view(keywords, tensor)
        arguments.with_rows(view, "alltoall")
        rows = arguments.splits(splits, view.shape[0], self._size)
        handles = self._of(view)
        entry = handles.requests.gathering("alltoall", view, keywords)
        if splits is None or out is not None:
            return handles.gathered(entry, view, rows, out=out)

        def with_counts(result: Any, received: Any) -> Any:
            counts = np.array(received, np.int64)
            counts_view = arrays.view(splits) if hasattr(splits, "dtype") and splits.dtype == counts.dtype else None
            return result, counts_view.wrap(counts) if isinstance(counts_view, View) else counts

        return handles.gathered(entry, view, rows, with_counts)

    def grouped(
        self,
        keywords: Keywords,
        make: Callable[..., Handle],
        tensors: Any,
        *further: Any,
        each: Iterable[tuple[Any, ...]] | None = None,
    ) -> Handle:
        """The operation that ``make``, a method of this factory, makes of one tensor, for several that are carried out
        together: with the arguments ``further`` behind each tensor, and its own of ``each`` behind these."""
        if not isinstance(tensors, (list, tuple)):
            raise InvalidTypeError(f"tensors: expected a list or tuple of tensors, got {type(tensors).__name__} [A34]")
        shared = _without(keywords, "name")
        if not tensors:  # otherwise the members' requests refuse unknown keywords
            complete(shared, _ACCEPTED.get(make.__name__, CallOptions))
        members = (
            [make(shared, tensor, *further) for tensor in tensors]
            if each is None
            else [make(shared, tensor, *further, *own) for tensor, own in zip(tensors, each, strict=True)]
        )
        return self._group(f"grouped_{make.__name__}", keywords.get("name"), members)

    def _group(self, collective: str, name: str | None, members: Sequence[Handle]) -> Handle:
        """One handle of several. Members that share memory read what it held when they were submitted."""
        entry = self.host.requests.group(collective, name, [member.entry for member in members])
        for place, member in enumerate(members):
            member.place, member.key = place, name or ""
        handle = Handle(entry, EMPTY, EMPTY, _results, None, members)
        overlaps.separate(handle)
        return handle

    def barrier(self) -> Handle:
        return Handle(self.host.requests.barrier(), EMPTY, EMPTY, no_result)

    def without_tensor(
        self,
        collective: str,
        *,
        name: str | None = None,
        ranks: tuple[int, ...] | None = None,
        what: str | None = None,
        detail: str = "",
        deliver: Callable[[Handle], Any] | None = None,
    ) -> Handle:
        """An operation without a tensor, or the mark of a call that this rank has refused ("invalid").

        Args:
            ranks, what: must be equal on every rank.
            deliver: makes the result once all ranks have called.
        """
        entry = self.host.requests.plain(collective, name, ranks, what, detail)
        return Handle(entry, EMPTY, EMPTY, deliver or no_result)

    def neutral(self, request: Request) -> Handle:
        """The contribution of a rank that has joined: neutral elements, or no rows."""
        if request.members:
            members = [self.neutral(member) for member in request.members]
            return self._group(request.collective, request.name, members)
        if request.dtype is None or request.shape is None:
            return self.without_tensor(request.collective, name=request.name, ranks=request.shape, what=request.op)
        handles: Handles = self.host if request.device is None else self.devices()
        dtype, shape = dtypes.resolve(request.dtype), request.shape
        keywords: dict[str, Any] = {
            "name": request.name,
            "algorithm": request.algorithm,
            "transport": request.transport,
        }
        if request.collective in ("allgather", "alltoall"):
            view = handles.filled((0, *shape), dtype, 0)
            if request.of_parts is None:
                entry = handles.requests.gathering(request.collective, view, keywords)
            else:
                scales = {"prescale_factor": request.prescale, "postscale_factor": request.postscale}
                keywords |= {"op": Op(request.op), "parts": request.of_parts, **scales}
                reduced = handles.requests.reducing("allreduce", TensorSpec(shape, dtype), None, keywords)
                entry = self.host.requests.gathering_parts(reduced)
            rows = (0,) * (1 if request.collective == "allgather" else self._size)
            return handles.gathered(entry, view, rows)
        if request.root is not None:
            view = handles.filled(shape, dtype, 0)
            return handles.in_place(handles.requests.broadcasting(view, request.root, keywords), view, None)
        op = Op(request.op)
        view = handles.filled(shape, dtype, 0 if op is Op.ADASUM else reduction.identity(op, dtype))
        keywords |= {"op": op, "prescale_factor": request.prescale, "postscale_factor": request.postscale}
        if request.of_parts is not None:
            keywords["parts"] = request.of_parts
        if request.wire is not None:
            keywords["compression"] = compression.named(request.wire)
        entry = handles.requests.reducing(request.collective, view, None, keywords, request.parts)
        if request.collective == "allreduce":
            return handles.in_place(entry, view, None)
        return handles.out_of_place(entry, view, self.share(shape))

    def run_alone(self, handle: Handle) -> Handle:
        """Complete an operation in a world of one rank."""
        for member in handle.members:
            self.run_alone(member)
        if handle.members:
            handle.result, handle.done = _results(handle), True
            return handle
        (self.devices() if handle.entry.on_device else self.host).run_alone(handle)
        handle.finish()
        return handle

    def _of(self, view: Any) -> Handles:
        return self.host if isinstance(view, View) else self.devices()

    def share(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this rank's rows."""
        return (partition.rows(shape[0], self._size)[self._rank], *shape[1:])


def _view(keywords: Keywords, tensor: Any, writable: bool = False) -> tuple[Any, Keywords]:
    """The view of a tensor, and the keywords on which the request depends: all but the stream."""
    stream = keywords.get("stream")
    if stream is not None:
        keywords = _without(keywords, "stream")
    return arrays.view(tensor, writable=writable, stream=stream), keywords


def _without(keywords: Keywords, left_out: str) -> Keywords:
    return {keyword: value for keyword, value in keywords.items() if keyword != left_out}


def _results(handle: Handle) -> list[Any]:
    for member in handle.members:
        if member.error is not None:
            raise member.error
    return [member.result for member in handle.members]
