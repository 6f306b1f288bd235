"""Lightning over the backend "collectives" of torch.distributed.

    collectivesrun -np 2 python examples/pytorch/pytorch_lightning.py
    torchrun --nproc-per-node 2 examples/pytorch/pytorch_lightning.py

The strategy is told the backend; sampling, logging and averaging of metrics are Lightning's. The network learns the
labels that a random matrix gives to random numbers.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FEATURES, LABELS = 32, 8


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Lightning example", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--backend", default="collectives", help="of torch.distributed: collectives, gloo or nccl")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="rows in a batch of one rank")
    parser.add_argument("--epochs", type=int, default=5, metavar="N", help="epochs to train")
    parser.add_argument("--lr", type=float, default=0.01, metavar="LR", help="learning rate")
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    parser.add_argument("--seed", type=int, default=42, metavar="S", help="random seed")
    return parser.parse_args()


class Classifier(pl.LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.network = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, LABELS))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        rows, labels = batch
        return F.cross_entropy(self.network(rows), labels)

    def validation_step(self, batch: Any, number: int) -> None:
        rows, labels = batch
        right = (self.network(rows).argmax(dim=1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True)


class Consistency(pl.Callback):
    """At the end, an error if this rank's parameters differ from rank 0's in a bit."""

    def on_train_end(self, trainer: pl.Trainer, model: pl.LightningModule) -> None:
        own = nn.utils.parameters_to_vector(model.parameters()).detach()
        first = own.clone()
        dist.broadcast(first, 0)
        if not torch.equal(own, first):
            raise RuntimeError(f"rank {dist.get_rank()} does not hold the parameters of rank 0")


def main() -> nn.Module:
    args = arguments()
    cuda = not args.no_cuda and torch.cuda.is_available()
    torch.set_num_threads(1)  # or the ranks of one host take the cores from each other
    pl.seed_everything(args.seed, verbose=False)
    rows = torch.randn(4096, FEATURES)
    data = TensorDataset(rows, (rows @ torch.randn(FEATURES, LABELS)).argmax(dim=1))
    train, test = torch.utils.data.random_split(data, [3584, 512])

    trainer = pl.Trainer(
        accelerator="cuda" if cuda else "cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend=args.backend),
        plugins=[TorchElasticEnvironment()],  # ranks as torchrun numbers them; found by itself under torchrun alone
        max_epochs=args.epochs,
        callbacks=[Consistency()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier(args.lr)
    trainer.fit(model, DataLoader(train, args.batch_size, shuffle=True), DataLoader(test, args.batch_size))
    if trainer.global_rank == 0:
        print(f"Accuracy: {100 * trainer.callback_metrics['accuracy'].item():.2f}%")
        print("All ranks hold the same parameters", flush=True)
    return model


if __name__ == "__main__":
    main()
