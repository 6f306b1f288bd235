"""The options of ``collectivesrun``: what is the user's stays untouched, and every mistake is named, with exit code
2."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from collectives.base.config import ALGORITHMS, Config
from collectives.base.errors import InvalidArgumentError
from collectives.launch import cli, command_line, job, mpirun, rank, rank_environment, report
from collectives.launch.agents import Agents, HostRanks
from collectives.launch.elastic_agents import ElasticAgents
from collectives.launch.hosts import Host
from collectives.launch.mpirun import Launcher, MpiRanks, Vendor
from collectives.launch.output import Output
from collectives.launch.rank import pack, unpack
from collectives.launch.ssh import Ssh
from collectives.worlds import capabilities


@pytest.fixture(autouse=True)
def _no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("COLLECTIVES_", "HOROVOD_"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def environments() -> list[dict[str, str]]:
    """The settings in the environment of each job that would have been started."""
    return []


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, environments: list[dict[str, str]]) -> list[list[str]]:
    """Have nothing started; return the commands that would have been."""
    commands: list[list[str]] = []

    def run(ranks: MpiRanks, output: Output) -> int:
        commands.append(ranks.command)
        settings = ranks.environment.items()
        environments.append({name: text for name, text in settings if name.startswith(("COLLECTIVES_", "HOROVOD_"))})
        output.records.joined = True
        return 0

    monkeypatch.setattr(job, "run", run)
    monkeypatch.setattr(cli, "find", lambda: Launcher("mpirun", Vendor.MPICH, "5.0"))
    return commands


def split(*arguments: str) -> tuple[list[str], list[str]]:
    return command_line.split(command_line.make_parser(), arguments)


@pytest.mark.parametrize("spelling", ["-np", "-n", "--num-proc"])
def test_every_spelling_of_the_number_of_ranks(spelling: str, started: list[list[str]]) -> None:
    assert cli.main([spelling, "3", sys.executable, "-c", "pass"]) == 0
    assert cli.main([f"{spelling}=3", sys.executable, "-c", "pass"]) == 0
    assert [command[1:3] for command in started] == [["-n", "3"]] * 2


@pytest.mark.parametrize("spelling", ["-H", "--hosts"])
def test_hosts_give_the_number_of_ranks(spelling: str, started: list[list[str]]) -> None:
    assert cli.main([spelling, "h1:4,h2:2", "train"]) == 0
    assert started[0][1:5] == ["-n", "6", "-hosts", "h1:4,h2:2"]


@pytest.mark.parametrize("spelling", ["-hostfile", "--hostfile"])
def test_a_host_file(spelling: str, started: list[list[str]], tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("h1 slots=4\n")
    assert cli.main(["-np", "2", spelling, str(file), "train"]) == 0
    assert started[0][1:5] == ["-n", "2", "-hosts", "h1:4"]


def test_the_users_command_is_untouched(started: list[list[str]]) -> None:
    hostile = [":", "", "a b", "x\ny", "'\"$(touch pwned)", "é%41\udcff", "--mca", "=", "-x", "--mpi-args"]
    program = [sys.executable, "train.py", "-np", "7", "--verbose", "--", "--bogus", "-H", *hostile]
    assert cli.main(["-np", "2", *program]) == 0
    words = started[0][-len(program) :]
    assert unpack(words) == program
    assert all(re.fullmatch("=[A-Za-z0-9./_=,+%-]*", word) for word in words)


def test_the_place_that_an_outer_launcher_has_given_is_not_the_ranks() -> None:
    theirs = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    assert rank_environment.of_no_rank({**theirs, "TORCHELASTIC_RUN_ID": "none", "HOME": "/"}) == {"HOME": "/"}
    assert rank_environment.of_no_rank({"COLLECTIVES_MEMBER": "3", "LOCAL_RANK": "1", "HOME": "/"}) == {"HOME": "/"}
    address = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}  # the user's
    assert rank_environment.of_no_rank(address) == address


def test_any_bytes_of_an_argument_come_back() -> None:
    words = ["".join(map(chr, range(1, 256))), os.fsdecode(bytes(range(1, 256))), "%", ""]
    assert unpack(pack(words)) == words
    assert split("-np", "2", "--", "-odd-name", "--") == (["-np=2"], ["-odd-name", "--"])


@pytest.mark.parametrize(
    ("argument", "full"),
    [
        ("--fusion-threshold=32", "--fusion-threshold-mb=32"),
        ("--verb", "--verbose"),
        ("-prefix", "-prefix-timestamp"),
        ("-Hh1:2,h2:2", "-H=h1:2,h2:2"),
        ("-np4", "-np=4"),
        ("--timeline=a", "--timeline=a"),
    ],
)
def test_options_may_be_abbreviated(argument: str, full: str) -> None:
    assert split(argument, "python", "--verb") == ([full], ["python", "--verb"])


def test_every_option_of_horovodrun_is_known() -> None:
    flags = """-v --version -np --num-proc -cb --check-build --disable-cache --start-timeout --network-interfaces
        --network-interface --output-filename --verbose --config-file -p --ssh-port -i --ssh-identity-file
        --fusion-threshold-mb --cycle-time-ms --cache-capacity --hierarchical-allreduce --no-hierarchical-allreduce
        --hierarchical-allgather --no-hierarchical-allgather --torus-allreduce --no-torus-allreduce --autotune
        --no-autotune --autotune-log-file --autotune-warmup-samples --autotune-steps-per-sample
        --autotune-bayes-opt-max-samples --autotune-gaussian-process-noise --min-np --min-num-proc --max-np
        --max-num-proc --slots-per-host --elastic-timeout --reset-limit --blacklist-cooldown-range --timeline-filename
        --timeline-mark-cycles --no-timeline-mark-cycles --no-stall-check --stall-check
        --stall-check-warning-time-seconds --stall-check-shutdown-time-seconds --mpi-threads-disable
        --no-mpi-threads-disable --mpi-args --tcp --binding-args --num-nccl-streams --thread-affinity
        --gloo-timeout-seconds --log-level --log-with-timestamp --log-without-timestamp -prefix-timestamp
        --prefix-output-with-timestamp --log-hide-timestamp --no-log-hide-timestamp -H --hosts -hostfile --hostfile
        --host-discovery-script --gloo --mpi --jsrun"""
    known = {flag for action in command_line.make_parser()._actions for flag in action.option_strings}
    assert set(flags.split()) <= known


def test_arguments_for_mpirun_may_begin_with_a_dash(started: list[list[str]]) -> None:
    program = [sys.executable, "-c", "pass"]
    for arguments in (["--mpi-args", "-v --bind-to 'a b'"], ["--mpi-args=-v --bind-to 'a b'"]):
        assert cli.main(["-np", "2", *arguments, *program]) == 0
    assert [command[command.index("-v") :][:3] for command in started] == [["-v", "--bind-to", "a b"]] * 2


def test_choices_reach_the_ranks(started: list[list[str]], environments: list[dict[str, str]]) -> None:
    before = dict(os.environ)
    assert cli.main(["-np", "2", "--algorithm", "ring", "--transport", "mpi", sys.executable, "-c", "pass"]) == 0
    assert "-genvall" in started[0]
    assert environments == [{"COLLECTIVES_ALGORITHM": "ring", "COLLECTIVES_TRANSPORT": "mpi"}]
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--bogus -np 2 python", "unknown option '--bogus'"),
        ("--ver -np 2 python", "ambiguous option --ver: expected one of --verbose, --version"),
        ("-npx python", "-np/-n/--num-proc: expected a number of ranks, 1 or more, got 'x'"),
        ("--hostfule=f python", "unknown option '--hostfule' (did you mean '--hostfile'?)"),
        ("-np 2 --gloo --mpi python", "--gloo and --mpi contradict each other; pass only one of them"),
        (
            "-np 2 --cycle-time-ms abc python",
            "--cycle-time-ms: expected a number of milliseconds, 0 or more, got 'abc'",
        ),
        ("-np 2 --num-nccl-streams -1 python", "--num-nccl-streams: expected a whole number, 0 or more, got '-1'"),
        ("-np 2 --ssh-port 0 python", "-p/--ssh-port: expected a port, from 1 to 65535, got '0'"),
        ("-np 2 --start-timeout=inf python", "--start-timeout: expected a positive number of seconds, got 'inf'"),
        ("-np 2 --launcher gloo python", "--launcher: invalid choice: 'gloo'"),
        ("-np", "-np: expected a value"),
        ("-np 0 python", "got '0'"),
        ("python", "-np is missing"),
        ("-np 2", "no program given"),
        ("-np 2 -H h1:x python", "got 'h1:x'"),
        ("-np 5 -H h1:2,h2:2 python", "-np 5: the hosts have slots for only 4 of these (h1:2, h2:2)"),
        ("-np 2 -H h1:2 --hostfile f python", "not allowed with argument"),
        ("-np 2 --hostfile /no/such python", "cannot read '/no/such'"),
        ("-np 2 --algorithm best python", f"--algorithm: expected one of {', '.join(ALGORITHMS)}, one registered"),
        ("-np 2 --verbose=yes python", "--verbose"),
        ('-np 2 --mpi-args "\'open" python', "--mpi-args"),
        ("-np 2 --fusion-threshold-mb 64M python", "--fusion-threshold-mb: expected a number of MiB such as 64"),
        ("-np 2 --timeline '' python", "--timeline-filename/--timeline: expected a path, got ''"),
        ("-np 2 --config-file /no/such python", "--config-file: cannot read '/no/such'"),
        ("-np 2 --output-filename /dev/null sh", "--output-filename: cannot create the folder '/dev/null'"),
        ("-np 2 --timeline /dev/null/x.html sh", "cannot write the trace '/dev/null/x.html.json'"),
        ("-np 2 --reset-limit 1 python", "--reset-limit: only for elastic jobs"),
        (
            "-np 2 --min-np 1 --launcher mpi python",
            "--launcher mpi: MPI cannot run an elastic job: it ends all ranks when one fails",
        ),
        ("-np 2 --min-np 3 python", "--min-np: expected at most -np 2, got 3"),
        ("-np 2 --min-np 1 --max-np 1 python", "--max-np: expected at least -np 2, got 1"),
        ("--min-np 3 --max-np 2 python", "--max-np: expected at least --min-np 3, got 2"),
        ("--min-np 1 --slots 2 python", "--slots-per-host: only for --host-discovery-script"),
        ("--host-discovery-script x -H h1:2 python", "all name the hosts; pass only one of them"),
        ("--min-np 1 --blacklist-cooldown-range 5 2 python", "the smaller first, got 5 2"),
        ("--min-np 1 --blacklist-cooldown-range 5", "--blacklist-cooldown-range: expected 2 arguments"),
    ],
)
def test_a_mistake_is_named(
    line: str, message: str, started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(shlex.split(line)) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("collectivesrun: ") and message in shown
    assert not started


def test_a_folder_that_is_gone_is_said(
    started: list[list[str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert cli.main(["-np", "2", "--launcher", "ssh", sys.executable]) == 2
    assert "the current folder, in which the ranks would start, no longer exists" in capsys.readouterr().err
    assert not started


def test_a_python_file_alone_is_no_program(started: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["-np", "2", "train.py"]) == 127
    assert "cannot find the program 'train.py'; did you mean: python train.py?" in capsys.readouterr().err


def test_a_batch_system_gives_hosts_and_ranks(started: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    meeting: list[str] = []
    run = job.run

    def note(ranks: MpiRanks, output: Output) -> int:
        meeting.append(ranks.environment.get("MASTER_ADDR", ""))
        return run(ranks, output)

    monkeypatch.setattr(job, "run", note)
    monkeypatch.setenv("LSB_MCPU_HOSTS", "h1 4 h2 2")
    assert cli.main(["train"]) == 0
    assert started[-1][1:5] == ["-n", "6", "-hosts", "h1:4,h2:2"]
    assert cli.main(["-np", "2", sys.executable]) == 0
    assert started[-1][1:3] == ["-n", "2"] and "-hosts" not in started[-1]  # mpirun asks the batch system itself
    assert "h1" in meeting[-1]
    monkeypatch.setenv("LSB_MCPU_HOSTS", f"{socket.gethostname()} 3")
    assert cli.main([sys.executable]) == 0
    assert started[-1][1:3] == ["-n", "3"] and "-hosts" not in started[-1]


def test_in_a_job_the_batch_system_starts_ranks_also_of_elastic_jobs(
    by_agents: list[Agents], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "blaunch").write_text("#!/bin/sh\n")
    (tmp_path / "blaunch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("LSB_MCPU_HOSTS", "h1 4 h2 2")
    monkeypatch.setenv("LSB_JOBID", "7")
    assert cli.main(["--launcher", "batch", "train"]) == 0
    assert cli.main(["--min-np", "2", "train"]) == 0
    assert cli.main(["--launcher", "ssh", "train"]) == 0
    assert [ranks.remote.starter("h2") for ranks in by_agents] == ["blaunch", "blaunch", "ssh"]
    assert by_agents[0].places == [HostRanks("h1", (0, 1, 2, 3)), HostRanks("h2", (4, 5))]
    elastic = by_agents[1]
    assert isinstance(elastic, ElasticAgents) and elastic._look == (Host("h1", 4), Host("h2", 2))


@pytest.fixture
def by_agents(monkeypatch: pytest.MonkeyPatch) -> list[Agents]:
    """Have nothing started; return the ranks that would have been, without MPI."""
    found: list[Agents] = []

    def run(ranks: Agents, output: Output) -> int:
        found.append(ranks)
        output.records.joined = True
        return 0

    monkeypatch.setattr(job, "run", run)
    monkeypatch.setattr(cli, "find", lambda: Launcher("mpirun", Vendor.MPICH, "5.0"))
    return found


@pytest.mark.parametrize("missing", ["mpirun", "mpi4py"])
def test_without_mpi_the_ranks_are_started_from_here(
    missing: str, by_agents: list[Agents], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if missing == "mpirun":
        monkeypatch.setattr(cli, "find", lambda: None)
    else:
        monkeypatch.setitem(sys.modules, "mpi4py", None)
    program = [sys.executable, "-c", "pass"]
    assert cli.main(["-np", "2", *program]) == 0
    assert by_agents[0].places == [HostRanks("", (0, 1))] and unpack(by_agents[0].command[4:]) == program
    for option in ("--launcher=mpi", "--mpi"):
        assert cli.main(["-np", "2", option, *program]) == 2
    assert f"--launcher mpi: install {missing} (pip install " in capsys.readouterr().err


@pytest.mark.parametrize("chosen", ["--launcher=ssh", "--gloo", "file"])
def test_the_launcher_is_chosen(chosen: str, by_agents: list[Agents], tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("controller: gloo\n")
    option = f"--config-file={file}" if chosen == "file" else chosen
    assert cli.main(["-np", "2", option, sys.executable]) == 0
    assert cli.main(["-np", "2", f"--config-file={file}", "--mpi", sys.executable]) == 0
    assert [type(ranks) for ranks in by_agents] == [Agents, MpiRanks]


def test_names_of_this_host_count_as_one(by_agents: list[Agents]) -> None:
    hosts = f"other:2,localhost:1,127.0.0.1:1,{socket.gethostname()}:2,user@localhost:1,unused:1"
    assert cli.main(["-np", "7", "--launcher", "ssh", "-H", hosts, "train"]) == 0
    assert by_agents[0].places == [
        HostRanks("other", (0, 1)),
        HostRanks("", (2, 3, 4, 5)),
        HostRanks("user@localhost", (6,)),
    ]


def test_options_for_ssh(by_agents: list[Agents], capsys: pytest.CaptureFixture[str]) -> None:
    options = ["-p", "2222", "-i", "key", "--start-timeout", "7.5", "--launcher", "ssh"]
    assert cli.main(["-H", "h:2", *options, "--mpi-args", "-v", "train"]) == 0
    assert by_agents[0].remote == Ssh(2222, "key", 7.5)
    assert capsys.readouterr().err == "collectivesrun: --mpi-args has no effect: the ranks start without MPI [L24]\n"


def test_ranks_get_no_place_of_an_outer_launcher(by_agents: list[Agents], monkeypatch: pytest.MonkeyPatch) -> None:
    outer = ("COLLECTIVES_RANK", "COLLECTIVES_KEY", "OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE", "RANK", "SLURM_PROCID")
    for name in outer:
        monkeypatch.setenv(name, "3")
    for option in ("ssh", "mpi"):
        assert cli.main(["-np", "2", "--launcher", option, sys.executable]) == 0
    assert not set(outer) & by_agents[0].environment.keys()
    assert not {name for name in outer if name.startswith("COLLECTIVES_")} & by_agents[1].environment.keys()


def test_without_mpi_one_rank_becomes_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[Any] = []
    monkeypatch.setattr(cli, "find", lambda: None)
    monkeypatch.setattr(os, "execvpe", lambda *arguments: became.append(arguments) or sys.exit(0))
    with pytest.raises(SystemExit):
        cli.main(["-np", "1", "--cycle-time-ms", "2", sys.executable, "-c", "pass"])
    environment = {**os.environ, "COLLECTIVES_CYCLE_TIME": "2", "COLLECTIVES_ALLOW_SINGLE": "1"}
    assert became == [(sys.executable, [sys.executable, "-c", "pass"], environment)]


def test_without_mpi_one_rank_is_waited_for_where_its_output_is_kept(
    by_agents: list[Agents], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cli, "find", lambda: None)
    assert cli.main(["-np", "1", "--output-filename", str(tmp_path / "out"), sys.executable, "-c", "pass"]) == 0
    assert unpack(by_agents[0].command[-3:]) == [sys.executable, "-c", "pass"]


def test_a_single_rank_that_is_asked_for_is_meant(
    started: list[list[str]], environments: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for ranks in ("1", "2"):
        assert cli.main(["-np", ranks, sys.executable]) == 0
    monkeypatch.setenv("COLLECTIVES_ALLOW_SINGLE", "0")
    assert cli.main(["-np", "1", sys.executable]) == 0
    assert [Config.from_environment(environment).allow_single for environment in environments] == [True, False, False]


def test_closed_streams_are_no_obstacle(tmp_path: Path) -> None:
    program = "import sys; sys.exit(6 if sys.stdin.read() == '' else 7)"
    launch = f"""
import sys
from collectives.launch import cli
if "ctypes" in sys.modules:
    sys.exit(8)  # its library may hold the number of a closed stream already
cli.find = lambda: None
sys.exit(cli.main(["-np", "1", "--output-filename", {str(tmp_path)!r}, sys.executable, "-c", {program!r}]))
"""
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", launch]
    assert subprocess.run(command, timeout=60, check=False).returncode == 6


def test_a_flag_beats_the_file_which_beats_the_environment(
    started: list[list[str]], environments: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("params:\n  fusion_threshold_mb: 1\n  cycle_time_ms: 1\n  cache_capacity: 1\n")
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "2")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "2")
    assert cli.main(["-np", "2", "--config-file", str(file), "--fusion-threshold-mb", "3", sys.executable]) == 0
    config = Config.from_environment(environments[0])
    assert (config.fusion_threshold, config.cycle_time, config.cache_capacity) == (3 << 20, 1, 1)


def test_a_file_may_ask_for_the_command(
    started: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("verbose: true\nlogging:\n  hide_timestamp: true\n")
    assert cli.main(["-np", "2", "--config-file", str(file), sys.executable]) == 0
    shown = capsys.readouterr().err
    assert "collectivesrun: MPICH 5.0 (mpirun)" in shown and f"{file}:3: logging.hide_timestamp has no effect" in shown


def test_what_has_no_effect_is_said_once(started: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--tcp", "--tcp", "--ssh-port", "2222", "--start-timeout=9", "--prefix-output-with-timestamp"]
    assert cli.main(["-np", "2", *options, sys.executable]) == 0
    said = [line.partition(" has no effect: ")[0] for line in capsys.readouterr().err.splitlines()]
    assert said == [
        f"collectivesrun: {name}"
        for name in ("--tcp", "--prefix-output-with-timestamp", "--ssh-port", "--start-timeout")
    ]
    assert len(started) == 1


def test_the_folder_for_output_reaches_the_process_before_each_rank(started: list[list[str]], tmp_path: Path) -> None:
    assert cli.main(["-np", "11", "--output-filename", str(tmp_path / "a" / "b"), sys.executable]) == 0
    assert (
        unpack(started[0][-5:]) == [str(tmp_path / "a" / "b"), "2", "", "", sys.executable]
        and (tmp_path / "a" / "b").is_dir()
    )


@pytest.mark.parametrize(
    ("installed", "library", "said"),
    [
        (Launcher("mpirun", Vendor.MPICH, "5.0"), "MPICH Version", "yes, by MPI"),
        (
            Launcher("mpirun", Vendor.MPICH, "5.0"),
            "Open MPI v5.0",
            "only with --launcher ssh: mpirun belongs to MPICH",
        ),
        (Launcher("mpirun", Vendor.MPICH, "5.0"), "", "only with --launcher ssh: mpi4py cannot load"),
        (None, "MPICH Version", "yes, without MPI"),
        (InvalidArgumentError("unknown"), "MPICH Version", "only with --launcher ssh"),
    ],
)
def test_how_several_ranks_can_be_started(
    installed: Launcher | Exception | None, library: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find() -> Launcher | None:
        if isinstance(installed, Exception):
            raise installed
        return installed

    monkeypatch.setattr(report, "find", find)
    monkeypatch.setattr(capabilities, "mpi_library", lambda: library)
    text, complete = report.check_build()
    assert f"\nSeveral ranks: {said}" in text and complete == said.startswith("yes")
    monkeypatch.setattr(report, "version", lambda package: "")
    text = report.check_build()[0]
    assert "\nSeveral ranks: yes, without MPI\n" in text
    assert re.search(r"half precision .*\n +float16 and bfloat16 are slow without numkong", text), text


class Reports:
    """Stands in for the module that writes reports."""

    def __init__(self, error: Exception | None = None) -> None:
        self.written: list[tuple[Path, Path, str]] = []
        self._error = error

    def write(self, trace: Path, html: Path) -> None:
        self.written.append((trace, html, trace.read_text()))
        if self._error:
            raise self._error


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have nothing started; a job that would have been writes these texts as its trace."""
    traces: list[str] = []

    def run(ranks: MpiRanks, output: Output) -> int:
        if traces:
            Path(ranks.environment["COLLECTIVES_TIMELINE"]).write_text(traces.pop())
        return 3

    monkeypatch.setattr(job, "run", run)
    monkeypatch.setattr(cli, "find", lambda: Launcher("mpirun", Vendor.MPICH, "5.0"))
    return traces


@pytest.mark.parametrize("by", ["flag", "environment"])
def test_a_report_is_written_after_the_run(
    by: str, traced: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reports = Reports()
    monkeypatch.setitem(sys.modules, "collectives.launch.timeline_report", reports)  # type: ignore[arg-type]
    monkeypatch.chdir(tmp_path)
    traced.append("the trace")
    if by == "environment":
        monkeypatch.setenv("HOROVOD_TIMELINE", "run.html")
    assert cli.main(["-np", "2", *(["--timeline", "run.html"] if by == "flag" else []), sys.executable]) == 3
    assert reports.written == [(tmp_path / "run.html.json", Path("run.html"), "the trace")]


def test_without_a_trace_there_is_no_report(
    traced: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = Reports()
    monkeypatch.setitem(sys.modules, "collectives.launch.timeline_report", reports)  # type: ignore[arg-type]
    (tmp_path / "run.html.json").write_text("of an earlier run")
    assert cli.main(["-np", "2", "--timeline", str(tmp_path / "run.html"), sys.executable]) == 3
    assert not reports.written and "no rank wrote a timeline" in capsys.readouterr().err


def test_a_report_that_cannot_be_made_leaves_the_exit_code(
    traced: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = Reports(ValueError("no such phase"))
    monkeypatch.setitem(sys.modules, "collectives.launch.timeline_report", reports)  # type: ignore[arg-type]
    traced.append("broken")
    assert cli.main(["-np", "2", "--timeline", str(tmp_path / "run.html"), sys.executable]) == 3
    assert "did not write the report" in (shown := capsys.readouterr().err) and "no such phase" in shown


def test_a_timeline_of_another_name_is_the_trace_itself(
    started: list[list[str]], environments: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["-np", "2", "--timeline-filename", "run.json", "--timeline-mark-cycles", sys.executable]) == 0
    assert environments == [{"COLLECTIVES_TIMELINE": "run.json", "COLLECTIVES_TIMELINE_MARK_CYCLES": "1"}]


def test_the_mpirun_beside_this_python_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for place, version in (("beside", "5.0.1"), ("path", "4.1.0")):
        (tmp_path / place).mkdir()
        file = tmp_path / place / "mpirun"
        file.write_text(f"#!/bin/sh\necho 'mpirun (Open MPI) {version}'\n")
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "beside" / "python"))
    assert mpirun.find() == Launcher(str(tmp_path / "beside" / "mpirun"), Vendor.OPEN_MPI, "5.0.1")
    (tmp_path / "beside" / "mpirun").unlink()
    assert mpirun.find() == Launcher(str(tmp_path / "path" / "mpirun"), Vendor.OPEN_MPI, "4.1.0")
    # Intel MPI's looks for its own programs on PATH, on which a virtual environment need not be.
    (tmp_path / "beside" / "mpiexec.hydra").write_text(
        "#!/bin/sh\necho 'Intel(R) MPI Library for Linux* OS, Version 2021.19.0 Build 1'\n"
    )
    (tmp_path / "beside" / "mpirun").write_text("#!/bin/sh\nmpiexec.hydra $@\n")
    for file in (tmp_path / "beside").iterdir():
        file.chmod(0o755)
    assert mpirun.find() == Launcher(str(tmp_path / "beside" / "mpirun"), Vendor.INTEL_MPI, "2021.19.0")
    (tmp_path / "beside" / "mpirun").unlink()
    (tmp_path / "path" / "mpirun").write_text("#!/bin/sh\necho 'something else 1.0'\n")
    with pytest.raises(
        InvalidArgumentError, match=r"expected one of Open MPI, MPICH, Intel MPI, got 'something else 1\.0'"
    ):
        mpirun.find()


def test_version_help_and_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(*arguments: str, module: str = "collectives") -> str:
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    assert shown("--version") == shown("--version", module="collectives.launch") and shown("--version").startswith(
        "collectives "
    )
    assert "collectivesrun -np N [options] PROGRAM" in shown("--help")
    plan = shown("-np", "4", "--show-plan")
    assert "4 ranks on 1 host" in plan and "allreduce" in plan
    one_shot = (
        r"^allreduce +4 B +one-shot +copies through shared memory \(window\) +1 MiB +one round, up to 32768 bytes"
    )
    assert re.search(one_shot, plan, re.M), plan
    direct = (
        r"^broadcast +256 MiB +direct +reads of the peer's memory \(direct-read\) +32 MiB +above 131072 bytes; direct"
    )
    assert re.search(direct, plan, re.M), plan
    between = shown("-H", "a:2,b:2", "--show-plan")
    assert "hierarchical" in between and re.search(r"^allreduce +4 B +native", between, re.M), between
    monkeypatch.setenv("COLLECTIVES_NETWORK", "tcp")
    over_tcp = shown("-H", "a:2,b:2", "--show-plan")
    assert re.search(r"^allreduce +4 B +inline .* data is sent with the coordination messages", over_tcp, re.M), (
        over_tcp
    )


@pytest.mark.parametrize(
    ("options", "joined", "failed", "code", "words"),
    [
        (
            [],
            False,
            0,
            0,
            "each of them did all of the work, alone; pass --as-horovod if the program imports horovod [L141]",
        ),
        (["--launcher=ssh"], False, 0, 0, "or --launcher mpi if it looks for Open MPI's variables [L141]"),
        (["--as-horovod"], False, 0, 1, "--as-horovod: no rank called init()"),
        (["--as-horovod", "--launcher=ssh"], False, 0, 1, "alone; pass --launcher mpi if it looks"),
        (["--as-horovod", "--min-np=2"], False, 0, 1, "alone; pass --launcher mpi if it looks"),
        (["--as-horovod"], True, 0, 0, ""),
        (["--as-horovod"], False, 3, 3, ""),
        (["--as-horovod", "-np=1"], False, 0, 0, ""),
    ],
)
def test_ranks_that_never_join_each_other_are_noticed(
    options: list[str],
    joined: bool,
    failed: int,
    code: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(ranks: job.Ranks, output: Output) -> int:
        if joined:
            output.records.add(0, b"\n", inside=True)
        return failed

    monkeypatch.setattr(job, "run", run)
    monkeypatch.setattr(cli, "find", lambda: Launcher("mpirun", Vendor.MPICH, "5.0"))
    assert cli.main(["-np=2", *options, sys.executable]) == code
    shown = capsys.readouterr().err
    assert words in shown and ("L141" in shown) == bool(words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--timeline", "/nonexistent/run.json"],
            "timeline /nonexistent/run.json: the folder '/nonexistent' does not exist",
        ),
        (["--timeline", "/nonexistent/run.html"], "cannot be written; create it, or choose another one [L142]"),
        (["--autotune-log-file", "/nonexistent/x.csv"], "autotune log /nonexistent/x.csv: the folder"),
        (["--network-interface", "nope0"], "network interface 'nope0': expected the name"),
    ],
)
def test_places_that_are_not_there_are_refused_before_ranks_start(
    options: list[str], words: str, started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["-np", "2", *options, sys.executable]) == 2
    assert words in capsys.readouterr().err and not started
    assert cli.main(["-np", "2", "-H", "elsewhere:2", *options, sys.executable]) == 0


def test_open_mpis_rank_0_reads_standard_input_itself_if_it_is_here(
    started: list[list[str]], environments: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank, "input_of_here", lambda: "here")
    monkeypatch.setattr(cli, "find", lambda: Launcher("mpirun", Vendor.OPEN_MPI, "5.0"))
    for options in ([], ["-H", "localhost:2"], ["-H", "elsewhere:2"], ["--mpi-args=--stdin 1"]):
        assert cli.main(["-np", "2", *options, sys.executable]) == 0
    monkeypatch.setattr(cli, "find", lambda: Launcher("mpirun", Vendor.MPICH, "5.0"))
    assert cli.main(["-np", "2", sys.executable]) == 0
    assert [settings.get(rank.INPUT) for settings in environments] == ["here", "here", None, None, None]
