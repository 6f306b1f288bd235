"""A convolutional network on handwritten digits: data-parallel training with checkpoints, in Horovod's manner.

    collectivesrun -np 2 python examples/pytorch/pytorch_mnist.py
    collectivesrun -np 2 python examples/pytorch/pytorch_mnist.py --checkpoint-format ./checkpoint-{epoch}.pth.tar
    python examples/pytorch/pytorch_mnist.py --num-proc 2

The digits are scikit-learn's (1,797 pictures of 8 x 8 pixels), so nothing is downloaded. Rank 0 writes a checkpoint
after every epoch; started again, the ranks go on after the last one, and end with the same parameters as if they had
never stopped.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import collectives.torch as hvd
from collectives import launch


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="PyTorch digits example", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="pictures in a batch of one rank")
    parser.add_argument("--test-batch-size", type=int, default=1000, metavar="N", help="the same for testing")
    parser.add_argument("--epochs", type=int, default=10, metavar="N", help="epochs to train")
    parser.add_argument("--lr", type=float, default=0.02, metavar="LR", help="learning rate of one rank")
    parser.add_argument("--momentum", type=float, default=0.9, metavar="M", help="SGD's momentum")
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    parser.add_argument("--seed", type=int, default=42, metavar="S", help="random seed")
    parser.add_argument(
        "--log-interval", type=int, default=10, metavar="N", help="batches between two lines of the log"
    )
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in half precision")
    parser.add_argument(
        "--use-mixed-precision", action="store_true", help="compute in half precision where that is safe"
    )
    parser.add_argument(
        "--use-adasum", action="store_true", help="combine gradients by Adasum instead of averaging them"
    )
    parser.add_argument(
        "--gradient-predivide-factor", type=float, default=1.0, help="divide by this before summing, by the rest after"
    )
    parser.add_argument(
        "--checkpoint-format", metavar="PATH", help="such as ./checkpoint-{epoch}.pth.tar; without it none is written"
    )
    parser.add_argument(
        "--num-proc", type=int, metavar="N", help="start this many ranks; not for use with collectivesrun"
    )
    parser.add_argument("--hosts", help="where --num-proc starts them, such as host1:2,host2:2")
    args = parser.parse_args()
    if args.use_adasum and args.use_mixed_precision:
        parser.error(
            "--use-mixed-precision unscales what all ranks have combined before the step, but Adasum combines in the "
            "step itself"
        )
    args.cuda = not args.no_cuda and torch.cuda.is_available()
    return args


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Pictures (n, 1, 8, 8) scaled to 0..1 and labels (n,), for training and for testing; the same on every rank."""
    pictures, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    data = torch.tensor(pictures, dtype=torch.float32).reshape(-1, 1, 8, 8)[order] / 16
    target = torch.tensor(labels, dtype=torch.int64)[order]
    return TensorDataset(data[:1437], target[:1437]), TensorDataset(data[1437:], target[1437:])


def new_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout2d(0.25),
        nn.Flatten(),
        nn.Linear(32 * 3 * 3, 64),
        nn.ReLU(),
        nn.Dropout(0.25),
        nn.Linear(64, 10),
    )


class Training:
    """A model, its optimizer and its data, on this rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device("cuda" if args.cuda else "cpu")
        train_set, test_set = digits()
        self.sampler: DistributedSampler[Any] = DistributedSampler(
            train_set, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed
        )
        self.train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=self.sampler)
        # Every picture once, whatever the number of ranks; a DistributedSampler would show some twice to make the parts
        # equal.
        self.test_loader = DataLoader(
            Subset(test_set, range(hvd.rank(), len(test_set), hvd.size())), batch_size=args.test_batch_size
        )

        self.model = new_model().to(self.device)
        # Averaging over more ranks makes steps surer, so that they may be longer; Adasum chooses their length by
        # itself.
        scale = 1 if args.use_adasum else hvd.size()
        self.optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=args.lr * scale, momentum=args.momentum),
            named_parameters=self.model.named_parameters(),
            compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
            op=hvd.Adasum if args.use_adasum else hvd.Average,
            gradient_predivide_factor=args.gradient_predivide_factor,
        )
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=args.use_mixed_precision)

    def resume(self) -> int:
        """Take up the last checkpoint that rank 0 finds, if any; returns the number of epochs done."""
        epoch = last_checkpoint(self.args) if hvd.rank() == 0 else 0
        epoch = int(hvd.broadcast(torch.tensor(epoch), root_rank=0, name="resume_from_epoch").item())
        if epoch and hvd.rank() == 0:
            path = self.args.checkpoint_format.format(epoch=epoch)
            checkpoint = torch.load(path, map_location=self.device, weights_only=True)
            self.model.load_state_dict(checkpoint["model"])
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            print(f"Resuming after epoch {epoch} from {path}", flush=True)
        # The other ranks need no file: they get everything from rank 0.
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(self.optimizer, root_rank=0)
        return epoch

    def save(self, epoch: int) -> None:
        """Write a checkpoint, on rank 0 only."""
        if hvd.rank() == 0 and self.args.checkpoint_format:
            path = self.args.checkpoint_format.format(epoch=epoch)
            torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, path + ".new")
            os.replace(path + ".new", path)  # so that no half-written file is ever resumed from

    def train(self, epoch: int) -> None:
        self.model.train()
        self.sampler.set_epoch(epoch)  # another order in every epoch
        # Dropout differs between the ranks, and does not depend on whether the training was resumed.
        torch.manual_seed(self.args.seed + epoch * hvd.size() + hvd.rank())
        for batch, (data, target) in enumerate(self.train_loader):
            data, target = data.to(self.device), target.to(self.device)
            self.optimizer.zero_grad()
            loss = self.scaled_step(data, target) if self.scaler.is_enabled() else self.step(data, target)
            if batch % self.args.log_interval == 0 and hvd.rank() == 0:
                done = batch * self.args.batch_size
                share = 100 * batch / len(self.train_loader)
                print(
                    f"Train Epoch: {epoch} [{done}/{len(self.sampler)} ({share:.0f}%)]\tLoss: {loss.item():.6f}",
                    flush=True,
                )

    def step(self, data: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(self.model(data), target)
        loss.backward()  # gradients are sent as soon as they are there
        self.optimizer.step()  # waits for the last of them
        return loss

    def scaled_step(self, data: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """A step in mixed precision: the loss is scaled up, so that small gradients do not vanish, and the gradients
        down again."""
        with torch.autocast(self.device.type):
            loss = F.cross_entropy(self.model(data), target)
        self.scaler.scale(loss).backward()
        self.optimizer.synchronize()  # the average must be there before it is unscaled
        self.scaler.unscale_(self.optimizer)
        with self.optimizer.skip_synchronize():
            self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def test(self) -> tuple[float, float]:
        """(mean loss, accuracy) over all test pictures, the same on every rank."""
        self.model.eval()
        sums = torch.zeros(3, dtype=torch.float64)
        with torch.no_grad():
            for data, target in self.test_loader:
                output, target = self.model(data.to(self.device)), target.to(self.device)
                loss = F.cross_entropy(output, target, reduction="sum").item()
                right = (output.argmax(dim=1) == target).sum().item()
                sums += torch.tensor([loss, right, len(target)], dtype=torch.float64)
        loss, right, count = hvd.allreduce(sums, op=hvd.Sum, name="test").tolist()
        return loss / count, right / count


def last_checkpoint(args: argparse.Namespace) -> int:
    """The last epoch of which there is a checkpoint; 0: none."""
    if not args.checkpoint_format:
        return 0
    return next(
        (epoch for epoch in range(args.epochs, 0, -1) if os.path.exists(args.checkpoint_format.format(epoch=epoch))), 0
    )


def run(args: argparse.Namespace) -> None:
    """What each rank does."""
    hvd.init()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # or the ranks of one host take the cores from each other
    if args.cuda:
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())

    training = Training(args)
    done = training.resume()
    for epoch in range(done + 1, args.epochs + 1):
        training.train(epoch)
        loss, accuracy = training.test()
        if hvd.rank() == 0:
            print(f"Test set: Average loss: {loss:.4f}, Accuracy: {100 * accuracy:.2f}%", flush=True)
        training.save(epoch)
    hvd.check_consistency(training.model.state_dict())
    if hvd.rank() == 0:
        print("All ranks hold the same parameters", flush=True)


def main() -> None:
    args = arguments()
    if args.num_proc:
        launch.run(run, args=(args,), np=args.num_proc, options=["--hosts", args.hosts] if args.hosts else [])
    else:
        run(args)


if __name__ == "__main__":
    main()
