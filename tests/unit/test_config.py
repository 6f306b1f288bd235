"""The environment: read once, frozen, and never ignored in silence."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.config import ALGORITHMS, TRANSPORTS, Config, parse_bytes
from collectives.errors import InvalidArgumentError


def test_an_empty_environment_gives_the_defaults() -> None:
    assert Config.from_environment({}) == Config()


def test_an_empty_variable_counts_as_unset() -> None:
    assert Config.from_environment({"COLLECTIVES_TIMEOUT": "", "COLLECTIVES_ALGORITHM": ""}) == Config()


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVES_TIMEOUT", "12.5")
    assert Config.from_environment().timeout == 12.5


def test_the_configuration_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().timeout = 1.0  # type: ignore[misc]


def test_every_setting_has_its_own_variable() -> None:
    variables = [field.metadata["variable"] for field in dataclasses.fields(Config)]
    assert len(set(variables)) == len(variables)
    assert all(variable.startswith("COLLECTIVES_") for variable in variables)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_can_be_forced(algorithm: str) -> None:
    assert Config.from_environment({"COLLECTIVES_ALGORITHM": algorithm}).algorithm == algorithm


@pytest.mark.parametrize("transport", TRANSPORTS, ids="over-{}".format)
def test_every_transport_can_be_forced(transport: str) -> None:
    assert Config.from_environment({"COLLECTIVES_TRANSPORT": transport}).transport == transport


@pytest.mark.parametrize(
    ("variable", "text", "attribute", "value"),
    [
        ("COLLECTIVES_SEGMENT", "512K", "segment", 512 << 10),
        ("COLLECTIVES_RESULT_POOL", "0", "result_pool", 0),
        ("COLLECTIVES_RESULT_POOL", "1GiB", "result_pool", 1 << 30),
        ("COLLECTIVES_LOCAL_SIZE", "2", "local_size", 2),
        ("COLLECTIVES_TIMEOUT", "0.5", "timeout", 0.5),
    ],
)
def test_settings_are_read(variable: str, text: str, attribute: str, value: object) -> None:
    assert getattr(Config.from_environment({variable: text}), attribute) == value


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("COLLECTIVES_ALGORITHM", "Ring", "one of auto, ring"),
        ("COLLECTIVES_TRANSPORT", "tcp", "one of auto, window"),
        ("COLLECTIVES_SEGMENT", "1.5", "number of bytes"),
        ("COLLECTIVES_SEGMENT", "-4K", "number of bytes"),
        ("COLLECTIVES_SEGMENT", "many", "number of bytes"),
        ("COLLECTIVES_SEGMENT", "inf", "number of bytes"),
        ("COLLECTIVES_SEGMENT", "   ", "number of bytes"),
        ("COLLECTIVES_RESULT_POOL", "nan", "number of bytes"),
        ("COLLECTIVES_TIMEOUT", "0", "positive number of seconds"),
        ("COLLECTIVES_TIMEOUT", "nan", "positive number of seconds"),
        ("COLLECTIVES_TIMEOUT", "soon", "positive number of seconds"),
        ("COLLECTIVES_LOCAL_SIZE", "-1", "whole number"),
        ("COLLECTIVES_LOCAL_SIZE", "2.0", "whole number"),
    ],
)
def test_what_cannot_be_understood_is_an_error_that_names_variable_text_and_expectation(variable: str, text: str, expected: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Config.from_environment({variable: text})
    message = str(caught.value)
    assert variable in message and repr(text) in message and expected in message


@given(
    count=st.integers(0, 1 << 50),
    unit=st.sampled_from(["", "b", "k", "K", "kb", "KiB", "m", "MiB", "G", "gib", "MB"]),
    space=st.sampled_from(["", " "]),
)
def test_sizes_are_powers_of_two(count: int, unit: str, space: str) -> None:
    scale = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}[unit[:1].lower()]
    assert parse_bytes(f"{space}{count}{unit}{space}") == count * scale


def test_halves_of_a_unit_are_whole_bytes() -> None:
    assert parse_bytes("0.5K") == 512
    assert parse_bytes("1.5MiB") == 3 << 19
