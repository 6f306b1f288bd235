"""The others in the race, each called as its users call it: mpi4py's collectives and torch.distributed's gloo on the
CPU; on a GPU torch.distributed over NCCL, and CuPy's own cupyx.distributed. (NCCL itself is one of our planner's
choices, and called through us. The prototype and plain sockets have files of their own.)

What a library cannot do for a row raises Unavailable.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.prototype import Prototype
from benchmarks.sockets import Sockets
from collectives.tools.bench import contest
from collectives.tools.bench.cli import Settings
from collectives.tools.bench.collective import Case, Collective, Forced, Result, Unavailable
from collectives.tools.bench.device import HOST, Cuda, Memory
from collectives.tools.bench.ranks import Ranks

PEERS = {"cpu": ("mpi", "gloo", "prototype", "sockets"), "cuda": ("nccl", "torch", "cupyx")}
"""Who there is, by ``--device``."""

NATIVE: Forced = {"algorithm": "native", "transport": "nccl"}
"""How the peer ``nccl`` is asked for: NCCL's own collective, through the communicator that our rings use."""

_TYPECODES = "bhilqBHILQfdFD"
"""NumPy's characters of the dtypes that every MPI has."""


def fills(work: Any, call: Callable[..., Any], *arguments: Any) -> Result:
    """``call(*arguments)``, which leaves this rank's result in ``work``."""

    def run() -> Any:
        call(*arguments)
        return work

    return run


class PeersCalls(Collective):
    """How the peers call one collective."""

    def mpi(self, peer: Any, case: Case, mode: str) -> Result:
        raise NotImplementedError

    def torch(self, peer: Any, case: Case, mode: str) -> Result:
        """torch.distributed's call, over gloo or NCCL."""
        raise NotImplementedError

    def cupyx(self, peer: Any, case: Case, mode: str) -> Result:
        raise NotImplementedError

    def by_itself(self, peer: Any, case: Case, mode: str) -> Result:
        """The call of a peer that is a program of its own: the prototype, plain sockets."""
        raise Unavailable(f"{peer.name}: all-reduce only")


class Mpi:
    """mpi4py's upper-case methods on COMM_WORLD, over whichever MPI runs the ranks."""

    name = calls = "mpi"

    def __init__(self) -> None:
        from mpi4py import MPI

        self.comm: Any = MPI.COMM_WORLD
        self.in_place: Any = MPI.IN_PLACE
        self._operations = {"sum": MPI.SUM, "avg": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}

    def operation(self, case: Case) -> Any:
        """The MPI reduction for this row."""
        # Half precision is in some MPI libraries and not in others: trying it tells.
        if case.dtype.char not in _TYPECODES + "e" or (case.dtype.kind == "c" and case.op in ("min", "max")):
            raise Unavailable(f"mpi: no {case.op} of {case.dtype.name}")
        if case.op == "avg" and case.dtype.kind in "ui":
            raise Unavailable(f"mpi: no average of {case.dtype.name}")
        return self._operations[case.op]

    def plain(self, array: Any) -> Any:
        """The same memory as a dtype that MPI can move: a dtype that it does not know travels as bytes."""
        return array if array.dtype.char in _TYPECODES else array.view(np.uint8)

    def averaged(self, case: Case, call: Result) -> Result:
        """MPI has no average: the sum, then a division in place."""
        if case.op != "avg":
            return call
        size = case.dtype.type(case.size)

        def average() -> Any:
            result = call()
            np.divide(result, size, out=result)
            return result

        return average

    def join(self, ranks: Ranks) -> None:
        """The ranks are connected already; unavailable where they are without MPI."""
        if ranks.size > 1 and ranks.comm is None:
            raise Unavailable("mpi: the ranks were started without MPI")

    def close(self) -> None:
        """Nothing: MPI belongs to everybody."""


class Torch:
    """torch.distributed over gloo, one thread per rank for the arithmetic. The ranks exchange the address."""

    name = backend = "gloo"
    calls = "torch"

    def __init__(self) -> None:
        import torch
        import torch.distributed as distributed

        torch.set_num_threads(1)
        self.torch: Any = torch
        self.distributed: Any = distributed
        # Renamed in torch 2.13, where the older names warn.
        self.all_gather: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
        self.reduce_scatter: Any = (
            getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
        )
        reduction = distributed.ReduceOp
        self._operations = {"sum": reduction.SUM, "avg": reduction.SUM, "prod": reduction.PRODUCT}
        self._operations |= {"min": reduction.MIN, "max": reduction.MAX}

    def join(self, ranks: Ranks) -> None:
        """Connect the ranks; rank 0 listens on a port that the system chooses."""
        store = None
        address: tuple[str, int] = ("", 0)
        if ranks.rank == 0:
            host = common.address(ranks)
            store = self.distributed.TCPStore(host, 0, ranks.size, is_master=True, wait_for_workers=False)
            address = (host, store.port)
        address = ranks.gather(address)[0]
        if store is None:
            store = self.distributed.TCPStore(*address, ranks.size, is_master=False)
        self.distributed.init_process_group(self.backend, store=store, rank=ranks.rank, world_size=ranks.size)

    def operation(self, case: Case) -> Any:
        """The reduction for this row; unavailable where the backend would need another dtype."""
        if case.dtype.kind == "c" or (case.op == "avg" and case.dtype.kind in "ui"):
            raise Unavailable(f"{self.name}: no {case.op} of {case.dtype.name}")
        return self._operations[case.op]

    def tensor(self, array: Any) -> Any:
        """The same memory as a tensor."""
        try:
            if array.dtype.name == "bfloat16":
                return self.wrapped(array.view(np.int16)).view(self.torch.bfloat16)
            return self.wrapped(array)
        except TypeError as error:
            raise Unavailable(f"{self.name}: {error}") from None

    def wrapped(self, array: Any) -> Any:
        """torch's view of an array."""
        return self.torch.from_numpy(array)

    def averaged(self, case: Case, tensor: Any, call: Result) -> Result:
        """No average is taken for granted: the sum, then a division in place."""
        if case.op != "avg":
            return call

        def average() -> Any:
            result = call()
            tensor.div_(case.size)
            return result

        return average

    def close(self) -> None:
        """Disconnect the ranks."""
        self.distributed.destroy_process_group()


class TorchNccl(Torch):
    """torch.distributed over NCCL, on the same GPU arrays and the same stream as ours."""

    name, backend = "torch", "nccl"

    def join(self, ranks: Ranks) -> None:
        """Connect the ranks, on the device that the arrays are on."""
        self.torch.cuda.set_device(importlib.import_module("cupy").cuda.Device().id)
        super().join(ranks)

    def wrapped(self, array: Any) -> Any:
        return self.torch.as_tensor(array, device=f"cuda:{array.device.id}")


class Cupyx:
    """CuPy's NCCLBackend; its rendezvous goes through MPI."""

    name = calls = "cupyx"

    def join(self, ranks: Ranks) -> None:
        """Connect the ranks."""
        distributed = importlib.import_module("cupyx.distributed")
        self.backend: Any = distributed.init_process_group(ranks.size, ranks.rank, use_mpi=True)

    def operation(self, case: Case) -> str:
        """The reduction's name for this row."""
        if case.op == "avg":
            raise Unavailable("cupyx: no avg")
        self.plain(case.send)
        return case.op

    def plain(self, array: Any) -> Any:
        """The array, if the backend takes its dtype."""
        if array.dtype.char not in "bBiIlLqQefdFD":
            raise Unavailable(f"cupyx: no {array.dtype.name}")
        return array

    def close(self) -> None:
        """Let go of the communicator before the process ends."""
        self.backend._comm.destroy()


Peer = Mpi | Torch | Cupyx | Prototype | Sockets

_CLASSES: dict[str, type[Peer]] = {
    "mpi": Mpi,
    "gloo": Torch,
    "torch": TorchNccl,
    "cupyx": Cupyx,
    "prototype": Prototype,
    "sockets": Sockets,
}


def connect(name: str, ranks: Ranks, memory: Memory = HOST) -> Peer | str:
    """Start a peer on all ranks at once; where that fails on any rank, the reason, the same on every rank."""
    peer: Peer | None = None
    reason = None
    try:
        shared = _why_no_nccl(memory.gpus, ranks.local_size) if isinstance(memory, Cuda) else None
        if shared:
            reason = f"{name}: {shared}"
        else:
            peer = _CLASSES[name]()
    except (ImportError, RuntimeError) as error:
        reason = f"{name}: not installed here: {error}"
    reason = ranks.agree(reason)
    if reason or peer is None:
        return reason or ""
    try:
        peer.join(ranks)
    except Unavailable as error:
        reason = str(error)
    except Exception as error:
        # Whatever NCCL refuses; the ranks agree on one reason.
        reason = f"{name}: {type(error).__name__}: {error}"
    return ranks.agree(reason) or peer


@contextmanager
def connect_all(names: Iterable[str], ranks: Ranks, memory: Memory = HOST) -> Iterator[dict[str, Peer]]:
    """Those of the peers that can be started; rank 0 prints why another cannot."""
    with ExitStack() as stack:
        peers: dict[str, Peer] = {}
        for name in dict.fromkeys(names):
            peer = connect(name, ranks, memory)
            if isinstance(peer, str):
                ranks.say(f"# {peer}")
            else:
                stack.callback(peer.close)
                peers[name] = peer
        yield peers


@contextmanager
def prepared(
    collective: PeersCalls, settings: Settings, ranks: Ranks, memory: Memory = HOST
) -> Iterator[dict[str, contest.Peer]]:
    """The settings' peers that can be started, ready to take part; ``nccl`` needs no start."""
    with connect_all([name for name in settings.peers if name != "nccl"], ranks, memory) as peers:
        ready = {
            name: contest.Peer(partial(getattr(collective, peer.calls), peer), isinstance(peer, Prototype))
            for name, peer in peers.items()
        }
        if "nccl" in settings.peers:
            ready["nccl"] = contest.Peer(partial(collective.ours, NATIVE))
        yield ready


def _why_no_nccl(gpus: int, local_size: int) -> str | None:
    """Why NCCL cannot connect this many ranks of the host, or None: it wants one GPU each, or its mode without."""
    nccl = importlib.import_module("cupy.cuda.nccl")
    if not nccl.available:
        return "CuPy finds no NCCL: pip install nvidia-nccl-cu13 (or -cu12)"
    if local_size <= gpus:
        return None
    version = nccl.get_version()
    if version >= 23000 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return None
    return f"{local_size} ranks on {gpus} GPU: needs NCCL 2.30 (found {version}) and NCCL_MULTI_RANK_GPU_ENABLE=1"
