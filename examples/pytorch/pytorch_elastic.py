"""An elastic training on handwritten digits: ranks may die and come, and it goes on.

    collectivesrun -np 2 --min-np 1 python examples/pytorch/pytorch_elastic.py --kill-at 1

Kill a rank yourself, or have rank 1 killed in the middle of an epoch: the other returns to the last commit and goes on
alone; another process is started, and takes part as soon as it is ready. With ``--recover retry`` no step is repeated.
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import collectives.torch as hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="elastic PyTorch digits example", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="pictures in a batch of one rank")
    parser.add_argument("--epochs", type=int, default=10, metavar="N", help="epochs to train")
    parser.add_argument("--lr", type=float, default=0.02, metavar="LR", help="learning rate of one rank")
    parser.add_argument("--commit-every", type=int, default=5, metavar="N", help="batches from commit to commit")
    parser.add_argument("--recover", choices=("restore", "retry"), default="restore", help="what survivors do")
    parser.add_argument("--kill-at", type=int, metavar="EPOCH", help="have the first rank 1 killed in this epoch")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)  # or the ranks of one host take the cores from each other
    is_victim = args.kill_at is not None and os.environ.get("COLLECTIVES_MEMBER") == "1"

    pictures, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pictures, dtype=torch.float32) / 16, torch.tensor(labels))
    sampler = hvd.elastic.ElasticSampler(data, seed=42)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9), model.named_parameters()
    )
    state: Any = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=1, loss=0.0)

    def scale_learning_rate() -> None:
        for group in optimizer.param_groups:
            group["lr"] = args.lr * hvd.size()

    @hvd.elastic.run(recover=args.recover)
    def train(state: Any) -> None:
        while state.epoch <= args.epochs:
            for batch, (rows, targets) in enumerate(loader, 1):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(rows), targets)
                loss.backward()
                if is_victim and state.epoch == args.kill_at and batch == 7:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
                sampler.record_batch(batch - 1, args.batch_size)
                state.loss = loss.item()
                if batch % args.commit_every == 0:
                    state.commit()
            state.commit()  # before set_epoch: the samples of a rank that has died are dealt again in their own epoch
            if hvd.rank() == 0:
                print(f"Epoch: {state.epoch}\tRanks: {hvd.size()}\tLoss: {state.loss:.4f}", flush=True)
            state.epoch += 1
            sampler.set_epoch(state.epoch)

    state.register_reset_callbacks([scale_learning_rate])
    train(state)
    hvd.check_consistency(model.state_dict())
    if hvd.rank() == 0:
        print("All ranks hold the same parameters", flush=True)


if __name__ == "__main__":
    main()
