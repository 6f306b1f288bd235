"""The others in the race: mpi4py's collectives, and torch.distributed's gloo. Each is called as its users call it."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np

from benchmarks.collective import Case, Result, Unavailable
from benchmarks.ranks import Ranks

PEERS = ("mpi", "gloo")

_TYPECODES = "bhilqBHILQfdFD"
"""NumPy's characters of the dtypes that every MPI has."""


class Mpi:
    """mpi4py's upper-case methods on COMM_WORLD, over whichever MPI runs the ranks."""

    name = "mpi"

    def __init__(self) -> None:
        from mpi4py import MPI

        self.comm: Any = MPI.COMM_WORLD
        self.in_place: Any = MPI.IN_PLACE
        self._operations = {"sum": MPI.SUM, "avg": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}

    def operation(self, case: Case) -> Any:
        """The MPI reduction for this row.

        Raises:
            Unavailable: MPI has no such reduction for this dtype.
        """
        # Half precision is in some MPI libraries and not in others: trying it tells.
        if case.dtype.char not in _TYPECODES + "e" or (case.dtype.kind == "c" and case.op in ("min", "max")):
            raise Unavailable(f"mpi: no {case.op} of {case.dtype.name}")
        if case.op == "avg" and case.dtype.kind in "ui":
            raise Unavailable(f"mpi: no average of {case.dtype.name}")
        return self._operations[case.op]

    def plain(self, array: np.ndarray) -> np.ndarray:
        """The same memory as a dtype that MPI can move: a dtype that it does not know travels as bytes."""
        return array if array.dtype.char in _TYPECODES else array.view(np.uint8)

    def averaged(self, case: Case, call: Result) -> Result:
        """MPI has no average: the sum, then a division in place."""
        if case.op != "avg":
            return call
        size = case.dtype.type(case.size)

        def average() -> np.ndarray:
            result = call()
            np.divide(result, size, out=result)
            return result

        return average

    def join(self, ranks: Ranks) -> None:
        """Nothing: the ranks are connected already."""

    def close(self) -> None:
        """Nothing: MPI belongs to everybody."""


class Gloo:
    """torch.distributed over gloo, one thread per rank for the arithmetic. The rendezvous goes through MPI."""

    name = "gloo"

    def __init__(self) -> None:
        import torch
        import torch.distributed as distributed

        torch.set_num_threads(1)
        self.torch: Any = torch
        self.distributed: Any = distributed
        # Renamed in torch 2.13, where the older names warn.
        self.all_gather: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
        self.reduce_scatter: Any = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
        reduction = distributed.ReduceOp
        self._operations = {
            "sum": reduction.SUM,
            "avg": reduction.SUM,
            "prod": reduction.PRODUCT,
            "min": reduction.MIN,
            "max": reduction.MAX,
        }

    def join(self, ranks: Ranks) -> None:
        """Connect the ranks; rank 0 listens on a port that the system chooses."""
        store = None
        address: tuple[str, int] = ("", 0)
        if ranks.rank == 0:
            host = "127.0.0.1" if ranks.local_size == ranks.size else socket.gethostbyname(socket.gethostname())
            store = self.distributed.TCPStore(host, 0, ranks.size, is_master=True, wait_for_workers=False)
            address = (host, store.port)
        if ranks.comm is not None:
            address = ranks.comm.bcast(address)
        if store is None:
            store = self.distributed.TCPStore(*address, ranks.size, is_master=False)
        self.distributed.init_process_group("gloo", store=store, rank=ranks.rank, world_size=ranks.size)

    def operation(self, case: Case) -> Any:
        """The reduction for this row.

        Raises:
            Unavailable: gloo would need another dtype.
        """
        if case.dtype.kind == "c" or (case.op == "avg" and case.dtype.kind in "ui"):
            raise Unavailable(f"gloo: no {case.op} of {case.dtype.name}")
        return self._operations[case.op]

    def tensor(self, array: np.ndarray) -> Any:
        """The same memory as a tensor.

        Raises:
            Unavailable: torch has no such dtype.
        """
        try:
            if array.dtype.name == "bfloat16":
                return self.torch.from_numpy(array.view(np.int16)).view(self.torch.bfloat16)
            return self.torch.from_numpy(array)
        except TypeError as error:
            raise Unavailable(f"gloo: {error}") from None

    def averaged(self, case: Case, tensor: Any, call: Result) -> Result:
        """Gloo has no average: the sum, then a division in place."""
        if case.op != "avg":
            return call

        def average() -> np.ndarray:
            result = call()
            tensor.div_(case.size)
            return result

        return average

    def close(self) -> None:
        """Disconnect the ranks."""
        self.distributed.destroy_process_group()


def connect(name: str, ranks: Ranks) -> Mpi | Gloo | str:
    """Start a peer on all ranks at once; where that fails on any rank, the reason, the same on every rank."""
    peer: Mpi | Gloo | None = None
    reason = None
    try:
        peer = Mpi() if name == "mpi" else Gloo()
    except (ImportError, RuntimeError) as error:
        reason = f"{name}: not installed here: {error}"
    reason = ranks.agree(reason)
    if reason or peer is None:
        return reason or ""
    peer.join(ranks)
    return peer
