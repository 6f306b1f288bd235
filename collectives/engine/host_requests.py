"""Requests for tensors in host memory: their validation, and the plans that carry them out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from collectives.base import dtypes
from collectives.base.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from collectives.base.options import Options
from collectives.base.reduce_op import Op
from collectives.engine import arguments
from collectives.engine.inline import Inline
from collectives.engine.negotiation import Request
from collectives.engine.request_cache import CachedRequest, Reduce, RequestCache
from collectives.plan.builder import Plans
from collectives.plan.plan import Plan
from collectives.plan.planner import Choice, Placement, Planner
from collectives.schedules import registry
from collectives.tensors import reduction
from collectives.tensors.arrays import View
from collectives.transport.base import Array


@runtime_checkable
class NativeTransport(Protocol):
    """A transport that has an all-reduce of its own, for tiny tensors."""

    def knows(self, op: Op, dtype: np.dtype[Any]) -> bool:
        """Whether its results equal those of the engine's own kernels."""

    def native_allreduce(self, source: Array, out: Array, op: Op) -> None:
        """Reduce ``source`` into ``out``; an average is only summed."""


class HostRequestCache(RequestCache[CachedRequest]):
    """The requests of one world for tensors in host memory."""

    def __init__(self, placement: Placement, planner: Planner, plans: Plans, native: NativeTransport | None) -> None:
        super().__init__(placement.size, planner)
        self._plans = plans
        self._native = native

    def _reduction(
        self, collective: str, view: View, op: Op, options: Options, parts: tuple[tuple[int, ...], ...]
    ) -> CachedRequest:
        if op is Op.ADASUM:
            return self._adasum(collective, view, options)
        dtype, shape, nbytes = view.dtype, view.shape, view.nbytes
        count = view.array.size  # the functions below must not keep the view, and with it the caller's memory
        kernel = reduction.kernel(op, dtype)
        finish = reduction.finish(op, dtype, options.parts or self._size, options.postscale_factor)

        def choose(mapped: bool = False) -> Choice:
            return self._choose_reduction(collective, nbytes, op, dtype, options.algorithm, options.transport, mapped)

        def make_plan(mapped: bool = False) -> Plan | Reduce | Inline:
            choice = choose(mapped)
            if collective == "reducescatter":
                return self._plans.reducescatter(shape, dtype, choice, kernel, finish)
            return self._plan_allreduce(shape, dtype, choice, op, kernel, finish)

        choice = choose()  # raises if no choice is possible
        request = replace(
            _request(collective, view, options),
            op=op.value,
            prescale=options.prescale_factor,
            postscale=options.postscale_factor,
            parts=parts,
            of_parts=options.parts,
        )
        moves = self._size > 1 and count > 0
        locates = (
            moves and not (choice.native or choice.inline) and self._planner.locates_tensors(nbytes, options.transport)
        )
        make_mapped = (lambda: make_plan(True)) if locates else None
        entry = _of_tensor(CachedRequest(request, self._planner, make_plan if moves else None, make_mapped), view)
        entry.finish = finish
        # The parts are scaled before they are combined on their rank.
        entry.prescale = None if options.parts else reduction.prescale(dtype, options.prescale_factor)
        entry.warns = reduction.warns(dtype)
        entry.kernel, entry.op = kernel, op
        if collective == "allreduce" and moves:
            entry.fuses_with = (dtype.num, dtype.str, op, *fusion_key(options))
        return entry

    def _adasum(self, collective: str, view: View, options: Options) -> CachedRequest:
        """The request of an Adasum, which is made of other operations."""
        if collective != "allreduce":
            raise UnsupportedError(
                f"op=Adasum: {collective} does not support Adasum; call allreduce, or pass another op [A10]"
            )
        if options.algorithm is not None or options.transport is not None:
            raise InvalidArgumentError(
                "op=Adasum uses its own algorithm and transport; leave algorithm and transport out [A11]"
            )
        if not dtypes.is_floating(view.dtype):
            raise InvalidTypeError(
                f"op=Adasum: expected real floating-point numbers, got {dtypes.name(view.dtype)}; convert the tensor "
                "to float16, bfloat16 or float32 first [A12]"
            )
        prescale, postscale = options.prescale_factor, options.postscale_factor
        request = replace(_request(collective, view, options), op="adasum", prescale=prescale, postscale=postscale)
        entry = _of_tensor(CachedRequest(request, self._planner), view)
        entry.finish = reduction.prescale(view.dtype, postscale)
        entry.prescale = reduction.prescale(view.dtype, prescale)
        entry.moves = self._size > 1 and view.array.size > 0
        entry.simple = False
        entry.op = Op.ADASUM
        return entry

    def _broadcast(self, view: View, root: int, options: Options) -> CachedRequest:
        shape, dtype, nbytes = view.shape, view.dtype, view.nbytes

        def choose(mapped: bool = False) -> Choice:
            return self._planner.choose(
                "broadcast", nbytes, mapped=mapped, algorithm=options.algorithm, transport=options.transport
            )

        choose()  # raises if no choice is possible
        moves = self._size > 1 and view.array.size > 0
        locates = moves and self._planner.locates_tensors(nbytes, options.transport)
        make_plan = (lambda: self._plans.broadcast(shape, dtype, root, choose())) if moves else None
        make_mapped = (lambda: self._plans.broadcast(shape, dtype, root, choose(True))) if locates else None
        request = replace(_request("broadcast", view, options), root=root)
        return _of_tensor(CachedRequest(request, self._planner, make_plan, make_mapped), view)

    def _gathering(self, collective: str, view: View, options: Options) -> CachedRequest:
        # Raises if no choice is possible; the choice for the plan is made when the rows are known.
        self._planner.choose(collective, view.nbytes, algorithm=options.algorithm, transport=options.transport)
        request = replace(_request(collective, view, options), shape=view.shape[1:])
        entry = CachedRequest(request, self._planner)
        entry.dtype = view.dtype
        return entry

    def gathering_parts(self, reduced: CachedRequest) -> CachedRequest:
        """The request of the allgather of the values of parts that an all-reduce combines."""
        key = ("parts", reduced)
        request = replace(reduced.request, collective="allgather", algorithm=None)
        entry = self._look_up(key) or self._remember(key, CachedRequest(request, self._planner))
        entry.dtype = reduced.dtype
        return entry

    def group(self, collective: str, name: str | None, members: Sequence[CachedRequest]) -> CachedRequest:
        """The request of a grouped operation."""
        arguments.check_name(name)
        key = (collective, name, *members)
        cached = self._look_up(key)
        if cached is not None:
            return cached
        root = members[0].request.root if members else None
        request = Request(collective, name, root=root, members=tuple(member.request for member in members))
        return self._remember(key, CachedRequest(request, self._planner))

    def plain(
        self,
        collective: str,
        name: str | None = None,
        ranks: tuple[int, ...] | None = None,
        what: str | None = None,
        detail: str = "",
    ) -> CachedRequest:
        """The request of an operation without a tensor; "invalid" is one whose arguments were refused."""
        return CachedRequest(Request(collective, name, shape=ranks, op=what, detail=detail), self._planner)

    def barrier(self) -> CachedRequest:
        """The request of a barrier."""
        return self._look_up(("barrier",)) or self._remember(("barrier",), self.plain("barrier"))

    def release(self) -> None:
        """Drop all requests, and the plans of those that handles still refer to."""
        for entry in self._known.values():
            entry.release()
        self._known.clear()

    # ---- plans of buckets, and of rows

    def choose_fused(self, entry: CachedRequest, nbytes: int, pieces: int) -> Choice:
        """The choice for a bucket of ``pieces`` all-reduces like this one, ``nbytes`` in all."""
        request, op = entry.request, entry.op
        assert op is not None
        return self._choose_reduction(
            "allreduce", nbytes, op, entry.dtype, request.algorithm, request.transport, pieces=pieces
        )

    def locates_bucket(self, entry: CachedRequest, nbytes: int, pieces: int) -> bool:
        """Whether the ranks tell each other where the tensors of such a bucket lie."""
        request = entry.request
        return entry.prescale is None and self._planner.locates_bucket(
            nbytes, pieces, request.algorithm, request.transport
        )

    def of_buffer(self, like: CachedRequest, count: int, choice: Choice) -> CachedRequest:
        """The request of a buffer of ``count`` elements, into which several all-reduces like this one are copied, and
        scaled."""
        op, kernel = like.op, like.kernel
        assert op is not None and kernel is not None
        request = replace(like.request, name=None, shape=(count,), prescale=1.0, parts=())
        entry = CachedRequest(
            request,
            self._planner,
            lambda: self._plan_allreduce((count,), like.dtype, choice, op, kernel, like.finish, "fused "),
        )
        entry.dtype, entry.finish, entry.warns = like.dtype, like.finish, like.warns
        return entry

    def _plan_allreduce(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        choice: Choice,
        op: Op,
        kernel: reduction.Kernel,
        finish: reduction.Scaling | None,
        fused: str = "",
    ) -> Plan | Reduce | Inline:
        count, native = math.prod(shape), self._native
        if choice.inline:
            self._plans.log_choice("allreduce", count, dtype, f"{fused}inline", choice.why)
            return Inline(self._size, count, dtype, kernel, finish)
        if choice.native and native is not None:
            self._plans.log_choice("allreduce", count, dtype, f"{fused}native over mpi", choice.why)
            return lambda source, out: native.native_allreduce(source, out, op)
        return self._plans.allreduce(shape, dtype, choice, kernel, finish)

    def plan_for_rows(self, entry: CachedRequest, rows: tuple[int, ...], mapped: bool) -> Plan | None:
        """The plan of an allgather for every rank's rows, or of an all-to-all for the rows of every pair of ranks, by
        sender; ``mapped`` if the tensors of all ranks are."""
        return entry.plan_for((mapped, *rows), lambda: self._plan_rows(entry, rows, mapped))

    def _plan_rows(self, entry: CachedRequest, rows: Sequence[int], mapped: bool) -> Plan | None:
        request = entry.request
        row = math.prod(request.shape or ())
        sizes: list[int] = [count * row for count in rows]
        if self._size == 1 or not any(sizes):
            return None
        gathers = request.collective == "allgather"
        nbytes = sum(sizes) * entry.dtype.itemsize // (1 if gathers else self._size)
        choice = self._planner.choose(
            request.collective,
            nbytes,
            mapped=mapped and self._planner.locates_tensors(nbytes, request.transport),
            algorithm=request.algorithm,
            transport=request.transport,
        )
        return (self._plans.allgather if gathers else self._plans.alltoall)(sizes, entry.dtype, choice)

    def _choose_reduction(
        self,
        collective: str,
        nbytes: int,
        op: Op,
        dtype: np.dtype[Any],
        algorithm: str | None,
        transport: str | None,
        mapped: bool = False,
        pieces: int = 1,
    ) -> Choice:
        return self._planner.choose(
            collective,
            nbytes,
            mapped=mapped,
            pieces=pieces,
            native=self._native is not None and self._native.knows(op, dtype),
            ordered=dtypes.is_complex(dtype) and op is Op.PRODUCT,
            algorithm=algorithm,
            transport=transport,
        )


def _request(collective: str, view: View, options: Options) -> Request:
    """The fields that all requests about a tensor have."""
    return Request(
        collective,
        options.name,
        dtypes.name(view.dtype),
        view.shape,
        algorithm=options.algorithm and registry.signed(options.algorithm, collective),
        transport=options.transport,
    )


def _of_tensor(entry: CachedRequest, view: View) -> CachedRequest:
    entry.dtype, entry.count, entry.nbytes = view.dtype, view.array.size, view.nbytes
    return entry


def fusion_key(options: Options) -> tuple[Any, ...]:
    """What fused all-reduces share besides dtype and operation."""
    return options.prescale_factor, options.postscale_factor, options.algorithm, options.transport, options.parts
