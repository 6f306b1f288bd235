"""All-reduces between hosts that this program makes on one machine: ``python -m benchmarks.cluster --cluster TOOL``.

TOOL makes hosts with networks of their own: ``TOOL up HOSTS RATE``, ``TOOL on host1 COMMAND...``, ``TOOL down``. For
each set-up the hosts come up, `benchmarks.hosts` runs on them under collectivesrun, and the hosts go.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.hosts import add_contestants
from collectives.tools.bench import cli

VARIABLE = "COLLECTIVES_CLUSTER"
"""Names the tool where no flag does."""
_TIMEOUT = 600.0
_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Setup:
    """Hosts, the ranks on each, the rate of each host's link, and the sizes that are measured."""

    hosts: int
    ranks: int
    rate: str
    sizes: str

    def command(self, python: str, options: Sequence[str]) -> list[str]:
        """What runs on the first host."""
        where = ",".join(f"host{number}:{self.ranks}" for number in range(1, self.hosts + 1))
        launch = [python, "-m", "collectives.launch", "--no-tag", "-np", str(self.hosts * self.ranks), "-H", where]
        return [*launch, python, "-m", "benchmarks.hosts", "-b", self.sizes, "--rate", self.rate, *options]


SETUPS = {
    "2x1": Setup(2, 1, "10gbit", "4,64K,1M,4M,16M,64M"),
    "4x1": Setup(4, 1, "1gbit", "16M"),
    "2x2": Setup(2, 2, "1gbit", "16M"),
}
"""By hosts x ranks."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every set-up; returns the exit status."""
    flags = cli.Parser("benchmarks.cluster", "Time all-reduces between hosts made on one machine.")
    flags.add_argument(
        "--cluster",
        default=os.environ.get(VARIABLE),
        metavar="TOOL",
        help=f"makes the hosts (default: ${VARIABLE})",
    )
    flags.add_argument(
        "--setup",
        type=cli.names("set-up", list(SETUPS), True),
        default="all",
        metavar="LIST",
        help=f"hosts x ranks: {', '.join(SETUPS)}, all",
    )
    add_contestants(flags)
    chosen = flags.parse_args(arguments)
    if not chosen.cluster:
        flags.error(f"argument --cluster: name the tool that makes hosts, or set {VARIABLE}")
    options = ["-n", str(chosen.batches), "--peers", ",".join(chosen.peers)]
    if chosen.network:
        options += ["--network", ",".join(chosen.network)]
    return max(measure(chosen.cluster, SETUPS[name], options) for name in chosen.setup)


def measure(tool: str, setup: Setup, options: Sequence[str]) -> int:
    """Bring the hosts up, measure, and take them down; returns the exit status."""
    # The ranks would take the variable for a setting of the engine.
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    up = [tool, "up", str(setup.hosts), setup.rate]
    done = subprocess.run(up, env=environment, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        # Hosts of another run may be the reason: leave them.
        return done.returncode
    try:
        print(f"# {setup.hosts} hosts of {setup.ranks} ranks, {setup.rate}", flush=True)
        command = [tool, "on", "host1", *setup.command(sys.executable, options)]
        return subprocess.run(
            command, env=environment, cwd=_ROOT, stdin=subprocess.DEVNULL, timeout=_TIMEOUT, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        print(f"# not finished after {_TIMEOUT:g} s", file=sys.stderr, flush=True)
        return 1
    finally:
        subprocess.run([tool, "down"], env=environment, stdin=subprocess.DEVNULL, check=False)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the hosts must go all the same
    sys.exit(main())
