"""Pictures of algorithms show what their schedules do, and every list of algorithms is that of the registry."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from collectives import api
from collectives.base.errors import InvalidArgumentError
from collectives.schedules import registry
from collectives.schedules.algorithm import Algorithm
from collectives.tools import drawing, plan
from website import algorithms_table

ROOT = Path(__file__).parents[2]
ALL = [pytest.param(each, id=f"{each.collective}-{each.name}") for each in drawing.with_schedules()]


def frames(algorithm: Algorithm, size: int) -> list[ET.Element]:
    """The frames of a picture, which is well-formed XML, so that any page can contain it."""
    element = drawing.page_element(algorithm.collective, algorithm.name, size)
    assert "\n\n" not in element, "a blank line ends HTML in Markdown"
    box = ET.fromstring(element[: element.index("<script>")])
    assert box.tag == "div" and box.get("class") == "collectives-steps"
    return list(box.iter("li"))


@pytest.mark.parametrize("size", [1, 2, 5, 8])
@pytest.mark.parametrize("algorithm", ALL)
def test_a_picture_has_a_frame_for_each_round_and_each_image_its_words(algorithm: Algorithm, size: int) -> None:
    found = frames(algorithm, size)
    hosts = [range(-(-size // 2)), range(-(-size // 2), size)] if algorithm.spans_hosts and size > 1 else [range(size)]
    assert len(found) == 1 + len(algorithm.schedules(hosts)(0).rounds)
    assert all(image.get("aria-label") for frame in found for image in frame.iter("svg"))


def test_the_ring_of_three_ranks_is_told_round_by_round() -> None:
    found = frames(registry.find("allreduce", "ring"), 3)
    captions = ["".join(frame.find("p").itertext()) for frame in found]  # type: ignore[union-attr]
    assert captions[1] == "Round 0: 0 → 1 chunk 2; 1 → 2 chunk 0; 2 → 0 chunk 1"
    holds = [list(frame.iter("svg"))[1].get("aria-label", "") for frame in found]
    assert "rank 1 chunk 2: 1;" in holds[0] and "rank 1 chunk 2: 0 1;" in holds[1]
    assert holds[4].count(": 0 1 2") == 9
    arrows = [sum(path.get("class") == "arrow" for path in frame.iter("path")) for frame in found]
    assert arrows == [0, 3, 3, 3, 3]


@pytest.mark.parametrize(
    ("collective", "algorithm", "size", "text"),
    [
        ("allreduce", "rings", 4, "an algorithm of allreduce: ring, direct"),
        ("barrier", "ring", 4, "an algorithm of barrier: none has a schedule"),
        ("allreduce", "native", 4, "an algorithm of allreduce: ring, direct"),
        ("allreduce", "ring", 17, "1 to 16 ranks"),
    ],
)
def test_what_cannot_be_drawn_is_refused(collective: str, algorithm: str, size: int, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        drawing.page_element(collective, algorithm, size)


def test_the_plan_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "ring.html"
    assert plan.main(["-np", "4", "--draw", str(page)]) == 0
    assert page.read_text(encoding="utf-8") == drawing.page("allreduce", "ring", 4)
    assert plan.main(["-np", "4", "--draw", str(page), "--algorithm", "no"]) == 2
    assert "algorithm='no': expected one of auto, ring" in capsys.readouterr().err


def test_the_table_has_every_schedule_with_its_cost() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in algorithms_table.table().splitlines()[2:]]
    assert [(row[0], row[1].strip("`")) for row in rows] == [
        (each.collective, each.name) for each in drawing.with_schedules()
    ]
    costs = {(row[0], row[1].strip("`")): (row[2], row[3]) for row in rows}
    assert costs["allreduce", "ring"] == ("2(N-1)", "2(N-1)/N S")
    assert costs["allreduce", "one-shot"] == ("1", "(N-1) S")
    assert costs["broadcast", "recursive-doubling"] == ("⌈log2 N⌉", "⌈log2 N⌉ S")
    assert "for 8 ranks" not in algorithms_table.table()


def test_lists_of_algorithms_in_texts_are_the_registrys() -> None:
    """The table of settings, the README's table of what works, and the docstring of allreduce."""
    names = {*registry.on_host("allreduce"), *registry.on_gpu("allreduce")}
    readme = "\n".join(
        path.read_text() for path in (ROOT / "README.md", ROOT / "docs" / "settings.md") if path.exists()
    )
    [setting] = re.findall(r"^\| `ALGORITHM` .*$", readme, re.MULTILINE)
    assert set(re.findall(r"`([a-z-]+)`", setting)) == {*names, "auto"}
    [line] = re.findall(r"algorithm: (.*?); chosen by", " ".join((api.allreduce.__doc__ or "").split()))
    assert set(re.findall(r'"([a-z-]+)"', line)) == names
    [works] = re.findall(r"^\| algorithms \| (.*?);", readme, re.MULTILINE)
    with_schedules = {each.name for each in drawing.with_schedules()}
    assert {word.replace(" ", "-") for word in works.split(", ")} - {"binomial-tree"} == with_schedules
