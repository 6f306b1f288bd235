"""What becomes of persistent operations when a rank raises, dies, is interrupted or forks: under mpirun."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes.test_engine_failures import MEDIA, PREAMBLE
from tests.support.launching.mpirun import run_ranks

OPERATIONS = """
small, large = np.full(3, rank + 1.0), np.full(300_000, rank + 1.0)
mapped = hvd.empty(300_000, np.float64)
mapped[:] = rank + 1
operations = [
    hvd.allreduce_init(small),
    hvd.allreduce_init(large, name="large"),
    hvd.allreduce_init(mapped),
    hvd.grouped_allreduce_init([np.ones(count) for count in (5, 400_000, 70_000)]),
    hvd.allgather_init(large),
]
for operation in operations:
    operation()
    operation()
"""


@pytest.mark.parametrize(("which", "medium"), [(0, "memory"), (4, "hosts"), (2, "messages")])
def test_a_rank_that_dies_between_two_starts_is_named(which: int, medium: str, tmp_path: Path) -> None:
    program = f"""
mark(f"ready {{rank}}")
if rank == 1:
    until_marked("ready 0")  # a failure ends the call that a peer is in
    until_marked("ready 2")
    raise ValueError("the model exploded")
operation = operations[{which}]
try:
    if rank:
        operation.start()
        operation.wait()
    else:
        operation()
except hvd.RankFailedError as error:
    assert "rank 1" in str(error), error
    print("told", flush=True)
for call in (operation, operation.start):
    try:
        call()
    except hvd.RankFailedError as error:
        print("refused", flush=True)
"""
    result = run_ranks(
        3, PREAMBLE + OPERATIONS + program, env=MEDIA[medium], timeout=30, expect=None, args=[str(tmp_path)]
    )
    assert result.returncode != 0
    assert all("told" in result.ranks[each] and "refused" in result.ranks[each] for each in (0, 2)), str(result)


@pytest.mark.parametrize("medium", ["memory", "hosts"])
def test_an_interrupt_in_a_start_ends_the_world_on_every_rank(medium: str, tmp_path: Path) -> None:
    program = """
def interrupt(number, frame):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
if rank == 0:
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        operations[1]()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    mark("over")
else:
    until_marked("over")
    try:
        operations[1]()
    except hvd.RankFailedError as error:
        assert "rank 0" in str(error) and "KeyboardInterrupt" in str(error), error
        print("told", flush=True)
try:
    operations[1].start()
except hvd.RankFailedError:
    print("refused", flush=True)
"""
    result = run_ranks(
        2, PREAMBLE + OPERATIONS + program, env=MEDIA[medium], timeout=60, expect=None, args=[str(tmp_path)]
    )
    assert "interrupted" in result.ranks[0] and "told" in result.ranks[1], str(result)
    assert all("refused" in text for text in result.ranks), str(result)


def test_a_child_made_by_fork_may_not_start_and_a_dropped_operation_in_flight_is_carried_out(tmp_path: Path) -> None:
    """Its tensor outlives the program's variables."""
    program = """
child = os.fork()
if not child:
    for call in (operations[0], operations[2].start, operations[3]):
        try:
            call()
        except hvd.ForkedProcessError:
            os.write(1, b"refused ")
    os._exit(0)
os.waitpid(child, 0)
for operation in operations:
    operation()
assert (large == 1.5).all() and (mapped == 1.5).all()
for _ in range(20):
    with hvd.allreduce_init(np.full(400_000, rank + 1.0), average=False, name="dropped") as operation:
        operation.start()
    operation = hvd.allreduce_init(np.full(400_000, rank + 1.0), average=False, name="dropped")
    operation.start()
    del operation
    hvd.allreduce(data)
hvd.barrier()
print("done", flush=True)
"""
    result = run_ranks(2, PREAMBLE + OPERATIONS + program, timeout=60, args=[str(tmp_path)])
    assert all(text.count("refused") == 3 and "done" in text for text in result.ranks), str(result)
