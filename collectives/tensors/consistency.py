"""Check that ranks hold the same tensors: a fingerprint of each, and the error message where they differ.

Models diverge silently: one rank uses another seed, misses a broadcast, or loads an older checkpoint. Each rank reduces
its tensors to short fingerprints; the ranks exchange them, and every rank finds the same first tensor that differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from collectives.base import dtypes
from collectives.base.errors import InvalidArgumentError, InvalidTypeError, MismatchError
from collectives.tensors.arrays import View, view


class Fingerprint(NamedTuple):
    """Identity of one tensor in a few bytes.

    Attributes:
        digest: 128-bit hash of the shape, the dtype and every bit of the elements: 0.0 and -0.0 differ, a NaN equals
            itself.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: bytes


def fingerprints(tensors: Any) -> list[Fingerprint]:
    """Compute the fingerprint of each tensor, in order; about 1 ms per MiB.

    Args:
        tensors: a mapping of names to tensors, or an iterable of tensors or of (name, tensor) pairs, such as a model's
            parameters. Tensors without names are called ``tensors[0]``, ``tensors[1]``, ...

    Raises:
        InvalidTypeError: not such a collection, or a tensor of an unsupported type.
        InvalidArgumentError: two tensors have the same name.
    """
    by_name: dict[str, Fingerprint] = {}
    for name, tensor in _named(tensors):
        if name in by_name:
            raise InvalidArgumentError(
                f"tensors: expected unique names, got {name!r} twice; give each tensor its own name [A37]"
            )
        seen = view(tensor, argument=name)
        dtype = dtypes.name(seen.dtype)
        digest = hashlib.blake2b(f"{dtype}{seen.shape}".encode(), digest_size=16)
        elements = seen.array if isinstance(seen, View) else seen.on_host()
        digest.update(elements.view(np.uint8).data)
        by_name[name] = Fingerprint(name, seen.shape, dtype, digest.digest())
    return list(by_name.values())


def compare(
    rank: int, all_ranks_fingerprints: Sequence[Sequence[Fingerprint]], ranks: Sequence[int] | None = None
) -> None:
    """Check that every rank has the same tensors, in any order.

    Args:
        rank: this rank, for the message.
        all_ranks_fingerprints: those of rank 0, 1, ...; identical on every rank, so that every rank raises the same
            error.
        ranks: the ranks' numbers in the message; by default 0, 1, ...

    Raises:
        MismatchError: names the first tensor that differs, in the order of the first rank that has it; in which respect
            it differs; and the ranks that deviate from the largest set of ranks that agree (of equally large sets, the
            one with the lowest rank).
    """
    by_rank = [{fingerprint.name: fingerprint for fingerprint in each} for each in all_ranks_fingerprints]
    names = list(dict.fromkeys(name for each in by_rank for name in each))
    differing = [name for name in names if len({each.get(name) for each in by_rank}) > 1]
    if differing:
        raise _mismatch(rank, differing, [each.get(differing[0]) for each in by_rank], ranks or range(len(by_rank)))


def _named(tensors: Any) -> Iterable[tuple[str, Any]]:
    """Return the names and tensors of any collection of them."""
    if isinstance(tensors, Mapping):
        return [(str(name), tensor) for name, tensor in tensors.items()]
    # An array is iterable, too, but its rows are not the tensors.
    if (
        hasattr(tensors, "dtype")
        or isinstance(tensors, (str, bytes, bytearray, memoryview))
        or not isinstance(tensors, Iterable)
    ):
        raise InvalidTypeError(
            "tensors: expected a mapping of names to tensors, or a sequence of tensors or of (name, tensor) pairs;"
            f" got {type(tensors).__name__}: pass a list of tensors [A38]"
        )
    listed = list(tensors)
    if listed and all(isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) for item in listed):
        return listed
    return [(f"tensors[{index}]", tensor) for index, tensor in enumerate(listed)]


def _mismatch(
    rank: int, differing: Sequence[str], per_rank: Sequence[Fingerprint | None], ranks: Sequence[int]
) -> MismatchError:
    """The error about the first of the differing tensors; ``per_rank`` has its fingerprint on each rank."""
    more = f" (the first of {len(differing)} that differ)" if len(differing) > 1 else ""
    subject = f"rank {rank}: tensor {differing[0]!r}{more}"
    present = [fingerprint for fingerprint in per_rank if fingerprint is not None]
    if len(present) < len(per_rank):
        missing = [peer for peer, fingerprint in zip(ranks, per_rank, strict=True) if fingerprint is None]
        having = [peer for peer, fingerprint in zip(ranks, per_rank, strict=True) if fingerprint is not None]
        return MismatchError(
            f"{subject} is not on every rank: it is missing on {_ranks(missing)} and present on {_ranks(having)}."
            " [M12]\nEvery rank must pass the same tensors."
        )
    aspect, said = _first_difference(present)
    ranks_by_said: dict[str, list[int]] = {}
    for peer, text in zip(ranks, said, strict=True):
        ranks_by_said.setdefault(text, []).append(peer)
    most = max(ranks_by_said.values(), key=len)  # of equally long lists the first, which has the lowest rank
    odd = [peer for peer in ranks if peer not in most]
    verb = "differs" if len(odd) == 1 else "differ"
    lines = [f"  {_ranks(peers)}: {text}" for text, peers in ranks_by_said.items()]
    return MismatchError(
        f"{subject} is not the same on every rank: {_ranks(odd)} {verb} from {_ranks(most)} in {aspect} [M13]:\n"
        + "\n".join(lines)
        + "\nBroadcast the tensors from one rank, and make sure that every rank changes them in the same way."
    )


def _first_difference(present: Sequence[Fingerprint]) -> tuple[str, list[str]]:
    """The first aspect in which a tensor that all ranks have differs, and its description on each rank."""
    if len({fingerprint.shape for fingerprint in present}) > 1:
        return "shape", [f"shape {fingerprint.shape}" for fingerprint in present]
    if len({fingerprint.dtype for fingerprint in present}) > 1:
        return "dtype", [f"dtype {fingerprint.dtype}" for fingerprint in present]
    return "values", [f"{f.dtype} of shape {f.shape}, values with digest {f.digest.hex()[:8]}" for f in present]


def _ranks(ranks: Sequence[int]) -> str:
    """Format ranks as text: ``rank 2``, ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join('-'.join(map(str, run)) for run in runs)}"
