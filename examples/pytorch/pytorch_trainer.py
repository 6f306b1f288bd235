"""The Trainer of transformers over the backend "collectives" of torch.distributed.

    collectivesrun -np 2 python examples/pytorch/pytorch_trainer.py
    torchrun --nproc-per-node 2 examples/pytorch/pytorch_trainer.py

The Trainer's own list of backends is closed, but it keeps a process group that is there: so it is made first. A small
GPT-2 learns to write, letter by letter, from Python's own manual.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pydoc_data import topics

import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

LENGTH = 64


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Trainer example", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--backend", default="collectives", help="of torch.distributed: collectives, gloo or nccl")
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="pieces of text in a batch of one rank")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="steps to train")
    parser.add_argument("--lr", type=float, default=0.003, metavar="LR", help="learning rate")
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    parser.add_argument("--seed", type=int, default=42, metavar="S", help="random seed")
    return parser.parse_args()


def manual() -> list[dict[str, torch.Tensor]]:
    """The text of ``help()`` in pieces of 64 letters."""
    text = "\n\n".join(topics.topics.values()).encode("ascii", "ignore")
    pieces = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().split(LENGTH)[:-1]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def main() -> nn.Module:
    args = arguments()
    cuda = not args.no_cuda and torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.set_num_threads(1)  # or the ranks of one host take the cores from each other
    dist.init_process_group(args.backend)
    os.environ["ACCELERATE_USE_CPU"] = str(not cuda)  # else Accelerate trains alone where there is no GPU

    torch.manual_seed(args.seed)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=128, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    )
    pieces = manual()
    with tempfile.TemporaryDirectory() as folder:
        training = TrainingArguments(
            output_dir=folder,
            use_cpu=not cuda,
            seed=args.seed,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch_size,
            per_device_eval_batch_size=args.batch_size,
            learning_rate=args.lr,
            ddp_find_unused_parameters=False,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        assert training.world_size == dist.get_world_size()
        trainer = Trainer(model=model, args=training, train_dataset=pieces[256:], eval_dataset=pieces[:256])
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]

    own = nn.utils.parameters_to_vector(model.parameters()).detach()
    first = own.clone()
    dist.broadcast(first, 0)
    if not torch.equal(own, first):
        raise RuntimeError(f"rank {dist.get_rank()} does not hold the parameters of rank 0")
    if dist.get_rank() == 0:
        print(f"Test loss: {loss:.4f}")
        print("All ranks hold the same parameters", flush=True)
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    main()
