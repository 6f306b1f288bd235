"""What users read last is what the first rank that failed has said, whatever launchers do to the others.

A few launches; the table of all kinds is in ``tests/unit/test_launch_records.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launching.mpirun import python_for, run_command

PROGRAM = """
import os, signal, sys, time
import numpy as np, collectives as hvd

ending = sys.argv[1]
if ending == "is late":
    os.environ["COLLECTIVES_TIMEOUT"] = "2"
hvd.init()
hvd.allreduce_(np.ones(4), name="first")
if ending == "listens to nothing":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if hvd.rank() == 1:
    if ending == "leaves":
        sys.exit(0)
    if ending == "is refused":
        hvd.allreduce_(np.ones(4), name="gradient", op="no such operation")
    if ending == "listens to nothing":
        hvd.shutdown()
    time.sleep(60)
hvd.allreduce_(np.ones(4), name="gradient")  # this line
"""
LINE = PROGRAM.splitlines().index('hvd.allreduce_(np.ones(4), name="gradient")  # this line') + 1
MISSED = "rank 1 has shut down or ended while this rank waits for it"


@pytest.mark.parametrize(
    ("ending", "launcher", "mpi", "code", "failed", "words"),
    [
        ("leaves", "mpi", "openmpi", 1, 0, MISSED),
        ("leaves", "mpi", "mpich", 1, 0, MISSED),
        ("leaves", "ssh", "openmpi", 1, 0, MISSED),
        ("listens to nothing", "ssh", "openmpi", 1, 0, MISSED),
        ("is late", "ssh", "openmpi", 1, 0, "waited 2 s for rank 1"),
        ("is refused", "mpi", "mpich", 1, 1, "got 'no such operation' [A8]"),
    ],
)
def test_the_first_ranks_words_are_the_last(
    ending: str, launcher: str, mpi: str, code: int, failed: int, words: str, tmp_path: Path
) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    python = str(python_for(mpi))
    command = [python, "-m", "collectives", "--launcher", launcher, "-np", "2", python, str(program), ending]
    result = run_command(command, timeout=40, expect=code)
    _, _, last = result.output.rpartition(f"collectivesrun: rank {failed} on")
    assert words in f"rank {failed} on{last}", str(result)
    if words == MISSED:
        assert f"rank 0 was waiting for allreduce 'gradient', submitted at {program}:{LINE}" in last, str(result)
