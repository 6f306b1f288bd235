"""Ranks between the cells of a notebook, in a real kernel."""

import ast
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from collectives.base.errors import RankFailedError
from collectives.notebook.session import Session
from tests.support.launching.training import train_alone

pytest.importorskip("ipykernel", reason="ipykernel is not installed")
manager = pytest.importorskip("jupyter_client.manager", reason="jupyter_client is not installed")

pytestmark = pytest.mark.slow
ROOT = str(Path(__file__).parents[2])
WITHIN = 120.0
TRAINING = "from tests.support.launching.training import train_as_rank"


class Shown(NamedTuple):
    """What a cell has shown: lines of output, sorted because ranks print in any order; its value; its error."""

    lines: list[str]
    value: str
    error: str


class Kernel:
    def __init__(self) -> None:
        self.manager, self._client = manager.start_new_kernel(
            startup_timeout=WITHIN, kernel_name="python3", env={**os.environ, "PYTHONPATH": ROOT}
        )

    def run(self, cell: str, *interrupt_at: str) -> Shown:
        """Run a cell, and interrupt it each time that it has printed the next of some texts."""
        texts = list(interrupt_at)
        number = self._client.execute(cell)
        text = value = error = ""
        end = time.monotonic() + WITHIN
        while True:
            message = self._client.get_iopub_msg(timeout=end - time.monotonic())
            if message["parent_header"].get("msg_id") != number:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                text += content["text"]
                if texts and texts[0] in text:
                    del texts[0]
                    self.manager.interrupt_kernel()
            elif message["msg_type"] == "execute_result":
                value = content["data"]["text/plain"]
            elif message["msg_type"] == "error":
                error = f"{content['ename']}: {content['evalue']}"
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return Shown(sorted(text.splitlines()), value, error)

    def close(self) -> None:
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    assert not kernel.run("%load_ext collectives.notebook\nfrom collectives.notebook import pull").error
    yield kernel
    kernel.close()


@pytest.fixture
def ranks(kernel: Kernel) -> Kernel:
    """The kernel, with two ranks that have a variable."""
    assert not kernel.run("%%collectives -np 2\nimport numpy as np\nx = np.full(2, collectives.rank() + 1.0)").error
    return kernel


def test_variables_stay_and_the_last_value_is_shown(kernel: Kernel) -> None:
    first = kernel.run(
        "%%collectives -np 2\nimport numpy as np\nx = np.full(2, collectives.rank() + 1.0)\nprint('here')"
    )
    assert first == Shown(["[0] here", "[1] here"], "", "")
    assert kernel.run("%%collectives\ncollectives.allreduce(x, average=False).tolist()").lines == [
        "[0] [3.0, 3.0]",
        "[1] [3.0, 3.0]",
    ]
    assert kernel.run("pull('x')").value == "[array([1., 1.]), array([2., 2.])]"
    assert "rank 0: NameError: there is no variable 'y'" in kernel.run("pull('y')").error


def test_a_rank_that_raises_ends_the_cell_and_no_more(ranks: Kernel) -> None:
    shown = ranks.run(
        "%%collectives\nif collectives.rank() == 1:\n    raise ValueError('as asked')\ncollectives.barrier()"
    )
    assert shown.error == "RankFailedError: %%collectives: rank 1 (and rank 0): ValueError: as asked [L11]"
    assert "ValueError: as asked" in shown.lines
    assert any(line.endswith("line 2, in <module>") for line in shown.lines)
    assert ranks.run("%%collectives\nfloat(collectives.allreduce(x, average=False)[0])").lines == [
        "[0] 3.0",
        "[1] 3.0",
    ]
    assert ranks.run("%%collectives\nx = = 1").error.startswith("RankFailedError: %%collectives: rank 0 (and rank 1)")


def test_an_interrupt_reaches_all_ranks(ranks: Kernel) -> None:
    cell = "%%collectives\nprint('begun')\nwhile True:\n    collectives.barrier()"
    assert ranks.run(cell, "begun").error.startswith("KeyboardInterrupt")
    assert ranks.run("%%collectives\nx.tolist()").lines == ["[0] [1.0, 1.0]", "[1] [2.0, 2.0]"]


def test_a_cell_that_two_interrupts_gave_up_does_not_answer_for_the_next(ranks: Kernel) -> None:
    cell = """%%collectives
import time
print("begun")
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("stubborn")
    time.sleep(1)"""
    assert ranks.run(cell, "begun", "stubborn").error.startswith("KeyboardInterrupt")
    assert "ValueError: new" in ranks.run("%%collectives\nraise ValueError('new')").error
    assert ranks.run("pull('x')").value == "[array([1., 1.]), array([2., 2.])]"


def test_an_interrupt_in_the_middle_of_an_answer_loses_none(ranks: Kernel) -> None:
    assert not ranks.run("%%collectives\nbig = np.ones(8_000_000)").error
    cell = """import os, signal
from multiprocessing.connection import Connection
receive = Connection._recv
def interrupted(self, size, *rest):
    if size > 1000:
        Connection._recv = receive
        os.kill(os.getpid(), signal.SIGINT)
    return receive(self, size, *rest)
Connection._recv = interrupted
pull("big")"""
    assert ranks.run(cell).error.startswith("KeyboardInterrupt")
    assert ranks.run("%%collectives\nx.tolist()").lines == ["[0] [1.0, 1.0]", "[1] [2.0, 2.0]"]


def test_a_dead_rank_is_said_and_the_next_cell_starts_others(kernel: Kernel) -> None:
    kill = "import os\nif collectives.rank() == 2:\n    os.kill(os.getpid(), 9)\ncollectives.barrier()"
    cell = f"%%collectives -np 3\n{kill}"
    shown = kernel.run(cell)
    assert "the ranks have ended" in shown.error
    assert any("rank 2 on" in line and "SIGKILL" in line for line in shown.lines)
    assert kernel.run("%%collectives\n'x' in globals()").lines == ["[0] False", "[1] False", "[2] False"]
    assert not kernel.run("%collectives stop").error
    assert kernel.run("%collectives").lines == ["no ranks are running; start some with %%collectives -np 4"]


def test_wrong_options_are_said(kernel: Kernel) -> None:
    assert "expected host:ranks" in kernel.run("%%collectives -H ,\n1").error


def test_help_is_shown_and_raises_nothing(kernel: Kernel) -> None:
    shown = kernel.run("%%collectives --help\n1")
    assert not shown.error and any("usage: " in line and "collectivesrun" in line for line in shown.lines)


def test_connections_of_others_hold_up_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is silent, one leaves at once, one says something else."""
    others: list[socket.socket] = []
    create = socket.create_server

    def with_others(*arguments: Any, **options: Any) -> socket.socket:
        listener = create(*arguments, **options)
        others.extend(socket.create_connection(listener.getsockname()) for _ in range(3))
        others[1].close()
        others[2].sendall(b"GET / HTTP/1.1\r\n\r\n")
        return listener

    monkeypatch.setattr(socket, "create_server", with_others)
    session = Session(["-np", "2", "--launcher", "ssh"])
    try:
        assert len(session.status().splitlines()) == 2
    finally:
        session.close()
        for other in others:
            other.close()


def test_the_death_of_a_rank_whose_child_holds_its_connection_is_seen() -> None:
    session = Session(["-np", "1", "--launcher", "ssh"])
    child = 0
    try:
        session.run("import os, signal\nchild = os.fork()\nif child == 0:\n    os.setsid()\n    signal.pause()")
        (child,) = session.pull("child")
        os.kill(session.ranks[0][0], signal.SIGKILL)
        with pytest.raises(RankFailedError, match="the ranks have ended"):
            session.run("1")
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
        session.close()


def test_run_shows_the_ranks_output_in_the_cell(kernel: Kernel) -> None:
    cell = "def f():\n    print('in f')\n    return train_as_rank().tolist()\n"
    shown = kernel.run(f"import collectives\n{TRAINING}\n{cell}collectives.run(f, np=2)")
    assert (shown.lines, shown.error) == (["[0] in f", "[1] in f"], "")
    np.testing.assert_allclose(ast.literal_eval(shown.value), [train_alone()] * 2, rtol=1e-12)


def test_a_cell_trains_as_one_process_does(ranks: Kernel) -> None:
    assert not ranks.run(f"%%collectives\n{TRAINING}\nweights = train_as_rank()").error
    shown = ranks.run("[weights.tolist() for weights in pull('weights')]")
    np.testing.assert_allclose(ast.literal_eval(shown.value), [train_alone()] * 2, rtol=1e-12)
