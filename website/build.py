"""Gather the site's pages: those of docs/, the guide and the changelog, and those generated from the source."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import griffe

from collectives.tools import drawing
from collectives.tools.command import COMMANDS
from website import algorithms_table, codes

ROOT = Path(__file__).parents[1]
PAGES, SITE = ROOT / "build" / "pages", ROOT / "build" / "site"
SHIM = "https://unpkg.com/iframe-worker/shim"
COPIED = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages from outside of docs/, by their names in the site."""
MODULES = {
    "collectives": "collectives",
    "torch": "collectives.torch",
    "tensorflow": "collectives.tensorflow",
    "tensorflow-keras": "collectives.tensorflow.keras",
    "keras": "collectives.keras",
    "jax": "collectives.jax",
    "elastic": "collectives.elastic",
    "torch-elastic": "collectives.torch.elastic",
    "tensorflow-elastic": "collectives.tensorflow.elastic",
    "tensorflow-keras-elastic": "collectives.tensorflow.keras.elastic",
    "keras-elastic": "collectives.keras.elastic",
    "jax-elastic": "collectives.jax.elastic",
    "ray": "collectives.ray",
    "spark": "collectives.spark",
    "dask": "collectives.dask",
    "notebook": "collectives.notebook",
}
"""The pages of the reference, and the module that each describes."""
BASES = ("collectives", "elastic")
"""Pages whose entries the others only name."""
CONVENTION = "The examples are of two ranks, after `import {} as hvd` and `hvd.init()`, where the module has it."
COMMAND_LINES = ("collectivesrun", *(f"collectives {command}" for command in COMMANDS if command != "run"))
PLACEHOLDER = re.compile(r"^<!-- generated: (.+) -->$", re.MULTILINE)
LINK = re.compile(r"(\]\()(?!\w+:|#)([^)\s#]+)")
NAMED = re.compile(r"\[`?[\w/-]+\.md`?\](?=\(([^)#\s]+))|`(docs/[\w/-]+\.md)`(?!\])")
"""A page that a text names by its file: as a link, or alone."""


def readme(*words: str) -> str:
    """A section of the README by its heading; without one, what precedes the first."""
    title, *sections = (ROOT / "README.md").read_text().split("\n## ")
    found = {heading: body for heading, _, body in (each.partition("\n") for each in sections)}
    return relinked(found[" ".join(words)] if words else title.partition("\n")[2], ROOT / "README.md", "index.md")


GENERATORS: dict[str, Callable[..., str]] = {
    "stepper": lambda algorithm, collective, ranks: drawing.page_element(collective, algorithm, int(ranks)),
    "algorithms-table": algorithms_table.table,
    "readme": readme,
}
"""What replaces ``<!-- generated: NAME ARGUMENTS -->`` on a line of its own."""


def filled(text: str) -> str:
    """A page with its placeholders replaced."""

    def generated(match: re.Match[str]) -> str:
        name, *arguments = match[1].split()
        return GENERATORS[name](*arguments)

    return PLACEHOLDER.sub(generated, text)


def relinked(text: str, page: Path, target: str) -> str:
    """A page whose links to files of the repository lead to their copies in the site, which are made here, and which
    calls other pages by their titles."""

    def named(match: re.Match[str]) -> str:
        file = page.parent / match[1] if match[1] else ROOT / match[2]
        heading = re.search(r"^# (.+)$", file.read_text(), re.MULTILINE)
        if not heading:
            raise SystemExit(f"{file}: no title")
        return f"[{heading[1]}]" if match[1] else f"[{heading[1]}]({os.path.relpath(file, page.parent)})"

    def link(match: re.Match[str]) -> str:
        file = Path(os.path.normpath(page.parent / match[2])).relative_to(ROOT)
        if file.parts[0] == "docs":
            goal = Path(*file.parts[1:])
        elif str(file) in COPIED:
            goal = Path(COPIED[str(file)])
        elif (ROOT / file).is_file():
            goal = "files" / file.with_name(f"{file.name}.txt")
            (PAGES / goal).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / file, PAGES / goal)
        else:
            raise SystemExit(f"{page}: the link to {match[2]} leads to no file")
        return match[1] + os.path.relpath(goal, Path(target).parent)

    return LINK.sub(link, NAMED.sub(named, text))


def reference() -> dict[str, str]:
    """A page for each public module, with an entry for each name that it defines itself."""
    package = griffe.load(
        "collectives",
        search_paths=[str(ROOT)],
        resolve_aliases=True,
        extensions=griffe.load_extensions("unpack_typeddict", ROOT / "website" / "runtime.py"),
    )
    modules = {page: package.modules_collection[path] for page, path in MODULES.items()}
    described = {where: base for base in reversed(BASES) for where in entries(modules[base]).values()}
    pages = {}
    for page, module in modules.items():
        names, path = entries(module), module.path
        elsewhere = {name: base for name, where in names.items() if (base := described.get(where, page)) != page}
        summary = module.docstring.value.replace("Example:\n", "Example:\n\n") if module.docstring else ""
        text = f"# `{path}`\n\n{summary}\n\n{CONVENTION.format(path.removesuffix('.elastic'))}\n\n"
        for base in dict.fromkeys(elsewhere.values()):
            same = ", ".join(f"`{name}`" for name, where in elsewhere.items() if where == base)
            text += f"Unchanged from [`{MODULES[base]}`]({base}.md): {same}.\n\n"
        text += "\n".join(f"::: {path}.{name}\n" for name in sorted(names.keys() - elsewhere.keys(), key=str.swapcase))
        pages[f"reference/{page}.md"] = text
    return pages


def entries(module: griffe.Module) -> dict[str, str]:
    """The functions and classes of the package among a module's public names: where each is defined, by name."""
    found = {}
    for name, member in sorted(module.members.items()):
        with suppress(griffe.AliasResolutionError):  # of another package
            target = member.final_target if isinstance(member, griffe.Alias) else member
            public = member.is_public or not all(isinstance(each, str) for each in module.exports or ())
            if public and not name.startswith("_") and isinstance(target, griffe.Function | griffe.Class):
                found[name] = target.path
    return {name: path for name, path in found.items() if path.startswith("collectives.")}


def commands() -> str:
    """The command lines, as their ``--help`` shows them."""
    sections = []
    for command in COMMAND_LINES:
        program, *arguments = command.split()
        help_text = subprocess.run(
            [str(Path(sys.executable).parent / program), *arguments, "--help"],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "COLUMNS": "100"},
        ).stdout
        sections.append(f"## `{command}`\n\n```text\n{help_text}```\n")
    return "# Command lines\n\n" + "\n".join(sections)


def gather() -> None:
    """Write all pages to build/pages."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES)
    for asset in ("site.css", "worker.js"):
        shutil.copyfile(ROOT / "website" / asset, PAGES / asset)
    texts = {str(page.relative_to(PAGES)): page.read_text() for page in PAGES.rglob("*.md")}
    texts |= {target: (ROOT / source).read_text() for source, target in COPIED.items()}
    texts |= codes.pages() | reference() | {"reference/commands.md": commands()}
    sources = {target: ROOT / source for source, target in COPIED.items()}
    for target, text in texts.items():
        (PAGES / target).parent.mkdir(exist_ok=True)
        page = sources.get(target, ROOT / "docs" / target)
        (PAGES / target).write_text(filled(relinked(text, page, target)))


def build() -> int:
    """Gather the pages and build the site; returns the exit code."""
    gather()
    zensical = [str(Path(sys.executable).parent / "zensical"), "build", "--strict", "--clean"]
    code = subprocess.run(zensical, cwd=ROOT).returncode
    for page in SITE.rglob("*.html"):  # the generator would load this script from the network
        page.write_text(page.read_text().replace(SHIM, os.path.relpath(SITE / "worker.js", page.parent)))
    return code


if __name__ == "__main__":
    raise SystemExit(build())
