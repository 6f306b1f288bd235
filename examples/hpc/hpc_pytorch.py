"""A training as they are run on clusters, in seven blocks, with PyTorch.

    mpirun -n 2 python examples/hpc/hpc_pytorch.py
    srun -n 64 python examples/hpc/hpc_pytorch.py --global-batch-size 1024

Whatever the number of ranks, they work on the same batches and so come to the same model, to rounding; only the time
differs. The digits are scikit-learn's (1,797 pictures of 8 x 8 pixels), so nothing is downloaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from time import perf_counter

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import collectives.torch as hvd

SIZE = 1408
"""Pictures to train with; the rest is to test with."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="PyTorch on a cluster", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--global-batch-size", type=int, default=64, metavar="N", help="pictures in a batch of all ranks together"
    )
    parser.add_argument("--epochs", type=int, default=10, metavar="N", help="epochs to train")
    parser.add_argument("--lr", type=float, default=0.05, metavar="LR", help="learning rate, for the global batch")
    parser.add_argument("--seed", type=int, default=42, metavar="S", help="random seed")
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    return parser.parse_args()


class Shard:
    """This rank's part of every batch, in another order in each epoch; the parts of all ranks make the batch."""

    def __init__(self, pictures: torch.Tensor, labels: torch.Tensor, batch_size: int) -> None:
        self.pictures, self.labels, self.batch_size = pictures, labels, batch_size

    def epoch(self, number: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = np.random.default_rng(number).permutation(len(self.labels))
        for begin in range(0, len(order) - self.batch_size + 1, self.batch_size):
            mine = order[begin : begin + self.batch_size][hvd.rank() :: hvd.size()]
            yield self.pictures[mine], self.labels[mine]


def new_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ELU(),
        nn.Conv2d(16, 32, kernel_size=3),
        nn.ELU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 3 * 3, 64),
        nn.ELU(),
        nn.Linear(64, 10),
    )


def log(text: str) -> None:
    if hvd.rank() == 0:
        print(text, flush=True)


def main() -> nn.Module:
    """Train; returns the model."""
    args = arguments()

    # 1. Initialise: who am I, and how many are we?
    hvd.init()

    # 2. Adapt the batch of a rank to that of all ranks, which decides what is learned.
    local_batch_size, left = divmod(args.global_batch_size, hvd.size())
    if left:
        raise SystemExit(f"--global-batch-size {args.global_batch_size} cannot be divided by {hvd.size()} ranks")
    log(f"{hvd.size()} ranks on {hvd.cross_size()} hosts, {local_batch_size} of {args.global_batch_size} pictures each")

    # 3. Pin the accelerator: one for each rank of a host.
    device = torch.device("cpu")
    if torch.cuda.is_available() and not args.no_cuda:
        device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)

    # 4. Shard the data.
    data, target = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(target))
    pictures = torch.tensor(data[order] / 16, dtype=torch.float32, device=device).reshape(-1, 1, 8, 8)
    labels = torch.tensor(target[order], device=device)
    shard = Shard(pictures[:SIZE], labels[:SIZE], args.global_batch_size)

    # 5. Build the model and its optimizer, alike on every rank.
    torch.manual_seed(args.seed)
    model = new_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    # 6. Train, and take the time; the first epoch, in which plans are made and libraries loaded, does not count.
    hvd.barrier()
    begin, seen = perf_counter(), 0
    for epoch in range(args.epochs):
        if epoch == 1:
            hvd.barrier()
            begin, seen = perf_counter(), 0
        for batch, target in shard.epoch(epoch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch), target)
            loss.backward()
            optimizer.step()
            seen += args.global_batch_size
        log(f"Epoch {epoch + 1}/{args.epochs}\tLoss: {loss.item():.4f}")
    if device.type == "cuda":
        torch.cuda.synchronize()  # what was started is not yet done
    hvd.barrier()
    seconds = perf_counter() - begin

    # 7. Evaluate: how fast, how good? Each rank tests its part of the pictures.
    with torch.no_grad():
        guesses = model(pictures[SIZE + hvd.rank() :: hvd.size()]).argmax(dim=1)
    right = (guesses == labels[SIZE + hvd.rank() :: hvd.size()]).sum()
    accuracy = hvd.allreduce(right, op=hvd.Sum, name="right").item() / len(labels[SIZE:])
    log(f"Time to train: {seconds:.2f} s")
    log(f"Throughput: {seen / seconds:.1f} images/s")
    log(f"Test accuracy: {100 * accuracy:.2f}%")
    hvd.check_consistency(model.state_dict())
    log("All ranks hold the same parameters")
    return model


if __name__ == "__main__":
    main()
