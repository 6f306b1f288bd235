"""Elastic training: ranks come and go, and the state survives.

    import collectives

    collectives.init()
    state = collectives.elastic.ObjectState(weights=weights, epoch=0)

    @collectives.elastic.run
    def train(state):
        while state.epoch < 10:
            ...                             # training, with collectives
            state.epoch += 1
            state.commit()

    train(state)

`run` is the loop, `ObjectState` the state of plain attributes and NumPy arrays; the adapters have states for models and
optimizers (`collectives.torch.elastic` and others). Names and meaning are Horovod's.
"""

from collectives.base.errors import RecoverableError
from collectives.elastic.events import Event, on_event
from collectives.elastic.loop import run
from collectives.elastic.object_state import ObjectState
from collectives.elastic.sampler import ElasticSampler
from collectives.elastic.state import HostsUpdatedInterrupt, HostUpdateResult, State

__all__ = [
    "ElasticSampler",
    "Event",
    "HostUpdateResult",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "RecoverableError",
    "State",
    "on_event",
    "run",
]
