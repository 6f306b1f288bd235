"""`run`: the tasks of a barrier stage are ranks."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from pyspark import BarrierTaskContext, cloudpickle

from collectives.base.errors import InvalidArgumentError
from collectives.launch import hosted_ranks
from collectives.launch.hosted_ranks import Outcome, Site
from collectives.spark.jobs import Job, active_context, number_of_ranks, start_within, variables_of

_WITHOUT_EFFECT = {"use_mpi", "use_gloo", "extra_mpi_args", "verbose", "prefix_output_with_timestamp"}


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    *,
    env: Mapping[str, Any] | None = None,
    nics: Collection[str] | None = None,
    **horovods: Any,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` in Spark tasks that run at the same time and are ranks.

    The function calls `collectives.init` itself. The ranks of a host have consecutive numbers. Their output is in the
    executors' logs.

    Args:
        fn: anything that cloudpickle can pickle.
        args, kwargs: its arguments, the same on every rank.
        num_proc: the number of ranks; by default Spark's default parallelism.
        start_timeout: seconds within which Spark has to start the tasks; by default those of
            ``HOROVOD_SPARK_START_TIMEOUT``, or 600.
        env: more environment variables for the ranks.
        nics: network interfaces; each host uses one of them.
        horovods: Horovod's options ``use_mpi``, ``use_gloo``, ``extra_mpi_args``, ``verbose`` and
            ``prefix_output_with_timestamp`` have no effect.

    Returns:
        The function's results, by rank.

    Raises:
        RankFailedError: a rank raised (the text has its traceback), or an executor or a Python worker is lost. The
            other ranks have been ended. Spark does not try again.
        CollectiveTimeoutError: Spark had no room for so many tasks within ``start_timeout``.
        InvalidArgumentError: an unknown argument, or ``num_proc`` is below 1.
        NotInitializedError: there is no SparkContext.

    Example:
        def mean_rank():
            collectives.init()
            return float(collectives.allreduce(numpy.array([collectives.rank()], "f8"), average=True)[0])

        collectives.spark.run(mean_rank, num_proc=2)      # [0.5, 0.5]
    """
    what = "collectives.spark.run"
    check_options(what, horovods)
    context = active_context(what)
    number = number_of_ranks(what, context, num_proc)
    task = _Task(cloudpickle.dumps((fn, tuple(args), dict(kwargs or {}))), variables_of(env, nics))
    stage = context.parallelize(range(number), number).barrier().mapPartitions(task)
    job = Job(context, what, number, stage.collect, start_within(start_timeout))
    try:
        outcomes: dict[int, Outcome] = dict(job.yielded())
    finally:
        job.cancel()
    pickled = hosted_ranks.results([outcomes[rank] for rank in range(number)], what)
    return [cloudpickle.loads(data) for data in pickled]


def check_options(what: str, options: Mapping[str, Any]) -> None:
    """InvalidArgumentError: some options of Horovod's are not supported."""
    for name, value in options.items():
        if name not in _WITHOUT_EFFECT and value is not None:
            raise InvalidArgumentError(
                f"{what}: unknown argument {name}; expected fn, args, kwargs, num_proc, start_timeout, env, nics, or "
                "another one that its documentation names [L115]"
            )


class _Task:
    """What each task does."""

    def __init__(self, call: bytes, variables: Mapping[str, str]) -> None:
        self._call, self._variables, self._key = call, variables, secrets.token_hex(32)

    def __call__(self, _: Iterator[int]) -> Iterator[tuple[int, Outcome]]:
        context = BarrierTaskContext.get()
        number = context.partitionId()
        address = context.getTaskInfos()[number].address.rpartition(":")[0]
        site = hosted_ranks.as_rank(self._variables, hosted_ranks.here, address)  # they may name a network interface
        said = context.allGather(json.dumps(site))  # each exchange takes Spark a second
        sites = [Site(host, name, at, tuple(ports)) for host, name, at, ports in map(json.loads, said)]
        place = {**hosted_ranks.arrange(sites)[number], "COLLECTIVES_KEY": self._key}
        outcome = hosted_ranks.as_rank({**self._variables, **place}, hosted_ranks.call, self._pickled)
        if outcome.failure is not None and not outcome.failure.consequence:
            hosted_ranks.results([outcome], "collectives.spark.run")  # raises, and Spark ends the other tasks
        yield int(place["COLLECTIVES_RANK"]), outcome

    def _pickled(self) -> bytes:
        function, args, kwargs = cloudpickle.loads(self._call)  # imports modules, which look at the variables
        data: bytes = cloudpickle.dumps(function(*args, **kwargs))
        return data
