"""What is known about a request after it was made once: its signature, its kernels, and its plan.

A call looks its entry up by its arguments; only the first such call validates, chooses and plans. Plans are made when a call has
its turn, because they may move the scratch memory that a running plan uses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from collectives import arguments, dtypes, reduction
from collectives.arrays import View
from collectives.binder import Plan
from collectives.negotiation import Request
from collectives.planner import Choice, Placement, Planner
from collectives.plans import Plans
from collectives.reduction import Op
from collectives.transport.base import Array

_MOST_ENTRIES = 2048
_MOST_ROWS = 64


@runtime_checkable
class Native(Protocol):
    """A transport that has an all-reduce of its own, for tiny tensors."""

    def knows(self, op: Op, dtype: np.dtype[Any]) -> bool:
        """Whether it reduces these numbers as we do."""

    def native_allreduce(self, source: Array, out: Array, op: Op) -> None:
        """Reduce; an average is only summed."""


class Entry:
    """One request, remembered.

    Attributes:
        request, signature: what must be alike on every rank.
        finish, prescale: the scalings, or None.
        warns: whether kernels may emit floating-point warnings.
        native: reduces by the transport itself, in place of a plan; None otherwise.
    """

    __slots__ = ("_make_plan", "_plan", "_plans", "finish", "native", "prescale", "request", "signature", "warns")

    def __init__(self, request: Request, make_plan: Callable[[], Plan] | None = None) -> None:
        self.request = request
        self.signature = request.signature()
        self.finish: reduction.Scaling | None = None
        self.prescale: reduction.Scaling | None = None
        self.warns = False
        self.native: Callable[[Array, Array], None] | None = None
        self._make_plan = make_plan
        self._plan: Plan | None = None
        self._plans: dict[tuple[int, ...], Plan | None] = {}

    def plan(self) -> Plan | None:
        """The plan, made at the first call that has its turn; None if there is nothing to move."""
        if self._make_plan is not None:
            self._plan = self._make_plan()
            self._make_plan = None
        return self._plan

    def plan_for(self, rows: tuple[int, ...], make_plan: Callable[[], Plan | None]) -> Plan | None:
        """The plan for these rows of every rank, or of every pair of ranks."""
        if rows not in self._plans:
            if len(self._plans) >= _MOST_ROWS:
                self._plans.clear()
            self._plans[rows] = make_plan()
        return self._plans[rows]


class Entries:
    """The entries of one world.

    Args:
        placement: of the ranks.
        planner: chooses.
        plans: makes the plans.
        native: a transport with an all-reduce of its own, or None.
    """

    def __init__(self, placement: Placement, planner: Planner, plans: Plans, native: Native | None) -> None:
        self._size = placement.size
        self._planner = planner
        self._plans = plans
        self._native = native
        self._known: dict[tuple[Any, ...], Entry] = {}

    def reducing(
        self,
        collective: str,
        view: View,
        average: bool,
        op: Op | None,
        name: str | None,
        prescale: float,
        postscale: float,
        algorithm: str | None,
        transport: str | None,
    ) -> Entry:
        """The entry of an all-reduce or a reduce-scatter.

        Raises:
            InvalidArgumentError, InvalidTypeError, TransportError: an argument that no rank can accept, or that cannot be had here.
        """
        if type(prescale) is not float or type(postscale) is not float:
            prescale, postscale = arguments.factor("prescale_factor", prescale), arguments.factor("postscale_factor", postscale)
        key = (collective, view.dtype.num, view.shape, op, average, name, prescale, postscale, algorithm, transport)
        known = self._look_up(key)
        if known is not None:
            return known
        operation = arguments.operation(op, average)
        arguments.check_name(name)
        dtype, native = view.dtype, self._native
        kernel = reduction.kernel(operation, dtype)
        finish = reduction.finish(operation, dtype, self._size, postscale)
        choice = self._planner.choose(
            collective,
            view.nbytes,
            native=native is not None and native.knows(operation, dtype),
            ordered=dtypes.is_complex(dtype) and operation is Op.PRODUCT,
            algorithm=algorithm,
            transport=transport,
        )
        shape = view.shape
        make_plan = self._plans.allreduce if collective == "allreduce" else self._plans.reducescatter
        moves = self._size > 1 and view.array.size > 0
        natively = moves and choice.algorithm == "native"
        entry = Entry(
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
            ),
            (lambda: make_plan(shape, dtype, choice, kernel, finish)) if moves and not natively else None,
        )
        entry.finish = finish
        entry.prescale = reduction.prescale(dtype, prescale)
        entry.warns = reduction.warns(dtype)
        if natively and native is not None:
            entry.native = lambda source, out: native.native_allreduce(source, out, operation)
        return self._remember(key, entry)

    def broadcasting(self, view: View, root: int, name: str | None, algorithm: str | None, transport: str | None) -> Entry:
        """The entry of a broadcast; raises as `reducing`."""
        if type(root) is not int:
            root = arguments.root(root, self._size)
        key = ("broadcast", view.dtype.num, view.shape, root, name, algorithm, transport)
        known = self._look_up(key)
        if known is not None:
            return known
        root = arguments.root(root, self._size)
        arguments.check_name(name)
        choice = self._planner.choose("broadcast", view.nbytes, algorithm=algorithm, transport=transport)
        request = Request("broadcast", name, dtypes.name(view.dtype), view.shape, root=root, algorithm=algorithm, transport=transport)
        moves = self._size > 1 and view.array.size > 0
        shape, dtype = view.shape, view.dtype
        make_plan = (lambda: self._plans.broadcast(shape, dtype, root, choice)) if moves else None
        return self._remember(key, Entry(request, make_plan))

    def gathering(self, collective: str, view: View, name: str | None, algorithm: str | None, transport: str | None) -> Entry:
        """The entry of an allgather or an all-to-all, whose plans depend on rows that are not known yet; raises as `reducing`."""
        key = (collective, view.dtype.num, view.shape[1:], name, algorithm, transport)
        known = self._look_up(key)
        if known is not None:
            return known
        arguments.check_name(name)
        self._planner.choose(collective, view.nbytes, algorithm=algorithm, transport=transport)  # refuses what cannot be
        request = Request(collective, name, dtypes.name(view.dtype), view.shape[1:], algorithm=algorithm, transport=transport)
        return self._remember(key, Entry(request))

    def meeting(self) -> Entry:
        """The entry of a barrier."""
        return self._known.get(("barrier",)) or self._remember(("barrier",), Entry(Request("barrier")))

    def plan_for_rows(self, entry: Entry, view: View, rows: tuple[int, ...]) -> Plan | None:
        """The plan of an allgather for every rank's rows, or of an all-to-all for the rows of every pair of ranks, by sender."""
        return entry.plan_for(rows, lambda: self._plan_rows(entry.request, view, rows))

    def _plan_rows(self, request: Request, view: View, rows: Sequence[int]) -> Plan | None:
        row = int(np.prod(view.shape[1:], dtype=np.int64))
        sizes: list[int] = [count * row for count in rows]
        if self._size == 1 or not any(sizes):
            return None
        gathers = request.collective == "allgather"
        nbytes = sum(sizes) * view.dtype.itemsize // (1 if gathers else self._size)
        choice: Choice = self._planner.choose(request.collective, nbytes, algorithm=request.algorithm, transport=request.transport)
        return (self._plans.allgather if gathers else self._plans.alltoall)(sizes, view.dtype, choice)

    def _look_up(self, key: tuple[Any, ...]) -> Entry | None:
        try:
            return self._known.get(key)
        except TypeError:  # an argument that cannot be hashed is wrong, and will be refused with a better message
            return None

    def _remember(self, key: tuple[Any, ...], entry: Entry) -> Entry:
        if len(self._known) >= _MOST_ENTRIES:
            for old in list(itertools.islice(self._known, _MOST_ENTRIES // 2)):
                self._known.pop(old, None)
        self._known[key] = entry
        return entry
