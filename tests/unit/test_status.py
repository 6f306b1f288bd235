"""Who is late, from what the ranks say of themselves; what a rank says; and who may ask the launcher."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from collectives.base import user_folder
from collectives.base.errors import InvalidArgumentError, NotInitializedError
from collectives.engine.context import Statistics
from collectives.engine.stall import Wait
from collectives.launch import rank as before_rank
from collectives.launch import status_server
from collectives.launch.status import Statuses, does, late
from collectives.tools import status as tool
from collectives.transport.stores.rendezvous import Asked
from collectives.worlds import status


def computes(rank: int, where: str = "data.py:17 in load", **more: Any) -> dict[str, Any]:
    said = {
        "rank": rank,
        "host": "node1",
        "at": where,
        "call": "",
        "still": 3.9,
        "age": 0.1,
        "operations": 7,
        "steps": 5,
        "rate": 2.5,
    }
    return {**said, "waits": None, **more}


def waits(rank: int, *ranks: int, seconds: float | None = 4.0, what: str = "allreduce 'grad.7'") -> dict[str, Any]:
    waited = {"what": what, "at": "train.py:41 in step", "seconds": seconds, "ranks": list(ranks)}
    return {**computes(rank, "train.py:41 in step"), "call": "allreduce", "waits": waited}


def test_who_computes_while_the_others_wait_is_late() -> None:
    assert late([waits(0, 2), waits(1, 2, seconds=2.0), computes(2), waits(3, 2)]) == [
        "rank 2 on node1 is late: ranks 0, 1, 3 wait 4.1 s for it in allreduce 'grad.7' (train.py:41 in step); "
        "it is at data.py:17 in load, for 4.0 s"
    ]


def test_waits_of_a_moment_are_part_of_every_step() -> None:
    assert late([waits(0, 1, seconds=0.1), computes(1)]) == []


def test_who_waits_for_nobody_is_named_before_those_that_wait_for_it() -> None:
    first, second = late([waits(0, 1), waits(1, 2, seconds=None, what="recv from rank 2, any tag"), computes(2)])
    assert first.startswith("rank 2 on node1 is late: rank 1 waits 4.0 s for it in recv from rank 2")
    assert second.endswith("it waits for rank 2 in recv from rank 2, any tag (train.py:41 in step), for 4.0 s")


def test_a_rank_that_is_stopped_shows_by_its_silence_and_is_not_believed() -> None:
    (sentence,) = late([waits(0, 1), {**waits(1, 0), "age": 5.0}])
    assert "it has reported nothing for 5.0 s" in sentence and "before that, it waited for rank 0" in sentence


def test_who_has_not_called_init_is_late_there() -> None:
    inside = {"host": "node1", "at": "train.py:3 in <module>", "call": "init", "still": 2.0, "age": 0.0}
    (sentence,) = late([{"rank": 0, **inside}, {"rank": 1}])
    assert sentence == (
        "rank 1 is late: rank 0 waits 2.0 s for it in init() (train.py:3 in <module>); it has not called init() yet"
    )


def test_an_operation_in_flight_does_not_hide_where_a_rank_computes() -> None:
    assert does({**waits(0, 1), "call": ""}).startswith("is at train.py:41 in step, for 4.0 s")


def test_lines_are_joined_and_former_generations_left_out() -> None:
    statuses = Statuses(2)
    text = json.dumps({**computes(0), "generation": 2}).encode() + b"\n"
    statuses.add(5, text[:10])
    assert statuses.lines() == [{"rank": 0}, {"rank": 1}]
    statuses.add(5, text[10:] + b"no JSON\n")
    statuses.add(5, json.dumps({**computes(0), "generation": 2, "operations": 27}).encode() + b"\n")
    statuses.add(6, json.dumps({**computes(1), "generation": 1}).encode() + b"\n")
    first, second = statuses.lines()
    assert (first["operations"], first["generation"]) == (27, 2)
    assert second == {"rank": 1}
    shown = tool.in_words(statuses.snapshot("python train.py"))
    assert "python train.py" in shown and re.search(r"27 +5 +2\.5 +is at data.py:17 in load", shown)


def test_a_rank_says_its_line_and_the_call_that_it_is_in(tmp_path: Path) -> None:
    own = str(Path(status.__file__).with_name("somewhere.py"))
    inside: dict[str, Any] = {}
    exec(compile("def allreduce(f): return f()", own, "exec"), inside)
    where, call = inside["allreduce"](lambda: status.place_of(sys._getframe()))  # innermost is this file's
    assert (call, " in <lambda>" in where) == ("", True)
    exec(compile("import sys\ndef frame(): return sys._getframe()", own, "exec"), inside)
    where, call = status.place_of(inside["frame"]())
    assert __file__ in where and call == "frame"


def test_the_thread_writes_lines_and_ends_with_the_pipe(tmp_path: Path) -> None:
    assert status.VARIABLE == before_rank.STATUS
    source, sink = os.pipe()
    link = tmp_path / "pipe"
    link.symlink_to(f"/proc/{os.getpid()}/fd/{sink}")
    thread = status.start(str(link), lambda: (None, None))
    assert thread is not None
    line = json.loads(os.read(source, 4096))
    assert line["pid"] == os.getpid() and line["rank"] is None and "operations" not in line
    link.unlink()
    thread.join(20)
    os.close(source)
    os.close(sink)
    assert not thread.is_alive()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(user_folder, "FOLDER", tmp_path / "jobs")
    return tmp_path / "jobs"


def test_ranks_that_another_launcher_has_started_are_found_by_their_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This process is rank 2; of rank 3, on another host, nothing is seen here."""
    steps, written, left = iter([0, 40, 80, 120]), threading.Event(), threading.Event()
    waiting = Wait("allreduce 'grad.7'", "train.py:41 in step", time.monotonic() - 60, [3])
    world: Any = SimpleNamespace(rank=2, waits=lambda: [waiting])

    def present() -> Any:
        if world.before is None:
            world.before = 0
            raise NotInitializedError("this thread is none of the ranks of a local world")
        world.work_done = 9, next(steps, 120)
        if world.before == 120:
            written.set()
        world.before = world.work_done[1]
        return None if left.is_set() else world, None

    world.before = None
    monkeypatch.setattr(status, "_EVERY", 0.05)
    thread = status.start("", present, Asked("tcp://node1:29400", None, 2, 4))
    assert thread is not None and written.wait(20)
    ended = subprocess.Popen(["true"])
    ended.wait(20)
    (folder / f"rank-{ended.pid}").write_text("{}")
    assert tool.main([str(os.getpid())]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^ +2 +\S+ +9 +120 +[1-9][\d.]+ +is at ", shown, re.MULTILINE), shown
    assert "rank 3 is late: rank 2 waits 60" in shown and "it is on another host: ask there" in shown
    assert list(status_server.jobs()) == [os.getpid()]
    assert [path.name for path in folder.iterdir()] == [f"rank-{os.getpid()}"]
    left.set()
    thread.join(20)
    assert not thread.is_alive() and not list(folder.iterdir())


def test_the_end_of_a_former_job_leaves_the_file_of_the_next(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that a pool of ranks uses again: the former job's thread finds its world gone while the next
    job's has begun."""
    ends, may_end, left = threading.Event(), threading.Event(), threading.Event()
    world: Any = SimpleNamespace(rank=0, waits=list, work_done=(0, 0))
    answers = iter([world])

    def former() -> Any:
        if (present := next(answers, None)) is None:
            ends.set()
            may_end.wait(20)
        return present, None

    monkeypatch.setattr(status, "_EVERY", 0.05)
    asked = Asked("tcp://node1:29400", None, 0, 1)
    first = status.start("", former, asked)
    assert first is not None and ends.wait(20)
    second = status.start("", lambda: (None if left.is_set() else world, None), asked)
    may_end.set()
    first.join(20)
    assert second is not None and not first.is_alive()
    assert [path.name for path in folder.iterdir()] == [f"rank-{os.getpid()}"]
    left.set()
    second.join(20)
    assert not second.is_alive() and not list(folder.iterdir())


KILLED = """
import os, signal, sys
from pathlib import Path
from collectives.base import user_folder
from collectives.transport.stores.rendezvous import Asked
from collectives.worlds import status
user_folder.FOLDER = Path(sys.argv[1])
status._EVERY = 0.05
assert status.start("", lambda: (None, None), Asked("tcp://node1:29400", None, 0, 1))
if not os.fork():
    print("told", flush=True)  # it has given up its part in the lock
    sys.stdin.read()  # the child outlives the rank
    os._exit(0)
signal.pause()
"""


def test_a_killed_rank_is_not_taken_for_the_process_that_has_its_number(folder: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == b"told\n"
        file = folder / f"rank-{rank.pid}"
        end = time.monotonic() + 20
        while not (line := file.read_bytes()) and time.monotonic() < end:
            time.sleep(0.01)  # until its thread has written
        assert list(status_server.jobs()) == [rank.pid]
        rank.kill()
        rank.wait(20)
        file.write_bytes(line.replace(str(rank.pid).encode(), str(os.getpid()).encode()))
        file.rename(folder / f"rank-{os.getpid()}")
        assert status_server.jobs() == {} and not list(folder.iterdir())


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    with status_server.serve(lambda: Statuses(1).snapshot("python train.py"), 0) as served:
        yield served


def got(address: str, **headers: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=20) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_the_page_is_for_who_knows_the_token_and_for_this_host(address: str) -> None:
    port = address.split(":")[2].split("/")[0]
    assert got(address)[0] == 200 and b"<table>" in got(address)[1]
    assert json.loads(got(address + "status.json")[1])["ranks"] == [{"rank": 0, "does": "has not called init() yet"}]
    assert got(address, Host=f"localhost:{port}")[0] == 200
    for host in ("rebound.example", f"rebound.example:{port}", "127.0.0.1", ""):
        assert got(address, Host=host)[0] == 403
    for other in ("", "é", "status.json", "/" * 9, "x" * 22 + "/status.json"):
        assert got(f"http://127.0.0.1:{port}/{urllib.request.quote(other)}")[0] == 404  # type: ignore[attr-defined]
    assert got(address + "../../etc/passwd")[0] == 404 and got(address.rstrip("/"))[0] == 404


def test_who_says_nothing_keeps_nobody_waiting(address: str) -> None:
    """A browser connects ahead of its request."""
    with socket.create_connection(("127.0.0.1", int(address.split(":")[2].split("/")[0])), 20):
        assert got(address)[0] == 200


def test_a_port_that_is_taken_is_named(address: str) -> None:
    port = int(address.split(":")[2].split("/")[0])
    with (
        pytest.raises(InvalidArgumentError, match=f"--status-port {port}: .*in use"),
        status_server.serve(dict, port),
    ):
        pass


def test_jobs_are_found_and_killed_ones_forgotten(
    address: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main([]) == 0 and "has not called init() yet" in capsys.readouterr().out
    assert tool.main(["--json", str(os.getpid())]) == 0 and json.loads(capsys.readouterr().out)["job"]
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(folder / "1"))
    assert list(status_server.jobs()) == [os.getpid()] and not (folder / "1").exists()
    assert tool.main(["1"]) == 1 and "no job 1 of this user on this host answered" in capsys.readouterr().err


def test_nothing_is_served_in_a_folder_that_others_can_change(folder: Path) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with status_server.serve(dict):
        assert not list(folder.iterdir())
    with pytest.raises(PermissionError, match="not a folder of this user alone"):
        status_server.jobs()


def test_a_flood_of_connections_takes_few_descriptors(folder: Path) -> None:
    with (
        status_server.serve(lambda: Statuses(1).snapshot("python train.py"), 0) as address,
        contextlib.ExitStack() as held,
    ):
        port = int(address.split(":")[2].split("/")[0])
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(200):
            client = held.enter_context(socket.create_connection(("127.0.0.1", port), 20))
            client.sendall(b"GET / HTTP/1.1\r\nX: ")
        with urllib.request.urlopen(f"{address}status.json", timeout=20) as answer:
            assert json.load(answer)["job"]["command"] == "python train.py"
        assert len(os.listdir("/proc/self/fd")) <= before + 200 + status_server._MOST + 1


def test_who_dribbles_a_request_is_cut_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_server, "_PATIENCE", 0.3)
    with (
        status_server.serve(dict, 0) as address,
        socket.create_connection(("127.0.0.1", int(address.split(":")[2].split("/")[0]))) as client,
    ):
        client.settimeout(0.05)
        end, said = time.monotonic() + 20, None
        while said is None and time.monotonic() < end:
            try:
                client.sendall(b"G")
                said = client.recv(1)
            except TimeoutError:
                continue
            except OSError:
                said = b""
        assert said == b""


def test_the_server_leaves_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(threading.enumerate())
    with status_server.serve(dict, 0):
        assert set(threading.enumerate()) - before
    end = time.monotonic() + 20
    while set(threading.enumerate()) - before and time.monotonic() < end:
        time.sleep(0.01)  # threads of requests
    assert not set(threading.enumerate()) - before and not list(folder.iterdir())
    assert tool.main([]) == 1 and "no job is running here" in capsys.readouterr().err
    with contextlib.suppress(FileNotFoundError):
        folder.rmdir()


def test_a_step_ends_where_a_named_operation_comes_again() -> None:
    statistics = Statistics()
    gradients, bias, loss = (cast(Any, SimpleNamespace(last_step=-1)) for _ in range(3))
    counted = []
    for entry in (gradients, bias, loss, bias, gradients, loss, gradients, bias):
        statistics.count_step(entry)
        counted.append(statistics.steps)
    assert counted == [0, 0, 0, 1, 1, 1, 2, 2]
