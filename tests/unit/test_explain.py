"""``collectives explain``: the cause and the cure of a message, in a checkout and in an installed wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from collectives.tools import error_codes
from collectives.tools.command import main

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("word", ["N1", "n1", "[N1]"])
def test_a_code_has_its_message_its_cause_and_its_cure(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", word]) == 0
    shown = capsys.readouterr().out
    (message,) = error_codes.messages("N1")
    assert shown.startswith(f"N1 {message.kind}, in collectives/{message.path}:\n    ")
    assert " ".join(shown.split()).count(" ".join(message.text.split())) == 1
    assert "\n\nCause: " in shown and "\n\nCure: " in shown
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_several_codes_have_their_messages(capsys: pytest.CaptureFixture[str]) -> None:
    found = {code for situation in error_codes.situations() for code in situation.codes}
    some = [*sorted(found - {"W64"})[::97], "W64"]  # in the source the last one's text and its code are two literals
    assert main(["explain", *some]) == 0
    shown = capsys.readouterr().out
    for code in some:
        (message,) = error_codes.messages(code)
        assert shown.count(f"{code} {message.kind}".rstrip() + f", in collectives/{message.path}:\n") == 1


def test_codes_of_one_section_share_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "M3", "M1", "R29", "M3"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("Cause: ") == shown.count("Cure: ") == 2
    assert shown.index("M3 ") < shown.index("M1 ") < shown.index("R29 ")


def test_links_are_shown_as_places(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "R1", "F95"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "elastic jobs (docs/elastic.md)" in shown and "docs/torch-distributed.md" in shown and "](" not in shown


def test_a_code_that_does_not_exist_names_those_of_its_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "M999", "M6"]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("collectives explain: no message has the code M999; ") and "from M1 to M" in shown.err
    assert "Cause: " in shown.out


@pytest.mark.parametrize("word", ["mismatch", "X3", "M"])
def test_what_is_no_code_has_the_families_listed(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", word]) == 2
    shown = capsys.readouterr().err
    assert f"expected a code such as M3, got {word!r}" in shown
    families = {line.split()[0] for line in shown.splitlines()[1:]}
    assert families == {code[0] for situation in error_codes.situations() for code in situation.codes}


def test_a_code_that_was_retired_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "A79"]) == 0
    assert capsys.readouterr().out.startswith("A79: only an older version has this message")


@pytest.mark.slow
def test_a_wheel_explains_without_the_repository(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    pytest.importorskip("hatch_fancy_pypi_readme")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    shown = subprocess.run(
        [sys.executable, "-m", "collectives.tools", "explain", "M3"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert "Cure: " in shown
