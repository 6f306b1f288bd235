"""The helpers of Horovod's launchers that programs and its tests import: what each does."""

from __future__ import annotations

import importlib
import io
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

import collectives.horovod

assert collectives.horovod.FOLDER  # imported for its effect: this process finds "horovod" from here on


def helper(name: str) -> Any:
    return importlib.import_module(f"horovod.runner.{name}")


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment in which no launcher says anything."""
    for launcher in ("HOROVOD", "OMPI_COMM_WORLD", "PMI"):
        for name in ("RANK", "SIZE"):
            monkeypatch.delenv(f"{launcher}_{name}", raising=False)
    return monkeypatch


def test_rank_and_size_are_the_first_launchers_that_tells_them(places: pytest.MonkeyPatch) -> None:
    env = helper("common.util.env")
    assert env.get_env_rank_and_size() == (0, 1)
    places.setenv("PMI_RANK", "2")
    with pytest.raises(RuntimeError, match="expected both PMI_RANK and PMI_SIZE"):
        env.get_env_rank_and_size()
    places.setenv("PMI_SIZE", "4")
    assert env.get_env_rank_and_size() == (2, 4)
    places.setenv("HOROVOD_RANK", "1")
    places.setenv("HOROVOD_SIZE", "3")
    assert env.get_env_rank_and_size() == (1, 3)


def test_what_may_be_passed_on() -> None:
    env = helper("common.util.env")
    names = ("PATH", "OLDPWD", "BASH_FUNC_x%%", "MY_CUDA_VISIBLE_DEVICES", "_HOROVOD_SECRET_KEY")
    assert [name for name in names if env.is_exportable(name)] == ["PATH"]


@pytest.mark.parametrize(
    ("hosts", "bounds", "expected"),
    [
        # rank, size, local_rank, local_size, cross_rank, cross_size
        ("a:2,b:2", (4,), ["0,4,0,2,0,2", "1,4,1,2,0,2", "2,4,0,2,1,2", "3,4,1,2,1,2"]),
        ("a:2,b:2", (1, 2), ["0,2,0,2,0,1", "1,2,1,2,0,1"]),
        ("a:1,b:2", (3,), ["0,3,0,1,0,2", "1,3,0,2,1,2", "2,3,1,2,0,1"]),
        ("a:2,b:2", (3, 3), ["0,3,0,2,0,2", "1,3,1,2,0,1", "2,3,0,1,1,2"]),
    ],
)
def test_hosts_are_filled_in_their_order(hosts: str, bounds: tuple[int, ...], expected: list[str]) -> None:
    module = helper("common.util.hosts")
    placed = module.get_host_assignments(module.parse_hosts(hosts), *bounds)
    assert [slot.to_response_string() for slot in placed] == expected
    assert [slot.hostname for slot in placed] == sorted(slot.hostname for slot in placed)
    with pytest.raises(ValueError, match="expected slots for 5 ranks, got"):
        module.get_host_assignments(module.parse_hosts(hosts), 5)


def test_hosts_in_files_and_in_words(tmp_path: Path) -> None:
    module = helper("common.util.hosts")
    (tmp_path / "hosts").write_text("10.0.0.1 slots=8\nb slots=2\n")
    assert module.parse_host_files(str(tmp_path / "hosts")) == "10.0.0.1:8,b:2"
    assert module.parse_hosts_and_slots("a:1, b-2:3") == (["a", "b-2"], {"a": 1, "b-2": 3})
    with pytest.raises(ValueError, match="got 'a' in 'a,b:1'"):
        module.parse_hosts_and_slots("a,b:1")


def run(command: str, **how: Any) -> tuple[int, str, str]:
    stdout, stderr = io.StringIO(), io.StringIO()
    code = helper("common.util.safe_shell_exec").execute(command, stdout=stdout, stderr=stderr, **how)
    return code, stdout.getvalue(), stderr.getvalue()


def test_a_command_runs_as_in_a_shell() -> None:
    assert run("echo a; echo b >&2; exit 3") == (3, "a\n", "b\n")
    assert run("printf 'no end'; kill -KILL $$") == (137, "no end", "")
    assert run("echo $A", env={"A": "given"}) == (0, "given\n", "")
    assert run("printf 'x\\ry\\nz'", index=4) == (0, "[4]<stdout>:x\r[4]<stdout>:y\n[4]<stdout>:z", "")
    assert helper("common.util.tiny_shell_exec").execute("echo a; echo b >&2; false")[1] == 1


def goes_on(words: str) -> bool:
    """Whether a process with these words in its command line still runs; False once it is gone, within some seconds."""
    end = time.monotonic() + 20
    while subprocess.run(["pgrep", "-f", words], capture_output=True, check=False).stdout:
        if time.monotonic() > end:
            return True
    return False


def test_a_command_is_ended_with_what_it_has_started() -> None:
    event = threading.Event()

    class Told(io.StringIO):
        def write(self, text: str) -> int:
            event.set()
            return super().write(text)

    stdout, pause = Told(), f"sleep 60.{os.getpid()}1"
    execute = helper("common.util.safe_shell_exec").execute
    code = execute(
        f"sh -c 'echo ready; {pause}; echo more'; echo and more", stdout=stdout, stderr=io.StringIO(), events=[event]
    )
    assert (code, stdout.getvalue()) == (143, "ready\n") and not goes_on(pause)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody tells a process that its parent is gone")
def test_a_command_ends_when_who_runs_it_is_killed() -> None:
    pause = f"sleep 60.{os.getpid()}2"
    program = f"""import sys
sys.path.append({str(collectives.horovod.FOLDER)!r})
from horovod.runner.common.util.safe_shell_exec import execute
execute("echo ready; {pause}; true")"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.kill()
    assert not goes_on(f"^{pause}")


def test_a_function_in_a_thread_gets_its_arguments() -> None:
    threads = helper("util.threads")
    got: list[Any] = []
    threads.in_thread(lambda *values: got.append(values), (1, 2)).join(30)
    threads.in_thread(lambda: 1 // 0, silent=True).join(30)
    assert got == [(1, 2)]
    with pytest.raises(
        ValueError, match=r"^args must be a tuple, not <class 'int'>, for a single argument use \(arg,\)$"
    ):
        threads.in_thread(print, 1)
    assert threads.execute_function_multithreaded(lambda a, b: a * b, [[2, 3], [4, 5]]) == {0: 6, 1: 20}
    assert threads.execute_function_multithreaded(got.append, []) == {}
    with pytest.raises(ZeroDivisionError):
        threads.execute_function_multithreaded(lambda a: 1 // a, [[1], [0]])


def test_a_function_is_called_on_an_event_unless_it_is_stopped_before() -> None:
    on_event = helper("util.threads").on_event
    event, stop, calls = threading.Event(), threading.Event(), []
    waiting = [
        on_event(event, calls.append, (1,)),
        on_event(event, calls.append, (2,), stop=stop, check_stop_interval_s=0.01),
    ]
    stop.set()
    waiting[1].join(30)
    event.set()
    waiting[0].join(30)
    assert calls == [1]
    for arguments, message in (((None, print), "Event must not be None"), ((event, print, 1), "args must be a tuple")):
        with pytest.raises(ValueError, match=message):
            on_event(*arguments)
    with pytest.raises(ValueError, match="Stop event must be given for non-daemon event thread"):
        on_event(event, print, daemon=False)


def test_a_pipe_holds_one_write_until_it_is_read() -> None:
    pipe = helper("util.streams").Pipe()
    pipe.write("abc")
    writer = helper("util.threads").in_thread(pipe.write, ("def",))
    assert [pipe.read(2), pipe.read(2)] == ["ab", "c"] and pipe.read() == "def"
    writer.join(30)
    pipe.write(b"gh")
    pipe.close()
    assert [pipe.read(), pipe.read()] == [b"gh", None]
    with pytest.raises(RuntimeError, match="closed"):
        pipe.write("more")


def test_times_that_are_up_say_of_what() -> None:
    timeout = helper("common.util.timeout")
    assert timeout.Timeout(60, "x").remaining() > 50 and timeout.Timeout(60, "x").check_time_out_for("y") is None
    late = timeout.Timeout(-1, "Timed out waiting for {activity}.")
    assert late.timed_out() and late.remaining() == 0
    with pytest.raises(timeout.TimeoutException, match=r"^Timed out waiting for ranks\. Timeout after -1 seconds\.$"):
        late.check_time_out_for("ranks")


def test_small_ones() -> None:
    secret, codec, hashes = helper("common.util.secret"), helper("common.util.codec"), helper("common.util.host_hash")
    key = secret.make_secret_key()
    assert len(key) == secret.SECRET_LENGTH and len(secret.compute_digest(key, b"m")) == secret.DIGEST_LENGTH
    assert secret.check_digest(key, b"m", secret.compute_digest(key, b"m")) and not secret.check_digest(
        key, b"n", b"x" * 32
    )
    assert codec.loads_base64(codec.dumps_base64({1: (2, "x")})) == {1: (2, "x")}
    assert isinstance(codec.dumps_base64(1, to_ascii=False), bytes)
    assert hashes.host_hash() == hashes.host_hash("") != hashes.host_hash("salt")
    settings = helper("common.util.settings").Settings(num_proc=2, hosts="a:2")
    assert (settings.hosts, settings.num_proc, settings.verbose, settings.key) == ("a:2", 2, 0, None)
    ssh = helper("util.remote").get_ssh_command("ls -l", "host", port=22, timeout_s=3)
    assert ssh == "ssh -o PasswordAuthentication=no -o StrictHostKeyChecking=no host -p 22 -o ConnectTimeout=3 ls -l"
    port = helper("util.network").find_port(lambda address: address)[1]
    assert 1024 <= port < 65536 and helper("util.network").resolve_host_address("localhost") == "127.0.0.1"


def test_versions_and_averages() -> None:
    util = importlib.import_module("horovod.common.util")
    newer = util.is_version_greater_equal_than
    assert newer("2.10.0", "2.9.1") and newer("2.9.1", "2.9.1") and not newer("2.9.1rc1", "2.9.1")
    for versions in ((2, "2.0.0"), ("2.0", "2.0")):
        with pytest.raises(ValueError, match=r"major\.minor\.patch"):
            newer(*versions)
    choose = util.get_average_backwards_compatibility_fun(collectives)
    assert choose(None, None) is collectives.Average and choose(collectives.Max, None) is collectives.Max
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert (choose(None, True), choose(None, False)) == (collectives.Average, collectives.Sum)
    assert [warning.category for warning in said] == [DeprecationWarning] * 2
    with pytest.raises(ValueError, match="got both"):
        choose(collectives.Sum, False)
    assert util.get_extension_full_path("/a/b.py", "c", "lib") == f"/a/c/lib{util.get_ext_suffix()}"
