"""Expand the files of a chat into what models read: text, and pictures that llama.cpp decodes.

A page of a PDF document becomes its text. If it shows more than that, and the pair reads pictures, it also
becomes a picture. Pictures that llama.cpp does not decode, or not as a person sees them, are converted. All
of this happens in other processes (`converter`). What is done here with the bytes of a file runs in threads,
because it would delay other requests.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from localspec.attached_files import is_pdf
from localspec.children import MAX_TEXT_CHARS
from localspec.daemon.completion.conversion_child import Page
from localspec.daemon.completion.converter import Converter
from localspec.daemon.completion.pictures import (
    MAX_PICTURES,
    converted_format,
    decode_base64,
    picture_url,
    read_data_url,
    read_picture,
    require_extra,
)
from localspec.errors import InvalidRequest
from localspec.protocol.requests import ChatMessage, ContentPart

MAX_PICTURE_BYTES = 128 << 20  # of one request, in base64; all go to the engine in one frame
_MAX_NAME_CHARS = 200


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
        raise InvalidRequest(
            f"'{path}' must be a data URL (data:application/pdf;base64,…): localspec works offline, and "
            "stores no files.",
            param=path,
        )
    name = " ".join(name.split())[:_MAX_NAME_CHARS] if isinstance(name, str) else ""
    if ":" in data[:20]:  # clients send base64 alone, too
        data = read_data_url(data, path, "data:application/pdf;base64,…")
    content = decode_base64(data, path)
    if is_pdf(content):
        require_extra("pypdfium2", "a PDF document", path)
        return File(name or "document.pdf", content)
    with contextlib.suppress(UnicodeDecodeError):
        if b"\0" not in content:
            return File(name or "document", content, content.decode("utf-8-sig"))
    raise InvalidRequest(f"'{path}' is neither a PDF document nor text in UTF-8.", param=path)


async def has_files(messages: Sequence[ChatMessage]) -> bool:
    """Return whether there is something to expand in the messages. Pictures are read in a thread."""
    contents = (message.content for message in messages if isinstance(message.content, list))
    parts = [part for content in contents for part in content if part.type != "text"]
    if any(part.type == "file" for part in parts):
        return True
    return bool(parts) and await asyncio.to_thread(lambda: any(map(_is_converted, parts)))


def _is_converted(part: ContentPart) -> bool:
    """Return whether a part is a picture that must be converted. One that cannot be read is refused later."""
    with contextlib.suppress(InvalidRequest):
        return bool(part.type == "image_url" and _read_if_converted(part, ""))
    return False


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
    _check_number(messages)
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


def _check_number(messages: Sequence[ChatMessage]) -> None:
    """Raise InvalidRequest if messages have too many files and pictures."""
    paths = [
        f"messages[{index}].content[{number}]"
        for index, message in enumerate(messages)
        if isinstance(message.content, list)
        for number, part in enumerate(message.content)
        if part.type in ("file", "image_url")
    ]
    if len(paths) > MAX_PICTURES:
        path = paths[MAX_PICTURES]
        raise InvalidRequest(
            f"'{path}': a request may have at most {MAX_PICTURES} files and pictures.", param=path
        )


def _check_size(n_chars: int, n_bytes: int, path: str) -> None:
    """Check what the files of a request have become. The one at `path` is the last of them.

    Raises:
        InvalidRequest: they have more text than a prompt may have, or too many bytes of pictures.
    """
    if n_chars > MAX_TEXT_CHARS:
        what = f"{MAX_TEXT_CHARS:,} characters of text"
    elif n_bytes > MAX_PICTURE_BYTES:
        what = f"{MAX_PICTURE_BYTES >> 20} MiB of pictures"
    else:
        return
    raise InvalidRequest(
        f"'{path}': the files of the request become more than {what}. Send fewer.", param=path
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
    """Return the parts of a file, and a note about what they lack."""
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
    if not n_drawn:
        return parts, ""
    where = "1 page" if n_drawn == 1 else f"{n_drawn} pages"
    return parts, (
        f"The pair '{pair}' reads text only, so drawings and pictures on {where} of '{file.name}' were left "
        "out."
    )


def _document_parts(name: str, pages: Sequence[Page]) -> list[ContentPart]:
    parts = []
    for number, page in enumerate(pages, start=1):
        parts.append(ContentPart("text", f"{name}, page {number} of {len(pages)}:\n{page.text}\n"))
        if page.picture:
            parts.append(_picture_part(page.picture))
    return parts


async def _convert_picture(part: ContentPart, path: str, converter: Converter) -> ContentPart:
    """Return the part of a picture as llama.cpp reads it."""
    if not (picture := await asyncio.to_thread(_read_if_converted, part, path)):
        return part
    conversion = await converter.convert(picture, with_pictures=True)
    if conversion.problem:
        raise InvalidRequest(f"'{path}': the picture {conversion.problem}.", param=path)
    return await asyncio.to_thread(_picture_part, conversion.pages[0].picture)


def _picture_part(picture: bytes) -> ContentPart:
    url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    return ContentPart("image_url", image_url=url)
