"""`run`: a training function that survives the loss of ranks, and takes in new ones.

enter       wait to be admitted, as a newcomer
sync        all ranks get the state of those that have committed the most
func        until it returns, or raises a RecoverableError or a HostsUpdatedInterrupt
renew       the survivors and the newcomers become the default world
restore     the last commit, if func has failed on any rank
on_reset    the program's callbacks, on all ranks; then back to sync
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

import numpy as np

from collectives.base.errors import InvalidArgumentError, NotInitializedError, RecoverableError
from collectives.base.reduce_op import Op
from collectives.elastic import retry
from collectives.elastic.events import renew, tell
from collectives.elastic.state import HostsUpdatedInterrupt, State
from collectives.worlds import generations, runtime

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
_Training = Callable[Concatenate[Any, Parameters], Result]


_PATIENCE_WITH_SETS = 10
"""How many times as long ranks of a process set wait for each other as until a warning, where ranks have changed."""


@overload
def run(func: _Training[Parameters, Result]) -> _Training[Parameters, Result]: ...


@overload
def run(
    *, recover: str = ..., reset_limit: int | None = ...
) -> Callable[[_Training[Parameters, Result]], _Training[Parameters, Result]]: ...


def run(func: Any = None, *, recover: str = "restore", reset_limit: int | None = 3) -> Any:
    """Decorate a training function, whose first argument is its `State`, so that it continues when ranks come and go.

    The function is called again whenever the ranks have changed: after a failure with the state of the last commit,
    after a `HostsUpdatedInterrupt` with the current state. Call `collectives.init` before it. Between the two, call no
    collective: newcomers run that part while the others train.

    Args:
        recover: "restore": return to the last commit. "retry": if ranks die in a step of a `DistributedOptimizer` of
            torch, TensorFlow, JAX or Keras, or in a commit, the others combine the same gradients again, and no step is
            lost; at their next commit the function is called again, with the current state. If ranks die elsewhere, the
            others return to the last commit. Costs a copy of the gradients, and an all-reduce of one byte in each step.
        reset_limit: the number of failures without a commit in between, after which the first of these errors is
            raised; None: no limit.

    Returns:
        A function with the same arguments and result.

    Raises:
        InvalidArgumentError: ``recover`` is neither "restore" nor "retry".
        Errors of the training function that a new start cannot cure, a MismatchError included.

    Example:
        @collectives.elastic.run
        def train(state):
            for state.epoch in range(state.epoch, 10):
                ...
                state.commit()

        train(collectives.elastic.ObjectState(epoch=0))
    """
    if recover not in ("restore", "retry"):
        raise InvalidArgumentError(f'run: recover: expected "restore" or "retry", got {recover!r} [E10]')
    if func is None:
        return functools.partial(run, recover=recover, reset_limit=reset_limit)

    @functools.wraps(func)
    def train(state: State, *args: Any, **kwargs: Any) -> Any:
        changed, failed, failures = generations.enter(), False, _Failures(reset_limit)
        if changed:
            tell("joined")
        while True:
            steps = retry.Steps()
            try:
                if changed:
                    # Not earlier: a rank that was stopped may wake and write into other ranks' tensors until it has
                    # left the former world. Before the callbacks, which may set what a restore would undo.
                    if _anywhere(failed):
                        state.restore()
                    retry.bound_sets(_PATIENCE_WITH_SETS)
                    state.on_reset()
                state.sync()
                with retry.retrying(recover == "retry") as steps:
                    result = func(state, *args, **kwargs)
                    state.settle()
                    if recover == "retry":
                        steps.finish()
            except HostsUpdatedInterrupt as interrupt:
                cause: Exception | str = str(interrupt)
                failed = False
            except Exception as error:
                # Another thread has left the world, in which this one has made a call, to carry out a step again.
                outran = steps.retried and isinstance(error, NotInitializedError)
                if not (steps.renewed or outran or is_recoverable(error)):
                    raise
                failures.add(error, state)
                # A framework's error has little to say of it in its first line.
                cause = error if isinstance(error, RecoverableError) else runtime.world().failure or error
                failed = True
            else:
                generations.finished()
                return result
            if not steps.renewed:
                renew(cause)
            changed = True

    return train


def is_recoverable(error: BaseException) -> bool:
    """Whether a new start of the world can cure an error: a `RecoverableError`, or what a framework has made of one."""
    if isinstance(error, RecoverableError):
        return True
    failure = runtime.world().failure if runtime.is_initialized() else None
    if not isinstance(failure, RecoverableError):
        return False
    cause = error.__cause__
    while cause is not None and not isinstance(cause, RecoverableError):
        cause = cause.__cause__
    # In a graph or a compiled program the text alone is left of what was raised.
    return cause is not None or any(f"{name}: " in str(error) for name in _names(RecoverableError))


def _names(kind: type[BaseException]) -> list[str]:
    """The names of a class of errors and of its subclasses."""
    return [kind.__name__, *(name for subclass in kind.__subclasses__() for name in _names(subclass))]


class _Failures:
    """Counts failures without a commit in between."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._first: Exception | None = None
        self._count = 0
        self._commits = -1

    def add(self, error: Exception, state: State) -> None:
        """Note a failure; raises the first one where there have been too many."""
        if state._commits != self._commits or self._first is None:
            self._first, self._count, self._commits = error, 0, state._commits
        self._count += 1
        if self._limit is not None and self._count > self._limit:
            tell("gave up", f"{self._limit} resets without a commit in between")
            raise self._first


def _anywhere(failed: bool) -> bool:
    """Whether the training has failed on any rank; the others must not keep a newer state."""
    word = np.array([failed], np.int64)
    return bool(runtime.world().allreduce_(word, op=Op.MAX, name="elastic: failed")[0])
