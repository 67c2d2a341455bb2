"""Expand the files of a chat into what models read: text, and pictures that llama.cpp decodes.

A page of a PDF document becomes its text. If it shows more than that, and the pair reads pictures, it also
becomes a picture. Pictures that llama.cpp does not decode, or not as a person sees them, are converted. All
of this happens in processes of their own (`conversion_child`), and the latest results are kept: agents send
a conversation again with each request, and so its files. Equal files that are requested at the same time
share one process. What is done here with the bytes of a file runs in threads, because it would delay other
requests.

No picture is decoded here. Its first bytes are read, which say its format and size, and so how much memory
decoding will take.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import re
import secrets
import signal
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.util import find_spec
from itertools import groupby
from typing import NamedTuple
from urllib.parse import unquote

import msgspec

from localspec.attached_files import (
    JPEG_SIGNATURE,
    PNG_SIGNATURE,
    is_pdf,
    jpeg_segments,
    png_chunks,
)
from localspec.children import MAX_TEXT_CHARS, Child, Deadline, helper_environment
from localspec.daemon.completion.conversion_child import MAX_PIXELS, Conversion, Page
from localspec.daemon.logs import SharedWork, ThreadPool
from localspec.errors import Cancelled, InvalidRequest, Unavailable
from localspec.installation import install_extra_command
from localspec.priority import lower_priority, lower_session_priority
from localspec.protocol.requests import ChatMessage, ContentPart

# At the same time. Several, so that a few long documents keep no short one waiting. Pictures, which take a
# second or two, wait for no document.
MAX_PROCESSES, MAX_PICTURE_PROCESSES = 4, 2
MAX_CONVERSIONS = 16  # of either kind that run or wait; each may take CPU_LIMIT_S
MEMORY_LIMIT_BYTES = 1 << 30
CPU_LIMIT_S = 30
TIME_LIMIT_S = 300.0  # that a process may take on a busy machine
LONG_S = 1.0  # after which it gets a lower priority
CACHE_BYTES = 64 << 20
RETRY_AFTER_S = 10
_CHILD = "localspec.daemon.completion.conversion_child"
_EXCEEDED = Conversion(problem="cannot be read: that takes too much time or memory")


class Converter:
    """Converts files in processes of their own, and keeps the latest results."""

    def __init__(
        self, memory_limit_bytes: int = MEMORY_LIMIT_BYTES, cpu_limit_s: int = CPU_LIMIT_S
    ) -> None:
        self._limits = str(memory_limit_bytes), str(cpu_limit_s)
        self._documents = SharedWork[bytes](ThreadPool("file conversion", MAX_PROCESSES))
        self._pictures = SharedWork[bytes](ThreadPool("picture conversion", MAX_PICTURE_PROCESSES))
        self._cache: OrderedDict[str, bytes] = OrderedDict()  # encoded conversions
        self._is_aborted = False

    def abort(self) -> None:
        """Fail every conversion, also later ones, and end their processes."""
        self._is_aborted = True
        self._documents.close()
        self._pictures.close()

    async def convert(self, data: bytes, *, with_pictures: bool) -> Conversion:
        """Return what a file becomes. Raises Unavailable: it cannot be converted at the moment."""
        kind = "pictures" if with_pictures else "text"
        digest = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
        key = f"{kind} {digest}"
        output = self._cache.get(key)
        if output is None:
            if self._is_aborted:
                raise _stopped()
            running = self._documents if is_pdf(data) else self._pictures
            if len(running.names) >= MAX_CONVERSIONS and key not in running.names:
                raise _unavailable(f"{MAX_CONVERSIONS} files are being converted; try again.")
            output = await running.get(key, partial(self._run, kind, data))
        self._cache[key] = output
        self._cache.move_to_end(key)
        while len(self._cache) > 1 and sum(map(len, self._cache.values())) > CACHE_BYTES:
            self._cache.popitem(last=False)
        return await asyncio.to_thread(msgspec.msgpack.decode, output, type=Conversion)

    def _run(self, kind: str, data: bytes, cancelled: threading.Event) -> bytes:
        """Return the encoded conversion that a process writes. It is killed as soon as `cancelled` is set."""
        if cancelled.is_set():
            raise _stopped()
        environment = helper_environment()
        child = Child(_CHILD, kind, *self._limits, environment=environment, own_session=True)
        try:
            child.start()
        except OSError as error:
            message = f"The process that converts files cannot be started ({error}); try again."
            raise _unavailable(message) from error

        def give_way() -> None:
            # Where the machine has no time left, a short conversion must not wait for all others.
            lower_priority(child.pid)
            lower_session_priority(child.pid)

        try:
            return child.ask(data, Deadline(TIME_LIMIT_S, cancelled.is_set, LONG_S, give_way))
        except Cancelled:
            raise _stopped() from None
        except (EOFError, OSError) as error:  # TimeoutError is an OSError
            if isinstance(error, TimeoutError) or child.last_exit == -signal.SIGKILL:
                message = "A process that converted a file was ended; try again."
                raise _unavailable(message) from None
            return msgspec.msgpack.encode(_EXCEEDED)
        finally:
            child.close()


def _stopped() -> Unavailable:
    return Unavailable("The daemon was stopped.", retry_after=2)


def _unavailable(message: str) -> Unavailable:
    return Unavailable(message, retry_after=RETRY_AFTER_S)


MAX_PICTURE_BYTES = 128 << 20  # of one request, in base64; all go to the engine in one frame
_MAX_NAME_CHARS = 200
_EXAMPLE = "data:application/pdf;base64,…"


class File(NamedTuple):
    """A file in a request: a PDF document, or else `text`."""

    name: str
    data: bytes
    text: str = ""


def read_file(file: object, path: str, field: str = "file_data") -> File:
    """Return the file of a part in OpenAI's form, with `file_data` and `filename`.

    field: what `file_data` is called in the client's protocol.

    Raises:
        InvalidRequest: it is not in the request, or neither a PDF document nor text.
    """
    fields = file if isinstance(file, dict) else {}
    data, name = fields.get("file_data"), fields.get("filename")
    path = f"{path}.{field}"
    if not isinstance(data, str):
        reason = "localspec works offline, and stores no files."
        raise InvalidRequest.at(path, f"must be a data URL ({_EXAMPLE}): {reason}")
    name = " ".join(name.split())[:_MAX_NAME_CHARS] if isinstance(name, str) else ""
    if ":" in data[:20]:  # clients send base64 alone, too
        data = read_data_url(data, path, _EXAMPLE)
    content = decode_base64(data, path)
    if is_pdf(content):
        require_extra("pypdfium2", "a PDF document", path)
        return File(name or "document.pdf", content)
    with contextlib.suppress(UnicodeDecodeError):
        if b"\0" not in content:
            return File(name or "document", content, content.decode("utf-8-sig"))
    raise InvalidRequest.at(path, "is neither a PDF document nor text in UTF-8.")


async def has_files(messages: Sequence[ChatMessage]) -> bool:
    """Return whether there is something to expand in the messages. Pictures are read in a thread."""
    contents = (message.content for message in messages if isinstance(message.content, list))
    parts = [part for content in contents for part in content if part.type != "text"]
    if any(part.type == "file" for part in parts):
        return True

    def is_converted(part: ContentPart) -> bool:
        with contextlib.suppress(InvalidRequest):  # one that cannot be read is refused later
            return bool(part.type == "image_url" and _read_if_converted(part, ""))
        return False

    return bool(parts) and await asyncio.to_thread(lambda: any(map(is_converted, parts)))


def _read_if_converted(part: ContentPart, path: str) -> bytes:
    """Return the picture file of a part if it must be converted, else b"". Raises as `read_picture`."""
    picture = read_picture(picture_url(part) or "", path)
    return picture if converted_format(picture) else b""


async def expand_files(
    messages: Sequence[ChatMessage], converter: Converter, *, pair: str, reads_pictures: bool
) -> str:
    """Replace the files in messages, in place, and return a note about what was left out, or "".

    Raises:
        InvalidRequest: a file cannot be read, or there are too many.
        Unavailable: it cannot be converted at the moment.
    """
    paths = [
        f"messages[{index}].content[{number}]"
        for index, message in enumerate(messages)
        if isinstance(message.content, list)
        for number, part in enumerate(message.content)
        if part.type in ("file", "image_url")
    ]
    if len(paths) > MAX_PICTURES:
        problem = f": a request may have at most {MAX_PICTURES} files and pictures."
        raise InvalidRequest.at(paths[MAX_PICTURES], problem)
    notes, n_chars, n_bytes = [], 0, 0
    for index, message in enumerate(messages):
        if not isinstance(message.content, list):
            continue
        expanded: list[ContentPart] = []
        for number, part in enumerate(message.content):
            path = f"messages[{index}].content[{number}]"
            if part.type == "file":
                file = await asyncio.to_thread(read_file, part.file, f"{path}.file")
                parts, note = await _expand(file, converter, pair, reads_pictures)
                notes.append(note)
            elif reads_pictures and picture_url(part) is not None:
                parts = [await _convert_picture(part, f"{path}.image_url", converter)]
            else:
                expanded.append(part)
                continue
            expanded += parts
            n_chars += sum(len(part.text or "") for part in parts)
            n_bytes += sum(len(picture_url(part) or "") for part in parts)
            _check_size(n_chars, n_bytes, path)
        # The list itself changes, because the history's copies of the message share it.
        message.content[:] = _join_texts(expanded)
    return " ".join(filter(None, notes))


def _check_size(n_chars: int, n_bytes: int, path: str) -> None:
    """Refuse files that have become too much by the last of them, which is at `path`."""
    if n_chars > MAX_TEXT_CHARS:
        what = f"{MAX_TEXT_CHARS:,} characters of text"
    elif n_bytes > MAX_PICTURE_BYTES:
        what = f"{MAX_PICTURE_BYTES >> 20} MiB of pictures"
    else:
        return
    raise InvalidRequest.at(
        path, f": the files of the request become more than {what}. Send fewer."
    )


def _join_texts(parts: Sequence[ContentPart]) -> Iterator[ContentPart]:
    """Yield the parts with successive texts joined, as the model reads them and the history keeps them."""
    for kind, group in groupby(parts, lambda part: part.type):
        if kind == "text":
            yield ContentPart("text", "\n".join(part.text or "" for part in group))
        else:
            yield from group


async def _expand(
    file: File, converter: Converter, pair: str, reads_pictures: bool
) -> tuple[list[ContentPart], str]:
    if not is_pdf(file.data):
        return [ContentPart("text", f"{file.name}:\n{file.text.rstrip()}\n")], ""
    conversion = await converter.convert(file.data, with_pictures=reads_pictures)
    if conversion.problem:
        raise InvalidRequest(f"The document '{file.name}' {conversion.problem}.", param="messages")
    pages = conversion.pages
    if not reads_pictures and not any(page.text for page in pages):
        raise InvalidRequest(
            f"The document '{file.name}' has no text, and the pair '{pair}' reads nothing else. If its pages "
            "are scanned, ocrmypdf adds their text.",
            param="messages",
        )
    parts = await asyncio.to_thread(_document_parts, file.name, pages)
    n_drawn = 0 if reads_pictures else sum(page.has_drawings for page in pages)
    where = "1 page" if n_drawn == 1 else f"{n_drawn} pages"
    note = (
        f"The pair '{pair}' reads text only, so drawings and pictures on {where} of '{file.name}' "
    )
    return parts, f"{note}were left out." if n_drawn else ""


def _document_parts(name: str, pages: Sequence[Page]) -> list[ContentPart]:
    parts = []
    for number, page in enumerate(pages, start=1):
        parts.append(ContentPart("text", f"{name}, page {number} of {len(pages)}:\n{page.text}\n"))
        if page.picture:
            parts.append(_picture_part(page.picture))
    return parts


async def _convert_picture(part: ContentPart, path: str, converter: Converter) -> ContentPart:
    if not (picture := await asyncio.to_thread(_read_if_converted, part, path)):
        return part
    conversion = await converter.convert(picture, with_pictures=True)
    if conversion.problem:
        raise InvalidRequest.at(path, f": the picture {conversion.problem}.")
    return await asyncio.to_thread(_picture_part, conversion.pages[0].picture)


def _picture_part(picture: bytes) -> ContentPart:
    url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    return ContentPart("image_url", image_url=url)


MAX_PICTURES = 64  # of one request
# Each takes as long as all pixels of the picture, however short it is. Programs write about ten.
MAX_JPEG_SCANS = 100
_JPEG_SCAN = b"\xff\xda"
# What stands for a picture in texts for people, and in the history, which keeps no pictures.
PLACEHOLDER = "[picture]"

_READABLE = "PNG, JPEG, GIF, BMP, WebP, AVIF and TIFF pictures can be read"
_BASE64_ALPHABET = bytes.maketrans(b"-_", b"+/")
# First bytes of formats that are not read.
_OTHER_FORMATS = (
    (b"%PDF-", "a PDF document, which is sent as a file and not as a picture"),
    (b"<svg", "an SVG picture"),
    (b"<?xml", "an XML document"),
    (b"8BPS", "a Photoshop picture"),
)
_SOF_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# The control block of a frame, whose lowest bit says that one of its colours is transparent.
_GIF_TRANSPARENCY = re.compile(b"!\xf9\x04[" + re.escape(bytes(range(1, 256, 2))) + b"]")


@dataclass(slots=True)
class PictureReader:
    """Collects the picture files of a request, in order. `mark` stands for each in the messages' texts."""

    mark: str = field(default_factory=lambda: f"<__picture_{secrets.token_hex(8)}__>")
    files: list[bytes] = field(default_factory=list)

    def read(self, part: ContentPart, path: str) -> str:
        """Add the picture of a part, and return what stands for it in the text."""
        if len(self.files) == MAX_PICTURES:
            most = f"{MAX_PICTURES} pictures, pages of documents among them."
            raise InvalidRequest.at(path, f": a request may have at most {most}")
        url = picture_url(part)
        if url is None:
            raise InvalidRequest.at(f"{path}.image_url", "must be an object with a 'url'.")
        self.files.append(read_picture(url, f"{path}.image_url"))
        return self.mark


def picture_url(part: ContentPart) -> str | None:
    """Return the URL of a part's picture, or None if it has none."""
    image = part.image_url
    url = image.get("url") if isinstance(image, dict) else image
    return url if isinstance(url, str) else None


def read_picture(url: str, path: str) -> bytes:
    """Return the picture file in a data URL. Raises InvalidRequest for another one, or a bad file."""
    return decode_picture(read_data_url(url, path, "data:image/png;base64,…"), path)


def read_data_url(url: str, path: str, example: str) -> str:
    """Return the base64 text in a data URL. Raises InvalidRequest: it is another URL, or not in base64."""
    head, comma, data = url.partition(",")
    scheme, _, kind = head.strip().partition(":")
    if scheme.lower() != "data" or not comma:
        reason = "localspec works offline, and reads no files for a client."
        raise InvalidRequest.at(path, f"must be a data URL ({example}): {reason}")
    if not kind.lower().replace(" ", "").endswith(";base64"):
        raise InvalidRequest.at(path, ": a data URL must be in base64.")
    return unquote(data) if "%" in data else data


def decode_picture(data: str, path: str) -> bytes:
    """Return the picture file that is base64 text. Raises InvalidRequest for other text or a bad file."""
    picture = decode_base64(data, path)
    check_picture(picture, path)
    return picture


def decode_base64(data: str, path: str) -> bytes:
    """Return the bytes of base64 text, with blanks, without its end, or in the alphabet for URLs."""
    try:
        encoded = data.encode("ascii").translate(_BASE64_ALPHABET, b" \t\n\f\r")
        return base64.b64decode(encoded + b"=" * (-len(encoded) % 4), validate=True)
    except ValueError:  # or a subclass: UnicodeEncodeError, binascii.Error
        raise InvalidRequest.at(path, "is not valid base64.") from None


def check_picture(picture: bytes, path: str) -> None:
    """Raise InvalidRequest if the format of a picture cannot be read here, or it is too large."""
    converted, size = converted_format(picture), _read_size(picture)
    if size is None and not converted:
        raise InvalidRequest.at(path, f"is {_describe(picture)}; {_READABLE}.")
    if converted:
        require_extra("PIL", converted, path)
    if size is None:
        return  # The process that converts it reads the size.
    width, height = size
    if not width or not height:
        raise InvalidRequest.at(path, ": the picture is damaged: it states no size.")
    n_scans = picture.count(_JPEG_SCAN) if picture.startswith(JPEG_SIGNATURE) else 0
    problem = ""
    if width * height > MAX_PIXELS:
        problem = f"has {width} × {height} pixels; at most {MAX_PIXELS:,} can be read. "
        problem += "Send a smaller one."
    elif n_scans > MAX_JPEG_SCANS:
        problem = f"comes in {n_scans} scans; at most {MAX_JPEG_SCANS} can be read. Save it anew."
    if problem:
        raise InvalidRequest.at(path, f": the picture {problem}")


def converted_format(picture: bytes) -> str:
    """Return what a picture file is if it must be converted, else "".

    llama.cpp does not decode it, or it would show the colours that its transparency hides. Whether any of its
    pixels is transparent is not known here.
    """
    if picture[:4] == b"RIFF" and picture[8:12] == b"WEBP":
        return "a WebP picture"
    if picture[4:12] in (b"ftypavif", b"ftypavis"):
        return "an AVIF picture"
    if picture[:4] in (b"II*\0", b"MM\0*"):
        return "a TIFF picture"
    is_transparent = False
    if picture.startswith(PNG_SIGNATURE):
        has_alpha = picture[25:26] in (
            b"\4",
            b"\6",
        )  # grey or coloured, with a value for each pixel
        chunks = png_chunks(picture)
        is_transparent = has_alpha or any(kind == b"tRNS" for kind, _, _ in chunks)
    elif picture.startswith(b"GIF89a"):
        is_transparent = _GIF_TRANSPARENCY.search(picture) is not None
    elif picture.startswith(b"BM"):
        # From its third version on, the header has a mask for these bits.
        has_mask = (picture[14:15], picture[28:29]) >= (b"8", b" ")
        is_transparent = has_mask and any(picture[66:70])
    return "a picture with transparency" if is_transparent else ""


def require_extra(package: str, kind: str, path: str) -> None:
    """Raise InvalidRequest if the package that converts files of this kind is not installed."""
    try:
        _find_package(package)
    except ModuleNotFoundError:
        command = install_extra_command("pictures")
        problem = f"is {kind}, for which localspec needs another package: {command}"
        raise InvalidRequest.at(path, problem) from None


@cache
def _find_package(package: str) -> None:
    """Raise ModuleNotFoundError if a package is not installed. Errors are not cached: it may be any time."""
    if find_spec(package) is None:
        raise ModuleNotFoundError


def _describe(picture: bytes) -> str:
    if not picture:
        return "empty"
    if picture[4:8] == b"ftyp":
        return "a HEIC picture or a film"
    start = picture.lstrip()[:8]
    return next((name for magic, name in _OTHER_FORMATS if start.startswith(magic)), "no picture")


def _read_size(picture: bytes) -> tuple[int, int] | None:
    """Return the width and height that a file states, (0, 0) if it is damaged, None if it is no picture."""
    try:
        if picture.startswith(PNG_SIGNATURE):
            return _unpack(">II", picture, 16) if picture[12:16] == b"IHDR" else (0, 0)
        if picture.startswith((b"GIF87a", b"GIF89a")):
            return _unpack("<HH", picture, 6)
        if picture.startswith(b"BM"):
            (header_size,) = struct.unpack_from("<I", picture, 14)
            width, height = _unpack("<HH" if header_size == 12 else "<ii", picture, 18)
            return abs(width), abs(height)
        if picture.startswith(JPEG_SIGNATURE):
            headers = (start for kind, start, _ in jpeg_segments(picture) if kind in _SOF_MARKERS)
            if (start := next(headers, None)) is None:
                return 0, 0
            height, width = _unpack(">HH", picture, start + 1)
            return width, height
    except struct.error:  # the file ends too early
        return 0, 0
    return None


def _unpack(layout: str, data: bytes, offset: int) -> tuple[int, int]:
    first, second = struct.unpack_from(layout, data, offset)
    return first, second
