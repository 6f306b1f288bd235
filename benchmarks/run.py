"""A collective's benchmark beside the peers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from benchmarks import peers
from collectives.tools.bench import run


def main(collective: peers.PeersCalls, arguments: Sequence[str] | None = None) -> None:
    """Run a benchmark as a program: ends the process with status 1 after wrong values and 2 after wrong arguments."""
    status = run.main(
        f"benchmarks.{collective.name}", collective, arguments, peers.PEERS, partial(peers.prepared, collective)
    )
    if status:
        sys.exit(status)
