"""Walk through the parts of PNG files, without decoding what is in them.

Any bytes are read, and none is trusted: a damaged file has fewer parts.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def png_chunks(picture: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield the kind of each chunk of a PNG file, and where its data begins and ends."""
    position = len(PNG_SIGNATURE)
    while position + 8 <= len(picture):
        length, kind = struct.unpack_from(">I4s", picture, position)
        start = position + 8
        yield kind, start, start + length
        position = start + length + 4
