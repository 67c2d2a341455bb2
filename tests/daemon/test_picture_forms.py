"""Pictures of every format and form become the pixels that a person sees, beside Pillow's reading of them."""

from __future__ import annotations

import asyncio
import base64
import io
import string
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageOps

from benchmarks.synthetic_projector import write_projector
from localspec.attached_files import PNG_SIGNATURE, read_orientation
from localspec.daemon.completion import files
from localspec.daemon.completion.conversion_child import convert
from localspec.daemon.completion.files import (
    Converter,
    decode_base64,
    picture_url,
    read_data_url,
    read_picture,
)
from localspec.engine.llama import Projector, initialise
from localspec.errors import InvalidRequest
from localspec.protocol.requests import ChatMessage, ContentPart
from tests.support.pairs import CONTEXT_SHAPE, contextual_pair

Pixels = npt.NDArray[np.uint8]
WIDTH, HEIGHT = 12, 8


def colours(*, n_bytes: int = 4) -> Pixels:
    """Return colours with their alpha: a column each that is hidden, half hidden and shown, and so on."""
    pixels = np.random.default_rng(1).integers(0, 256, (HEIGHT, WIDTH, n_bytes), dtype=np.uint8)
    pixels[..., -1] = np.resize([0, 128, 255], WIDTH)
    return pixels


def on_white(pixels: Pixels) -> Pixels:
    """Return what is seen of colours (of a grey value or three of them) with their alpha on white paper."""
    shown, alpha = pixels[..., :-1].astype(float), pixels[..., -1:] / 255.0
    seen = (shown * alpha + 255 * (1 - alpha)).round().astype(np.uint8)
    return np.broadcast_to(seen, (*seen.shape[:2], 3))


def save(image: Image.Image, format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def indexed(n_hidden: int = 1) -> tuple[Image.Image, Pixels]:
    """Return a picture of ten colours, and how it looks with the first of them hidden."""
    image = Image.new("P", (WIDTH, HEIGHT))
    palette = np.random.default_rng(2).integers(0, 255, (10, 3), dtype=np.uint8)
    image.putpalette(palette.tobytes())
    indices = np.arange(WIDTH * HEIGHT).reshape(HEIGHT, WIDTH) % 10
    image.putdata(indices.ravel().tolist())
    seen = palette[indices]
    seen[indices < n_hidden] = 255
    return image, seen


def alpha_bmp(pixels: Pixels) -> bytes:
    """Return a BMP file of RGBA pixels, with masks for their bits."""
    height, width, _ = pixels.shape
    masks = [0x000000FF, 0x0000FF00, 0x00FF0000, 0xFF000000]
    header = [np.array([56, width, height], "<u4"), np.array([1, 32], "<u2"), np.array([3], "<u4")]
    numbers = [*header, np.zeros(5, "<u4"), np.array(masks, "<u4")]
    body = b"".join(number.tobytes() for number in numbers)
    start = 14 + len(body)
    size = start + pixels.size
    top = b"BM" + np.array([size, 0, start], "<u4").tobytes()
    return top + body + pixels[::-1].tobytes()


def in_lines(data: bytes, end: str = "\n") -> str:
    return base64.encodebytes(data).decode().replace("\n", end)


# How clients write base64.
SPELLINGS: dict[str, Callable[[bytes], str]] = {
    "plain": lambda data: base64.b64encode(data).decode(),
    "lines": in_lines,
    "lines of Windows": lambda data: in_lines(data, "\r\n"),
    "indented lines": lambda data: "  " + in_lines(data, "\n\t "),
    "without padding": lambda data: base64.b64encode(data).decode().rstrip("="),
    "for URLs": lambda data: base64.urlsafe_b64encode(data).decode(),
    "for URLs, without padding": lambda data: base64.urlsafe_b64encode(data).decode().rstrip("="),
}


@given(st.sampled_from(sorted(SPELLINGS)), st.binary(max_size=300))
def test_base64_is_read_as_clients_write_it(spelling: str, data: bytes) -> None:
    text = SPELLINGS[spelling](data)
    assert decode_base64(text, "p") == data
    assert decode_base64(read_data_url(f"data:x/y;base64,{quote(text)}", "p", ""), "p") == data
    assert decode_base64(read_data_url(f" DATA:; base64,{text}", "p", ""), "p") == data


ALPHABET = f"{string.ascii_letters}{string.digits}+/-_= \t\n\f\r"


@given(st.binary(max_size=30), st.integers(0, 40), st.characters(exclude_characters=ALPHABET))
def test_a_character_that_is_no_base64_is_refused(data: bytes, place: int, other: str) -> None:
    text = SPELLINGS["plain"](data)
    with pytest.raises(InvalidRequest, match="'p' is not valid base64"):
        decode_base64(text[:place] + other + text[place:], "p")


@pytest.mark.parametrize("text", ["A", "AAAAA", "=", "A===", "AA=A", "QUJD\0", "é"])
def test_half_a_character_is_no_base64(text: str) -> None:
    with pytest.raises(InvalidRequest, match="'p' is not valid base64"):
        decode_base64(text, "p")


class DirectConverter(Converter):
    """A converter without processes."""

    def _run(self, kind: str, data: bytes, cancelled: threading.Event) -> bytes:
        return msgspec.msgpack.encode(convert(data, with_pictures=True))


def expand(picture: bytes, spelling: str = "plain") -> bytes:
    """Return the picture file that the engine gets for a picture in a chat."""
    url = f"data:image/png;base64,{SPELLINGS[spelling](picture)}"
    message = ChatMessage("user", [ContentPart("image_url", image_url={"url": url})])
    if asyncio.run(files.has_files([message])):
        expansion = files.expand_files([message], DirectConverter(), pair="p", reads_pictures=True)
        asyncio.run(expansion)
    assert isinstance(message.content, list)
    return read_picture(picture_url(message.content[0]) or "", "p")


@pytest.fixture(scope="module")
def projector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Projector]:
    initialise()
    folder = tmp_path_factory.mktemp("projector")
    target = contextual_pair(folder).target
    file = write_projector(folder / "mmproj.gguf", CONTEXT_SHAPE.n_embd)
    opened = Projector(str(file), target, n_threads=1, on_gpu=False)
    yield opened
    opened.close()


def reaching_llama_cpp(projector: Projector, picture: bytes) -> Pixels:
    """Return the pixels that llama.cpp turns into rows for a picture file."""
    bitmap = projector.decode(picture, read_orientation(picture))
    pixels = projector._pixels(bitmap).copy()
    projector._library.mtmd_bitmap_free(bitmap)
    return pixels


def seen_by_pillow(picture: bytes) -> Pixels:
    """Return the pixels of a picture file, upright and on white paper."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(picture)))
    if image.mode.startswith("I;16"):
        return (np.asarray(image) >> 8).astype(np.uint8)[..., None].repeat(3, 2)
    paper = Image.new("RGBA", image.size, "white")
    paper.alpha_composite(image.convert("RGBA"))
    return np.asarray(paper.convert("RGB"))


# The modes in which Pillow writes each format, and how far another decoder may be from its pixels.
_FORMS: dict[str, tuple[tuple[str, ...], int, dict[str, Any]]] = {
    "PNG": (("1", "L", "LA", "P", "RGB", "RGBA", "I;16"), 0, {}),
    "JPEG": (("L", "RGB"), 6, {"quality": 95, "subsampling": 0}),
    "WEBP": (("RGB", "RGBA"), 0, {}),
    "TIFF": (("L", "LA", "P", "RGB", "RGBA", "I;16"), 0, {}),
    "AVIF": (("RGB", "RGBA"), 0, {}),
    "GIF": (("L", "P"), 0, {}),
    "BMP": (("1", "L", "P", "RGB"), 0, {}),
}
_HAVE_EXIF = ("PNG", "JPEG", "WEBP", "TIFF", "AVIF")


def make_picture(
    form: tuple[str, str], size: tuple[int, int], seed: int, orientation: int, *, hides: bool
) -> bytes:
    """Return a picture file. hides: whether one of its palette's colours is transparent."""
    format, mode = form
    values = np.random.default_rng(seed).integers(0, 256, (*size, 4), dtype=np.uint8)
    if mode == "I;16":
        image = Image.fromarray(values[..., 0] * np.uint16(257))
    else:
        image = Image.fromarray(values).convert(mode)
    options = dict(_FORMS[format][2])
    if format in _HAVE_EXIF:
        options["exif"] = Image.Exif()
        options["exif"][ExifTags.Base.Orientation] = orientation
    if mode == "P" and format in ("PNG", "GIF") and hides:
        options["transparency"] = int(np.asarray(image)[0, 0])
    return save(image, format, **options)


@given(
    form=st.sampled_from([(format, mode) for format in _FORMS for mode in _FORMS[format][0]]),
    size=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    seed=st.integers(0, 99),
    orientation=st.integers(1, 8),
    hides=st.booleans(),
    spelling=st.sampled_from(sorted(SPELLINGS)),
)
def test_llama_cpp_gets_what_a_person_sees(
    projector: Projector,
    form: tuple[str, str],
    size: tuple[int, int],
    seed: int,
    orientation: int,
    hides: bool,
    spelling: str,
) -> None:
    picture = make_picture(form, size, seed, orientation, hides=hides)
    found = reaching_llama_cpp(projector, expand(picture, spelling)).astype(int)
    expected = seen_by_pillow(picture)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= _FORMS[form[0]][1]


@pytest.mark.parametrize("format", _HAVE_EXIF)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_turned_as_its_file_says(
    projector: Projector, format: str, orientation: int
) -> None:
    """The reference is Pillow's for all but the first: that one shows that there is something to turn."""
    picture = make_picture((format, "RGB"), (10, 6), 1, orientation, hides=False)
    found = reaching_llama_cpp(projector, expand(picture)).astype(int)
    unturned = np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"))
    assert found.shape == ((6, 10, 3) if orientation >= 5 else (10, 6, 3))
    assert np.abs(found - seen_by_pillow(picture)).max() <= _FORMS[format][1]
    if format in ("PNG", "JPEG", "WEBP"):  # Pillow turns the others while it reads them
        is_same = found.shape == unturned.shape and np.abs(found - unturned).max() <= 6
        assert is_same == (orientation == 1)


@given(
    st.sampled_from([b"\xff\xd8\xff", PNG_SIGNATURE, b""]),
    st.binary(max_size=80),
    st.integers(0, 80),
)
def test_any_bytes_have_an_orientation(start: bytes, rest: bytes, cut: int) -> None:
    exif = b"Exif\0\0II*\0\x08\0\0\0" + rest
    block = b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif
    chunk = len(exif).to_bytes(4, "big") + b"eXIf" + exif
    for picture in (start + rest, start[:2] + block[:cut], start + chunk[:cut], start + chunk):
        assert 1 <= read_orientation(picture) <= 8


def decoded(picture: bytes) -> Pixels:
    """Return the pixels of a picture file as llama.cpp sees them: it ignores transparency."""
    opened = Image.open(io.BytesIO(picture))
    return np.asarray(opened.convert("RGBA").convert("RGB"))


_RGBA, _GREY = colours(), colours(n_bytes=2)
_OPAQUE = Image.fromarray(np.ascontiguousarray(_RGBA[..., :3]))
_INDEXED, _INDEXED_SEEN = indexed()
_KEY = tuple(int(value) for value in _RGBA[0, 0, :3])
_KEYED = np.where((_RGBA[..., :3] == _KEY).all(2, keepdims=True), 255, _RGBA[..., :3])


@pytest.mark.parametrize(
    ("picture", "seen"),
    [
        (save(Image.fromarray(_RGBA), "PNG"), on_white(_RGBA)),
        (save(Image.fromarray(_GREY, "LA"), "PNG"), on_white(_GREY)),
        (save(_INDEXED, "PNG", transparency=0), _INDEXED_SEEN),
        (save(_INDEXED, "PNG", transparency=b"\0" * 3), indexed(3)[1]),
        (save(_INDEXED, "GIF", transparency=0), _INDEXED_SEEN),
        (save(_OPAQUE, "PNG", transparency=_KEY), _KEYED),
        (
            save(Image.fromarray(_RGBA[..., 0]), "PNG", transparency=_KEY[0]),
            np.where(_RGBA[..., :1] == _KEY[0], 255, _RGBA[..., :1]).repeat(3, 2),
        ),
        (
            save(Image.fromarray(_RGBA[..., 0] * np.uint16(256)), "PNG", transparency=_KEY[0] << 8),
            np.where(_RGBA[..., :1] == _KEY[0], 255, _RGBA[..., :1]).repeat(3, 2),
        ),
        (save(Image.fromarray(_RGBA), "WEBP", lossless=True, exact=True), on_white(_RGBA)),
        (save(Image.fromarray(_RGBA), "TIFF"), on_white(_RGBA)),
        (alpha_bmp(_RGBA), on_white(_RGBA)),
    ],
    ids=[
        *("PNG", "grey PNG", "indexed PNG", "indexed PNG of several", "GIF", "PNG with a key"),
        *("grey PNG with a key", "PNG of 16 bits with a key", "WebP", "TIFF", "BMP"),
    ],
)
def test_what_is_transparent_is_seen_on_white(picture: bytes, seen: Pixels) -> None:
    found = decoded(expand(picture)).astype(int)
    assert found.shape == seen.shape
    assert np.abs(found - seen).max() <= 1


@pytest.mark.parametrize("format", ["PNG", "GIF", "BMP", "JPEG"])
@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1"])
def test_a_picture_without_transparency_is_passed_on_as_it_is(format: str, mode: str) -> None:
    image = _OPAQUE.convert(mode)
    picture = save(image.convert("L") if format == "JPEG" and mode != "RGB" else image, format)
    assert expand(picture) == picture
