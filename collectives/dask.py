"""Ranks on Dask: each worker process is one, for the time of one call.

    from distributed import Client
    import collectives.dask

    losses = collectives.dask.run(Client("tcp://scheduler:8786"), train, args=(folder,))

The workers stay what they are: their imports, their memory and their other tasks remain. See docs/dask.md.
"""

from __future__ import annotations

import os
import socket
import time
from asyncio import CancelledError
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from collectives.base.errors import (
    CollectiveTimeoutError,
    InvalidArgumentError,
    MissingDependencyError,
    RankFailedError,
)
from collectives.launch import hosted_ranks
from collectives.launch.hosted_ranks import Outcome, Site
from collectives.launch.records import Record

if TYPE_CHECKING:
    from distributed import Client

_LOOK = 0.25
"""Seconds between two looks at the workers."""
_ANSWERED_WITHIN = 60.0
"""Seconds within which each worker has to have a free thread."""
_AFTER_FAILURE = 5.0
"""Seconds for which the other ranks of one that has failed may still say how they fared."""


def run(
    client: Client,
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int | None = None,
    workers: Sequence[str] | None = None,
    timeout: float | None = None,
) -> list[Any]:
    """Call ``function(*args, **kwargs)`` on workers of a Dask cluster; each worker is a rank during the call.

    The function calls `collectives.init` itself. The ranks of a host have consecutive numbers. A worker is one rank,
    however many threads it has: its other threads are free for other tasks, and for NumPy. Each worker needs a free
    thread.

    Args:
        client: of the cluster.
        function: anything that cloudpickle can pickle.
        args, kwargs: its arguments, the same on every rank.
        np: the number of ranks; by default all workers are ranks.
        workers: addresses of the workers to choose from; by default all.
        timeout: seconds after which the call is cancelled; None: no limit.

    Returns:
        The function's results, by rank.

    Raises:
        InvalidArgumentError: there are fewer workers than ranks, or some workers are threads of one process, as with
            ``LocalCluster(processes=False)``.
        RankFailedError: a rank raised, or its worker has ended; has the traceback of the first failure. The other
            ranks' calls have been ended.
        CollectiveTimeoutError: ``timeout`` has passed, or a worker has had no free thread for a minute.
        MissingDependencyError: Dask's package ``distributed`` is not installed.

    Example:
        def mean_rank():
            collectives.init()
            return float(collectives.allreduce(numpy.array([collectives.rank()], "f8"), average=True)[0])

        collectives.dask.run(Client(n_workers=2, threads_per_worker=1), mean_rank)      # [0.5, 0.5]
    """
    if find_spec("distributed") is None:
        raise MissingDependencyError("collectives.dask needs Dask: pip install distributed [L119]")
    sites = _sites(client, np, workers)
    places = dict(zip(sites, hosted_ranks.arrange(list(sites.values())), strict=True))
    by_rank = sorted(places, key=lambda worker: int(places[worker]["COLLECTIVES_RANK"]))
    futures = [
        client.submit(
            _call, places[worker], function, tuple(args), dict(kwargs or {}), workers=[worker], pure=False, retries=0
        )
        for worker in by_rank
    ]
    outcomes: list[Outcome | None] = [None] * len(futures)
    end = time.monotonic() + (float("inf") if timeout is None else timeout)
    has_failed = False
    try:
        while None in outcomes and not (has_failed and time.monotonic() > end):
            _wait([future for future, known in zip(futures, outcomes, strict=True) if known is None])
            alive = client.scheduler_info(n_workers=-1)["workers"]
            for rank, (worker, future) in enumerate(zip(by_rank, futures, strict=True)):
                outcomes[rank] = outcomes[rank] or _outcome(future, rank, sites[worker], worker in alive)
            if not has_failed and any(outcome and outcome.failure for outcome in outcomes):
                has_failed, end = True, time.monotonic() + _AFTER_FAILURE
            if not has_failed and None in outcomes and time.monotonic() > end:
                raise CollectiveTimeoutError(
                    f"collectives.dask.run: the call did not finish within {timeout:g} s; raise timeout [L120]"
                )
        return hosted_ranks.results([outcome for outcome in outcomes if outcome], "collectives.dask.run")
    finally:
        if None in outcomes:
            _give_up(client, futures, by_rank, places[by_rank[0]]["COLLECTIVES_KEY"])


def _sites(client: Client, np: int | None, workers: Sequence[str] | None) -> dict[str, Site]:
    """Where the workers are that become ranks, by their addresses."""
    present = list(client.scheduler_info(n_workers=-1)["workers"])
    unknown = [worker for worker in workers or () if worker not in present]
    if unknown:
        raise InvalidArgumentError(
            f"collectives.dask.run: workers: unknown worker {unknown[0]!r}; expected some of {', '.join(present)} "
            "[L121]"
        )
    chosen = list(workers or present)
    if not chosen or (np is not None and not 1 <= np <= len(chosen)):
        raise InvalidArgumentError(
            f"collectives.dask.run: np={np}, but there are {len(chosen)} workers, and each worker process is one "
            "rank, however many threads it has; start more workers (n_workers=, threads_per_worker=1), or use "
            "collectives.local_world for ranks that are threads of one process [L122]"
        )
    answers = _answers(client, chosen)
    if answers is None:  # a worker has ended meanwhile
        if workers:
            raise RankFailedError(
                f"collectives.dask.run: one of the workers {', '.join(workers)} ended before the call began; name "
                "workers that are alive [L1]"
            )
        return _sites(client, np, workers)
    processes: dict[tuple[str, int], str] = {}
    for worker in chosen:
        process, _ = answers[worker]
        if process in processes:
            raise InvalidArgumentError(
                f"collectives.dask.run: the workers {processes[process]} and {worker} are threads of one process, but "
                "each rank needs a process of its own; start workers as processes (LocalCluster(processes=True)), or "
                "use collectives.local_world for ranks that are threads [L123]"
            )
        processes[process] = worker
    return {worker: answers[worker][1] for worker in chosen[:np]}


def _answers(client: Client, workers: Sequence[str]) -> dict[str, tuple[tuple[str, int], Site]] | None:
    """What each worker says of itself; None if one has ended. CollectiveTimeoutError: one has no free thread."""
    futures = {worker: client.submit(_here, workers=[worker], pure=False, retries=0) for worker in workers}
    end = time.monotonic() + _ANSWERED_WITHIN
    while pending := [worker for worker, future in futures.items() if future.status == "pending"]:
        _wait([futures[worker] for worker in pending])
        if not set(workers) <= set(client.scheduler_info(n_workers=-1)["workers"]):
            return None
        if time.monotonic() > end:
            raise CollectiveTimeoutError(
                f"collectives.dask.run: no thread was free within {_ANSWERED_WITHIN:g} s on the workers "
                f"{', '.join(pending)}; wait for their tasks, or pass other workers with workers= [L124]"
            )
    return {worker: future.result() for worker, future in futures.items()}


def _wait(futures: Sequence[Any]) -> None:
    """Wait a moment for tasks, which may be lost or cancelled meanwhile."""
    from distributed import TimeoutError as NotDoneError  # in Python 3.10 it is not the built-in one
    from distributed import wait

    with suppress(NotDoneError, CancelledError):
        wait(futures, _LOOK)


def _here() -> tuple[tuple[str, int], Site]:
    """On a worker: its process, and where it is."""
    from distributed import get_worker

    address = str(get_worker().address).partition("://")[2].rpartition(":")[0].strip("[]")
    site = hosted_ranks.here(address)
    return (site.host, os.getpid()), site


def _call(variables: Mapping[str, str], function: Callable[..., Any], args: Any, kwargs: Any) -> Outcome:
    """On a worker: be a rank."""
    return hosted_ranks.as_rank(variables, hosted_ranks.call, function, args, kwargs)


def _outcome(future: Any, rank: int, site: Site, alive: bool) -> Outcome | None:
    """What a rank's call has come to; None as long as it runs."""
    if future.status == "finished":
        outcome: Outcome = future.result()
        return outcome
    if future.status == "error":
        error = future.exception()
        text = f"{type(error).__name__}: {error}"
    elif future.status in ("lost", "cancelled"):
        text = f"RankFailedError: Dask has {future.status} its task"
    elif not alive:
        text = "RankFailedError: its worker has ended; look at its log, and for an out-of-memory kill in the kernel's"
    else:
        return None
    return Outcome(None, Record(rank, 1, text, time.time(), site.name))


def _give_up(client: Client, futures: Sequence[Any], workers: Sequence[str], key: str) -> None:
    """Have the calls of the job with this key end that still run: their collectives raise."""
    client.cancel(list(futures))
    alive = client.scheduler_info(n_workers=-1)["workers"]
    present = [worker for worker in workers if worker in alive]
    client.run(_end, key, workers=present, wait=False, on_error="ignore")


async def _end(key: str) -> None:
    """On a worker, in a thread that is not the rank's. A coroutine, so that the client need not wait for it."""
    hosted_ranks.give_up(key, f"collectives.dask.run has given up the call, on {socket.gethostname()}")
