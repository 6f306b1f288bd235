"""One job: what the launcher's process takes over for its time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from collectives.launch import job
from collectives.launch.agent import Signals
from collectives.launch.mpirun import MpiRanks
from collectives.launch.output import Output


def test_signals_that_are_ignored_stay_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with contextlib.closing(Signals((signal.SIGHUP, signal.SIGTERM))):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert callable(signal.getsignal(signal.SIGTERM))
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_file_descriptors_beyond_those_of_select_are_waited_for() -> None:
    """As those of 400 hosts."""
    source, sink = os.pipe()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 2000), before[1]))
    try:
        far = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 1500) for fd in (source, sink)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    try:
        assert job._ready(far[:1], far[1:], 0.0) == (set(), {far[1]})
        os.write(sink, b"x")
        assert job._ready(far[:1], [], 30.0) == ({far[0]}, set())
        os.close(far[1])
        os.close(sink)
        os.read(source, 1)
        assert job._ready(far[:1], [], 30.0)[0] == {far[0]}  # its end
    finally:
        os.close(far[0])
        os.close(source)


def test_what_open_mpis_launcher_leaves_behind_is_removed(tmp_path: Path) -> None:
    """As where it is killed, because a host is lost."""
    for name in ("ompi.1", "other"):
        (tmp_path / name).mkdir()
    program = 'mkdir -p "$TMPDIR/ompi.$$/1/0"; touch "$TMPDIR/ompi.$$/1/pmix"; kill -9 $$'
    ranks = MpiRanks(["sh", "-c", program], {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)})
    assert job.run(ranks, Output(2, tag=True, verbose=False)) == 137
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ompi.1", "other"]


def test_ranks_that_were_killed_without_a_word_fail_the_job(capfd: pytest.CaptureFixture[str]) -> None:
    """As by Hydra, which may end with 0, where another rank has left by ``os._exit(0)``."""
    shown = Output(2, tag=True, verbose=False)
    for rank in range(2):
        shown.records.add(rank, b"\n", inside=True)  # it has joined the other
    end = {"rank": 1, "code": 0, "text": "", "time": time.time(), "host": "host1"}
    shown.records.add(1, json.dumps(end).encode() + b"\n", inside=False)
    assert job.run(MpiRanks(["true"], {"PATH": os.environ["PATH"]}), shown) == 1
    said = capfd.readouterr().err
    assert "rank 1 on host1 ended first, with exit code 0" in said and said.rstrip().endswith("[L140]")


EXHAUSTED = """
import contextlib, os, resource
from collectives.launch import job
from collectives.launch.mpirun import MpiRanks
from collectives.launch.output import Output

class Ranks(MpiRanks):
    def turn(self, readable, writable):
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        with contextlib.suppress(OSError):
            while True:
                os.dup(1)
        os.listdir("/proc")

job.run(Ranks(["sh", "-c", "trap '' TERM; sleep 100 & sleep 100"], dict(os.environ)), Output(2))
"""


def test_without_a_free_descriptor_no_process_stays() -> None:
    token = secrets.token_hex(16)
    command = [sys.executable, "-c", EXHAUSTED]
    environment = {**os.environ, "COLLECTIVES_TEST_TOKEN": token}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert ended.stderr.rstrip().endswith("Too many open files: '/proc'"), ended.stderr
    left = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if token.encode() in path.read_bytes():
                left.append(path.parent.name)
    for pid in left:
        os.kill(int(pid), signal.SIGKILL)
    assert not left
