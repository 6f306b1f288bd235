"""Fingerprints tell tensors apart, and the error names the first that differs, in what, and on which ranks."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.base.errors import InvalidArgumentError, InvalidTypeError, MismatchError
from collectives.tensors.consistency import compare, fingerprints

ml_dtypes = pytest.importorskip("ml_dtypes")


def told(*ranks: Any, rank: int = 0) -> str:
    """What the error says when each rank passes its tensors."""
    with pytest.raises(MismatchError) as error:
        compare(rank, [fingerprints(tensors) for tensors in ranks])
    return str(error.value)


# ---- fingerprints


def test_a_fingerprint_says_name_shape_and_dtype() -> None:
    (found,) = fingerprints({"weight": np.ones((2, 3), ml_dtypes.bfloat16)})
    assert found[:3] == ("weight", (2, 3), "bfloat16")
    assert isinstance(found.digest, bytes) and len(found.digest) == 16
    assert pickle.loads(pickle.dumps(found)) == found


def test_mappings_pairs_sequences_and_generators_are_read_in_their_order() -> None:
    tensors = {"b": np.ones(3), "a": np.zeros((2, 2), np.int8)}
    named = fingerprints(tensors)
    assert [found.name for found in named] == ["b", "a"]
    assert (
        fingerprints(tensors.items())
        == fingerprints(list(tensors.items()))
        == fingerprints(iter(tensors.items()))
        == named
    )
    unnamed = fingerprints(tensor for tensor in tensors.values())
    assert [found.name for found in unnamed] == ["tensors[0]", "tensors[1]"]
    assert [found[1:] for found in unnamed] == [found[1:] for found in named]
    assert fingerprints([]) == fingerprints({}) == []
    assert [found.name for found in fingerprints({3: np.ones(1), "x": 2.5})] == ["3", "x"]


def test_layout_and_byte_order_do_not_matter() -> None:
    array = np.random.default_rng(0).standard_normal((4, 6))
    alike = [array, np.asfortranarray(array), array.astype(">f8"), np.repeat(array, 2, axis=1)[:, ::2]]
    assert len({fingerprints([each])[0] for each in alike}) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.zeros(4, np.int32), np.zeros(4, np.uint32)),
        (np.zeros(4, np.float16), np.zeros(4, ml_dtypes.bfloat16)),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (np.zeros((0, 3)), np.zeros((3, 0))),
        (np.zeros(1), np.zeros(())),
        (np.zeros(1), -np.zeros(1)),
    ],
)
def test_digests_cover_shape_dtype_and_every_bit(one: Any, other: Any) -> None:
    assert fingerprints([one])[0].digest != fingerprints([other])[0].digest


@given(st.integers(1, 5000), st.data())
def test_one_bit_anywhere_changes_the_digest(count: int, data: st.DataObject) -> None:
    array = np.random.default_rng(count).integers(0, 256, count, np.uint8)
    changed = array.copy()
    changed[data.draw(st.integers(0, count - 1))] ^= np.uint8(1 << data.draw(st.integers(0, 7)))
    assert fingerprints([array]) == fingerprints([array.copy()])
    assert fingerprints([array])[0].digest != fingerprints([changed])[0].digest


@pytest.mark.parametrize("wrong", [np.ones((2, 2)), np.float32(1), "weight", b"weight", 3, None])
def test_a_single_tensor_or_no_collection_is_refused(wrong: Any) -> None:
    with pytest.raises(
        InvalidTypeError, match=f"expected a mapping of names to tensors.*got {type(wrong).__name__}: pass a list"
    ):
        fingerprints(wrong)


def test_what_cannot_be_looked_at_is_refused_under_its_name() -> None:
    with pytest.raises(InvalidTypeError, match=r"^optimizer\.state"):
        fingerprints({"weight": np.ones(1), "optimizer.state": "adam"})
    with pytest.raises(InvalidTypeError, match=r"^tensors\[1\]"):
        fingerprints([np.ones(1), [1, 2]])


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="got 'w' twice"):
        fingerprints([("w", np.ones(1)), ("w", np.ones(1))])


# ---- comparison


@given(st.integers(1, 6), st.permutations(["a", "b", "c"]))
def test_equal_tensors_pass_in_any_order(size: int, order: list[str]) -> None:
    tensors = {name: np.full(3, position) for position, name in enumerate("abc")}
    rows = [fingerprints(tensors)] * (size - 1) + [fingerprints({name: tensors[name] for name in order})]
    compare(0, rows)
    compare(0, [[] for _ in range(size)])


def test_a_difference_in_values_names_the_tensor_and_the_odd_rank() -> None:
    good, bad = {"w": np.zeros((2, 3)), "b": np.zeros(2)}, {"w": np.zeros((2, 3)), "b": np.ones(2)}
    said = told(good, good, bad, good, rank=1).splitlines()
    assert (
        said[0] == "rank 1: tensor 'b' is not the same on every rank: rank 2 differs from ranks 0-1, 3 in values [M13]:"
    )
    digests = [fingerprints(tensors)[1].digest.hex()[:8] for tensors in (good, bad)]
    assert said[1] == f"  ranks 0-1, 3: float64 of shape (2,), values with digest {digests[0]}"
    assert said[2] == f"  rank 2: float64 of shape (2,), values with digest {digests[1]}"
    assert said[3] == "Broadcast the tensors from one rank, and make sure that every rank changes them in the same way."
    assert len(said) == 4


def test_a_difference_in_shape_or_dtype_is_named_before_the_values() -> None:
    said = told([np.zeros(3)], [np.ones(4, np.int8)], [np.zeros(3)])
    assert "tensor 'tensors[0]' is not the same on every rank: rank 1 differs from ranks 0, 2 in shape [M13]:" in said
    assert "  ranks 0, 2: shape (3,)\n  rank 1: shape (4,)\n" in said
    said = told([np.zeros(3)], [np.ones(3)], [np.ones(3, np.float32)])
    assert "rank 2 differs from ranks 0-1 in dtype [M13]:" in said
    assert "  ranks 0-1: dtype float64\n  rank 2: dtype float32\n" in said


def test_a_missing_tensor_is_named_with_the_ranks_that_lack_it() -> None:
    one, two = [np.zeros(3)], [np.zeros(3), np.zeros(2)]
    assert told(two, one, one, one).startswith(
        "rank 0: tensor 'tensors[1]' is not on every rank: it is missing on ranks 1-3 and present on rank 0."
    )
    assert "it is missing on rank 0 and present on rank 1." in told([], one)
    # Ranks that have it may differ as well; that it is missing comes first.
    assert "tensor 'a' is not on every rank: it is missing on rank 1 and present on ranks 0, 2." in told(
        {"a": 1}, {}, {"a": 2}
    )


def test_the_first_tensor_is_the_first_of_the_lowest_rank_that_has_it() -> None:
    said = told({"same": 0, "y": 1, "x": 1}, {"x": 2, "new": 0, "y": 2, "same": 0})
    assert "tensor 'y' (the first of 3 that differ)" in said
    assert "tensor 'late'" in told({"same": 0}, {"late": 1, "same": 0})


def test_the_majority_is_right_and_of_equally_many_the_lowest_rank() -> None:
    assert "rank 0 differs from ranks 1-2 in values" in told([1.0], [2.0], [2.0])
    assert "ranks 1, 3 differ from ranks 0, 2 in values" in told([1.0], [2.0], [1.0], [2.0])
    said = told([1.0], [2.0], [3.0], [3.0])
    assert "ranks 0-1 differ from ranks 2-3 in values" in said
    assert [line.split(":")[0] for line in said.splitlines()[1:-1]] == ["  rank 0", "  rank 1", "  ranks 2-3"]


def test_the_ranks_of_a_process_set_bear_their_own_numbers() -> None:
    mine, theirs = fingerprints([np.zeros(2)]), fingerprints([np.ones(2)])
    with pytest.raises(MismatchError, match=r"^rank 3: .* rank 5 differs from ranks 1, 3 in values"):
        compare(3, [mine, mine, theirs], (1, 3, 5))
