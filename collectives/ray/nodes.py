"""The nodes of a Ray cluster as the hosts of an elastic job: which there are, and agents on them.

An agent is a child of the actor that holds the node's resources; see `collectives.launch.relayed`.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray._private.state import available_resources_per_node  # nothing public says it for each node
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from collectives.base.user_folder import user_folder
from collectives.launch import relayed
from collectives.launch.api import CALL
from collectives.launch.discovery import Found
from collectives.launch.hosts import Host

LOG = "_COLLECTIVES_RAY_LOG"
"""The variable that tells ranks in which folder to leave what they log."""
_LOGGED = "logged-"
LOOK = 0.1
"""Seconds between two looks at what rank 0 has logged."""
_COLLECT_WITHIN = 30.0
_CLOSE_WITHIN = 5.0


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


def signal_on(node: str, process: int, number: int) -> Any:
    """Send a signal to a process on a node; returns a reference that is there when it has been sent."""

    def send() -> None:
        os.kill(process, number)

    where = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(send).options(num_cpus=0, scheduling_strategy=where).remote()


class Hosts:
    """Finds the nodes that are alive, with as many slots as are free; callable as a discovery of `ElasticAgents`."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot

    def __call__(self) -> Found:
        try:
            nodes = [node for node in ray.nodes() if node["Alive"]]
            free = available_resources_per_node()
        except RayError as error:
            return f"Ray does not say which nodes there are: {error}"
        return tuple(Host(name_of(node), self._slot.of(free.get(node["NodeID"], {}))) for node in nodes)


def log(value: Any) -> None:
    """On a rank: leave a value in the folder, for `Node`."""
    path = Path(os.environ[LOG], f"{_LOGGED}{time.time_ns()}")
    part = path.with_suffix(".part")
    part.write_bytes(importlib.import_module("cloudpickle").dumps(value))
    part.rename(path)


class Node:
    """The actor that holds a node's resources, and starts the job's agent there.

    Args:
        folder: where the call is, and the results of the node's ranks will be.
        call: the content of the file `CALL` there.
    """

    def __init__(self, folder: str, call: bytes) -> None:
        self._folder = user_folder(Path(folder))
        (self._folder / CALL).write_bytes(call)
        self._queue: Any = None

    def run(self, address: str, port: int, key: str, queue: Any) -> None:
        """Run an agent whose standard streams are connections to the relay; returns when it has ended.

        Args:
            queue: where what rank 0 has logged is brought; None: nobody asks for it.
        """
        self._queue = queue
        agent = relayed.start_agent(address, port, key)
        while queue is not None and agent.poll() is None:
            self.bring_logged(queue)
            with suppress(subprocess.TimeoutExpired):
                agent.wait(LOOK)
        agent.wait()

    def bring_logged(self, queue: Any) -> None:
        """Put what rank 0 has logged into a queue."""
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # several nodes on one machine have one folder
            for path in sorted(self._folder.glob(f"{_LOGGED}*[0-9]")):
                queue.put(path.read_bytes())
                path.unlink()
        finally:
            os.close(folder)

    def files(self) -> dict[str, bytes]:
        """What the ranks have left in the folder."""
        if self._queue is not None:
            self.bring_logged(self._queue)
        return {path.name: path.read_bytes() for path in self._folder.iterdir() if path.is_file() and path.name != CALL}

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


class _Held(NamedTuple):
    """What an actor holds of its node.

    Attributes:
        start: a reference that is there once the actor has started.
        until: when it must have, on the monotonic clock.
    """

    actor: Any
    slots: int
    start: Any
    until: float

    def has_started(self) -> bool:
        return bool(ray.wait([self.start], timeout=0)[0])


@dataclass(frozen=True)
class Remote(relayed.Relayed):
    """Reaches nodes by an actor on each of them.

    Attributes:
        timeout: seconds within which Ray has to start it.
        most: ranks on a node.
        queue: where what rank 0 has logged is brought.
    """

    call: bytes = b""
    slot: Slot = Slot()
    most: int | None = None
    queue: Any = None
    held: dict[str, _Held] = field(default_factory=dict)
    """By the names of the nodes."""
    offered: dict[str, int] = field(default_factory=dict)
    """Slots, by the names of the nodes, as `look` has said last."""

    def look(self, discovery: Callable[[], Found]) -> Found:
        """What a discovery finds, in which a node with an actor of ours has the slots that this holds."""
        found = discovery()
        if isinstance(found, str):
            return found
        for name, held in list(self.held.items()):
            if time.monotonic() > held.until and not held.has_started():  # another job has taken the place
                ray.kill(self.held.pop(name).actor)
        for host in found:
            slots = self.held[host.name].slots if host.name in self.held else host.slots
            self.offered[host.name] = slots if self.most is None else min(slots, self.most)
        return tuple(Host(host.name, self.offered[host.name]) for host in found if self.offered[host.name])

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        """Have the agent started on a node, and return the command that connects this process with it."""
        node = next(each for each in ray.nodes() if name_of(each) == host)
        cpus, gpus = self.slot.cpus, self.slot.gpus
        number = self.offered[host]
        actor = ray.remote(Node).options(
            num_cpus=number * cpus,
            num_gpus=number * gpus,
            max_concurrency=2,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )
        handle = actor.remote(self.folder, self.call)
        self.held[host] = _Held(handle, number, handle.__ray_ready__.remote(), time.monotonic() + self.timeout)
        address = ray.util.get_node_ip_address()
        port, command = self.make_relay(address)
        handle.run.remote(address, port, self.key, self.queue)
        return command

    def collect(self) -> None:
        """Bring what ranks have left on the nodes that are alive into this process's folder."""
        pending = [held.actor.files.remote() for held in self.held.values() if held.has_started()]
        ready, _ = ray.wait(pending, num_returns=len(pending), timeout=_COLLECT_WITHIN) if pending else ([], [])
        for reference in ready:
            with suppress(RayError):  # of a node that is gone
                for name, data in ray.get(reference).items():
                    Path(self.folder, name).write_bytes(data)

    def close(self) -> None:
        """Remove the folders on the nodes, and end the actors."""
        closing = [held.actor.close.remote() for held in self.held.values() if held.has_started()]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_WITHIN)
        for held in self.held.values():
            ray.kill(held.actor)
