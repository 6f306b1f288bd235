"""What happens to operations in flight when a rank raises, leaves, stalls, forks, is interrupted, or has many threads:
under mpirun."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launching.mpirun import run_ranks

MARKS = """
from pathlib import Path

def mark(name):
    Path(sys.argv[1], name).touch()

def until_marked(name):
    deadline = time.monotonic() + 30
    while not Path(sys.argv[1], name).exists():
        assert time.monotonic() < deadline, f"{name} never came"
        time.sleep(0.005)
"""
"""Programs get a folder, in which one rank leaves a mark for another, without communicating."""
PREAMBLE = (
    """
import logging, os, signal, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import numpy as np
import collectives as hvd
hvd.init()
rank, size = hvd.rank(), hvd.size()
data = np.full(1000, float(rank))
hvd.allreduce(data)
"""
    + MARKS
)

MEDIA = {"memory": {}, "messages": {"COLLECTIVES_TRANSPORT": "mpi"}, "hosts": {"COLLECTIVES_LOCAL_SIZE": "1"}}
# Between hosts, and where there are messages only, MPI carries control in the same way.
BOTH_MPIS = pytest.mark.parametrize(("medium", "mpi"), [("memory", "openmpi"), ("hosts", "mpich")])


@BOTH_MPIS
def test_ranks_that_wait_for_handles_are_told_of_a_failure(medium: str, mpi: str, tmp_path: Path) -> None:
    """Within two seconds, with its traceback; and all handles in flight carry it."""
    program = """
first = hvd.allreduce_async(data, op=hvd.Sum, name="first")
assert (hvd.synchronize(first) == sum(range(size))).all()
if rank == 1:
    until_marked("submitted 0")
    until_marked("submitted 2")
    raise ValueError(f"the model exploded at {time.monotonic()}")
handles = [hvd.allreduce_async_(np.ones(10 ** k), name=f"gradient {k}") for k in range(6)]
mark(f"submitted {rank}")
for handle in reversed(handles):
    try:
        hvd.synchronize(handle)
    except hvd.RankFailedError as error:
        told = str(error)
        assert "rank 1" in told and "Traceback" in told and "the model exploded" in told, told
        # CLOCK_MONOTONIC is one clock for all processes of a host.
        late = time.monotonic() - float(told.rpartition("exploded at ")[2].split()[0])
        assert handle is not handles[-1] or late < 2, late
    else:
        raise SystemExit("no error")
try:
    hvd.allreduce_async(data)
except hvd.RankFailedError:
    print("told", flush=True)
"""
    result = run_ranks(3, PREAMBLE + program, mpi=mpi, env=MEDIA[medium], timeout=60, expect=None, args=[str(tmp_path)])
    assert result.returncode != 0
    assert all("told" in result.ranks[rank] for rank in (0, 2)), str(result)


@BOTH_MPIS
def test_a_program_that_is_told_of_a_failure_has_time_for_its_last_words(medium: str, mpi: str, tmp_path: Path) -> None:
    """One waits and then tidies up; the other is busy when its background thread learns of the failure, and asks
    later."""
    program = """
if rank == 1:
    until_marked("submitted 0")
    until_marked("submitted 2")
    raise ValueError("the model exploded")
handle = hvd.allreduce_async_(data, name="gradient")
mark(f"submitted {rank}")
if rank == 2:
    time.sleep(0.7)
try:
    hvd.synchronize(handle)
except hvd.RankFailedError as error:
    assert "the model exploded" in str(error), error
    if rank == 0:
        time.sleep(0.7)
    print("saved")
"""
    result = run_ranks(
        3,
        PREAMBLE + program,
        mpi=mpi,
        env={**MEDIA[medium], "PYTHONUNBUFFERED": ""},
        timeout=60,
        expect=None,
        args=[str(tmp_path)],
    )
    assert result.returncode != 0
    assert all("saved" in result.ranks[rank] for rank in (0, 2)), str(result)
    assert "the model exploded" in result.ranks[1], str(result)


@BOTH_MPIS
def test_a_rank_is_told_of_a_failure_although_a_third_one_is_busy(medium: str, mpi: str, tmp_path: Path) -> None:
    """And has nothing in flight, so that it hears of nothing: neither the rank that waits nor the end of the job waits
    for it."""
    program = """
if rank == 1:
    until_marked("ready 0")
    until_marked("ready 2")
    raise ValueError(f"the model exploded at {time.monotonic()}")
mark(f"ready {rank}")
if rank == 2:
    time.sleep(30)
try:
    hvd.allreduce(data)
except hvd.RankFailedError as error:
    late = time.monotonic() - float(str(error).rpartition("exploded at ")[2].split()[0])
    assert late < 1.8, late
    print("told", flush=True)
"""
    result = run_ranks(3, PREAMBLE + program, mpi=mpi, env=MEDIA[medium], timeout=60, expect=None, args=[str(tmp_path)])
    assert result.returncode != 0
    assert "told" in result.ranks[0], str(result)
    assert result.seconds < 20, str(result)


@pytest.mark.parametrize(
    ("ending", "code", "medium", "mpi"),
    [
        ("pass", 0, "memory", "openmpi"),
        ("sys.exit(3)", 3, "memory", "mpich"),
        ("sys.exit(3)", 3, "messages", "mpich"),
        ("hvd.shutdown()", 0, "hosts", "openmpi"),
    ],
    ids=["ends", "exits", "exits-messages", "shuts-down-hosts"],
)
def test_a_rank_may_leave_with_handles_pending(medium: str, mpi: str, ending: str, code: int, tmp_path: Path) -> None:
    """It ends by itself, with its own exit code; who waits for it is told that it left."""
    program = f"""
if rank == 1:
    handles = [hvd.allreduce_async_(np.ones(100_000), name=name) for name in ("both", "mine")]
    hvd.allreduce(data, name="both are here")
    {"until_marked('both are here')" if code else "pass"}  # a failure ends the call that a peer is in
    {ending}
else:
    both = hvd.allreduce_async(np.ones(100_000), op=hvd.Average, name="both")
    hvd.allreduce(data, name="both are here")
    mark("both are here")
    yours = hvd.allreduce_async(data, name="yours")
    try:
        hvd.synchronize(yours)
    except hvd.RankFailedError as error:
        # A rank that leaves in the middle of a round says so; between two, it is missing from what is waited for.
        told = {["sys.exit(3)"] if code else ["waiting for allreduce 'yours', submitted at", "rank 1 left while"]!r}
        assert "rank 1" in str(error) and any(words in str(error) for words in told), error
        print("told", flush=True)
    else:
        raise SystemExit("no error")
    if hvd.poll(both):
        assert (hvd.synchronize(both) == 1).all()
"""
    result = run_ranks(2, PREAMBLE + program, mpi=mpi, env=MEDIA[medium], timeout=60, expect=None, args=[str(tmp_path)])
    assert "told" in result.ranks[0], str(result)
    assert "Error" not in result.ranks[1], str(result)
    assert result.returncode == code, str(result)


BLOCKS = 'hvd.allreduce(data, op=hvd.Sum, name="grad")'
SUBMITS = 'hvd.allreduce_async(data, op=hvd.Sum, name="grad")'


@pytest.mark.parametrize(
    ("call", "waiting", "medium", "mpi"),
    [
        (BLOCKS, "sum_of(result)", "hosts", "openmpi"),
        (SUBMITS, "sum_of(hvd.synchronize(result))", "messages", "mpich"),
        (SUBMITS, "until_marked('warned')", "memory", "openmpi"),
    ],
    ids=["blocks-hosts", "waits-messages", "computes"],
)
def test_a_stall_is_reported_with_tensor_rank_and_line(
    call: str, waiting: str, medium: str, mpi: str, tmp_path: Path
) -> None:
    """Also where the rank that submitted it does not wait for it: its background thread sees to that."""
    program = f"""
def sum_of(result):
    assert (result == sum(range(size))).all()

if rank == 0:
    class Watch(logging.Filter):
        def filter(self, record):
            mark("warned")
            return True

    logging.getLogger("collectives").addFilter(Watch())
elif rank == 1:
    until_marked("warned")
result = {call}  # on this line
if rank == 0:
    {waiting}
sum_of(result if isinstance(result, np.ndarray) else hvd.synchronize(result))
print("went on")
"""
    result = run_ranks(
        3,
        PREAMBLE + program,
        mpi=mpi,
        env={**MEDIA[medium], "COLLECTIVES_STALL_WARNING": "1"},
        timeout=60,
        args=[str(tmp_path)],
    )
    line = next(number for number, text in enumerate((PREAMBLE + program).splitlines(), 1) if "# on this line" in text)
    said = result.ranks[0]
    assert "grad" in said and "missing ranks: 1" in said and f"program.py:{line}" in said, str(result)
    assert said.count("missing ranks") == 1, "reported more than once"
    assert all("went on" in text for text in result.ranks)


@BOTH_MPIS
def test_a_stall_may_end_in_an_error(medium: str, mpi: str, tmp_path: Path) -> None:
    program = """
if rank == 0:
    try:
        hvd.synchronize(hvd.allreduce_async(data, name="grad"))
    except hvd.CollectiveTimeoutError as error:
        assert "grad" in str(error) and "COLLECTIVES_STALL_SHUTDOWN" in str(error), error
        print("given up", flush=True)
    mark("given up")
    try:
        hvd.barrier()
    except hvd.RankFailedError:
        print("refused", flush=True)
else:
    until_marked("given up")
    try:
        # Complete, if rank 0's part came with the round, and before its failure.
        assert (hvd.allreduce(data, name="grad") == 0.5).all()
        hvd.barrier()
    except hvd.RankFailedError as error:
        assert "rank 0" in str(error), error
        print("told", flush=True)
"""
    settings = {"COLLECTIVES_STALL_WARNING": "1", "COLLECTIVES_STALL_SHUTDOWN": "2"}
    result = run_ranks(
        2, PREAMBLE + program, mpi=mpi, env={**MEDIA[medium], **settings}, timeout=60, expect=None, args=[str(tmp_path)]
    )
    assert "given up" in result.ranks[0] and "refused" in result.ranks[0] and "told" in result.ranks[1], str(result)


@BOTH_MPIS
def test_many_threads_and_forks(medium: str, mpi: str, tmp_path: Path) -> None:
    """Four threads at once, begun in another order on every rank, while the main thread has operations in flight.

    A forked child has a copy of the engine but not of its thread: it is refused, never waits, and ends as it likes.
    """
    program = """
def work(key):
    step, k = key
    tensor = np.full(10 + k * 5000, float(rank + step))
    assert (hvd.allreduce(tensor, op=hvd.Sum, name=f"reduce {k}") == sum(r + step for r in range(size))).all()
    gathered = hvd.allgather(np.full((rank + 1, 3), step + k), name=f"gather {k}")
    assert gathered.shape == (sum(range(size + 1)), 3) and (gathered == step + k).all()
    handle = hvd.broadcast_async_(tensor, k % size, name=f"broadcast {k}")
    assert hvd.synchronize(handle) is tensor and (tensor == k % size + step).all()
    return k

random = np.random.default_rng(rank)
with ThreadPoolExecutor(4) as pool:
    for step in range(25):
        mine = [hvd.allreduce_async(np.full(100, float(k)), name=f"main {k}") for k in random.permutation(5).tolist()]
        order = random.permutation(4).tolist()
        assert list(pool.map(work, [(step, k) for k in order], timeout=60)) == order
        for handle in mine:
            hvd.synchronize(handle)
        hvd.barrier()
warm = hvd.allreduce_async(data, op=hvd.Sum, name="warm")
deadline = time.monotonic() + 30
while not hvd.poll(warm):  # by the background thread, as nobody waits
    assert time.monotonic() < deadline
    time.sleep(0)
for attempt, ending in enumerate(("return", "exit", "shutdown", "raise") * 2):
    pending = hvd.allreduce_async(data, op=hvd.Sum, name="pending") if rank != 1 else None
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        calls = [lambda: hvd.allreduce(data), lambda: hvd.allreduce_async(data), lambda: hvd.join()]
        if pending is not None and not hvd.poll(pending):
            calls.append(lambda: hvd.synchronize(pending))
        for call in calls:
            try:
                call()
            except hvd.ForkedProcessError as error:
                assert f"rank {rank}" in str(error), error
            else:
                os._exit(9)
        if ending == "exit":
            sys.exit(7)
        if ending == "shutdown":
            hvd.shutdown()
        if ending == "raise":
            raise ValueError("in the child")
        break
    status = os.waitpid(child, 0)[1]
    assert os.WIFEXITED(status), f"{ending}: the child was ended by signal {os.WTERMSIG(status)}"
    assert os.WEXITSTATUS(status) == {"return": 0, "exit": 7, "shutdown": 0, "raise": 1}[ending], (ending, status)
    if rank == 1:
        pending = hvd.allreduce_async(data, op=hvd.Sum, name="pending")
    assert (hvd.synchronize(pending) == sum(range(size))).all()
else:
    print("parent is well")
"""
    # A child that goes on to the end of the program must not say that the parent is well.
    result = run_ranks(3, PREAMBLE + program, mpi=mpi, env=MEDIA[medium], timeout=90, args=[str(tmp_path)])
    assert all(text.count("parent is well") == 1 for text in result.ranks), str(result)
