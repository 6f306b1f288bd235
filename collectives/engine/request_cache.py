"""What is known about a request after it was made once: its signature, its kernels, and its plan.

A call looks its entry up by its arguments; only the first such call validates, chooses and plans. Plans are made when a
call has its turn, because they may move the scratch memory that a running plan uses.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from collectives.base import dtypes
from collectives.base.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from collectives.base.reduce_op import Op
from collectives.engine import arguments
from collectives.engine.negotiation import Request
from collectives.plan.binder import Plan
from collectives.plan.builder import Plans
from collectives.plan.planner import Choice, Placement, Planner
from collectives.tensors import reduction
from collectives.tensors.arrays import View
from collectives.transport.base import Array

_MOST_ENTRIES = 2048
_MOST_ROWS = 64

Reduce = Callable[[Array, Array], None]
"""Reduces a source into an output, on all ranks at once."""


@runtime_checkable
class NativeTransport(Protocol):
    """A transport that has an all-reduce of its own, for tiny tensors."""

    def knows(self, op: Op, dtype: np.dtype[Any]) -> bool:
        """Whether it reduces these numbers as we do."""

    def native_allreduce(self, source: Array, out: Array, op: Op) -> None:
        """Reduce; an average is only summed."""


class CachedRequest:
    """One request, remembered.

    Attributes:
        request, signature: what must be alike on every rank.
        name: the tensor's.
        finish, prescale: the scalings, or None.
        warns: whether kernels may emit floating-point warnings.
        fuses_with: what all-reduces must have in common to be fused; None: it is carried out by itself.
        kernel, op, dtype, count: of a reduction.
        moves: whether there is anything to move.
        simple: whether a blocking call can carry it out without a handle.
        step: the task that does so, kept from one call to the next.
    """

    on_device = False
    """Whether it is about tensors on a GPU."""

    __slots__ = (
        "_epoch",
        "_make_plan",
        "_native",
        "_plan",
        "_planner",
        "_plans",
        "count",
        "dtype",
        "finish",
        "fuses_with",
        "kernel",
        "moves",
        "name",
        "nbytes",
        "op",
        "prescale",
        "request",
        "signature",
        "simple",
        "step",
        "warns",
    )

    def __init__(
        self, request: Request, planner: Planner, make_plan: Callable[[], Plan | Reduce | None] | None = None
    ) -> None:
        self.request = request
        self.name = request.name
        self.signature = request.signature()
        self.finish: reduction.Scaling | None = None
        self.prescale: reduction.Scaling | None = None
        self.warns = False
        self.fuses_with: tuple[Any, ...] | None = None
        self.kernel: reduction.Kernel | None = None
        self.op: Op | None = None
        self.dtype: np.dtype[Any] = np.dtype(np.uint8)
        self.count = self.nbytes = 0
        self.moves = make_plan is not None
        self.simple = make_plan is not None or request.collective in (
            "allreduce",
            "reducescatter",
            "broadcast",
            "barrier",
        )
        self.step: Any = None
        self._planner = planner
        self._epoch = -1
        self._make_plan = make_plan
        self._plan: Plan | None = None
        self._native: Reduce | None = None
        self._plans: dict[tuple[int, ...], Plan | None] = {}

    def plan(self) -> Plan | None:
        """The plan, made when the operation is first carried out, and again if the planner has changed its mind since.

        None if there is nothing to move, or if MPI reduces by itself.
        """
        if self._epoch != self._planner.epoch:
            self._renew()
        return self._plan

    @property
    def native(self) -> Reduce | None:
        """Reduces by the transport itself, in place of a plan; valid after `plan`."""
        return self._native

    def plan_for(self, rows: tuple[int, ...], make_plan: Callable[[], Plan | None]) -> Plan | None:
        """The plan for these rows of every rank, or of every pair of ranks."""
        if self._epoch != self._planner.epoch:
            self._renew()
        if rows not in self._plans:
            if len(self._plans) >= _MOST_ROWS:
                self._plans.clear()
            self._plans[rows] = make_plan()
        return self._plans[rows]

    def release(self) -> None:
        """Drop the plans, which refer to the windows."""
        self._make_plan = self._plan = self._native = self.step = None
        self._plans.clear()

    def _renew(self) -> None:
        self._epoch = self._planner.epoch
        self._plans.clear()
        made = self._make_plan() if self._make_plan is not None else None
        self._plan = made if isinstance(made, Plan) else None
        self._native = made if not isinstance(made, Plan) else None


class RequestCache:
    """The entries of one world.

    Args:
        placement: of the ranks.
        planner: chooses.
        plans: makes the plans.
        native: a transport with an all-reduce of its own, or None.
    """

    def __init__(self, placement: Placement, planner: Planner, plans: Plans, native: NativeTransport | None) -> None:
        self._size = placement.size
        self._planner = planner
        self._plans = plans
        self._native = native
        self._known: dict[tuple[Any, ...], CachedRequest] = {}

    def reducing(
        self,
        collective: str,
        view: View,
        average: bool | None,
        op: Op | None,
        name: str | None,
        prescale: float,
        postscale: float,
        algorithm: str | None,
        transport: str | None,
        parts: tuple[tuple[int, ...], ...] = (),
    ) -> CachedRequest:
        """The entry of an all-reduce or a reduce-scatter; ``parts`` as in `Request`.

        Raises:
            InvalidArgumentError, InvalidTypeError, TransportError: an argument that no rank can accept, or that cannot
                be had here.
        """
        if type(prescale) is not float or type(postscale) is not float:
            prescale, postscale = (
                arguments.factor("prescale_factor", prescale),
                arguments.factor("postscale_factor", postscale),
            )
        key = (
            collective,
            view.dtype.num,
            view.shape,
            op,
            average,
            name,
            prescale,
            postscale,
            algorithm,
            transport,
            parts,
        )
        known = self._look_up(key)
        if known is not None:
            return known
        operation = arguments.operation(op, average)
        arguments.check_name(name)
        if operation is Op.ADASUM:
            return self._remember(key, self._adasum(collective, view, name, prescale, postscale, algorithm, transport))
        dtype, shape, nbytes, native = view.dtype, view.shape, view.nbytes, self._native
        kernel = reduction.kernel(operation, dtype)
        finish = reduction.finish(operation, dtype, self._size, postscale)

        def choose() -> Choice:
            return self._planner.choose(
                collective,
                nbytes,
                native=native is not None and native.knows(operation, dtype),
                ordered=dtypes.is_complex(dtype) and operation is Op.PRODUCT,
                algorithm=algorithm,
                transport=transport,
            )

        def make_plan() -> Plan | Reduce:
            choice = choose()
            if choice.native and native is not None:
                self._plans.tell(collective, view.array.size, dtype, choice, "native over mpi")
                return lambda source, out: native.native_allreduce(source, out, operation)
            return (self._plans.allreduce if collective == "allreduce" else self._plans.reducescatter)(
                shape, dtype, choice, kernel, finish
            )

        choose()  # refuses what cannot be
        entry = CachedRequest(
            Request(
                collective,
                name,
                dtypes.name(dtype),
                view.shape,
                op=operation.value,
                prescale=prescale,
                postscale=postscale,
                algorithm=algorithm,
                transport=transport,
                parts=parts,
            ),
            self._planner,
            make_plan if self._size > 1 and view.array.size > 0 else None,
        )
        entry.finish = finish
        entry.prescale = reduction.prescale(dtype, prescale)
        entry.warns = reduction.warns(dtype)
        entry.kernel, entry.op, entry.dtype, entry.count, entry.nbytes = (
            kernel,
            operation,
            dtype,
            view.array.size,
            nbytes,
        )
        if collective == "allreduce" and entry.moves:
            entry.fuses_with = (dtype.num, dtype.str, operation, prescale, postscale, algorithm, transport)
        return self._remember(key, entry)

    def _adasum(
        self,
        collective: str,
        view: View,
        name: str | None,
        prescale: float,
        postscale: float,
        algorithm: str | None,
        transport: str | None,
    ) -> CachedRequest:
        """The entry of an Adasum, which is made of other operations."""
        if collective != "allreduce":
            raise UnsupportedError(f"op=Adasum: {collective} has no Adasum; allreduce has")
        if algorithm is not None or transport is not None:
            raise InvalidArgumentError("op=Adasum: has an algorithm of its own; leave algorithm and transport out")
        if dtypes.is_integer(view.dtype) or dtypes.is_bool(view.dtype) or dtypes.is_complex(view.dtype):
            raise InvalidTypeError(f"op=Adasum: expected real floating-point numbers, got {dtypes.name(view.dtype)}")
        request = Request(
            "allreduce", name, dtypes.name(view.dtype), view.shape, op="adasum", prescale=prescale, postscale=postscale
        )
        entry = CachedRequest(request, self._planner)
        entry.finish, entry.prescale = (
            reduction.prescale(view.dtype, postscale),
            reduction.prescale(view.dtype, prescale),
        )
        entry.moves = self._size > 1 and view.array.size > 0
        entry.simple = False
        entry.op, entry.dtype, entry.count, entry.nbytes = Op.ADASUM, view.dtype, view.array.size, view.nbytes
        return entry

    def group(self, collective: str, name: str | None, members: Sequence[CachedRequest]) -> CachedRequest:
        """The entry of operations that are carried out together."""
        arguments.check_name(name)
        key = (collective, name, *members)
        return self._look_up(key) or self._remember(
            key,
            CachedRequest(
                Request(collective, name, members=tuple(member.request for member in members)), self._planner
            ),
        )

    def plain(
        self,
        collective: str,
        name: str | None = None,
        ranks: tuple[int, ...] | None = None,
        what: str | None = None,
        detail: str = "",
    ) -> CachedRequest:
        """The entry of an operation without a tensor; "invalid" is one whose arguments were refused."""
        return CachedRequest(Request(collective, name, shape=ranks, op=what, detail=detail), self._planner)

    def broadcasting(
        self, view: View, root: int, name: str | None, algorithm: str | None, transport: str | None
    ) -> CachedRequest:
        """The entry of a broadcast; raises as `reducing`."""
        if type(root) is not int:
            root = arguments.root(root, self._size)
        key = ("broadcast", view.dtype.num, view.shape, root, name, algorithm, transport)
        known = self._look_up(key)
        if known is not None:
            return known
        root = arguments.root(root, self._size)
        arguments.check_name(name)
        nbytes = view.nbytes

        def choose() -> Choice:
            return self._planner.choose("broadcast", nbytes, algorithm=algorithm, transport=transport)

        choose()  # refuses what cannot be
        request = Request(
            "broadcast", name, dtypes.name(view.dtype), view.shape, root=root, algorithm=algorithm, transport=transport
        )
        moves = self._size > 1 and view.array.size > 0
        shape, dtype = view.shape, view.dtype
        make_plan = (lambda: self._plans.broadcast(shape, dtype, root, choose())) if moves else None
        entry = CachedRequest(request, self._planner, make_plan)
        entry.dtype, entry.count, entry.nbytes = dtype, view.array.size, view.nbytes
        return self._remember(key, entry)

    def gathering(
        self, collective: str, view: View, name: str | None, algorithm: str | None, transport: str | None
    ) -> CachedRequest:
        """The entry of an allgather or an all-to-all, whose plans depend on rows that are not known yet; raises as
        `reducing`."""
        key = (collective, view.dtype.num, view.shape[1:], name, algorithm, transport)
        known = self._look_up(key)
        if known is not None:
            return known
        arguments.check_name(name)
        self._planner.choose(
            collective, view.nbytes, algorithm=algorithm, transport=transport
        )  # refuses what cannot be
        request = Request(
            collective, name, dtypes.name(view.dtype), view.shape[1:], algorithm=algorithm, transport=transport
        )
        entry = CachedRequest(request, self._planner)
        entry.dtype = view.dtype
        return self._remember(key, entry)

    def meeting(self) -> CachedRequest:
        """The entry of a barrier."""
        return self._known.get(("barrier",)) or self._remember(("barrier",), self.plain("barrier"))

    def release(self) -> None:
        """Drop all entries, and the plans of those that handles still refer to."""
        for entry in self._known.values():
            entry.release()
        self._known.clear()

    def choose_fused(self, entry: CachedRequest, nbytes: int) -> Choice:
        """The choice for a bucket of all-reduces like this one, ``nbytes`` in all."""
        request = entry.request
        assert entry.op is not None
        return self._planner.choose(
            "allreduce",
            nbytes,
            native=self._native is not None and self._native.knows(entry.op, entry.dtype),
            ordered=dtypes.is_complex(entry.dtype) and entry.op is Op.PRODUCT,
            algorithm=request.algorithm,
            transport=request.transport,
        )

    def natively(self, entry: CachedRequest) -> Reduce:
        """The transport's own all-reduce of such numbers."""
        native, op = self._native, entry.op
        assert native is not None and op is not None
        return lambda source, out: native.native_allreduce(source, out, op)

    def plan_for_rows(self, entry: CachedRequest, rows: tuple[int, ...]) -> Plan | None:
        """The plan of an allgather for every rank's rows, or of an all-to-all for the rows of every pair of ranks, by
        sender."""
        return entry.plan_for(rows, lambda: self._plan_rows(entry, rows))

    def _plan_rows(self, entry: CachedRequest, rows: Sequence[int]) -> Plan | None:
        request = entry.request
        row = math.prod(request.shape or ())
        sizes: list[int] = [count * row for count in rows]
        if self._size == 1 or not any(sizes):
            return None
        gathers = request.collective == "allgather"
        nbytes = sum(sizes) * entry.dtype.itemsize // (1 if gathers else self._size)
        choice: Choice = self._planner.choose(
            request.collective, nbytes, algorithm=request.algorithm, transport=request.transport
        )
        return (self._plans.allgather if gathers else self._plans.alltoall)(sizes, entry.dtype, choice)

    def _look_up(self, key: tuple[Any, ...]) -> CachedRequest | None:
        try:
            return self._known.get(key)
        except TypeError:  # an argument that cannot be hashed is wrong, and will be refused with a better message
            return None

    def _remember(self, key: tuple[Any, ...], entry: CachedRequest) -> CachedRequest:
        if len(self._known) >= _MOST_ENTRIES:
            for old in list(itertools.islice(self._known, _MOST_ENTRIES // 2)):
                self._known.pop(old, None)
        self._known[key] = entry
        return entry
