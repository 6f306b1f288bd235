"""The training as an elastic job."""

from typing import Any

import torch

import collectives.torch as hvd
from benchmarks.elastic_programs.common import EVERY, STEPS, done, loss_of, new_model

hvd.init()
model = new_model()
optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0)


@hvd.elastic.run
def train(state: Any) -> None:
    while state.step < STEPS:
        optimizer.zero_grad()
        loss_of(model, state.step, hvd.rank()).backward()
        optimizer.step()
        done(state.step, hvd.size())
        state.step += 1
        if state.step % EVERY == 0:
            state.commit()


train(state)
