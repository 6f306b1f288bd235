"""Forked ranks that outlive a test: many scenarios in one world, each a test of its own.

    team = Team(3, Config(timeout=30), connect=by_tcp)
    team.run(scenario)      # scenario(world) on every rank; raises what the first of them raised
    team.end()

What a team runs must be a function of a module, or a `functools.partial` of one: it travels by pickle. A team in which
something went wrong starts anew with the next run.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from collectives.base.config import Config
from collectives.transport.group import Group
from collectives.worlds.world import World
from tests.support.launching import processes


class Team:
    """Ranks that carry out one function after the other.

    Args:
        size, config, connect, make_world: as `processes.start` takes them.
        seconds: after which a rank that carries out a function prints its stacks and ends.
    """

    def __init__(
        self,
        size: int,
        config: Config,
        *,
        connect: processes.Connect,
        make_world: Callable[[Group, Config], Any] = World,
        seconds: float = 60.0,
    ) -> None:
        self.size, self.config = size, config
        self._connect, self._make_world, self._seconds = connect, make_world, seconds
        self._ranks: Any = None
        self._ends: list[tuple[Connection, Connection]] = []

    def _start(self) -> None:
        self._ends = [multiprocessing.Pipe() for _ in range(self.size)]
        self._ranks = processes.start(
            self.size, self._serve, self.config, 0.0, connect=self._connect, make_world=self._make_world
        )
        for _, theirs in self._ends:
            theirs.close()

    def _serve(self, world: Any) -> None:
        """One rank's part: ends when the connection is closed, or something goes wrong."""
        mine = self._ends[world.rank][1]
        for own, theirs in self._ends:
            own.close()
            if theirs is not mine:
                theirs.close()
        while True:
            try:
                function = mine.recv()
            except EOFError:
                return
            faulthandler.dump_traceback_later(self._seconds, exit=True)
            result = function(world)
            faulthandler.cancel_dump_traceback_later()
            mine.send(result)

    def run(self, function: Callable[[Any], Any]) -> list[Any]:
        """Call ``function(world)`` on every rank, and return the results in rank order; raises as `processes.run`."""
        if self._ranks is None:
            self._start()
        results = []
        try:
            for own, _ in self._ends:
                own.send(function)
            for own, _ in self._ends:
                results.append(own.recv())
        except (EOFError, OSError):
            self.end()
            raise AssertionError("a rank ended without an error") from None
        return results

    def end(self) -> None:
        """Have the ranks end, and wait for them; raises as `processes.run`."""
        ranks, self._ranks = self._ranks, None
        for own, _ in self._ends:
            own.close()
        if ranks is not None:
            processes.results_of(processes.finish(ranks))
