"""``collectives.run``: the launcher's, found at the top, under either name of the number of ranks."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import collectives
from collectives import launch
from collectives.base.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("numbers", "ranks"), [({}, 1), ({"np": 2}, 2), ({"num_proc": 3}, 3), ({"np": 4, "num_proc": 4}, 4), ({"np": 0}, 0)]
)
def test_the_number_of_ranks_has_two_names(
    numbers: dict[str, int], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(launch, "run", lambda *args, **kwargs: seen.append((args, kwargs)) or ["returned"])
    assert collectives.run(len, ["abc"], timeout=5, **numbers) == ["returned"]
    assert seen == [((len, ["abc"], None), {"np": ranks, "options": (), "executable": None, "timeout": 5})]


def test_two_numbers_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="np=2 and num_proc=3"):
        collectives.run(len, ["abc"], np=2, num_proc=3)


def test_nothing_that_the_launcher_takes_is_missing() -> None:
    assert set(inspect.signature(launch.run).parameters) | {"num_proc"} == set(
        inspect.signature(collectives.run).parameters
    )
