"""Elastic jobs whose processes no launcher of ours watches: a member serves the store, and another one after it; and
torchrun, which starts all processes again.

The processes train until the test lets them finish, and are killed by the test. Each step adds the largest of what the
ranks give, which does not depend on how many there are: so the total is the number of steps, whoever died meanwhile.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from collectives.base.places import Spot
from collectives.transport.stores.meeting import Meeting
from collectives.transport.tcp.authentication import make_key
from tests.support.launching.mpirun import ROOT, run_command
from tests.support.launching.ports import free_port
from tests.support.launching.watched_process import PATIENCE, Process

KEY = make_key()
PROGRAM = """
import os, sys
from pathlib import Path
import numpy as np
import collectives
import collectives.elastic
from collectives.worlds import generations

folder = Path(sys.argv[1])

def say(*words):
    os.write(1, (" ".join(map(str, words)) + chr(10)).encode())  # at once: two threads write

@collectives.elastic.on_event
def hear(event):
    if event.facts and event.kind == "generation":
        say("hears of generation", event.generation, *event.members)

collectives.init()
state = collectives.elastic.ObjectState(total=np.zeros(3), step=0)

@collectives.elastic.run
def train(state):
    job = generations.job()
    say("generation", job.generation, "of", *job.members, "here", job.member)
    while True:
        rank = collectives.rank()
        state.total += collectives.allreduce(np.full(3, 1.0 - 0.5 * rank), op=collectives.Max)
        state.step += 1
        state.commit()
        done = np.array([(folder / "finish").exists()], np.int64)
        if collectives.allreduce(done, op=collectives.Max)[0]:
            return bool((state.total == state.step).all())

say("right" if train(state) else "wrong")
"""


class Processes:
    """The processes of a job; ``variables`` of all of them."""

    def __init__(self, folder: Path, **variables: object) -> None:
        (folder / "program.py").write_text(PROGRAM)
        self._folder, self._all, self.port = folder, list[Process](), free_port()
        kept = {name: value for name, value in os.environ.items() if not name.startswith("COLLECTIVES_")}
        self._environment = kept | {
            "PYTHONPATH": str(ROOT),
            "XDG_CONFIG_HOME": str(folder),
            "COLLECTIVES_ELASTIC": "1",
            "COLLECTIVES_RENDEZVOUS": f"tcp://127.0.0.1:{self.port}",
            "COLLECTIVES_PEER_TIMEOUT": "10",
            "COLLECTIVES_ELASTIC_TIMEOUT": "20",
            **_texts(variables),
        }

    def first(self, size: int) -> list[Process]:
        """Start the first members, and wait until they train."""
        ranks = [self.start(COLLECTIVES_RANK=rank, COLLECTIVES_SIZE=size) for rank in range(size)]
        self.form(1, range(size), ranks)
        return ranks

    def start(self, **variables: object) -> Process:
        command = [sys.executable, "-u", str(self._folder / "program.py"), str(self._folder)]
        self._all.append(Process(command, self._environment | _texts(variables)))
        return self._all[-1]

    @staticmethod
    def form(generation: int, members: object, ranks: list[Process]) -> None:
        """Wait until the ranks train in a generation of these members."""
        for rank in ranks:
            rank.prints(f"generation {generation} of {' '.join(map(str, members))} here")  # type: ignore[call-overload]

    def finish(self, ranks: list[Process]) -> None:
        """Let the ranks finish, and check their totals."""
        (self._folder / "finish").touch()
        for rank in ranks:
            assert rank.ends().endswith("right\n"), rank.printed

    def end(self) -> None:
        for process in self._all:
            process.kill()


def _texts(variables: dict[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in variables.items()}


@contextmanager
def processes(folder: Path, **variables: object) -> Iterator[Processes]:
    started = Processes(folder, **variables)
    try:
        yield started
    finally:
        started.end()


def test_members_and_the_owner_die_and_a_newcomer_joins(tmp_path: Path) -> None:
    with processes(tmp_path) as job:
        ranks = job.first(3)
        ranks[0].signal(signal.SIGKILL)
        job.form(2, (1, 2), ranks[1:])
        assert "member 1 now serves the store" in ranks[1].printed
        newcomer = job.start()
        number = newcomer.prints(r"generation 3 of 1 2 (\d+) here \1").group(1)
        job.form(3, (1, 2, number), ranks[1:])
        for rank in (*ranks[1:], newcomer):
            rank.prints(f"hears of generation 3 1 2 {number}\n")
        ranks[2].signal(signal.SIGKILL)
        job.form(4, (1, number), [ranks[1], newcomer])
        job.finish([ranks[1], newcomer])


def test_newcomers_find_the_job_once_a_stopped_owner_is_gone(tmp_path: Path) -> None:
    """While it is stopped, no other process can listen where the members meet."""
    with processes(tmp_path, COLLECTIVES_PEER_TIMEOUT=2) as job:
        ranks = job.first(3)
        ranks[0].signal(signal.SIGSTOP)
        job.form(2, (1, 2), ranks[1:])
        ranks[0].signal(signal.SIGKILL)
        newcomer = job.start()
        number = newcomer.prints(r"generation 3 of 1 2 (\d+) here \1").group(1)
        job.form(3, (1, 2, number), ranks[1:])
        job.finish([*ranks[1:], newcomer])


def test_half_of_the_members_name_the_stopped_owner_that_keeps_newcomers_away(tmp_path: Path) -> None:
    with processes(tmp_path, COLLECTIVES_PEER_TIMEOUT=2, COLLECTIVES_ELASTIC_TIMEOUT=6) as job:
        ranks = job.first(4)
        ranks[0].signal(signal.SIGSTOP)
        ranks[3].signal(signal.SIGKILL)
        newcomer = job.start()
        reason = f"newcomers cannot reach the job at tcp://127.0.0.1:{job.port}: .* is stopped, kill it"
        for rank in ranks[1:3]:
            assert re.search(
                f"RankFailedError: .* 2 of the 4 members of generation 1 are no majority.*{reason}", rank.ends(1)
            )
        assert "the process that listens there is stopped" in newcomer.ends(1)


def test_half_of_the_members_go_on_with_a_newcomer_once_a_stopped_owner_has_ended(tmp_path: Path) -> None:
    with processes(tmp_path, COLLECTIVES_PEER_TIMEOUT=2) as job:
        ranks = job.first(4)
        ranks[0].signal(signal.SIGSTOP)
        ranks[3].signal(signal.SIGKILL)
        newcomer = job.start()
        ranks[1].prints("newcomers cannot reach the job at")
        ranks[0].signal(signal.SIGKILL)
        number = newcomer.prints(r"generation 2 of 1 2 (\d+) here \1").group(1)
        job.form(2, (1, 2, number), ranks[1:3])
        job.finish([*ranks[1:3], newcomer])


def test_one_of_two_does_not_go_on_alone(tmp_path: Path) -> None:
    with processes(tmp_path, COLLECTIVES_ELASTIC_TIMEOUT=3) as job:
        ranks = job.first(2)
        ranks[1].signal(signal.SIGKILL)
        printed = ranks[0].ends(1)
        assert "waited 3 s for members 1: 1 of the 2 members of generation 1 are no majority" in printed
        assert "COLLECTIVES_QUORUM=any" in printed and "COLLECTIVES_ELASTIC_TIMEOUT" in printed
        assert "generation 2 of" not in printed


def test_one_of_two_goes_on_with_a_newcomer(tmp_path: Path) -> None:
    """That may be the dead rank, started again as it was."""
    with processes(tmp_path) as job:
        ranks = job.first(2)
        ranks[1].signal(signal.SIGKILL)
        again = job.start(COLLECTIVES_RANK=1, COLLECTIVES_SIZE=2)
        job.form(2, (0, 2), [ranks[0], again])
        job.finish([ranks[0], again])


def test_rank_0_that_is_started_again_elsewhere_is_sent_to_the_job(tmp_path: Path) -> None:
    """It serves a store of its own at first, and the others that meet there are sent to the job with it."""
    with processes(tmp_path, COLLECTIVES_KEY=KEY.hex()) as job:
        first = job.first(1)
        port = free_port()
        there = {"COLLECTIVES_RENDEZVOUS": f"tcp://127.0.0.1:{port}", "COLLECTIVES_SIZE": 3}
        again = [job.start(COLLECTIVES_RANK=rank, **there) for rank in (0, 1)]
        meeting = Meeting(Spot(-1, 0, "this test", "127.0.0.1", (port,)), KEY, PATIENCE)
        store = meeting.connect()
        store.wait(["elastic/said/0/1", "elastic/said/1/1"])
        store.set("elastic/moved/to", json.dumps(["127.0.0.1", job.port]).encode())
        meeting.close()
        for process in again:
            process.prints("here [12]")
        members = first[0].prints("generation . of 0 ([12]) ([12]) here")
        assert {members.group(1), members.group(2)} == {"1", "2"}
        job.finish([*first, *again])


def test_any_quorum_goes_on_alone(tmp_path: Path) -> None:
    with processes(tmp_path, COLLECTIVES_QUORUM="any") as job:
        ranks = job.first(2)
        ranks[0].signal(signal.SIGKILL)
        job.form(2, (1,), ranks[1:])
        job.finish(ranks[1:])


def test_who_was_declared_dead_and_wakes_is_told(tmp_path: Path) -> None:
    with processes(tmp_path, COLLECTIVES_PEER_TIMEOUT=2) as job:
        ranks = job.first(3)
        ranks[1].signal(signal.SIGSTOP)
        job.form(2, (0, 2), [ranks[0], ranks[2]])
        ranks[1].signal(signal.SIGCONT)
        assert "the job continues without member 1, because it" in ranks[1].ends(1)
        job.finish([ranks[0], ranks[2]])


def test_below_the_minimum_all_wait_for_newcomers(tmp_path: Path) -> None:
    with processes(tmp_path, COLLECTIVES_MIN_SIZE=3, COLLECTIVES_MAX_SIZE=3) as job:
        ranks = job.first(3)
        ranks[2].signal(signal.SIGKILL)
        newcomer = job.start()
        job.form(2, (0, 1, 3), [*ranks[:2], newcomer])
        job.finish([*ranks[:2], newcomer])


def test_first_ranks_that_disagree_about_their_number_are_refused(tmp_path: Path) -> None:
    with processes(tmp_path) as job:
        job.start(COLLECTIVES_RANK=0, COLLECTIVES_SIZE=3)
        other = job.start(COLLECTIVES_RANK=1, COLLECTIVES_SIZE=2)
        assert "set COLLECTIVES_SIZE to the same number on all first ranks" in other.ends(1)


TORCHRUN_PROGRAM = """
import os, signal, sys
import numpy as np
import collectives
import collectives.elastic

folder, attempt = sys.argv[1], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
collectives.init()
state = collectives.elastic.ObjectState(weights=np.zeros(5), step=0)
state.save_to(f"{folder}/state")

@collectives.elastic.run
def train(state):
    line = f"attempt {attempt} begins at step {state.step}{os.linesep}"
    os.write(1, line.encode())  # at once: torchrun's ranks write to one pipe
    while state.step < 10:
        state.weights += collectives.allreduce(np.arange(5.0) * (collectives.rank() + 1) / (state.step + 1))
        state.step += 1
        if state.step % 2 == 0:
            state.commit()
        if (attempt, state.step, collectives.rank()) == (0, 7, 1):
            os.kill(os.getpid(), signal.SIGKILL)

train(state)
np.save(f"{folder}/weights-{collectives.rank()}", state.weights)
"""


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_processes_that_torchrun_starts_again_go_on_from_the_last_commit(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(TORCHRUN_PROGRAM)
    words = ["--standalone", "--nnodes", "1", "--nproc-per-node", "2", "--max-restarts", "2"]
    command = [sys.executable, "-m", "torch.distributed.run", *words, str(tmp_path / "program.py"), str(tmp_path)]
    printed = run_command(command, timeout=120).output
    assert printed.count("attempt 0 begins at step 0\n") == printed.count("attempt 1 begins at step 6\n") == 2, printed
    expected = np.zeros(5)
    for step in range(10):
        expected += (np.arange(5.0) / (step + 1) + np.arange(5.0) * 2 / (step + 1)) / 2
    for rank in range(2):
        assert np.load(tmp_path / f"weights-{rank}.npy").tolist() == expected.tolist()
