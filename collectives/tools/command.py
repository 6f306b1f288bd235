"""``collectives COMMAND ...``: hands the arguments on to the command's module."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence

from collectives import __version__
from collectives.base.suggestions import did_you_mean

COMMANDS = {
    "run": ("collectives.launch.cli", "start a program on N ranks: collectivesrun"),
    "bench": ("collectives.tools.bench.command", "time and check a collective over sizes"),
    "demo": ("collectives.tools.demo", "measure bandwidth and train a small model in parallel on this machine"),
    "plan": ("collectives.tools.plan", "print what the planner chooses for N ranks: algorithm, transport, block size"),
    "doctor": ("collectives.launch.doctor", "find what is wrong or slow, and what to do: collectivesrun --doctor"),
    "simulate": ("collectives.tools.simulate", "predict collectives and training steps on a cluster you do not have"),
    "report": ("collectives.launch.timeline_report", "turn a timeline into an HTML page or text"),
    "explain": ("collectives.tools.explain", "explain the code at the end of a message: its cause and its cure"),
    "status": ("collectives.tools.status", "show what each rank of a running job does, and which rank it waits for"),
}
"""By command: the module whose ``main(arguments) -> int`` it is, and a line of help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``collectives`` and return its exit code."""
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # "collectives report --text | head": the reader is gone. Python's flush at exit would report it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _run(arguments: Sequence[str] | None) -> int:
    name, *own = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in COMMANDS:
        return int(importlib.import_module(COMMANDS[name][0]).main(own))
    if name in ("-v", "--version"):
        print(f"collectives {__version__}")
        return 0
    rows = "\n".join(f"  {command:10}{line}" for command, (_, line) in COMMANDS.items())
    usage = f"usage: collectives COMMAND [arguments]\n\n{rows}\n\ncollectives COMMAND --help shows its arguments"
    if name in ("-h", "--help"):
        print(usage)
        return 0
    meant = did_you_mean(name, COMMANDS)
    print(f"collectives: unknown command {name!r}{meant}; expected {', '.join(COMMANDS)} [U7]", file=sys.stderr)
    return 2
