"""A traceback of an error of ours ends in the program's line; all other tracebacks stay whole."""

from __future__ import annotations

import traceback

import pytest

from collectives.base import tracebacks
from collectives.base.config import Config, parse_bool
from collectives.base.errors import CollectivesError, InvalidArgumentError


def frames(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def call() -> None:
    Config.from_environment({"COLLECTIVES_LOG_LEVEL": "loud"})


def test_frames_of_the_package_are_hidden() -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        call()
    assert "from_environment" in frames(raised.value)
    tracebacks.hide_engine(raised.value)
    assert frames(raised.value)[-1] == "call"


def test_frames_of_a_cause_are_hidden_too_and_a_cycle_ends() -> None:
    with pytest.raises(CollectivesError) as raised:
        try:
            call()
        except InvalidArgumentError as error:
            raise CollectivesError("later") from error
    cause = raised.value.__cause__
    assert cause is not None
    cause.__context__ = raised.value
    tracebacks.hide_engine(raised.value)
    assert frames(cause)[-1] == "call"


def test_an_error_of_other_code_keeps_its_frames() -> None:
    with pytest.raises(ValueError, match="maybe") as raised:
        parse_bool("maybe")
    assert not isinstance(raised.value, CollectivesError)
    before = frames(raised.value)
    tracebacks.hide_engine(raised.value)
    assert frames(raised.value) == before


def test_an_error_with_frames_of_the_package_alone_keeps_them() -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        call()
    while raised.value.__traceback__ and raised.value.__traceback__.tb_frame.f_code.co_name != "from_environment":
        raised.value.__traceback__ = raised.value.__traceback__.tb_next
    tracebacks.hide_engine(raised.value)
    assert "call" not in frames(raised.value) and "from_environment" in frames(raised.value)
