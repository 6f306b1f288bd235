"""Agreement of all ranks on their next operations, where the engine does not compare them; 16 bytes per rank."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from collectives.base.errors import MismatchError
from collectives.worlds.world import World


def agree(world: World, label: str, descriptions: Mapping[str, str]) -> None:
    """Check that every rank passes the same descriptions.

    Args:
        label: prefix of messages and name of the operations.
        descriptions: what must be equal on all ranks, by subject.

    Raises:
        MismatchError: names the first subject that differs; raised on every rank.
    """
    if world.size == 1:
        return
    digest = hashlib.blake2b(repr(sorted(descriptions.items())).encode(), digest_size=16).digest()
    digests = world.allgather(np.frombuffer(digest, np.uint8)[None], name=label)
    if (digests == digests[0]).all():
        return
    everyone = world.allgather_object(descriptions, name=label)
    subjects = dict.fromkeys(subject for each in everyone for subject in each)
    subject = next(subject for subject in subjects if len({each.get(subject) for each in everyone}) > 1)
    ranks_by_description: dict[str, list[str]] = {}
    for rank, each in zip(world.ranks, everyone, strict=True):
        ranks_by_description.setdefault(each.get(subject, "absent"), []).append(str(rank))
    differences = "; ".join(
        f"{what} on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}" for what, ranks in ranks_by_description.items()
    )
    raise MismatchError(
        f"rank {world.ranks[world.rank]}: {label}: {subject} is not the same on every rank: {differences}. Nothing "
        "was changed. Pass tensors of the same names, shapes and dtypes, and the same root, on every rank. [M11]"
    )
