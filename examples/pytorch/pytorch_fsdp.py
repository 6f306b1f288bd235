"""Fully sharded data parallelism (FSDP2): each rank keeps its share of parameters, gradients and optimizer state.

    collectivesrun -np 2 python examples/pytorch/pytorch_fsdp.py
    collectivesrun -np 2 python examples/pytorch/pytorch_fsdp.py --use-mixed-precision
    collectivesrun -np 2 python examples/pytorch/pytorch_fsdp.py --checkpoint ./fsdp --steps 200

A transformer learns sequences in which each number decides on the one after it. Gradients are clipped by the norm over
all ranks. Each rank writes its share to the folder of ``--checkpoint``, from which any number of ranks resumes.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

NUMBERS, LENGTH, WIDTH = 64, 16, 64


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="PyTorch FSDP example", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--backend", default="collectives", help="of torch.distributed: collectives, gloo or nccl")
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="sequences in a batch of one rank")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="steps to train, the resumed ones included")
    parser.add_argument("--lr", type=float, default=0.003, metavar="LR", help="learning rate")
    parser.add_argument("--layers", type=int, default=2, metavar="N", help="blocks of attention and linear layers")
    parser.add_argument("--clip", type=float, default=1.0, metavar="NORM", help="largest norm of the gradients")
    parser.add_argument(
        "--use-mixed-precision", action="store_true", help="gather parameters in bfloat16, reduce in float32"
    )
    parser.add_argument("--checkpoint", metavar="FOLDER", help="resume from this folder, and write it at the end")
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    parser.add_argument("--seed", type=int, default=42, metavar="S", help="random seed")
    return parser.parse_args()


class Transformer(nn.Module):
    """Sequences (batch, length) to the scores of the number after each (batch * length, 64)."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.numbers = nn.Embedding(NUMBERS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.output = nn.Linear(WIDTH, NUMBERS)

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        x = self.numbers(sequences)
        mask = nn.Transformer.generate_square_subsequent_mask(sequences.shape[1], x.device, x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.output(x.flatten(0, 1))


def batch_of(args: argparse.Namespace, step: int) -> torch.Tensor:
    """Sequences (n, 17), others for every rank and step."""
    following = torch.randperm(NUMBERS, generator=torch.Generator().manual_seed(args.seed))
    draw = torch.Generator().manual_seed(args.seed + 1 + step * dist.get_world_size() + dist.get_rank())
    numbers = [torch.randint(NUMBERS, (args.batch_size,), generator=draw)]
    for _ in range(LENGTH):
        numbers.append(following[numbers[-1]])
    return torch.stack(numbers, dim=1)


def check_consistency(model: nn.Module) -> None:
    """Raise an error if this rank's parameters, once gathered, differ from rank 0's in a bit."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        own = parameter.full_tensor().detach()
        first = own.clone()
        dist.broadcast(first, 0)
        if not torch.equal(own, first):
            raise RuntimeError(f"rank {dist.get_rank()} does not hold {name} of rank 0")


def main() -> None:
    args = arguments()
    cuda = not args.no_cuda and torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    device = torch.device("cuda" if cuda else "cpu")
    torch.set_num_threads(1)  # or the ranks of one host take the cores from each other
    torch.manual_seed(args.seed)
    dist.init_process_group(args.backend)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    model = Transformer(args.layers).to(device)
    policy = MixedPrecisionPolicy(*((torch.bfloat16, torch.float32) if args.use_mixed_precision else ()))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    done = torch.tensor(0)
    if args.checkpoint and os.path.exists(os.path.join(args.checkpoint, ".metadata")):
        model_state, optimizer_state = get_state_dict(model, optimizer)
        saved = {"model": model_state, "optimizer": optimizer_state, "steps": done}
        load(saved, checkpoint_id=args.checkpoint)
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        if dist.get_rank() == 0:
            print(f"Resuming after step {done} from {args.checkpoint}", flush=True)

    for step in range(int(done), args.steps):
        sequences = batch_of(args, step).to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(sequences[:, :-1]).float(), sequences[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        if dist.get_rank() == 0 and (step % 20 == 0 or step == args.steps - 1):
            print(f"Step: {step}\tLoss: {loss.item():.4f}", flush=True)

    if args.checkpoint:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        saved = {"model": model_state, "optimizer": optimizer_state, "steps": torch.tensor(args.steps)}
        save(saved, storage_writer=FileSystemWriter(args.checkpoint, overwrite=True))
    check_consistency(model)
    if dist.get_rank() == 0:
        print("All ranks hold the same parameters", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
