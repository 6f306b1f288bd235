"""The built documentation, ``build/site/``: complete, without dead links, read and searched in a browser without a
network. ``make test`` builds it before."""

from __future__ import annotations

import html
import os
import re
import subprocess
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import collectives
from tests.processes.test_status import BROWSER, QUIETLY
from tests.support.launching.mpirun import ROOT

SITE = ROOT / "build" / "site"
pytestmark = pytest.mark.skipif(not (SITE / "index.html").exists(), reason="not built: make site")
TYPED = """
<script>
addEventListener("load", () => {
  document.querySelector(".md-search__button").click();
  const within = (node) =>
    [...node.querySelectorAll("*")].flatMap((each) => (each.shadowRoot ? within(each.shadowRoot) : [each]));
  const field = () => within(document).find((each) => each.getAttribute("role") === "combobox");
  const type = (left) => {
    if (left) {
      field().value += left[0];
      field().dispatchEvent(new Event("input", { bubbles: true }));
      return setTimeout(type, left.length > 1 ? 50 : 1000, left.slice(1));
    }
    const shown = within(document).filter((each) => each.matches("a[href]") && each.getRootNode() !== document);
    document.title = `FOUND ${field().value} ${shown.map((each) => each.getAttribute("href")).join(" ")}`;
  };
  setTimeout(type, 500, "WORDS");
});
</script></body>"""
"""Types words into the search of a page, letter by letter, and makes what stands there and the results its title."""


class Page(HTMLParser):
    """What a page loads, where it links to, and the places that links may lead to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.places |= {values[name] for name in ("id", "name") if name in values}
        loads = [values[name] for name in ("src", "srcset", "data") if name in values]
        if tag == "link" and values.get("rel") not in ("canonical", "next", "prev"):
            loads.append(values.get("href", ""))
        self.loads += loads
        if tag == "a" and "href" in values:
            self.links.append(values["href"])


@cache
def pages() -> dict[Path, Page]:
    return {path: Page(path) for path in SITE.rglob("*.html") if path.name != "404.html"}


def test_nothing_is_loaded_from_elsewhere() -> None:
    assert len(pages()) > 30
    foreign = {load for page in pages().values() for load in page.loads if urlsplit(load).netloc}
    styles = "".join(path.read_text() for path in SITE.rglob("*.css"))
    foreign |= set(re.findall(r"(?:@import\s*|url\()\s*[\"']?(?:https?:)?//[^)\"';]*", styles))
    assert not foreign


def test_every_link_leads_to_a_place_in_the_site() -> None:
    dead = []
    for path, page in pages().items():
        for link in page.links:
            address = urlsplit(link)
            if address.scheme or address.netloc:
                continue
            goal = path if not address.path else (path.parent / unquote(address.path)).resolve()
            goal = goal / "index.html" if goal.is_dir() else goal
            if goal in pages() and address.fragment:
                places = pages()[goal].places
                if unquote(address.fragment) not in places:
                    dead.append(f"{path.relative_to(SITE)}: {link}")
            elif not goal.exists():
                dead.append(f"{path.relative_to(SITE)}: {link}")
    assert not dead


def test_links_name_pages_by_their_titles() -> None:
    link = re.compile(r"<a [^>]*>(?:<code>)?[\w/-]+\.md(?:</code>)?</a>")
    assert [(path.relative_to(SITE), found) for path in pages() for found in link.findall(path.read_text())] == []


def test_the_first_page_has_the_words_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    shown = re.sub(r"<[^>]*>", "", (SITE / "index.html").read_text())
    claim = re.search(r"\*\*(Collective communication [^*]*)\*\*", readme)
    assert claim and " ".join(claim[1].split()) in " ".join(shown.split())


def test_the_reference_has_every_function_and_class() -> None:
    places = pages()[SITE / "reference" / "collectives.html"].places
    callables = [name for name in collectives.__all__ if callable(getattr(collectives, name))]
    assert {f"collectives.{name}" for name in callables} - places == set()


def shown(page: Path, profile: Path) -> str:
    """A page as a browser has it in the end."""
    command = [str(BROWSER), *QUIETLY.split(), f"--user-data-dir={profile}", page.as_uri()]
    return html.unescape(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
@pytest.mark.parametrize(
    ("words", "expected"), [("grouped_allreduce", "reference/collectives.html"), ("R19", "troubleshooting/ranks.html")]
)
def test_the_search_works_where_the_site_is_a_folder(words: str, expected: str, tmp_path: Path) -> None:
    page = SITE / f"search-{os.getpid()}.html"
    page.write_text((SITE / "index.html").read_text().replace("</body>", TYPED.replace("WORDS", words)))
    try:
        title = re.search(r"<title>FOUND (.*)</title>", shown(page, tmp_path))
    finally:
        page.unlink()
    assert title and title[1].split()[0] == words  # what was typed stays
    assert expected in title[1].split()[1]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
def test_the_first_page_steps_through_a_ring(tmp_path: Path) -> None:
    page = SITE / f"steps-{os.getpid()}.html"
    click = '<script>document.querySelectorAll(".collectives-steps button")[1].click()</script></body>'
    page.write_text((SITE / "index.html").read_text().replace("</body>", click))
    try:
        dom = shown(page, tmp_path)
    finally:
        page.unlink()
    assert re.findall(r'<li class="now">.*?<strong>(.*?)</strong>', dom, re.DOTALL) == ["Round 0"]
