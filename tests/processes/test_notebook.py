"""Ranks between the cells of a notebook, in a real kernel."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("ipykernel", reason="ipykernel is not installed")
manager = pytest.importorskip("jupyter_client.manager", reason="jupyter_client is not installed")

pytestmark = pytest.mark.slow
ROOT = str(Path(__file__).parents[2])
WITHIN = 120.0


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

    def run(self, cell: str, interrupt_at: str = "") -> Shown:
        """Run a cell, and interrupt it when it has printed something."""
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
                if interrupt_at and interrupt_at in text:
                    interrupt_at = ""
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
    assert not kernel.run("%load_ext collectives.notebook").error
    yield kernel
    kernel.close()


def test_variables_stay_and_the_last_value_is_shown(kernel: Kernel) -> None:
    first = kernel.run(
        "%%collectives -np 2\nimport numpy as np\nx = np.full(2, collectives.rank() + 1.0)\nprint('here')"
    )
    assert first == Shown(["[0] here", "[1] here"], "", "")
    assert kernel.run("%%collectives\ncollectives.allreduce(x, average=False).tolist()").lines == [
        "[0] [3.0, 3.0]",
        "[1] [3.0, 3.0]",
    ]
    assert kernel.run("from collectives.notebook import pull\npull('x')").value == "[array([1., 1.]), array([2., 2.])]"
    assert "rank 0: NameError: there is no variable 'y'" in kernel.run("pull('y')").error


def test_a_rank_that_raises_ends_the_cell_and_no_more(kernel: Kernel) -> None:
    shown = kernel.run(
        "%%collectives\nif collectives.rank() == 1:\n    raise ValueError('as asked')\ncollectives.barrier()"
    )
    assert shown.error == "RankFailedError: %%collectives: rank 1 (and ranks 0): ValueError: as asked"
    assert "ValueError: as asked" in shown.lines
    assert any(line.endswith("line 2, in <module>") for line in shown.lines)
    assert kernel.run("%%collectives\nfloat(collectives.allreduce(x, average=False)[0])").lines == [
        "[0] 3.0",
        "[1] 3.0",
    ]
    assert kernel.run("%%collectives\nx = = 1").error.startswith("RankFailedError: %%collectives: rank 0 (and ranks 1)")


def test_an_interrupt_reaches_all_ranks(kernel: Kernel) -> None:
    cell = "%%collectives\nprint('begun')\nwhile True:\n    collectives.barrier()"
    assert kernel.run(cell, interrupt_at="begun").error.startswith("KeyboardInterrupt")
    assert kernel.run("%%collectives\nx.tolist()").lines == ["[0] [1.0, 1.0]", "[1] [2.0, 2.0]"]


def test_a_dead_rank_is_said_and_the_next_cell_starts_others(kernel: Kernel) -> None:
    cell = "%%collectives\nimport os\nif collectives.rank() == 1:\n    os.kill(os.getpid(), 9)\ncollectives.barrier()"
    shown = kernel.run(cell)
    assert "the ranks have ended" in shown.error
    assert any("rank 1 on" in line and "SIGKILL" in line for line in shown.lines)
    assert kernel.run("%%collectives -np 2\n'x' in globals()").lines == ["[0] False", "[1] False"]
    assert not kernel.run("%collectives stop").error
    assert kernel.run("%collectives").lines == ["no ranks run; %%collectives -np 4 starts some"]


def test_wrong_options_are_said(kernel: Kernel) -> None:
    assert "expected host:ranks" in kernel.run("%%collectives -H ,\n1").error


def test_run_shows_the_ranks_output_in_the_cell(kernel: Kernel) -> None:
    cell = "import collectives\ndef f():\n    collectives.init()\n    print('in f')\n    return collectives.rank()\n"
    shown = kernel.run(f"{cell}collectives.run(f, np=2)")
    assert shown == Shown(["[0] in f", "[1] in f"], "[0, 1]", "")
