"""What the ranks of a notebook print is shown as it was, however it arrives."""

from __future__ import annotations

from collections import deque

import pytest

from collectives.notebook.rank import MARK
from collectives.notebook.session import Session


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1 << 16])
def test_characters_that_come_in_pieces_are_put_together(piece: int, capsys: pytest.CaptureFixture[str]) -> None:
    text = "[0] Größe é 漢字 🙂\n[1] 50 %\r[1] 100 %\r\n" * (20 if piece < 1000 else 5000)
    data = f"{text}[0] {MARK}\n{MARK}\n".encode()
    session = Session.__new__(Session)
    session._output = deque()
    session._rests, session._awaited = {True: b"", False: b""}, {True: 0, False: 2}
    for start in range(0, len(data), piece):
        session._output.append((False, data[start : start + piece]))
        session.show_output()
    assert capsys.readouterr().out == text and session._awaited == {True: 0, False: 0}
