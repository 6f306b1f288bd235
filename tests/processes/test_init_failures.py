"""Ranks started by hand, which no launcher watches: one is killed in `init`, or believes in another number of ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.launching.ports import free_port

PROGRAM = """
import os, sys

import collectives as hvd
from collectives.transport.tcp import heart, mesh
from collectives.transport.stores import signed_store

def die(*arguments, **keywords):
    os.kill(os.getpid(), 9)

def set_value(self, key, value, set_value=signed_store.SignedStore.set):
    die() if key.endswith(("agreed/1", "concluded")) else set_value(self, key, value)

if sys.argv[1] == "first exchange":
    signed_store.SignedStore.set = set_value
elif sys.argv[1] == "second exchange":
    mesh.Listener = die
elif sys.argv[1] == "connected":
    heart.Heart.start = die
try:
    hvd.init()
except hvd.CollectivesError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    os._exit(1)  # and the store with it, if it is this process that serves it
"""


def start(folder: Path, torch: bool, sizes: Sequence[int], places: Sequence[str]) -> list[str]:
    """What ranks print that are started each with a number of ranks, and with a place to be killed at."""
    (folder / "program.py").write_text(PROGRAM)
    address = ("127.0.0.1", str(free_port()))
    environment = {**os.environ, "HOME": str(folder), "COLLECTIVES_PEER_TIMEOUT": "1.5"}
    if torch:
        environment.update(MASTER_ADDR=address[0], MASTER_PORT=address[1])
    else:
        environment.update(COLLECTIVES_RENDEZVOUS=f"tcp://{':'.join(address)}")
    names = ("RANK", "WORLD_SIZE") if torch else ("COLLECTIVES_RANK", "COLLECTIVES_SIZE")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(folder / "program.py"), place],
            env={**environment, **dict(zip(names, (str(rank), str(size)), strict=True))},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, (size, place) in enumerate(zip(sizes, places, strict=True))
    ]
    try:
        return [process.communicate(timeout=60)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def test_every_rank_learns_that_they_disagree_about_their_number(tmp_path: Path) -> None:
    sizes = (2, 3, 3)
    for rank, text in enumerate(start(tmp_path, False, sizes, [""] * 3)):
        said = re.findall(r"rank (\d) \(process \d+ on \S+\) says that there are (\d) ranks", text)
        assert text.startswith(f"MismatchError: rank {rank}: ") and len(said) == 2, text
        assert all(sizes[int(other)] == int(size) for other, size in said) and said[0][1] != said[1][1], text


@pytest.mark.parametrize(
    ("victim", "place", "torch"),
    [
        (0, "first exchange", False),
        (0, "connected", False),
        (1, "first exchange", False),
        (1, "second exchange", True),
    ],
)
def test_every_rank_learns_who_was_killed(victim: int, place: str, torch: bool, tmp_path: Path) -> None:
    if torch and find_spec("torch") is None:
        pytest.skip("needs torch, whose store it is")
    places = [place if rank == victim else "" for rank in range(3)]
    for rank, text in enumerate(start(tmp_path, torch, (3, 3, 3), places)):
        found = re.match(
            rf"RankFailedError: rank {rank}: rank {victim} (failed|on \S+ has died|\(process \d+ on \S+\) has)", text
        )
        assert found if rank != victim else not text, text
