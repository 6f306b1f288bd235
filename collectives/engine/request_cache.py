"""Requests, cached by the arguments of the calls that made them: a call that comes again validates, chooses and plans
nothing.

Plans are made when the operation is carried out, because they may move the scratch memory that a running plan uses.
"""

from __future__ import annotations

import copy
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np

from collectives.base import dtypes
from collectives.base.options import CallOptions, Options, ReduceOptions, ScaleOptions, complete
from collectives.base.reduce_op import Op
from collectives.engine import arguments
from collectives.engine.inline import Inline
from collectives.engine.negotiation import Request
from collectives.plan.plan import Plan
from collectives.plan.planner import Planner
from collectives.schedules import registry
from collectives.tensors import reduction
from collectives.transport.base import Array

if TYPE_CHECKING:
    from collectives.engine.handles import Handle

Cached = TypeVar("Cached", bound="CachedRequest")
Keywords = Mapping[str, Any]
"""The keywords that a caller has given, without ``process_set`` and ``stream``."""
Reduce = Callable[[Array, Array], None]
"""Reduces a source into an output, on all ranks at once."""

_FACTORS = ("prescale_factor", "postscale_factor")
_WITHOUT_HANDLE = ("allreduce", "reducescatter", "broadcast", "barrier")
"""The collectives that a blocking call can carry out without a handle where nothing moves."""
_MOST_REQUESTS = 2048
_MOST_ROWS = 64


class Binding(Protocol):
    """What a persistent operation adds to its request (`collectives.engine.persistent`)."""

    def handle(self) -> Handle:
        """A handle of one start."""

    def unbind(self, handle: Handle) -> None:
        """Make a handle of one start that of the ordinary operation, to which a rank that has joined contributes."""


@dataclass(slots=True, eq=False, repr=False)
class CachedRequest:
    """One request, with its kernels and its plan.

    Attributes:
        request, signature: must be equal on every rank.
        name: the tensor's.
        finish, prescale: the scalings, or None.
        warns: whether kernels may emit floating-point warnings.
        fuses_with: key that all-reduces must share to be fused; None: not fused.
        kernel, op, dtype, count, nbytes: of the tensor and its reduction.
        moves: whether any bytes move.
        simple: whether a blocking call can carry it out without a handle.
        step: the task that does so, kept from one call to the next.
        locates_tensors: whether the ranks tell each other where the tensors lie.
        native, inline: in place of a plan, valid after `plan`: the transport's own reduction, or how the data travels
            as words of the round.
        binding: of a persistent operation; None: of any other.
        last_step: the step in which it came last, as `Statistics.steps` counts them, if it is named.
    """

    on_device: ClassVar[bool] = False
    """Whether its tensors are on a GPU."""

    request: Request
    _planner: Planner
    _make_plan: Callable[[], Plan | Reduce | Inline | None] | None = None
    _make_mapped: Callable[[], Plan | Reduce | Inline | None] | None = None
    name: str | None = field(init=False)
    signature: int = field(init=False)
    moves: bool = field(init=False)
    simple: bool = field(init=False)
    locates_tensors: bool = field(init=False)
    finish: reduction.Scaling | None = field(default=None, init=False)
    prescale: reduction.Scaling | None = field(default=None, init=False)
    warns: bool = field(default=False, init=False)
    fuses_with: tuple[Any, ...] | None = field(default=None, init=False)
    kernel: reduction.Kernel | None = field(default=None, init=False)
    op: Op | None = field(default=None, init=False)
    dtype: np.dtype[Any] = field(default=np.dtype(np.uint8), init=False)
    count: int = field(default=0, init=False)
    nbytes: int = field(default=0, init=False)
    step: Any = field(default=None, init=False)
    binding: Binding | None = field(default=None, init=False)
    last_step: int = field(default=-1, init=False)
    native: Reduce | None = field(default=None, init=False)
    inline: Inline | None = field(default=None, init=False)
    _epoch: int = field(default=-1, init=False)
    _plan: Plan | None = field(default=None, init=False)
    _mapped: Plan | None = field(default=None, init=False)
    _plans: dict[tuple[int, ...], Plan | None] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.name, self.signature = self.request.name, self.request.signature()
        self.moves, self.locates_tensors = self._make_plan is not None, self._make_mapped is not None
        self.simple = self.moves or self.request.collective in _WITHOUT_HANDLE

    def persistent(
        self, number: int, binding: Binding, make_plan: Callable[[], Plan | None] | None = None
    ) -> CachedRequest:
        """The request of a persistent operation like this one, whose ``number`` is equal on every rank."""
        clone = copy.copy(self)
        clone.request = replace(self.request, persistent=number)
        clone.signature = clone.request.signature()
        clone.binding, clone.step, clone.fuses_with = binding, None, None
        clone._plans, clone._epoch = {}, -1
        clone._make_plan = make_plan or self._make_plan
        return clone

    def plan(self) -> Plan | None:
        """The plan, made when the operation is first carried out and after each change of the planner's settings.

        None if no bytes move, or if the transport reduces by itself.
        """
        if self._epoch != self._planner.epoch:
            self._renew()
        return self._plan

    def mapped_plan(self) -> Plan:
        """The plan for when the tensors of all ranks are mapped; only where `locates_tensors`."""
        if self._epoch != self._planner.epoch:
            self._renew()
        if self._mapped is None:
            assert self._make_mapped is not None
            plan = self._make_mapped()
            assert isinstance(plan, Plan)
            self._mapped = plan
        return self._mapped

    def plan_for(self, rows: tuple[int, ...], make_plan: Callable[[], Plan | None]) -> Plan | None:
        """The plan for the given rows of every rank, or of every pair of ranks."""
        if self._epoch != self._planner.epoch:
            self._renew()
        if rows not in self._plans:
            if len(self._plans) >= _MOST_ROWS:
                self._plans.clear()
            self._plans[rows] = make_plan()
        return self._plans[rows]

    def release(self) -> None:
        """Drop the plans, which refer to the windows."""
        if self.step is not None:
            self.step.release()
        self._make_plan = self._make_mapped = self._plan = self._mapped = self.step = None
        self.native = self.inline = None
        self._plans.clear()

    def _renew(self) -> None:
        self._epoch = self._planner.epoch
        self._plans.clear()
        self._mapped = None
        plan = self._make_plan() if self._make_plan is not None else None
        self._plan = plan if isinstance(plan, Plan) else None
        self.inline = plan if isinstance(plan, Inline) else None
        self.native = plan if not isinstance(plan, Plan | Inline) else None


class TensorSpec:
    """Shape, size and dtype of a tensor, in place of its view where only a request is made."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape, self.dtype, self.size = shape, dtype, math.prod(shape)
        self.nbytes, self.array = self.size * dtype.itemsize, self


class RequestCache(ABC, Generic[Cached]):
    """The requests of one world for tensors in one kind of memory.

    The methods raise InvalidArgumentError, InvalidTypeError, TransportError or TypeError for an argument that no rank
    can accept, or that cannot be served here.

    Attributes:
        get: returns the request of a key, or None. The key of an all-reduce without rarer keywords is its dtype, shape,
            ``average``, ``op`` and ``name``; those of other operations are made below. What would have to be refused
            has no request.
    """

    def __init__(self, size: int, planner: Planner) -> None:
        self._size = size
        self._planner = planner
        self.reproducible = planner.reproducible
        self._known: dict[tuple[Any, ...], Cached] = {}
        self.get: Callable[[tuple[Any, ...]], Cached | None] = self._known.get

    def reducing(
        self,
        collective: str,
        view: Any,
        average: bool | None,
        keywords: Keywords,
        parts: tuple[tuple[int, ...], ...] = (),
    ) -> Cached:
        """The request of an all-reduce or a reduce-scatter; ``parts`` as in `Request`."""
        if keywords and ("prescale_factor" in keywords or "postscale_factor" in keywords):
            keywords = _with_floats(keywords)
        op, name = keywords.get("op"), keywords.get("name")
        key: tuple[Any, ...] = (view.dtype, view.shape, average, op, name)
        if parts or collective != "allreduce" or len(keywords) > ("op" in keywords) + ("name" in keywords):
            key = (*key, collective, parts, *keywords, *keywords.values())
        try:
            cached = self._known.get(key)
        except TypeError:  # an unhashable argument is invalid, and refused with a better message below
            cached = None
        if cached is not None:
            return cached
        if collective == "allreduce":
            options = complete(keywords, ReduceOptions)
        else:  # op is an argument of its own there
            scaling = {keyword: value for keyword, value in keywords.items() if keyword != "op"}
            options = complete(scaling, ScaleOptions)._replace(op=keywords["op"])
        op = arguments.operation(options.op, average)
        arguments.check_name(options.name)
        options = self._with_order(collective, options, op, view.dtype)
        return self._remember(key, self._reduction(collective, view, op, options, parts))

    def broadcasting(self, view: Any, root: int, keywords: Keywords) -> Cached:
        """The request of a broadcast."""
        if type(root) is not int:
            root = arguments.root(root, self._size)
        key = (view.dtype, view.shape, "broadcast", root, *keywords, *keywords.values())
        cached = self._look_up(key)
        if cached is not None:
            return cached
        root = arguments.root(root, self._size)
        return self._remember(key, self._broadcast(view, root, _complete(keywords)))

    def gathering(self, collective: str, view: Any, keywords: Keywords) -> Cached:
        """The request of an allgather or an all-to-all, whose plans depend on rows that are not known yet."""
        key = (collective, view.dtype, view.shape[1:], *keywords, *keywords.values())
        return self._look_up(key) or self._remember(key, self._gathering(collective, view, _complete(keywords)))

    def _with_order(self, collective: str, options: Options, op: Op, dtype: np.dtype[Any]) -> Options:
        """The options with the algorithm that the settings ask of reductions for which the call names none."""
        # An Adasum has an order of its own; a product of complex numbers has none.
        if not self._planner.reproducible or op is Op.ADASUM or (op is Op.PRODUCT and dtypes.is_complex(dtype)):
            return options
        if options.algorithm not in (None, "auto"):
            self._planner.check_order(collective, options.algorithm)
        # Also in place of one that keeps the order: on GPUs it alone rounds as hosts do.
        return options._replace(algorithm=registry.REPRODUCIBLE)

    @abstractmethod
    def _reduction(
        self, collective: str, view: Any, op: Op, options: Options, parts: tuple[tuple[int, ...], ...]
    ) -> Cached: ...

    @abstractmethod
    def _broadcast(self, view: Any, root: int, options: Options) -> Cached: ...

    @abstractmethod
    def _gathering(self, collective: str, view: Any, options: Options) -> Cached: ...

    def _look_up(self, key: tuple[Any, ...]) -> Cached | None:
        try:
            return self._known.get(key)
        except TypeError:  # as in `reducing`
            return None

    def _remember(self, key: tuple[Any, ...], entry: Cached) -> Cached:
        if len(self._known) >= _MOST_REQUESTS:
            for old in list(itertools.islice(self._known, _MOST_REQUESTS // 2)):
                self._known.pop(old, None)
        self._known[key] = entry
        return entry


def _with_floats(keywords: Keywords) -> Keywords:
    """The keywords with the factors as floats: they may be of any type with ``__float__``, mutable ones included."""
    for factor in _FACTORS:
        if factor in keywords and type(keywords[factor]) is not float:
            keywords = {**keywords, factor: arguments.factor(factor, keywords[factor])}
    return keywords


def _complete(keywords: Keywords) -> Options:
    options = complete(keywords, CallOptions)
    arguments.check_name(options.name)
    return options
