"""One host's part of a job each of whose hosts runs ``collectivesrun``, such as a pod of Kubernetes.

No host reaches another one by ssh: each starts and ends its own ranks, which meet where ``COLLECTIVES_RENDEZVOUS``
says. Where a rank fails, or a host is lost, the ranks of the others fail too, and their launchers end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from collectives.base.config import Config, parse_address
from collectives.base.errors import InvalidArgumentError
from collectives.launch.agents import Agents
from collectives.launch.host_agent import HostRanks
from collectives.launch.hosts import Host
from collectives.launch.ssh import Ssh

_RENDEZVOUS = "COLLECTIVES_RENDEZVOUS"


class Node(NamedTuple):
    """The host with a number from 0 among several; in an elastic job also a later one, of newcomers."""

    number: int
    hosts: int

    def ranks(self, ranks: int) -> tuple[int, ...]:
        """Return those of a job's ranks that are on this host; of newcomers those that follow the first ones."""
        each = self._each(ranks)
        first = self.number * each
        return tuple(range(first, first + each if self.number >= self.hosts else min(first + each, ranks)))

    def placement(self, ranks: int) -> list[Host]:
        """Return all hosts with their numbers of ranks, which differ only at the last one."""
        return [Host(f"node{number}", len(Node(number, self.hosts).ranks(ranks))) for number in range(self.hosts)]

    def _each(self, ranks: int) -> int:
        each = -(-ranks // self.hosts)
        if (self.hosts - 1) * each >= ranks:
            raise InvalidArgumentError(
                f"--node {self.number}/{self.hosts}: expected {-(-ranks // each)} hosts at most, with {each} ranks "
                f"each, for -np {ranks} [L38]"
            )
        return each


def parse(text: str) -> Node:
    """this host's number and the number of hosts, such as 0/2"""
    match = re.fullmatch(r"([0-9]+)/([1-9][0-9]*)", text)
    if match is None:
        raise ValueError(text)
    return Node(int(match[1]), int(match[2]))


def meeting(node: Node, ranks: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that tell a host's ranks where to meet, and torch's ranks, at the port after that one.

    InvalidArgumentError: there is no such host, or the environment does not say where.
    """
    if node.number >= node.hosts and environment.get("COLLECTIVES_ELASTIC") != "1":
        raise InvalidArgumentError(
            f"--node {node.number}/{node.hosts}: expected a host number from 0 to {node.hosts - 1} [L39]"
        )
    if ranks == 1:
        return {}
    try:
        host, port = parse_address(environment.get(_RENDEZVOUS, ""))
    except ValueError as error:
        raise InvalidArgumentError(
            f"--node: {_RENDEZVOUS}={str(error)!r}: expected tcp://host:port, with the address of host 0 and a port "
            "that is free there; set it, and COLLECTIVES_KEY, to the same values on all hosts [L40]"
        ) from None
    told = {name: environment[name] for name in (_RENDEZVOUS, "COLLECTIVES_KEY") if environment.get(name)}
    return {**told, "MASTER_ADDR": host, "MASTER_PORT": str(port + 1)}


class NodeRanks(Agents):
    """The ranks of a job that are on this host.

    Args:
        size: the number of ranks of the job.
        meeting: what `meeting` returns.

    The other arguments are those of `Agents`.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        size: int,
        meeting: Mapping[str, str],
        command: Sequence[str],
        environment: Mapping[str, str],
        config: Config,
        remote: Ssh,
    ) -> None:
        super().__init__([HostRanks("", ranks)], command, environment, config, remote)
        self._size, self._meeting = size, meeting

    def _serve(self) -> dict[str, str]:
        """Return where the ranks meet: rank 0 serves the store, and no launcher."""
        return dict(self._meeting)
