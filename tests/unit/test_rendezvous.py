"""Meeting without MPI: who serves the store, what the program may tell `init`, and what an error says."""

from __future__ import annotations

import concurrent.futures
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from collectives.base.config import Config
from collectives.base.errors import (
    CollectivesError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    InvalidTypeError,
    TransportError,
)
from collectives.base.places import Spot, ports_of
from collectives.transport.stores import meeting, rendezvous
from collectives.transport.stores.rendezvous import NOTHING, Asked, Place, asked, exchange_of, find
from collectives.transport.tcp import network
from tests.support.launching.ports import free_port
from tests.unit.test_store_exchange import LocalStore

CONFIG = Config(timeout=20.0)


@pytest.fixture
def pool() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(16) as made:
        yield made


SPELLINGS = ("127.0.0.1", "localhost")
"""Of this host."""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment with a home folder; stores that are served are closed afterwards."""
    yield {"HOME": str(tmp_path)}
    for server in meeting._served:
        server._service.close()
    meeting._served.clear()


@pytest.fixture
def port() -> int:
    """A port that is free."""
    return free_port()


def meet(environment: Mapping[str, str], config: Config = CONFIG, told: Asked = NOTHING) -> tuple[Place, list[Any]]:
    place = find(environment, config, told)
    assert place is not None
    exchange = exchange_of(place, config)
    said = exchange(place.rank)
    assert exchange(str(place.rank)) == [str(rank) for rank in said]
    place.close()
    return place, said


def test_ranks_meet_where_the_user_says(
    pool: concurrent.futures.ThreadPoolExecutor, home: dict[str, str], port: int
) -> None:
    environment = {**home, "COLLECTIVES_SIZE": "4", "COLLECTIVES_RENDEZVOUS": f"tcp://127.0.0.1:{port}"}
    config = replace(Config.from_environment(environment), timeout=20.0)
    for _ in range(2):  # the second time at the store that rank 0 serves already
        found = pool.map(lambda rank: meet({**environment, "COLLECTIVES_RANK": str(rank)}, config), range(3, -1, -1))
        for rank, (place, said) in zip(range(3, -1, -1), found, strict=True):
            assert (place.rank, place.size, said) == (rank, 4, [0, 1, 2, 3])
            assert place.key is not None and len(place.key) == 32
            assert f"tcp://127.0.0.1:{port}" in place.how and repr(place.key) not in repr(place)
    assert len(meeting._served) == 1


def test_ranks_that_spell_the_place_differently_have_one_key(
    pool: concurrent.futures.ThreadPoolExecutor, home: dict[str, str], port: int
) -> None:
    told = [asked(rendezvous=f"tcp://{host}:{port}", rank=rank, size=2) for rank, host in enumerate(SPELLINGS)]
    places = [place for place, said in pool.map(lambda told: meet(home, CONFIG, told), told) if said == [0, 1]]
    assert len(places) == 2 and places[0].key == places[1].key


@pytest.mark.parametrize("host", ["localhost", "[::1]"])
def test_ranks_meet_where_the_program_says(
    pool: concurrent.futures.ThreadPoolExecutor, home: dict[str, str], port: int, host: str
) -> None:
    if host == "[::1]" and not any("::1" in known for known in network.addresses().values()):
        pytest.skip("this host has no IPv6 address, not even ::1")
    key = {"COLLECTIVES_KEY": "ab" * 16}
    elsewhere = {**home, **key, "COLLECTIVES_RANK": "5", "COLLECTIVES_SIZE": "6", "RANK": "0", "WORLD_SIZE": "1"}
    config = replace(CONFIG, rendezvous="tcp://nowhere:1", allow_single=True)
    told = [asked(rendezvous=f"tcp://{host}:{port}", rank=rank, size=2) for rank in range(2)]
    for rank, (place, said) in enumerate(pool.map(lambda told: meet(elsewhere, config, told), told)):
        assert (place.rank, place.key, said) == (rank, b"\xab" * 16, [0, 1])
    assert not Path(home["HOME"], ".config").exists()


def test_ranks_meet_at_a_store_of_the_programs(pool: concurrent.futures.ThreadPoolExecutor) -> None:
    store = LocalStore()
    for rank, (place, said) in enumerate(
        pool.map(lambda rank: meet({}, CONFIG, asked(store=store, rank=rank, size=3)), range(3))
    ):
        assert (place.rank, place.key, said) == (rank, None, [0, 1, 2])
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "1"}
    place = find(torchrun, CONFIG, asked(store=store))
    assert place is not None and (place.rank, place.size, place.store) == (1, 2, store)


def test_a_name_that_is_known_late(
    pool: concurrent.futures.ThreadPoolExecutor, home: dict[str, str], port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve, refusals = socket.getaddrinfo, iter(range(8))

    def known_late(host: str, *arguments: Any, **options: Any) -> Any:
        if host == "train-0.train" and next(refusals, None) is not None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve("127.0.0.1" if host == "train-0.train" else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", known_late)
    monkeypatch.setattr(meeting, "_SERVE_WITHIN", 0.0)
    told = [asked(rendezvous=f"tcp://train-0.train:{port}", rank=rank, size=2) for rank in range(2)]
    assert [said for _, said in pool.map(lambda told: meet(home, CONFIG, told), told)] == [[0, 1]] * 2


JOB = str(os.getpid())
"""Ports are derived from it, and other tests may run on this machine."""


def slurm(rank: int) -> dict[str, str]:
    job = {"SLURM_JOB_ID": JOB, "SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": "localhost,node[2-3]"}
    return {**job, "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "3"}


def tensorflow(rank: int) -> dict[str, str]:
    cluster = {"chief": ["127.0.0.1:2222"], "worker": [f"node{JOB}:2222", "node2:2222"], "ps": ["node3:2222"]}
    task = {"type": "worker", "index": rank - 1} if rank else {"type": "chief", "index": 0}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def jax(rank: int) -> dict[str, str]:
    return {"JAX_COORDINATOR_ADDRESS": f"localhost:{JOB}", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": str(rank)}


@pytest.mark.parametrize("launcher", [slurm, tensorflow, jax])
def test_ranks_meet_where_their_launcher_says(
    launcher: Callable[[int], dict[str, str]], pool: concurrent.futures.ThreadPoolExecutor, home: dict[str, str]
) -> None:
    """Also where the first candidates are taken: by a service that says something else, and by a silent one."""
    spot = rendezvous.places.detect(launcher(0))
    assert spot is not None and spot.ports == ports_of(spot.job)
    with socket.create_server(("127.0.0.1", spot.ports[0])) as other:
        answering = pool.submit(answer_otherwise, other)
        for rank, (place, said) in enumerate(pool.map(lambda rank: meet({**home, **launcher(rank)}), range(3))):
            assert (place.rank, place.size, said) == (rank, 3, [0, 1, 2])
        assert [server.address[1] for server in meeting._served] == [spot.ports[1]]
        other.shutdown(socket.SHUT_RDWR)
    answering.result(20)
    assert find({**home, **launcher(0)}, replace(CONFIG, allow_single=True)) is None


def answer_otherwise(other: socket.socket) -> None:
    try:
        while True:
            sock, _ = other.accept()
            with sock:
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    except OSError:
        pass


def test_ranks_of_an_mpi_launcher_meet_without_mpi(
    pool: concurrent.futures.ThreadPoolExecutor, home: dict[str, str]
) -> None:
    here = {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": f"prterun-x-{JOB}@1",
        **home,
    }

    def of_a_rank(rank: int) -> list[Any]:
        place = find({**here, "OMPI_COMM_WORLD_RANK": str(rank)}, CONFIG, without_mpi=True)
        assert place is not None
        said = exchange_of(place, CONFIG)(rank)
        place.close()
        return said

    assert find({**here, "OMPI_COMM_WORLD_RANK": "0"}, CONFIG) is None
    assert list(pool.map(of_a_rank, range(2))) == [[0, 1]] * 2
    two_hosts = {**here, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    with pytest.raises(
        TransportError, match=r"rank 1: Open MPI's mpirun .* set COLLECTIVES_RENDEZVOUS=tcp://host:port"
    ):
        find(two_hosts, CONFIG, without_mpi=True)


@pytest.mark.parametrize(
    "environment",
    [{}, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, {"WORLD_SIZE": "2", "RANK": "0"}],
)
def test_nothing_says_where(environment: dict[str, str]) -> None:
    assert find(environment, CONFIG) is None and find(environment, CONFIG, without_mpi=True) is None


def test_an_explicit_world_of_one_meets_nobody() -> None:
    place = find({}, CONFIG, asked(rendezvous="tcp://nowhere:1", rank=0, size=1))
    assert place is not None and (place.rank, place.size, place.store) == (0, 1, None)


def test_a_launcher_says_that_there_is_one_rank() -> None:
    single = {"COLLECTIVES_RANK": "0", "COLLECTIVES_SIZE": "1", "RANK": "1", "WORLD_SIZE": "2"}
    assert rendezvous.told(single, CONFIG, NOTHING) and not rendezvous.told({"RANK": "1"}, CONFIG, NOTHING)
    place = find(single, CONFIG)
    assert place is not None and (place.rank, place.size, place.store) == (0, 1, None)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"comm": [0, 1], "rank": 0, "size": 2}, InvalidArgumentError, "comm cannot be combined with"),
        ({"rendezvous": "tcp://a:1", "store": LocalStore()}, InvalidArgumentError, "got both"),
        ({"rendezvous": "tcp://a:1", "rank": 0}, InvalidArgumentError, "rank=0, size=None"),
        ({"rendezvous": "tcp://a:1", "size": 2}, InvalidArgumentError, "rank=None, size=2"),
        ({"rendezvous": "tcp://a:1", "rank": 2, "size": 2}, InvalidArgumentError, "rank=2, size=2"),
        ({"rendezvous": "tcp://a:1", "rank": -1, "size": 2}, InvalidArgumentError, "rank=-1"),
        ({"rendezvous": "tcp://a:1", "rank": 0.5, "size": 2}, InvalidTypeError, "expected integers"),
        ({"rendezvous": "a:1"}, InvalidArgumentError, "such as tcp://"),
        ({"rendezvous": "tcp://a"}, InvalidArgumentError, "such as tcp://"),
        ({"rendezvous": "tcp://a:66666"}, InvalidArgumentError, "such as tcp://"),
        ({"store": {}}, InvalidTypeError, "set, get and wait"),
    ],
)
def test_arguments_that_do_not_go_together(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        asked(**arguments)


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({}, "pass rank and size to init.*, or set COLLECTIVES_RANK and COLLECTIVES_SIZE"),
        ({"COLLECTIVES_RANK": "0"}, "COLLECTIVES_RANK='0', COLLECTIVES_SIZE=''"),
        ({"COLLECTIVES_RANK": "2", "COLLECTIVES_SIZE": "2"}, "expected a rank from 0 to size - 1"),
    ],
)
def test_a_place_without_a_rank(environment: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        find(environment, replace(CONFIG, rendezvous="tcp://127.0.0.1:1"))
    if not environment:
        with pytest.raises(InvalidArgumentError, match="pass rendezvous='tcp://host:port' or store too"):
            find(environment, CONFIG, asked(rank=0, size=2))


def test_a_foreign_service_is_an_error_at_once(
    pool: concurrent.futures.ThreadPoolExecutor, home: dict[str, str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        answering = pool.submit(answer_otherwise, other)
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        for rank in range(2):
            with pytest.raises(TransportError, match=f"rank {rank}: found no store of this job .* is not collectives"):
                find(home, CONFIG, asked(rendezvous=address, rank=rank, size=2))
        other.shutdown(socket.SHUT_RDWR)
    answering.result(20)


def test_another_key_is_refused_and_the_error_says_where_it_is_from(
    pool: concurrent.futures.ThreadPoolExecutor, home: dict[str, str], port: int, tmp_path: Path
) -> None:
    address = f"tcp://127.0.0.1:{port}"
    place = find(home, CONFIG, asked(rendezvous=address, rank=0, size=2))
    assert place is not None
    with pytest.raises(TransportError, match=r"rank 1: .*elsewhere.*its key is different.*set COLLECTIVES_KEY on all"):
        find({"HOME": str(tmp_path / "elsewhere")}, CONFIG, asked(rendezvous=address, rank=1, size=2))
    place.close()


def test_nobody_serves_the_store(home: dict[str, str], port: int) -> None:
    config = replace(CONFIG, timeout=0.2)
    told = asked(rendezvous=f"tcp://127.0.0.1:{port}", rank=1, size=2)
    with pytest.raises(
        CollectiveTimeoutError, match=r"rank 1: waited 0\.2 s for rank 0 to serve a store .*no process listens"
    ):
        find(home, config, told)


@pytest.mark.parametrize("by_torch", [False, True])
def test_a_wait_at_a_wrong_address_says_what_is_tried(
    by_torch: bool, home: dict[str, str], port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    @contextmanager
    def saying(describe: Callable[[], str], seconds: float) -> Iterator[None]:
        assert seconds == 0.2
        try:
            yield
        finally:
            said.append(describe())

    monkeypatch.setattr(rendezvous, "saying_what_is_tried", saying)
    monkeypatch.setattr(rendezvous, "_has_torch", lambda: by_torch)
    monkeypatch.setattr(rendezvous, "_torch_store", lambda *arguments: LocalStore())
    torchrun = {**home, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with nullcontext() if by_torch else pytest.raises(CollectiveTimeoutError):
        find(torchrun, replace(CONFIG, timeout=0.2))
    if by_torch:
        assert said[0].startswith(f"rank 1: waiting for torch's store at 127.0.0.1:{port} (torchrun, ")
    else:
        assert said[0].startswith("rank 1: waiting for rank 0 to serve a store (torchrun, ")
        assert said[0].endswith(f"port {port}: no process listens there")


def test_rank_0_is_on_another_host_than_the_address(home: dict[str, str], port: int) -> None:
    for host in ("192.0.2.1", "no-such-host.invalid"):  # of RFC 5737 and RFC 2606: they belong to nobody
        told = asked(rendezvous=f"tcp://{host}:{port}", rank=0, size=2)
        with pytest.raises(CollectivesError, match=f"rank 0: cannot serve a store .*{host}"):
            find(home, replace(CONFIG, timeout=0.3), told)
    assert meeting._served == []


def test_a_store_of_torchs_that_has_ended_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class TorchStore:
        ended = False

        def __init__(self, *address: object, **options: object) -> None: ...

        def check(self, keys: list[str]) -> bool:
            if self.ended:
                raise RuntimeError("Broken pipe")
            return False

    monkeypatch.setitem(sys.modules, "torch.distributed", SimpleNamespace(TCPStore=TorchStore))
    monkeypatch.setattr(rendezvous, "_of_torch", {})
    spot = Spot(1, 2, "torchrun", "node1", (29400,), torch=True)
    first = rendezvous._torch_store(spot, {}, 5.0)
    assert rendezvous._torch_store(spot, {}, 5.0) is first
    first.ended = True
    assert rendezvous._torch_store(spot, {}, 5.0) is not first


def test_torchruns_variables_without_torch(
    pool: concurrent.futures.ThreadPoolExecutor, home: dict[str, str], port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_has_torch", lambda: False)
    torchrun = {**home, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    found = list(pool.map(lambda rank: meet({**torchrun, "RANK": str(rank)}), range(2)))
    assert [said for _, said in found] == [[0, 1]] * 2 and "torchrun" in found[0][0].how


RANK = """
import os, sys, threading
from collectives.base.config import Config
from collectives.transport.stores.rendezvous import exchange_of, find
import torch.distributed as dist
GROUP = dict(backend="gloo", init_method="env://")
if sys.argv[1] == "before":
    dist.init_process_group(**GROUP)
for _ in range(2):
    place = find(os.environ, config := Config(timeout=20.0))
    print(place.rank, place.key, exchange_of(place, config)(place.rank), place.how, flush=True)
if sys.argv[1] == "after":
    dist.init_process_group(**GROUP)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_ranks_meet_at_torchs_store_and_torch_still_can(when: str, port: int) -> None:
    pytest.importorskip("torch")
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, when],
            env={**os.environ, **variables, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(ranks):
        shown, said = process.communicate(timeout=100)
        how = "torch.distributed's default" if when == "before" else "torchrun"
        lines = shown.splitlines()
        assert process.returncode == 0 and len(lines) == 2, said
        assert all(line.startswith(f"{rank} None [0, 1] ") and how in line for line in lines)
