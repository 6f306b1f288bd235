"""The process before each rank, without MPI: output, exit codes, signals, records."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from collectives.launch import rank
from collectives.worlds import exit_hooks

PLACE = {"PATH": os.environ["PATH"], "PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1"}


def start(
    program: str, output: str = "", width: int = 1, placement: str = "", terminal: str = ""
) -> subprocess.Popen[bytes]:
    command = before(sys.executable, "-c", program, options=[output, str(width), placement, terminal])
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=PLACE)


def before(*program: str, options: Sequence[str] = ("", "1", "", "")) -> list[str]:
    """The command of the process before the program."""
    return [sys.executable, "-I", "-S", rank.__file__, *rank.pack([*options, *program])]


def said(process: subprocess.Popen[bytes]) -> dict[str, str]:
    """What has been said by the end: the rank's streams and records by their letter."""
    out, err = process.communicate(timeout=60)
    assert out == b""
    found = dict.fromkeys("oerx", "")
    for line in err.splitlines():
        frame = re.fullmatch(rb"\x103([oerx])(.*)", line)
        assert frame is not None, line
        found[frame[1].decode()] += frame[2].replace(b"\x10n", b"\n").replace(b"\x10p", b"\x10").decode()
    return found


def ended(program: str, **options: Any) -> tuple[int, dict[str, str]]:
    process = start(program, **options)
    found = said(process)
    return process.returncode, found


def test_a_good_rank_says_no_more_than_that() -> None:
    code, found = ended("import sys; print('out'); print('err', file=sys.stderr)")
    entry = json.loads(found.pop("x"))
    assert code == 0 and found == {"o": "out\n", "e": "err\n", "r": ""} and (entry["rank"], entry["code"]) == (3, 0)


def test_what_exits_records_is_passed_on_even_from_a_process_below(tmp_path: Path) -> None:
    assert rank.RECORDS == exit_hooks.RECORDS
    record = f"""
import os, sys
sys.path.insert(0, {os.path.dirname(os.path.dirname(exit_hooks.__file__))!r})
from collectives.worlds import exit_hooks
exit_hooks.record(os.environ[exit_hooks.RECORDS], 3, exit_hooks.Failure(4, "é" * 20_000 + "the reason", True))
exit_hooks.record(os.environ[exit_hooks.RECORDS], 3, exit_hooks.Failure(5, "later"))
"""
    code, found = ended(
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {record!r}], check=True)\nsys.exit(4)"
    )
    first, second = map(json.loads, found["r"].splitlines())
    assert code == 4 and first["text"].endswith("éthe reason") and len(first["text"]) == 10_000
    assert (first["rank"], first["code"], first["consequence"], second["code"]) == (3, 4, True, 5)
    exit_hooks.record(str(tmp_path / "gone" / "away"), 3, exit_hooks.Failure(5, "nowhere to write"))


def test_all_output_is_passed_on() -> None:
    code, found = ended(
        "import sys\nfor n in range(100_000): print(n, 'x' * 20, file=sys.stderr)\nprint('é' * 50_000)\nsys.exit(1)"
    )
    assert code == 1 and found["e"].count("\n") == 100_000 and found["o"] == "é" * 50_000 + "\n"


def test_a_process_that_holds_stderr_open_is_not_waited_for() -> None:
    heir = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(120)'], stderr=sys.stderr)"
    process = start(f"import subprocess, sys\nprint({heir}.pid)\nsys.exit(4)")
    found = said(process)
    assert process.returncode == 4
    os.kill(int(found["o"]), 9)


def test_a_process_that_never_stops_writing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    passed_on = 0

    def count(rank: str, kind: bytes, data: bytes) -> None:
        nonlocal passed_on
        passed_on += len(data)
        assert passed_on <= 2 << 20

    monkeypatch.setattr(rank, "_write", count)
    with open("/dev/zero", "rb") as endless:
        rank._drain("3", {endless.fileno(): b"e"}, {})
    assert passed_on == 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows what a process ignores")
def test_a_rank_ignores_what_it_would_by_itself() -> None:
    command = before("grep", "SigIgn", "/proc/self/status")
    for ignored in ("", "trap '' HUP INT; "):
        shell = ["sh", "-c", f'{ignored}exec "$@"', "sh"]
        alone, shown = (
            subprocess.run([*shell, *program], capture_output=True, env=PLACE, timeout=60, check=True)
            for program in (["grep", "SigIgn", "/proc/self/status"], command)
        )
        assert alone.stdout.strip() in shown.stderr, (alone, shown)


def test_signals_that_are_ignored_stay_so() -> None:
    program = """
import os, signal
signal.signal(signal.SIGHUP, lambda *_: os.write(1, b"heard"))
signal.signal(signal.SIGUSR1, lambda *_: os._exit(os.write(1, b"end")))
os.kill(os.getppid(), signal.SIGHUP)
os.kill(os.getppid(), signal.SIGUSR1)
while True:
    signal.pause()
"""
    command = ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh", *before(sys.executable, "-c", program)]
    shown = subprocess.run(command, capture_output=True, env=PLACE, timeout=60, check=False)
    assert shown.returncode == 3 and shown.stderr.startswith(b"\x103oend\n"), shown


def test_signals_reach_the_rank() -> None:
    program = (
        "import signal, sys\nsignal.signal(signal.SIGUSR1, lambda *a: sys.exit(6))\nprint('ready', "
        "flush=True)\nsignal.pause()"
    )
    process = start(program)
    assert process.stderr is not None and process.stderr.readline() == b"\x103oready\x10n\n"
    process.send_signal(signal.SIGUSR1)
    said(process)
    assert process.returncode == 6


@pytest.mark.parametrize("catches", [False, True])
def test_a_rank_that_its_launcher_ends_is_told_from_one_that_ends(catches: bool) -> None:
    handler = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: 1 / 0)\n" * catches
    program = f"{handler}import time\nprint('ready', flush=True)\ntime.sleep(60)"
    process = start(program)
    assert process.stderr is not None and process.stderr.readline() == b"\x103oready\x10n\n"
    process.terminate()
    entry = json.loads(said(process)["x"])
    assert entry["code"] == (1 if catches else 143) and entry["ended"] < entry["time"]
    own = json.loads(ended("import os\nos.kill(os.getpid(), 15)")[1]["x"])
    assert own["code"] == 143 and "ended" not in own


def test_a_program_that_cannot_run_is_named() -> None:
    command = [sys.executable, rank.__file__, *rank.pack(["", "1", "", "", "/no/such/program"])]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert shown.returncode == 127 and "cannot run '/no/such/program': No such file" in shown.stderr


TOLD = {"RANK": "3", "SIZE": "8", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("placement", "told"),
    [
        ("", {}),
        ("2,2,4", {**TOLD, "LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "3"}),
        ("1,1,5,1", {**TOLD, "LOCAL_SIZE": "5", "CROSS_RANK": "0", "CROSS_SIZE": "1"}),
        ("8", TOLD),  # it is not where it should be: the MPI has placed the ranks in another way
    ],
)
def test_a_rank_is_told_its_place_in_horovods_words(placement: str, told: dict[str, str]) -> None:
    program = (
        "import json, os; print(json.dumps({name[8:]: text for name, text in os.environ.items() if "
        "name.startswith('HOROVOD_')}))"
    )
    found = json.loads(ended(program, placement=placement)[1]["o"])
    assert found == ({"HOSTNAME": os.uname().nodename, **told} if told else {})


TORCHS_ADDRESS = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
TORCHS_PLACE = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "COLLECTIVES_TORCHS_PLACE": "3 8 29500"}


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({}, {}),
        (TORCHS_ADDRESS, TORCHS_PLACE),
        ({**TORCHS_ADDRESS, "MPI_LOCALNRANKS": "4"}, {**TORCHS_PLACE, "LOCAL_WORLD_SIZE": "4"}),
        ({**TORCHS_ADDRESS, "PMI_SIZE": "1", "PMI_RANK": "0"}, {}),
        ({**TORCHS_ADDRESS, "RANK": "5"}, {**TORCHS_PLACE, "RANK": "5"}),  # somebody else's
    ],
)
def test_a_rank_is_told_its_place_in_torchs_words(environment: dict[str, str], told: dict[str, str]) -> None:
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    command = before(sys.executable, "-c", program)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**PLACE, **environment})
    shown = re.sub(r"^\x10\do", "", process.communicate(timeout=60)[1].decode().splitlines()[0]).removesuffix("\x10n")
    inherited = {**PLACE, **environment}
    found = {name: text for name, text in json.loads(shown).items() if inherited.get(name) != text}
    del found[rank.RECORDS], found[rank.STATUS]
    found.pop("LC_CTYPE", None)
    assert found == {name: text for name, text in told.items() if inherited.get(name) != text}


def test_files_that_cannot_be_written_are_said_and_change_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, found = ended("print('out')", output=str(tmp_path / "file"))
    assert code == 0 and found["o"] == "out\n"
    assert [line.partition(": ")[2].partition(" '")[0] for line in found["e"].splitlines()] == ["cannot write"] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux opens another process's files")
@pytest.mark.parametrize("number", ["3", "0"])
def test_rank_0_reads_the_launchers_standard_input_to_its_end(number: str) -> None:
    program = "import os, sys\nprint(sys.stdin.read(), 'COLLECTIVES_INPUT' in os.environ)"
    source, sink = os.pipe()
    status = os.fstat(source)
    place = f"/proc/{os.getpid()}/fd/{source} {status.st_dev} {status.st_ino}"
    process = subprocess.Popen(
        before(sys.executable, "-c", program),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**PLACE, "PMI_RANK": number, rank.INPUT: place},
    )
    os.write(sink, b"for rank 0")
    os.close(sink)
    shown = process.communicate(timeout=60)[1]
    os.close(source)
    assert (b"\x100ofor rank 0 False\x10n" in shown) == (number == "0"), shown
    assert rank.input_of_here().startswith(f"/proc/{os.getpid()}/fd/0 ")


def test_standard_input_from_the_middle_of_a_file_and_of_no_such_process(tmp_path: Path) -> None:
    (tmp_path / "input").write_text("first\nsecond\n")
    program = f"import sys; sys.path.insert(0, {os.path.dirname(rank.__file__)!r})\nimport rank\n"
    program += "place = sys.argv[1]\nrank._open_input(place)\nprint(sys.stdin.read())"
    with open(tmp_path / "input", "rb", buffering=0) as file:
        file.readline()
        status = os.fstat(file.fileno())
        for process, expected in ((os.getpid(), b"second\n\n"), (1 << 30, b"\n")):
            place = f"/proc/{process}/fd/{file.fileno()} {status.st_dev} {status.st_ino}"
            command = [sys.executable, "-c", program, place]
            shown = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=True)
            assert shown.stdout == expected
