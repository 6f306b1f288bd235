"""Hosts on one machine, with networks, names, ``/tmp`` and ssh servers of their own, made by a program that
``COLLECTIVES_TEST_CLUSTER`` names.

    with cluster(2, shared=tmp_path) as hosts:
        run_command(hosts.on("host1", "collectivesrun", "-H", "host1:2,host2:2", ...))
        hosts.power_off("host2")
"""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.launching.mpirun import ROOT

_PATIENCE = 60.0


class Cluster:
    """Hosts ``host1``, ``host2``, ... that are up."""

    def __init__(self, program: str, state: str) -> None:
        self._program, self._state = program, state

    def on(self, host: str, *command: str) -> list[str]:
        """Return the command that runs ``command`` on a host, in the current folder."""
        return ["env", f"CLUSTER_STATE={self._state}", self._program, "on", host, *command]

    def power_off(self, host: str) -> None:
        """End all processes of a host at once, and pull its cable: its peers get no word of it."""
        self._do("power-off", host)
        # The program's `down` kills the process of this number, too. That has ended: it may be another test's then.
        Path(self._state, f"{host}.outer").unlink(missing_ok=True)

    def cut(self, host: str) -> None:
        """Pull a host's network cable."""
        self._do("cut", host)

    def heal(self, host: str) -> None:
        """Put the cable back."""
        self._do("heal", host)

    def _do(self, *words: str) -> None:
        _command(self._program, self._state, *words).check_returncode()


@contextmanager
def cluster(number: int, *, shared: Path | None = None, rate: str = "") -> Iterator[Cluster]:
    """Make hosts; skips the test where that is not possible.

    Args:
        number: of hosts.
        shared: a folder below ``/tmp`` that all hosts see.
        rate: of each host's link, such as ``"1gbit"``; empty: unlimited.
    """
    program = os.environ.get("COLLECTIVES_TEST_CLUSTER", str(ROOT.parent / "shared" / "cluster" / "cluster"))
    if not os.access(program, os.X_OK):
        pytest.skip("needs a program that makes hosts; COLLECTIVES_TEST_CLUSTER names it")
    state = f"/run/collectives-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    up = _command(program, state, "up", str(number), *([rate] if rate else []), share=str(shared or ""))
    try:
        if up.returncode:
            pytest.skip(f"cannot make hosts: {(up.stderr.strip() or up.stdout.strip())[-200:]}")
        yield Cluster(program, state)
    finally:
        _command(program, state, "down")


def _command(program: str, state: str, *words: str, share: str = "") -> subprocess.CompletedProcess[str]:
    """Run the program that makes hosts."""
    environment = {**os.environ, "CLUSTER_STATE": state, "CLUSTER_SHARE": share}
    return subprocess.run(
        [program, *words], env=environment, capture_output=True, text=True, timeout=_PATIENCE, check=False, cwd=ROOT
    )
