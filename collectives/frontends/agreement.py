"""Whether all ranks are about to do the same thing, where no operation of the engine would compare it: told in 16 bytes
each."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from collectives.base.errors import MismatchError
from collectives.world import World


def agree(world: World, label: str, mine: Mapping[str, str]) -> None:
    """Return if every rank says the same of the same subjects.

    Args:
        label: what messages, and the operations, are called by.
        mine: what is to be alike, by its subject.

    Raises:
        MismatchError: names the first subject on which they differ; on every rank.
    """
    if world.size == 1:
        return
    digest = hashlib.blake2b(repr(sorted(mine.items())).encode(), digest_size=16).digest()
    digests = world.allgather(np.frombuffer(digest, np.uint8)[None], name=label)
    if (digests == digests[0]).all():
        return
    everyone = world.allgather_object(mine, name=label)
    subjects = dict.fromkeys(subject for each in everyone for subject in each)
    subject = next(subject for subject in subjects if len({each.get(subject) for each in everyone}) > 1)
    ranks_by_said: dict[str, list[str]] = {}
    for rank, each in zip(world.ranks, everyone, strict=True):
        ranks_by_said.setdefault(each.get(subject, "absent"), []).append(str(rank))
    said = "; ".join(
        f"{what} on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}" for what, ranks in ranks_by_said.items()
    )
    raise MismatchError(
        f"rank {world.ranks[world.rank]}: {label}: {subject} is not the same on every rank: {said}. Nothing was "
        f"changed. Every rank must"
        " pass the same, of the same shapes and dtypes, and name the same root."
    )
