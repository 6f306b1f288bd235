"""A small job by each launcher: ``collectivesrun`` with and without MPI, and ``srun`` in a job of Slurm's."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from collectives.launch.doctor.findings import FINE, WRONG, Finding

_RANK = [sys.executable, "-m", "collectives.launch.doctor.rank"]
_WITHIN = 20.0


def by_collectivesrun(launcher: str, *words: str) -> tuple[Finding, dict[str, Any]]:
    """Start a job by ``collectivesrun --launcher ...``; returns what is to be said of it, and its world (`rank.py`)."""
    check = "job by mpirun" if launcher == "mpi" else "job without MPI"
    return _run(check, ["collectivesrun", "--launcher", launcher, *words])


def by_srun() -> list[Finding]:
    """Start two tasks by ``srun``, inside a job of Slurm's."""
    if "SLURM_JOB_ID" not in os.environ or shutil.which("srun") is None:
        return []
    return [_run("job by srun", ["srun", "--overlap", "-n", "2"])[0]]


def _run(check: str, launcher: Sequence[str]) -> tuple[Finding, dict[str, Any]]:
    began, said = time.monotonic(), ""
    own = [sys.executable, "-m", "collectives.launch", "--no-tag", *launcher[1:]]  # its command need not be on PATH
    command = [*(own if launcher[0] == "collectivesrun" else launcher), *_RANK]
    try:
        said = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_WITHIN,
            check=False,
        ).stdout.strip()
    except subprocess.TimeoutExpired:
        said = f"it was ended after {_WITHIN:g} s"
    for line in said.splitlines():
        with suppress(ValueError, TypeError):
            world = json.loads(line)
            by = f"connected by {world['network'].upper()}"
            return Finding(check, FINE, f"{world['size']} ranks in {time.monotonic() - began:.1f} s, {by}"), world
    again = shlex.join([*launcher, "python", *_RANK[1:]])
    last = said.rpartition("\n")[2] or "it ended without a word"
    return Finding(check, WRONG, last, "no job starts in this way", f"read all that is said: {again}"), {}
