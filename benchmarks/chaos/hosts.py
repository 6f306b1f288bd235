"""Hosts that a program makes on this machine, as `benchmarks.cluster` describes it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.cluster import VARIABLE

_PATIENCE = 60.0


class Hosts:
    """Hosts that are up.

    Attributes:
        names: of the hosts.
        shared: a folder that all of them have.
    """

    def __init__(self, tool: str, number: int, shared: Path) -> None:
        self.names = [f"host{one}" for one in range(1, number + 1)]
        self.shared, self._tool = shared, tool
        self._state = f"/run/collectives-chaos-{uuid.uuid4().hex[:8]}"

    def on(self, host: str, command: Sequence[str]) -> list[str]:
        """Return the command that runs a command on a host."""
        return ["env", f"CLUSTER_STATE={self._state}", self._tool, "on", host, *command]

    def power_off(self, host: str) -> None:
        """End all processes of a host at once; its peers get no word of it."""
        self.order("power-off", host)
        # `down` kills the process of this number as well, which may be another one by then.
        Path(self._state, f"{host}.outer").unlink(missing_ok=True)

    def cut(self, host: str) -> None:
        """Pull a host's network cable."""
        self.order("cut", host)

    def heal(self, host: str) -> None:
        """Put the cable back."""
        self.order("heal", host)

    def order(self, *words: str) -> None:
        """Run the tool."""
        own = {name: text for name, text in os.environ.items() if name != VARIABLE}
        environment = {**own, "CLUSTER_STATE": self._state, "CLUSTER_SHARE": str(self.shared)}
        command = [self._tool, *words]
        subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=_PATIENCE, check=True
        )


@contextlib.contextmanager
def up(tool: str, number: int) -> Iterator[Hosts]:
    """Make hosts."""
    with tempfile.TemporaryDirectory(prefix="chaos-hosts-") as shared:
        hosts = Hosts(tool, number, Path(shared))
        try:
            hosts.order("up", str(number))
            yield hosts
        finally:
            hosts.order("down")
