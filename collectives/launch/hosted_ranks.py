"""Ranks in processes that another system starts and keeps: Ray's actors, Spark's tasks, Dask's workers.

That system carries calls to the processes, and brings back what they return. Each process says where it is (`here`);
who starts the job gives each of them its place (`arrange`); each process calls the function there (`as_rank`, `call`);
and `results` takes the results, or the failure that was first, from what the calls have come to.

The environment of a rank is as under ``collectivesrun``, with torch's and Horovod's variables. Rank 0 serves the store
at which the ranks meet.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from collectives.base.errors import CollectiveTimeoutError, RankFailedError, is_consequence
from collectives.base.exclusion import Lock, attempted, exclusively
from collectives.launch import records
from collectives.launch.agent import free_port
from collectives.launch.records import Record
from collectives.transport.tcp import network
from collectives.worlds import runtime

Result = TypeVar("Result")
_KEY_BYTES = 32
_FREE_WITHIN = 60.0
_RAISED_WITHIN = 1.0
"""Seconds within which Python raises such an error in a thread that runs; it takes a few instructions."""
_one_call: Lock = threading.RLock()
"""Held while this process is a rank: its place is in its environment, and a call that was given up may still run."""
_rank_thread = 0
"""The thread that holds it, while it may be interrupted; changed under `_guard`."""
_guard: Lock = threading.RLock()


class Site(NamedTuple):
    """Where a process is.

    Attributes:
        host: equal for two processes that reach each other by loopback.
        name, address: of the host, for people, and for processes elsewhere.
        ports: two that are free there: for our store and for torch's.
    """

    host: str
    name: str
    address: str
    ports: tuple[int, int]


class Outcome(NamedTuple):
    """What a rank's call has come to: its result, or a record of its failure."""

    returned: Any
    failure: Record | None = None


def here(address: str = "") -> Site:
    """Where this process is. ``address``: at which the others reach its host, where the system that has started it
    knows that; else the host's name. The setting ``COLLECTIVES_NETWORK_INTERFACE`` precedes both."""
    interface = os.environ.get("COLLECTIVES_NETWORK_INTERFACE", "")
    name = socket.gethostname()
    if interface:
        address = network.address_of(interface)
    return Site(network.stack(), name, address or name, (free_port(), free_port()))


def arrange(sites: Sequence[Site]) -> list[dict[str, str]]:
    """Give each process a rank: the variables of each, in the order of ``sites``.

    The ranks of a host follow each other, the hosts are in the order in which they come first.
    """
    hosts = list(dict.fromkeys(site.host for site in sites))
    of_host = [[number for number, site in enumerate(sites) if site.host == host] for host in hosts]
    by_rank = [number for numbers in of_host for number in numbers]
    first = sites[by_rank[0]]
    address = network.LOOPBACK if len(hosts) == 1 else first.address
    shared = {
        "COLLECTIVES_RENDEZVOUS": f"tcp://{network.joined(address, first.ports[0])}",
        "COLLECTIVES_KEY": secrets.token_hex(_KEY_BYTES),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(first.ports[1]),
    }
    variables: list[dict[str, str]] = [{} for _ in sites]
    for host, numbers in enumerate(of_host):
        for local_rank, number in enumerate(numbers):
            peers = [other for other, ranks in enumerate(of_host) if len(ranks) > local_rank]
            place = {
                "RANK": by_rank.index(number),
                "SIZE": len(sites),
                "LOCAL_RANK": local_rank,
                "LOCAL_SIZE": len(numbers),
                "CROSS_RANK": peers.index(host),
                "CROSS_SIZE": len(peers),
            }
            variables[number] = shared | _of_place(place, sites[number].name, shared["MASTER_PORT"])
    return variables


def _of_place(place: Mapping[str, int], name: str, torchs_port: str) -> dict[str, str]:
    said = {word: str(number) for word, number in place.items()}
    return {
        "COLLECTIVES_RANK": said["RANK"],
        "COLLECTIVES_SIZE": said["SIZE"],
        "COLLECTIVES_LOCAL_RANK": said["LOCAL_RANK"],
        "RANK": said["RANK"],
        "WORLD_SIZE": said["SIZE"],
        "LOCAL_RANK": said["LOCAL_RANK"],
        "LOCAL_WORLD_SIZE": said["LOCAL_SIZE"],
        "COLLECTIVES_TORCHS_PLACE": f"{said['RANK']} {said['SIZE']} {torchs_port}",
        "HOROVOD_HOSTNAME": name,
        **{f"HOROVOD_{word}": text for word, text in said.items()},
    }


def as_rank(variables: Mapping[str, str], act: Callable[..., Result], *arguments: Any) -> Result:
    """Return ``act(*arguments)``, called as a rank: at its end this process leaves the others and forgets its place.

    Raises:
        CollectiveTimeoutError: another thread of this process is a rank, and does not end.
    """
    returned: list[Result] = []
    if not attempted(_one_call, _FREE_WITHIN, _take_place, variables, lambda: returned.append(act(*arguments))):
        raise CollectiveTimeoutError(
            f"process {os.getpid()} on {socket.gethostname()} is still rank {os.environ.get('COLLECTIVES_RANK')} of "
            f"an earlier call, whose function did not return within {_FREE_WITHIN:g} s; restart that process [L79]"
        )
    return returned[0]


def _take_place(variables: Mapping[str, str], act: Callable[[], object]) -> bool:
    global _rank_thread
    before = {name: os.environ.get(name) for name in variables}
    try:
        try:
            os.environ.update(variables)
            _rank_thread = threading.get_ident()
            act()
        finally:
            _leave_place(before)
    finally:
        _leave_place(before)  # once more: `give_up`, or a signal handler, may have interrupted it
    return True


def _leave_place(before: Mapping[str, str | None]) -> None:
    exclusively(_guard, _be_out_of_reach)
    try:
        runtime.shutdown()
    finally:
        _restore(before)


def _be_out_of_reach() -> None:
    """Have `give_up` raise nothing any more in this thread."""
    global _rank_thread
    if _rank_thread:
        try:
            # Takes the place of an error that has not come yet. Taking that back, by a null pointer, has Python 3.11
            # look for it forever: the next function that is traced does not return.
            _raise_in(_rank_thread)
            end = time.monotonic() + _RAISED_WITHIN
            while time.monotonic() < end:
                pass
        except RankFailedError:
            pass
        _rank_thread = 0


def _restore(variables: Mapping[str, str | None]) -> None:
    """Set variables of the environment as they were; None: it was not there."""
    for name, text in variables.items():
        if text is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = text


def give_up(key: str, why: str) -> None:
    """Have a call end that runs in another thread of this process, if it is of the job with this key: its collectives
    raise; so does `init`, and before it the function itself, when it returns from C."""
    exclusively(_guard, _give_up, key, why)


def _give_up(key: str, why: str) -> None:
    if not _rank_thread or os.environ.get("COLLECTIVES_KEY") != key:
        return
    if runtime.is_initialized():
        runtime.world().fail(why)
    else:
        _raise_in(_rank_thread)


def _raise_in(thread: int) -> None:
    """Raise a `RankFailedError` in a thread, once: in place of one that has not come yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(RankFailedError))


def call(function: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Outcome:
    """Call a function on this rank; the others are told of its failure, and this process can be a rank again."""
    if runtime.is_initialized() and runtime.world().failure is not None:
        runtime.shutdown()  # a world that has failed in an earlier call
    try:
        return Outcome(function(*args, **(kwargs or {})))
    except BaseException as error:
        of_function = error.__traceback__.tb_next if error.__traceback__ else None
        text = "".join(traceback.format_exception(type(error), error, of_function))
        if runtime.is_initialized():
            runtime.world().fail(text)
        runtime.shutdown()
        rank = int(os.environ.get("COLLECTIVES_RANK", "0"))
        return Outcome(None, Record(rank, 1, text, time.time(), socket.gethostname(), is_consequence(error)))


def results(outcomes: Sequence[Outcome], what: str) -> list[Any]:
    """What the ranks have returned. RankFailedError: some rank has failed; has the traceback of the first failure.

    Args:
        outcomes: by rank.
        what: who called, for messages.
    """
    first = records.culprit(outcome.failure for outcome in outcomes if outcome.failure is not None)
    if first is not None:
        *traceback_lines, reason = first.text.strip().split("\n")
        shown = f"\n{first.text}" if traceback_lines else ""
        raise RankFailedError(f"{what}: rank {first.rank} on {first.host} failed: {reason} [L7]{shown}")
    return [outcome.returned for outcome in outcomes]
