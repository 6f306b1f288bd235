"""How persistent operations are made: every rank calls, the ranks compare what they ask for, and exchange where their
tensors are.

An operation is bound to its tensors if every rank can: NumPy arrays and torch tensors in contiguous host memory,
without compression, a prescale factor or Adasum. Otherwise every start carries out the ordinary operation.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from collectives.base.errors import InvalidArgumentError, TransportError, in_words, of_rank
from collectives.base.reduce_op import Op
from collectives.engine.engine import Engine
from collectives.engine.handles import Handle
from collectives.engine.host_handles import EMPTY
from collectives.engine.persistent import Bound, Rebuilt, place_gathered, words_of
from collectives.engine.request_cache import CachedRequest
from collectives.engine.requests import HandleFactory
from collectives.tensors import arrays
from collectives.tensors.pinned import Pin, can_pin, check_mutable
from collectives.transport.base import Array
from collectives.worlds.operations import Operations
from collectives.worlds.persistent import BoundOperation, PersistentOperation, RebuiltOperation

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from collectives.base.options import CallOptions, ReduceOptions, ScaleOptions

Tensor = TypeVar("Tensor")
Make = Callable[[Any], Handle]
"""Makes the ordinary handle of the keywords that the caller has given."""


class PersistentInit:
    """Makes the persistent operations of one world. The methods take the keywords of the functions of `collectives.api`
    that they are named for, without ``process_set``.

    Args:
        operations, engine, handles: of the world.
    """

    def __init__(self, operations: Operations, engine: Engine, handles: HandleFactory) -> None:
        self._operations = operations
        self._engine = engine
        self._handles = handles
        self._numbers = itertools.count()
        self._bindings: weakref.WeakSet[Bound | Rebuilt] = weakref.WeakSet()

    def close(self) -> None:
        """Drop the plans of all operations, which refer to windows."""
        for binding in list(self._bindings):
            binding.release()

    def allreduce_init(
        self, tensor: Tensor, average: bool | None = None, *, out: Any = None, **options: Unpack[ReduceOptions]
    ) -> PersistentOperation[Tensor]:
        make = self._handles.allreduce
        if out is None or out is tensor:
            return self._made(options, [tensor], lambda keywords: make(keywords, tensor, average, True))

        def out_of_place(keywords: Any) -> Handle:
            handle = make(keywords, tensor, average, False, _output(tensor, out))
            deliver = handle.deliver

            def into_out(completed: Handle) -> Any:
                deliver(completed)
                return out

            handle.deliver = into_out
            return handle

        return self._made(options, [tensor, out], out_of_place)

    def grouped_allreduce_init(
        self, tensors: Sequence[Tensor], average: bool | None = None, **options: Unpack[ReduceOptions]
    ) -> PersistentOperation[list[Tensor]]:
        return self._grouped(self._handles.allreduce, options, tensors, average, True)

    def reducescatter_init(
        self, tensor: Tensor, op: Op | None = Op.AVERAGE, **options: Unpack[ScaleOptions]
    ) -> PersistentOperation[Tensor]:
        make = self._handles.reducescatter
        return self._made(options, [tensor], lambda keywords: make(keywords, tensor, op))

    def grouped_reducescatter_init(
        self, tensors: Sequence[Tensor], op: Op | None = Op.AVERAGE, **options: Unpack[ScaleOptions]
    ) -> PersistentOperation[list[Tensor]]:
        return self._grouped(self._handles.reducescatter, options, tensors, op)

    def broadcast_init(
        self, tensor: Tensor, root_rank: int, **options: Unpack[CallOptions]
    ) -> PersistentOperation[Tensor]:
        make = self._handles.broadcast
        return self._made(options, [tensor], lambda keywords: make(keywords, tensor, root_rank, True))

    def grouped_broadcast_init(
        self, tensors: Sequence[Tensor], root_rank: int, **options: Unpack[CallOptions]
    ) -> PersistentOperation[list[Tensor]]:
        return self._grouped(self._handles.broadcast, options, tensors, root_rank, True)

    def allgather_init(self, tensor: Tensor, **options: Unpack[CallOptions]) -> PersistentOperation[Tensor]:
        make = self._handles.allgather
        return self._made(options, [tensor], lambda keywords: make(keywords, tensor))

    def grouped_allgather_init(
        self, tensors: Sequence[Tensor], **options: Unpack[CallOptions]
    ) -> PersistentOperation[list[Tensor]]:
        return self._grouped(self._handles.allgather, options, tensors)

    def alltoall_init(
        self, tensor: Any, splits: Any = None, **options: Unpack[CallOptions]
    ) -> PersistentOperation[Any]:
        make = self._handles.alltoall
        return self._made(options, [tensor], lambda keywords: make(keywords, tensor, splits))

    def _grouped(
        self, make: Callable[..., Handle], options: CallOptions, tensors: Sequence[Any], *further: Any
    ) -> PersistentOperation[list[Any]]:
        kept = list(tensors) if isinstance(tensors, (list, tuple)) else tensors
        return self._made(options, kept, lambda keywords: self._handles.grouped(keywords, make, kept, *further))

    def _made(self, options: CallOptions, tensors: Any, make: Make) -> PersistentOperation[Any]:
        """The operation of the handles that ``make`` makes; every rank calls it.

        Args:
            options: the keywords that the caller has given.
            tensors: all that the operation reads or writes and that the program knows.
            make: of the ordinary operation.
        """

        def meet(keywords: CallOptions) -> Handle:
            for tensor in tensors if isinstance(tensors, (list, tuple)) else ():
                check_mutable(tensor)
            template = make(keywords)
            request = template.entry.request
            entry = CachedRequest(
                replace(request, collective=f"{request.collective}_init"), self._engine.context.planner
            )
            return Handle(entry, EMPTY, EMPTY, lambda _: self._agree(template, options, tensors, make))

        operation: PersistentOperation[Any] = self._operations.carry_out(meet, options)
        return operation

    def _agree(
        self, template: Handle, options: CallOptions, tensors: Sequence[Any], make: Make
    ) -> PersistentOperation[Any]:
        """Bind the operation, if all ranks can; all ranks are here, between the same two rounds."""
        number = next(self._numbers)
        parts = template.members or (template,)
        own_answer = _can_bind(template, tensors, options), [tuple(part.rows) for part in parts]
        answers = self._exchange(own_answer)
        if not all(can for can, _ in answers):
            return self._rebuilt(template, number, options, make)
        context, problem = self._engine.context, ""
        rows: list[tuple[int, ...]] = [()] * len(parts)
        result: Any = None
        try:
            for at, part in enumerate(parts):
                if part.rows:
                    rows[at] = place_gathered(context, part, [its_rows[at] for _, its_rows in answers])
            results = [part.deliver(part) for part in parts]
            result = results if template.members else results[0]
        except Exception as error:
            problem = in_words(self._name, error)
        stated = self._exchange((problem, [] if problem else [words_of(context, part) for part in parts]))
        problems = [of_rank(self._operations.ranks[peer], text) for peer, (text, _) in enumerate(stated) if text]
        if problems:
            raise TransportError(
                f"rank {self._name}: {template.entry.request.describe()} cannot be made persistent: {problems[0]}"
            )
        words = [[rank_words[at] for _, rank_words in stated] for at in range(len(parts))]
        binding = Bound(context, template, number, result, words, rows, lambda: self._engine.threshold)
        self._bindings.add(binding)
        alone = self._run_alone(binding) if self._operations.size == 1 else None
        return BoundOperation(self._operations, self._engine, binding, Pin(tensors), result, alone)

    def _rebuilt(self, template: Handle, number: int, options: CallOptions, make: Make) -> PersistentOperation[Any]:
        binding = Rebuilt(template, number)
        self._bindings.add(binding)
        request, rows = template.entry.request, [tuple(part.rows) for part in template.members or (template,)]

        def again(keywords: Any) -> Handle:
            handle = make(keywords)
            if handle.entry.request != request or [tuple(part.rows) for part in handle.members or (handle,)] != rows:
                raise InvalidArgumentError(
                    f"{binding.entry.request.describe()} cannot be started: its tensors are now those of "
                    f"{handle.entry.request.describe()}; free it and make it anew, on every rank"
                )
            return binding.adopt(handle)

        return RebuiltOperation(self._operations, binding, again, options)

    def _run_alone(self, binding: Bound) -> Callable[..., None]:
        check_state, scale = self._operations.check_state, self._handles.host.scale

        def run(*_: Any) -> None:
            check_state()
            binding.run_alone(scale)

        return run

    def _exchange(self, value: Any) -> Sequence[Any]:
        return self._engine.context.control.exchange(value) if self._operations.size > 1 else [value]

    @property
    def _name(self) -> int:
        return self._operations.ranks[self._operations.rank]


def _can_bind(template: Handle, tensors: Sequence[Any], options: CallOptions) -> bool:
    """Whether this rank's part of an operation can be bound to its tensors."""
    parts = template.members or (template,)
    if not tensors or options.get("compression") is not None or not all(can_pin(tensor) for tensor in tensors):
        return False
    return all(
        not part.entry.on_device
        and part.entry.prescale is None
        and part.entry.op is not Op.ADASUM
        and not _view_of(part).copied
        for part in parts
    )


def _view_of(part: Handle) -> arrays.View:
    """The view of the tensor of a handle that was not submitted."""
    view: arrays.View = part.keep[0] if isinstance(part.keep, tuple) else part.keep
    return view


def _output(tensor: Any, out: Any) -> Array:
    """The memory of ``out`` as an array for the result of a tensor's all-reduce."""
    expected, actual = arrays.view(tensor), arrays.view(out, argument="out", writable=True)
    if not (isinstance(expected, arrays.View) and isinstance(actual, arrays.View)):
        raise InvalidArgumentError("out: expected None for a tensor on a GPU, whose all-reduce is persistent in place")
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype) or actual.copied:
        raise InvalidArgumentError(
            f"out: expected contiguous memory of shape {expected.shape} and dtype {expected.dtype}, got {actual}"
        )
    if np.may_share_memory(actual.array, expected.array):
        raise InvalidArgumentError("out: shares memory with the tensor; leave it out to reduce the tensor in place")
    return actual.array.reshape(actual.shape)
