"""A misspelled word is suggested, a far-fetched one is not."""

from __future__ import annotations

import pytest

from collectives.base.suggestions import did_you_mean, nearest
from collectives.launch.command_line import make_parser
from collectives.tools import command

OPTIONS = [flag for action in make_parser("collectivesrun")._actions for flag in action.option_strings]


@pytest.mark.parametrize(
    ("word", "words", "meant"),
    [
        ("bnech", list(command.COMMANDS), "bench"),
        ("alreduce", ["allreduce", "reducescatter"], "allreduce"),
        ("--hostfule", OPTIONS, "--hostfile"),
        ("--bogus", OPTIONS, ""),
        ("--collective", OPTIONS, ""),
        ("", list(command.COMMANDS), ""),
    ],
)
def test_only_what_is_nearly_the_same_is_suggested(word: str, words: list[str], meant: str) -> None:
    assert nearest(word, words) == meant
    assert did_you_mean(word, words) == (f" (did you mean {meant!r}?)" if meant else "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bnech"], "unknown command 'bnech' (did you mean 'bench'?)"),
        (["bench", "alreduce"], "got 'alreduce' (did you mean 'allreduce'?)"),
        (["simulate"], "required: COMMAND"),
        (["simulate", "step", "--bogus"], "error: "),
        (["simulate", "collective", "--cluster", "none", "--bytes", "4"], "cluster 'none'"),
        (["report"], "required: trace"),
        (["status", "--bogus"], "--bogus"),
        (["explain"], "required: CODE"),
        (["plan", "--draw", "x.html"], "required: -np"),
        (["run", "--bogus"], "unknown option '--bogus'; "),
    ],
)
def test_a_usage_error_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = command.main(arguments)
    except SystemExit as leaving:
        code = leaving.code  # type: ignore[assignment]
    printed, error = capsys.readouterr()
    assert code == 2 and printed == ""
    assert said in error and error.count("\n") == 1 and error.endswith("\n")
