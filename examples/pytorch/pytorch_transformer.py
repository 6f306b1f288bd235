"""A transformer that learns to write, letter by letter, from Python's own manual.

    collectivesrun -np 2 python examples/pytorch/pytorch_transformer.py
    collectivesrun -np 2 python examples/pytorch/pytorch_transformer.py --use-mixed-precision --batches-per-allreduce 2
    --compile

The text is that of ``help()``, which the standard library contains. The model is a decoder (Vaswani et al., "Attention
is all you need", arXiv:1706.03762; normalised before each block). Gradients are clipped by their norm, which must be
the norm of the average over all ranks: so they are waited for first, and the step is told that they have been.
"""

from __future__ import annotations

import argparse
import math
from pydoc_data import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import collectives.torch as hvd

LETTERS = 128  # ASCII


class Block(nn.Module):
    """Attention to all letters so far, then two linear layers, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_input = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.attention_input(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_output(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed_forward(x)


class Transformer(nn.Module):
    """Letters (batch, length) to the scores of the letter after each (batch, length, 128)."""

    def __init__(self, width: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, LETTERS, bias=False)
        self.output.weight = (
            self.letters.weight
        )  # one tensor, used twice in a forward: its two gradients are added before they are sent
        nn.init.normal_(self.letters.weight, std=0.02)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        x = self.letters(letters) + self.places[: letters.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="PyTorch transformer example", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="pieces of text in a batch of one rank")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="steps to train")
    parser.add_argument(
        "--warmup-steps", type=int, default=20, metavar="N", help="steps until the learning rate is reached"
    )
    parser.add_argument("--lr", type=float, default=0.003, metavar="LR", help="learning rate of one rank")
    parser.add_argument("--width", type=int, default=96, metavar="N", help="numbers by which the model knows a letter")
    parser.add_argument("--heads", type=int, default=4, metavar="N", help="attention heads")
    parser.add_argument("--layers", type=int, default=2, metavar="N", help="blocks of attention and linear layers")
    parser.add_argument("--length", type=int, default=64, metavar="N", help="letters in a piece of text")
    parser.add_argument("--clip", type=float, default=1.0, metavar="NORM", help="largest norm of the gradients; 0: any")
    parser.add_argument(
        "--batches-per-allreduce", type=int, default=1, metavar="N", help="batches whose gradients travel together"
    )
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    parser.add_argument("--seed", type=int, default=42, metavar="S", help="random seed")
    parser.add_argument("--log-interval", type=int, default=50, metavar="N", help="steps between two lines of the log")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in half precision")
    parser.add_argument("--use-mixed-precision", action="store_true", help="compute in bfloat16 where that is safe")
    parser.add_argument(
        "--compile", nargs="?", const="inductor", metavar="BACKEND", help="compile the blocks (for the CPU: with g++)"
    )
    args = parser.parse_args()
    args.cuda = not args.no_cuda and torch.cuda.is_available()
    if args.width % args.heads:
        parser.error("--width must be a multiple of --heads")
    return args


def manual() -> tuple[torch.Tensor, torch.Tensor]:
    """The text as letters, for training and for testing; the same on every rank."""
    text = "\n\n".join(topics.topics.values()).encode("ascii", "ignore")
    letters = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    split = len(letters) * 9 // 10
    return letters[:split], letters[split:]


def pieces(text: torch.Tensor, starts: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The letters (n, length) from each start on, and those that follow each of them."""
    at = starts[:, None] + torch.arange(length)
    return text[at], text[at + 1]


def written(model: nn.Module, letters: torch.Tensor, count: int) -> str:
    """What the model writes, ``count`` letters, after the given ones (length,)."""
    text: list[int] = []
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _ in range(count):
            scores = model(letters[None])[0, -1].float().cpu()
            letter = torch.multinomial(torch.softmax(scores / 0.8, dim=0), 1, generator=draw)
            letters = torch.cat([letters[1:], letter.to(letters.device)])  # as many as before
            text.append(int(letter))
    return bytes(text).decode("ascii")


def main() -> None:
    args = arguments()
    hvd.init()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    device = torch.device("cuda" if args.cuda else "cpu")
    if args.cuda:
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())

    train_text, test_text = manual()
    model = Transformer(args.width, args.heads, args.layers, args.length).to(device)
    if args.compile:
        # Block by block: a block's gradients are sent while those of the block before it are computed.
        for block in model.blocks:
            block.compile(backend=args.compile)
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=args.lr * math.sqrt(hvd.size())),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        backward_passes_per_step=args.batches_per_allreduce,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / args.warmup_steps))

    def loss_of(letters: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.use_mixed_precision):
            scores = model(letters.to(device))
        return F.cross_entropy(scores.float().flatten(0, 1), following.to(device).flatten())

    def test() -> float:
        """The mean loss per letter on pieces from all over the last tenth of the text, of which each rank reads its
        own."""
        starts = torch.linspace(0, len(test_text) - args.length - 1, 4 * args.batch_size * hvd.size()).long()[
            hvd.rank() :: hvd.size()
        ]
        with torch.no_grad():
            losses = [loss_of(*pieces(test_text, batch, args.length)) for batch in starts.split(args.batch_size)]
        return float(hvd.allreduce(torch.stack(losses).mean(), name="test").item())

    draw = torch.Generator().manual_seed(args.seed + 1 + hvd.rank())  # each rank reads other pieces
    for step in range(args.steps + 1):
        if step % args.log_interval == 0 or step == args.steps:
            loss = test()
            if hvd.rank() == 0:
                print(f"Step: {step}\tTest loss: {loss:.4f}", flush=True)
        if step == args.steps:
            break
        optimizer.zero_grad()
        for _ in range(args.batches_per_allreduce):
            starts = torch.randint(len(train_text) - args.length - 1, (args.batch_size,), generator=draw)
            loss_of(*pieces(train_text, starts, args.length)).div(args.batches_per_allreduce).backward()
        optimizer.synchronize()
        if args.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        with optimizer.skip_synchronize():
            optimizer.step()
        schedule.step()

    hvd.check_consistency(model.state_dict())
    if hvd.rank() == 0:
        print(f"It writes: {written(model, test_text[-args.length :].to(device), 200)}")
        print("All ranks hold the same parameters", flush=True)


if __name__ == "__main__":
    main()
