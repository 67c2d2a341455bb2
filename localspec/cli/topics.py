"""The pages of the documentation, which lie in the package: finding, searching and showing them.

A topic is the path of a page in `localspec/docs` without its suffix, such as "pairs" or "editors/vim".
The index of a folder has the folder's name. The last part of a topic is enough where it is unambiguous.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from localspec.cli.terminal import layout, render
from localspec.cli.terminal.fences import Fences

FOLDER = Path(__file__).parents[1] / "docs"
_ENTRY = re.compile(r"^- \[(?P<topic>[^]]+)\]\([^)]+\): (?P<summary>.*)$")
_LINK = re.compile(r"(?<!!)\[(?P<text>[^]]+)\]\((?P<target>[^)\s]+)\)")


class Section(NamedTuple):
    """A heading of a page with the lines up to the next one."""

    topic: str
    heading: str
    lines: list[str]


def pages() -> dict[str, Path]:
    """Return the file of each topic."""
    return {_topic(path): path for path in sorted(FOLDER.rglob("*.md"))}


def _topic(path: Path) -> str:
    name = path.relative_to(FOLDER).with_suffix("").as_posix().lower()
    return name.removesuffix("/index")


def groups() -> dict[str, list[tuple[str, str]]]:
    """Return the topics of the index with their summaries, by the heading that they stand under."""
    topics_by_heading: dict[str, list[tuple[str, str]]] = {}
    heading = ""
    for line in (FOLDER / "index.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif entry := _ENTRY.match(line):
            topics_by_heading.setdefault(heading, []).append((entry["topic"], entry["summary"]))
    return topics_by_heading


def find(words: tuple[str, ...]) -> str | None:
    """Return the topic that the words name ("editors vim", "how it works", "vim"), or None."""
    known = pages()
    for name in ("/".join(words), "-".join(words)):
        name = name.lower().removesuffix(".md")
        if name in known:
            return name
        short = [topic for topic in known if topic.rpartition("/")[2] == name]
        if len(short) == 1:
            return short[0]
    return None


def near(word: str) -> list[str]:
    """Return up to three topics whose names resemble a word."""
    known = pages()
    names = {topic.rpartition("/")[2]: topic for topic in known} | {topic: topic for topic in known}
    close = difflib.get_close_matches(word.lower(), names, n=2, cutoff=0.7)
    return list(dict.fromkeys(names[name] for name in close))


def search(words: Sequence[str]) -> list[Section]:
    """Return the sections that contain all words, in any order and case, with the lines that have one.

    A word is found at the beginning of a longer one. Pages of that title come first, then headings, then
    lines with all words, and of these the shortest section. Records of the past come last.
    """
    patterns, ranked = [word_pattern(word) for word in words], []
    for topic, heading, lines in _sections():
        title = f"{topic} {heading}" if lines[:1] == [f"# {heading}"] else heading
        places = ([title], lines, [" ".join([topic, *lines])])
        ranks = [any(all(p.search(text) for p in patterns) for text in place) for place in places]
        if any(ranks):
            is_past = topic == "changelog" or topic.startswith("decisions")
            found = [line for line in lines[1:] if any(p.search(line) for p in patterns)]
            rank = is_past, ranks.index(True), len(lines)
            ranked.append((rank, Section(topic, heading, [line.strip() for line in found])))
    return [section for _, section in sorted(ranked, key=lambda each: each[0])]


def word_pattern(word: str) -> re.Pattern[str]:
    """Return what finds words that begin with `word`."""
    return re.compile(rf"(?<![a-z]){re.escape(word)}", re.IGNORECASE)


def _sections() -> Iterator[Section]:
    """Yield the sections of all pages. The first line of each is its heading."""
    for topic, path in pages().items():
        section, fences = Section(topic, "", []), Fences()
        for line in path.read_text(encoding="utf-8").splitlines():
            if fences.classify_next(line) == "text" and line.startswith("#"):
                yield section
                section = Section(topic, line.lstrip("# "), [])
            section.lines.append(line)
        yield section


def source(topic: str) -> str:
    """Return the Markdown of a page."""
    return pages()[topic].read_text(encoding="utf-8")


def with_commands(topic: str) -> str:
    """Return the Markdown of a page with the command that shows a linked page in place of its link."""
    path = pages()[topic]

    def replace(link: re.Match[str]) -> str:
        text, target = link["text"], link["target"].partition("#")[0]
        if "://" in target:
            return f"{text} ({target})"
        linked = (path.parent / target).resolve() if target else path
        if linked == path or linked.suffix != ".md" or FOLDER.resolve() not in linked.parents:
            return text
        name = _topic(FOLDER / linked.relative_to(FOLDER.resolve()))
        return f"{text} (`localspec help {name}`)" if text != name else text

    text = path.read_text(encoding="utf-8")
    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _LINK.sub(replace, part) for part in parts)


def show(topic: str) -> None:
    """Print a page: drawn on a terminal, as Markdown in a pipe.

    On a terminal, a page that is longer than the screen goes through a pager.
    """
    if not render.is_drawn_on(sys.stdout):
        render.verbatim(source(topic).rstrip("\n"))
        return
    from localspec.cli.terminal import page

    columns = layout.width(sys.stdout) or 80
    show_text("\n".join(page.rows(with_commands(topic), columns)))


def show_text(text: str) -> None:
    """Print a text. On a terminal, one that is longer than the screen goes through a pager."""
    is_long = text.count("\n") + 1 >= shutil.get_terminal_size().lines
    if not (is_long and render.is_drawn_on(sys.stdout) and _paged(f"{text}\n")):
        encoding = sys.stdout.encoding
        sys.stdout.write(f"{text}\n".encode(encoding, "replace").decode(encoding))


def _paged(text: str) -> bool:
    """Show a text in the pager that PAGER names, else in less. Return whether there was one."""
    pager = os.environ.get("PAGER", "less" if shutil.which("less") else "")
    if pager in ("", "cat"):
        return False
    # As git does: colours are drawn, a short text is left on the screen, and so is the last page.
    environment = {"LESS": "FRX", "LV": "-c", **os.environ}
    sys.stdout.flush()
    child = subprocess.Popen(["sh", "-c", pager], stdin=subprocess.PIPE, env=environment)
    try:
        child.communicate(text.encode("utf-8", "replace"))
    except KeyboardInterrupt:  # it belongs to the pager, which goes on until its reader leaves it
        child.wait()
    return child.returncode not in (126, 127)
