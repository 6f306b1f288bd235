"""Real jobs that ``collectivesrun`` starts without MPI, on this host and on several: however a rank, agent, host or
the launcher ends, the job ends in bounded time, says why, and leaves nothing behind.

The ranks use none of the package, but those of `collectives.run`. The harness bounds every job and finds what is left
behind.
"""

from __future__ import annotations

import ast
import os
import secrets
import shutil
import signal
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from collectives.launch import agent
from tests.support.launching.clusters import Cluster, cluster
from tests.support.launching.mpirun import Result, command_lines, run_command
from tests.support.launching.training import train_alone

LAUNCHER = [sys.executable, "-m", "collectives.launch"]
WAITING = """
import os, signal, subprocess, sys, time
from pathlib import Path
folder, rank, size = Path(__file__).parent, int(os.environ["COLLECTIVES_RANK"]), int(os.environ["COLLECTIVES_SIZE"])
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
(folder / f"here-{rank}").touch()
while rank == 0 and len(list(folder.glob("here-*"))) < size:
    time.sleep(0.01)
if rank == 0:
    (folder / "ready").touch()
"""
"""All ranks are here, each with a process of its own that waits."""
FOREVER = "time.sleep(60)\n"


@pytest.fixture
def no_mpi(tmp_path: Path) -> dict[str, str]:
    """An environment in which mpi4py cannot be imported, and no mpirun is found on PATH."""
    folder = tmp_path / "no-mpi"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['mpi4py'] = None\n")
    kept = [part for part in os.environ["PATH"].split(os.pathsep) if not shutil.which("mpirun", path=part)]
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.getcwd()]), "PATH": os.pathsep.join(kept)}


def script(folder: Path, program: str) -> list[str]:
    """Return the command of a rank that runs a program."""
    (folder / "program.py").write_text(program)
    return [sys.executable, str(folder / "program.py")]


def agents(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return the agents of a job, rank 0's first, from its processes."""
    found = {process.parent() for process in processes if process.environ().get("COLLECTIVES_RANK") is not None}
    return [process for process in found if process is not None and agent.__file__ in process.cmdline()]


def launcher(processes: Sequence[psutil.Process]) -> psutil.Process:
    """Return the process of ``collectivesrun``, from a job's."""
    return next(process for process in processes if process.cmdline()[: len(LAUNCHER)] == LAUNCHER)


def all_end(processes: Sequence[psutil.Process]) -> bool:
    """Whether processes end within a bounded time. Those of other hosts may stay zombies: their init does not reap."""
    end = time.monotonic() + 10
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize(
    ("failure", "code", "last"),
    [
        ("raise ValueError('no good')", 1, "ValueError: no good"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            137,
            f"rank 1 on {os.uname().nodename} was killed by signal 9 (SIGKILL) [L8]\n"
            "For cause and cure: collectives explain L8",
        ),
    ],
)
def test_a_failure_ends_the_job_and_is_shown_last(
    failure: str, code: int, last: str, no_mpi: dict[str, str], tmp_path: Path
) -> None:
    program = script(tmp_path, f"{WAITING}if rank == 1:\n    {failure}\n{FOREVER}")
    result = run_command([*LAUNCHER, "-np", "3", *program], expect=code, timeout=30, env=no_mpi)
    assert result.output.rstrip().endswith(last) and result.output.count("Traceback") == ("raise" in failure), str(
        result
    )


def test_ranks_start_well_and_are_told_that_they_never_join(no_mpi: dict[str, str], tmp_path: Path) -> None:
    program = script(
        tmp_path,
        """
import os, sys
names = ("COLLECTIVES_RANK", "COLLECTIVES_SIZE", "COLLECTIVES_LOCAL_RANK", "HOROVOD_RANK", "HOROVOD_LOCAL_SIZE")
print(*(os.environ[name] for name in names), os.environ["COLLECTIVES_ALGORITHM"], sys.argv[1:], sys.stdin.read())
print("an error", file=sys.stderr)
""",
    )
    options = ["--as-horovod", "--algorithm", "ring", "--output-filename", str(tmp_path / "out")]
    hostile = ["", "a b", "'\"$(touch pwned);", "é", "\n"]
    secret = secrets.token_hex(32)
    with command_lines() as lines:
        result = run_command(
            [*LAUNCHER, "-np", "2", *options, *program, *hostile],
            timeout=30,
            env={**no_mpi, "HOROVOD_SECRET": secret},
            expect=1,
        )
    assert "--as-horovod: no rank called init()" in result.output
    assert any(b"agent.py" in line for line in lines) and not any(secret.encode() in line for line in lines)
    for rank in range(2):
        said = f"{rank} 2 {rank} {rank} 2 ring {hostile} \n"
        assert (tmp_path / "out" / f"rank.{rank}" / "stdout").read_text() == said
        assert f"[{rank}] {said}" in result.output and f"[{rank}] an error\n" in result.output


def test_standard_input_is_rank_0s(no_mpi: dict[str, str]) -> None:
    program = [sys.executable, "-c", "import sys; print(sys.stdin.read())"]
    command = [*LAUNCHER, "-np", "2", *program]
    shown = run_command(["sh", "-c", 'echo for you | "$@"', "sh", *command], timeout=30, env=no_mpi).output
    assert "[0] for you\n" in shown and "[1] \n" in shown


def test_a_function_runs_on_ranks(no_mpi: dict[str, str]) -> None:
    program = """
import collectives, os
from tests.support.launching.training import train_as_rank
results = collectives.run(lambda word: (word + os.environ["COLLECTIVES_RANK"], train_as_rank()), ["rank "], np=3)
print([(name, weights.tolist()) for name, weights in results])
"""
    shown = run_command([sys.executable, "-c", program], timeout=30, env=no_mpi).output
    names, weights = zip(*ast.literal_eval(shown), strict=True)
    assert names == ("rank 0", "rank 1", "rank 2")
    np.testing.assert_allclose(weights, [train_alone()] * 3, rtol=1e-12)


@pytest.mark.parametrize(
    ("number", "code", "stubborn"),
    [
        (signal.SIGINT, 130, ""),
        (signal.SIGTERM, 143, ""),
        (signal.SIGINT, 130, "signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(15, signal.SIG_IGN)\n"),
        (signal.SIGKILL, -9, ""),
    ],
)
def test_a_signal_to_the_launcher_ends_all(
    number: signal.Signals, code: int, stubborn: str, no_mpi: dict[str, str], tmp_path: Path
) -> None:
    program = script(tmp_path, f"import signal\n{stubborn}{WAITING}{FOREVER}")
    interrupt = (tmp_path / "ready", number)
    run_command([*LAUNCHER, "-np", "3", *program], expect=code, timeout=40, interrupt=interrupt, env=no_mpi)


def test_a_second_interrupt_ends_the_job_at_once(no_mpi: dict[str, str], tmp_path: Path) -> None:
    asked = "signal.signal(signal.SIGTERM, lambda number, frame: (folder / 'asked').touch())\n"
    program = script(tmp_path, f"import signal\nsignal.signal(2, signal.SIG_IGN)\n{WAITING}{asked}{FOREVER}")

    def interrupt(processes: list[psutil.Process]) -> None:
        for _ in range(2):
            launcher(processes).send_signal(signal.SIGINT)
            time.sleep(0.3)  # two signals at once are one

    run_command(
        [*LAUNCHER, "-np", "2", *program], expect=130, timeout=40, interrupt=(tmp_path / "ready", interrupt), env=no_mpi
    )
    assert not (tmp_path / "asked").exists()


def test_a_signal_of_the_programs_reaches_all_ranks_and_ends_nothing(no_mpi: dict[str, str], tmp_path: Path) -> None:
    handler = "signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(0 if size == 2 else 9))\n"
    program = script(tmp_path, WAITING.replace("subprocess.Popen", f"{handler}subprocess.Popen", 1) + FOREVER)

    def interrupt(processes: list[psutil.Process]) -> None:
        launcher(processes).send_signal(signal.SIGUSR1)

    ready = (tmp_path / "ready", interrupt)
    run_command([*LAUNCHER, "-np", "2", *program], expect=0, timeout=30, interrupt=ready, env=no_mpi)


def test_a_dead_agent_ends_the_job(no_mpi: dict[str, str], tmp_path: Path) -> None:
    program = script(tmp_path, WAITING + FOREVER)
    interrupt = (tmp_path / "ready", lambda processes: agents(processes)[0].kill())
    result = run_command([*LAUNCHER, "-np", "2", *program], expect=1, timeout=30, interrupt=interrupt, env=no_mpi)
    lost = f"lost ranks 0, 1 on {os.uname().nodename}: the process that watches them was killed by SIGKILL"
    assert f"collectivesrun: {lost}" in result.output


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two hosts that share the tests' temporary folder."""
    with cluster(2, shared=tmp_path_factory.getbasetemp()) as made:
        yield made


def across(hosts: Cluster, others: str, *words: str, patience: float = 10, **more: Any) -> Result:
    """Run ``collectivesrun`` on host1, with two ranks there and two on each of the others.

    Args:
        patience: the setting ``peer_timeout``, of which the launcher bears twice, an agent three times.
    """
    named = ",".join(f"{host}:2" for host in ("host1", *others.split()))
    command = hosts.on("host1", *LAUNCHER, "--launcher", "ssh", "-H", named, *words)
    return run_command(command, timeout=60, env={"COLLECTIVES_PEER_TIMEOUT": str(patience)}, **more)


def test_ranks_on_other_hosts(hosts: Cluster, tmp_path: Path) -> None:
    program = script(
        tmp_path,
        """
import os, subprocess, sys
at = os.environ["COLLECTIVES_RENDEZVOUS"].rpartition(":")[0]
print(os.environ["COLLECTIVES_RANK"], os.uname().nodename, at, os.getcwd(), sys.argv[1:], os.environ.get("SSH_TTY"))
if os.environ["COLLECTIVES_LOCAL_RANK"] == "0":  # each pgrep has the key on its own command line
    assert not subprocess.run(["pgrep", "-f", os.environ["COLLECTIVES_KEY"]], stdout=subprocess.PIPE).stdout
""",
    )
    words = ["a b", "'\"$(touch pwned);\n"]
    shown = across(hosts, "host2", *program, *words).output
    for rank, host in enumerate(("host1", "host1", "host2", "host2")):
        assert f"[{rank}] {rank} {host} tcp://10.77.0.1 {os.getcwd()} {words} None\n" in shown


HOST = r"""#!/bin/sh
case " $* " in *" -G "*) echo "hostname 127.0.0.1"; exit;; esac
printf '\020ready 23456 127.0.0.1\n'
read -r task
rank=${task#*'COLLECTIVES_RANK": "'}
printf '\020ended %s 0\n\020done\n' "${rank%%'"'*}"
"""
"""Stands for ssh and, on the other host, an agent whose rank has ended at once."""


def test_more_hosts_than_select_takes(tmp_path: Path) -> None:
    """Under the limit of open files that most systems have."""
    (tmp_path / "ssh").write_text(HOST)
    (tmp_path / "ssh").chmod(0o755)
    named = ",".join(f"10.0.{number // 250}.{number % 250 + 1}" for number in range(400))
    limited = ["sh", "-c", 'ulimit -Sn 1024; exec "$@"', "sh", *LAUNCHER, "--launcher", "ssh", "-H", named, "true"]
    run_command(limited, timeout=120, env={"PATH": os.pathsep.join([str(tmp_path), os.environ["PATH"]])})


STANDS_IN = {
    "blaunch": """[ "$1" = -no-shell ] || exit 7
host=$2; shift 2; exec ssh -o BatchMode=yes "$host" "exec $(printf ' %q' "$@")"
""",
    "pbs_attach": """[ "$1 $2" = "-j 7.server" ] || exit 7
shift 2; export ATTACHED=7; exec "$@"
""",
}
"""Programs in place of batch systems' commands: what they do beyond ssh is not tested here."""


@pytest.mark.parametrize("program", STANDS_IN)
def test_a_batch_system_starts_ranks_on_its_other_host(program: str, hosts: Cluster, tmp_path: Path) -> None:
    (tmp_path / program).write_text(f"#!/bin/bash\n{STANDS_IN[program]}")
    (tmp_path / program).chmod(0o755)
    (tmp_path / "nodes").write_text("host1\nhost2\nhost2\n")
    job = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "host1 1 host2 2"}
    if program == "pbs_attach":
        job = {"PBS_JOBID": "7.server", "PBS_NODEFILE": str(tmp_path / "nodes")}
    ranks = script(tmp_path, "import os, sys\nprint(os.uname().nodename, os.environ.get('ATTACHED'), sys.argv[1:])\n")
    command = hosts.on("host1", *LAUNCHER, "--launcher", "batch", *ranks, "a b", "$x")
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    shown = run_command(command, timeout=60, env={**job, "PATH": path}).output
    attached = "7" if program == "pbs_attach" else None
    of_ranks = [f"[0] host1 None {['a b', '$x']}", *(f"[{rank}] host2 {attached} {['a b', '$x']}" for rank in (1, 2))]
    assert sorted(line for line in shown.splitlines() if line.startswith("[")) == of_ranks


def test_a_failure_on_another_host_is_shown_last(hosts: Cluster, tmp_path: Path) -> None:
    program = script(tmp_path, f"{WAITING}if rank == 3:\n    raise ValueError('no good')\n{FOREVER}")
    shown = across(hosts, "host2", *program, expect=1).output
    assert "collectivesrun: rank 3 on host2 failed with exit code 1 [L9]:\n" in shown
    assert shown.rstrip().endswith("ValueError: no good") and shown.count("Traceback") == 1


@pytest.mark.parametrize(
    ("options", "other", "reason"),
    [
        ([], "nowhere", "Could not resolve hostname nowhere"),
        (["--ssh-port", "999"], "host2", "port 999: Connection refused"),
        (["--start-timeout", "1"], "10.77.0.99", "10.77.0.99"),
    ],
)
def test_a_host_that_cannot_be_reached_is_named(options: list[str], other: str, reason: str, hosts: Cluster) -> None:
    shown = across(hosts, other, *options, "touch", "/tmp/started", expect=1).output
    assert f"collectivesrun: cannot start ranks 2, 3 on {other}: " in shown and reason in shown
    run_command(hosts.on("host1", "test", "!", "-e", "/tmp/started"))


def test_a_folder_that_is_missing_there_is_named(hosts: Cluster) -> None:
    private = hosts.on("host1", "sh", "-c", 'mkdir /tmp/private; cd /tmp/private; exec "$@"', "sh")
    command = [*LAUNCHER, "--launcher", "ssh", "-H", "host1:1,host2:1", "true"]
    shown = run_command([*private, *command], expect=1).output
    assert "collectivesrun: lost rank 1 on host2: " in shown and "cannot enter the folder '/tmp/private'" in shown


def test_a_python_that_is_missing_there_is_named(hosts: Cluster) -> None:
    link = 'ln -s "$1" /tmp/python; shift; exec /tmp/python "$@"'
    command = hosts.on("host1", "sh", "-c", link, "sh", sys.executable, *LAUNCHER[1:], "--launcher", "ssh")
    modules = {"PYTHONPATH": os.pathsep.join([os.getcwd(), sysconfig.get_path("purelib")])}
    shown = run_command([*command, "-H", "host1:1,host2:1", "true"], expect=1, env=modules).output
    assert "cannot start rank 1 on host2: ssh ended with exit code 127; /tmp/python and " in shown, shown


@pytest.mark.parametrize("end", ["agent", "connection"])
def test_a_host_that_is_lost_ends_the_job(end: str, hosts: Cluster, tmp_path: Path) -> None:
    seen: list[psutil.Process] = []

    def interrupt(processes: list[psutil.Process]) -> None:
        seen.extend(agents(processes))
        there = next(process for process in seen if process.parent().name().startswith("sshd"))
        (there if end == "agent" else there.parent()).kill()

    waiting = WAITING.replace("start_new_session", "close_fds") if end == "agent" else WAITING
    program = script(tmp_path, waiting + FOREVER)
    shown = across(hosts, "host2", *program, expect=1, interrupt=(tmp_path / "ready", interrupt)).output
    assert "collectivesrun: lost ranks 2, 3 on host2: the ssh connection ended with exit code" in shown
    assert len(seen) == 2 and all_end(seen)


def test_the_launchers_death_ends_all_ranks_on_all_hosts(hosts: Cluster, tmp_path: Path) -> None:
    seen: list[psutil.Process] = []

    def interrupt(processes: list[psutil.Process]) -> None:
        seen.extend(agents(processes))
        launcher(processes).kill()

    program = script(tmp_path, WAITING + FOREVER)
    across(hosts, "host2", *program, expect=137, interrupt=(tmp_path / "ready", interrupt))
    assert len(seen) == 2 and all_end(seen)


def test_a_cable_that_is_pulled_ends_the_job_on_both_sides(hosts: Cluster, tmp_path: Path) -> None:
    seen: list[psutil.Process] = []

    def interrupt(processes: list[psutil.Process]) -> None:
        seen.extend(agents(processes))
        hosts.cut("host2")

    program = script(tmp_path, WAITING + FOREVER)
    try:
        at_ready = (tmp_path / "ready", interrupt)
        shown = across(hosts, "host2", *program, patience=1.5, expect=1, interrupt=at_ready).output
        assert "collectivesrun: lost ranks 2, 3 on host2: no sign of life for " in shown
        assert len(seen) == 2 and all_end(seen)
    finally:
        hosts.heal("host2")


def test_a_stopped_launcher_is_waited_for(hosts: Cluster, tmp_path: Path) -> None:
    program = script(tmp_path, f"{WAITING}while not (folder / 'go').exists():\n    time.sleep(0.01)\n")

    def interrupt(processes: list[psutil.Process]) -> None:
        stopped = launcher(processes)
        stopped.send_signal(signal.SIGTSTP)
        time.sleep(3)  # longer than its silence is borne otherwise
        assert stopped.status() == psutil.STATUS_STOPPED
        (tmp_path / "go").touch()
        for process in (stopped, stopped.parent()):  # nsenter stops with it
            process.send_signal(signal.SIGCONT)

    across(hosts, "host2", *program, patience=0.8, interrupt=(tmp_path / "ready", interrupt))


def test_a_stopped_launcher_whose_host_is_lost_leaves_no_ranks(hosts: Cluster, tmp_path: Path) -> None:
    seen: list[psutil.Process] = []

    def interrupt(processes: list[psutil.Process]) -> None:
        stopped = launcher(processes)
        seen.extend(one for one in agents(processes) if one.parent().name().startswith("sshd"))
        ranks = [child for one in seen for child in one.children(recursive=True)]
        stopped.send_signal(signal.SIGTSTP)
        while stopped.status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        hosts.cut("host2")
        assert len(seen) == 1 and all_end(seen + ranks)
        for process in (stopped, stopped.parent()):  # nsenter stops with it
            process.send_signal(signal.SIGCONT)

    program = script(tmp_path, WAITING + FOREVER)
    try:
        at_ready = (tmp_path / "ready", interrupt)
        shown = across(hosts, "host2", *program, patience=1, expect=1, interrupt=at_ready).output
        assert "collectivesrun: lost ranks 2, 3 on host2: no sign of life for " in shown
    finally:
        hosts.heal("host2")
