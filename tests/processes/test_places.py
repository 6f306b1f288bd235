"""Jobs that MPI does not start: by torchrun, at a store of the program's, and by a rank."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.support.launching.mpirun import IMPLEMENTATIONS, ROOT, python_for, run_command, run_ranks
from tests.support.launching.ports import free_port


@pytest.mark.skipif(find_spec("sklearn") is None or find_spec("torch") is None, reason="needs scikit-learn and torch")
def test_torchrun_trains_an_example_as_mpirun_does(tmp_path: Path) -> None:
    program = [str(ROOT / "examples" / "numpy_digits.py"), "--epochs", "2", "--save"]
    torchrun = [str(python_for("openmpi").parent / "torchrun"), "--master-port", str(free_port())]
    run_command([*torchrun, "--nproc-per-node", "2", *program, f"{tmp_path}/a.npz"])
    run_ranks(2, [*program, f"{tmp_path}/b.npz"])
    by_torchrun, by_mpirun = np.load(tmp_path / "a.npz"), np.load(tmp_path / "b.npz")
    assert by_torchrun.files == by_mpirun.files and "hidden.weight" in by_torchrun.files
    for name in by_torchrun.files:
        np.testing.assert_array_equal(by_torchrun[name], by_mpirun[name], err_msg=name)


STARTS_OTHERS = """
import multiprocessing, sys
import collectives as hvd

def work(rank, size, address):
    hvd.init(rendezvous=address, rank=rank, size=size)
    total = hvd.allreduce(rank + 1.0, op=hvd.Sum)
    hvd.shutdown()
    return total

def tries_to_be_the_same(address):
    try:
        hvd.init(rendezvous=address, rank=0, size=2)
    except hvd.ForkedProcessError as error:
        return str(error)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        for _ in range(2):
            other = pool.apply_async(work, (1, 2, sys.argv[1]))
            print("together", work(0, 2, sys.argv[1]), other.get(60))
    with context.Pool(1) as pool:
        print("refused:", pool.apply(tries_to_be_the_same, (sys.argv[1],)))
"""


def test_a_rank_may_start_another_but_not_itself_again(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(STARTS_OTHERS)
    command = [sys.executable, str(tmp_path / "program.py"), f"tcp://localhost:{free_port()}"]
    shown = run_command(command, env={"HOME": str(tmp_path)}).output
    assert shown.count("together 3.0 3.0") == 2 and "refused: init() was called in a process that a rank" in shown


WITH_A_STORE = """
import datetime, os, sys
import numpy as np
import torch.distributed as dist
import collectives as hvd

rank = int(os.environ["MY_RANK"])
store = dist.FileStore(sys.argv[1], 2)
for size in (1, 2):
    hvd.init(store=dist.PrefixStore("first", store), rank=rank if size > 1 else 0, size=size)
    total = hvd.allreduce(np.full(100_000, rank + 1.0), op=hvd.Sum)
    sys.stdout.write(f"{rank} of {hvd.size()} {total[-1]}\\n")
    hvd.shutdown()
"""


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_ranks_meet_at_a_store_of_torchs(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(WITH_A_STORE)
    start = 'for rank in 0 1; do MY_RANK=$rank "$@" & done; wait'
    words = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "store")]
    shown = run_command(["sh", "-c", start, "-", *words]).output
    for rank in range(2):
        assert f"{rank} of 1 {rank + 1}.0" in shown and f"{rank} of 2 3.0" in shown, shown


WITHOUT_MPI = """
import sys
sys.modules["mpi4py"] = None
import collectives as hvd

hvd.init()
print("sum", hvd.allreduce(hvd.rank() + 1.0, op=hvd.Sum), "of", hvd.size())
"""


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ranks_of_mpirun_meet_without_mpi4py(implementation: str, tmp_path: Path) -> None:
    result = run_ranks(2, WITHOUT_MPI, mpi=implementation, env={"HOME": str(tmp_path)})
    assert all("sum 3.0 of 2" in text for text in result.ranks), str(result)


INTERRUPTED = """
import os, signal, sys, threading
import collectives as hvd

address, rank = sys.argv[1], int(sys.argv[2])
if rank == 2:
    sys.stdin.readline()
else:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        hvd.init(rendezvous=address, rank=rank, size=3)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
hvd.init(rendezvous=address, rank=rank, size=3)
sys.stdout.write(f"{rank}: {hvd.allreduce(1.0, op=hvd.Sum)}\\n")
"""


def test_an_interrupted_rank_comes_again(tmp_path: Path) -> None:
    """One that serves the store, and one that does not; both wait for a third."""
    (tmp_path / "program.py").write_text(INTERRUPTED)
    address = f"tcp://localhost:{free_port()}"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "program.py"), address, str(rank)],
            env={**os.environ, "HOME": str(tmp_path)},
            **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE),
            text=True,
        )
        for rank in range(3)
    ]
    try:
        for process in ranks[:2]:
            assert process.stdout is not None
            assert process.stdout.readline() == "interrupted\n"
        assert ranks[2].stdin is not None
        ranks[2].stdin.write("\n")
        ranks[2].stdin.flush()
        shown = [process.communicate(timeout=60) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [out.splitlines()[-1] for out, _ in shown] == ["0: 3.0", "1: 3.0", "2: 3.0"], str(shown)
