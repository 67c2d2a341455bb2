"""The inputs of a command line: stdin, files and schemas, and how much of a long question fits.

The daemon runs in another folder than the command, so names of files become absolute paths.
"""

# ruff: noqa: PTH100, PTH110, PTH111, PTH113 - importing pathlib would delay `ask -m` and pipes
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

    from localspec.cli.options import AskOptions
    from localspec.client.api import Client

# A request may have 32 MiB, and one character may take six bytes of JSON. No context holds this much text.
MAX_INPUT_BYTES = 4 << 20  # bytes
_MAX_INPUT = f"{MAX_INPUT_BYTES >> 20} MiB"

# Pictures and documents. As base64 they must fit into a request.
MAX_ATTACHED_BYTES = 23 << 20

# Names of standard input, which can only be read once.
STDIN = ("-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")
_SILENCE_S = 3.0  # time without a byte on stdin after which a note says that it is read
_attached_stdin: list[bool] = []  # not empty once standard input was attached to the question
_UTF16_BYTE_ORDER_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_PICTURE_SIGNATURES = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*")
# First bytes of files that are not text, with a description for the error message.
_FILE_SIGNATURES = (
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF8", "a GIF image"),
    (b"%PDF-", "a PDF document"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "gzip data (zcat decompresses it)"),
    (b"\x7fELF", "an executable"),
    (b"\xcf\xfa\xed\xfe", "an executable"),
    (b"GGUF", "a model"),
    (b"SQLite format 3", "an SQLite database"),
)


def absolute(path: str) -> str:
    """Return the absolute path of a file, with `~` expanded."""
    return os.path.abspath(os.path.expanduser(path))


def resolve_pair(name: str) -> str:
    """Return a pair's name for the daemon: names as they are, paths of files made absolute.

    Two files are separated by a comma. A name of a model in Ollama stays as it is.
    """
    parts = [name]
    if "," in name:
        from localspec.paths import split_model_names

        parts = split_model_names(name)
    return ",".join(absolute(part) if is_path(part) else part for part in parts)


def resolve_query(options: AskOptions) -> AskOptions:
    """Return the options with `model` set to the pair that -q names, if -q was given.

    Raises UsageError if -m was given too, and ModelNotFound if no installed pair has such a name.
    """
    if not options.query:
        return options
    if options.model:
        raise UsageError("-m and -q cannot be used together.")
    from localspec.client.pairs import PairsClient

    client = PairsClient(autostart=not options.no_daemon_start)
    return options.changed(query=[], model=client.named_like(options.query))


def is_path(name: str) -> bool:
    """Return whether a name means a file.

    Names of pairs have no slash, and names of models in Ollama do not name an existing file.
    """
    if name.lower().endswith(".gguf") or name.startswith(("/", "~", "./", "../")):
        return True
    return "/" in name and os.path.isfile(name)


def resolve_model(name: str) -> str:
    """Return the path of a model file, or a model's name in Ollama with its tag.

    For arguments that cannot be the name of a pair.
    """
    if is_path(name) or os.path.exists(name) or "," in name:
        return absolute(name)
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def read_stdin() -> str:
    """Return all of standard input as text, or an empty string if it was attached to the question.

    Bytes that are not UTF-8 are replaced, because a diff or a log may have some. A note says how many. Raises
    UsageError if it is not text, or larger than the limit.
    """
    data = b"" if _attached_stdin else _read_bytes(sys.stdin)
    from localspec.attached_files import is_pdf

    if is_pdf(data):
        from localspec.cli import documents

        return documents.pdf_text("Standard input", data)
    if len(data) > MAX_INPUT_BYTES:
        raise UsageError(f"Standard input has more than {_MAX_INPUT}, which is the limit.")
    if data.startswith(_UTF16_BYTE_ORDER_MARKS):
        return data.decode("utf-16", "replace").rstrip("\r\n")
    if encoding := _guess_utf16(data):
        raise UsageError(
            f"Standard input is UTF-16, not UTF-8. Convert it first: iconv -f {encoding} -t utf8"
        )
    if b"\0" in data:
        raise UsageError(f"Standard input is not text but {describe_kind(data)}.")
    return _decode_leniently(data).rstrip("\r\n")


@cache
def _read_bytes(stream: TextIO) -> bytes:
    """Read a stream, at most one byte more than the limit. The result is cached for later calls.

    Shells of agents and `ssh` leave a pipe open that nobody writes to, so after some seconds without a byte
    a note says what the command waits for.
    """
    import select

    data, is_silent = bytearray(), True
    try:
        while len(data) <= MAX_ATTACHED_BYTES:
            if is_silent and not select.select([stream], [], [], _SILENCE_S)[0]:
                from localspec.cli.terminal import render

                end = (
                    "until Ctrl-D"
                    if stream.isatty()
                    else "until it ends; without one, add: </dev/null"
                )
                render.note(f"Reading standard input {end}")
                is_silent = False
            if not (chunk := os.read(stream.fileno(), 1 << 20)):
                break
            data += chunk
    except OSError as error:
        raise UsageError(f"Standard input cannot be read: {error.strerror}.") from error
    return bytes(data[: MAX_ATTACHED_BYTES + 1])


@cache
def _decode_leniently(data: bytes) -> str:
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

        verb = "byte was" if replaced == 1 else "bytes were"
        render.note(
            f"Standard input is not UTF-8: {replaced:,} {verb} replaced. If it is Latin-1, convert it "
            "first: iconv -f latin1 -t utf8"
        )
    return text


def _guess_utf16(data: bytes) -> str:
    """Return the encoding's name if the data seems to be UTF-16 without a byte order mark, else ""."""
    pairs = len(data) // 2
    zeros = data[: 2 * pairs : 2].count(0), data[1 : 2 * pairs : 2].count(0)
    is_cut_off = len(data) > MAX_INPUT_BYTES
    # In UTF-16 most letters of most languages have a zero byte, always on the same side.
    if pairs < 4 or (len(data) % 2 and not is_cut_off) or min(zeros) > 0 or 2 * max(zeros) < pairs:
        return ""
    encoding = "utf-16be" if zeros[0] else "utf-16le"
    text = data[: 2 * pairs].decode(encoding, "replace")
    return "" if any(char < " " and not char.isspace() for char in text) else encoding


def confirm_files(names: list[str]) -> bool:
    """Return whether files that are named by words of a question are to be included.

    Without a person at the terminal to ask, a note says how to include them.
    """
    from localspec.cli.terminal import render

    listing, is_one = ", ".join(names), len(names) == 1
    if sys.stdin.isatty() and sys.stderr.isatty():
        import click

        phrase = "is a file here; include its text" if is_one else "are files here; include them"
        question = f"{render.harmless(listing, lines=False)} {phrase}?"
        return click.confirm(question, default=True, err=True)
    phrase = "is a file, and its text is" if is_one else "are files, and their text is"
    render.note(f"{listing} {phrase} not included; -f {names[0]} includes it.")
    return False


def read_files(patterns: list[str], *, labelled: bool = True) -> str:
    """Return the text of every file, in the given order; `-` is stdin.

    A file that is named twice is included once. It has its name above it and fences around it, unless
    `labelled` is false. Raises UsageError if nothing matches a pattern, or a file is a folder, cannot be read
    or is not text.
    """
    parts = []
    for name in expand_patterns(patterns):
        text = read_stdin() if name == "-" else read_text(name)
        if name in patterns and not text.strip():  # an empty file in a folder is nothing to report
            from localspec.cli.terminal import render

            render.note(f"{'Standard input' if name == '-' else name} is empty.")
        if labelled and name != "-":
            fence = "```"
            while fence in text:  # the file has fences of its own
                fence += "`"
            text = f"{name}:\n{fence}\n{text.rstrip()}\n{fence}"
        parts.append(text if labelled else text.rstrip("\r\n"))
    if sum(map(len, parts)) > MAX_INPUT_BYTES:
        raise UsageError(f"The files have more than {_MAX_INPUT}, which is the limit.")
    return "\n\n".join(parts)


def read_attachments(patterns: list[str]) -> tuple[list[str], list[tuple[str, dict[str, Any]]]]:
    """Return the patterns of files that are text, and the names of the others with parts of a message.

    These are pictures, and PDF documents if the daemon can read them. Raises UsageError if nothing matches a
    pattern, or the files are too large.
    """
    attached: list[tuple[str, bytes]] = []
    rest: list[str] = []
    for pattern in patterns:
        if pattern in STDIN and (data := _read_attached_stdin()):
            attached.append(("Standard input" if _is_picture(data) else "stdin.pdf", data))
            continue
        is_glob = any(sign in pattern for sign in "*?[")
        names = expand_patterns([pattern]) if is_glob else [os.path.expanduser(pattern)]
        found = {name: data for name in names if (data := _read_attachment(name))}
        attached += found.items()
        rest += [name for name in names if name not in found] if found else [pattern]
    if sum(len(data) for _, data in attached) > MAX_ATTACHED_BYTES:
        raise UsageError(
            f"The pictures and documents have more than {MAX_ATTACHED_BYTES >> 20} MiB, which is the limit."
        )
    return rest, [(name, _to_part(name, data)) for name, data in attached]


def _read_attachment(name: str) -> bytes:
    """Return the content of a file that is attached to the question instead of being put into its text."""
    if name in STDIN or not os.path.isfile(name):  # opening a pipe would read from it
        return b""
    from localspec.attached_files import PDF_START_BYTES, is_pdf, may_be_pdf

    try:
        with open(name, "rb") as file:  # noqa: PTH123 - importing pathlib would delay `ask -m`
            start = file.read(PDF_START_BYTES)
            if _is_picture(start):
                return start + file.read(MAX_ATTACHED_BYTES)
            if may_be_pdf(start) and _reads_pdf():
                data = start + file.read(MAX_ATTACHED_BYTES)
                return data if is_pdf(data) else b""
    except OSError:
        pass  # `read_text` says what is wrong with it
    return b""


def _read_attached_stdin() -> bytes:
    """Return standard input if it is attached to the question; then it is no text."""
    from localspec.attached_files import PDF_START_BYTES, is_pdf

    data = _read_bytes(sys.stdin)
    if _is_picture(data[:PDF_START_BYTES]) or (is_pdf(data) and _reads_pdf()):
        _attached_stdin.append(True)
        return data
    return b""


def _is_picture(start: bytes) -> bool:
    is_webp = start[:4] == b"RIFF" and start[8:12] == b"WEBP"
    is_bmp = start.startswith(b"BM") and b"\0" in start  # a text may begin with these letters
    return start.startswith(_PICTURE_SIGNATURES) or is_webp or is_bmp or start[4:12] == b"ftypavif"


def _reads_pdf() -> bool:
    """Return whether the daemon can read PDF documents, whose installation is this one."""
    from importlib.util import find_spec

    return find_spec("pypdfium2") is not None


def _to_part(name: str, data: bytes) -> dict[str, Any]:
    import base64

    url = f"data:;base64,{base64.b64encode(data).decode()}"
    if not _is_picture(data):
        return {"type": "file", "file": {"filename": name.rpartition("/")[2], "file_data": url}}
    return {"type": "image_url", "image_url": {"url": url}}


def expand_patterns(patterns: Sequence[str]) -> list[str]:
    """Return the names of all files that match the patterns, without duplicates.

    The order is that of the patterns. "-" stands for stdin. Raises UsageError if nothing matches, or a folder
    has no texts.
    """
    names: dict[str, None] = {}
    for pattern in patterns:
        names.update(dict.fromkeys(["-"] if pattern in STDIN else _expand_pattern(pattern)))
    return list(names)


def _expand_pattern(pattern: str) -> list[str]:
    """Return the file of this name, the texts in a folder, or else the files that match a pattern.

    The exact name comes first, because the name of a file may have a [ in it.
    """
    import glob
    import shlex
    from pathlib import Path

    path = os.path.expanduser(pattern)
    if Path(path).is_dir():
        from localspec.cli import documents

        return documents.list_text_files(path)
    if Path(path).exists():
        return [path]
    if "://" in path:
        raise UsageError(
            f"{pattern} is a URL, and localspec does not fetch web pages: it works offline. To ask about "
            f"this one: curl -fsSL {shlex.quote(pattern)} | localspec ask …"
        )
    if not any(sign in path for sign in "*?["):
        return [path]
    names = glob.glob(path, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
    if matches := sorted(name for name in names if Path(name).is_file()):
        return matches
    raise UsageError(f"No file matches '{pattern}'.")


def read_text(name: str) -> str:
    """Return the text of a file: UTF-8, UTF-16 with a byte order mark, a PDF document or a notebook.

    Raises UsageError if the file cannot be read, or is not text.
    """
    import shlex
    from pathlib import Path

    from localspec.attached_files import is_pdf

    path = Path(name)
    try:
        if path.is_dir():
            example = f"-f '{name.rstrip('/')}/*'"
            raise UsageError(f"{name} is a folder; name the files in it, for example: {example}")
        with path.open("rb") as file:
            data = file.read(MAX_INPUT_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}.") from error
    if len(data) > MAX_INPUT_BYTES:
        raise UsageError(f"{name} has more than {_MAX_INPUT}, which is the limit.")
    if is_pdf(data):
        from localspec.cli import documents

        return documents.pdf_text(name)
    if data.startswith(_UTF16_BYTE_ORDER_MARKS):
        return data.decode("utf-16", "replace")
    remedy = f"{shlex.quote(name)} | localspec ask …"
    if encoding := _guess_utf16(data):
        raise UsageError(
            f"{name} is UTF-16 without a byte order mark, not UTF-8. Convert it first: "
            f"iconv -f {encoding} -t utf8 {remedy}"
        )
    try:
        if b"\0" not in data:
            text = data.decode("utf-8-sig")
            if name.endswith(".ipynb"):
                from localspec.cli import documents

                return documents.notebook_text(name, text)
            return text
    except UnicodeDecodeError as error:
        if describe_kind(data) == _UNKNOWN_KIND:
            raise UsageError(
                f"{name} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}. If it is "
                f"Latin-1: iconv -f latin1 -t utf8 {remedy}"
            ) from error
    raise UsageError(f"{name} is not text but {describe_kind(data)}.")


_UNKNOWN_KIND = "binary data (it contains NUL bytes)"


def describe_kind(data: bytes) -> str:
    """Return what kind of file `data` seems to be, judged by its first bytes."""
    kinds = (kind for magic, kind in _FILE_SIGNATURES if data.startswith(magic))
    return next(kinds, _UNKNOWN_KIND)


def load_schema(name: str) -> dict[str, Any]:
    """Return a JSON schema from a file, or from the argument itself if that begins with a brace.

    Raises UsageError if it cannot be read, or is not a JSON object.
    """
    text = name if name.lstrip().startswith("{") else read_text(name)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--schema {name[:60]}: not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise UsageError(f"--schema {name[:60]}: a schema must be a JSON object.")
    return value


def edit_text(
    text: str, problem: Callable[[str], str], unchanged_message: str, extension: str = ".toml"
) -> str | None:
    """Let a person edit `text` in $EDITOR until `problem` finds nothing wrong, and return the result.

    `problem` returns an error message or an empty string. Returns None if the editor was closed without
    saving.

    Raises:
        UsageError: the editor does not run, or the person gave up; then with `unchanged_message`.
    """
    import click

    from localspec.cli.terminal import render

    while True:
        try:
            result = click.edit(text, extension=extension)
        except click.ClickException as error:
            message = f"{error.format_message()}. $EDITOR names the editor to use."
            raise UsageError(message) from error
        if result is None or not (message := problem(result)):
            return result
        render.error(message)
        if not click.confirm("Edit it again?", default=True, err=True):
            raise UsageError(unchanged_message)
        text = result


def describe_too_long(
    error: ContextExceeded, question: str, *, stdin_alone: bool = False, longer: str = ""
) -> str:
    """Return an error message for a prompt that is too long, with the remedies that apply.

    `stdin_alone`: the prompt came from stdin without files. `longer`: an installed pair whose context holds
    the prompt.
    """
    from localspec.files import format_size

    tokens, n_ctx = error.n_prompt_tokens, error.n_ctx
    if not tokens or n_ctx is None:
        return error.message
    n_bytes = len(question.encode())
    # A fifth of the context is left for the answer.
    fitting_bytes = n_bytes * n_ctx * 4 // (tokens * 5)
    part = f"a part of it (head -c {fitting_bytes})" if stdin_alone else "fewer or shorter files"
    remedy = f"Ask about {part}, or pull a pair with a longer context: localspec catalogue"
    if longer:
        remedy = f"Use a pair with a longer context: -m {longer}"
    return (
        f"The question is too long: {format_size(n_bytes)}, {tokens} tokens. This pair's context "
        f"holds {n_ctx} tokens, about {format_size(fitting_bytes)} of such text plus an answer. {remedy}"
    )


def describe_chat_too_long(error: ContextExceeded, client: Client) -> str:
    """Return an error message for a conversation that has become too long, with the remedies."""
    tokens, n_ctx = error.n_prompt_tokens, error.n_ctx
    if not tokens or n_ctx is None:
        return error.message
    remedies = "Shorten the message, or begin a new conversation with /new"
    if longer := find_longer_pair(client, tokens):
        remedies += f", or go on with a pair that has a longer context: /pair {longer}"
    return (
        f"With this message the conversation has {tokens} tokens, and this pair's context holds "
        f"{n_ctx}. {remedies}."
    )


def find_longer_pair(client: Client, tokens: int) -> str:
    """Return the smallest installed chat pair whose context holds `tokens` and an answer, else ""."""
    from localspec.client.pairs import PairsClient

    pairs = PairsClient(client.socket_path, autostart=False)
    try:
        entries = [entry for entry in pairs.pairs()["pairs"] if "chat" in entry["roles"]]
        for entry in sorted(entries, key=lambda entry: entry["size"] or 0)[:_MAX_CHECKED_PAIRS]:
            name = entry["name"]
            if entry["kind"] != "upstream" and 5 * tokens <= 4 * pairs.pair(name)["context"]:
                return str(name)
    except LocalspecError:
        pass  # this is only a hint for an error message, which is shown without it
    return ""


_MAX_CHECKED_PAIRS = 12  # the daemon reads the files of each pair that is checked
