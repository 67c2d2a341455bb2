"""Read the pictures of a request: where they are in its messages, their format and their size.

A picture is only decoded in processes for that. Here its first bytes are read, which say how much memory
that will take. What llama.cpp does not decode, or not as a person sees it, is converted first (`files`).
"""

from __future__ import annotations

import base64
import re
import secrets
import struct
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from urllib.parse import unquote

from localspec.attached_files import JPEG_SIGNATURE, PNG_SIGNATURE, jpeg_segments, png_chunks
from localspec.daemon.completion.conversion_child import MAX_PIXELS
from localspec.errors import InvalidRequest
from localspec.installation import install_extra_command
from localspec.protocol.requests import ContentPart

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
        """Add the picture of a part, and return what stands for it in the text.

        Raises:
            InvalidRequest: as `read_picture`, or there are too many.
        """
        if len(self.files) == MAX_PICTURES:
            raise InvalidRequest(
                f"'{path}': a request may have at most {MAX_PICTURES} pictures, pages of documents among "
                "them.",
                param=path,
            )
        url = picture_url(part)
        if url is None:
            raise InvalidRequest(
                f"'{path}.image_url' must be an object with a 'url'.", param=f"{path}.image_url"
            )
        self.files.append(read_picture(url, f"{path}.image_url"))
        return self.mark


def picture_url(part: ContentPart) -> str | None:
    """Return the URL of a part's picture, or None if it has none."""
    image = part.image_url
    url = image.get("url") if isinstance(image, dict) else image
    return url if isinstance(url, str) else None


def read_picture(url: str, path: str) -> bytes:
    """Return the picture file in a data URL.

    Raises:
        InvalidRequest: it is another URL, or `check_picture` refuses the file.
    """
    return decode_picture(read_data_url(url, path, "data:image/png;base64,…"), path)


def read_data_url(url: str, path: str, example: str) -> str:
    """Return the base64 text in a data URL.

    Raises:
        InvalidRequest: it is another URL, or not in base64.
    """
    head, comma, data = url.partition(",")
    scheme, _, kind = head.strip().partition(":")
    if scheme.lower() != "data" or not comma:
        raise InvalidRequest(
            f"'{path}' must be a data URL ({example}): localspec works offline, and reads no files for a "
            "client.",
            param=path,
        )
    if not kind.lower().replace(" ", "").endswith(";base64"):
        raise InvalidRequest(f"'{path}': a data URL must be in base64.", param=path)
    return unquote(data) if "%" in data else data


def decode_picture(data: str, path: str) -> bytes:
    """Return the picture file that is base64 text.

    Raises:
        InvalidRequest: it is not base64, or `check_picture` refuses the file.
    """
    picture = decode_base64(data, path)
    check_picture(picture, path)
    return picture


def decode_base64(data: str, path: str) -> bytes:
    """Return the bytes of base64 text, with blanks, without its end or in the alphabet for URLs, too.

    Raises:
        InvalidRequest: it is not base64.
    """
    try:
        encoded = data.encode("ascii").translate(_BASE64_ALPHABET, b" \t\n\f\r")
        return base64.b64decode(encoded + b"=" * (-len(encoded) % 4), validate=True)
    except ValueError:  # or a subclass: UnicodeEncodeError, binascii.Error
        raise InvalidRequest(f"'{path}' is not valid base64.", param=path) from None


def check_picture(picture: bytes, path: str) -> None:
    """Check the format of a picture file, and how many pixels it states.

    Raises:
        InvalidRequest: the format cannot be read here, or the picture is too large.
    """
    converted, size = converted_format(picture), _read_size(picture)
    if size is None and not converted:
        raise InvalidRequest(f"'{path}' is {_describe(picture)}; {_READABLE}.", param=path)
    if converted:
        require_extra("PIL", converted, path)
    if size is None:
        return  # The process that converts it reads the size.
    width, height = size
    if not width or not height:
        raise InvalidRequest(f"'{path}': the picture is damaged: it states no size.", param=path)
    if width * height > MAX_PIXELS:
        raise InvalidRequest(
            f"'{path}': the picture has {width} × {height} pixels; at most {MAX_PIXELS:,} can be read. "
            "Send a smaller one.",
            param=path,
        )
    is_jpeg = picture.startswith(JPEG_SIGNATURE)
    if is_jpeg and (n_scans := picture.count(_JPEG_SCAN)) > MAX_JPEG_SCANS:
        raise InvalidRequest(
            f"'{path}': the picture comes in {n_scans} scans; at most {MAX_JPEG_SCANS} can be read. "
            "Save it anew.",
            param=path,
        )


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
    return "a picture with transparency" if _has_transparency(picture) else ""


def _has_transparency(picture: bytes) -> bool:
    """Return whether the pixels of a PNG, GIF or BMP file may be transparent."""
    if picture.startswith(PNG_SIGNATURE):
        has_alpha = picture[25:26] in (
            b"\4",
            b"\6",
        )  # grey or coloured, with a value for each pixel
        return has_alpha or any(kind == b"tRNS" for kind, _, _ in png_chunks(picture))
    if picture.startswith(b"GIF89a"):
        return _GIF_TRANSPARENCY.search(picture) is not None
    if picture.startswith(b"BM"):  # from its third version on, the header has a mask for these bits
        return (picture[14:15], picture[28:29]) >= (b"8", b" ") and any(picture[66:70])
    return False


def require_extra(package: str, kind: str, path: str) -> None:
    """Raise InvalidRequest if the package that converts files of this kind is not installed."""
    try:
        _find_package(package)
    except ModuleNotFoundError:
        raise InvalidRequest(
            f"'{path}' is {kind}, for which localspec needs another package: "
            f"{install_extra_command('pictures')}",
            param=path,
        ) from None


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
            return _read_jpeg_size(picture)
    except struct.error:  # the file ends too early
        return 0, 0
    return None


def _unpack(layout: str, data: bytes, offset: int) -> tuple[int, int]:
    first, second = struct.unpack_from(layout, data, offset)
    return first, second


def _read_jpeg_size(picture: bytes) -> tuple[int, int]:
    """Return the width and height in the first frame header, (0, 0) if there is none."""
    for marker, start, _ in jpeg_segments(picture):
        if marker in _SOF_MARKERS:
            height, width = _unpack(">HH", picture, start + 1)
            return width, height
    return 0, 0
