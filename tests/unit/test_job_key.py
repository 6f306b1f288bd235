"""The job's key: given in the environment, or derived from a file that is the user's alone."""

from __future__ import annotations

import concurrent.futures
import os
from pathlib import Path

import pytest

from collectives.base.errors import InvalidArgumentError, TransportError
from collectives.transport.stores import job_key


def test_the_environment_gives_it() -> None:
    assert job_key.from_environment({}) is None and job_key.from_environment({"COLLECTIVES_KEY": " "}) is None
    assert job_key.from_environment({"COLLECTIVES_KEY": "0f" * 16}) == b"\x0f" * 16


@pytest.mark.parametrize("text", ["0f" * 15, "secret" * 10, "0" * 33])
def test_a_bad_key_is_refused_and_not_told(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="COLLECTIVES_KEY: expected at least 32 hexadecimal") as caught:
        job_key.from_environment({"COLLECTIVES_KEY": text})
    assert text not in str(caught.value)


def test_the_users_key_is_made_once_and_is_the_users_alone(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path)}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: job_key.of_user(environment, "job"), range(32)))
    path = tmp_path / ".config" / "collectives" / "key"
    assert len(keys) == 1 and path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["key"]
    assert job_key.of_user(environment, "another job") not in keys
    assert job_key.of_user({**environment, "XDG_CONFIG_HOME": str(tmp_path / "x")}, "job") not in keys
    assert (tmp_path / "x" / "collectives" / "key").exists()


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    environment = {"XDG_CONFIG_HOME": str(tmp_path)}
    job_key.of_user(environment, "job")
    path = job_key.path_of_user(environment)
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(TransportError, match=f"other users can read or change {path}.*COLLECTIVES_KEY"):
            job_key.of_user(environment, "job")
    path.chmod(0o600)
    for text in ("", "abc", "00" * 15):
        path.write_text(text)
        with pytest.raises(TransportError, match="contains no key"):
            job_key.of_user(environment, "job")


def test_a_file_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TransportError, match=r"cannot be read or created: .*; set COLLECTIVES_KEY on all ranks"):
        job_key.of_user({"HOME": str(tmp_path / "file")}, "job")


def test_a_foreign_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"XDG_CONFIG_HOME": str(tmp_path)}
    job_key.of_user(environment, "job")
    monkeypatch.setattr(os, "getuid", lambda: 1)
    with pytest.raises(TransportError, match="other users can read or change"):
        job_key.of_user(environment, "job")


def test_a_user_without_a_home_gets_no_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number that the system does not know."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME")

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(TransportError, match=r"HOME is not set.*; set HOME, or set COLLECTIVES_KEY on all ranks"):
        job_key.of_user({}, "job")
    assert not list(tmp_path.iterdir())
    job_key.of_user({"XDG_CONFIG_HOME": str(tmp_path)}, "job")
