"""Recognize PDF documents, and walk through the parts of PNG and JPEG files, without decoding them.

Any bytes are read, and none is trusted: a damaged file has fewer parts.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
JPEG_SIGNATURE = b"\xff\xd8\xff"
_PDF_MARK = b"%PDF-"
# In which the mark of a PDF document must begin. Other readers allow that many bytes before it, too.
PDF_START_BYTES = 1024 + len(_PDF_MARK)
_START_OF_SCAN = 0xDA
_STANDALONE_MARKERS = frozenset((0x01, *range(0xD0, 0xD9)))
_EXIF, _EXIF_MARKER, _ORIENTATION_TAG, _SHORT = b"Exif\0\0", 0xE1, 0x0112, 3


def may_be_pdf(data: bytes) -> bool:
    """Return whether the first `PDF_START_BYTES` of a file have the mark of a PDF document."""
    return _PDF_MARK in data[:PDF_START_BYTES]


def is_pdf(data: bytes) -> bool:
    """Return whether a file is a PDF document, in some of which other bytes precede the header.

    Such a one must also end like a PDF document, because a text about them has the mark of a header, too.
    """
    return may_be_pdf(data) and (
        data[:PDF_START_BYTES].lstrip().startswith(_PDF_MARK) or b"startxref" in data[-2048:]
    )


def png_chunks(picture: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield the kind of each chunk of a PNG file, and where its data begins and ends."""
    position = len(PNG_SIGNATURE)
    while position + 8 <= len(picture):
        length, kind = struct.unpack_from(">I4s", picture, position)
        start = position + 8
        yield kind, start, start + length
        position = start + length + 4


def jpeg_segments(picture: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the marker of each segment of a JPEG file, and where its data begins and ends.

    The last one is the first scan's header, which pixels follow.
    """
    position = 2
    while position + 4 <= len(picture) and picture[position] == 0xFF:
        marker = picture[position + 1]
        if marker == 0xFF:  # a fill byte
            position += 1
        elif marker in _STANDALONE_MARKERS:
            position += 2
        else:
            (length,) = struct.unpack_from(">H", picture, position + 2)
            yield marker, position + 4, position + 2 + length
            if marker == _START_OF_SCAN:
                return
            position += 2 + length


def read_orientation(picture: bytes) -> int:
    """Return how a JPEG or PNG file is to be turned, from 1 (as it is) to 8, as Exif counts."""
    if picture.startswith(JPEG_SIGNATURE):
        segments = jpeg_segments(picture)
        parts = (picture[start:end] for kind, start, end in segments if kind == _EXIF_MARKER)
        exif = next((part for part in parts if part.startswith(_EXIF)), b"")
    else:
        chunks = png_chunks(picture) if picture.startswith(PNG_SIGNATURE) else ()
        exif = next((picture[start:end] for kind, start, end in chunks if kind == b"eXIf"), b"")
    with contextlib.suppress(struct.error):  # it ends too early
        return _find_orientation(exif.removeprefix(_EXIF))
    return 1


def _find_orientation(exif: bytes) -> int:
    """Return the orientation in Exif data, 1 if there is no valid one. Raises struct.error."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return 1
    (directory,) = struct.unpack_from(f"{order}I", exif, 4)
    (n_entries,) = struct.unpack_from(f"{order}H", exif, directory)
    for entry in range(directory + 2, directory + 2 + 12 * n_entries, 12):
        tag, kind = struct.unpack_from(f"{order}HH", exif, entry)
        if tag == _ORIENTATION_TAG:
            form = f"{order}{'H' if kind == _SHORT else 'I'}"
            (value,) = struct.unpack_from(form, exif, entry + 8)
            return value if 1 <= value <= 8 else 1
    return 1
