"""One job: what the launcher's process takes over for its time."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

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


def test_what_open_mpis_launcher_leaves_behind_is_removed(tmp_path: Path) -> None:
    """As where it is killed, because a host is lost."""
    for name in ("ompi.1", "other"):
        (tmp_path / name).mkdir()
    program = 'mkdir -p "$TMPDIR/ompi.$$/1/0"; touch "$TMPDIR/ompi.$$/1/pmix"; kill -9 $$'
    ranks = MpiRanks(["sh", "-c", program], {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)})
    assert job.run(ranks, Output(2, tag=True, verbose=False)) == 137
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ompi.1", "other"]
