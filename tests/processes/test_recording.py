"""The recording of the first page, made anew with shorter steps: a rank is killed, and no step's loss is missing."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from website import recording


def test_the_loss_goes_on_when_a_rank_is_killed() -> None:
    pytest.importorskip("sklearn")
    lines = recording.record("--seconds", "0.05")
    text = "\n".join(text for _, _, text in lines)
    steps = re.findall(r"step +(\d+), (\d) ranks: loss ([\d.]+)", text)
    assert [int(step) for step, _, _ in steps] == list(range(1, 21))
    losses = [float(loss) for _, _, loss in steps]
    assert losses == sorted(losses, reverse=True) and losses[0] == 2.303 and losses[-1] < 1.2
    assert [ranks for _, ranks, _ in steps][:8] == [*"3333333", "2"]
    assert [kind for _, kind, _ in lines].count("kill") == 1 and "was killed by SIGKILL" in text
    root = ElementTree.fromstring(recording.picture(lines))
    drawn = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert drawn == [text for _, _, text in lines]
