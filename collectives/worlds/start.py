"""`run`: start several ranks from a program or a notebook."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from collectives.base.errors import InvalidArgumentError

Returned = TypeVar("Returned")


def run(
    function: Callable[..., Returned],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int | None = None,
    num_proc: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    host_discovery_script: str | None = None,
    options: Sequence[str] = (),
    executable: str | None = None,
    timeout: float | None = None,
) -> list[Returned]:
    """Call ``function(*args, **kwargs)`` on every rank of a new job, of which this process is not a rank.

    The function calls `init` itself. Cloudpickle transfers it, so it may be a lambda, or be defined in the program or
    the notebook. The ranks' output is shown as by ``collectivesrun``. Other hosts must share the folder for temporary
    files (``TMPDIR``).

    Args:
        function: anything that cloudpickle can pickle.
        args, kwargs: its arguments, the same on every rank.
        np: the number of ranks; 1 by default.
        num_proc: Horovod's name for ``np``.
        min_np, max_np: make the job elastic: its smallest number of ranks, ``np`` by default, and its largest.
        host_discovery_script: makes the job elastic: a command that prints the current hosts.
        options: more options of ``collectivesrun``, such as ``["--hosts", "host1:4,host2:4"]``.
        executable: the ranks' Python interpreter; this one by default.
        timeout: seconds after which the job is ended; None: no limit.

    Returns:
        The function's results, by rank. Of an elastic job: by rank in its last generation, with None for a rank that
        was lost after others had finished; then the results of members that finished before that generation.

    Raises:
        InvalidArgumentError: ``np`` and ``num_proc`` differ, an option cannot be understood, or the function cannot be
            pickled.
        RankFailedError: a rank raised, or ended without returning; has the traceback of the first failure.
        CollectiveTimeoutError: ``timeout`` has passed.
        MissingDependencyError: cloudpickle is not installed.

    Example:
        means = collectives.run(train, args=["/data"], np=4)
    """
    if np is not None and num_proc is not None and np != num_proc:
        raise InvalidArgumentError(
            f"run: np={np} and num_proc={num_proc} both set the number of ranks; pass only one of them [L80]"
        )
    elastic = {"min_np": min_np, "max_np": max_np, "host_discovery_script": host_discovery_script}
    elastic = {name: value for name, value in elastic.items() if value is not None}
    ranks = next((number for number in (np, num_proc) if number is not None), None if elastic else 1)
    # The launcher is on a higher floor, and slow to import for programs that a launcher has already started.
    launch = importlib.import_module("collectives.launch")
    returned: list[Returned] = launch.run(
        function, args, kwargs, np=ranks, options=options, executable=executable, timeout=timeout, **elastic
    )
    return returned
