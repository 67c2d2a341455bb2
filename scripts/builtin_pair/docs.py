"""The documentation of Python's standard library as plain records.

Source: the HTML that Sphinx makes from the library reference, as documentation packages install it
(Debian's ``python3-doc`` puts it under ``/usr/share/doc/python3*/html``).  Licence: PSF.  Where it is
missing, :func:`entries_from_docstrings` reads the docstrings of the running interpreter, which are
shorter and know less.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

VOID_TAGS = frozenset({"br", "hr", "img", "input", "link", "meta", "col", "wbr"})


@dataclass(frozen=True)
class Entry:
    """One documented object."""

    name: str
    """Full dotted name as the documentation spells it, such as ``pathlib.Path.exists``."""
    kind: str
    """``function``, ``method``, ``class``, ``exception``, ``data``, ``attribute``, ``module``, ``term``."""
    signature: str
    """Parameters in parentheses, or an empty string."""
    module: str
    """The page it stands on: ``shutil``, ``functions``, ``stdtypes`` …"""
    paragraphs: tuple[str, ...]
    """Plain text, one line each."""
    examples: tuple[str, ...]
    """Code blocks, as written."""


@dataclass
class Node:
    """An HTML element; text children are strings."""

    tag: str
    attrs: dict[str, str]
    children: list[Node | str] = field(default_factory=list)

    def walk(self) -> Iterator[Node]:
        yield self
        for child in self.children:
            if isinstance(child, Node):
                yield from child.walk()

    def has_class(self, name: str) -> bool:
        return name in self.attrs.get("class", "").split()

    def text(self) -> str:
        """Text without permalinks."""
        parts = []
        for child in self.children:
            if isinstance(child, str):
                parts.append(child)
            elif not child.has_class("headerlink"):
                parts.append(child.text())
        return "".join(parts)


class _TreeBuilder(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Node("root", {})
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {key: value or "" for key, value in attrs})
        self._open[-1].children.append(node)
        if tag not in VOID_TAGS:
            self._open.append(node)

    def handle_endtag(self, tag: str) -> None:
        for depth in range(len(self._open) - 1, 0, -1):
            if self._open[depth].tag == tag:
                del self._open[depth:]
                return

    def handle_data(self, data: str) -> None:
        self._open[-1].children.append(data)


def parse_html(text: str) -> Node:
    builder = _TreeBuilder()
    builder.feed(text)
    return builder.root


def one_line(text: str) -> str:
    """Collapse white space and replace typographic characters by what people type."""
    for fancy, plain in (("’", "'"), ("‘", "'"), ("“", '"'), ("”", '"'), ("…", "..."), ("¶", "")):
        text = text.replace(fancy, plain)
    return re.sub(r"\s+", " ", text).strip()


def first_sentences(text: str, limit: int) -> str:
    """As many whole sentences as fit into `limit` characters, but at least one."""
    sentences = re.split(r"(?<=[a-z0-9)\]'\"`][.!?])\s+(?=[A-Z`])", text)
    taken = sentences[0]
    for sentence in sentences[1:]:
        if len(taken) + 1 + len(sentence) > limit:
            break
        taken += " " + sentence
    return taken


def _body(nodes: list[Node | str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Paragraphs and code blocks that belong to an object itself, not to objects nested in it."""
    paragraphs: list[str] = []
    examples: list[str] = []
    for node in nodes:
        if not isinstance(node, Node):
            continue
        if node.tag == "p":
            paragraphs.append(one_line(node.text()))
        elif node.tag == "div" and not (
            node.has_class("versionchanged") or node.has_class("deprecated")
        ):
            examples.extend(inner.text().strip("\n") for inner in node.walk() if inner.tag == "pre")
    return tuple(p for p in paragraphs if p), tuple(examples)


def _objects(page: Node, module: str) -> Iterator[Entry]:
    for group in page.walk():
        if group.tag != "dl" or not group.has_class("py"):
            continue
        kind = next((c for c in group.attrs["class"].split() if c != "py"), "function")
        kind = {"classmethod": "method", "staticmethod": "method"}.get(kind, kind)
        terms = [n for n in group.children if isinstance(n, Node) and n.tag == "dt"]
        bodies = [n for n in group.children if isinstance(n, Node) and n.tag == "dd"]
        if not bodies:
            continue
        paragraphs, examples = _body(bodies[-1].children)
        if not paragraphs:
            continue
        for term in terms:
            name = term.attrs.get("id", "")
            written = one_line(term.text())
            opening = written.find("(")
            signature = ""
            if opening >= 0:
                signature = written[opening : written.rfind(")") + 1]
            if name:
                yield Entry(name, kind, signature, module, paragraphs, examples)


def _module_entry(page: Node, module: str) -> Iterator[Entry]:
    """Yield the page's own heading ("json — JSON encoder and decoder") and its first paragraphs."""
    for section in page.walk():
        if section.tag != "section" or section.attrs.get("id") != f"module-{module}":
            continue
        heading = next((n for n in section.walk() if n.tag == "h1"), None)
        if heading is None:
            return
        _, _, summary = one_line(heading.text()).partition(" — ")
        paragraphs, examples = _body(section.children)
        paragraphs = tuple(p for p in paragraphs if not p.startswith("Source code:"))
        if summary:
            yield Entry(module, "module", "", module, (summary, *paragraphs), examples[:1])
        return


def entries_from_html(html: Path) -> list[Entry]:
    """All documented objects, modules and glossary terms below `html`; one entry per name."""
    entries: dict[str, Entry] = {}
    for path in sorted((html / "library").glob("*.html")):
        page = parse_html(path.read_text(encoding="utf-8"))
        for entry in (*_module_entry(page, path.stem), *_objects(page, path.stem)):
            entries.setdefault(entry.name, entry)
    glossary = parse_html((html / "glossary.html").read_text(encoding="utf-8"))
    for entry in _terms(glossary):
        entries.setdefault(entry.name, entry)
    return list(entries.values())


def _terms(page: Node) -> Iterator[Entry]:
    for group in page.walk():
        if group.tag != "dl" or not group.has_class("glossary"):
            continue
        term: str | None = None
        for node in group.children:
            if not isinstance(node, Node):
                continue
            if node.tag == "dt":
                term = one_line(node.text())
            elif node.tag == "dd" and term:
                paragraphs, examples = _body(node.children)
                if paragraphs and re.match(r"[a-z]", term, re.IGNORECASE):
                    yield Entry(term, "term", "", "glossary", paragraphs, examples)


def entries_from_docstrings(modules: tuple[str, ...]) -> list[Entry]:
    """Return what `inspect` knows of the modules named; used where no documentation is installed."""
    entries: dict[str, Entry] = {}
    for module in modules:
        try:
            owner = importlib.import_module(module)
        except ImportError:
            continue
        for attribute, value in vars(owner).items():
            is_class = inspect.isclass(value)
            if attribute.startswith("_") or not (is_class or inspect.isroutine(value)):
                continue
            paragraphs = tuple(
                one_line(part) for part in (inspect.getdoc(value) or "").split("\n\n") if part
            )
            if not paragraphs:
                continue
            try:
                signature = str(inspect.signature(value))
            except (TypeError, ValueError):
                signature = ""
            name = attribute if module == "builtins" else f"{module}.{attribute}"
            kind = "class" if is_class else "function"
            page = "functions" if module == "builtins" else module
            entries.setdefault(name, Entry(name, kind, signature, page, paragraphs, ()))
    return list(entries.values())


def find_html() -> Path | None:
    """Where documentation packages install the HTML, newest first."""
    for path in sorted(Path("/usr/share/doc").glob("python3*/html"), reverse=True):
        if (path / "library").is_dir():
            return path
    return None
