"""The training with torchft, each rank a replica; something else starts a dead one again.

Without torchft's `DistributedDataParallel`, whose hook fails an assertion in the survivors when gloo reports a death.
"""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torchft import Manager, Optimizer, ProcessGroupGloo

from benchmarks.elastic_programs.common import STEPS, done, loss_of, new_model

model = new_model()
adam = torch.optim.Adam(model.parameters())


def load(states: dict[str, Any]) -> None:
    model.load_state_dict(states["model"])
    adam.load_state_dict(states["optimizer"])


store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]  # torch's stub
manager: Any = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
    load_state_dict=load,
    state_dict=lambda: {"model": model.state_dict(), "optimizer": adam.state_dict()},
    min_replica_size=1,
    replica_id=f"replica_{os.environ['REPLICA']}_",
    rank=0,
    world_size=1,
    store_addr="localhost",
    store_port=store.port,
    hostname="localhost",
)
optimizer = Optimizer(manager, adam)
while (step := manager.current_step()) < STEPS:
    optimizer.zero_grad()
    loss_of(model, step, int(os.environ["REPLICA"])).backward()
    gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
    together = parameters_to_vector(gradients)
    manager.allreduce(together).wait()
    vector_to_parameters(together, gradients)
    optimizer.step()
    if manager.current_step() > step:
        done(step, manager.num_participants())
manager.shutdown(wait=False)
