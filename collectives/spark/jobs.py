"""A Spark job in a thread, while the program waits, looks whether it has begun, and may cancel it."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any

from pyspark import InheritableThread, SparkContext

from collectives.base.errors import CollectiveTimeoutError, InvalidArgumentError, NotInitializedError, RankFailedError

LOOK = 0.1
"""Seconds between two looks at the job."""
_START_WITHIN = 600.0


class Job:
    """A Spark job that runs from now on.

    Args:
        what: who has started it, for messages.
        tasks: their number.
        collect: starts the job, and returns what its tasks have yielded.
        start_timeout: seconds within which its first task has to run.
    """

    def __init__(
        self, context: SparkContext, what: str, tasks: int, collect: Callable[[], list[Any]], start_timeout: float
    ) -> None:
        self._context, self._what, self._tasks, self._collect = context, what, tasks, collect
        self._timeout, self._end = start_timeout, time.monotonic() + start_timeout
        self._group = f"{what} {uuid.uuid4()}"
        self._has_begun = False
        self._yielded: list[Any] = []
        self._error: Exception | None = None
        self._thread = InheritableThread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._context.setJobGroup(self._group, f"{self._what}: {self._tasks} tasks", interruptOnCancel=True)
        try:
            self._yielded = self._collect()
        except Exception as error:
            self._error = error

    def look(self, seconds: float = LOOK) -> bool:
        """Wait for so long, and return whether the job has ended.

        Raises:
            RankFailedError: Spark has given it up.
            CollectiveTimeoutError: its first task has not been started in time.
        """
        self._thread.join(seconds)
        if self._error is not None:
            reason = _reason(self._error)
            _, _, of_rank = reason.partition(f"RankFailedError: {self._what}: ")
            why = of_rank.strip() or f"Spark's job has failed [L17]: {reason}"
            raise RankFailedError(f"{self._what}: {why}") from self._error
        if not self._thread.is_alive():
            return True
        self._has_begun = self._has_begun or self._runs()
        if not self._has_begun and time.monotonic() > self._end:
            raise CollectiveTimeoutError(
                f"{self._what}: Spark started none of the {self._tasks} tasks within {self._timeout:g} s; it starts "
                "the tasks of a barrier stage together. spark.default.parallelism is "
                f"{self._context.defaultParallelism}, with {self._context.getConf().get('spark.task.cpus', '1')} CPUs "
                "for each task, and other jobs may use some of them. Pass a smaller num_proc, add executors, or raise "
                "start_timeout [L112]"
            )
        return False

    def _runs(self) -> bool:
        tracker = self._context.statusTracker()
        jobs = [tracker.getJobInfo(number) for number in tracker.getJobIdsForGroup(self._group)]
        stages = [tracker.getStageInfo(number) for job in jobs if job for number in job.stageIds]
        return any(stage.numActiveTasks + stage.numCompletedTasks for stage in stages if stage)

    def yielded(self) -> list[Any]:
        """Wait for the job's end, and return what its tasks have yielded; errors as for `look`."""
        while not self.look():
            pass
        return self._yielded

    def cancel(self) -> None:
        """Have Spark end the job, if it runs."""
        if self._thread.is_alive():
            self._context.cancelJobGroup(self._group)


def active_context(what: str) -> SparkContext:
    """The program's SparkContext; NotInitializedError: there is none."""
    context = SparkContext._active_spark_context
    if context is None:
        raise NotInitializedError(
            f"{what}: there is no SparkContext; create one with SparkSession.builder.getOrCreate() (a Spark Connect "
            "session has none) [L113]"
        )
    return context


def number_of_ranks(what: str, context: SparkContext, num_proc: int | None) -> int:
    """``num_proc``, or Spark's default parallelism; InvalidArgumentError: it is below 1."""
    number: int = context.defaultParallelism if num_proc is None else num_proc
    if number < 1:
        raise InvalidArgumentError(f"{what}: num_proc={number}: expected at least 1 [L114]")
    return number


def start_within(start_timeout: float | None) -> float:
    """Seconds within which tasks have to start."""
    default = os.environ.get("HOROVOD_SPARK_START_TIMEOUT", _START_WITHIN)
    return float(default if start_timeout is None else start_timeout)


def variables_of(env: Mapping[str, Any] | None, nics: Collection[str] | None) -> dict[str, str]:
    """Variables of the ranks that the user has asked for."""
    interfaces = {"COLLECTIVES_NETWORK_INTERFACE": ",".join(sorted(nics))} if nics else {}
    return {**interfaces, **{name: str(text) for name, text in (env or {}).items()}}


def _reason(error: Exception) -> str:
    """What Spark says, without the traces of its own calls."""
    text = getattr(error, "_desc", None) or str(getattr(error, "java_exception", error))
    return text.partition("\nDriver stacktrace:")[0].partition("\n\tat ")[0].strip()
