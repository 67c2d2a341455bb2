"""What a command line names or is given: stdin, files and schemas; how much of a long question fits.

Files are named from here, and the daemon lives elsewhere: a name becomes a path from the root on.
"""

# ruff: noqa: PTH100, PTH110, PTH111, PTH113 - pathlib would cost `ask -m` and a pipe its import
from __future__ import annotations

import codecs
import json
import os
import sys
from functools import cache

from localspec.errors import ContextExceeded, LocalspecError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, TextIO

    from localspec.client.api import Client

# Requests may have 10 MiB, of which a character may take six bytes; no context holds so much.
MAX_INPUT = 4 << 20  # bytes

# Names of standard input, which can be read once.
STDIN = ("-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")
_PDF = b"%PDF-"
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# What a file is when it is no text, by how it begins.
_KINDS = (
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF8", "a GIF image"),
    (_PDF, "a PDF document (pdftotext extracts its text, and so does -f)"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "gzip data (zcat decompresses it)"),
    (b"\x7fELF", "an executable"),
    (b"\xcf\xfa\xed\xfe", "an executable"),
    (b"GGUF", "a model"),
    (b"SQLite format 3", "an SQLite database"),
)


def absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def pair(name: str) -> str:
    """A pair's name as it is, and one of Ollama's; a file, and two with a comma, from the root on."""
    parts = [name]
    if "," in name:
        from localspec.paths import model_files

        parts = model_files(name)
    return ",".join(absolute(each) if is_path(each) else each for each in parts)


def chosen(options: dict[str, Any]) -> dict[str, Any]:
    """The options with `model` as -q means it, where -q was given.

    Raises:
        UsageError: -m was given too. ModelNotFound: no installed pair has such a name.
    """
    if not options["query"]:
        return options
    if options["model"]:
        raise UsageError("-m and -q cannot be used together.")
    from localspec.client.pairs import PairsClient

    client = PairsClient(autostart=not options["no_daemon_start"])
    return {**options, "query": [], "model": client.named_like(options["query"])}


def is_path(name: str) -> bool:
    """Whether it means a file here. A pair's name has no slash, and one of Ollama's leads nowhere."""
    if name.lower().endswith(".gguf") or name.startswith(("/", "~", "./", "../")):
        return True
    return "/" in name and os.path.isfile(name)


def model_file(name: str) -> str:
    """Where only a file can be meant: its path, else a name of Ollama's with its tag."""
    if is_path(name) or os.path.exists(name) or "," in name:
        return absolute(name)
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def stdin() -> str:
    """Return all of standard input as text.

    Bytes that are not UTF-8 are replaced, because a diff or a log may have some, and a note says how many.

    Raises:
        UsageError: it is no text, or so much that no context holds it.
    """
    try:
        data = _bytes_of(sys.stdin)
    except OSError as error:
        raise UsageError(f"Standard input cannot be read: {error.strerror}.") from error
    if len(data) > MAX_INPUT:
        raise UsageError(f"Standard input has more than {MAX_INPUT >> 20} MiB, which is the limit.")
    if data.startswith(_UTF16_MARKS):
        return data.decode("utf-16", "replace").rstrip("\r\n")
    if encoding := _utf16(data):
        raise UsageError(
            f"Standard input is UTF-16, not UTF-8. Convert it first: iconv -f {encoding} -t utf8"
        )
    if b"\0" in data or data.startswith(_PDF):
        raise UsageError(f"Standard input is not text but {kind(data)}.")
    return _lenient(data).rstrip("\r\n")


@cache
def _bytes_of(stream: TextIO) -> bytes:
    """Read a stream once, and at most one byte more than the limit; it may be asked for again."""
    return stream.buffer.read(MAX_INPUT + 1)


@cache
def _lenient(data: bytes) -> str:
    """Decode UTF-8; a note says how many bytes were replaced."""
    data = data.removeprefix(codecs.BOM_UTF8)
    replaced = 0

    def replace(error: UnicodeError) -> tuple[str, int]:
        nonlocal replaced
        assert isinstance(error, UnicodeDecodeError)
        replaced += error.end - error.start
        return "\ufffd", error.end

    codecs.register_error("localspec.replace", replace)
    text = data.decode("utf-8", "localspec.replace")
    if replaced:
        from localspec.cli.terminal import render

        were = "byte was" if replaced == 1 else "bytes were"
        render.note(
            f"Standard input is not UTF-8: {replaced:,} {were} replaced. If it is Latin-1, convert it "
            "first: iconv -f latin1 -t utf8"
        )
    return text


def _utf16(data: bytes) -> str:
    """Return the name of the UTF-16 that text without a byte order mark seems to be, if any."""
    pairs = len(data) // 2
    zeros = data[: 2 * pairs : 2].count(0), data[1 : 2 * pairs : 2].count(0)
    few, many = min(zeros), max(zeros)
    # Most letters of most texts have a zero byte, always on the same side.
    if pairs < 4 or (len(data) % 2 and len(data) <= MAX_INPUT) or few or 2 * many < pairs:
        return ""
    encoding = "utf-16be" if zeros[0] else "utf-16le"
    text = data[: 2 * pairs].decode(encoding, "replace")
    return "" if any(each < " " and not each.isspace() for each in text) else encoding


def wanted(names: list[str]) -> bool:
    """Whether the files that words of a question name belong to it; said where nobody can answer."""
    from localspec.cli.terminal import render

    shown = ", ".join(names)
    if sys.stdin.isatty() and sys.stderr.isatty():
        import click

        which = (
            "is a file here; include its text"
            if len(names) == 1
            else "are files here; include them"
        )
        return click.confirm(
            f"{render.harmless(shown, lines=False)} {which}?", default=True, err=True
        )
    which = "is a file, and its text is" if len(names) == 1 else "are files, and their text is"
    render.note(f"{shown} {which} not included; -f {names[0]} includes it.")
    return False


def files(patterns: list[str], *, labelled: bool = True) -> str:
    """Return the text of every file, in the order given, each once; `-` is stdin.

    Each has its name above it and fences around it, unless `labelled` is false.

    Raises:
        UsageError: nothing matches, it is a folder, cannot be read or is no text.
    """
    read = _labelled if labelled else lambda name: read_text(name).rstrip("\r\n")
    parts = [stdin() if name == "-" else read(name) for name in named(patterns)]
    if sum(map(len, parts)) > MAX_INPUT:
        raise UsageError(f"The files have more than {MAX_INPUT >> 20} MiB, which is the limit.")
    return "\n\n".join(parts)


def named(patterns: Sequence[str]) -> list[str]:
    """Every file that these name, in the order given, each once; "-" is stdin.

    Raises:
        UsageError: nothing matches, or a folder has no texts.
    """
    names: dict[str, None] = {}
    for pattern in patterns:
        names.update(dict.fromkeys(["-"] if pattern in STDIN else _matching(pattern)))
    return list(names)


def _matching(pattern: str) -> list[str]:
    """The file of that name, else those of the pattern: a name may have a [ in it. A folder's files."""
    import glob
    from pathlib import Path

    path = os.path.expanduser(pattern)
    if Path(path).is_dir():
        from localspec.cli.documents import folders

        return folders.files(path)
    if Path(path).exists():
        return [path]
    if "://" in path:
        import shlex

        raise UsageError(
            f"{pattern} is a URL, and localspec does not fetch web pages: it works offline. To ask about "
            f"this one: curl -fsSL {shlex.quote(pattern)} | localspec ask …"
        )
    if not any(sign in path for sign in "*?["):
        return [path]
    names = glob.glob(path, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
    found = sorted(name for name in names if Path(name).is_file())
    if not found:
        raise UsageError(f"No file matches '{pattern}'.")
    return found


def _labelled(name: str) -> str:
    text = read_text(name)
    fence = "```"
    while fence in text:  # a file that has fences itself
        fence += "`"
    return f"{name}:\n{fence}\n{text.rstrip()}\n{fence}"


def read_text(name: str) -> str:
    """A file's text: UTF-8, or UTF-16 that says so.

    Raises:
        UsageError: why not.
    """
    import shlex
    from pathlib import Path

    path = Path(name)
    try:
        if path.is_dir():
            raise UsageError(
                f"{name} is a folder; name the files in it, for example: -f '{name.rstrip('/')}/*'"
            )
        with path.open("rb") as file:
            data = file.read(MAX_INPUT + 1)
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}.") from error
    if len(data) > MAX_INPUT:
        raise UsageError(f"{name} has more than {MAX_INPUT >> 20} MiB, which is the limit.")
    if data.startswith(_PDF):
        from localspec.cli.documents import pdf

        return pdf.text(name)
    if data.startswith(_UTF16_MARKS):
        return data.decode("utf-16", "replace")
    if encoding := _utf16(data):
        raise UsageError(
            f"{name} is UTF-16 without a byte order mark, not UTF-8. Convert it first: "
            f"iconv -f {encoding} -t utf8 {shlex.quote(name)} | localspec ask …"
        )
    try:
        if b"\0" not in data:
            return _told(name, data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        if kind(data) == _UNKNOWN:
            raise UsageError(
                f"{name} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}. If it is "
                f"Latin-1: iconv -f latin1 -t utf8 {shlex.quote(name)} | localspec ask …"
            ) from error
    raise UsageError(f"{name} is not text but {kind(data)}.")


_UNKNOWN = "binary data (it contains NUL bytes)"


def _told(name: str, text: str) -> str:
    """What a file says: of a notebook its cells."""
    if not name.endswith(".ipynb"):
        return text
    from localspec.cli.documents import notebooks

    return notebooks.text(name, text)


def kind(data: bytes) -> str:
    """What `data` is, as far as its beginning tells."""
    for magic, name in _KINDS:
        if data.startswith(magic):
            return name
    return _UNKNOWN


def schema(name: str) -> dict[str, Any]:
    """The JSON schema in a file, or given as it is when it begins with a brace.

    Raises:
        UsageError: it cannot be read, or is no JSON object.
    """
    text = name if name.lstrip().startswith("{") else read_text(name)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--schema {name[:60]}: not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise UsageError(f"--schema {name[:60]}: a schema must be a JSON object.")
    return value


def edited(
    text: str, problem: Callable[[str], str], left: str, extension: str = ".toml"
) -> str | None:
    """`text` as a person leaves it in $EDITOR, opened again until `problem` has nothing to say of it.

    None: it was closed without being saved.

    Raises:
        UsageError: the editor does not run, or the person gave up: `left` says what that means.
    """
    import click

    from localspec.cli.terminal import render

    while True:
        try:
            found = click.edit(text, extension=extension)
        except click.ClickException as error:
            raise UsageError(
                f"{error.format_message()}. $EDITOR names the editor to use."
            ) from error
        said = "" if found is None else problem(found)
        if found is None or not said:
            return found
        render.error(said)
        if not click.confirm("Edit it again?", default=True, err=True):
            raise UsageError(left)
        text = found


def what_fits(
    error: ContextExceeded, question: str, *, stdin_alone: bool = False, longer: str = ""
) -> str:
    """Return the engine's refusal of a long prompt, and the ways out that apply.

    `stdin_alone`: it came from there without files. `longer`: an installed pair that holds it.
    """
    from localspec.cli.terminal.pairs import size

    tokens, room = error.n_prompt_tokens, error.n_ctx
    if not tokens or room is None:
        return error.message
    whole = len(question.encode())
    # A fifth is left for the answer.
    fits = whole * room * 4 // (tokens * 5)
    if longer:
        way_out = f"Use a pair with a longer context: -m {longer}"
    else:
        less = f"a part of it (head -c {fits})" if stdin_alone else "fewer or shorter files"
        way_out = f"Ask about {less}, or pull a pair with a longer context: localspec catalogue"
    return (
        f"The question is too long: {size(whole)}, {tokens} tokens. This pair's context "
        f"holds {room} tokens, about {size(fits)} of such text plus an answer. {way_out}"
    )


def what_fits_in_chat(error: ContextExceeded, client: Client) -> str:
    """Return the engine's refusal of a conversation that has become too long, and the ways out."""
    tokens, room = error.n_prompt_tokens, error.n_ctx
    if not tokens or room is None:
        return error.message
    ways = "Shorten the message, or begin a new conversation with /new"
    if longer := longer_pair(client, tokens):
        ways += f", or go on with a pair that has a longer context: /pair {longer}"
    return (
        f"With this message the conversation has {tokens} tokens, and this pair's context holds "
        f"{room}. {ways}."
    )


def longer_pair(client: Client, tokens: int) -> str:
    """Return the smallest installed chat pair whose context holds so many tokens and an answer, if any."""
    from localspec.client.pairs import PairsClient

    pairs = PairsClient(client.socket_path, autostart=False)
    try:
        listed = [each for each in pairs.pairs()["pairs"] if "chat" in each["roles"]]
        for each in sorted(listed, key=lambda each: each["size"] or 0)[:_LOOKED_AT]:
            if each["kind"] != "upstream" and 5 * tokens <= 4 * pairs.pair(each["name"])["context"]:
                return str(each["name"])
    except LocalspecError:
        pass  # the refusal is worth more than this hint
    return ""


_LOOKED_AT = 12  # pairs, whose files are read for it
