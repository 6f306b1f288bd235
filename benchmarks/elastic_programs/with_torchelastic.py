"""The training under torchrun, which starts all processes again: they go on from a checkpoint."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.elastic_programs.common import EVERY, FOLDER, STEPS, done, loss_of, new_model

CHECKPOINT = os.path.join(FOLDER, "checkpoint.pt")

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(new_model())
optimizer = torch.optim.Adam(model.parameters())
first = 0
if os.path.exists(CHECKPOINT):
    checkpoint = torch.load(CHECKPOINT)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    first = checkpoint["step"]
for step in range(first, STEPS):
    optimizer.zero_grad()
    loss_of(model, step, rank).backward()
    optimizer.step()
    done(step, size)
    if rank == 0 and (step + 1) % EVERY == 0:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save(states, CHECKPOINT + ".new")
        os.replace(CHECKPOINT + ".new", CHECKPOINT)
dist.destroy_process_group()
