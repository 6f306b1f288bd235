"""Real jobs, with Open MPI and MPICH: however a rank fails, all end, its traceback comes last, and its exit code is
returned.

The ranks use mpi4py and ``collectives.worlds.exit_hooks`` only, but those on several hosts. The harness bounds every
job and finds what is left behind.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from collectives.launch import shared_memory_cleanup
from tests.support.launching.clusters import Cluster, cluster
from tests.support.launching.mpirun import IMPLEMENTATIONS, Result, command_lines, python_for, run_command

pytestmark = pytest.mark.parametrize("mpi", IMPLEMENTATIONS)

CONNECTED = """
import os, signal, sys
from pathlib import Path
from mpi4py import MPI
from collectives.worlds import exit_hooks
world = MPI.COMM_WORLD
shared = {line.split()[5] for line in open("/proc/self/maps") if "/dev/shm/" in line and "deleted" not in line}
Path(__file__).with_name(f"shared-{world.rank}").write_text("\\n".join(shared))
exit_hooks.Hooks(world.rank, world.Abort, lambda text: None, os.environ.get("COLLECTIVES_RECORDS"))
world.Barrier()
if world.rank != 1:
    world.recv(source=1)  # never sent
"""
EARLY = """
import os
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
    raise ValueError("before MPI was started")
from mpi4py import MPI
"""


def collectivesrun(mpi: str, folder: Path, program: str, *options: str, n: int = 3, **more: object) -> Result:
    script = folder / "program.py"
    script.write_text(program)
    python = str(python_for(mpi))
    return run_command([python, "-m", "collectives.launch", "-np", str(n), *options, python, str(script)], **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("failure", "code", "last"),
    [
        ("def deep():\n    raise ValueError('no good')\ndeep()", 1, "ValueError: no good"),
        ("print('out of data', file=sys.stderr)\nsys.exit(3)", 3, "out of data"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            137,
            "rank 1 on {host} was killed by signal 9 (SIGKILL) [L8]\nFor cause and cure: collectives explain L8",
        ),
    ],
)
def test_a_failure_ends_the_job_and_is_shown_last(mpi: str, failure: str, code: int, last: str, tmp_path: Path) -> None:
    result = collectivesrun(mpi, tmp_path, CONNECTED + failure, expect=code, timeout=30)

    assert result.output.rstrip().endswith(last.format(host=socket.gethostname())), str(result)
    assert "collectivesrun: rank 1 on" in result.output
    assert not re.search(
        "MPI_ABORT|MPI_Abort|has exited|BAD TERMINATION|YOUR APPLICATION|Primary job|-----", result.output
    ), str(result)
    if "deep" in failure:
        assert (
            "in deep" in result.output.rpartition("collectivesrun: rank 1")[2] and result.output.count("Traceback") == 1
        )
    made = [Path(line) for rank in range(3) for line in (tmp_path / f"shared-{rank}").read_text().split()]
    assert made and (shared_memory_cleanup.users_may_be_hidden() or not any(path.exists() for path in made))


def test_a_failure_before_mpi_is_started_ends_the_job(mpi: str, tmp_path: Path) -> None:
    result = collectivesrun(mpi, tmp_path, EARLY, expect=1, timeout=30)
    assert result.output.rstrip().endswith("ValueError: before MPI was started"), str(result)


def test_settings_reach_the_ranks_and_their_output_goes_into_files(mpi: str, tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("params:\n  fusion_threshold_mb: 3\n  cycle_time_ms: 7\n")
    program = """
import os, sys
from mpi4py import MPI
from collectives.base.config import Config
config = Config.from_environment()
print(f"rank {MPI.COMM_WORLD.rank} {config.fusion_threshold >> 20} {config.cycle_time} {config.cache_capacity}")
assert os.environ["COLLECTIVES_NOTEBOOK"] == os.environ["HOROVOD_SECRET_KEY"] != ""
print("an error", file=sys.stderr)
"""
    folder = tmp_path / "out"
    files = ["--config-file", str(tmp_path / "settings.yaml"), "--output-filename", str(folder)]
    options = ["--verbose", *files, "--cycle-time-ms", "8"]
    secret = secrets.token_hex(32)
    variables = {"HOROVOD_CACHE_CAPACITY": "9", "COLLECTIVES_NOTEBOOK": secret, "HOROVOD_SECRET_KEY": secret}
    with command_lines() as lines:
        result = collectivesrun(mpi, tmp_path, program, *options, n=2, env=variables)
    assert any(b"mpirun" in line for line in lines) and not any(secret.encode() in line for line in lines)
    assert f"collectivesrun: {'Open MPI' if mpi == 'openmpi' else 'MPICH'} " in result.output, str(result)
    for rank in range(2):
        assert (folder / f"rank.{rank}" / "stdout").read_text() == f"rank {rank} 3 8.0 9\n"
        assert "an error" in (folder / f"rank.{rank}" / "stderr").read_text()
        assert f"rank {rank} 3 8.0 9" in result.output


def test_standard_input_is_rank_0s_to_its_end(mpi: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import sys\nfrom mpi4py import MPI\nprint(MPI.COMM_WORLD.rank == 0 and sys.stdin.read())")
    python = str(python_for(mpi))
    command = [python, "-m", "collectives.launch", "-np", "2", python, str(script)]
    shown = run_command(["sh", "-c", 'echo for you | "$@"', "sh", *command], timeout=30).output
    assert "[0] for you\n" in shown and "[1] False\n" in shown


@pytest.mark.parametrize(
    ("number", "stubborn"), [(signal.SIGINT, True), (signal.SIGTERM, False)], ids=["does not listen", "listens"]
)
def test_a_signal_ends_all_ranks(mpi: str, stubborn: bool, number: signal.Signals, tmp_path: Path) -> None:
    """Ranks that do not heed it are killed."""
    program = f"import signal\nsignal.signal({int(number)}, signal.SIG_IGN)\n" * stubborn + _waiting(tmp_path)
    collectivesrun(mpi, tmp_path, program, expect=128 + number, timeout=40, interrupt=(tmp_path / "ready", number))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent was killed")
def test_killing_collectivesrun_itself_leaves_nothing_behind(mpi: str, tmp_path: Path) -> None:
    interrupt = (tmp_path / "ready", signal.SIGKILL)
    collectivesrun(
        mpi, tmp_path, _waiting(tmp_path), expect=-9, timeout=30, interrupt=interrupt, env={"TMPDIR": str(tmp_path)}
    )
    assert not list(tmp_path.glob("collectives*"))


HOSTILE = [":", "", "a b", "x\ny", "'\"$(touch pwned);", "-np", "7", "--", "--mca", "-x", "=", "%3A", "é", "--verbose"]


def test_any_argument_is_passed_on_and_no_line_is_mixed_with_another(mpi: str, tmp_path: Path) -> None:
    program = """
import json, random, sys
from pathlib import Path
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
Path(__file__).with_name(f"arguments-{rank}").write_text(json.dumps(sys.argv[1:]))
for _ in range(3000):
    print("ab"[rank] * random.randint(1, 500), file=random.choice([sys.stdout, sys.stderr]))
"""
    (tmp_path / "program.py").write_text(program)
    python = str(python_for(mpi))
    result = run_command(
        [python, "-m", "collectives", "-np", "2", python, str(tmp_path / "program.py"), *HOSTILE], timeout=30
    )
    assert [json.loads((tmp_path / f"arguments-{rank}").read_text()) for rank in range(2)] == [HOSTILE] * 2
    lines = [line for line in result.output.splitlines() if not line.endswith("[L141]")]  # the launcher's own
    assert len(lines) == 6000 and all(re.fullmatch(r"\[0\] a+|\[1\] b+", line) for line in lines)


def test_a_progress_bar_shows_in_a_terminal(mpi: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("""
import os, sys
from mpi4py import MPI
from collectives.tools.bench.progress import watched
for step in range(20):
    MPI.COMM_WORLD.Barrier()
    if MPI.COMM_WORLD.rank == 0 and watched():
        print(f"\\r\\x1b[2K{'━' * step}", end="", flush=True)
print("done", os.get_terminal_size().columns)
""")
    python = str(python_for(mpi))
    terminal = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    command = [python, "-m", "collectives", "-np", "2", python, str(tmp_path / "program.py")]
    shown = run_command([python, "-c", terminal, *command], timeout=30).output
    assert shown.count("\x1b[2K") >= 20 and "\x1b[2K\x1b[36m[0]\x1b[0m ━━━" in shown, shown
    assert "━done 76" in shown and "\x1b[33m[1]\x1b[0m done 76" in shown, shown


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    """Two hosts that share nothing below ``/tmp``."""
    with cluster(2) as made:
        yield made


def test_the_rank_that_failed_first_is_named_from_another_host(mpi: str, hosts: Cluster) -> None:
    program = (
        "import collectives as c\nc.init()\nc.barrier()\nif c.rank() == 3: raise ValueError('no good')\nc.barrier()"
    )
    python = python_for(mpi)
    # The hosts' shells know nothing of this environment: mpirun's own programs are found by the PATH that is passed on.
    environment = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    command = hosts.on("host1", str(python), "-m", "collectives", "-H", "host1:2,host2:2", str(python), "-c", program)
    shown = run_command(command, timeout=60, expect=1, env=environment).output
    assert "collectivesrun: rank 3 on host2 failed with exit code 1 [L9]:" in shown and shown.rstrip().endswith(
        "ValueError: no good"
    ), shown
    assert shown.count("Traceback") == 1 and "failed ranks 0, 1, 2 (" in shown, shown


def _waiting(folder: Path) -> str:
    """A program whose ranks wait for each other for ever, and say when they are about to."""
    return f"""
from pathlib import Path
from mpi4py import MPI
world = MPI.COMM_WORLD
world.Barrier()
if world.rank == 0:
    Path({str(folder / "ready")!r}).touch()
world.recv(source=(world.rank + 1) % world.size)
"""
