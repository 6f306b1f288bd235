"""The generations of an elastic job, for this process: it enters the job, leaves a world for the next, and is done.

The default world is the present generation's. It ends at once, here alone, and another one takes its place; what the
program asks of the default world, ranks and sizes, then follows. The job's driver decides who is in it
(`collectives.worlds.elastic_jobs`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from collectives.base import interrupts
from collectives.base.config import Config
from collectives.base.errors import CollectivesError, first_line, in_words
from collectives.worlds import runtime, succession
from collectives.worlds.elastic_jobs import Job
from collectives.worlds.runtime import default

_NOTICED_WITHIN = 0.3


def job() -> Job | None:
    """This process's part in its job; None: the job is not elastic, or `collectives.init` was not called."""
    return default.job


def enter() -> bool:
    """Tell the driver that this process recovers from failures. A process that has come later waits here, however long,
    until it is admitted: its world of one ends, and the generation's takes its place.

    Returns:
        Whether the others have begun the generation by `renew`, and this process has not.

    Raises: as `renew`.
    """
    runtime.world()
    job = default.job
    if job is None:
        return False
    job.on_death = _fail
    if job.generation:
        job.say("runs")
    else:
        with interrupts.deferred(), default.held():
            world = job.ready(Config.from_environment())
            began = time.monotonic()
            succession.end(default.world, "this process was admitted", failed=False)
            succession.begin(default, world, job, began, "this process was admitted")
    others_renewed, job.others_renewed = job.others_renewed, False
    return others_renewed


def renew(why: BaseException | str, record: Any = None) -> list[Any]:
    """End the default world here, at once, and have the next generation's take its place: of who lives, and who has
    come. All members do so, each when it notices the end.

    Where the job is not elastic, this is `shutdown` and `init`.

    Args:
        why: the error that ended it, or, if none has, why it ends.
        record: for the ranks of the next generation, which gets no newcomers where all its members have one, and are
            enough.

    Returns:
        The ranks' records; None of newcomers.

    Raises:
        SystemExit: this process is to stop, with exit code 0.
        RankFailedError: the job cannot go on; says why.
        TransportError: the launcher has ended.
        CollectiveTimeoutError: it does not answer.
    """
    job, failed = default.job, not isinstance(why, str)
    if job is None:
        with suppress(CollectivesError):
            runtime.shutdown()
        runtime.init()
        return runtime.world().allgather_object(record, name="generation.records")
    text = first_line(why if isinstance(why, str) else in_words(job.member, why))
    began = time.monotonic()
    with interrupts.deferred(), default.held():
        sets = default.known.by_members(job.members)
        succession.end(default.world, text, failed)
        try:
            world = job.next(text, Config.from_environment(), alone=record is not None)
            return succession.begin(default, world, job, began, text, sets, record)
        except BaseException:
            default.forget()
            raise


def notices() -> tuple[int, int]:
    """A number that grows with each notice, alike on all ranks that have heard the same, and what those of the present
    generation have said: 0, or a sum of `ADDED` and `REMOVED` of `collectives.worlds.elastic_jobs`."""
    job = default.job
    return (0, 0) if job is None else (4 * job.generation + job.news, job.news)


def hear_events(take: Callable[[Mapping[str, Any]], object]) -> None:
    """Have a function called, in another thread, with each of the driver's events from now on."""
    Job.on_event = staticmethod(take)
    if default.job is not None:
        default.job.watch()


def committed() -> None:
    """Tell the driver, once, that a newcomer has come as far as a commit; one that dies before counts as unfit."""
    job = default.job
    if job is not None and job.came_late and not job.has_committed:
        job.has_committed = True
        job.say("runs")


def finished() -> None:
    """Tell the driver that the training is done."""
    if default.job is not None:
        default.job.say("finished")


def _fail(generation: int, why: str) -> None:
    """Fail the default world, of whose generation a member has died, unless the ranks notice soon: this one may wait
    for one that is stopped."""
    job, world = default.job, default.world
    if job is None or job.generation != generation:
        return
    time.sleep(_NOTICED_WITHIN)  # the error of who notices names the rank that has died
    if job.generation == generation and world is not None and world is default.world and world.failure is None:
        with suppress(ValueError):  # the program's thread has given its memory back meanwhile
            world.fail(why)
