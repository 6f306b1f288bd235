"""Attack every port on which a running job listens, and look at what becomes of the job.

    python -m tests.trials.hostile                        # 10,000 connections to a job of 4 ranks on 2 pretended hosts
    python -m tests.trials.hostile --count 300 --seed 7   # fewer, others

The ranks go on with all-reduces, whose results they check. An attack is right if it gets the greeting, a nonce and
nothing else, and is closed. Afterwards the ranks must have the descriptors and the memory that they had, their sums
must have been right, who holds the key must get in, and nothing that was sent may have been unpickled. Exit code 1 if
anything is wrong.
"""

from __future__ import annotations

import argparse
import collections
import hmac
import mmap
import os
import pickle
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import psutil

from collectives.base.config import Config
from collectives.base.reduce_op import Op
from collectives.transport.tcp.authentication import KEY_BYTES
from collectives.transport.tcp.listener import dial
from collectives.transport.tcp.service import Service
from collectives.worlds.world import World
from tests.support.launching import processes

Address = tuple[str, int]

GREETED = 14 + 32
"""Bytes that a listener says before it has seen a proof: a greeting and a nonce."""
_NONCE, _PROOF = 32, 32
_PATIENCE = 20.0
_MOST_LINGERING = 200
"""Connections that an attacker keeps open: more than a listener has of those that have not proved themselves."""
MOST_GROWTH = 2 << 20
"""Bytes by which a rank's resident memory may grow."""
_STOP, _FIRST_STEP = 0, 8


class Refusal(AssertionError):
    """A connection was not refused as it should be."""


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@dataclass
class Attacker:
    """Opens hostile connections, one after the other, of kinds that ``random`` draws.

    Attributes:
        addresses: what is attacked.
        recorded: what the dialling side of good handshakes has said, with their other side.
        canary: a folder that exists only if somebody has unpickled what was sent.
        counts: connections by kind of attack.
    """

    addresses: Sequence[Address]
    random: Random
    recorded: Sequence[bytes]
    canary: Path
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    _lingering: collections.deque[socket.socket] = field(default_factory=collections.deque)

    def attack(self) -> None:
        """Open one connection.

        Raises:
            Refusal: it got more than a greeting, or was not closed.
        """
        kind = self.random.choice(list(ATTACKS))
        address = self.random.choice(self.addresses)
        sock = socket.create_connection(address, _PATIENCE)
        self.counts[kind] += 1
        with suppress(OSError):  # it is cut off before it has said all
            ATTACKS[kind](self, sock)
        if kind == "half open":
            self._lingering.append(sock)
            if len(self._lingering) > _MOST_LINGERING:
                self._lingering.popleft().close()
        elif kind == "reset":
            sock.close()
        else:
            self._expect_refusal(sock, f"{kind} at {address}")
        self._drip()

    def _drip(self) -> None:
        """Have one of the connections that are kept open say one byte more."""
        sock = self.random.choice(self._lingering) if self._lingering else None
        if sock is not None:
            with suppress(OSError):
                sock.send(self.random.randbytes(1), socket.MSG_DONTWAIT)

    def _expect_refusal(self, sock: socket.socket, what: str) -> None:
        with closing(sock):
            answer = bytearray()
            with suppress(ConnectionError):
                try:
                    while part := sock.recv(4096):
                        answer += part
                except TimeoutError:
                    raise Refusal(f"{what}: still open after {_PATIENCE:g} s") from None
            if len(answer) > GREETED:
                raise Refusal(f"{what}: got {len(answer) - GREETED} bytes beyond greeting and nonce: {bytes(answer)!r}")

    def finish(self) -> None:
        """What is half open must be closed in time, without a word."""
        while self._lingering:
            self._expect_refusal(self._lingering.popleft(), "half open")


def _random_bytes(attacker: Attacker, sock: socket.socket) -> None:
    sock.sendall(attacker.random.randbytes(attacker.random.randint(1, 4096)))
    sock.shutdown(socket.SHUT_WR)


def _replay(attacker: Attacker, sock: socket.socket) -> None:
    sock.sendall(attacker.random.choice(attacker.recorded))


def _cut_replay(attacker: Attacker, sock: socket.socket) -> None:
    """The beginning of a good handshake, then the end of the connection."""
    recorded = attacker.random.choice(attacker.recorded)
    sock.sendall(recorded[: attacker.random.randrange(len(recorded))])
    sock.shutdown(socket.SHUT_WR)


def _reset(attacker: Attacker, sock: socket.socket) -> None:
    """The beginning of a good handshake, then a reset."""
    recorded = attacker.random.choice(attacker.recorded)
    sock.sendall(recorded[: attacker.random.randrange(len(recorded))])
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _reflection(attacker: Attacker, sock: socket.socket) -> None:
    """A good handshake, with the listener's own nonce, and one bit turned."""
    recorded = bytearray(attacker.random.choice(attacker.recorded))
    recorded[:_NONCE] = receive(sock, GREETED)[-_NONCE:]
    recorded[attacker.random.randrange(len(recorded))] ^= 1 << attacker.random.randrange(8)
    sock.sendall(recorded)
    sock.shutdown(socket.SHUT_WR)


def _half_open(attacker: Attacker, sock: socket.socket) -> None:
    """Says nothing, or a byte now and then, and stays."""


def _wrong_key(attacker: Attacker, sock: socket.socket) -> None:
    """The whole protocol, with another key."""
    theirs = receive(sock, GREETED)[-_NONCE:]
    mine, hello = attacker.random.randbytes(_NONCE), b'["job", 1, 0, "words"]'
    key = attacker.random.choice((b"", bytes(KEY_BYTES), attacker.random.randbytes(KEY_BYTES)))
    proof = hmac.digest(key, b"dials\0" + theirs + mine + hello, "sha256")
    sock.sendall(mine + struct.pack("<H", len(hello)) + hello + proof)


def _huge_length(attacker: Attacker, sock: socket.socket) -> None:
    length = attacker.random.choice((1025, 4096, 65535))
    sock.sendall(
        attacker.random.randbytes(_NONCE) + struct.pack("<H", length) + bytes(attacker.random.choice((0, length)))
    )


def _flood(attacker: Attacker, sock: socket.socket) -> None:
    """A megabyte, as quickly as it is taken."""
    sock.sendall(bytes(1 << 20))


def _pickles(attacker: Attacker, sock: socket.socket) -> None:
    """By themselves, and as a hello."""
    bomb = pickle.dumps(Bomb(attacker.canary))
    frames = (
        bomb,
        struct.pack("<q", len(bomb)) + bomb,
        bytes(_NONCE) + struct.pack("<H", len(bomb)) + bomb + bytes(_PROOF),
    )
    sock.sendall(attacker.random.choice(frames))
    sock.shutdown(socket.SHUT_WR)


def _nothing(attacker: Attacker, sock: socket.socket) -> None:
    """Ends at once."""
    sock.shutdown(socket.SHUT_WR)


ATTACKS: dict[str, Callable[[Attacker, socket.socket], bool]] = {
    "random bytes": _random_bytes,
    "replay": _replay,
    "cut replay": _cut_replay,
    "reset": _reset,
    "reflection": _reflection,
    "half open": _half_open,
    "wrong key": _wrong_key,
    "huge length": _huge_length,
    "flood": _flood,
    "pickles": _pickles,
    "nothing": _nothing,
}
"""By name: what is sent."""


def receive(sock: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        part = sock.recv(nbytes - len(data))
        if not part:
            raise ConnectionResetError
        data += part
    return bytes(data)


def record(service: Service, address: Address, key: bytes, hello: bytes) -> bytes:
    """What the dialling side says in a good handshake with the listener at ``address``, as a relay sees it."""
    said = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as relay:
        dialling = service.start(dial(service, *relay.getsockname()[:2], key, hello))
        near, _ = relay.accept()
        with near, socket.create_connection(address, _PATIENCE) as far:
            near.sendall(receive(far, GREETED))
            said += receive(near, _NONCE + 2 + len(hello) + _PROOF)
            far.sendall(said)
            near.sendall(receive(far, _PROOF))
            dialling.wait(_PATIENCE)
            dialling.result().close()
    return bytes(said)


def ports_of(pids: Sequence[int]) -> list[Address]:
    """Where these processes listen, but for what they have inherited from this one, which nobody serves there."""
    listening = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    inherited = {one.laddr for one in psutil.Process().net_connections("tcp")}
    return [(one.laddr.ip, one.laddr.port) for one in listening if one.pid in pids and one.laddr not in inherited]


class Job:
    """Ranks that go on with all-reduces, and check their sums, until `end`."""

    def __init__(self, size: int, config: Config, **options: Any) -> None:
        self.size = size
        self._shared = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
        self._ranks = processes.start(size, self._work, config, timeout=600.0, **options)
        self.pids = self._ranks.pids
        self._ended: list[processes.Ended] = []
        self.until(lambda: min(self.steps()) > 0)

    def _work(self, world: World) -> int:
        """One rank's part; returns its steps."""
        tensors = [np.zeros(count, np.float32) for count in (1, 16_384, 300_000)]
        wanted, stop, step = world.size * (world.size + 1) / 2, False, 0
        while not stop:
            for tensor in tensors:
                tensor[...] = world.rank + 1
                world.allreduce_(tensor, op=Op.SUM)
                assert (tensor == wanted).all(), f"step {step}: a wrong sum"
            step += 1
            self._shared[_FIRST_STEP + world.rank] = step
            stop = bool(world.broadcast(np.array([self._shared[_STOP]]), 0)[0])
        return step

    def steps(self) -> list[int]:
        """How often each rank has gone through its tensors."""
        return self._shared[_FIRST_STEP : _FIRST_STEP + self.size].tolist()

    def descriptors(self) -> list[int]:
        """Of each rank."""
        return [psutil.Process(pid).num_fds() for pid in self.pids]

    def memory(self) -> list[int]:
        """Resident bytes of each rank."""
        return [psutil.Process(pid).memory_info().rss for pid in self.pids]

    def until(self, true: Callable[[], bool]) -> None:
        """Wait; raises AssertionError if it does not come true, or a rank has ended."""
        deadline = time.monotonic() + _PATIENCE
        while not true():
            ended = [pid for pid in self.pids if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE]
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"not true within {_PATIENCE:g} s; {[one.text for one in self.end()]}")
            time.sleep(0.01)

    def end(self) -> list[processes.Ended]:
        """Have the ranks end, and wait for them."""
        self._shared[_STOP] = 1
        self._ended = self._ended or processes.finish(self._ranks)
        return self._ended


@dataclass
class Report:
    """What became of a job under attack."""

    counts: collections.Counter[str]
    seconds: float
    steps: tuple[int, int]
    """Of the slowest rank, when the attack began and when it ended."""
    descriptors: tuple[list[int], list[int]]
    memory: tuple[list[int], list[int]]
    """Bytes, after the first tenth of the attack, and at its end."""

    def __str__(self) -> str:
        megabytes = [[round(value / 2**20, 1) for value in values] for values in self.memory]
        return (
            f"{sum(self.counts.values())} connections in {self.seconds:.1f} s, all refused: "
            + ", ".join(f"{number} {kind}" for kind, number in sorted(self.counts.items()))
            + f"\nsteps of the job meanwhile: {self.steps[1] - self.steps[0]}, all sums right"
            + f"\ndescriptors of each rank: {self.descriptors[0]} before, {self.descriptors[1]} after"
            + f"\nresident MiB of each rank: {megabytes[0]} after a tenth, {megabytes[1]} at the end"
        )


def besiege(job: Job, key: bytes, count: int, seed: int = 0) -> Report:
    """Attack a job with ``count`` connections, and end it.

    Raises:
        AssertionError: something got in, was unpickled, or has left its mark on the job.
    """
    addresses = ports_of(job.pids)
    assert addresses, "the job listens nowhere"
    service = Service()
    try:
        with tempfile.TemporaryDirectory() as name:
            descriptors = job.descriptors()
            recorded = [record(service, address, key, b"recorded") for address in addresses]
            attacker = Attacker(addresses, Random(seed), recorded, Path(name) / "canary")
            first_step, begun = min(job.steps()), time.monotonic()
            memory: list[int] = []
            for number in range(count):
                if number == count // 10:
                    memory = job.memory()
                attacker.attack()
            seconds = time.monotonic() - begun
            job.until(lambda: min(job.steps()) > first_step)  # the half-open ones are there still
            last_step = min(job.steps())
            for address in addresses:
                # Who holds the key still gets in, while the half-open ones are there.
                service.run(dial(service, *address, key, b"late"), _PATIENCE).close()
            attacker.finish()
            job.until(lambda: job.descriptors() == descriptors)
            report = Report(
                attacker.counts,
                seconds,
                (first_step, last_step),
                (descriptors, job.descriptors()),
                (memory, job.memory()),
            )
            job.until(lambda: min(job.steps()) > last_step)
            assert not attacker.canary.exists(), f"something was unpickled\n{report}"
            for before, after in zip(*report.memory, strict=True):
                assert after < before + MOST_GROWTH, f"memory grew\n{report}"
    finally:
        service.close()
        ended = job.end()
    for one in ended:
        assert one.error is None, one.text
    return report


def start_job(size: int, config: Config) -> Job:
    """A job whose ranks meet at a store that rank 0 serves, and are connected by TCP; its key is `processes.KEY`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return Job(size, replace(config, rendezvous=f"tcp://127.0.0.1:{port}"), connect=processes.by_rendezvous)


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack, and print what came of it; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.trials.hostile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--count", type=int, default=10_000, help="connections; %(default)s by default")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn; %(default)s by default")
    asked = parser.parse_args(arguments)
    try:
        print(besiege(start_job(4, Config(timeout=60, local_size=2)), processes.KEY, asked.count, asked.seed))
    except AssertionError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
