"""Windows of two ranks: whoever has last read a block of a window writes it next, because a rank that overwrites what
its peer has read waits for the other core's cache."""

from __future__ import annotations

import numpy as np
import pytest

from collectives.plan import layouts
from collectives.plan.lowering import compile_program, window_blocks
from collectives.plan.program import Action, Medium, Program, Space, Verb
from collectives.schedules.direct import allreduce

BLOCK = 64
Touch = tuple[int, int, int, bool]
"""The rank that touches a block of a window: the rank, whose window, the block's offset, whether it writes."""


def programs(size: int) -> list[Program]:
    layout = layouts.whole((size * BLOCK,), np.dtype(np.float32), size)
    return [
        compile_program(lambda r: allreduce(r, size), rank, layout, BLOCK, lambda a, b: Medium.WINDOW, True, False)
        for rank in range(size)
    ]


def touches(rank: int, action: Action) -> list[Touch]:
    """What an action reads from windows and writes into them, in this order."""
    own = action.verb is Verb.STAGE or (action.verb is Verb.TAKE and action.returned)
    found = []
    if action.source is not None and action.source.space is Space.WINDOW:
        found.append((rank, rank if own else action.peer, action.source.offset, False))
    if action.target is not None and action.target.space is Space.WINDOW:
        into_peer = action.verb is Verb.REDUCE and action.returned
        found.append((rank, action.peer if into_peer else rank, action.target.offset, True))
    return found


def test_two_ranks_write_next_what_they_have_read() -> None:
    both = programs(2)
    last: dict[tuple[int, int], tuple[int, bool]] = {}
    for number in [*range(3), *range(3)]:  # two calls that use the same slot
        for rank, program in enumerate(both):
            for action in program.rounds[number].rest:
                for who, window, offset, writes in touches(rank, action):
                    before, wrote = last.get((window, offset), (who, True))
                    assert not writes or wrote or before == who, f"round {number}: rank {rank}, {action}"
                    last[window, offset] = (who, writes)
    assert len(last) == 2


@pytest.mark.parametrize(("size", "blocks"), [(2, 1), (3, 3), (4, 4)])
def test_only_two_ranks_return_blocks(size: int, blocks: int) -> None:
    """More ranks stage a block for each peer, and the own chunk's result for all of them."""
    actions = [action for program in programs(size) for each in program.rounds for action in each.rest]
    assert sum(action.returned for action in actions) == (4 if size == 2 else 0)
    layout = layouts.whole((size * BLOCK,), np.dtype(np.float32), size)
    assert window_blocks(lambda r: allreduce(r, size), 0, layout, lambda a, b: Medium.WINDOW, True, False) == blocks
