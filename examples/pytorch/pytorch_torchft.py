"""A training that loses a replica and goes on: torchft over process groups of the backend "collectives".

    python examples/pytorch/pytorch_torchft.py
    python examples/pytorch/pytorch_torchft.py --replicas 4 --steps 60 --lose-at 20

The program starts torchft's lighthouse and the replicas itself, because a launcher ends a job when a rank dies. The
last replica dies in the middle, by SIGKILL and without a word. The others notice, agree on who is left, repeat the
step, and go on to the end.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import signal
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer
from torchft.coordination import LighthouseServer

from collectives.c10d import ProcessGroup

FEATURES, LABELS = 32, 8
BOUND = timedelta(seconds=30)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="torchft example", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=3, metavar="N", help="processes, each with the whole model")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="rows in a batch of one replica")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="steps to train")
    parser.add_argument("--lose-at", type=int, default=30, metavar="N", help="step at which the last replica dies")
    parser.add_argument("--lr", type=float, default=0.01, metavar="LR", help="learning rate")
    parser.add_argument("--seed", type=int, default=42, metavar="S", help="random seed")
    return parser.parse_args()


def train(args: argparse.Namespace, number: int, lighthouse: str, begin: Barrier, result: Connection) -> None:
    """What a replica does; at the end it sends its parameters."""
    logging.disable(logging.INFO)
    torch.set_num_threads(1)  # or the replicas take the cores from each other
    torch.manual_seed(args.seed + number)  # before the first step all get the parameters of one
    network = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, LABELS))
    adam = torch.optim.Adam(network.parameters(), lr=args.lr)
    rules = torch.randn(FEATURES, LABELS, generator=torch.Generator().manual_seed(args.seed))

    def load(state: dict[str, Any]) -> None:
        network.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]  # torch's stub
    manager: Any = Manager(
        pg=ProcessGroup(timeout=BOUND),
        load_state_dict=load,
        state_dict=lambda: {"model": network.state_dict(), "optimizer": adam.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        timeout=BOUND,
        replica_id=f"replica_{number}_",
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        hostname="localhost",
    )
    model, optimizer = DistributedDataParallel(manager, network), Optimizer(manager, adam)
    begin.wait(60)
    while (step := manager.current_step()) < args.steps:
        if step == args.lose_at and number == args.replicas - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()  # the replicas that are there agree on each other
        draw = torch.Generator().manual_seed(args.seed + 1 + step * args.replicas + number)
        rows = torch.randn(args.batch_size, FEATURES, generator=draw)
        loss = F.cross_entropy(model(rows), (rows @ rules).argmax(dim=1))
        loss.backward()
        optimizer.step()  # unless the all-reduce failed
        if number == 0 and step % 10 == 0:
            print(f"Step: {step}\tReplicas: {manager.num_participants()}\tLoss: {loss.item():.4f}", flush=True)
    result.send(nn.utils.parameters_to_vector(network.parameters()).detach().numpy())
    result.recv()  # the others may be at their last step
    manager.shutdown(wait=False)


def main() -> None:
    args = arguments()
    processes = multiprocessing.get_context("spawn")
    lighthouse = LighthouseServer("[::]:0", args.replicas - 1, quorum_tick_ms=50, heartbeat_timeout_ms=1000)
    begin = processes.Barrier(args.replicas)
    replicas: list[tuple[Any, Connection]] = []
    for number in range(args.replicas):
        pipe, result = processes.Pipe()
        process = processes.Process(target=train, args=(args, number, lighthouse.address(), begin, result))
        process.start()
        replicas.append((process, pipe))
    lost, _ = replicas.pop()
    lost.join()
    print(f"A replica is lost, by signal {-lost.exitcode}", flush=True)
    parameters = [pipe.recv() for _, pipe in replicas]
    for process, pipe in replicas:
        pipe.send(None)
        process.join()
    lighthouse.shutdown()
    if any((other != parameters[0]).any() for other in parameters):
        raise RuntimeError("the replicas hold different parameters")
    print("All replicas hold the same parameters", flush=True)


if __name__ == "__main__":
    main()
