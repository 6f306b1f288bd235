"""The PyTorch adapter on a GPU: ``collectivesrun -np 2 python -m benchmarks.gpu.training``.

Every rank trains a model on its share of each batch, and a plain copy of it on the whole batch; both must end alike. So
must a `SyncBatchNorm` on shares and a ``BatchNorm`` on the whole, with their gradients. ``--device cpu`` runs the same
without a GPU.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import collectives
from benchmarks.gpu.figures import publish, torch_of
from collectives.tools.bench.ranks import session

_STEPS = 4
_ROWS = 6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    device = parser.parse_args().device
    with session() as ranks:
        torch_of(ranks, device)
        for name, check in CHECKS.items():
            check(device)
            ranks.barrier()
            if ranks.rank == 0:
                print(f"{name}: all right", flush=True)
        if ranks.rank == 0:
            publish([], checks=len(CHECKS))


def trains_alike(device: str, **options: Any) -> None:
    """Parameters of every way to travel: late, packed, grouped, in views, and sparse."""
    import torch

    import collectives.torch as hvd

    torch.manual_seed(1)
    model = _model().to(device)
    plain = copy.deepcopy(model)
    if hvd.rank():
        for param in model.parameters():
            param.data.zero_()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model.named_parameters(), **options
    )
    reference = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    tolerance = 2e-2 if "compression" in options else 1e-5
    for step in range(_STEPS):
        batch = torch.randint(0, 50, (hvd.size() * _ROWS,), generator=torch.Generator().manual_seed(step)).to(device)
        for net, tuner, rows in ((model, optimizer, batch[hvd.rank() :: hvd.size()]), (plain, reference, batch)):
            tuner.zero_grad()
            net(rows).square().mean().backward()
            tuner.step()
    for (name, ours), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance, msg=partial("{}: {}".format, name))
    hvd.check_consistency([param.detach().cpu() for param in model.parameters()])


def gradients_go_through(device: str) -> None:
    """Of every operation, for a loss that is the sum of the ranks' losses."""
    import torch

    import collectives.torch as hvd

    size, rank = hvd.size(), hvd.rank()
    factor = float(rank + 1)
    total = float(size * (size + 1) // 2)
    cases: list[tuple[Callable[[Any], Any], float]] = [
        (lambda x: hvd.allreduce(x, op=hvd.Sum), total),
        (lambda x: hvd.allreduce(x), total / size),
        (lambda x: hvd.allreduce(x, op=hvd.Max), total if rank == size - 1 else 0.0),
        (lambda x: hvd.allgather(x), total),
        (lambda x: hvd.broadcast(x, 0), total if rank == 0 else 0.0),
        (lambda x: hvd.grouped_allreduce([x, x], op=hvd.Sum)[1], total),
    ]
    for call, wanted in cases:
        leaf = torch.full((2 * size, 3), factor, device=device, requires_grad=True)
        (call(leaf) * factor).sum().backward()
        torch.testing.assert_close(leaf.grad, torch.full_like(leaf, wanted))


def batch_norm_over_all_ranks(device: str) -> None:
    """Outputs, gradients and running statistics."""
    import torch

    import collectives.torch as hvd

    torch.manual_seed(2)
    whole = torch.randn(hvd.size() * _ROWS, 4, 5, 5, device=device)
    weight = torch.randn_like(whole)
    rows = slice(hvd.rank() * _ROWS, (hvd.rank() + 1) * _ROWS)
    ours, reference = hvd.SyncBatchNorm(4).to(device), torch.nn.BatchNorm2d(4).to(device)
    share, everything = whole[rows].clone().requires_grad_(), whole.clone().requires_grad_()
    outputs, expected = ours(share), reference(everything)
    (outputs * weight[rows]).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(outputs, expected[rows], rtol=1e-4, atol=1e-4)
    assert everything.grad is not None
    torch.testing.assert_close(share.grad, everything.grad[rows], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(hvd.allreduce(ours.weight.grad, op=hvd.Sum), reference.weight.grad, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(ours.running_var, reference.running_var, rtol=1e-4, atol=1e-4)


def _model() -> Any:
    """Tiny, small, large and sparse parameters."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(50, 8, sparse=True)
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(8, 600), torch.nn.Tanh(), torch.nn.Linear(600, 600), torch.nn.Linear(600, 1)
            )

        def forward(self, rows: Any) -> Any:
            return self.layers(self.table(rows))

    return Model()


CHECKS: dict[str, Callable[[str], None]] = {
    "training": trains_alike,
    "training, gradients as views": lambda device: trains_alike(device, gradient_as_bucket_view=True),
    "training, sparse as dense, in groups": lambda device: trains_alike(device, sparse_as_dense=True, groups=2),
    "training, bfloat16 on the way": lambda device: trains_alike(
        device, compression=collectives.Compression.bf16, sparse_as_dense=True
    ),
    "gradients of operations": gradients_go_through,
    "batch normalisation": batch_norm_over_all_ranks,
}


if __name__ == "__main__":
    main()
