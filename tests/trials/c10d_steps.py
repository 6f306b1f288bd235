"""Train for many steps over our backend of torch.distributed, and look whether a rank keeps anything of a step.

    python -m tests.trials.c10d_steps                  # 10,000 steps
    python -m tests.trials.c10d_steps --steps 1000

Two ranks; each step trains by DDP and by FSDP2, and waits for asynchronous all-reduces by their futures. Memory,
descriptors, threads, mappings, futures and works are counted after a fifth of the steps and after all of them. Exit
code 1 if they grow.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.launching.mpirun import ROOT, rank_environment
from tests.support.launching.ports import free_port

ALLOWED = {"KiB": 4096, "descriptors": 0, "threads": 8, "mappings": 32, "futures": 0, "works": 0}
"""What is counted, and how much more of it there may be in the end. Memory and mappings are also the allocator's; the
threads that complete futures are made as they are needed."""
_SECONDS_PER_STEP = 0.5


def counted() -> dict[str, int]:
    """What this process has now."""
    import torch

    gc.collect()
    objects, process = gc.get_objects(), Path("/proc/self")
    return {
        "KiB": int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024,
        "descriptors": len(os.listdir(process / "fd")),
        "threads": len(os.listdir(process / "task")),
        "mappings": len((process / "maps").read_text().splitlines()),
        "futures": sum(issubclass(type(one), torch._C.Future) for one in objects),
        "works": sum(issubclass(type(one), torch._C._distributed_c10d.Work) for one in objects),
    }


def train(steps: int) -> int:
    """A rank's part. Returns its exit code."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import collectives.c10d

    torch.set_num_threads(1)
    collectives.c10d.register()
    dist.init_process_group("collectives")

    def layers() -> Any:
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))

    models = [torch.nn.parallel.DistributedDataParallel(layers(), bucket_cap_mb=0.0005), fully_shard(layers())]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    tensors = [torch.ones(count) for count in (3, 1000, 20_000)]
    counts = []
    for step in range(1, steps + 1):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        futures = [dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True).get_future() for tensor in tensors]
        for future in [future.then(lambda done: done.value()[0].sum()) for future in futures]:
            future.wait()
        if step in (steps // 5, steps):
            del futures, future
            counts.append(counted())
            dist.barrier()
    early, late = counts
    rows = [f"{what:12} {early[what]:8} {late[what]:8}" for what in ALLOWED]
    grown = [what for what, allowed in ALLOWED.items() if late[what] > early[what] + allowed]
    title = f"rank {dist.get_rank()}, after {steps // 5:6} {steps:8}"
    print("\n".join([title, *rows, *([f"grown: {', '.join(grown)}"] if grown else [])]), flush=True)
    dist.destroy_process_group()
    return int(bool(grown))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.trials.c10d_steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=10_000, help="%(default)s by default")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        return train(asked.steps)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "tests.trials.c10d_steps", "--rank", "--steps", str(asked.steps)]
    ranks = [
        subprocess.Popen(command, env={**rank_environment(), **common, "RANK": str(rank)}, cwd=ROOT) for rank in (0, 1)
    ]
    try:
        return max(abs(rank.wait(60 + _SECONDS_PER_STEP * asked.steps)) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(10)


if __name__ == "__main__":
    sys.exit(main())
