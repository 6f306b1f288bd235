"""Every scenario of the suite in worlds of forked ranks that are connected by TCP, of every size and shape.

    python -m tests.support.scenarios.everywhere                       # 1 to 5 ranks, in every shape
    python -m tests.support.scenarios.everywhere --ranks 3 --hosts 2   # one shape

A line for each world; exit code 1 if anything went wrong. The suite itself runs a part of it (`tests/tcp`).
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from collectives.base.config import Config
from tests.support.launching.processes import by_tcp, group_alone
from tests.support.launching.teams import Team
from tests.support.scenarios import conformance
from tests.support.scenarios import engine as engine_scenarios
from tests.support.scenarios import persistent as persistent_scenarios
from tests.support.scenarios import worlds as scenarios

SHAPES: dict[str, dict[str, Any]] = {
    "0": {},
    "1": {"local_size": 1},
    "2": {"local_size": 2, "cache_capacity": 8},
    "messages": {"transport": "tcp"},
}
"""Settings by the number of ranks on a host; 0: all, messages: all, without shared memory."""

Function = Callable[[Any], None]


def mapped(scenario: Function, world: Any) -> None:
    """A scenario of persistent operations whose tensors lie in the arena."""
    before = persistent_scenarios.empty
    persistent_scenarios.empty = persistent_scenarios.mapped
    try:
        scenario(world)
    finally:
        persistent_scenarios.empty = before


def where_memory_is_shared(check: Function, group: Any) -> None:
    if group.memory is not None:
        check(group)


def where_there_are_messages(check: Function, group: Any) -> None:
    assert (group.messages is None) == (group.size == 1)
    if group.messages is not None:
        check(group)


OF_GROUPS: list[Function] = [
    *conformance.control_checks,
    *(functools.partial(where_memory_is_shared, check) for check in conformance.memory_checks),
    *(functools.partial(where_there_are_messages, check) for check in conformance.message_checks),
]
OF_WORLDS: list[Function] = [
    *scenarios.SCENARIOS,
    *engine_scenarios.SCENARIOS,
    *persistent_scenarios.SCENARIOS,
    *(functools.partial(mapped, scenario) for scenario in persistent_scenarios.SCENARIOS),
]


def name_of(function: Function) -> str:
    """What a scenario is called; one that is mapped says so."""
    if not isinstance(function, functools.partial):
        return function.__name__
    inner = function.args[0].__name__
    return f"{inner}, mapped" if function.func is mapped else str(inner)


def carry_out(size: int, shape: str, say: Callable[[str], object] = print) -> int:
    """Run everything in worlds of one shape; returns how many scenarios went wrong."""
    config = Config(timeout=30, **SHAPES[shape])
    begun, done, wrong = time.monotonic(), 0, 0
    for functions, options in (
        (OF_GROUPS, {"make_world": group_alone}),
        ([conformance.a_failure_reaches_every_wait], {"make_world": group_alone}),
        (OF_WORLDS, {}),
    ):
        team = Team(size, config, connect=by_tcp, **options)
        for function in functions:
            done += 1
            try:
                team.run(function)
            except Exception as error:
                wrong += 1
                say(f"{size} ranks, {shape}: {name_of(function)}: {type(error).__name__}: {error}\n{error.__cause__}")
        team.end()
    say(f"{size} ranks, {shape}: {done} scenarios in {time.monotonic() - begun:.0f} s; {wrong} wrong")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.scenarios.everywhere",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", default="1,2,3,4,5", help="numbers of ranks; %(default)s by default")
    parser.add_argument("--hosts", default=",".join(SHAPES), help="ranks on a host; %(default)s by default")
    asked = parser.parse_args(arguments)
    worlds = [(int(size), shape) for size in asked.ranks.split(",") for shape in asked.hosts.split(",")]
    return int(sum(carry_out(size, shape, functools.partial(print, flush=True)) for size, shape in worlds) > 0)


if __name__ == "__main__":
    sys.exit(main())
