"""Texts of files, of the environment and of scripts that are far too large, too deep, or no finite number: one line
each, in bounded time and memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from collectives.base import launchers, places
from collectives.base.errors import InvalidArgumentError
from collectives.engine import timeline
from collectives.launch import discovery, kubernetes, records, status
from collectives.launch.config_file import read as read_config_file
from collectives.launch.hosts import parse_hosts, read_hostfile
from collectives.schedules.mscclpp import from_mscclpp
from collectives.schedules.proof.verify import ScheduleError
from collectives.simulation import topology

DEEP = "[" * 100_000 + "]" * 100_000
DIGITS = "9" * 5000


def one_line(error: pytest.ExceptionInfo[BaseException]) -> str:
    text = str(error.value)
    assert "\n" not in text and len(text) < 1000, text[:2000]
    return text


def test_slots_of_too_many_digits_end_no_discovery(tmp_path: Path) -> None:
    found = discovery.run_script(f"echo a:{DIGITS}", 1)
    assert isinstance(found, str) and "expected 'host slots=4' or 'host:4'" in found and len(found) < 500
    with pytest.raises(InvalidArgumentError) as error:
        parse_hosts(f"a:{DIGITS}")
    one_line(error)
    (tmp_path / "hosts").write_text(f"a slots={DIGITS}\n")
    with pytest.raises(InvalidArgumentError) as error:
        read_hostfile(str(tmp_path / "hosts"))
    one_line(error)


@pytest.mark.parametrize("field", ["base", "ranks", "hosts"])
def test_a_cluster_of_aliases_is_refused(field: str, tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 30)]
    path = tmp_path / "bomb.yaml"
    path.write_text("\n".join([*lines, f"{field}: *a29"]))
    with pytest.raises(InvalidArgumentError) as error:
        topology.load(str(path))
    assert "found an alias" in one_line(error)
    path.write_text("- &a [x]\n- *a\n")
    with pytest.raises(InvalidArgumentError) as error:
        topology.load(str(path))
    one_line(error)


@pytest.mark.parametrize("text", ["ranks: [" * 1 + DEEP + "]", f"ranks: {DIGITS}", DEEP])
def test_a_cluster_that_is_no_cluster_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError) as error:
        topology.load(str(path))
    one_line(error)


def test_a_configuration_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(f"params: {DEEP}")
    with pytest.raises(InvalidArgumentError) as error:
        read_config_file(str(path))
    one_line(error)


def test_a_file_of_kubernetes_whose_name_has_a_line_break_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="without line breaks") as error:
        kubernetes._name(None, "job.yaml\nkind: Secret")
    one_line(error)


@pytest.mark.parametrize("index", ["Infinity", "NaN", "1e400", '"x"', DIGITS, "[]"])
def test_a_task_of_tensorflow_that_is_none_says_nothing(index: str) -> None:
    cluster = '{"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": INDEX}}'
    cluster = cluster.replace("INDEX", index)
    assert places._read(places._tensorflow, {"TF_CONFIG": cluster}) is None
    assert places._read(places._tensorflow, {"TF_CONFIG": DEEP}) is None
    assert launchers._cluster(DEEP) == 0


def test_numbers_of_ranks_without_end_say_nothing() -> None:
    assert launchers._size(DIGITS) == launchers._rank(DIGITS) == 0
    assert launchers._size("4") == 4 and launchers._rank("3") == 4 and launchers._rank("0") == 0
    with pytest.raises(ValueError, match="more than"):
        places.nodes("node[1-99999999999]")


def test_records_and_lines_of_ranks_that_are_none_are_left_out(tmp_path: Path) -> None:
    assert records.parse(DEEP.encode()) is None
    assert records.parse(b'{"rank": 1e400, "code": 1, "text": "", "time": 1, "host": "a"}') is None
    statuses = status.Statuses(1)
    for text in (DEEP, '{"rank": 1e400}', '{"pid": 1e400}', '{"still": "x"}', "[]", "3"):
        statuses.add(0, text.encode() + b"\n")
    assert statuses.lines() == [{"rank": 0}]


def test_files_of_ranks_that_are_none_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    from collectives.base import user_folder

    monkeypatch.setattr(user_folder, "FOLDER", tmp_path / "jobs")
    (tmp_path / "jobs").mkdir(mode=0o700)
    held = []
    for number, text in enumerate((DEEP, '{"pid": 1e400, "began": 1, "job": "a"}', "{}", '{"job": "a"}', "[]")):
        path = tmp_path / "jobs" / f"rank-{number}"
        path.write_text(text)
        file = path.open()
        fcntl.flock(file, fcntl.LOCK_EX)
        held.append(file)
    assert status.by_others() == {}
    for file in held:
        file.close()


def test_traces_and_plans_that_are_nested_too_deeply(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(f"[{DEEP},\n{json.dumps({'name': 'x'})},\n")
    assert timeline.read(path) == [{"name": "x"}]
    with pytest.raises(ScheduleError) as error:
        from_mscclpp('{"name": ' + DEEP + "}")
    one_line(error)
