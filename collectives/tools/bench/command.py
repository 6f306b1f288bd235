"""``collectives bench COLLECTIVE ...``: start ranks that measure, or be one of them where a launcher has started it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from collectives.base.errors import InvalidArgumentError
from collectives.base.suggestions import did_you_mean
from collectives.launch import cli as launch
from collectives.launch.command_line import make_parser, split
from collectives.launch.hosts import allotted
from collectives.tools.bench import cli, plot, run
from collectives.tools.bench.definitions import COLLECTIVES
from collectives.tools.bench.ranks import launchers_variable

_USAGE = f"""\
usage: collectives bench [-np N] [-H HOST:N,...] [options of collectivesrun] COLLECTIVE [flags]
       collectives bench plot RESULTS.json PICTURE.png

Time and check a collective over a range of sizes, on 2 ranks by default. If a launcher (collectivesrun, mpirun, srun,
torchrun) has started this program, it measures on the launcher's ranks: -H has no effect, and -np must be their number.

COLLECTIVE: {", ".join(COLLECTIVES)}
collectives bench COLLECTIVE --help shows the flags
-np and -H may also come after COLLECTIVE
"""


def main(arguments: Sequence[str]) -> int:
    """Run ``collectives bench`` and return its exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return 0
    if arguments[0] == "plot":
        plot.redraw("collectives bench plot", "the JSON file of a benchmark", plot.plot, arguments[1:])
        return 0
    try:
        return _start(arguments)
    except InvalidArgumentError as error:
        print(f"collectives bench: {error}; see collectives bench --help", file=sys.stderr)
        return 2


def _start(arguments: Sequence[str]) -> int:
    parser = make_parser("collectives bench")
    own, command = split(parser, arguments)
    name, *flags = command or [""]
    if name not in COLLECTIVES:
        meant = did_you_mean(name, COLLECTIVES)
        raise InvalidArgumentError(f"expected {', '.join(COLLECTIVES)} or plot, got {name!r}{meant} [U2]")
    for option in ("-np", "-H"):
        while option in flags:
            at = flags.index(option)
            own += split(parser, flags[at : at + 2])[0]
            del flags[at : at + 2]
    options = parser.parse_args(own)
    if launchers_variable(os.environ):
        return rank(name, *flags, size=options.ranks)
    cli.settings(cli.parser(f"collectives bench {name}", COLLECTIVES[name]), flags)  # says mistakes
    if not (options.ranks or options.hosts or options.hostfile or allotted(os.environ)):
        own += ["-np", "2"]
    return launch.main([*own, "--no-tag", sys.executable, "-m", "collectives.tools.bench", name, *flags])


def rank(name: str, *flags: str, size: int | None = None) -> int:
    """Be one of the ranks, of which there must be as many as ``size``, if it is given, and return its exit code."""
    return run.main(f"collectives bench {name}", COLLECTIVES[name], flags, size=size)
