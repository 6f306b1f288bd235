"""Models that are divided among the ranks: tensor parallelism, or a pipeline, times data parallelism.

    collectivesrun -np 2 python examples/pytorch/pytorch_parallel.py
    collectivesrun -np 4 python examples/pytorch/pytorch_parallel.py
    collectivesrun -np 2 python examples/pytorch/pytorch_parallel.py --pipeline

``--divide`` ranks share a model, each matrix of it or its layers one after the other; groups of so many see different
data. The model learns a random matrix, made nonlinear.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

WIDTH = 32


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="PyTorch model parallelism example", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--backend", default="collectives", help="of torch.distributed: collectives, gloo or nccl")
    parser.add_argument("--divide", type=int, default=2, metavar="N", help="ranks that share a model")
    parser.add_argument("--pipeline", action="store_true", help="give each of these ranks layers of its own")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="rows in a batch of one model")
    parser.add_argument("--microbatches", type=int, default=4, metavar="N", help="parts of a batch in the pipeline")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="steps to train")
    parser.add_argument("--lr", type=float, default=0.01, metavar="LR", help="learning rate")
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    parser.add_argument("--seed", type=int, default=42, metavar="S", help="random seed")
    return parser.parse_args()


def batch_of(args: argparse.Namespace, step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (n, 32) and what the model is to make of them (n, 32)."""
    matrix = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(args.seed)) / WIDTH**0.5
    rows = torch.randn(
        args.batch_size, WIDTH, generator=torch.Generator().manual_seed(args.seed + step * 100 + replica)
    )
    return rows, torch.tanh(rows @ matrix)


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class TensorParallel:
    """Every matrix divided among the ranks of a model, and what each holds of it among the models, by FSDP."""

    def __init__(self, args: argparse.Namespace, mesh: DeviceMesh) -> None:
        self.model = nn.Sequential(*(block() for _ in range(args.divide)), nn.Tanh()).to(mesh.device_type)
        plan: dict[str, ParallelStyle] = {}
        for number in range(args.divide):
            plan |= {f"{number}.0": ColwiseParallel(), f"{number}.2": RowwiseParallel()}
        parallelize_module(self.model, mesh["model"], plan)
        fully_shard(self.model, mesh=mesh["data"])

    def step(self, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(self.model(rows), targets)
        loss.backward()
        return loss.detach()


class Pipeline:
    """A block on each rank of a model. All models' gradients are averaged."""

    def __init__(self, args: argparse.Namespace, mesh: DeviceMesh) -> None:
        self.copies = mesh.get_group("data")
        self.number, self.last = mesh.get_local_rank("model"), args.divide - 1
        self.model = [block() for _ in range(args.divide)][self.number].to(mesh.device_type)
        device = next(self.model.parameters()).device
        stage = PipelineStage(self.model, self.number, args.divide, device, group=mesh.get_group("model"))
        self.schedule = ScheduleGPipe(stage, args.microbatches, loss_fn=F.mse_loss)

    def step(self, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        further: dict[str, Any] = {"target": targets, "losses": losses} if self.number == self.last else {}
        self.schedule.step(*([rows] if self.number == 0 else []), **further)
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=self.copies)
            parameter.grad.div_(dist.get_world_size(self.copies))
        return torch.stack(losses).mean().detach() if losses else torch.zeros((), device=rows.device)


def check_consistency(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Raise an error if this rank's parameters, once gathered, differ in a bit from those of the group's first rank."""
    for name, parameter in model.named_parameters():
        own = parameter.full_tensor().detach() if isinstance(parameter, DTensor) else parameter.detach()
        first = own.clone()
        dist.broadcast(first, dist.get_global_rank(group, 0) if group is not None else 0, group=group)
        if not torch.equal(own, first):
            raise RuntimeError(f"rank {dist.get_rank()} does not hold {name} of the first rank")


def main() -> None:
    args = arguments()
    cuda = not args.no_cuda and torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    device = torch.device("cuda" if cuda else "cpu")
    torch.set_num_threads(1)  # or the ranks of one host take the cores from each other
    torch.manual_seed(args.seed)
    dist.init_process_group(args.backend)
    models, rest = divmod(dist.get_world_size(), args.divide)
    if rest:
        raise SystemExit(f"--divide: expected a divisor of {dist.get_world_size()} ranks, got {args.divide}")
    mesh = init_device_mesh(device.type, (models, args.divide), mesh_dim_names=("data", "model"))

    divided = (Pipeline if args.pipeline else TensorParallel)(args, mesh)
    optimizer = torch.optim.Adam(divided.model.parameters(), lr=args.lr)
    for step in range(args.steps):
        optimizer.zero_grad()
        loss = divided.step(*(part.to(device) for part in batch_of(args, step, mesh.get_local_rank("data"))))
        optimizer.step()
        if step % 50 == 0 or step == args.steps - 1:
            dist.reduce(loss, 0)
            if dist.get_rank() == 0:
                print(
                    f"Step: {step}\tLoss: {loss.item() / (models if args.pipeline else dist.get_world_size()):.4f}",
                    flush=True,
                )

    check_consistency(divided.model, divided.copies if isinstance(divided, Pipeline) else None)
    dist.barrier()
    if dist.get_rank() == 0:
        print("All ranks hold the same parameters", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
