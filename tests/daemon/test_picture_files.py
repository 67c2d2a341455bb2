"""What is read of a picture file before it is decoded: any bytes are judged, and none is trusted."""

from __future__ import annotations

import base64
import contextlib
import struct
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.api.pictures import jpeg_of_scans
from benchmarks.synthetic_projector import png
from localspec.daemon.completion.conversion_child import MAX_PIXELS
from localspec.daemon.completion.files import MAX_JPEG_SCANS, check_picture, read_picture
from localspec.errors import InvalidRequest

SIGNATURES = [b"\x89PNG\r\n\x1a\n", b"GIF89a", b"BM", b"\xff\xd8\xff", b"RIFF", b"", b"%PDF-"]


def jpeg(width: int, height: int, marker: int = 0xC0) -> bytes:
    """Return the beginning of a JPEG file: a comment, and a frame header."""
    comment = b"\xff\xfe" + struct.pack(">H", 2 + 5) + b"hello"
    frame = bytes([0xFF, marker]) + struct.pack(">HBHHB", 17, 8, height, width, 3)
    return b"\xff\xd8" + comment + b"\xff" + frame


def gif(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height)


def bmp(width: int, height: int) -> bytes:
    return b"BM" + bytes(12) + struct.pack("<Iii", 40, width, -height)


def old_bmp(width: int, height: int) -> bytes:
    return b"BM" + bytes(12) + struct.pack("<IHH", 12, width, height)


@pytest.mark.parametrize("write", [partial(png, 1), jpeg, gif, bmp, old_bmp])
def test_the_stated_size_is_read(write: Callable[[int, int], bytes]) -> None:
    check_picture(write(60, 40), "p")
    with pytest.raises(InvalidRequest, match="states no size"):
        check_picture(write(60, 40)[:8], "p")


@pytest.mark.parametrize("write", [jpeg, gif, old_bmp])
@given(st.integers(0, 0x7FFF), st.integers(0, 0x7FFF))
def test_too_many_pixels_are_refused(
    write: Callable[[int, int], bytes], width: int, height: int
) -> None:
    fits = 0 < width * height <= MAX_PIXELS
    with contextlib.nullcontext() if fits else pytest.raises(InvalidRequest):
        check_picture(write(width, height), "p")


def test_a_jpeg_picture_of_too_many_scans_is_refused() -> None:
    check_picture(jpeg_of_scans(MAX_JPEG_SCANS - 12, side=16), "p")
    with pytest.raises(
        InvalidRequest, match=f"'p': .* scans; at most {MAX_JPEG_SCANS} can be read"
    ):
        check_picture(jpeg_of_scans(MAX_JPEG_SCANS, side=16), "p")


@given(st.sampled_from(SIGNATURES), st.binary(max_size=200))
@example(b"\xff\xd8\xff", b"\xe0\x00\x00" * 20)
def test_any_bytes_are_accepted_or_refused(start: bytes, rest: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        check_picture(start + rest, "p")


@given(st.binary(max_size=60), st.text(max_size=20))
def test_any_address_is_accepted_or_refused(data: bytes, text: str) -> None:
    encoded = base64.b64encode(data).decode()
    for url in (text, f"data:{text},{encoded}", f"data:image/png;base64,{encoded}{text}"):
        with contextlib.suppress(InvalidRequest):
            check_picture(read_picture(url, "p"), "p")
