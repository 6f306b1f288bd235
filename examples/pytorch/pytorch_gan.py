"""A generative adversarial network on handwritten digits: two models, two optimizers, one training.

    collectivesrun -np 2 python examples/pytorch/pytorch_gan.py

A generator makes pictures from noise; a discriminator learns to tell them from scikit-learn's digits (Goodfellow et
al., "Generative adversarial networks", arXiv:1406.2661). The parameters of the two bear the same names ("0.weight",
...), and their gradients are on their way at the same time: each optimizer keeps its own apart.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import collectives.torch as hvd

NOISE = 32  # numbers from which a picture is made
SHADES = " .:-=+*#%@"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="PyTorch GAN example", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="pictures in a batch of one rank")
    parser.add_argument("--epochs", type=int, default=30, metavar="N", help="epochs to train")
    parser.add_argument("--lr", type=float, default=0.0005, metavar="LR", help="learning rate of one rank")
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    parser.add_argument("--seed", type=int, default=42, metavar="S", help="random seed")
    parser.add_argument("--log-interval", type=int, default=10, metavar="N", help="epochs between two lines of the log")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in half precision")
    args = parser.parse_args()
    args.cuda = not args.no_cuda and torch.cuda.is_available()
    return args


def new_generator() -> nn.Module:
    return nn.Sequential(
        nn.Linear(NOISE, 128),
        hvd.SyncBatchNorm(128),  # over the pictures of all ranks: those of one are few
        nn.LeakyReLU(0.2),
        nn.Linear(128, 256),
        hvd.SyncBatchNorm(256),
        nn.LeakyReLU(0.2),
        nn.Linear(256, 64),
        nn.Tanh(),
    )


def new_discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 256),
        nn.LeakyReLU(0.2),
        nn.Linear(256, 128),
        nn.LeakyReLU(0.2),
        nn.Linear(128, 1),
    )


def new_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """Adam over the gradients of all ranks; model and state are made rank 0's."""
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=args.lr * hvd.size(), betas=(0.5, 0.999)),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return optimizer


def judged(discriminator: nn.Module, pictures: torch.Tensor, real: float) -> torch.Tensor:
    """The discriminator's loss if it should call these pictures real (1) or made (0)."""
    scores = discriminator(pictures)
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, real))


def distance(pictures: torch.Tensor, digits: torch.Tensor) -> float:
    """From each digit to the nearest of the pictures: the mean square, averaged over the ranks. (Between digits it is
    0.10.)"""
    nearest = torch.cdist(digits, pictures).amin(dim=1).square().mean() / digits.shape[1]
    return float(hvd.allreduce(nearest, name="distance").item())


def drawn(pictures: torch.Tensor) -> str:
    """The pictures beside each other, as text."""
    shades = ((pictures.reshape(-1, 8, 8) + 1) / 2 * (len(SHADES) - 1)).round().int().tolist()
    return "\n".join(
        "   ".join("".join(2 * SHADES[shade] for shade in picture[row]) for picture in shades) for row in range(8)
    )


def main() -> None:
    args = arguments()
    hvd.init()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    device = torch.device("cuda" if args.cuda else "cpu")
    if args.cuda:
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())

    digits = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1  # -1..1, as the generator's tanh
    dataset = TensorDataset(digits)
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed
    )
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    digits = digits.to(device)

    generator, discriminator = new_generator().to(device), new_discriminator().to(device)
    generator_optimizer, discriminator_optimizer = new_optimizer(generator, args), new_optimizer(discriminator, args)

    torch.manual_seed(args.seed + hvd.rank())  # from here on each rank makes pictures of its own
    shown = torch.randn(512, NOISE, device=device)
    for epoch in range(args.epochs + 1):
        sampler.set_epoch(epoch)
        for (real,) in loader if epoch else ():
            real = real.to(device)
            made = generator(torch.randn(len(real), NOISE, device=device))

            discriminator_optimizer.zero_grad()
            discriminator_loss = judged(discriminator, real, 1.0) + judged(discriminator, made.detach(), 0.0)
            discriminator_loss.backward()

            # Frozen meanwhile: the generator's loss flows through the discriminator, whose gradients are already on
            # their way.
            discriminator.requires_grad_(False)
            generator_optimizer.zero_grad()
            generator_loss = judged(discriminator, made, 1.0)
            generator_loss.backward()
            discriminator.requires_grad_(True)

            discriminator_optimizer.step()
            generator_optimizer.step()
        if epoch % args.log_interval == 0 or epoch == args.epochs:
            generator.eval()
            with torch.no_grad():
                pictures = generator(shown)
            generator.train()
            away = distance(pictures, digits)
            if hvd.rank() == 0:
                told = (
                    f"\tDiscriminator: {discriminator_loss.item():.4f}\tGenerator: {generator_loss.item():.4f}"
                    if epoch
                    else ""
                )
                print(f"Train Epoch: {epoch}\tDistance: {away:.4f}{told}", flush=True)
    hvd.check_consistency({"generator." + name: tensor for name, tensor in generator.state_dict().items()})
    hvd.check_consistency({"discriminator." + name: tensor for name, tensor in discriminator.state_dict().items()})
    if hvd.rank() == 0:
        print(drawn(pictures[:6]))
        print("All ranks hold the same parameters", flush=True)


if __name__ == "__main__":
    main()
