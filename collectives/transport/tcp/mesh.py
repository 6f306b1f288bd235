"""The network of a job's processes: authenticated connections between any two of them.

A connection belongs to a *channel*: a text that both ends know. Of two ranks that open a channel to each other the
higher dials and waits for no rank, because connections are accepted by a thread of their own; the lower takes the
connection that arrives. So ranks may open channels in any order.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from collectives.base import interrupts
from collectives.base.config import setting_of
from collectives.base.errors import (
    CollectiveTimeoutError,
    InvalidArgumentError,
    MismatchError,
    RankFailedError,
    TransportError,
)
from collectives.base.wake_up import WakeUp
from collectives.transport.tcp import network
from collectives.transport.tcp.authentication import Connection, make_key
from collectives.transport.tcp.listener import DIAL_WITHIN, Listener, dial
from collectives.transport.tcp.service import Running, Service

Served = Callable[[int, Connection], object]

_ANSWER_WITHIN = 30.0
"""Seconds for which a rank is dialled that does not answer. One that answers, and drops the connection because it has
too many, is dialled for as long as the wait may last."""
_REFUSED_WITHIN = 3.0
"""Seconds for which a refused connection is tried again: some systems refuse what a flooded listener has no room for,
but a process that has ended refuses as well."""
_FIRST_ATTEMPT = 1.0
"""Seconds for the first attempt to connect; each further one has twice as long. The system of a flooded listener leaves
some of them unanswered."""
_LOOK_EVERY = 0.05
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
_PING = "ping"
"""The channel of connections that are closed as soon as they are proved."""


class Mesh:
    """One process's end of the job's network. Methods may be called from any thread. Made by the processes that call
    ``exchange`` together, each once.

    Args:
        exchange: gathers every rank's value (of JSON's types) on every rank, in rank order.
        key: the job's; None on all ranks: rank 0 makes one, and ``exchange`` tells it to the others.
        interface: the setting ``network_interface``; empty: loopback if all ranks are on this host, else the interface
            that leads to the others.

    Attributes:
        hosts: each rank's host, as `network.identity` has it.
        names: each rank's host name, for messages.
        service: the thread in which connections are accepted and dialled.
        inbox: what has arrived, for `Links`.
        addresses: where each rank listens.

    Raises:
        InvalidArgumentError, TransportError: no interface serves.
        MismatchError: some ranks were given a key, and others were not.
    """

    def __init__(
        self, exchange: Callable[[Any], list[Any]], rank: int, key: bytes | None, *, interface: str = ""
    ) -> None:
        own_key = (make_key() if key is None else b"").hex() if rank == 0 else ""
        own_host = [network.identity(), network.stack(), network.addresses()]
        answers = exchange([*own_host, own_key, secrets.token_hex(8), key is not None])
        self.hosts, stacks, offers, keys, nonces, have_keys = zip(*answers, strict=True)
        if len(set(have_keys)) > 1:
            without = ", ".join(str(peer) for peer, has in enumerate(have_keys) if not has)
            raise MismatchError(
                f"rank {rank}: COLLECTIVES_KEY is set on some ranks, but not on rank {without}; set it on all ranks, "
                "or on none [S48]"
            )
        address = network.address_of(interface) if interface else network.choose(stacks, offers, rank)
        if network.is_loopback(address) and len(set(stacks)) > 1:
            raise InvalidArgumentError(
                f"rank {rank}: COLLECTIVES_NETWORK_INTERFACE={interface}: {address} is loopback, which the other "
                "hosts cannot reach; name an interface that they can reach [N1]"
            )
        self.rank, self.size = rank, len(answers)
        self.names = [host.split()[0] for host in self.hosts]
        self._key, self._job = key if key is not None else bytes.fromhex(keys[0]), nonces[0]
        self.service, self.inbox = Service(), Inbox(self._job, rank)
        self._listener: Listener | None = None
        try:
            self._listener = Listener(self.service, address, 0, self._key, self.inbox.put)
            self.inbox.address = self._listener.address
            self.addresses = [(host, int(port)) for host, port in exchange(self._listener.address)]
        except BaseException:
            self.close()
            raise

    def open(self, peer: int, channel: str, timeout: float, check: Callable[[], object] = lambda: None) -> Connection:
        """The connection with ``peer`` on a channel: connected, proved, non-blocking, TCP_NODELAY. Both ranks call it,
        once for a channel. An exception from ``check`` ends the wait.

        Raises:
            CollectiveTimeoutError, RankFailedError, TransportError: it did not come about.
        """
        if peer < self.rank:
            return self.dial(peer, channel, timeout, check)
        end = time.monotonic() + timeout
        while (sock := self.inbox.take(peer, channel, _LOOK_EVERY)) is None:
            interrupts.check()
            check()
            if time.monotonic() > end:
                raise CollectiveTimeoutError(
                    f"rank {self.rank}: waited {timeout:g} s for a connection from {self._called(peer)}; see what it "
                    f"is doing, or raise {setting_of(timeout)} [S25]"
                )
        return sock

    def dial(self, peer: int, channel: str, timeout: float, check: Callable[[], object] = lambda: None) -> Connection:
        """A new connection to ``peer``, which takes it by `open` or `serve`. Raises as `open`."""
        try:
            return self.service.run(self.reach(peer, channel, timeout), timeout + 3 * DIAL_WITHIN, check)
        except TimeoutError:  # `reach` ends earlier, and with an error of its own, if it is carried out at all
            raise CollectiveTimeoutError(
                f"rank {self.rank}: waited {timeout:g} s for a connection to {self._called(peer)}: the network thread "
                "of this process did not get to run; find out which code holds Python's global interpreter lock "
                "(GIL) for so long [S26]"
            ) from None

    async def ping(self, peer: int, seconds: float) -> None:
        """Connect to ``peer``, and close the connection, in the service's thread: shows that it lives, even if packets
        of older connections are lost and wait to be sent again. Raises as `open`."""
        (await self.reach(peer, _PING, seconds)).close()

    async def reach(self, peer: int, channel: str, seconds: float) -> Connection:
        """`dial` in the service's thread."""
        hello = json.dumps([self._job, self.rank, [peer, *self.addresses[peer]], channel]).encode()
        loop = asyncio.get_running_loop()
        begun, pause, attempt = loop.time(), _FIRST_PAUSE, _FIRST_ATTEMPT
        while True:
            try:
                dialling = dial(self.service, *self.addresses[peer], self._key, hello, attempt)
                return await asyncio.wait_for(dialling, seconds)
            except (OSError, asyncio.TimeoutError, TransportError) as error:
                refused, dropped = isinstance(error, ConnectionRefusedError), isinstance(error, ConnectionError)
                limit = _REFUSED_WITHIN if refused else seconds if dropped else _ANSWER_WITHIN
                left = begun + min(seconds, limit) - loop.time()
                if left > 0 and not isinstance(error, TransportError):
                    await asyncio.sleep(min(pause, left))
                    pause, attempt = min(2 * pause, _LONGEST_PAUSE), min(2 * attempt, DIAL_WITHIN)
                    continue
                why = str(error) or "no answer"
                where = network.joined(*self.addresses[peer])
                if refused:
                    raise RankFailedError(
                        f"rank {self.rank}: {self._called(peer)} has ended: no process listens at {where} ({why}) [R9]"
                    ) from None
                if dropped:
                    raise TransportError(
                        f"rank {self.rank}: {self._called(peer)} has dropped every connection of this rank to {where} "
                        f"for {seconds:g} s ({why}), because too many connections to it do not prove the job's key; "
                        "find out what else connects to that port [N2]"
                    ) from None
                raise TransportError(
                    f"rank {self.rank}: cannot connect to {self._called(peer)} at {where}: {why}; if there is a "
                    "firewall between the hosts, open the ports of this job's processes; or set "
                    "COLLECTIVES_NETWORK_INTERFACE to another network [N3]"
                ) from None

    def key_for(self, use: str) -> bytes:
        """A key of this job alone, for one use, the same on all ranks."""
        return hmac.digest(self._key, f"for\0{self._job}\0{use}".encode(), "sha256")

    def _called(self, peer: int) -> str:
        return f"rank {peer} on {self.names[peer]}"

    def close(self) -> None:
        """Stop listening, and end the service. Connections that were taken stay open."""
        if self._listener is not None:
            self._listener.close()
        self.service.close()
        self.inbox.close()


class Links:
    """The connections of a group: its members of a mesh, and channels of its own.

    Args:
        mesh: of all ranks of the job.
        group: its name, alike on its members and different from other groups'.
        members: the group's ranks, as ranks of the mesh.
        check: as of `Mesh.open`.
    """

    def __init__(
        self, mesh: Mesh, group: str, members: Sequence[int], timeout: float, check: Callable[[], object] = lambda: None
    ) -> None:
        self.rank, self.size = members.index(mesh.rank), len(members)
        self.check = check
        self._mesh, self._group, self._members, self._timeout = mesh, group, tuple(members), timeout

    def open(self, peer: int, channel: str) -> Connection:
        """See `Mesh.open`."""
        return self._mesh.open(self._members[peer], f"{self._group}/{channel}", self._timeout, lambda: self.check())

    def dial(self, peer: int, channel: str) -> Connection:
        """See `Mesh.dial`."""
        return self._mesh.dial(self._members[peer], f"{self._group}/{channel}", self._timeout, lambda: self.check())

    def begin_dial(self, peer: int, channel: str) -> Running[Connection]:
        """`dial` without waiting."""
        dialling = self._mesh.reach(self._members[peer], f"{self._group}/{channel}", self._timeout)
        return self._mesh.service.start(dialling)

    def take(self, peer: int, channel: str) -> Connection | None:
        """The connection that ``peer`` has dialled on a channel; None if it has not arrived yet. Does not wait."""
        return self._mesh.inbox.take(self._members[peer], f"{self._group}/{channel}", 0.0)

    def serve(self, channel: str, served: Callable[[int, Connection], object]) -> None:
        """Have ``served(peer, connection)`` called, in the service's thread, with the connections that peers dial on a
        channel, including those that have arrived already."""
        self._mesh.service.call(
            self._mesh.inbox.serve,
            f"{self._group}/{channel}",
            lambda member, connection: served(self._members.index(member), connection),
        )

    def end_serving(self, channel: str) -> None:
        """End what `serve` has begun."""
        with suppress(RuntimeError):  # the service has ended
            self._mesh.service.call(self._mesh.inbox.end_serving, f"{self._group}/{channel}")


class Inbox:
    """The connections that have arrived and were not taken yet, by rank and channel.

    Those of another job of the same key are closed, and so is what was dialled as another rank, or elsewhere than at
    ``address``, which this process has told the others. Otherwise an attacker that listens where a rank has ended could
    forward its connections, proofs included, and stand between two ranks.
    """

    def __init__(self, job: str, rank: int) -> None:
        self._job, self._rank = job, rank
        self.address: tuple[str, int] | None = None
        self._arrived: dict[tuple[int, str], Connection] = {}
        self._awaited: dict[tuple[int, str], WakeUp] = {}
        self._served: dict[str, Served] = {}

    def put(self, hello: bytes, sock: Connection) -> None:
        """Take in a connection that has proved the key; in the service's thread."""
        try:
            job, peer, dialled, channel = json.loads(hello)
        except (ValueError, TypeError, RecursionError):
            job = dialled = channel = None
        if job != self._job or dialled != [self._rank, *(self.address or ())] or channel == _PING:
            sock.close()
            return
        served = self._served.get(channel)
        if served is not None:
            served(peer, sock)
            return
        earlier = self._arrived.pop((peer, channel), None)
        if earlier is not None:
            earlier.close()  # the peer has given it up, and has dialled again
        self._arrived[peer, channel] = sock
        awaited = self._awaited.get((peer, channel))
        if awaited is not None:
            awaited.set()

    def take(self, peer: int, channel: str, seconds: float) -> Connection | None:
        """Wait for a connection, and take it out; None if it has not come in time."""
        sock = self._arrived.pop((peer, channel), None)
        if sock is None and seconds > 0:
            self._awaited[peer, channel] = arrival = WakeUp()
            if (peer, channel) not in self._arrived:
                arrival.wait(seconds)
            self._awaited.pop((peer, channel), None)
            sock = self._arrived.pop((peer, channel), None)
        return sock

    def serve(self, channel: str, served: Served) -> None:
        self._served[channel] = served
        # Copied at once: other threads take connections meanwhile.
        for peer, _ in [key for key in list(self._arrived) if key[1] == channel]:
            served(peer, self._arrived.pop((peer, channel)))

    def end_serving(self, channel: str) -> None:
        self._served.pop(channel, None)

    def close(self) -> None:
        while self._arrived:
            self._arrived.popitem()[1].close()
