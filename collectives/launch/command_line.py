"""The command line of ``collectivesrun``: its parser, and where the user's command begins.

What follows the launcher's own options is the user's command, which is passed on untouched.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from collectives import __version__
from collectives.base import config
from collectives.base.errors import InvalidArgumentError
from collectives.base.suggestions import did_you_mean
from collectives.launch import elastic_options, kubernetes, node
from collectives.launch.options import IGNORED, SWITCHES, VALUES, nonempty, parsed

_EPILOG = """\
examples:
  collectivesrun -np 4 python train.py --epochs 3
  collectivesrun -np 8 -H host1:4,host2:4 python train.py
  collectivesrun --launcher ssh -np 8 -H host1:4,host2:4 python train.py
  collectivesrun -np 2 --mpi-args "--bind-to none" python train.py
  collectivesrun -np 4 --timeline run.html python train.py
  collectivesrun -np 4 --as-horovod python their_script.py
  collectivesrun --min-np 2 --max-np 8 --host-discovery-script ./hosts.sh python train.py
  collectivesrun --kubernetes job.yaml --image registry/train:1 -np 8 --gpus-per-pod 4 python train.py

Options take precedence over --config-file, and --config-file over the environment (COLLECTIVES_..., HOROVOD_...).
Options may be abbreviated. All options of horovodrun are accepted; a message names those that have no effect here.

Each line of the ranks' output begins with its rank; --no-tag leaves the lines unchanged.

exit code: 0, or the exit code of the rank that failed first (its traceback is shown last); 2 for a mistake in the
options.
"""
_ONE_OF = (
    ("--gloo", "--mpi", "--jsrun", "--launcher"),
    (
        *("--log-with-timestamp", "--log-without-timestamp", "--log-hide-timestamp", "--no-log-hide-timestamp"),
        *("-prefix-timestamp", "--prefix-output-with-timestamp"),
    ),
)
"""Mutually exclusive options, besides every ``--x`` and its ``--no-x``."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidArgumentError(f"{message} [L26]")


def _type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser as an argparse type, whose ValueErrors argparse shows unchanged."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


_port = _type(partial(parsed, config.parser(int, "a port, from 1 to 65535", lambda port: 1 <= port <= 65535)))
_size = _type(partial(parsed, config.parse_bytes, expected="a number of bytes such as 4096 or 64M"))
_port_or_any = _type(partial(parsed, config.parser(int, "a port, or 0", lambda port: 0 <= port <= 65535)))
_path = _type(partial(parsed, nonempty))
_seconds = _type(
    partial(parsed, config.parser(float, "a positive number of seconds", lambda seconds: 0 < seconds < float("inf")))
)


def make_parser(program: str = "collectivesrun") -> argparse.ArgumentParser:
    """Return the parser of the launcher's own options; ``program`` is its name in the help."""
    parser = _Parser(
        prog=program,
        usage=f"{program} -np N [options] PROGRAM [arguments]",
        description="Start N ranks of a program, and end all of them when one fails.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-np",
        "-n",
        "--num-proc",
        dest="ranks",
        metavar="N",
        type=_positive,
        help="number of ranks (default: all slots of the hosts, or what Slurm, LSF or PBS has allotted)",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "-H", "--hosts", metavar="HOST:N,...", help="hosts, and the ranks on each, such as host1:4,host2:4"
    )
    where.add_argument(
        "-hostfile", "--hostfile", metavar="FILE", help="a file of hosts, one a line: 'host slots=4' or 'host:4'"
    )
    launcher = parser.add_argument("--launcher", choices=("mpi", "ssh", "batch"))
    launcher.help = (
        "how to start the ranks: mpi (by mpirun), ssh (by this program, with ssh for other hosts) or batch (by this "
        "program, with Slurm, LSF or PBS for other hosts). Default: mpi where mpirun and mpi4py are installed; else "
        "batch in a job of Slurm, LSF or PBS; else ssh"
    )
    parser.add_argument("--mpi", dest="launcher", action="store_const", const="mpi", help="same as --launcher mpi")
    parser.add_argument("--gloo", dest="launcher", action="store_const", const="ssh", help="same as --launcher ssh")
    parser.add_argument("-p", "--ssh-port", metavar="PORT", type=_port, help="the port of the hosts' ssh servers")
    parser.add_argument("-i", "--ssh-identity-file", metavar="FILE", type=_path, help="the private key for ssh")
    start_timeout = parser.add_argument("--start-timeout", metavar="SECONDS", type=_seconds)
    start_timeout.help = "how long the ranks may take to start (default: 30)"
    mpi_args = parser.add_argument(
        "--mpi-args", "--binding-args", metavar="ARGS", type=_words, action="extend", default=[]
    )
    mpi_args.help = "more arguments for mpirun, in quotes"
    as_horovod = parser.add_argument("--as-horovod", action="store_true")
    as_horovod.help = (
        "run a program written for Horovod: `import horovod` imports collectives, unless Horovod is installed"
    )
    parser.add_argument("--config-file", metavar="FILE", help="read settings from a YAML file in Horovod's form")
    parser.add_argument(
        "--output-filename",
        metavar="DIR",
        help="also write each rank's output to DIR/rank.N/stdout and DIR/rank.N/stderr",
    )
    parser.add_argument(
        "--no-tag", dest="tag", action="store_false", help="leave out the [rank] before each line of output"
    )
    verbose = parser.add_argument("--verbose", action="store_true")
    verbose.help = (
        "print the command that starts the ranks, the MPI launcher's messages, and the whole traceback of every rank, "
        "frames of the engine included"
    )
    this_node = parser.add_argument("--node", metavar="K/N", type=_type(partial(parsed, node.parse)))
    this_node.help = (
        "start the ranks of host K of N, counted from 0, on this host; run this command on every host, with the same "
        "COLLECTIVES_RENDEZVOUS and COLLECTIVES_KEY"
    )
    status_port = parser.add_argument("--status-port", metavar="PORT", type=_port_or_any)
    status_port.help = (
        "serve a web page to this host that shows what each rank does, and which rank is late; 0: at any free port"
    )
    parser.add_argument("--show-plan", action="store_true", help="print what the planner chooses for N ranks, and exit")
    sizes = parser.add_argument("--size", metavar="SIZE", dest="sizes", action="append", type=_size)
    sizes.help = "with --show-plan: a tensor's size, such as 64M; may be repeated"
    parser.add_argument("-cb", "--check-build", action="store_true", help="print what is installed, and exit")
    doctor = parser.add_argument("--doctor", action="store_true")
    doctor.help = (
        "check this host and those of -H: print what is wrong or slow, and what to do; exit with 1 if anything is wrong"
    )
    parser.add_argument("--json", action="store_true", help="with --doctor: print a list of findings in JSON")
    version = f"collectives {__version__}"
    if program == "horovodrun":
        version = f"{importlib.import_module('collectives.horovod').VERSION} ({version})"
    parser.add_argument("-v", "--version", action="version", version=version)
    elastic_options.add_to(parser, _positive, _type(partial(parsed, config.count)), _seconds)
    kubernetes.add_to(parser, _positive)
    add_to(parser)
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
    """Divide arguments into the launcher's own and the user's command, which begins at the first non-option.

    An InvalidArgumentError names an option that is unknown, ambiguous, contradicts another, or lacks its value.
    """
    actions = {name: action for action in parser._actions for name in action.option_strings}
    own: list[str] = []
    flags: list[str] = []
    position = 0
    while position < len(arguments) and arguments[position].startswith("-") and arguments[position] != "--":
        name, equals, value = _in_full(arguments[position], actions)
        flags.append(name)
        nargs = actions[name].nargs
        if nargs is None and not equals:
            if position + 1 == len(arguments):
                raise InvalidArgumentError(f"{name}: expected a value [L27]")
            # In one word, because the value may begin with "-".
            own.append(f"{name}={arguments[position + 1]}")
            position += 1
        elif isinstance(nargs, int) and nargs:
            own += [name, *arguments[position + 1 : position + 1 + nargs]]
            position += nargs
        else:
            own.append(f"{name}{equals}{value}")
        position += 1
    check_together(flags)
    rest = list(arguments[position:])
    return own, rest[1:] if rest[:1] == ["--"] else rest


def _in_full(argument: str, actions: Mapping[str, argparse.Action]) -> tuple[str, str, str]:
    """Split an option such as ``--fusion-thr=8`` or ``-Hhost:2`` into full name, ``=`` or nothing, and value."""
    name, equals, value = argument.partition("=")
    alike = [flag for flag in actions if flag.startswith(name)]
    attached = [
        flag for flag, row in actions.items() if flag[1] != "-" and argument.startswith(flag) and row.nargs is None
    ]
    if name in actions:
        full_name = name
    elif len({id(actions[flag]) for flag in alike}) == 1:
        full_name = alike[0]
    elif alike:
        raise InvalidArgumentError(f"ambiguous option {name}: expected one of {', '.join(sorted(alike))} [L28]")
    elif attached:
        full_name = max(attached, key=len)
        equals, value = "=", argument.removeprefix(full_name)
    else:
        meant = did_you_mean(name, actions)
        raise InvalidArgumentError(f"unknown option {name!r}{meant}; collectivesrun --help lists all options [L29]")
    return full_name, equals, value


def check_together(flags: Sequence[str]) -> None:
    """Raise an InvalidArgumentError if two of the options, by their full names, contradict each other."""
    distinct = list(dict.fromkeys(flags))
    pairs = [(f"--{flag.removeprefix('--no-')}", flag) for flag in distinct if flag.startswith("--no-")]
    for group in (*_ONE_OF, *pairs):
        both = [flag for flag in distinct if flag in group]
        if len(both) > 1:
            raise InvalidArgumentError(f"{both[0]} and {both[1]} contradict each other; pass only one of them [L30]")


class _Ignore(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        assert option_string is not None
        row = next(row for row in IGNORED if option_string in row.flags)
        try:
            variables = row.variables(option_string, values if row.parse else None)
        except ValueError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        namespace.variables = {**namespace.variables, **variables}
        namespace.ignored = [*namespace.ignored, f"{option_string} has no effect: {row.why} [L31]"]


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add all options of the table to a parser."""
    group = parser.add_argument_group("settings, for all ranks")
    for value in VALUES:
        group.add_argument(
            *value.flags, dest=value.flags[0], metavar=value.metavar, help=value.help, type=_type(value.text)
        )
    for switch in SWITCHES:
        if switch.off:
            group.add_argument(
                *switch.flags, dest=switch.flags[0], help=switch.help, action=argparse.BooleanOptionalAction
            )
        else:
            group.add_argument(*switch.flags, dest=switch.flags[0], help=switch.help, action="store_const", const=True)
    parser.set_defaults(ignored=[], variables={})
    for row in IGNORED:
        for flag in row.flags:
            nargs = None if row.parse else 0
            parser.add_argument(
                flag, dest="ignored", action=_Ignore, nargs=nargs, default=argparse.SUPPRESS, help=argparse.SUPPRESS
            )


def chosen(options: argparse.Namespace) -> dict[str, str | bool]:
    """Return the settings that parsed options choose, by each option's first spelling."""
    names = [row.flags[0] for row in (*VALUES, *SWITCHES)]
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}
