"""Pages of the documentation: text, code blocks, links and commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("data/*.md"),
                *ROOT.glob("runtime/*.md"), *ROOT.glob("benchmarks/*.md")])  # fmt: skip
README = ROOT / "README.md"
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`(python3? [^`\n]+)`")
NAMES_OF_PROGRAMS = {"python -m", "python3 -m popdist.run"}
"""Stand in a sentence and are no whole command."""


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    return [dedent(code) for _, found, code in BLOCK.findall(text_of(page)) if found == language]


def prose(page: Path) -> str:
    return BLOCK.sub("", text_of(page))


@dataclass(frozen=True)
class Command:
    """A command of a page: its words and its environment variables."""

    words: list[str]
    variables: dict[str, str]

    @property
    def text(self) -> str:
        return shlex.join(self.words)


def commands(page: Path) -> Iterator[Command]:
    """Yield the commands of a page's shell blocks and sentences, in order."""
    for line in _command_lines(page):
        words, variables = shlex.split(line, comments=True), {}
        while words and re.match(r"[A-Z_]+=", words[0]):
            variable, _, value = words.pop(0).partition("=")
            variables[variable] = value
        if words:
            yield Command(words, variables)


def _command_lines(page: Path) -> list[str]:
    text = text_of(page)
    places = [(m.start(), line) for m in BLOCK.finditer(text) if m[2] == "bash"
              for line in m[3].splitlines()]  # fmt: skip
    if page.name != "CHANGELOG.md":  # it also tells of the past
        without_blocks = BLOCK.sub(lambda m: " " * len(m[0]), text)
        inline = [(m.start(), m[1]) for m in INLINE.finditer(without_blocks)]
        places += [(start, line) for start, line in inline if line not in NAMES_OF_PROGRAMS]
    return [line for _, line in sorted(places, key=lambda place: place[0])]
