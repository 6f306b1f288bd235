"""Runs the files of tests/mpi that are marked ``mpi`` under mpirun: 1 to 4 ranks, Open MPI and MPICH.

All files for a number of ranks go into one run, since starting Python, pytest and MPI takes ranks longer than most of
the tests. A file may narrow the number of ranks with a line of its own: ``RANKS = (2, 3)``, or by MPI where only the
number or only the MPI counts: ``RANKS = {"openmpi": (1, 3), "mpich": (2,)}``.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.launching.mpirun import IMPLEMENTATIONS, ROOT, run_ranks

DEFAULT_RANKS = (1, 2, 3, 4)


def _ranks(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the numbers of ranks that a file wants, by MPI, without importing it; none if it is not marked ``mpi``."""
    tree = ast.parse(file.read_text())
    assigned = {
        ast.unparse(node.targets[0]): ast.unparse(node.value) for node in tree.body if isinstance(node, ast.Assign)
    }
    if "pytest.mark.mpi" not in assigned.get("pytestmark", ""):
        return {}
    wanted = ast.literal_eval(assigned.get("RANKS", repr(DEFAULT_RANKS)))
    return wanted if isinstance(wanted, dict) else dict.fromkeys(IMPLEMENTATIONS, wanted)


WANTED = {file: _ranks(file) for file in sorted((ROOT / "tests" / "mpi").glob("test_*.py"))}
FILES = {
    (mpi, n): files
    for mpi in IMPLEMENTATIONS
    for n in DEFAULT_RANKS
    if (files := [file for file, ranks in WANTED.items() if n in ranks.get(mpi, ())])
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("mpi", "n"), FILES, ids=[f"{mpi}-{n}" for mpi, n in FILES])
def test_under_mpirun(mpi: str, n: int) -> None:
    result = run_ranks(n, FILES[mpi, n], mpi=mpi, timeout=540)
    assert all(" passed" in output for output in result.ranks), str(result)
