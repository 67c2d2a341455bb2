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
