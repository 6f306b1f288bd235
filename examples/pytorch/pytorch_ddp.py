"""DistributedDataParallel over the backend "collectives" of torch.distributed.

    collectivesrun -np 2 python examples/pytorch/pytorch_ddp.py
    torchrun --nproc-per-node 2 examples/pytorch/pytorch_ddp.py --backend gloo
    collectivesrun -np 2 python examples/pytorch/pytorch_ddp.py --hook fp16 --zero --uneven
    collectivesrun -np 2 python examples/pytorch/pytorch_ddp.py --checkpoint ./ddp.pth.tar

A program for gloo or NCCL names another backend, and nothing else changes. The network learns the labels that a random
matrix gives to random numbers. With ``--checkpoint`` it goes on where the file ends, and comes to the same parameters
as if it had never stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

FEATURES, LABELS = 32, 8


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="PyTorch DDP example", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--backend", default="collectives", help="of torch.distributed: collectives, gloo or nccl")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="rows in a batch of one rank")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="steps to train, those of a file included")
    parser.add_argument("--lr", type=float, default=0.01, metavar="LR", help="learning rate")
    parser.add_argument(
        "--batches-per-allreduce", type=int, default=1, metavar="N", help="batches whose gradients travel together"
    )
    parser.add_argument("--hook", choices=["fp16", "powersgd"], help="how gradients are compressed")
    parser.add_argument("--zero", action="store_true", help="divide the optimizer's state among the ranks")
    parser.add_argument("--uneven", action="store_true", help="give each rank a step more than the one before it")
    parser.add_argument("--checkpoint", metavar="PATH", help="resume from this file, and write it at the end")
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    parser.add_argument("--seed", type=int, default=42, metavar="S", help="random seed")
    args = parser.parse_args()
    if args.uneven and args.zero and args.batches_per_allreduce > 1:
        parser.error(
            "a rank without batches steps a divided optimizer at every batch of the others: with --uneven and "
            "--zero each batch needs its own all-reduce"
        )
    return args


def batch_of(args: argparse.Namespace, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (n, 32) and their labels (n,); others for every rank and number, whether or not the training was resumed."""
    rules = torch.randn(FEATURES, LABELS, generator=torch.Generator().manual_seed(args.seed))
    draw = torch.Generator().manual_seed(args.seed + 1 + number * dist.get_world_size() + dist.get_rank())
    rows = torch.randn(args.batch_size, FEATURES, generator=draw)
    return rows, (rows @ rules).argmax(dim=1)


def check_consistency(parameters: Any) -> None:
    """Raise an error if this rank's parameters differ from rank 0's in a bit."""
    own = nn.utils.parameters_to_vector(parameters).detach()
    first = own.clone()
    dist.broadcast(first, 0)
    if not torch.equal(own, first):
        raise RuntimeError(f"rank {dist.get_rank()} does not hold the parameters of rank 0")


def main() -> None:
    args = arguments()
    cuda = not args.no_cuda and torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()) if cuda else None
    torch.set_num_threads(1)  # or the ranks of one host take the cores from each other
    torch.manual_seed(args.seed)
    dist.init_process_group(args.backend)
    rank = dist.get_rank()

    network = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, LABELS)).to(device)
    model = DistributedDataParallel(network)
    if args.hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif args.hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=10)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer: Any
    if args.zero:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=args.lr)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    done = 0
    if args.checkpoint and os.path.exists(args.checkpoint):
        saved = torch.load(args.checkpoint, map_location=device, weights_only=True)
        network.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["steps"]
        if rank == 0:
            print(f"Resuming after step {done} from {args.checkpoint}", flush=True)

    steps = range(done, args.steps + (rank if args.uneven else 0))
    with Join([model, *([optimizer] if args.zero else [])], enable=args.uneven):
        for step in steps:
            optimizer.zero_grad()
            for part in range(args.batches_per_allreduce):
                is_last = part == args.batches_per_allreduce - 1
                rows, labels = batch_of(args, step * args.batches_per_allreduce + part)
                with contextlib.nullcontext() if is_last else model.no_sync():
                    loss = F.cross_entropy(model(rows.to(device)), labels.to(device)) / args.batches_per_allreduce
                    loss.backward()
            optimizer.step()

    with torch.no_grad():
        rows, labels = batch_of(args, -1)
        right = (network(rows.to(device)).argmax(dim=1) == labels.to(device)).float().mean()
    dist.all_reduce(right)
    if args.checkpoint:
        if args.zero:
            optimizer.consolidate_state_dict(to=0)
        if rank == 0:
            saved = {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "steps": args.steps}
            torch.save(saved, args.checkpoint)
    check_consistency(model.parameters())
    if rank == 0:
        print(f"Accuracy: {100 * right.item() / dist.get_world_size():.2f}%")
        print("All ranks hold the same parameters", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
