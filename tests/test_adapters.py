"""Runs the tests of the framework adapters under mpirun: all files of a framework in one run for each number of ranks.

Starting a framework takes longer than most of its tests, so that the ranks go through all files without ending in between.
"""

from __future__ import annotations

import pytest

from tests.mpirun import ROOT, run_ranks

FOLDER = ROOT / "tests" / "adapters"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("n", (1, 2, 3, 4))
@pytest.mark.parametrize("framework", ("torch",))
def test_adapter(framework: str, n: int) -> None:
    pytest.importorskip(framework)
    files = sorted(str(path) for path in FOLDER.glob(f"test_{framework}_*.py"))
    assert files
    result = run_ranks(n, ["-m", "pytest", "--with-mpi", "-q", "-x", "-p", "no:cacheprovider", *files], timeout=540)
    assert all(" passed" in output for output in result.ranks), str(result)
