"""The options of elastic jobs: the parser's part, and what they say together."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from collectives.base.config import Config
from collectives.base.errors import InvalidArgumentError
from collectives.launch.discovery import Found, run_script
from collectives.launch.elastic_terms import Rules
from collectives.launch.hosts import Host

Number = Callable[[str], object]

_TIMEOUTS = ("COLLECTIVES_ELASTIC_TIMEOUT", "HOROVOD_ELASTIC_TIMEOUT")
_NEEDS = {
    "max_np": "--max-np",
    "slots_per_host": "--slots-per-host",
    "elastic_timeout": "--elastic-timeout",
    "reset_limit": "--reset-limit",
    "blacklist_cooldown_range": "--blacklist-cooldown-range",
    "on_rank_failure": "--on-rank-failure",
    "warm_spares": "--warm-spares",
    "elastic_events": "--elastic-events",
}
"""Options that say nothing about other jobs."""


def add_to(parser: argparse.ArgumentParser, positive: Number, count: Number, seconds: Number) -> None:
    """Add the options to a parser; the functions are types of their values."""
    group = parser.add_argument_group("elastic jobs (with --min-np or --host-discovery-script)")
    add = group.add_argument
    add("--min-np", "--min-num-proc", metavar="N", type=positive, help="smallest number of ranks (default: -np)")
    add(
        "--max-np",
        "--max-num-proc",
        metavar="N",
        type=positive,
        help="largest number of ranks (default: -np, or all slots)",
    )
    script = add("--host-discovery-script", metavar="COMMAND")
    script.help = "a command that prints the current hosts, one a line: 'host' or 'host:slots'; it runs every second"
    slots = add("--slots-per-host", "--slots", metavar="N", type=positive)
    slots.help = "ranks on a host for which the script prints no number (default: 1)"
    timeout = add("--elastic-timeout", metavar="SECONDS", type=seconds)
    timeout.help = "how long the job waits for missing ranks (default: 600)"
    limit = add("--reset-limit", metavar="N", type=count)
    limit.help = "how often the ranks may change before the job gives up (default: any number of times)"
    cooldown = add("--blacklist-cooldown-range", metavar=("MIN", "MAX"), type=seconds, nargs=2)
    cooldown.help = "seconds for which a host is blacklisted, twice as long each time (default: forever)"
    failure = add("--on-rank-failure", choices=("rank", "host"))
    failure.help = (
        "when a rank fails, replace the rank, or blacklist its host (default: rank; for horovodrun with several "
        "hosts: host)"
    )
    spares = add("--warm-spares", metavar="N", type=count)
    spares.help = "ranks beyond --max-np to keep ready, where hosts have slots for them (default: 0)"
    events = add("--elastic-events", metavar="FILE", action="append")
    events.help = "append the job's events to a file, one JSON object a line"


def wanted(options: argparse.Namespace) -> bool:
    """Whether parsed options ask for an elastic job. InvalidArgumentError: some have no meaning, or not together."""
    if options.host_discovery_script is None and options.min_np is None:
        lone = next((flag for name, flag in _NEEDS.items() if getattr(options, name) is not None), None)
        if lone is not None:
            raise InvalidArgumentError(
                f"{lone}: only for elastic jobs; pass --min-np or --host-discovery-script too [L32]"
            )
        return False
    if options.launcher == "mpi":
        raise InvalidArgumentError(
            "--launcher mpi: MPI cannot run an elastic job: it ends all ranks when one fails, and starts no new ones; "
            "pass --launcher ssh [L72]"
        )
    if options.host_discovery_script is not None and (options.hosts or options.hostfile):
        raise InvalidArgumentError(
            "--host-discovery-script, --hosts and --hostfile all name the hosts; pass only one of them [L33]"
        )
    if options.slots_per_host is not None and options.host_discovery_script is None:
        raise InvalidArgumentError(
            "--slots-per-host: only for --host-discovery-script; with --hosts, write host:N [L34]"
        )
    smallest, largest = _sizes(options)
    for flag, text, holds in (
        ("--min-np", f"at most -np {options.ranks}", options.ranks is None or smallest <= options.ranks),
        ("--max-np", f"at least -np {options.ranks}", None in (options.ranks, largest) or largest >= options.ranks),
        ("--max-np", f"at least --min-np {smallest}", largest is None or largest >= smallest),
    ):
        if not holds:
            raise InvalidArgumentError(f"{flag}: expected {text}, got {smallest if 'min' in flag else largest} [L35]")
    cooldown = options.blacklist_cooldown_range
    if cooldown is not None and not 1 <= cooldown[0] <= cooldown[1] <= 3600:
        raise InvalidArgumentError(
            f"--blacklist-cooldown-range: expected two numbers of seconds from 1 to 3600, the smaller first, got "
            f"{cooldown[0]:g} {cooldown[1]:g} [L36]"
        )
    return True


def _sizes(options: argparse.Namespace) -> tuple[int, int | None]:
    smallest = next((number for number in (options.min_np, options.ranks) if number is not None), 1)
    return smallest, options.ranks if options.max_np is None else options.max_np


def rules(options: argparse.Namespace, hosts: Sequence[Host], environment: Mapping[str, str], config: Config) -> Rules:
    """Return the rules that parsed options make; what they leave open, the environment may say."""
    several = options.host_discovery_script is not None or len(hosts) > 1
    smallest, largest = _sizes(options)
    timeout = options.elastic_timeout
    for name in _TIMEOUTS:
        text = environment.get(name, "")
        if timeout is None and text:
            try:
                timeout = float(text)
            except ValueError:
                raise InvalidArgumentError(f"{name}: expected a number of seconds, got {text!r} [L37]") from None
    return Rules(
        smallest=smallest,
        largest=largest,
        elastic_timeout=Rules().elastic_timeout if timeout is None else timeout,
        grace=config.peer_timeout,
        reset_limit=options.reset_limit,
        cooldown=options.blacklist_cooldown_range and (*options.blacklist_cooldown_range,),
        blacklist_host=(options.on_rank_failure or ("host" if options.as_horovod and several else "rank")) == "host",
        spares=options.warm_spares or 0,
        fixed=options.host_discovery_script is None,
    )


def hosts_of(options: argparse.Namespace, hosts: Sequence[Host]) -> Callable[[], Found] | Found:
    """Return what finds the hosts; or the hosts, if they are fixed: those named, or this one."""
    if options.host_discovery_script is not None:
        return partial(run_script, options.host_discovery_script, options.slots_per_host or 1)
    if hosts:
        return hosts
    return (Host("localhost", (_sizes(options)[1] or 1) + (options.warm_spares or 0)),)
