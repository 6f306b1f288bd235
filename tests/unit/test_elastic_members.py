"""What the environment says to a member of an elastic job that no launcher of ours has started."""

from __future__ import annotations

from typing import Any

import pytest

from collectives.base.config import unknown
from collectives.base.errors import InvalidArgumentError
from collectives.worlds.elastic_members import from_environment

KEY = "ab" * 32
BASE = {"COLLECTIVES_ELASTIC": "1", "COLLECTIVES_RENDEZVOUS": "tcp://node1:29400", "COLLECTIVES_KEY": KEY}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (None, None, 1, None, True, 600.0, "")),
        ({"COLLECTIVES_RANK": "1", "COLLECTIVES_SIZE": "3"}, (1, 3, 1, None, True, 600.0, "")),
        ({"COLLECTIVES_SIZE": "3"}, (None, None, 1, None, True, 600.0, "")),
        ({"COLLECTIVES_RANK": "3", "COLLECTIVES_SIZE": "3"}, (None, None, 1, None, True, 600.0, "")),
        (
            {"COLLECTIVES_MIN_SIZE": "2", "COLLECTIVES_MAX_SIZE": "4", "COLLECTIVES_ELASTIC_TIMEOUT": "9"},
            (None, None, 2, 4, True, 9.0, ""),
        ),
        ({"COLLECTIVES_QUORUM": "any"}, (None, None, 1, None, False, 600.0, "")),
    ],
)
def test_settings(variables: dict[str, str], expected: Any) -> None:
    job: Any = from_environment(BASE | variables)
    assert tuple(job._settings) == expected
    assert unknown(BASE | variables) == []
    job._service.close()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("COLLECTIVES_RENDEZVOUS", "", "expected also COLLECTIVES_RENDEZVOUS=tcp://host:port"),
        ("COLLECTIVES_RANK", "one", "COLLECTIVES_RANK='one'"),
        ("COLLECTIVES_MIN_SIZE", "0", "COLLECTIVES_MIN_SIZE='0': expected a number of ranks"),
        ("COLLECTIVES_MAX_SIZE", "many", "COLLECTIVES_MAX_SIZE='many'"),
        ("COLLECTIVES_QUORUM", "half", '"majority" or "any"'),
        ("COLLECTIVES_ELASTIC_TIMEOUT", "soon", "expected seconds"),
    ],
)
def test_what_is_wrong_is_named(name: str, value: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        from_environment(BASE | {name: value})
