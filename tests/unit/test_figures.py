"""The README's figures are those that their sources give: docs/peers.md and the schedule of the ring."""

from __future__ import annotations

import pytest

from website import figures


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_figure_is_as_it_would_be_drawn_now(name: str) -> None:
    assert (figures.PICTURES / name).read_text() == figures.FIGURES[name](), "draw it again: python -m website.figures"


def test_every_picture_has_colours_for_a_dark_page() -> None:
    pictures = sorted(figures.PICTURES.glob("*.svg"))
    assert len(pictures) > 5
    assert [file.name for file in pictures if "prefers-color-scheme: dark" not in file.read_text()] == []
