"""Images per second in data-parallel training, on random pictures.

    collectivesrun -np 2 python examples/pytorch/pytorch_synthetic_benchmark.py
    collectivesrun -np 2 python examples/pytorch/pytorch_synthetic_benchmark.py --model resnet50 --batch-size 8

The models are residual networks with bottleneck blocks (He et al., "Deep residual learning for image recognition",
arXiv:1512.03385), their stride in the 3 x 3 convolution, as is usual today. ``small`` is of the same kind, for machines
without a GPU.
"""

from __future__ import annotations

import argparse
import os
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import nn

import collectives.torch as hvd

# (blocks of each stage, channels of the first one, pixels along a side)
MODELS = {
    "small": ((1, 1, 1, 1), 16, 32),
    "resnet50": ((3, 4, 6, 3), 64, 224),
    "resnet101": ((3, 4, 23, 3), 64, 224),
    "resnet152": ((3, 8, 36, 3), 64, 224),
}


class Bottleneck(nn.Module):
    """1 x 1 to fewer channels, 3 x 3, 1 x 1 to four times as many; added to the input, which is projected where the
    shapes differ."""

    def __init__(self, channels: int, width: int, stride: int, norm_layer: type[nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            norm_layer(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False),
            norm_layer(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            norm_layer(4 * width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride=stride, bias=False), norm_layer(4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet(blocks: tuple[int, ...], width: int, norm_layer: type[nn.Module], classes: int = 1000) -> nn.Module:
    """A residual network of ``blocks[i]`` bottleneck blocks in stage i, each stage twice as wide and half as large as
    the one before."""
    layers = [
        nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
        norm_layer(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            layers.append(Bottleneck(channels, width << stage, 2 if stage and not block else 1, norm_layer))
            channels = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="PyTorch synthetic benchmark", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in half precision")
    parser.add_argument(
        "--model", choices=MODELS, help="default: resnet50 on a GPU, else small", default=argparse.SUPPRESS
    )
    parser.add_argument("--batch-size", type=int, default=32, help="images in a batch of one rank")
    parser.add_argument("--num-warmup-batches", type=int, default=10, help="batches before the clock is started")
    parser.add_argument("--num-batches-per-iter", type=int, default=10, help="batches in one measurement")
    parser.add_argument("--num-iters", type=int, default=10, help="measurements")
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    parser.add_argument(
        "--use-adasum", action="store_true", help="combine gradients by Adasum instead of averaging them"
    )
    parser.add_argument("--sync-batch-norm", action="store_true", help="normalise over the batches of all ranks")
    args = parser.parse_args()
    args.cuda = not args.no_cuda and torch.cuda.is_available()
    args.model = getattr(args, "model", "resnet50" if args.cuda else "small")
    return args


def log(text: str) -> None:
    if hvd.rank() == 0:
        print(text, flush=True)


def main() -> None:
    args = arguments()
    hvd.init()
    device = torch.device("cuda" if args.cuda else "cpu")
    if args.cuda:
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
        torch.backends.cudnn.benchmark = True
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // hvd.local_size()))

    blocks, width, pixels = MODELS[args.model]
    model = resnet(blocks, width, hvd.SyncBatchNorm if args.sync_batch_norm else nn.BatchNorm2d).to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01 * (1 if args.use_adasum else hvd.size())),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    data = torch.randn(args.batch_size, 3, pixels, pixels, device=device)
    target = torch.randint(1000, (args.batch_size,), device=device)

    def seconds_for(batches: int) -> float:
        begin = perf_counter()
        for _ in range(batches):
            optimizer.zero_grad()
            F.cross_entropy(model(data), target).backward()
            optimizer.step()
        if args.cuda:
            torch.cuda.synchronize()  # what was started is not yet done
        return perf_counter() - begin

    kind = "GPU" if args.cuda else "CPU"
    log(f"Model: {args.model}")
    log(f"Parameters: {sum(parameter.numel() for parameter in model.parameters())}")
    log(f"Batch size: {args.batch_size}")
    log(f"Number of {kind}s: {hvd.size()}")
    log("Running warmup...")
    seconds_for(args.num_warmup_batches)
    log("Running benchmark...")
    rates = []
    for iteration in range(args.num_iters):
        rates.append(args.batch_size * args.num_batches_per_iter / seconds_for(args.num_batches_per_iter))
        log(f"Iter #{iteration}: {rates[-1]:.1f} img/sec per {kind}")
    found = hvd.allreduce(
        torch.tensor(rates, dtype=torch.float64), name="img_sec"
    )  # the mean over the ranks, measurement by measurement
    mean, interval = found.mean().item(), 1.96 * found.std(correction=0).item()
    log(f"Img/sec per {kind}: {mean:.1f} +-{interval:.1f}")
    log(f"Total img/sec on {hvd.size()} {kind}(s): {hvd.size() * mean:.1f} +-{hvd.size() * interval:.1f}")
    hvd.check_consistency(list(model.named_parameters()))
    log("All ranks hold the same parameters")


if __name__ == "__main__":
    main()
