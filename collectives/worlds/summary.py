"""A world in one line: its ranks, hosts, what connects them, and transports."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from collectives.base.config import unknown
from collectives.base.logging import logger
from collectives.plan.planner import Placement

if TYPE_CHECKING:
    from collectives.worlds.world import World


def mpi_version(text: str) -> str:
    """Name and version of an MPI, such as ``"MPICH 5.0.2"``, from ``MPI.Get_library_version()``."""
    lines = text.strip("\0 \n").split(",")[0].splitlines()
    return " ".join(lines[0].replace("Version:", "").split()) if lines else ""


def describe(placement: Placement, transport: str, library: str, network: str) -> str:
    """Describe a world. ``library`` is the name and version of the MPI; empty where none connects the ranks."""
    if placement.size == 1:
        return "1 rank, without MPI"
    messages = f"{network.upper()} messages"
    counts = [len(host) for host in placement.hosts]
    hosts = "1 host" if placement.one_host else f"{len(counts)} hosts ({' + '.join(map(str, counts))})"
    within = []
    if placement.shares_memory and transport in ("auto", "window", "mapped"):
        within.append("windows in shared memory")
    if placement.maps and transport in ("auto", "mapped"):
        within.append("mapped memory")
    if placement.reads_private and transport in ("auto", "direct-read", "mapped"):
        within.append("direct reads of the peers' memory")
    media = [f"within a host {' and '.join(within) or messages}"] if max(counts) > 1 else []
    media += [] if placement.one_host else [f"between hosts {messages}"]
    by = library or network.upper()
    return f"{placement.size} ranks on {hosts}, connected by {by}; transports: {', '.join(media)}"


def log(world: World) -> None:
    """Log a description of a world, and unknown settings in the environment, on rank 0."""
    if world.rank:
        return
    mpi = sys.modules.get("mpi4py.MPI") if world.network == "mpi" else None
    library = mpi_version(mpi.Get_library_version()) if mpi else ""
    logger.info("%s", describe(world.planner.placement, world.config.transport, library, world.network))
    for sentence in unknown(os.environ):
        logger.warning("%s", sentence)
