"""Every message that users see ends with a code, and docs/troubleshooting/ says of each what causes and cures it."""

from __future__ import annotations

import re
from collections import Counter

from collectives.tools import error_codes
from website import codes


def test_every_message_has_a_code() -> None:
    assert codes.uncoded() == [], "end each with the next free code of its family, as CONTRIBUTING.md says"


def test_no_code_is_given_twice_or_again() -> None:
    given = Counter(message.code for message in error_codes.messages())
    assert len(given) > 500
    assert [code for code, times in given.items() if times > 1] == []
    assert given.keys() & error_codes.retired() == set()


def test_every_code_has_one_cause_and_cure() -> None:
    explained = Counter(code for situation in error_codes.situations() for code in situation.codes)
    assert [code for code, times in explained.items() if times > 1] == []
    given = {message.code for message in error_codes.messages()}
    assert given - explained.keys() == set(), "these stand in no heading of docs/troubleshooting/"
    assert explained.keys() - given == set(), "these are in no message: name them under `## Retired`"
    for situation in error_codes.situations():
        assert "*Cause.* " in situation.body and "*Cure.* " in situation.body, situation.title


def test_the_pages_list_every_code() -> None:
    pages = codes.pages()
    for message in error_codes.messages():
        assert pages["errors/index.md"].count(f"#{message.code}){{ #{message.code} }}") == 1
        anchors = (f'<span id="{message.code}">', f"</small> {{ #{message.code} ")
        assert sum(page.count(anchor) for page in pages.values() for anchor in anchors) == 1


def test_the_link_of_a_code_leads_to_the_heading_above_its_cause_and_cure() -> None:
    page = codes.pages()["troubleshooting/mismatches.md"]
    (heading,) = [line for line in page.splitlines() if "## The ranks disagree in a call" in line]
    assert "{ #M1 " in heading and '<span id="M3">M3</span>' in heading
    assert page.index(heading) < page.index("*Cause.* ", page.index(heading)) < page.index("**M3**")


def test_the_messages_of_other_libraries_lead_to_codes_that_exist() -> None:
    linked = re.findall(r"\[(\w+)\]\(([\w-]+)\.md#(\w+)\)", error_codes.pages()["known-messages"])
    explained = {code: situation.page for situation in error_codes.situations() for code in situation.codes}
    assert len(linked) > 20
    assert [link for link in linked if link[0] != link[2] or explained.get(link[0]) != link[1]] == []


def test_a_text_is_shown_with_the_names_of_its_values() -> None:
    message = next(message for message in error_codes.messages() if message.path == "engine/negotiation.py")
    assert message.kind == "MismatchError"
    assert message.text.startswith("rank …rank…: the ranks disagree on …differing……subject…; no tensor was changed:\n")
