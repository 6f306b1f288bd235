"""Reading and writing the private memory of a process on the same host: Linux's cross-memory attach.

One system call copies from the peer's memory straight into this process's: no window, no second copy. The system allows
it to processes of the same user and, under Yama, only to descendants of the process named with
``prctl(PR_SET_PTRACER)``. Each rank names the launcher that all ranks descend from, which admits the ranks alone.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from collectives.base.errors import TransportError

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1).value


class _IoVector(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class DirectRead:
    """The two system calls, with their arguments' memory allocated once. Not thread-safe.

    Args:
        pids: the process of each rank; 0 for ranks on other hosts.

    Attributes:
        fetch, store: as of `base.MemoryTransport`; RankFailedError comes from ``explain``.

    Raises:
        TransportError: this system has no such calls.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self.explain: Callable[[int, bool], None] = lambda peer, gone: None
        """Called with a peer whose memory is inaccessible, and whether its process has ended; raises if the peer has
        failed."""
        self._pids = list(pids)
        self._local, self._remote = _IoVector(), _IoVector()
        try:
            # PyDLL keeps the interpreter lock: a call takes some 20 microseconds, and taking the lock back from a
            # thread that computes in Python can take 5 ms.
            library = ctypes.PyDLL(None, use_errno=True)
            self.fetch = self._mover(library.process_vm_readv, "read")
            self.store = self._mover(library.process_vm_writev, "write")
        except (OSError, AttributeError) as error:
            raise TransportError(f"this system cannot read the memory of other processes: {error} [N11]") from None

    def _mover(self, call: ctypes._NamedFuncPointer, verb: str) -> Callable[[int, int, int, int], None]:
        """What moves ``nbytes`` between the peer's memory at ``address`` and this rank's at ``own``: a closure, because
        it is called for every block."""
        vector, count = ctypes.c_void_p, ctypes.c_ulong
        call.restype, call.argtypes = ctypes.c_ssize_t, (ctypes.c_int, vector, count, vector, count, count)
        local, remote, pids, resume = self._local, self._remote, self._pids, self._continue
        local_at, remote_at = ctypes.addressof(local), ctypes.addressof(remote)

        def move(peer: int, address: int, own: int, nbytes: int) -> None:
            local.address, local.nbytes, remote.address, remote.nbytes = own, nbytes, address, nbytes
            transferred = call(pids[peer], local_at, 1, remote_at, 1, 0)
            if transferred != nbytes:
                resume(lambda: call(pids[peer], local_at, 1, remote_at, 1, 0), verb, peer, transferred)

        return move

    def _continue(self, call: Callable[[], int], verb: str, peer: int, transferred: int) -> None:
        """Continue after a partial transfer (a signal may cause one); raise after an error."""
        local, remote = self._local, self._remote
        while True:
            if transferred <= 0:
                code = ctypes.get_errno()
                if transferred < 0 and code == errno.EINTR:
                    transferred = 0
                else:
                    self.explain(peer, transferred < 0 and code == errno.ESRCH)
                    reason = os.strerror(code) if transferred < 0 else "nothing was transferred"
                    raise TransportError(
                        f"cannot {verb} {remote.nbytes} bytes of rank {peer}'s memory (process {self._pids[peer]}): "
                        f"{reason}; set COLLECTIVES_TRANSPORT=window on all ranks, which does not need this [N12]"
                    )
            local.address, remote.address = local.address + transferred, remote.address + transferred
            local.nbytes, remote.nbytes = local.nbytes - transferred, remote.nbytes - transferred
            if local.nbytes == 0:
                return
            transferred = call()


def ancestors(pid: int) -> list[int]:
    """The ancestors of a process, nearest first, as far as ``/proc`` shows them."""
    chain: list[int] = []
    while pid > 1:
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            break
        pid = int(text.rpartition(")")[2].split()[1])
        if pid > 0:
            chain.append(pid)
    return chain


def admit(chains: Sequence[Sequence[int]]) -> None:
    """Allow the ranks with these ancestors to access this process's memory, where Yama restricts that.

    Names their nearest common ancestor; if that is the system's first process, or there is none, every process of the
    user is admitted.
    """
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    try:
        restricted = scope.read_text().strip() == "1"
    except OSError:
        return
    if not restricted:
        return
    common = next(
        (pid for pid in chains[0] if pid > 1 and all(pid in chain for chain in chains[1:])), _PR_SET_PTRACER_ANY
    )
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(common), 0, 0, 0)
