"""The harness keeps its promises: bounded, every rank's output shown, nothing left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.launching.mpirun import IMPLEMENTATIONS, UNUSED, run_command, run_ranks

HANG = """
import sys
from pathlib import Path
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
print(f"this is rank {rank}")
def the_call_that_hangs():
    MPI.COMM_WORLD.Barrier()
    Path(sys.argv[1]).touch()
    MPI.COMM_WORLD.recv(source=1 - rank)
the_call_that_hangs()
"""


@pytest.mark.parametrize("mpi", IMPLEMENTATIONS)
def test_a_hang_is_ended_and_every_rank_is_shown(mpi: str, tmp_path: Path) -> None:
    def time_is_up(processes: list[psutil.Process]) -> None:
        raise subprocess.TimeoutExpired([], 60)

    hangs = tmp_path / "hangs"
    with pytest.raises(AssertionError) as failure:
        run_ranks(2, HANG, mpi=mpi, args=[str(hangs)], interrupt=(hangs, time_is_up))
    text = str(failure.value)
    assert "not finished after 60.0 s" in text
    assert "this is rank 0" in text and "this is rank 1" in text
    assert text.count("in the_call_that_hangs") == 2


def test_a_process_left_behind_is_found_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.launching.mpirun._PATIENCE", 0.5)
    leave = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], "
        "start_new_session=True)"
    )
    with pytest.raises(AssertionError, match=r"left behind: .*time\.sleep"):
        run_command([sys.executable, "-c", leave], timeout=20)


def test_what_is_hidden_counts_as_not_installed() -> None:
    program = "from importlib.util import find_spec; print(find_spec('sklearn'), find_spec('numpy') is not None)"
    assert run_command([sys.executable, "-c", program], env=UNUSED).output == "None True\n"
