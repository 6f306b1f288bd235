"""How persistent operations are made: every rank calls, the ranks compare what they ask for, and exchange where their
tensors are.

An operation is bound to its tensors if every rank can: NumPy arrays and torch tensors in contiguous host memory,
without compression, a prescale factor or Adasum. Otherwise every start carries out the ordinary operation.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import GenericAlias, SimpleNamespace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, get_type_hints

import numpy as np

from collectives.base.errors import InvalidArgumentError, TransportError, in_words, of_rank
from collectives.base.reduce_op import Op
from collectives.engine.engine import Engine
from collectives.engine.handles import EMPTY, Handle
from collectives.engine.persistent import Bound, Rebuilt, place_gathered, words_of
from collectives.engine.request_cache import CachedRequest
from collectives.engine.requests import HandleFactory
from collectives.tensors import arrays
from collectives.tensors.pinned import Pin, can_pin, check_mutable
from collectives.transport.base import Array
from collectives.worlds import descriptions as describe
from collectives.worlds.operations import Operations
from collectives.worlds.persistent import BoundOperation, PersistentOperation, RebuiltOperation
from collectives.worlds.variants import documented, example, like

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from collectives.base.options import CallOptions, ReduceOptions

Tensor = TypeVar("Tensor")
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def persistent(
    describe: Callable[Concatenate[Any, Parameters], Handle[Result]],
) -> Callable[Concatenate[Any, Parameters], PersistentOperation[Result]]:
    """The method of `PersistentInit` that makes the described operation, of a tensor or of several, persistent."""
    ordinary: Callable[..., Handle] = describe
    first = list(inspect.signature(describe).parameters)[1]

    def call(self: PersistentInit, *arguments: Any, **options: Any) -> Any:
        tensor, *further = arguments or (options.pop(first, None),)
        if first == "tensors" and isinstance(tensor, (list, tuple)):
            tensor = list(tensor)

        def make(handles: HandleFactory, **keywords: Any) -> Handle:
            return ordinary(handles, tensor, *further, **keywords)

        return self.made(options, tensor if first == "tensors" else [tensor], make)  # type: ignore[arg-type]

    returns = SimpleNamespace(__annotations__={"return": describe.__annotations__["return"]})
    (result,) = get_type_hints(returns, ordinary.__globals__)["return"].__args__
    name = describe.__name__.rstrip("_")
    method: Callable[..., Any] = like(describe, call, f"{name}_init", GenericAlias(PersistentOperation, (result,)))
    single = name.removeprefix("grouped_")
    method.__doc__ = f"`{single}_init` of several tensors that are carried out, and complete, together."
    method.__doc__ += example(describe, method, "()")
    return method


class PersistentInit:
    """Makes the persistent operations of one world. The methods take the keywords of the functions of `collectives.api`
    that they are named for, without ``process_set``.
    """

    def __init__(self, operations: Operations, engine: Engine, handles: HandleFactory) -> None:
        self._operations = operations
        self._engine = engine
        self._handles = handles
        self._numbers = itertools.count()
        self._bindings: weakref.WeakSet[Bound | Rebuilt] = weakref.WeakSet()

    def _close(self) -> None:
        """Drop the plans of all operations, which refer to windows."""
        for binding in list(self._bindings):
            binding.release()

    def allreduce_init(
        self, tensor: Tensor, average: bool | None = None, *, out: Any = None, **options: Unpack[ReduceOptions]
    ) -> PersistentOperation[Tensor]:
        """Make an `allreduce` that is started any number of times, in place: the result replaces the tensor's elements.

        Every rank makes it with the same call; a start then costs the ranks one word each. It has ``start()``,
        ``wait()`` and a call that does both, and keeps the tensor until ``free()``. Every start counts like a call of
        `allreduce_`: starts and other operations may be mixed in any way, in the same order on every rank unless they
        have names.

        Args:
            tensor: writable; most is gained with contiguous NumPy arrays and torch tensors on the CPU. On a GPU, in any
                other layout, with ``compression``, ``prescale_factor`` or Adasum every start works as the ordinary
                operation does. Its memory, shape and layout must remain as they are.
            out: contiguous memory for the result, of the tensor's shape and dtype, and apart from it; the tensor is
                left unchanged then.
            name: of every start.

        Raises:
            InvalidTypeError: a tensor that never changes, as of JAX and TensorFlow.
            MismatchError: the ranks' calls differ, or a rank has joined.

        Example:
            >>> gradient = np.zeros(2)
            >>> with hvd.allreduce_init(gradient) as operation:
            ...     for step in range(3):
            ...         gradient[:] = hvd.rank(), step
            ...         operation.start()
            ...         mean = operation.wait()
            >>> mean
            array([0.5, 2. ])
        """
        if out is None or out is tensor:

            def in_place(handles: HandleFactory, **keywords: Any) -> Handle:
                return handles.allreduce(keywords, tensor, average, True)

            return self.made(options, [tensor], in_place)

        def out_of_place(handles: HandleFactory, **keywords: Any) -> Handle:
            handle = handles.allreduce(keywords, tensor, average, False, _output(tensor, out))
            deliver = handle.deliver

            def into_out(completed: Handle) -> Any:
                deliver(completed)
                return out

            handle.deliver = into_out
            return handle

        return self.made(options, [tensor, out], out_of_place)

    grouped_allreduce_init = persistent(describe.grouped_allreduce_)
    reducescatter_init = documented(
        """Make a `reducescatter` that is started any number of times, as `allreduce_init` does.

        Its result is made once: every start returns the same tensor, with new elements. (A new one, where a start works
        as the ordinary operation does.)
        """
    )(persistent(describe.reducescatter))
    grouped_reducescatter_init = persistent(describe.grouped_reducescatter)
    broadcast_init = documented("Make a `broadcast_` that is started any number of times, as `allreduce_init` does.")(
        persistent(describe.broadcast_)
    )
    grouped_broadcast_init = persistent(describe.grouped_broadcast_)
    allgather_init = documented(
        """Make an `allgather` that is started any number of times, as `allreduce_init` does.

        The ranks agree on their rows when it is made. Its result is made once, as that of `reducescatter_init`. It
        cannot be started while a rank has joined.
        """
    )(persistent(describe.allgather))
    grouped_allgather_init = persistent(describe.grouped_allgather)
    alltoall_init = documented(
        """Make an `alltoall` that is started any number of times, as `allgather_init` does.

        With ``splits`` every start returns the rows received and their numbers, as `alltoall` does.
        """
    )(persistent(describe.alltoall))

    def made(self, options: CallOptions, tensors: Any, make: Callable[..., Handle]) -> PersistentOperation[Any]:
        """The operation of the handles that ``make`` makes; every rank calls it.

        Args:
            tensors: all that the operation reads or writes and that the program knows.
            make: makes the ordinary handle, of the maker of handles and the keywords.
        """

        def meet(handles: HandleFactory, **keywords: Any) -> Handle:
            for tensor in tensors if isinstance(tensors, (list, tuple)) else ():
                check_mutable(tensor)
            template = make(handles, **keywords)
            request = template.entry.request
            entry = CachedRequest(
                replace(request, collective=f"{request.collective}_init"), self._engine.context.planner
            )
            return Handle(entry, EMPTY, EMPTY, lambda _: self._agree(template, options, tensors, make))

        operation: PersistentOperation[Any] = self._operations.carry_out(meet, options)
        return operation

    def _agree(
        self, template: Handle, options: CallOptions, tensors: Sequence[Any], make: Callable[..., Handle]
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
                f"rank {self._name}: {template.entry.request.describe()} cannot be made persistent: {problems[0]} [W39]"
            )
        words = [[rank_words[at] for _, rank_words in stated] for at in range(len(parts))]
        binding = Bound(context, template, number, result, words, rows, lambda: self._engine.threshold)
        self._bindings.add(binding)
        alone = self._run_alone(binding) if self._operations.size == 1 else None
        return BoundOperation(self._operations, self._engine, binding, Pin(tensors), result, alone)

    def _rebuilt(
        self, template: Handle, number: int, options: CallOptions, make: Callable[..., Handle]
    ) -> PersistentOperation[Any]:
        binding = Rebuilt(template, number)
        self._bindings.add(binding)
        request, rows = template.entry.request, [tuple(part.rows) for part in template.members or (template,)]

        def again(handles: HandleFactory, **keywords: Any) -> Handle:
            handle = make(handles, **keywords)
            if handle.entry.request != request or [tuple(part.rows) for part in handle.members or (handle,)] != rows:
                raise InvalidArgumentError(
                    f"{binding.entry.request.describe()} cannot be started: its tensors are now those of "
                    f"{handle.entry.request.describe()}; free it and create a new one on every rank [W40]"
                )
            handle.entry = binding.entry
            return handle

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
    rarer = options.get("compression") is not None or options.get("parts") is not None
    if not tensors or rarer or not all(can_pin(tensor) for tensor in tensors):
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
        raise InvalidArgumentError(
            "out: expected None for a tensor on a GPU: its persistent all-reduce works in place [W41]"
        )
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype) or actual.copied:
        raise InvalidArgumentError(
            f"out: expected contiguous memory of shape {expected.shape} and dtype {expected.dtype}, got {actual} [W42]"
        )
    if np.may_share_memory(actual.array, expected.array):
        raise InvalidArgumentError(
            "out: overlaps the tensor in memory; leave out the argument to reduce the tensor in place [W43]"
        )
    return actual.array.reshape(actual.shape)
