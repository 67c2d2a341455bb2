"""Picture files that take their decoder much longer than their size lets expect."""

from __future__ import annotations

import io
import struct

_CLEAR, _FIRST_FREE = 4, 6  # codes of LZW for four colours


def gif_of_long_codes(n_bytes: int) -> bytes:
    """Return a GIF picture of one pixel whose codes stand for thousands of pixels each."""
    data, bits, n_bits = bytearray(), 0, 0

    def put(code: int, width: int) -> None:
        nonlocal bits, n_bits
        bits |= code << n_bits
        n_bits += width
        while n_bits >= 8:
            data.append(bits & 0xFF)
            bits, n_bits = bits >> 8, n_bits - 8

    width = 3
    while len(data) < n_bytes:
        put(_CLEAR, width)
        width = 3
        put(0, width)
        for code in range(_FIRST_FREE, 4096):  # each is the one before it and a pixel
            put(code, width)
            if code + 1 == 1 << width and width < 12:
                width += 1
        for _ in range(4000):
            put(4095, width)
    parts = (bytes(data[start : start + 255]) for start in range(0, len(data), 255))
    blocks = b"".join(bytes([len(part)]) + part for part in parts)
    head = b"GIF87a" + struct.pack("<HHBBB", 1, 1, 0x81, 0, 0) + bytes(12)
    return head + b"," + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\2" + blocks + b"\0;"


def jpeg_of_scans(n_scans: int, *, side: int) -> bytes:
    """Return a JPEG picture of one colour that repeats its last scan so many times."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (side, side), "teal").save(buffer, "JPEG", progressive=True)
    picture = buffer.getvalue()
    last = picture.rindex(b"\xff\xda")
    return picture[:-2] + picture[last:-2] * n_scans + picture[-2:]
