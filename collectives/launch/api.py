"""``run(function, np=2)``: call a function on N ranks from within a program, and return each rank's result.

The function, its arguments and its results are passed as files, pickled by cloudpickle, which supports lambdas and
functions that the program itself defines. The job is run by ``collectivesrun`` in a process of its own: this process is
not a rank, and its threads, signal handlers and children are not affected.

    run() -> collectivesrun -> mpirun or agents -> N x python -m collectives.launch.run_function FOLDER
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TextIO

from collectives.base.errors import (
    CollectiveTimeoutError,
    InvalidArgumentError,
    MissingDependencyError,
    RankFailedError,
)
from collectives.launch import cli, records
from collectives.launch.agent import die_with_parent

CALL, RESULT, FAILURE, EVENTS = "call", "result-{}", "failure-{}", "events"
"""Names of files in the folder that this process shares with the ranks."""
_AFTER_TERMINATE, _AFTER_END = 30.0, 2.0


def run(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int | None = 1,
    min_np: int | None = None,
    max_np: int | None = None,
    host_discovery_script: str | None = None,
    options: Sequence[str] = (),
    executable: str | None = None,
    timeout: float | None = None,
) -> list[Any]:
    """Call ``function(*args, **kwargs)`` on ``np`` ranks of a new job; see `collectives.run`, which calls this."""
    with tempfile.TemporaryDirectory(prefix="collectives-run-") as name:
        folder = Path(name)
        (folder / CALL).write_bytes(pickled(function, tuple(args), dict(kwargs or {})))
        values = {"-np": np, "--min-np": min_np, "--max-np": max_np, "--host-discovery-script": host_discovery_script}
        own = [f"{flag}={value}" for flag, value in values.items() if value is not None] + list(options)
        program = [executable or sys.executable, "-m", "collectives.launch.run_function", name]
        elastic, _, _ = cli.check_arguments([*own, *program])
        arguments = [*own, *([f"--elastic-events={folder / EVENTS}"] if elastic else []), *program]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search_path())}
        code = _wait([sys.executable, "-m", "collectives.launch", *arguments], environment, timeout)
        if elastic:
            return of_elastic_job(folder, code)
        failures = [records.parse(path.read_bytes()) for path in folder.glob(FAILURE.format("*"))]
        first = records.culprit(failure for failure in failures if failure is not None)
        if first is not None:
            raise RankFailedError(f"run: rank {first.rank} on {first.host} failed [L3]:\n{first.text}")
        if code:
            raise RankFailedError(f"run: the job ended with exit code {code}; the ranks' last output is on stderr [L4]")
        assert np is not None
        return [_returned(folder, rank) for rank in range(np)]


def of_elastic_job(folder: Path, code: int, what: str = "run") -> list[Any]:
    """Return what the members have returned, by rank in the last generation, and behind those what members have that
    finished before it. None: this rank was lost after others had finished, with which the job is done.

    Raises:
        RankFailedError: the job has ended with an exit code; ``what`` begins its text.
    """
    lines = (folder / EVENTS).read_text().splitlines() if (folder / EVENTS).exists() else []
    events = []
    for line in lines:
        with contextlib.suppress(ValueError):  # the part of a line for which the disk had room
            events.append(json.loads(line))
    if code:
        failed: list[int] = next((event["failed"] for event in reversed(events) if event["event"] == "done"), [])
        texts = [record.text for member in failed if (record := _failure(folder, member)) is not None]
        texts += [event["text"] for event in events if event["event"] in ("gave_up", "died")][-1:]
        raise RankFailedError(f"{what}: the elastic job ended with exit code {code} [L5]: {texts[0] if texts else ''}")
    ranks: list[int] = next((event["members"] for event in reversed(events) if event["event"] == "generation"), [])
    finished = {int(path.name.removeprefix(RESULT.format(""))) for path in folder.glob(RESULT.format("*[0-9]"))}
    members = [*ranks, *sorted(finished - set(ranks))]
    return [_returned(folder, member) if member in finished else None for member in members]


def _failure(folder: Path, rank: int) -> records.Record | None:
    path = folder / FAILURE.format(rank)
    return records.parse(path.read_bytes()) if path.exists() else None


def pickled(*call: object) -> bytes:
    """A function and its arguments as bytes; InvalidArgumentError: they cannot be pickled."""
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        raise MissingDependencyError("run needs cloudpickle: pip install cloudpickle [L76]") from None
    try:
        data: bytes = cloudpickle.dumps(call)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise InvalidArgumentError(
            f"run: cannot pickle the function or its arguments for the ranks: {error} [L77]"
        ) from error
    return data


def search_path() -> list[str]:
    """Return this process's module search path without its Python's own folders: the ranks' Python has its own."""
    library = sysconfig.get_path("stdlib")
    own = [library, os.path.join(library, "lib-dynload"), site.getusersitepackages()]
    own += site.getsitepackages([sys.prefix, sys.base_prefix])
    folders = [os.path.realpath(path or os.getcwd()) for path in sys.path]
    return [path for path in dict.fromkeys(folders) if os.path.exists(path) and path not in map(os.path.realpath, own)]


def _wait(command: Sequence[str], environment: Mapping[str, str], timeout: float | None) -> int:
    """Run the job to its end. No process of the job survives this function, also if it raises."""
    pipes = [subprocess.PIPE if _is_replaced(stream, fd) else None for fd, stream in enumerate(_streams(), 1)]
    process = subprocess.Popen(command, env=environment, preexec_fn=die_with_parent(), stdout=pipes[0], stderr=pipes[1])
    pumps = [
        threading.Thread(target=_pump, args=(pipe, stream), daemon=True)
        for pipe, stream in zip((process.stdout, process.stderr), _streams(), strict=True)
        if pipe is not None
    ]
    for pump in pumps:
        pump.start()
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        raise CollectiveTimeoutError(
            f"run: the job did not finish within {timeout:g} s, and was ended; raise timeout [L78]"
        ) from None
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_AFTER_TERMINATE)
            process.kill()
            process.wait()
        for pump in pumps:
            pump.join(_AFTER_END)


def _streams() -> tuple[TextIO, TextIO]:
    return sys.stdout, sys.stderr


def _is_replaced(stream: TextIO, fd: int) -> bool:
    """Whether what this program prints goes elsewhere than to the file descriptor, which children inherit: into a
    notebook."""
    try:
        return stream.fileno() != fd
    except (OSError, AttributeError, ValueError):
        return True


def _pump(pipe: IO[bytes], stream: TextIO) -> None:
    """Print what the job prints."""
    with pipe:
        for line in pipe:
            stream.write(line.decode(errors="replace"))
            stream.flush()


def _returned(folder: Path, rank: int) -> Any:
    path = folder / RESULT.format(rank)
    if not path.exists():
        raise RankFailedError(
            f"run: rank {rank} ended without a result: it called os._exit, or its host does not share {folder.parent} "
            "with this one; set TMPDIR to a folder that all hosts share [L6]"
        )
    return pickle.loads(path.read_bytes())
