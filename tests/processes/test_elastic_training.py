"""Horovod's scenarios of elastic jobs, with whole trainings: NumPy's and torch's.

Rank 0 writes a line after each epoch. The discovery script prints the hosts that the plan has after so many lines;
`localhost` and `127.0.0.1` count as two hosts. A rank that is to be seen to fail does so before the first batch of an
epoch, as the rank that its process had at its start.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching.mpirun import ROOT, run_command

TRAINING = """
import json, os, signal, sys, time
from pathlib import Path

framework, log, plan = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
start_rank, hostname = int(os.environ["HOROVOD_RANK"]), os.environ["HOROVOD_HOSTNAME"]
COUNTS = dict(epoch=0, batch=0, commits=0, rendezvous=0)

if framework == "torch":
    import torch
    import horovod.torch as hvd

    hvd.init()
    torch.manual_seed(start_rank)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001 * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    data = torch.randn(8, 2)
    state = hvd.elastic.TorchState(model, optimizer, **COUNTS)

    def step():
        optimizer.zero_grad()
        model(data).square().sum().backward()
        optimizer.step()

    def weights():
        return [value for tensor in model.parameters() for value in tensor.detach().flatten().tolist()]
else:
    import numpy as np
    import collectives as hvd
    import collectives.elastic

    hvd.init()
    state = hvd.elastic.ObjectState(weights=np.full(3, float(start_rank)), **COUNTS)

    def step():
        state.weights += hvd.allreduce(np.arange(3.0) + hvd.rank(), average=False)

    def weights():
        return state.weights.tolist()

first_place, resets = [hvd.rank(), hvd.size()], []
state.register_reset_callbacks([lambda: resets.append(hvd.size())])

@hvd.elastic.run
def train(state):
    state.rendezvous += 1
    while state.epoch < plan["epochs"]:
        while state.batch < 10:
            if state.batch == 0 and start_rank in plan["failures"].get(str(state.epoch), []):
                if plan["kill"]:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError(f"start_rank {start_rank} fails in epoch {state.epoch}")
            step()
            state.batch += 1
            state.commits += 1
            state.commit()
        everywhere = hvd.allgather_object(weights())
        if hvd.rank() == 0:
            line = {name: getattr(state, name) for name in COUNTS}
            line |= dict(hostname=hostname, start_rank=start_rank, rank=hvd.rank(), size=hvd.size())
            line |= dict(alike=all(other == weights() for other in everywhere), first_place=first_place, resets=resets)
            with log.open("a") as file:
                file.write(json.dumps(line) + "\\n")
            if state.epoch in plan["changes"]:
                while state._host_messages.empty():
                    time.sleep(0.01)
        state.epoch += 1
        state.batch = 0
        state.commits += 1
        state.commit()

train(state)
"""


class Training:
    """A training's lines, the launcher's events, and all that was printed."""

    def __init__(self, folder: Path, output: str) -> None:
        self.output = output
        self.lines = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
        self.events = [json.loads(line) for line in (folder / "events").read_text().splitlines()]
        for epoch, line in enumerate(self.lines):
            assert (line["epoch"], line["batch"], line["commits"]) == (epoch, 10, 11 * epoch + 10), output
            assert line["rank"] == 0 and line["alike"], output

    def column(self, name: str) -> list[Any]:
        return [line[name] for line in self.lines]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]


def train(
    folder: Path,
    framework: str,
    hosts: Sequence[str],
    *options: str,
    failures: Mapping[int, Sequence[int]] | None = None,
    kill: bool = False,
    changes: Sequence[int] | None = None,
    epochs: int = 3,
    expect: int = 0,
) -> Training:
    """Run a training to its end.

    Args:
        hosts: by the number of lines that rank 0 has written; the last ones stay.
        options: the launcher's.
        failures: by epochs, the ranks (at their start) that fail in their first batch.
        kill: whether they are killed, instead of raising an exception.
        changes: the epochs at whose ends a change of the hosts is waited for; by default those where ``hosts`` changes.
    """
    if find_spec(framework) is None:
        pytest.skip(f"needs {framework}")
    if changes is None:
        changes = [epoch for epoch in range(len(hosts) - 1) if hosts[epoch] != hosts[epoch + 1]]
    plan = {"epochs": epochs, "failures": failures or {}, "kill": kill, "changes": changes}
    (folder / "training.py").write_text(TRAINING)
    (folder / "log").touch()
    (folder / "plan").write_text("".join(f"{line}\n" for line in hosts))
    script = f"n=$(wc -l < {folder}/log); m=$((n < {len(hosts)} ? n + 1 : {len(hosts)}))"
    script += f"; sed -n ${{m}}p {folder}/plan | tr , '\\n'"
    launcher = [sys.executable, "-m", "collectives.launch", "--as-horovod", "--host-discovery-script", script]
    launcher += ["--elastic-events", str(folder / "events"), *options]
    program = [sys.executable, str(folder / "training.py"), framework, str(folder / "log"), json.dumps(plan)]
    return Training(folder, run_command([*launcher, *program], timeout=60, expect=expect).output)


TWO, FOUR = "localhost:2", "localhost:2,127.0.0.1:2"


def test_hosts_added_and_the_first_one_removed(tmp_path: Path) -> None:
    """The state survives the loss of rank 0's host."""
    options = ("-np", "2", "--min-np", "2", "--max-np", "4", "--reset-limit", "2")
    job = train(tmp_path, "numpy", [TWO, FOUR, "127.0.0.1:2"], *options)
    assert job.column("start_rank") == [0, 0, 2] and job.column("size") == [2, 4, 2]
    assert job.column("hostname") == ["localhost", "localhost", "127.0.0.1"]
    assert job.column("rendezvous") == [1, 2, 3] and job.column("resets") == [[], [4], [4, 2]]
    assert [event["member"] for event in job.of("stopped")] == [0, 1]


def test_torch_hosts_come_and_go_and_rank_0_is_killed(tmp_path: Path) -> None:
    one, two = "localhost:1", "localhost:1,127.0.0.1:1"
    hosts = [one, two, "127.0.0.1:1", two]
    options = ("-np", "1", "--min-np", "1", "--max-np", "2")
    job = train(tmp_path, "torch", hosts, *options, failures={4: [1]}, kill=True, epochs=5)
    assert job.column("start_rank") == [0, 0, 1, 1, 2] and job.column("size") == [1, 2, 1, 2, 1]
    assert job.column("hostname") == ["localhost", "localhost", "127.0.0.1", "127.0.0.1", "localhost"]
    assert job.column("rendezvous") == [1, 2, 3, 4, 5] and job.column("resets")[-1] == [2, 1]
    assert job.of("blacklisted")[0]["host"] == "127.0.0.1"
    assert job.column("first_place") == [[0, 1], [0, 1], [1, 2], [1, 2], [1, 2]], "newcomers know theirs beforehand"


@pytest.mark.parametrize("kill", [True, False])
def test_rank_0_fails_and_its_host_goes(kill: bool, tmp_path: Path) -> None:
    job = train(tmp_path, "numpy", [FOUR], "-np", "4", "--min-np", "2", failures={1: [0]}, kill=kill)
    assert job.column("start_rank") == [0, 2, 2] and job.column("size") == [4, 2, 2]
    assert job.column("rendezvous") == [1, 2, 2] and job.column("hostname") == ["localhost", "127.0.0.1", "127.0.0.1"]
    assert ("fails in epoch 1" in job.output) != kill


@pytest.mark.parametrize("failing", [[0, 1, 2, 3], [0, 2]])
def test_a_failure_on_every_host_ends_the_job(failing: list[int], tmp_path: Path) -> None:
    job = train(tmp_path, "numpy", [FOUR], "-np", "4", "--min-np", "2", failures={1: failing}, expect=1)
    assert job.column("size") == [4] and job.events[-1]["code"] == 1
    assert {event["host"] for event in job.of("blacklisted")} == {"localhost", "127.0.0.1"}


def test_below_the_minimum_the_job_waits_and_gives_up(tmp_path: Path) -> None:
    options = ("-np", "4", "--min-np", "4", "--elastic-timeout", "1")
    job = train(tmp_path, "numpy", [FOUR], *options, failures={1: [0]}, expect=1)
    assert job.column("size") == [4] and "for 2 more ranks (no host has room)" in job.of("gave_up")[0]["text"]


def test_more_resets_than_allowed_end_the_job(tmp_path: Path) -> None:
    options = ("-np", "2", "--min-np", "2", "--max-np", "4", "--reset-limit", "1")
    job = train(tmp_path, "numpy", [TWO, FOUR, "127.0.0.1:2"], *options, expect=1)
    text = "Horovod was shutdown because number of resets during elastic job exceeded limit: 1 [E7]"
    assert job.column("size") == [2, 4] and job.of("gave_up")[0]["text"] == text


def test_a_blacklisted_host_comes_back_and_is_blacklisted_for_longer(tmp_path: Path) -> None:
    """The second failure is that of a process that came with the host's return."""
    options = ("-np", "4", "--min-np", "2", "--blacklist-cooldown-range", "1", "3")
    job = train(tmp_path, "numpy", [FOUR], *options, failures={1: [3], 3: [4]}, changes=[1], epochs=5)
    assert job.column("size") == [4, 2, 4, 2, 2] and job.column("start_rank") == [0] * 5
    assert job.column("rendezvous") == [1, 2, 3, 4, 4]
    times = [float(event["text"].partition(" for ")[2].partition(" s:")[0]) for event in job.of("blacklisted")]
    assert 2 <= times[0] <= 3 and times[1] == 3


@pytest.mark.skipif(not (find_spec("torch") and find_spec("sklearn")), reason="needs torch and scikit-learn")
def test_the_example() -> None:
    example = [str(ROOT / "examples/pytorch/pytorch_elastic.py"), "--kill-at", "2"]
    launcher = [sys.executable, "-m", "collectives.launch", "-np", "2", "--min-np", "1", sys.executable]
    output = run_command([*launcher, *example, "--epochs", "4"], timeout=60).output
    assert "Epoch: 1\tRanks: 2" in output and "Epoch: 4\tRanks: " in output
    assert output.count("All ranks hold the same parameters") == 1


LATE = """
import os
import numpy as np
import collectives as hvd
from collectives.worlds import connections, generations

member = int(os.environ["COLLECTIVES_MEMBER"])

class Connection(connections.Connection):
    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        if generations.job().generation == 1:
            self.world.fail("a rank has died")
            self.world.shutdown()
            raise hvd.RankFailedError("a rank has died")

if member < {late}:
    connections.Connection = Connection
hvd.init()
state = hvd.elastic.ObjectState(total=np.zeros(3), step=0)

@hvd.elastic.run
def train(state):
    while state.step < 5:
        state.total += hvd.allreduce(np.full(3, member + 1.0), op=hvd.Sum)
        state.step += 1
        state.commit()

train(state)
print("member", member, "of generation", generations.job().generation, "has", state.total, flush=True)
"""


@pytest.mark.parametrize("late", [1, 3])
def test_a_rank_that_joins_when_the_others_have_formed_the_first_generation_and_lost_it(
    late: int, tmp_path: Path
) -> None:
    """It does in `init` what the others do in `run`; all do, if none has come as far as that."""
    (tmp_path / "program.py").write_text(LATE.replace("{late}", str(late)))
    command = [sys.executable, "-m", "collectives.launch", "-np", "3", "--min-np", "3"]
    output = run_command([*command, sys.executable, str(tmp_path / "program.py")], timeout=60).output
    for member in range(3):
        assert f"[{member}] member {member} of generation 2 has [30. 30. 30.]\n" in output, output


GROUPS = """
import os, signal, socket, sys
import torch
import torch.distributed as dist
import collectives
import collectives.torch as hvd

def make_group():
    if dist.is_initialized():
        dist.destroy_process_group()
    first = hvd.rank() == 0
    store = dist.TCPStore(socket.gethostname(), 0, is_master=True, wait_for_workers=False) if first else None
    host, port = hvd.broadcast_object((socket.gethostname(), store.port) if first else None, 0)
    dist.init_process_group(
        "gloo", store=store or dist.TCPStore(host, port), rank=hvd.rank(), world_size=hvd.size()
    )

hvd.init()
member = int(os.environ["COLLECTIVES_MEMBER"])
state = hvd.elastic.TorchState(step=0, total=0.0)

@hvd.elastic.run
def train(state):
    make_group()
    while state.step < 200 or hvd.size() < 3:
        if member == 1 and state.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        largest = torch.tensor([float(hvd.size() - hvd.rank())])
        try:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        except RuntimeError as error:
            raise collectives.RecoverableError(f"torch's group: {error}") from error
        assert largest.item() == hvd.size()
        state.step += 1
        state.commit()

train(state)
print("member", member, "has", hvd.size(), "ranks and", os.environ["LOCAL_RANK"], flush=True)
dist.destroy_process_group()
"""


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_a_group_of_torchs_is_made_in_each_generation(tmp_path: Path) -> None:
    """As docs/elastic.md has it."""
    (tmp_path / "program.py").write_text(GROUPS)
    recipe = GROUPS[GROUPS.index("def make_group") : GROUPS.index("hvd.init()")].strip()
    assert recipe in (ROOT / "docs/elastic.md").read_text()
    command = [sys.executable, "-m", "collectives.launch", "-np", "3", "--min-np", "2"]
    output = run_command([*command, sys.executable, str(tmp_path / "program.py")], timeout=60).output
    for member, local_rank in ((0, 0), (2, 2), (3, 1)):
        assert f"[{member}] member {member} has 3 ranks and {local_rank}\n" in output, output
