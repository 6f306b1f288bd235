"""The exception tree: what a program may catch."""

from __future__ import annotations

import pytest

from collectives.base import errors

TREE = {
    "InvalidArgumentError": (ValueError,),
    "InvalidTypeError": (TypeError,),
    "InvalidSplitsError": (TypeError, ValueError),
    "UnsupportedError": (ValueError, errors.OperationError),
    "NotInitializedError": (ValueError, RuntimeError),
    "OperationError": (RuntimeError,),
    "MismatchError": (errors.OperationError,),
    "RecoverableError": (errors.OperationError, RuntimeError),
    "RankFailedError": (errors.RecoverableError,),
    "CollectiveTimeoutError": (errors.RecoverableError, TimeoutError),
    "TransportError": (errors.RecoverableError,),
    "OutOfMemoryError": (RuntimeError,),
    "ForkedProcessError": (RuntimeError,),
    "MissingDependencyError": (ImportError,),
}


@pytest.mark.parametrize("name", TREE)
def test_every_error_is_ours_and_a_standard_one(name: str) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, errors.CollectivesError)
    for base in TREE[name]:
        with pytest.raises(base, match="rank 1: tensor 'w'"):
            raise kind("rank 1: tensor 'w'")


def test_the_tree_is_complete() -> None:
    ours = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.CollectivesError) and kind is not errors.CollectivesError
    }
    assert ours == set(TREE)


def test_argument_errors_are_no_runtime_errors() -> None:
    assert not issubclass(errors.InvalidArgumentError, RuntimeError)
    assert not issubclass(errors.InvalidTypeError, (RuntimeError, ValueError))


def test_a_message_names_its_rank_once() -> None:
    once = errors.of_rank(2, "tensor 'w': too late")
    assert once == "rank 2: tensor 'w': too late" == errors.of_rank(2, once)
    assert errors.of_rank(1, once) == "rank 1: rank 2: tensor 'w': too late"
    assert errors.of_rank(2, "rank 20: tensor 'w'") == "rank 2: rank 20: tensor 'w'"
    error = errors.TransportError(once)
    assert errors.in_words(2, error) == "TransportError: tensor 'w': too late"
    assert errors.in_words(1, error) == f"TransportError: {once}"
