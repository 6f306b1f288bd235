"""The worlds in which scenarios run under mpirun."""

from __future__ import annotations

import os
from typing import Any

from collectives.base.config import Config
from collectives.transport.group import Group
from collectives.worlds.world import World

_OPEN_MPI = "OMPI_COMM_WORLD_RANK" in os.environ
_ALONE = "1" in (os.environ.get("OMPI_COMM_WORLD_SIZE"), os.environ.get("PMI_SIZE"))


def every_config(**hosts: Any) -> dict[str, Config]:
    """Return settings by name; ``hosts``: further ones where ranks are taken to be on hosts of two.

    A rank that is alone is on one host, whatever it is told.
    """
    one_host = {"one host": Config(timeout=30)}
    if _ALONE:
        return one_host
    return {
        **one_host,
        "hosts of two": Config(timeout=30, local_size=2, network="mpi", **hosts),
        "messages only": Config(timeout=30, transport="mpi"),
    }


def configs(**hosts: Any) -> dict[str, Config]:
    """Return this MPI's share of `every_config`: both carry messages and control, in one of them each.

    On one host MPI carries nothing but what ranks exchange at set-up; ``test_world.py`` sets such a world up under
    both.
    """
    names = ("one host", "messages only") if _OPEN_MPI or _ALONE else ("hosts of two",)
    every = every_config(**hosts)
    return {name: every[name] for name in names if name in every}


def group_of_all(config: Config) -> Group:
    """Return the group of all ranks of the mpirun."""
    from mpi4py import MPI

    from collectives.transport.mpi import mpi_groups
    from collectives.transport.threads import thread_groups

    comm = MPI.COMM_WORLD
    return mpi_groups.connect(comm, config) if comm.size > 1 else thread_groups.connect(1)[0]


def connect(config: Config) -> World:
    """Return a world of all ranks."""
    return World(group_of_all(config), config)
