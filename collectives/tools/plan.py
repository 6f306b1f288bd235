"""``collectives plan -np 8 [-H a:4,b:4] [--size 64M]``: what ``collectivesrun --show-plan`` prints."""

from __future__ import annotations

from collections.abc import Sequence

from collectives.launch import cli

_USAGE = """\
usage: collectives plan -np N [-H HOST:N,...] [--size SIZE ...] [options of collectivesrun]

Print what would be chosen for each collective on N ranks, and why: algorithm, transport, block size. Nothing starts.
--size: a tensor's size, such as 64M; may be repeated (default: seven sizes from 4 bytes to 256M)
"""


def main(arguments: Sequence[str]) -> int:
    """Print the planner's choices, and return the exit code."""
    if {"-h", "--help"} & set(arguments):
        print(_USAGE, end="")
        return 0
    return cli.main(["--show-plan", *arguments])
