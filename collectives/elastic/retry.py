"""Collectives in which no work is lost: ranks that survive a death carry out the same ones again, in the smaller world.

What ranks do together, such as combining the gradients of a step, is one call of `Steps.carry_out`, whose last part is
a vote: a collective of all ranks. Who leaves that knows that every rank has done all before it. So of the survivors of
a death, who tell each other how many steps of each name they have left,

    some have left this one    the others have its results too, and go on
    none has                   all carry it out again, with the same values, which the caller has kept

No rank has applied anything of a step that is carried out again. If a survivor is elsewhere in its program, or the
ranks are too few without newcomers, the error is raised, and `run` returns to the last commit.

The survivors' programs go on with what they have derived from the former ranks, such as a share of the data. Their next
commit interrupts them, so that they begin anew with the ranks that there are.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import numpy as np

from collectives.base.errors import (
    CollectivesError,
    CollectiveTimeoutError,
    NotInitializedError,
    RecoverableError,
    in_words,
)
from collectives.base.exclusion import Lock, exclusively
from collectives.base.options import ProcessSetLike
from collectives.base.reduce_op import Op
from collectives.base.wake_up import WakeUp
from collectives.elastic.events import renew
from collectives.worlds import generations, runtime
from collectives.worlds.world import World

_FINISH = "elastic: finish"
_ENDED_WITHIN = 60.0
"""Seconds in which the steps of other threads end whose world has failed."""
_SET_WITHIN = 60.0
"""Seconds that ranks of a process set wait for each other where ranks have changed, if no warning is configured."""
_FINISHED_WITHIN = 60.0
"""Seconds that a rank whose function has returned waits for the others."""
Result = TypeVar("Result")


class _Attempt:
    """To carry out a step in one world, with its members."""

    world: World
    members: tuple[int, ...] = ()


class Steps:
    """The steps of one training function. Those of different names may be carried out by several threads.

    Attributes:
        renewed: the function has been left after the generation had ended: it need not end again.
        retried: a step was carried out in a later generation than that in which the function began.
    """

    def __init__(self) -> None:
        self.renewed = self.retried = False
        self._left: Counter[str] = Counter()
        self._contributed: dict[str, tuple[int, ...]] = {}
        """By name: the members whose values are in the newest result."""
        self._left_elsewhere: Counter[str] = Counter()
        """The most steps that any rank had left when the present generation began."""
        self._changing: Lock = threading.RLock()
        """Held while the generation changes, and by a step that begins, until it is in `_active`."""
        self._active: set[_Attempt] = set()
        self._ended = WakeUp()
        """Set when an attempt ends, for the thread that holds `_changing`."""
        self._over = False

    @property
    def contributors(self) -> tuple[int, ...]:
        """The members whose values are in the newest results; empty before the first step. At the same point of their
        programs it is alike on all ranks, also on those that have not noticed a death yet."""
        # Members only become fewer, and another thread may have noted a later step.
        return min(self._contributed.copy().values(), key=len, default=())

    def carry_out(
        self,
        name: str,
        step: Callable[[World], object],
        restore: Callable[[], object] = lambda: None,
        *,
        votes: bool = True,
    ) -> bool:
        """Call ``step``, and vote; again, where ranks die.

        Args:
            name: alike on all ranks.
            step: gets the world; another thread may leave the training function, and begin the next world, meanwhile.
            restore: makes this rank's values what they were before the step; called before it is repeated.
            votes: False: ``step`` is itself one collective of all ranks, and ends as a vote does.

        Returns:
            Whether this rank has left the last collective, too: not if it failed here, and other ranks had left it.

        Raises:
            RecoverableError: ranks have died, and the others cannot carry out the step again; or as `check`.
        """
        while True:
            attempt = _Attempt()
            try:
                failure = self._try(attempt, name, step, votes)
            finally:
                self._end(attempt)  # once more: an interrupt may have come just before
            if failure is None:
                return True
            exclusively(self._changing, self._renew, attempt.world, failure)
            if self._left_elsewhere[name] > self._left[name]:
                self._count(name, attempt.members)
                return False
            restore()

    def reduce(self, name: str, reduce: Callable[[World], Result]) -> Result:
        """Call a reduction that leaves its tensors as they are, and return its result."""
        results: list[Result] = []

        def step(world: World) -> None:
            results[:] = [reduce(world)]

        self.carry_out(name, step)
        return results[0]

    def check(self, name: str) -> None:
        """Raise a `RecoverableError` if calls of the training function, such as ``name``, would meet those of the next
        one on other ranks."""
        if self._over:
            raise RecoverableError(
                f"rank {runtime.world().rank}: {name}: the training function that started it has ended; read its "
                "result before the function returns, or keep the result in the state [E35]"
            )
        if self.renewed:
            raise RecoverableError(
                f"rank {runtime.world().rank}: {name} was not executed: ranks have died, and the training function "
                "starts again [E36]"
            )

    def close(self) -> None:
        """End with the training function: steps that other threads are in fail, and are not carried out again."""
        exclusively(self._changing, setattr, self, "_over", True)

    def finish(self) -> None:
        """End the function on all ranks: one that has left the last step tells others so, if they fail in it. Who does
        not come within a minute goes on without this rank."""

        def wait_for_others(world: World) -> None:
            flag = np.zeros(1, np.uint8)
            with suppress(CollectiveTimeoutError):
                world.allreduce_async_(flag, op=Op.MAX, name=_FINISH).wait(_FINISHED_WITHIN)

        self.carry_out(_FINISH, wait_for_others, votes=False)

    def _try(
        self, attempt: _Attempt, name: str, step: Callable[[World], object], votes: bool
    ) -> RecoverableError | NotInitializedError | None:
        """Carry out a step in the present world, and count it. Returns why that failed, where ranks may have died."""
        try:
            exclusively(self._changing, self._begin, attempt, name)
            try:
                step(attempt.world)
                if votes:
                    vote(attempt.world, name)
            except (RecoverableError, NotInitializedError) as error:
                return error
            self._count(name, attempt.members)
            return None
        finally:
            self._end(attempt)

    def _begin(self, attempt: _Attempt, name: str) -> None:
        """Set the world of an attempt, which does not change before its end."""
        self.check(name)
        attempt.world, job = runtime.world(), generations.job()
        attempt.members = job.members if job is not None else ()
        self._active.add(attempt)

    def _end(self, attempt: _Attempt) -> None:
        self._active.discard(attempt)
        self._ended.set()

    def _count(self, name: str, members: tuple[int, ...]) -> None:
        """Note that a step is complete, with these members' values."""
        self._contributed[name] = members
        self._left[name] += 1

    def _renew(self, ended: World, error: CollectivesError) -> None:
        """Leave a world for the next one, unless another thread has done so."""
        if self.renewed or self._over or not (isinstance(error, RecoverableError) or ended.failure is not None):
            raise error
        if runtime.default.world is not ended:
            return
        if ended.failure is None:
            ended.fail(in_words(ended.rank, error))  # the steps of other threads end, too
        end = time.monotonic() + _ENDED_WITHIN
        while self._active:
            self._ended.wait(max(0.0, end - time.monotonic()))
            if time.monotonic() > end:
                raise error
        records = renew(error, dict(self._left))
        if None in records:
            self.renewed = True
            raise error
        left_elsewhere: Counter[str] = Counter()
        for each in records:
            left_elsewhere |= Counter(each)
        self._left_elsewhere = left_elsewhere
        self.retried = True
        bound_sets()


def steps(
    process_set: ProcessSetLike | int | None = None, op: Op | None = Op.AVERAGE, scale: float = 1.0
) -> Steps | None:
    """Those of the training function that runs; None where it returns to the last commit instead, where not all ranks
    take part, who would not vote, or where the values are not `right_for_fewer` ranks."""
    if _current is None or not right_for_fewer(op, scale):
        return None
    return _current if runtime.world_of(process_set) is runtime.default.world else None


def bound_sets(patience: int = 1) -> None:
    """Have collectives of process sets that not all their ranks come to end with an error: where ranks have died, a
    branch on `rank()` takes other members of a set than before, and each part waits in another world.

    Args:
        patience: in times of what a warning takes.
    """
    world = runtime.world()
    world.bound_waits_of_sets(
        patience * (world.config.stall_warning or _SET_WITHIN),
        "Ranks have died or come, and the others have new numbers, in the middle of the training function where steps "
        f"are retried: this is rank {world.rank} of {world.size} now. A branch on rank() takes other members of a "
        "process set than before: branch on ProcessSet.included(), or commit in each step.",
    )


def right_for_fewer(op: Op | None, scale: float) -> bool:
    """Whether fewer ranks may reduce the same values: who sums divides by the number of ranks elsewhere in the program.

    Args:
        scale: the product of the factors by which values and result are multiplied.
    """
    return op is not Op.SUM and math.isclose(scale, 1.0)


def check(name: str) -> None:
    """`Steps.check` of the training function that runs, if there is one."""
    if _current is not None:
        _current.check(name)


def contributors() -> tuple[int, ...]:
    """The members whose values are in what the training function has combined last, or, before its first step, those of
    the present generation; empty where there is none."""
    if _current is not None and _current.contributors:
        return _current.contributors
    job = generations.job()
    return job.members if job is not None else ()


def vote(world: World, name: str) -> None:
    """A collective of all ranks, with which a step ends."""
    world.allreduce_(np.zeros(1, np.uint8), op=Op.MAX, name=f"{name}: vote")


_current: Steps | None = None


@contextmanager
def retrying(again: bool) -> Iterator[Steps]:
    """Have the steps of the body carried out again where ranks die, or not."""
    global _current
    steps = Steps()
    _current = steps if again else None
    try:
        yield steps
    finally:
        _current = None
        steps.close()
