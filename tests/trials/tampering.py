"""Attack two ranks from the path between them, or through the store at which they meet, and look at what they use.

    python -m tests.trials.tampering  # all attacks from the path; the tests make some, and those through the store

Somebody on the path passes every connection of rank 1 on, and changes what comes by: turns a bit, puts in frames of its
own or old ones, leaves frames out, changes their order, or puts a pickle in the place of a record. Somebody at the
store replaces the address of rank 0 by that of a relay. The ranks go on with all-reduces and objects. An attack is
right if nothing was unpickled, no sum was wrong, and the job went on or ended with the reason. Exit code 1 if not.
"""

from __future__ import annotations

import pickle
import re
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from collectives.base.config import Config
from collectives.base.reduce_op import Op
from collectives.transport.group import Group
from collectives.transport.stores import store
from collectives.transport.tcp import listener, mesh
from collectives.worlds.world import World
from tests.support.launching import processes
from tests.trials.hostile import GREETED, Bomb, receive

MARK = b"an object of the program's" * 4000
"""Is in every object; so many bytes that it travels as a block, and not with the words of a round."""
_AT = 4
"""The chunk of a connection, each way, that is attacked first."""
_NONCE, _PROOF, _LENGTH = 32, 32, struct.Struct("<H")
_PATIENCE = 20.0
_GO_ON = 2.0
"""Seconds for which a job goes on after an attack: many beats."""
_SETTINGS = {"timeout": 20.0, "peer_timeout": 2.0, "local_size": 1, "network": "tcp"}
_REASON = re.compile(
    "[^\n]*(signature of data from rank|its signature is wrong|the data was altered on the way|"
    "the signature of an object|was not signed with this job's key)[^\n]*"
)


class Passing(NamedTuple):
    """What an attack knows of a chunk on its way: its number and itself, the one before, and the last one in the other
    direction."""

    number: int
    chunk: bytes
    before: bytes
    other_way: bytes
    canary: Path


def _turned(passing: Passing) -> bytes:
    return passing.chunk[:-1] + bytes([passing.chunk[-1] ^ 1])


def _first_turned(passing: Passing) -> bytes:
    return bytes([passing.chunk[0] ^ 1]) + passing.chunk[1:]


def _pickled(passing: Passing) -> bytes:
    """The record of an exchange whose payload makes the canary when it is unpickled."""
    data = pickle.dumps(Bomb(passing.canary))
    data += bytes(-len(data) % 8)
    return struct.pack("<qq", -1, len(data)) + data + passing.chunk[-16:]


def _failed(passing: Passing) -> bytes:
    """A notice that the sender has failed."""
    body = b"0\0invented"
    return struct.pack("<IB", len(body), 2) + body + bytes(16) + passing.chunk


CHANGES: dict[str, Callable[[Passing], bytes]] = {
    "a bit": _turned,
    "first bit": _first_turned,
    "old": lambda passing: passing.before,
    "twice": lambda passing: passing.chunk + passing.chunk,
    "left out": lambda passing: b"" if passing.number == _AT else passing.chunk,
    "order": lambda passing: passing.chunk + passing.before,
    "reflected": lambda passing: passing.other_way,
    "pickle": _pickled,
    "invented": _failed,
}


class Attack(NamedTuple):
    """On connections whose hello contains ``channel``; ``borne``: whether the job may go on."""

    channel: str
    change: str
    borne: bool = False


ATTACKS: dict[str, Attack] = {
    "none": Attack("nowhere", "a bit", borne=True),
    **{f"words, {change}": Attack("words", change) for change in ("a bit", "first bit", "old", "reflected", "pickle")},
    **{f"heart, {change}": Attack("heart", change) for change in ("a bit", "left out", "reflected", "invented")},
    "heart, twice": Attack("heart", "twice", borne=True),
    **{f"store, {change}": Attack("store", change, borne=True) for change in ("a bit", "first bit", "old")},
    "data, a bit": Attack("data", "a bit"),
}


class OnPath:
    """Passes on the connections of this process, and changes what comes by.

    Args:
        attack: what it does; on connections with blocks, where the mark passes.
        folder: gets a file "attacked" once it has done so, and one "canary" if its pickle is read.
    """

    def __init__(self, attack: Attack, folder: Path) -> None:
        self._attack, self._folder = attack, folder

    def install(self) -> None:
        """Have this process dial through it."""

        async def diverted(service: Any, host: str, port: int, *rest: Any) -> Any:
            return await listener.dial(service, *self.divert((host, port)), *rest)

        for module in (mesh, store):
            module.dial = diverted  # type: ignore[attr-defined]

    def divert(self, address: tuple[str, int]) -> tuple[str, int]:
        """What to dial in place of an address, at which somebody must listen."""
        socket.create_connection(address, _PATIENCE).close()
        server = socket.create_server(("127.0.0.1", 0))

        def accept() -> None:
            while True:
                near = server.accept()[0]
                threading.Thread(target=self._pass_on, args=(near, address), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        where: tuple[str, int] = server.getsockname()
        return where

    def _pass_on(self, near: socket.socket, address: tuple[str, int]) -> None:
        with suppress(OSError), near, socket.create_connection(address, _PATIENCE) as far:
            far.settimeout(None)
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            near.sendall(receive(far, GREETED))
            head = receive(near, _NONCE + _LENGTH.size)
            hello = receive(near, _LENGTH.unpack(head[_NONCE:])[0])
            far.sendall(head + hello + receive(near, _PROOF))
            near.sendall(receive(far, _PROOF))
            last: dict[socket.socket, bytes] = {near: b"", far: b""}
            back = threading.Thread(target=self._pump, args=(far, near, hello, last), daemon=True)
            back.start()
            self._pump(near, far, hello, last)
            back.join()

    def _pump(self, source: socket.socket, to: socket.socket, hello: bytes, last: dict[socket.socket, bytes]) -> None:
        count = 0
        with suppress(OSError):
            while chunk := source.recv(1 << 20):
                attack, count = self._attack, count + 1
                said = chunk
                here = attack.channel.encode() in hello
                if here and (count >= _AT if attack.channel != "data" else MARK[:1000] in chunk):
                    said = CHANGES[attack.change](
                        Passing(count, chunk, last[source], last[to], self._folder / "canary")
                    )
                    if said != chunk:
                        (self._folder / "attacked").touch()
                last[source] = chunk
                to.sendall(said)
            to.shutdown(socket.SHUT_WR)


class AbusedStore:
    """A client of a store; whatever it sets, an attacker replaces at once.

    Args:
        real: the store.
        forged: what becomes of a key's value.
    """

    def __init__(self, real: Any, forged: Callable[[str, bytes], bytes]) -> None:
        self.real, self.forged = real, forged
        self.get, self.wait, self.check = real.get, real.wait, getattr(real, "check", None)

    def set(self, key: str, value: bytes) -> None:
        self.real.set(key, value)
        self.real.set(key, self.forged(key, value))


def relayed(folder: Path, key: str, value: bytes) -> bytes:
    """Rank 0's address replaced by that of a relay, which puts pickles into the exchanges."""
    address = re.search(rb'"value": \["127.0.0.1", (\d+)\]', value)
    if address is None or not key.endswith("offer/0"):
        return value
    (folder / "attacked").touch()
    _, port = OnPath(Attack("words", "pickle"), folder).divert(("127.0.0.1", int(address[1])))
    return value.replace(address[1], str(port).encode())


def work(folder: Path, world: World) -> int:
    """One rank's part, until an attack has been made, and for a while; returns its steps."""
    arrays = [np.zeros(count, np.float32) for count in (1, 5000, 300_000)]
    wanted, step, stop = world.size * (world.size + 1) / 2, 0, False
    begun = time.monotonic()
    while not stop:
        for array in arrays:
            array[...] = world.rank + 1
            world.allreduce_(array, op=Op.SUM)
            assert (array == wanted).all(), f"step {step}: a wrong sum"
        now, attacked = time.monotonic(), folder / "attacked"
        over = attacked.stat().st_mtime + _GO_ON < time.time() if attacked.exists() else now - begun > _GO_ON
        said = {"stop": (over and step > 2 * _AT) or now - begun > _PATIENCE, "mark": MARK, "step": step}
        heard = world.broadcast_object(said, 0)
        assert heard["step"] == step and heard["mark"] == MARK, f"step {step}: another object"
        stop, step = heard["stop"], step + 1
    return step


def judge(name: str, borne: bool, texts: Sequence[str], folder: Path) -> str:
    """What became of a job under attack, in a line.

    Args:
        borne: as of `Attack`.
        texts: what the ranks said at their end; empty if they went on.

    Raises:
        AssertionError: it is not right.
    """
    said = "\n".join(texts)
    assert not (folder / "canary").exists(), f"{name}: a pickle was read\n{said}"
    assert name == "none" or (folder / "attacked").exists(), f"{name}: was not carried out\n{said}"
    assert not any(word in said for word in ("a wrong sum", "another object")), f"{name}: was used\n{said}"
    if not said:
        assert borne, f"{name}: was not noticed"
        return f"{name}: the job went on"
    reason = _REASON.search(said)
    assert reason and name != "none", f"{name}: ended without the reason\n{said}"
    return f"{name}: {reason[0].strip()[:200]}"


def through_store(folder: Path, store_of: Callable[[], Any], rank: int, size: int, links: Any, config: Config) -> Group:
    """Ranks that meet at a store that is abused; as `processes.Connect`."""
    from collectives.transport.stores.store_exchange import StoreExchange
    from collectives.transport.tcp import tcp_groups

    abused = AbusedStore(store_of(), partial(relayed, folder))
    exchange = StoreExchange(abused, rank, size, config.timeout, "an abused store", processes.KEY)
    return tcp_groups.connect(exchange, rank, processes.KEY, config, exchange.look_for_failures)


def on_path(attack: Attack, folder: Path, rank: int, size: int, links: Any, config: Config) -> Group:
    """Ranks that somebody is between; as `processes.Connect`."""
    if rank == 1:
        OnPath(attack, folder).install()
    return processes.by_rendezvous(rank, size, links, config)


def attacked(name: str, connect: Callable[..., Group], folder: Path, borne: bool = False) -> str:
    """Attack two ranks of this process's; raises as `judge`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    config = Config(rendezvous=place, **_SETTINGS)  # type: ignore[arg-type]
    ranks = processes.start(2, partial(work, folder), config, 60.0, connect=connect)
    return judge(name, borne, [one.text for one in processes.finish(ranks) if one.error is not None], folder)


def main() -> None:
    """Make every attack, and print what came of it."""
    wrong = 0
    for name, attack in ATTACKS.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                print(attacked(name, partial(on_path, attack, Path(folder)), Path(folder), attack.borne), flush=True)
            except AssertionError as error:
                wrong += 1
                print(f"WRONG: {error}", flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
