"""Persistent operations as the program sees them: made once (`collectives.worlds.persistent_init`), started any number
of times."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from collectives.base.errors import InvalidArgumentError
from collectives.engine.engine import Engine
from collectives.engine.handles import Handle
from collectives.engine.persistent import Bound, Rebuilt
from collectives.engine.request_cache import CachedRequest
from collectives.tensors.pinned import Pin
from collectives.worlds.operations import Operations

if TYPE_CHECKING:
    from typing_extensions import Self

Result = TypeVar("Result")


class PersistentOperation(ABC, Generic[Result]):
    """An operation on tensors that stay where they are; made by `collectives.allreduce_init` and the like.

        operation = collectives.allreduce_init(gradient)
        for _ in range(steps):
            compute(gradient)
            operation()              # or: operation.start(), something else, operation.wait()
        operation.free()

    It holds its tensors until it is freed. As a context manager it is freed at the end of the block.
    """

    __slots__ = ("__weakref__", "_called", "_entry", "_freed", "_operations", "_started")

    def __init__(self, operations: Operations, entry: CachedRequest) -> None:
        self._operations = operations
        self._entry = entry
        self._freed = self._called = False
        self._started: Handle[Result] | None = None

    @abstractmethod
    def __call__(self) -> Result:
        """Start the operation and return its result when it is done.

        Raises:
            InvalidArgumentError: it is started already, or freed, or a tensor has other memory or another shape than
                when it was made. The other ranks get a MismatchError, and no tensor is touched.
            MismatchError: another rank has started something else; no tensor was touched.
            RankFailedError, CollectiveTimeoutError: as from any operation.
        """

    def start(self) -> None:
        """Start the operation and return at once; its tensors may not be used until `wait` has returned.

        Raises:
            InvalidArgumentError: as from a call; or an operation in flight uses the same memory.
        """
        if self._freed or self._started is not None or self._called:
            raise self._refusal()
        self._started = self._begin()

    def poll(self) -> bool:
        """Whether the operation that was started is complete, so that `wait` returns at once."""
        return self._in_flight("polled").poll()

    def wait(self, timeout: float | None = None) -> Result:
        """The result of the operation that was started, when it is done.

        Args:
            timeout: seconds to wait at most; None: as long as the other ranks are alive, and `COLLECTIVES_TIMEOUT`.

        Raises:
            InvalidArgumentError: it was not started.
            CollectiveTimeoutError: ``timeout`` has passed; the operation goes on, and `wait` may be called again.
            MismatchError, RankFailedError: as from a call. After a mismatch it may be started again.
        """
        handle = self._started or self._in_flight("waited for")
        try:
            return handle.wait(timeout)
        finally:
            if handle.done and self._started is handle:  # another thread may have waited too, and started it again
                self._started = None
                if self._freed:
                    self._let_go()

    def free(self) -> None:
        """Let go of the tensors. The operation cannot be started any more; freeing it again does nothing.

        Raises:
            InvalidArgumentError: the operation is in flight; wait for it first.
        """
        if self._in_use:
            raise InvalidArgumentError(f"{self._says()} is in flight and cannot be freed; wait for it first [W33]")
        if not self._freed:
            self._freed = True
            self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if kind is None and self._started is not None:
                self.wait()
        finally:
            freed, self._freed = self._freed, True
            if not freed and not self._in_use:  # otherwise it goes on, and `wait` lets go of its tensors
                self._let_go()

    def __reduce__(self) -> str:
        raise TypeError("a persistent operation cannot be copied or pickled: it is bound to its tensors [W34]")

    def __del__(self) -> None:
        # The engine keeps the plans of operations that it has carried out, and they keep the tensors.
        if not self._freed and self._started is None:
            self._let_go()

    @abstractmethod
    def _begin(self) -> Handle[Result]:
        """Submit a handle of this operation."""

    @abstractmethod
    def _let_go(self) -> None:
        """Drop tensors and plans."""

    @property
    def _in_use(self) -> bool:
        """Whether it is started, or another thread is in a call of it."""
        return self._started is not None or self._called

    def _in_flight(self, what: str) -> Handle[Result]:
        if self._started is None:
            raise InvalidArgumentError(f"{self._says()} was {what} but not started; call start() first [W35]")
        return self._started

    def _refusal(self) -> Exception:
        """Tell the other ranks that this one cannot start. Returns the error to raise."""
        if self._freed:
            why = "was freed and cannot be started; create a new one on every rank [W36]"
        elif self._in_use:
            why = "is already in flight and cannot be started; wait for it first [W37]"
        else:
            why = (
                "cannot be started: the memory or the layout of a tensor has changed since the operation was created "
                "(torch's set_ and .data do that); free it and create a new one on every rank [W38]"
            )
        error = InvalidArgumentError(f"{self._title} {why}")
        return self._operations.refused(error, self._entry.name)

    @property
    def _title(self) -> str:
        request = self._entry.request
        if not request.members:
            return f"persistent {request.describe()}"
        name = f" {request.name!r}" if request.name is not None else ""
        return (
            f"persistent {request.collective}{name} of {len(request.members)} tensors, persistent={request.persistent}"
        )

    def _says(self) -> str:
        return f"rank {self._operations.ranks[self._operations.rank]}: {self._title}"

    def __repr__(self) -> str:
        state = "freed" if self._freed else "started" if self._started is not None else "ready"
        return f"<PersistentOperation {self._title.removeprefix('persistent ')}: {state}>"


class BoundOperation(PersistentOperation[Result]):
    """On memory that every rank has bound: a call is a round of the engine, and nothing else.

    Args:
        pin: holds its tensors.
        alone: carries it out in a world of one rank, with the arguments of `Engine.run`; None in any other.
    """

    __slots__ = ("_alone", "_binding", "_engine", "_moved", "_out", "_pin", "_result", "_run", "_source")

    def __init__(
        self,
        operations: Operations,
        engine: Engine,
        binding: Bound,
        pin: Pin,
        result: Any,
        alone: Callable[..., None] | None,
    ) -> None:
        super().__init__(operations, binding.entry)
        self._engine = engine
        self._binding = binding
        self._pin: Pin | None = pin
        self._moved = pin.moved
        self._source, self._out, self._result = binding.source, binding.out, result
        self._alone = alone
        self._run: Callable[..., Handle[Result] | None] = alone or engine.run

    def __call__(self) -> Result:
        moved = self._moved
        if self._started is not None or self._called or (moved is not None and moved()):
            raise self._refusal()
        self._called = True
        try:
            handle = self._run(self._entry, self._source, self._out)
            result: Result = self._result if handle is None else handle.wait()
            return result
        finally:
            self._called = False

    def _begin(self) -> Handle[Result]:
        if self._moved is not None and self._moved():
            raise self._refusal()
        handle: Handle[Result] = self._binding.handle()
        if self._alone is not None:
            self._alone(self._entry, self._source, self._out)
            handle.finish()
            return handle
        handle.locate()
        return self._engine.submit(handle)

    def _let_go(self) -> None:
        self._binding.free()
        self._moved = _freed
        self._source = self._out = self._result = self._pin = None


class RebuiltOperation(PersistentOperation[Result]):
    """On tensors that cannot be bound: every start is the ordinary operation, under this one's number.

    Args:
        make: makes the ordinary handle, of this operation's entry, and raises if the tensors have changed.
        options: the keywords that the operation was made with.
    """

    __slots__ = ("_binding", "_make", "_options")

    def __init__(
        self, operations: Operations, binding: Rebuilt, make: Callable[..., Handle[Result]], options: Any
    ) -> None:
        super().__init__(operations, binding.entry)
        self._binding = binding
        self._make = make
        self._options = options

    def __call__(self) -> Result:
        if self._freed or self._in_use:
            raise self._refusal()
        self._called = True
        try:
            result: Result = self._operations.carry_out(self._make, self._options)
            return result
        finally:
            self._called = False

    def _begin(self) -> Handle[Result]:
        return self._operations.begin(self._make, self._options)

    def _let_go(self) -> None:
        self._binding.release()
        self._make = _made_no_more


def _freed() -> bool:
    """Stands for the check of an operation that was freed, which may not be started."""
    return True


def _made_no_more(handles: Any, **options: Any) -> Handle[Any]:
    raise AssertionError("an operation that was freed is refused before this")
