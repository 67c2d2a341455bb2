"""Convert a file in a process of its own: `python -m localspec.daemon.completion.conversion_child …`.

A file comes from anywhere, and the libraries that read it are C. So this process has a limit on its memory
and its CPU time, and its end fails one request at most.

The arguments are "pictures" or "text" (what a model can read of a PDF document), the bytes of memory and the
seconds of CPU time that the process may have. The parent sends the file, and gets a `Conversion` in msgpack.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any

import msgspec

from localspec.attached_files import is_pdf
from localspec.children import (
    MAX_TEXT_CHARS,
    NICENESS,
    become_helper,
    drop_core_dumps,
    limit_cpu_time,
    limit_memory,
    receive_message,
    send_message,
)
from localspec.priority import lower_session_priority

MAX_PIXELS = 25_000_000  # of one picture; decoding takes up to 12 bytes for each
MAX_PAGES = 100  # of one document
MAX_PICTURE_BYTES = 64 << 20  # of all pages of one document
# Pixels of a page's longer side. Without a text beside it, the letters must be legible in the picture.
PAGE_PIXELS, SCAN_PIXELS = 1024, 1536
PICTURE_FORMATS = ("WEBP", "AVIF", "TIFF", "PNG", "GIF", "BMP")  # as Pillow calls them
# PDFium's marks, by version, for the hyphen of a word that it has joined across two lines.
_JOINED_HYPHENS = dict.fromkeys(map(ord, "\x02\ufffe"))


class Page(msgspec.Struct):
    """A page of a document, or a picture.

    picture: a PNG file. has_drawings: whether the page shows more than its text, also where no picture of it
    was wanted.
    """

    text: str = ""
    picture: bytes = b""
    has_drawings: bool = False


class Conversion(msgspec.Struct):
    """Say what a file became, or why it cannot be converted, as a clause."""

    pages: list[Page] = msgspec.field(default_factory=list)
    problem: str = ""


class Refused(Exception):
    """Raised for a file that cannot be converted, with the reason as a clause."""


def convert(data: bytes, *, with_pictures: bool) -> Conversion:
    """Return the pages of a PDF document, or the picture of another file as the only page."""
    try:
        if is_pdf(data):
            return Conversion(convert_document(data, with_pictures=with_pictures))
        return Conversion([Page(picture=convert_picture(data))])
    except Refused as error:
        return Conversion(problem=str(error))
    except MemoryError:
        return Conversion(problem="needs more memory than one file may have")
    except Exception:  # A damaged file can fail in every way that its format can.
        return Conversion(problem="is damaged")


def convert_picture(data: bytes) -> bytes:
    """Return a picture, of several the first one, as a PNG file: upright, and without transparency."""
    from PIL import Image, ImageOps

    Image.MAX_IMAGE_PIXELS = None  # Pillow's own check would call the file damaged.
    with Image.open(io.BytesIO(data), formats=PICTURE_FORMATS) as image:
        width, height = image.size  # from the file's header
        if width * height > MAX_PIXELS:
            raise Refused(
                f"has {width} × {height} pixels; at most {MAX_PIXELS:,} can be read. Send a smaller one"
            )
        if image.mode in ("I", "F"):
            raise Refused("has 32 bits for each grey value; at most 16 can be read. Convert it")
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        return _encode_png(_to_rgb(image))


def _to_rgb(image: Any) -> Any:
    """Return a picture without transparency, with 8 bits for each value."""
    from PIL import Image, ImageChops

    if image.mode.startswith("I;16"):  # Pillow would make all but the darkest values white.
        hidden, shades = image.info.pop("transparency", None), image.convert("I")
        paper = shades.point(lambda value: value * (1 / 256)).convert("RGB")
        if hidden is not None:
            lighter = shades.point(lambda value: value - hidden).convert("L")
            darker = shades.point(lambda value: value * -1 + hidden).convert("L")
            others = ImageChops.lighter(lighter, darker)
            paper.paste("white", mask=others.point(lambda value: 0 if value else 255))
        return paper
    if not image.has_transparency_data:
        return image.convert("RGB")
    # llama.cpp ignores transparency, and would show what is hidden.
    paper = Image.new("RGBA", image.size, "white")
    paper.alpha_composite(image.convert("RGBA"))
    return paper.convert("RGB")


def convert_document(data: bytes, *, with_pictures: bool) -> list[Page]:
    """Return the pages of a PDF document. One that shows more than text also becomes a picture."""
    import pypdfium2 as pdfium

    try:
        document = pdfium.PdfDocument(data)
    except pdfium.PdfiumError as error:
        if error.err_code == pdfium.raw.FPDF_ERR_PASSWORD:
            reason = "is encrypted; send it without a password (qpdf --decrypt removes it)"
            raise Refused(reason) from None
        raise
    if len(document) > MAX_PAGES:
        pages_limit = f"at most {MAX_PAGES} can be read. Send some of them"
        raise Refused(f"has {len(document)} pages; {pages_limit}")
    document.init_forms()
    pages, n_chars, n_bytes = list[Page](), 0, 0
    for number in range(len(document)):
        pages.append(_convert_page(document, number, with_pictures=with_pictures))
        n_chars += len(pages[-1].text)
        n_bytes += len(pages[-1].picture)
        excess = f"{MAX_TEXT_CHARS:,} characters of text" if n_chars > MAX_TEXT_CHARS else ""
        if n_bytes > MAX_PICTURE_BYTES and not excess:
            excess = f"{MAX_PICTURE_BYTES >> 20} MiB of pictures"
        if excess:
            raise Refused(f"has more than {excess}. Send some of its pages")
    return pages


def _convert_page(document: Any, number: int, *, with_pictures: bool) -> Page:
    import pypdfium2.raw as pdfium

    page = document[number]
    # What was filled into a form or typed onto the page becomes text. PdfPage.flatten needs a form for that.
    if pdfium.FPDFPage_Flatten(page, pdfium.FLAT_NORMALDISPLAY) == pdfium.FLATTEN_SUCCESS:
        page = document[number]
    text = page.get_textpage().get_text_bounded().translate(_JOINED_HYPHENS)
    text = text.replace("\r\n", "\n").strip()
    drawings = (pdfium.FPDF_PAGEOBJ_IMAGE, pdfium.FPDF_PAGEOBJ_PATH, pdfium.FPDF_PAGEOBJ_SHADING)
    # A page may also show letters that its fonts give no characters for.
    has_drawings = any(True for _ in page.get_objects(filter=drawings if text else None))
    if not (has_drawings and with_pictures):
        return Page(text, has_drawings=has_drawings)
    longer_side = max(1.0, *page.get_size())
    image = page.render(scale=(PAGE_PIXELS if text else SCAN_PIXELS) / longer_side).to_pil()
    return Page(text, _encode_png(image), has_drawings)


def _encode_png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)  # It only goes to the next process.
    return buffer.getvalue()


def main(kind: str, memory_limit_bytes: int, cpu_limit_s: int) -> None:
    """Convert the file that the parent sends."""
    connection = become_helper()
    lower_session_priority(os.getpid(), NICENESS)
    data = receive_message(connection)
    limit_memory(memory_limit_bytes)
    limit_cpu_time(cpu_limit_s)
    drop_core_dumps()
    conversion = convert(data, with_pictures=kind == "pictures")
    send_message(connection, msgspec.msgpack.encode(conversion))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
