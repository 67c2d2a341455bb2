"""PDF documents, written by hand: pages of text, drawings, pictures, and what hostile ones have."""

from __future__ import annotations

from collections.abc import Sequence

FIRST_OBJECT = 4  # the number of the first of `objects`, which a page's resources may name
SQUARE = "1 0 0 rg 100 100 200 200 re f"


def show(text: str) -> str:
    """Return the content of a page that shows a line of text."""
    return f"BT /F1 24 Tf 72 700 Td ({text}) Tj ET"


def stream(dictionary: str, data: str) -> str:
    """Return an object with data."""
    return f"<< {dictionary} /Length {len(data)} >>\nstream\n{data}\nendstream"


def image(width: int, height: int, pixels: str) -> str:
    """Return an object that is a picture. pixels: hexadecimal digits, six for each."""
    return stream(
        f"/Type /XObject /Subtype /Image /Width {width} /Height {height} /ColorSpace /DeviceRGB "
        "/BitsPerComponent 8 /Filter /ASCIIHexDecode",
        f"{pixels}>",
    )


def pdf(
    *contents: str,
    size: str = "0 0 612 792",
    resources: str = "",
    objects: Sequence[str] = (),
    page: str = "",
    catalog: str = "",
    trailer: str = "",
) -> bytes:
    """Return a PDF document with a page for each of `contents`, in PDF's operators.

    resources: of each page, beside the font F1. objects: further objects. page, catalog, trailer: further
    entries of each page, and there.
    """
    first_page = FIRST_OBJECT + len(objects)
    kids = " ".join(f"{first_page + 2 * index} 0 R" for index in range(len(contents)))
    numbered = [
        f"<< /Type /Catalog /Pages 2 0 R {catalog} >>",
        f"<< /Type /Pages /Count {len(contents)} /Kids [{kids}] >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
        *objects,
    ]
    for content in contents:
        numbered.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [{size}] /Contents {len(numbered) + 2} 0 R "
            f"/Resources << /Font << /F1 3 0 R >> {resources} >> {page} >>"
        )
        numbered.append(stream("", content))
    data, table = b"%PDF-1.7\n", "0000000000 65535 f \n"
    for number, body in enumerate(numbered, start=1):
        table += f"{len(data):010} 00000 n \n"
        data += f"{number} 0 obj\n{body}\nendobj\n".encode()
    end = f"<< /Size {len(numbered) + 1} /Root 1 0 R {trailer} >>"
    xref = f"xref\n0 {len(numbered) + 1}\n{table}trailer\n{end}\nstartxref\n{len(data)}\n%%EOF\n"
    return data + xref.encode()


def exploding_pdf(levels: int = 12) -> bytes:
    """Return a small document whose page has ten forms, each of ten forms, and so on."""
    forms = [
        stream(
            "/Type /XObject /Subtype /Form /BBox [0 0 600 800] /Resources << /XObject "
            f"<< /X {FIRST_OBJECT + level + 1} 0 R >> >>",
            "/X Do " * 10 if level < levels - 1 else SQUARE,
        )
        for level in range(levels)
    ]
    return pdf("/X Do", resources=f"/XObject << /X {FIRST_OBJECT} 0 R >>", objects=forms)


def slow_pdf() -> bytes:
    """Return a document whose page has a colour that takes a long program for each pixel."""
    program = f"{{ {'sin exch cos exch ' * 20_000} pop dup dup }}"
    function = stream("/FunctionType 4 /Domain [0 1 0 1] /Range [0 1 0 1 0 1]", program)
    shading = (
        "<< /ShadingType 1 /ColorSpace /DeviceRGB /Domain [0 1 0 1] /Matrix [612 0 0 792 0 0] "
        f"/Function {FIRST_OBJECT} 0 R >>"
    )
    resources = f"/Shading << /S {FIRST_OBJECT + 1} 0 R >>"
    return pdf("/S sh", resources=resources, objects=[function, shading])
