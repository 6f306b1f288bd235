"""``collectives plan -np 8 [-H a:4,b:4] [--size 64M]``: what ``collectivesrun --show-plan`` prints, or a picture."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from collectives.base.config import algorithm_name
from collectives.base.errors import InvalidArgumentError
from collectives.launch import cli
from collectives.launch.usage import Parser

_USAGE = """\
usage: collectives plan -np N [-H HOST:N,...] [--size SIZE ...] [options of collectivesrun]
       collectives plan -np N --draw FILE.html [--collective NAME] [--algorithm NAME]

Print what the planner chooses for each collective on N ranks, and why: algorithm, transport, block
size. Nothing starts.
--size: a tensor's size, such as 64M; may be repeated (default: seven sizes from 4 bytes to 256M)
--draw: write a page that steps through the rounds of one algorithm on N ranks (default: allreduce by ring)
"""


def main(arguments: Sequence[str]) -> int:
    """Print the planner's choices or draw an algorithm, and return the exit code."""
    if {"-h", "--help"} & set(arguments):
        print(_USAGE, end="")
        return 0
    if "--draw" in arguments:
        return _draw(arguments)
    return cli.main(["--show-plan", *arguments])


def _draw(arguments: Sequence[str]) -> int:
    from collectives.tools import drawing

    parser = Parser("collectives plan", usage=_USAGE, add_help=False, allow_abbrev=False)
    parser.add_argument("-np", type=int, required=True)
    parser.add_argument("--draw", type=Path, required=True)
    parser.add_argument("--collective", default="allreduce")
    parser.add_argument("--algorithm", default="ring")
    asked = parser.parse_args(arguments)
    try:
        asked.algorithm = algorithm_name(asked.algorithm)
        asked.draw.write_text(drawing.page(asked.collective, asked.algorithm, asked.np), encoding="utf-8")
    except (InvalidArgumentError, OSError) as error:
        print(f"collectives plan: {error}", file=sys.stderr)
        return 2
    print(f"{asked.draw}: {asked.collective} by {asked.algorithm} on {asked.np} ranks")
    return 0
