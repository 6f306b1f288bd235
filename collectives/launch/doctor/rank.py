"""What each rank of the doctor's jobs runs: one all-reduce, after which rank 0 prints what its world is like."""

import json

import numpy as np

import collectives
from collectives.worlds import runtime

collectives.init()
rank, size = collectives.rank(), collectives.size()
total = collectives.allreduce(np.full(1 << 16, rank + 1.0), average=False)
assert (total == size * (size + 1) / 2).all()
placement = runtime.world().planner.placement
if rank == 0:
    facts = {name: getattr(placement, name) for name in ("shares_memory", "reads_private", "maps")}
    print(json.dumps({"size": size, "network": runtime.world().network, **facts}), flush=True)
collectives.shutdown()
