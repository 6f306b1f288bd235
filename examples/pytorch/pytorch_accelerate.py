"""Accelerate over the backend "collectives" of torch.distributed, with gradients of several batches in one all-reduce.

    collectivesrun -np 2 python examples/pytorch/pytorch_accelerate.py
    torchrun --nproc-per-node 2 examples/pytorch/pytorch_accelerate.py --use-mixed-precision

The process group is made first, and Accelerate keeps it. ``InitProcessGroupKwargs(backend="collectives")`` does the
same on GPUs only: on CPUs Accelerate refuses whatever is not gloo. The network learns the labels that a random matrix
gives to random numbers.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import broadcast, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FEATURES, LABELS = 32, 8


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Accelerate example", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--backend", default="collectives", help="of torch.distributed: collectives, gloo or nccl")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="rows in a batch of one rank")
    parser.add_argument("--epochs", type=int, default=5, metavar="N", help="epochs to train")
    parser.add_argument("--lr", type=float, default=0.01, metavar="LR", help="learning rate")
    parser.add_argument(
        "--batches-per-allreduce", type=int, default=2, metavar="N", help="batches whose gradients travel together"
    )
    parser.add_argument("--clip", type=float, default=1.0, metavar="NORM", help="largest norm of the gradients")
    parser.add_argument("--use-mixed-precision", action="store_true", help="compute in bfloat16 where that is safe")
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    parser.add_argument("--seed", type=int, default=42, metavar="S", help="random seed")
    return parser.parse_args()


def main() -> nn.Module:
    args = arguments()
    torch.set_num_threads(1)  # or the ranks of one host take the cores from each other
    cuda = not args.no_cuda and torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group(args.backend)
    accelerator = Accelerator(
        cpu=not cuda,
        mixed_precision="bf16" if args.use_mixed_precision else "no",
        gradient_accumulation_steps=args.batches_per_allreduce,
    )
    set_seed(args.seed)
    rows = torch.randn(4096, FEATURES)
    data = TensorDataset(rows, (rows @ torch.randn(FEATURES, LABELS)).argmax(dim=1))
    train, test = torch.utils.data.random_split(data, [3584, 512])
    network = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, LABELS))
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        network,
        torch.optim.Adam(network.parameters(), lr=args.lr),
        DataLoader(train, args.batch_size, shuffle=True),
        DataLoader(test, args.batch_size),
    )

    for epoch in range(args.epochs):
        model.train()
        for batch, labels in train_loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(batch), labels))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.clip)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        right = 0
        with torch.no_grad():
            for batch, labels in test_loader:
                found, labels = accelerator.gather_for_metrics((model(batch).argmax(dim=1), labels))
                right += int((found == labels).sum())
        accelerator.print(f"Epoch: {epoch}\tAccuracy: {100 * right / len(test):.2f}%", flush=True)

    own = nn.utils.parameters_to_vector(network.parameters()).detach()
    if not torch.equal(own, broadcast(own.clone())):
        raise RuntimeError(f"rank {accelerator.process_index} does not hold the parameters of rank 0")
    accelerator.print("All ranks hold the same parameters", flush=True)
    accelerator.end_training()
    return network


if __name__ == "__main__":
    main()
