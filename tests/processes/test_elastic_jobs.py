"""Elastic jobs as ``collectivesrun`` starts them: members that die, leave, fail and come, hosts that come and go.

The members use the store alone. What happens in a generation is a plan: of words by the generation's number, such as
``kill 1`` (member 1), ``stop 1`` (the others notice), ``freeze 1`` (they do not), ``leave 1``, ``raise 1``, ``hosts
localhost:2,127.0.0.1:2`` (what discovery finds from now on), ``touch`` (a file) and ``finish``. `localhost` and
`127.0.0.1` count as two hosts.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from collectives.launch import agent
from tests.support.launching.clusters import cluster
from tests.support.launching.mpirun import Result, run_command

MEMBER = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from collectives.base.errors import CollectiveTimeoutError
from collectives.transport.stores.store import Store
from collectives.transport.tcp.service import Service

folder, plan = Path(__file__).parent, json.loads(sys.argv[1])
member, said, notice, event, generation = int(os.environ["COLLECTIVES_MEMBER"]), 0, 0, 0, 0
host, _, port = os.environ["COLLECTIVES_RENDEZVOUS"].removeprefix("tcp://").rpartition(":")
store = Store(host, int(port), bytes.fromhex(os.environ["COLLECTIVES_KEY"]), 60.0, Service())

def say(what, why=""):
    global said
    said += 1
    thing = {"what": what, "generation": generation, "why": why}
    store.set(f"elastic/said/{member}/{said}", json.dumps(thing).encode())

def ask(what, why=""):
    say(what, why)
    return json.loads(store.get(f"elastic/answer/{member}/{said}"))

def set_already(key):
    store.timeout = 0.02
    try:
        return json.loads(store.get(key))
    except CollectiveTimeoutError:
        return None
    finally:
        store.timeout = 60.0

def until_it_ends():
    '''Until a member has died, or a notice comes.'''
    global notice, event
    while True:
        while news := set_already(f"elastic/event/{event + 1}"):
            event += 1
            if news["event"] == "ended" and news["generation"] == generation:
                return news["why"]
        if news := set_already(f"elastic/notice/{notice + 1}"):
            notice += 1
            if news["generation"] == generation:
                return "hosts updated"

answer = ask("here")
if "alone" in answer:
    answer = ask("ready")
else:
    say("runs")
while True:
    if "stop" in answer:
        sys.exit(0)
    if "give_up" in answer:
        raise RuntimeError(answer["give_up"])
    generation, members = answer["generation"], answer["members"]
    rank = members.index(member)
    print("generation", generation, "rank", rank, "of", len(members), flush=True)
    what, _, who = plan.get(str(generation), "").partition(" ")
    if what == "finish":
        say("finished")
        sys.exit(0)
    if what == "touch" and rank == 0:
        (folder / "ready").touch()
    if what == "hosts" and rank == 0:
        (folder / "new").write_text(who.replace(",", "\\n") + "\\n")
        (folder / "new").rename(folder / "hosts")
    if who == str(member):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what in ("stop", "freeze"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if what == "raise":
            raise ValueError("no good")
        sys.exit(0)
    answer = ask("ended", "no word of a member" if what == "stop" else until_it_ends())
"""


class Job:
    """What a job has printed and recorded."""

    def __init__(self, folder: Path, result: Result) -> None:
        self.output, self.seconds = result.output, result.seconds
        self.events = [json.loads(line) for line in (folder / "events").read_text().splitlines()]
        for event in self.events:
            assert f"collectivesrun: {event['text']}\n" in self.output

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    @property
    def generations(self) -> list[list[int]]:
        return [event["members"] for event in self.of("generation")]


def run(
    folder: Path,
    plan: dict[int, str],
    *options: str,
    hosts: str = "",
    expect: int | None = 0,
    on: Callable[..., list[str]] = lambda *words: list(words),
    **more: Any,
) -> Job:
    """Run a job to its end; ``hosts``: what discovery finds at first; ``on``: runs a command somewhere."""
    (folder / "member.py").write_text(MEMBER)
    (folder / "hosts").write_text(hosts.replace(",", "\n"))
    discovery = ["--host-discovery-script", f"cat {folder}/hosts"] if hosts else []
    words = [*discovery, "--elastic-events", str(folder / "events"), *options]
    command = [sys.executable, "-m", "collectives.launch", *words, sys.executable, str(folder / "member.py")]
    result = run_command(on(*command, json.dumps(plan)), timeout=30, expect=expect, **more)
    return Job(folder, result)


def test_a_death_is_survived_and_the_dead_is_replaced(tmp_path: Path) -> None:
    job = run(tmp_path, {1: "kill 1", 3: "finish"}, "-np", "3", "--min-np", "2")
    assert job.generations == [[0, 1, 2], [0, 2], [0, 2, 3]]
    for member, rank in ((0, 0), (2, 1), (3, 2)):
        assert f"[{member}] generation 3 rank {rank} of 3\n" in job.output
    assert job.of("died")[0]["why"] == "was killed by SIGKILL" and job.events[-1]["code"] == 0


def test_below_the_minimum_a_replacement_is_waited_for(tmp_path: Path) -> None:
    job = run(tmp_path, {1: "raise 0", 2: "finish"}, "-np", "2", "--min-np", "2")
    assert job.generations == [[0, 1], [1, 2]]
    assert job.output.count("ValueError: no good") == 1 and "Traceback" in job.output


def test_hosts_come_and_go(tmp_path: Path) -> None:
    """The state survives the loss of rank 0's host."""
    plan = {1: "hosts localhost:1,127.0.0.1:2", 2: "hosts 127.0.0.1:2", 3: "finish"}
    job = run(tmp_path, plan, "--min-np", "1", "--max-np", "4", hosts="localhost:1")
    assert job.generations == [[0], [0, 1, 2], [1, 2]]
    assert job.of("generation")[-1]["hosts"] == ["127.0.0.1"] * 2
    assert [event["member"] for event in job.of("stopped")] == [0]


def test_a_host_that_cannot_be_reached_is_left_out(tmp_path: Path) -> None:
    plan = {1: "hosts localhost:2,nowhere.invalid:1", 2: "finish"}
    job = run(tmp_path, plan, "--min-np", "1", "--max-np", "3", hosts="localhost:1")
    assert job.generations == [[0], [0, 1]] and job.of("blacklisted")[0]["host"] == "nowhere.invalid"


def test_without_enough_hosts_the_job_gives_up(tmp_path: Path) -> None:
    options = ["-np", "2", "--elastic-timeout", "0.5"]
    job = run(tmp_path, {1: "hosts localhost:1"}, *options, hosts="localhost:2", expect=1)
    assert job.generations == [[0, 1]] and job.output.count("RuntimeError: waited ") == 2
    *_, last, explain = job.output.splitlines()
    assert last.startswith("collectivesrun: waited ") and explain.endswith(" explain E6")
    assert "for 1 more rank (no host has room); to wait longer, raise --elastic-tim" in last


def test_a_file_for_events_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "collectives.launch", "--min-np", "1", "--elastic-events", str(tmp_path), "true"]
    assert "--elastic-events: cannot write" in run_command(command, timeout=30, expect=2).output


def test_too_many_resets(tmp_path: Path) -> None:
    options = ["-np", "3", "--min-np", "1", "--reset-limit", "1"]
    job = run(tmp_path, {1: "raise 1", 2: "kill 2"}, *options, expect=137)
    assert job.generations == [[0, 1, 2], [0, 2]]
    assert "number of resets during elastic job exceeded limit: 1" in job.output
    assert job.output.rstrip().endswith(
        f"rank 2 on {os.uname().nodename} was killed by signal 9 (SIGKILL) [L8]\n"
        "For cause and cure: collectives explain L8"
    )


def test_a_member_that_leaves_is_no_success(tmp_path: Path) -> None:
    job = run(tmp_path, {1: "leave 0", 2: "finish"}, "-np", "2", "--min-np", "1")
    assert job.generations == [[0, 1], [1]] and job.of("left")[0]["member"] == 0


def test_a_failing_host_is_blacklisted_as_by_horovodrun(tmp_path: Path) -> None:
    options = ["-np", "3", "--min-np", "1", "--on-rank-failure", "host", "-H", "localhost:2,127.0.0.1:1"]
    job = run(tmp_path, {1: "kill 0", 2: "finish"}, *options)
    assert job.generations == [[0, 1, 2], [2]] and job.of("blacklisted")[0]["host"] == "localhost"


def test_a_member_that_does_not_answer_is_killed_with_its_children(tmp_path: Path) -> None:
    job = run(tmp_path, {1: "stop 1", 2: "finish"}, "-np", "2", "--min-np", "1", env={"COLLECTIVES_PEER_TIMEOUT": "1"})
    assert job.generations == [[0, 1], [0]]
    assert job.of("died")[0]["why"].startswith("was declared dead: it did not leave generation 1")


def test_a_stopped_member_that_nobody_misses_is_killed(tmp_path: Path) -> None:
    plan = {1: "freeze 1", 2: "finish"}
    job = run(tmp_path, plan, "-np", "2", "--min-np", "1", env={"COLLECTIVES_PEER_TIMEOUT": "1"})
    assert (
        job.generations == [[0, 1], [0]]
        and "killed rank 1: its process was stopped (SIGSTOP) for 1 s [L2]\n" in job.output
    )


def test_horovods_variables(tmp_path: Path) -> None:
    words = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME")
    program = f"import os; print(*(os.environ['HOROVOD_' + word] for word in {words}))"
    command = [sys.executable, "-m", "collectives.launch", "--as-horovod", "-np", "3", "--min-np", "2"]
    hosts = ["-H", "localhost:2,127.0.0.1:1"]
    # No rank calls init(), which under --as-horovod is an error.
    shown = run_command([*command, *hosts, sys.executable, "-c", program], timeout=30, expect=1).output
    assert "[0] 0 3 0 2 0 2 localhost\n" in shown and "[1] 1 3 1 2 0 1 localhost\n" in shown
    assert "[2] 2 3 0 1 1 2 127.0.0.1\n" in shown


def test_the_first_member_gets_the_launchers_input() -> None:
    program = "import os, sys; print(os.environ['LOCAL_RANK'], sys.stdin.read().split(), 'MASTER_ADDR' in os.environ)"
    command = [sys.executable, "-m", "collectives.launch", "-np", "2", "--min-np", "1"]
    command += [sys.executable, "-c", program]
    shown = run_command(["sh", "-c", f"echo some words | {shlex.join(command)}"], timeout=30).output
    assert "[0] 0 ['some', 'words'] False\n" in shown and "[1] 1 [] False\n" in shown, shown


@pytest.mark.parametrize(
    ("script", "problem"),
    [("exit 3", "the script ended with exit code 3"), ("echo '?:'", "the script printed something other")],
)
def test_a_discovery_script_that_fails_at_first_ends_the_job(script: str, problem: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "collectives.launch", "-np", "2", "--host-discovery-script", script, "true"]
    shown = run_command(command, timeout=30, expect=1).output
    *_, last, explain = shown.splitlines()
    assert last.startswith(f"collectivesrun: host discovery: {problem}") and explain.endswith(" explain E3")


def agents(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if agent.__file__ in process.cmdline()]


def test_a_killed_launcher_leaves_nothing_and_no_agent_that_has_no_rank(tmp_path: Path) -> None:
    """What is left is found by `run_command`."""
    seen: list[psutil.Process] = []

    def interrupt(processes: list[psutil.Process]) -> None:
        seen.extend(agents(processes))
        next(process for process in processes if "collectives.launch" in process.cmdline()).kill()

    hosts, ready = "localhost:1,127.0.0.1:1", (tmp_path / "ready", interrupt)
    job = run(
        tmp_path, {1: "leave 1", 2: "touch"}, "-np", "2", "--min-np", "1", "-H", hosts, expect=-9, interrupt=ready
    )
    assert job.generations == [[0, 1], [0]] and len(seen) == 2


def test_an_interrupt_ends_the_job_without_replacements(tmp_path: Path) -> None:
    def interrupt(processes: list[psutil.Process]) -> None:
        next(process for process in processes if "collectives.launch" in process.cmdline()).send_signal(2)

    ready = (tmp_path / "ready", interrupt)
    job = run(tmp_path, {1: "touch"}, "-np", "2", "--min-np", "1", expect=130, interrupt=ready)
    assert [event["member"] for event in job.of("started")] == [0, 1]


def test_a_dead_agent_is_a_lost_host(tmp_path: Path) -> None:
    def interrupt(processes: list[psutil.Process]) -> None:
        ended = [process for process in agents(processes) for child in process.children() if ranks(child) == {"1"}]
        ended[0].kill()

    def ranks(process: psutil.Process) -> set[str]:
        return {process.environ().get("COLLECTIVES_MEMBER", "")}

    ready = (tmp_path / "ready", interrupt)
    options = ["-np", "2", "--min-np", "1", "-H", "localhost:1,127.0.0.1:1", "--elastic-timeout", "5"]
    job = run(tmp_path, {1: "touch", 2: "finish"}, *options, expect=None, interrupt=ready)
    assert job.of("host_lost")[0]["host"] == "127.0.0.1" and job.of("blacklisted")[0]["host"] == "127.0.0.1"


def test_a_host_joins_by_ssh_and_is_lost(tmp_path: Path) -> None:
    plan = {1: "hosts host1:1,host2:2", 2: "touch", 3: "finish"}
    with cluster(2, shared=tmp_path) as hosts:
        job = run(
            tmp_path,
            plan,
            *("--min-np", "1", "--max-np", "3"),
            hosts="host1:1",
            on=lambda *words: hosts.on("host1", *words),
            env={"COLLECTIVES_PEER_TIMEOUT": "1"},
            interrupt=(tmp_path / "ready", lambda processes: hosts.power_off("host2")),
        )
    assert job.generations == [[0], [0, 1, 2], [0]] and job.of("host_lost")[0]["host"] == "host2"


def test_a_function_runs_as_an_elastic_job(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("""
import os, collectives, collectives.elastic

def train():
    collectives.init()
    state = collectives.elastic.ObjectState(batch=0)

    @collectives.elastic.run
    def loop(state):
        while state.batch < 5:
            collectives.allreduce(1.0, name="step")
            state.batch += 1
            state.commit()
            if state.batch == 3 and os.environ["COLLECTIVES_MEMBER"] == "0":
                os._exit(9)
        return collectives.rank(), os.environ["COLLECTIVES_MEMBER"]

    return loop(state)

def fail():
    collectives.init()
    raise ValueError("no good")

if __name__ == "__main__":
    print("results", collectives.run(train, np=3, min_np=2))
    try:
        collectives.run(fail, np=2, min_np=1)
    except collectives.RankFailedError as error:
        print("error", str(error).rpartition("\\n")[0])
""")
    result = run_command([sys.executable, str(program)], timeout=60)
    assert (
        "\nresults [(0, '1'), (1, '2'" in f"\n{result.output}"
        and "ended with exit code 1 [L5]: Traceback" in result.output
    )


def test_members_hear_of_what_the_launcher_sees(tmp_path: Path) -> None:
    """A function that fails in the thread that tells it is logged, and hears what follows."""
    program = tmp_path / "program.py"
    program.write_text("""
import os, signal
import numpy as np
import collectives
from collectives import elastic

heard = []

@elastic.on_event
def hear(event):
    if event.facts:
        heard.append(event)
        if event.kind == "died":
            raise ValueError("no good")

collectives.init()
state = elastic.ObjectState(step=0)
member = os.environ["COLLECTIVES_MEMBER"]

@elastic.run
def train(state):
    while True:
        if state.step == 5 and member == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        state.step += 1
        has_heard = any(event.kind == "generation" and event.generation == 3 for event in heard)
        if collectives.allreduce(np.array([has_heard], np.uint8), op=collectives.Min)[0]:
            return
        state.commit()

train(state)
died = [event.why.rpartition(" on ")[0] for event in heard if event.kind == "died"]
third = next(event.members for event in heard if event.kind == "generation" and event.generation == 3)
print("heard", [event.kind for event in heard if event.kind == "host_added"], died, third)
""")
    command = [sys.executable, "-m", "collectives.launch", "-np", "3", "--min-np", "2", sys.executable, str(program)]
    output = run_command(command, timeout=60).output
    for member in (0, 2):
        assert f"[{member}] heard [] ['member 1'] (0, 2, 3)\n" in output, output
    assert "[3] heard [] [] (0, 2, 3)\n" in output, "not what was before"
    assert output.count("a listener of on_event() failed on elastic: died: member 1 on ") == 2
