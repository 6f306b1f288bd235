"""``collectives explain CODE...``: the messages that have these codes, their cause and their cure."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Sequence

from collectives.launch.usage import Parser
from collectives.tools import error_codes
from collectives.tools.error_codes import Situation

_CODE = re.compile(r"\[?([A-Z])([0-9]+)\]?")
_LINK = re.compile(r"\[([^\]]+)\]\(([^)#]+)[^)]*\)")
_WIDEST = 100
"""Characters of a line, at most: longer ones are hard to read."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what each code means, and return the exit code: 2 if a code does not exist."""
    parser = Parser(
        prog="collectives explain",
        description="Explain error codes: the message, its cause and its cure. Needs no network.",
        allow_abbrev=False,
    )
    parser.add_argument("codes", metavar="CODE", nargs="+", help="the code at the end of a message, such as M3")
    asked = parser.parse_args(arguments).codes
    by_code = {code: situation for situation in error_codes.situations() for code in situation.codes}
    explained: dict[Situation, list[str]] = {}
    gone, problems = [], []
    for word in asked:
        match = _CODE.fullmatch(word.upper())
        code = "".join(match.groups()) if match else ""
        if code in by_code:
            codes = explained.setdefault(by_code[code], [])
            codes += [code] * (code not in codes)
        elif code in error_codes.retired():
            gone.append(f"{code}: only an older version has this message; its code is not used again.")
        else:
            problems.append(_unknown(word, match[1] if match else "", list(by_code)))
    texts = [*gone, *(_explanation(situation, codes) for situation, codes in explained.items())]
    if texts:
        print("\n\n".join(texts), flush=True)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 2 if problems else 0


def _explanation(situation: Situation, codes: list[str]) -> str:
    """The messages of some codes, and the section that they share."""
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    lines = []
    for message in (message for code in codes for message in error_codes.messages(code)):
        lines.append(f"{message.code} {message.kind}".rstrip() + f", in collectives/{message.path}:")
        lines += [wrapped for line in message.text.splitlines() for wrapped in _wrapped(line, width, "    ")]
        lines.append("")
    lines.append(f"{situation.title}.")
    for paragraph in situation.body.split("\n\n"):
        lines += ["", *_wrapped(_plain(paragraph), width)]
    return "\n".join(lines)


def _plain(markdown: str) -> str:
    """A paragraph without emphasis and links."""

    def named(link: re.Match[str]) -> str:
        page = link[2].replace("../", "docs/")
        return page if link[1] == page else f"{link[1]} ({page})"

    return re.sub(r"^\*(\w+)\.\*", r"\1:", _LINK.sub(named, " ".join(markdown.split())))


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _unknown(word: str, letter: str, codes: list[str]) -> str:
    """Name the codes of the family that a word begins with, or all families."""
    titles = [error_codes.introduction(page).partition("\n")[0] for page in error_codes.pages()]
    families = {title[-2]: title.removeprefix("# ")[:-4] for title in titles if re.search(r" \([A-Z]\)$", title)}
    if letter in families:
        numbers = sorted(int(code[1:]) for code in codes if code[0] == letter)
        return (
            f"collectives explain: no message has the code {word}; the codes of the family {letter}, "
            f"{families[letter]!r}, go from {letter}{numbers[0]} to {letter}{numbers[-1]} [U46]"
        )
    listed = "\n".join(f"  {family}  {title}" for family, title in sorted(families.items()))
    return (
        f"collectives explain: expected a code such as M3, got {word!r}; the letter names the family [U47]:\n{listed}"
    )
