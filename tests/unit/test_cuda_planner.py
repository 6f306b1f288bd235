"""The device's planner: what it chooses where, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from collectives.base.errors import InvalidArgumentError, TransportError
from collectives.cuda.planner import DeviceChoice, DeviceFacts, DevicePlanner
from collectives.plan.planner import Placement

MIB = 1 << 20
ONE, TWO = ((0, 1, 2, 3),), ((0, 1), (2, 3))

BOTH = DeviceFacts()
SHARED = DeviceFacts(shares_gpus=True)
IPC = DeviceFacts(nccl="NCCL is missing")
NCCL = DeviceFacts(ipc="IPC is refused")
NEITHER = DeviceFacts(ipc="IPC is refused", nccl="NCCL is missing")
MEASURED = DeviceFacts(host_until=4096)


def planner(facts: DeviceFacts, hosts: Any = ONE, transport: str = "auto") -> DevicePlanner:
    return DevicePlanner(Placement(0, sum(map(len, hosts)), hosts, True, True), facts, transport)


@pytest.mark.parametrize(
    ("facts", "hosts", "collective", "nbytes", "native", "wanted"),
    [
        # One host, a GPU for each rank: kernels of ours for what is small, NCCL for what is large and what it knows.
        (BOTH, ONE, "allreduce", 4 * MIB, True, ("direct", "cuda-ipc")),
        (BOTH, ONE, "allreduce", 4 * MIB + 1, True, ("native", "nccl")),
        (BOTH, ONE, "allreduce", 64 * MIB, False, ("direct", "cuda-ipc")),
        (BOTH, ONE, "reducescatter", 64 * MIB, True, ("native", "nccl")),
        (BOTH, ONE, "broadcast", 64 * MIB, True, ("native", "nccl")),
        (BOTH, ONE, "alltoall", 64 * MIB, False, ("direct", "cuda-ipc")),
        # Ranks that share GPUs.
        (SHARED, ONE, "allreduce", 64 * MIB, True, ("direct", "cuda-ipc")),
        (SHARED, ONE, "allgather", 64 * MIB, True, ("direct", "cuda-ipc")),
        # Without the one or the other.
        (IPC, ONE, "allreduce", 64 * MIB, True, ("direct", "cuda-ipc")),
        (NCCL, ONE, "allreduce", 1024, True, ("native", "nccl")),
        (NCCL, ONE, "allreduce", 1024, False, ("ring", "nccl")),
        (NCCL, ONE, "alltoall", 1024, False, ("direct", "nccl")),
        (NEITHER, ONE, "allreduce", 64 * MIB, True, ("auto", "host")),
        (NEITHER, ONE, "alltoall", 64, False, ("auto", "host")),
        # Several hosts: NCCL, or a hierarchy; only all-reduces have one.
        (BOTH, TWO, "allreduce", 1024, True, ("native", "nccl")),
        (BOTH, TWO, "broadcast", 1024, True, ("native", "nccl")),
        (IPC, TWO, "allreduce", 1024, True, ("hierarchical", "cuda-ipc")),
        (IPC, TWO, "broadcast", 1024, True, ("auto", "host")),
        (IPC, TWO, "alltoall", 1024, False, ("auto", "host")),
        (NEITHER, TWO, "allreduce", 1024, True, ("auto", "host")),
        # What was measured to be quicker through the host: all-reduces only.
        (MEASURED, ONE, "allreduce", 4096, True, ("auto", "host")),
        (MEASURED, ONE, "allreduce", 4097, True, ("direct", "cuda-ipc")),
        (MEASURED, ONE, "broadcast", 4096, True, ("direct", "cuda-ipc")),
    ],
)
def test_what_is_chosen(
    facts: DeviceFacts, hosts: Any, collective: str, nbytes: int, native: bool, wanted: tuple[str, str]
) -> None:
    choice = planner(facts, hosts).choose(collective, nbytes, native=native)
    assert (choice.algorithm, choice.transport) == wanted
    assert planner(facts, hosts).choose(collective, nbytes, native=native, algorithm="auto", transport="auto") == choice


@pytest.mark.parametrize(
    ("facts", "hosts", "forced", "wanted"),
    [
        (BOTH, ONE, {"transport": "nccl"}, ("native", "nccl")),
        (SHARED, ONE, {"transport": "nccl"}, ("native", "nccl")),
        (BOTH, ONE, {"transport": "host"}, ("auto", "host")),
        (BOTH, ONE, {"transport": "cuda-ipc", "algorithm": "ring"}, ("ring", "cuda-ipc")),
        (BOTH, ONE, {"algorithm": "native"}, ("native", "nccl")),
        (SHARED, ONE, {"algorithm": "native"}, ("native", "nccl")),
        (MEASURED, ONE, {"algorithm": "ring"}, ("ring", "cuda-ipc")),
        (NEITHER, ONE, {"algorithm": "ring"}, ("ring", "host")),
        (BOTH, TWO, {"algorithm": "hierarchical"}, ("hierarchical", "cuda-ipc")),
        (NCCL, TWO, {"algorithm": "hierarchical"}, ("hierarchical", "host")),
        (BOTH, TWO, {"transport": "cuda-ipc"}, ("hierarchical", "cuda-ipc")),
        (BOTH, TWO, {"algorithm": "ring"}, ("ring", "nccl")),
    ],
)
def test_what_is_forced(facts: DeviceFacts, hosts: Any, forced: dict[str, str], wanted: tuple[str, str]) -> None:
    choice = planner(facts, hosts).choose("allreduce", 1024, native=True, **forced)
    assert (choice.algorithm, choice.transport) == wanted


@pytest.mark.parametrize(
    ("facts", "hosts", "call", "forced", "text"),
    [
        (BOTH, ONE, "allreduce", "fastest", "expected one of auto, ring, direct, .* for allreduce of GPU tensors"),
        (BOTH, ONE, "allreduce", "recursive-doubling", "for allreduce of GPU tensors"),
        (BOTH, ONE, "allreduce", "one-shot", "for allreduce of GPU tensors"),
        (BOTH, ONE, "alltoall", "native", "expected one of auto, direct for alltoall of GPU tensors \\[A57\\]$"),
        (BOTH, ONE, "allreduce", "over pigeon", "expected one of auto, cuda-ipc, nccl, host"),
        (IPC, ONE, "allreduce", "over nccl", "transport='nccl': NCCL is missing"),
        (IPC, ONE, "allreduce", "native", "algorithm='native': NCCL is missing"),
        (NCCL, ONE, "allreduce", "over cuda-ipc", "transport='cuda-ipc': IPC is refused"),
        (BOTH, ONE, "allreduce unknown to NCCL", "native", "but NCCL has no allreduce for these elements"),
        (BOTH, ONE, "allreduce", "native over cuda-ipc", "but the transport is cuda-ipc"),
        (BOTH, ONE, "allgather", "native over host", "but the transport is host"),
        (BOTH, TWO, "allreduce", "hierarchical over nccl", "needs transport='cuda-ipc'"),
        (BOTH, TWO, "allreduce", "ring over cuda-ipc", "use 'hierarchical', "),
        (BOTH, TWO, "broadcast", "over cuda-ipc", "stays on one host; use 'nccl' or 'host'"),
    ],
)
def test_what_is_refused(facts: DeviceFacts, hosts: Any, call: str, forced: str, text: str) -> None:
    """What the machine or the hosts lack is the transport's error, all else is the argument's."""
    collective, _, unknown = call.partition(" ")
    algorithm, _, transport = f" {forced} ".partition(" over ")
    error = TransportError if "is missing" in text or "is refused" in text or "use '" in text else InvalidArgumentError
    with pytest.raises(error, match=text):
        planner(facts, hosts).choose(
            collective,
            1024,
            native=not unknown,
            algorithm=algorithm.strip() or None,
            transport=transport.strip() or None,
        )


def test_the_environment_forces_a_transport_unless_the_call_does() -> None:
    by_host = planner(BOTH, transport="host")
    assert by_host.choose("allreduce", 64 * MIB, native=True).transport == "host"
    assert by_host.choose("allreduce", 64 * MIB, native=True, transport="auto").transport == "host"
    assert by_host.choose("allreduce", 64 * MIB, native=True, transport="nccl").transport == "nccl"
    with pytest.raises(InvalidArgumentError, match="but the transport is host"):
        by_host.choose("allreduce", 64 * MIB, native=True, algorithm="native")


def test_what_was_learnt_changes_the_choice_for_tiny_tensors() -> None:
    learning = planner(BOTH)
    assert learning.choose("allreduce", 512, native=True).transport == "cuda-ipc"
    learning.learn(512)
    assert learning.choose("allreduce", 512, native=True) == DeviceChoice("auto", "host")
    assert learning.choose("allreduce", 513, native=True).transport == "cuda-ipc"
    assert learning.choose("allreduce", 512, native=True, algorithm="direct").transport == "cuda-ipc"


@pytest.mark.parametrize(
    ("collective", "nbytes", "algorithm", "transport", "segments", "pipelined"),
    [
        ("allreduce", 16 * MIB, "ring", "nccl", 2, True),
        ("allreduce", 16 * MIB - 4, "ring", "nccl", 1, False),
        ("reducescatter", 16 * MIB, "ring", "nccl", 2, True),
        ("allreduce", 64 * MIB, "ring", "cuda-ipc", 1, False),
        ("allreduce", 64 * MIB, "native", "nccl", 1, False),
        ("allreduce", 64 * MIB, "direct", "nccl", 1, False),
        ("broadcast", 3 * MIB, "ring", "nccl", 1, False),
        ("broadcast", 20 * MIB, "ring", "nccl", 5, False),
        ("broadcast", 4096 * MIB, "ring", "nccl", 16, False),
        ("allgather", 64 * MIB, "ring", "nccl", 1, False),
    ],
)
def test_segments(collective: str, nbytes: int, algorithm: str, transport: str, segments: int, pipelined: bool) -> None:
    choice = planner(BOTH).choose(collective, nbytes, native=True, algorithm=algorithm, transport=transport)
    assert choice == DeviceChoice(algorithm, transport, segments, pipelined)
