"""The nodes of a Ray cluster as the hosts of an elastic job: which there are, and agents on them.

An agent is a child of the actor that holds the node's resources; see `collectives.launch.relayed`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from collectives.launch import relayed, ssh
from collectives.launch.api import CALL
from collectives.launch.discovery import Found
from collectives.launch.hosts import Host

_COLLECT_WITHIN = 30.0


@dataclass(frozen=True)
class Slot:
    """What Ray reserves for each rank."""

    cpus: float = 1
    gpus: float = 0

    def of(self, resources: Mapping[str, float]) -> int:
        """How many fit into a node's resources."""
        needs = {"CPU": self.cpus, "GPU": self.gpus}
        return int(min(resources.get(name, 0.0) // need for name, need in needs.items() if need))


def name_of(node: Mapping[str, Any]) -> str:
    """A node's name as a host: several nodes may be on one machine."""
    return f"{node['NodeManagerAddress']}/{node['NodeID'][:8]}"


class Hosts:
    """Finds the nodes that are alive; callable as a discovery of `ElasticAgents`."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot

    def __call__(self) -> Found:
        try:
            nodes = [node for node in ray.nodes() if node["Alive"]]
        except RayError as error:
            return f"Ray does not say which nodes there are: {error}"
        slots = {name_of(node): self._slot.of(node["Resources"]) for node in nodes}
        return tuple(Host(name, number) for name, number in slots.items() if number)


class Node:
    """The actor that holds a node's resources, and starts the job's agent there.

    Args:
        folder: where the call is, and the results of the node's ranks will be.
        call: the content of the file `CALL` there.
    """

    def __init__(self, folder: str, call: bytes) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self._folder / CALL).write_bytes(call)

    def run(self, address: str, port: int, key: str) -> None:
        """Run an agent whose standard streams are connections to the relay; returns when it has ended."""
        relayed.start_agent(address, port, key).wait()

    def files(self) -> dict[str, bytes]:
        """What the ranks have left in the folder."""
        return {path.name: path.read_bytes() for path in self._folder.iterdir() if path.is_file() and path.name != CALL}


@dataclass(frozen=True)
class Remote(ssh.Ssh):
    """Reaches nodes by an actor on each of them, in place of ssh.

    Attributes:
        timeout: seconds within which Ray has to start it.
    """

    folder: str = ""
    call: bytes = b""
    slot: Slot = Slot()
    nodes: dict[str, Any] = field(default_factory=dict)
    """The actors, by the names of their nodes."""

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        """Have the agent started on a node, and return the command that connects this process with it."""
        node = next(each for each in ray.nodes() if name_of(each) == host)
        cpus, gpus = self.slot.cpus, self.slot.gpus
        number = self.slot.of(node["Resources"])
        actor = ray.remote(Node).options(
            num_cpus=number * cpus,
            num_gpus=number * gpus,
            max_concurrency=2,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )
        self.nodes[host] = handle = actor.remote(self.folder, self.call)
        address = ray.util.get_node_ip_address()
        port, key, command = relayed.make_relay(self.folder, address, self.timeout)
        handle.run.remote(address, port, key)
        return command

    def address(self, host: str) -> str:
        """The address of a node."""
        return host.partition("/")[0]

    def collect(self) -> None:
        """Bring what ranks have left on the nodes that are alive into this process's folder; end the actors."""
        pending = [actor.files.remote() for actor in self.nodes.values()]
        ready, _ = ray.wait(pending, num_returns=len(pending), timeout=_COLLECT_WITHIN) if pending else ([], [])
        for reference in ready:
            with suppress(RayError):  # of a node that is gone
                for name, data in ray.get(reference).items():
                    Path(self.folder, name).write_bytes(data)
        for actor in self.nodes.values():
            ray.kill(actor)
