"""The helpers that programs import from Horovod: what each does."""

from __future__ import annotations

import importlib
import warnings

import pytest

import collectives.horovod

assert collectives.horovod.FOLDER  # imported for its effect: this process finds "horovod" from here on


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment in which no launcher says anything."""
    for launcher in ("HOROVOD", "OMPI_COMM_WORLD", "PMI"):
        for name in ("RANK", "SIZE"):
            monkeypatch.delenv(f"{launcher}_{name}", raising=False)
    return monkeypatch


def test_rank_and_size_are_the_first_launchers_that_tells_them(places: pytest.MonkeyPatch) -> None:
    env = importlib.import_module("horovod.runner.common.util.env")
    assert env.get_env_rank_and_size() == (0, 1)
    places.setenv("PMI_RANK", "2")
    with pytest.raises(RuntimeError, match="expected both PMI_RANK and PMI_SIZE"):
        env.get_env_rank_and_size()
    places.setenv("PMI_SIZE", "4")
    assert env.get_env_rank_and_size() == (2, 4)
    places.setenv("HOROVOD_RANK", "1")
    places.setenv("HOROVOD_SIZE", "3")
    assert env.get_env_rank_and_size() == (1, 3)


def test_versions_and_averages() -> None:
    util = importlib.import_module("horovod.common.util")
    newer = util.is_version_greater_equal_than
    assert newer("2.10.0", "2.9.1") and newer("2.9.1", "2.9.1") and not newer("2.9.1rc1", "2.9.1")
    for versions in ((2, "2.0.0"), ("2.0", "2.0")):
        with pytest.raises(ValueError, match=r"major\.minor\.patch"):
            newer(*versions)
    choose = util.get_average_backwards_compatibility_fun(collectives)
    assert choose(None, None) is collectives.Average and choose(collectives.Max, None) is collectives.Max
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert (choose(None, True), choose(None, False)) == (collectives.Average, collectives.Sum)
    assert [warning.category for warning in said] == [DeprecationWarning] * 2
    with pytest.raises(ValueError, match="got both"):
        choose(collectives.Sum, False)
    assert util.get_extension_full_path("/a/b.py", "c", "lib") == f"/a/c/lib{util.get_ext_suffix()}"
