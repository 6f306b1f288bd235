"""`run_elastic`: an elastic job on slots that tasks of Spark hold."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from collectives.base.errors import InvalidArgumentError, TransportError
from collectives.base.user_folder import user_folder
from collectives.launch import held_slots
from collectives.launch.agent import die_with_parent
from collectives.launch.api import CALL, FAILURE, RESULT, of_elastic_job, pickled, search_path
from collectives.launch.elastic_terms import Rules
from collectives.launch.relayed import start_agent
from collectives.spark.jobs import LOOK, Job, active_context, number_of_ranks, start_within, variables_of
from collectives.spark.runner import check_options
from collectives.transport.tcp.listener import dialled

_OURS = ("COLLECTIVES_", "HOROVOD_")
_ELASTIC_TIMEOUT = 600.0
_END_WITHIN = 10.0


def run_elastic(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    *,
    env: Mapping[str, Any] | None = None,
    nics: Collection[str] | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    **horovods: Any,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on ranks that may die and be replaced; see docs/elastic.md.

    Spark's tasks hold slots. The ranks are separate processes in these slots; the launcher's driver starts and replaces
    them, as for ``collectivesrun --host-discovery-script``. This program shows their output. An executor is a host:
    ranks go and come with executors, once Spark starts their tasks again.

    Args:
        fn: anything that cloudpickle can pickle. It calls `collectives.init`, and a training function under
            `collectives.elastic.run`.
        args, kwargs: its arguments.
        num_proc: the number of ranks; by default Spark's default parallelism.
        min_num_proc, max_num_proc: the smallest and the largest number of ranks; by default ``num_proc``. ``min_np``
            and ``max_np`` are Horovod's earlier names.
        start_timeout: seconds within which Spark has to start the first task; by default those of
            ``HOROVOD_SPARK_START_TIMEOUT``, or 600.
        elastic_timeout: seconds that the job waits for missing ranks; by default those of
            ``HOROVOD_ELASTIC_TIMEOUT``, or 600.
        reset_limit: how often the ranks may change; None: any number of times.
        env, nics, horovods: as for `run`.

    Returns:
        The results of the ranks of the last generation, by rank, with None for a rank that was lost after others had
        finished; then the results of members that finished before that generation.

    Raises:
        RankFailedError: the job could not go on, or Spark gave up the tasks: in local mode as soon as one Python worker
            is killed, unless the master is ``local[N,FAILURES]``.
        CollectiveTimeoutError, InvalidArgumentError, NotInitializedError: as for `run`.

    Example:
        results = collectives.spark.run_elastic(train, num_proc=4, min_num_proc=2)
    """
    what = "collectives.spark.run_elastic"
    check_options(what, horovods)
    context = active_context(what)
    number = number_of_ranks(what, context, num_proc)
    smallest = next(each for each in (min_num_proc, min_np, number) if each is not None)
    largest = next(each for each in (max_num_proc, max_np, number) if each is not None)
    if not 1 <= smallest <= largest:
        raise InvalidArgumentError(
            f"{what}: expected 1 <= min_num_proc <= max_num_proc, got {smallest} and {largest} [L108]"
        )
    if elastic_timeout is None:
        elastic_timeout = float(os.environ.get("HOROVOD_ELASTIC_TIMEOUT", _ELASTIC_TIMEOUT))
    environment = {name: text for name, text in os.environ.items() if name.startswith(_OURS)}
    environment |= {"PYTHONUNBUFFERED": "1", **variables_of(env, nics)}
    call = pickled(fn, tuple(args), dict(kwargs or {}))
    settings, key = context.getConf(), secrets.token_hex(32)
    host = str(settings.get("spark.driver.host", ""))
    with (
        tempfile.TemporaryDirectory(prefix="collectives-spark-") as folder,
        socket.create_server((settings.get("spark.driver.bindAddress", host) or "", 0)) as server,
    ):
        held_slots.Job(
            rules=Rules(smallest=smallest, largest=largest, elastic_timeout=elastic_timeout, reset_limit=reset_limit),
            python=context.pythonExec,
            environment=environment,
            server=server.fileno(),
            key=key,
            timeout=start_within(start_timeout),
        ).write(Path(folder))
        launcher = subprocess.Popen(
            [sys.executable, "-m", "collectives.launch.held_slots", folder],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(search_path())},
            pass_fds=(server.fileno(),),
            preexec_fn=die_with_parent(),
        )
        holder = _Holder(host, server.getsockname()[1], key, folder, call)
        server.close()  # the launcher's copy is its only one, so that it ends with the launcher
        tasks = context.parallelize(range(largest), largest).mapPartitions(holder)
        job = Job(context, what, largest, tasks.collect, start_within(start_timeout))
        try:
            while launcher.poll() is None:
                job.look(0)
                with suppress(subprocess.TimeoutExpired):
                    launcher.wait(LOOK)
            for name, data in job.yielded():
                Path(folder, name).write_bytes(data)
        finally:
            launcher.terminate()
            try:
                launcher.wait(_END_WITHIN)
            except subprocess.TimeoutExpired:
                launcher.kill()
            job.cancel()
        return of_elastic_job(Path(folder), launcher.wait(), what)


class _Holder:
    """What each task does: hold its slot until the job has ended, and yield what the ranks have left on its host."""

    def __init__(self, host: str, port: int, key: str, folder: str, call: bytes) -> None:
        self._launcher, self._key = (host, port), key
        self._folder, self._call = folder, call

    def __call__(self, _: Iterator[int]) -> Iterator[tuple[str, bytes]]:
        folder = Path(self._folder)
        try:
            with dialled(*self._launcher, bytes.fromhex(self._key), str(os.getppid()).encode()) as connection:
                (user_folder(folder) / CALL).write_bytes(self._call)
                agents = [self._start(int(line)) for line in connection.makefile("r", encoding="ascii")]
        except (ConnectionError, TransportError):
            return  # the job has ended, and others may listen at its port
        for agent in agents:
            _await_end(agent)
        for kind in (RESULT, FAILURE):
            for path in folder.glob(kind.format("*[0-9]")):
                yield path.name, path.read_bytes()
        if not (folder / held_slots.JOB).exists():  # there it is the program's own folder
            shutil.rmtree(folder, ignore_errors=True)

    def _start(self, port: int) -> subprocess.Popen[bytes]:
        return start_agent(self._launcher[0], port, self._key, {"PYTHONPATH": os.pathsep.join(search_path())})


def _await_end(agent: subprocess.Popen[bytes]) -> None:
    """Wait for an agent's end, or kill it: the job has ended, and its results are here."""
    try:
        agent.wait(_END_WITHIN)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait()
