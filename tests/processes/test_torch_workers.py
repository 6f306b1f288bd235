"""Data loaders with worker processes beside a training, and ranks that fail in the middle of one: under real mpirun."""

from __future__ import annotations

import time

import pytest

from tests.support.launching.mpirun import run_ranks

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(240)

PREAMBLE = """
import multiprocessing, os, signal, sys, tempfile, time
import torch
from torch.utils.data import DataLoader, Dataset
import collectives
import collectives.torch as hvd

torch.set_num_threads(1)
WORKERS = 2 if "spawn" not in sys.argv else 1  # each of these imports torch anew

class Samples(Dataset):
    # What a worker does with sample 7: "", "kill" or "call".
    def __init__(self, rank, trouble="", result=None):
        self.rank, self.trouble, self.result = rank, trouble, result
    def __len__(self):
        return 16
    def __getitem__(self, i):
        self.result = None  # a result of the engine may end in a forked child
        if i == 7 and self.trouble == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if i == 7 and self.trouble == "call":
            hvd.allreduce(torch.ones(3))
        return torch.full((3,), i + 0.125 * self.rank), torch.tensor([float(i % 3)])

def loader(method, persistent=False, **options):
    workers = dict(num_workers=WORKERS, multiprocessing_context=method, persistent_workers=persistent) if method else {}
    return DataLoader(Samples(hvd.rank(), **options), batch_size=2, **workers)
"""

TRAINING = """
def train(batches):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for epoch in range(3):
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            (model(x / 16) - y).square().mean().backward()
            optimizer.step()
            if epoch == 1 and step == 2:
                break  # the iterator is dropped half way
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

if __name__ == "__main__":
    hvd.init()
    expected = train(loader(None))
    for persistent in [False, True] if sys.argv[1] == "fork" else [True]:
        batches = loader(sys.argv[1], persistent)
        found = train(batches)
        assert torch.equal(found, expected), (found, expected)
        assert torch.equal(hvd.broadcast(found, 0), found)
        children = multiprocessing.active_children()
        assert len(children) == (WORKERS if persistent else 0), children
    print("trained")  # and the persistent workers are there when the program ends
"""


@pytest.mark.parametrize("method", ("fork", "spawn"))
def test_training_beside_workers(method: str) -> None:
    result = run_ranks(2, PREAMBLE + TRAINING, args=[method], timeout=200)
    assert all("trained" in output for output in result.ranks), str(result)


def test_workers_are_forked_while_operations_are_in_flight() -> None:
    program = """
hvd.init()
rank, size = hvd.rank(), hvd.size()
pooled = hvd.allreduce(torch.ones(1 << 19))
for round in range(8):
    tensors = [torch.full((20000,), float(rank)) for _ in range(30)]
    handles = [hvd.allreduce_async_(tensor, op=hvd.Sum, name=f"large {i}") for i, tensor in enumerate(tensors)]
    gathered = []
    for step, (x, y) in enumerate(loader("fork", result=pooled)):
        gathered.append(hvd.allgather_async(x, name=f"batch {step}"))
        if round % 3 == 0 and step == 1:
            break
    for handle in handles:
        assert hvd.synchronize(handle)[0] == size * (size - 1) / 2
    for step, handle in enumerate(gathered):
        rows = hvd.synchronize(handle)[:, 0].reshape(size, 2)
        assert rows.tolist() == [[2 * step + i + 0.125 * source for i in range(2)] for source in range(size)]
try:
    list(loader("fork", trouble="call"))
except collectives.ForkedProcessError as error:
    assert f"forked from rank {rank}" in str(error), error
    print("refused")
assert hvd.allreduce(pooled).mean() == 1
"""
    result = run_ranks(3, PREAMBLE + program, timeout=120)
    assert all("refused" in output for output in result.ranks), str(result)


def test_a_worker_that_is_killed_ends_its_rank_and_the_others() -> None:
    program = """
hvd.init()
for x, y in loader("fork", True, trouble="kill" if hvd.rank() == 1 else ""):
    hvd.allreduce(x)
while True:
    hvd.allreduce(torch.ones(3))
"""
    started = time.monotonic()
    result = run_ranks(2, PREAMBLE + program, timeout=100, expect=None)
    assert result.returncode != 0
    assert time.monotonic() - started < 60
    assert "worker" in result.ranks[1] and "RankFailedError" in result.ranks[0], str(result)


def test_a_worker_that_would_join_the_ranks_is_refused() -> None:
    program = """
hvd.init()  # not guarded: a worker that is started anew imports this script
if __name__ == "__main__":
    if hvd.rank() == 0:
        list(loader("spawn"))
    hvd.allreduce(torch.ones(3))
"""
    result = run_ranks(2, PREAMBLE + program, args=["spawn"], timeout=100, expect=1)
    assert "ForkedProcessError" in result.ranks[0] and "__main__" in result.ranks[0], str(result)


@pytest.mark.parametrize("static", (False, True))
def test_a_failure_ends_backward_of_the_others(static: bool) -> None:
    program = """
import torch.distributed as distributed
from collectives.torch.ddp import allreduce_hook

hvd.init()
rank = hvd.rank()
folder = collectives.broadcast_object(tempfile.mkdtemp() if rank == 0 else None, 0)
distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=hvd.size())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1), static_graph=sys.argv[1] == "True")
model.register_comm_hook(None, allreduce_hook)
for step in range(4):
    loss = model(torch.ones(2, 3)).sum()
    if step == 3:
        ready = os.path.join(folder, "ready")
        if rank == 1:
            while not os.path.exists(ready):  # a failure ends the call that a peer is in
                time.sleep(0.005)
            raise ValueError("the data is corrupt")
        open(ready, "w").close()
    try:
        loss.backward()
    except RuntimeError as error:
        assert step == 3 and "rank 1 has failed" in str(error) and "the data is corrupt" in str(error), error
        print("told")
        raise
"""
    result = run_ranks(2, PREAMBLE + program, args=[str(static)], timeout=100, expect=1)
    assert "told" in result.ranks[0], str(result)
