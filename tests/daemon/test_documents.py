"""Files in chats of every protocol: PDF documents, texts, and pictures that llama.cpp does not decode."""

from __future__ import annotations

import asyncio
import base64
import io
import random
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from benchmarks.synthetic_projector import PICTURE_TOKENS, png, write_projector
from localspec.attached_files import is_pdf
from localspec.children import MAX_TEXT_CHARS
from localspec.daemon.completion import conversion_child, files
from localspec.daemon.completion.conversion_child import (
    MAX_PAGES,
    PAGE_PIXELS,
    SCAN_PIXELS,
    Conversion,
    Page,
)
from localspec.daemon.completion.files import Converter, decode_base64, picture_url
from localspec.daemon.http.requests import MAX_BODY_BYTES
from localspec.errors import InvalidRequest
from localspec.installation import install_extra_command
from localspec.protocol.frames import MAX_FRAME_BYTES
from localspec.protocol.requests import ChatMessage, ContentPart
from tests.support.daemons import Answer, Home, RunningDaemon, temporary_home, wait_for
from tests.support.documents import (
    FIRST_OBJECT,
    SQUARE,
    exploding_pdf,
    image,
    pdf,
    show,
    slow_pdf,
    stream,
    without_pictures_extra,
)
from tests.support.pairs import CONTEXT_SHAPE, contextual_pair

REPORT = pdf(show("Hello"), f"{show('Look')} {SQUARE}")
ONCE = pdf(f"{show('Once')} {SQUARE}")
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "speculative": {"enabled": False}}
TOO_MUCH = "cannot be read: that takes too much time or memory"


def encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def picture(format: str, **options: Any) -> bytes:
    """Return the picture png(3) in another format."""
    buffer = io.BytesIO()
    Image.open(io.BytesIO(png(3))).save(buffer, format, **options)
    return buffer.getvalue()


def pixels(data: bytes) -> tuple[Any, bytes]:
    """Return the size and the pixels of a PNG file."""
    opened = Image.open(io.BytesIO(data), formats=["PNG"])
    return opened.size, opened.convert("RGB").tobytes()


@pytest.fixture(autouse=True)
def usual_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a long conversion have its turns on a busy machine; tests/daemon/test_converter.py lowers it."""
    monkeypatch.setattr(files, "LONG_S", files.TIME_LIMIT_S)


def convert(data: bytes, *, with_pictures: bool = True, **limits: int) -> Conversion:
    return asyncio.run(Converter(**limits).convert(data, with_pictures=with_pictures))


@pytest.mark.parametrize("format", ["WEBP", "TIFF"])
def test_a_picture_becomes_png(format: str) -> None:
    options = {"lossless": True} if format == "WEBP" else {}
    [page] = convert(picture(format, **options)).pages
    assert pixels(page.picture) == pixels(png(3))


def test_avif_pictures_are_read() -> None:
    [page] = convert(picture("AVIF")).pages
    assert pixels(page.picture)[0] == pixels(png(3))[0]


def test_what_is_transparent_becomes_white() -> None:
    buffer = io.BytesIO()
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(buffer, "WEBP", lossless=True)
    [page] = convert(buffer.getvalue()).pages
    assert pixels(page.picture) == ((8, 8), b"\xff" * (8 * 8 * 3))


@pytest.mark.parametrize("order", ["<", ">"])
def test_pictures_of_16_bits_keep_their_shades(order: str) -> None:
    shades = [0, 255, 256, 0x8000, 0xFF00, 0xFFFF]
    short, long = f"{order}HHIHH", f"{order}HHII"
    # Width, height, bits, no compression, 0 is black, and where the only strip lies and how long it is.
    entries = [(256, len(shades)), (257, 1), (258, 16), (259, 1), (262, 1), (278, 1)]
    data = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8)
    data += struct.pack(f"{order}H", len(entries) + 2)
    data += b"".join(struct.pack(short, tag, 3, 1, value, 0) for tag, value in entries)
    data += struct.pack(long, 273, 4, 1, len(data) + 2 * 12 + 4)
    data += struct.pack(long, 279, 4, 1, 2 * len(shades)) + bytes(4)
    data += struct.pack(f"{order}{len(shades)}H", *shades)
    [page] = convert(data).pages
    size, colours = pixels(page.picture)
    assert size == (len(shades), 1)
    assert colours == bytes(shade >> 8 for shade in shades for _ in "rgb")


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pictures_of_32_bits_are_refused(mode: str) -> None:
    buffer = io.BytesIO()
    Image.new(mode, (8, 8)).save(buffer, "TIFF")
    problem = "has 32 bits for each grey value; at most 16 can be read. Convert it"
    assert convert(buffer.getvalue()) == Conversion(problem=problem)


def test_a_page_becomes_a_picture_if_it_shows_more_than_text() -> None:
    shown, drawn, scanned, blank = convert(pdf(show("A"), show("B") + SQUARE, SQUARE, "")).pages
    assert shown == Page("A")
    assert (drawn.text, drawn.has_drawings) == ("B", True)
    assert max(pixels(drawn.picture)[0]) == PAGE_PIXELS
    assert scanned.text == ""
    assert max(pixels(scanned.picture)[0]) == SCAN_PIXELS
    assert blank == Page()


def test_without_pictures_a_document_is_its_text() -> None:
    pages = convert(REPORT, with_pictures=False).pages
    assert pages == [Page("Hello"), Page("Look", b"", True)]


@pytest.mark.parametrize(
    "start", [b"\n \n", b"HTTP/1.1 200 OK\r\n\r\n", b"\xff\0" * 512, b"x" * 1024]
)
def test_bytes_before_a_document_are_passed_over(start: bytes) -> None:
    file = {"file_data": encode(start + REPORT)}
    assert is_pdf(files.read_file(file, "p").data)
    assert convert(start + REPORT) == convert(REPORT)


@pytest.mark.parametrize(
    "text", [b"A document begins with %PDF-1.7 or so.", b"x" * 1025 + REPORT, b"startxref %PDF"]
)
def test_a_text_about_documents_is_a_text(text: bytes) -> None:
    assert files.read_file({"file_data": encode(text)}, "p").text.encode() == text


def test_a_word_that_a_line_end_divides_is_joined() -> None:
    lines = ("The quick exam-", "ple -", "a well-known one from 10-", "20.")
    text = " T* ".join(f"({line}) Tj" for line in lines)
    [page] = convert(pdf(f"BT /F1 12 Tf 14 TL 72 700 Td {text} ET")).pages
    assert page.text == "The quick example -\na well-known one from 10-\n20."


@pytest.mark.parametrize(
    ("kind", "is_form"), [("FreeText", False), ("Stamp", False), ("Widget", True)]
)
def test_what_was_typed_onto_a_page_is_read(kind: str, is_form: bool) -> None:
    appearance = stream(
        "/Type /XObject /Subtype /Form /BBox [0 0 200 50] /Resources << /Font << /F1 3 0 R >> >>",
        "BT /F1 18 Tf 5 10 Td (typed) Tj ET",
    )
    place = "/Rect [100 600 300 650] /F 4"
    annotation = f"<< /Type /Annot /Subtype /{kind} {place} /FT /Tx /T (field) /V (typed) "
    # A program that fills in a form may leave it to the reader to draw the text.
    annotation += ">>" if is_form else f"/AP << /N {FIRST_OBJECT} 0 R >> >>"
    number = FIRST_OBJECT + 1
    form = f"/AcroForm << /Fields [{number} 0 R] /DA (/F1 12 Tf) /DR << /Font << /F1 3 0 R >> >> >>"
    document = pdf(
        show("Name:"),
        objects=[appearance, annotation],
        page=f"/Annots [{number} 0 R]",
        catalog=form if is_form else "",
    )
    assert convert(document).pages == [Page("Name:\ntyped")]


def test_pictures_in_a_page_are_rendered() -> None:
    content = "612 0 0 792 0 0 cm /X Do"
    resources = "/XObject << /X 4 0 R >>"
    [page] = convert(pdf(content, resources=resources, objects=[image(1, 1, "0000ff")])).pages
    _, data = pixels(page.picture)
    assert set(data[0::3]) == set(data[1::3]) == {0}
    assert set(data[2::3]) == {255}


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (REPORT[:200], "is damaged"),
        (b"%PDF-1.7", "is damaged"),
        (pdf(), "is damaged"),
        (picture("WEBP")[:60], "is damaged"),
        (b"RIFF\0\0\0\0WAVEfmt ", "is damaged"),
        (pdf(*["" for _ in range(MAX_PAGES + 1)]), f"has {MAX_PAGES + 1} pages"),
    ],
    ids=range(6),
)
def test_a_bad_file_has_a_problem(data: bytes, problem: str) -> None:
    conversion = convert(data, cpu_limit_s=3)
    assert not conversion.pages
    assert conversion.problem.startswith(problem)


def test_an_encrypted_document_says_so() -> None:
    keys = f"/O <{'00' * 32}> /U <{'00' * 32}>"
    encryption = f"/Encrypt << /Filter /Standard /V 1 /R 2 {keys} /P -4 >> /ID [<00> <00>]"
    assert "is encrypted" in convert(pdf(show("A"), trailer=encryption)).problem


@pytest.mark.parametrize(("format", "size"), [("WEBP", (5003, 5000)), ("TIFF", (10_000, 6000))])
def test_a_picture_of_too_many_pixels_is_refused_by_its_header(
    format: str, size: tuple[int, int]
) -> None:
    buffer = io.BytesIO()
    Image.new("L", size).save(buffer, format, method=0)  # the fastest way of WEBP
    problem = convert(buffer.getvalue()).problem
    assert f"has {size[0]} × {size[1]} pixels; at most 25,000,000" in problem


@pytest.mark.parametrize(
    ("constant", "problem"),
    [
        ("MAX_TEXT_CHARS", "has more than 1 characters of text. Send some of its pages"),
        ("MAX_PICTURE_BYTES", "has more than 0 MiB of pictures. Send some of its pages"),
    ],
)
def test_a_documents_text_and_pictures_are_limited(
    constant: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = pdf(show("A"), show("B") + SQUARE)
    fitting = conversion_child.convert(document, with_pictures=True)
    text, picture = (page.text for page in fitting.pages), fitting.pages[1].picture
    limits = {"MAX_TEXT_CHARS": len("".join(text)), "MAX_PICTURE_BYTES": len(picture)}
    for name, limit in limits.items():
        monkeypatch.setattr(conversion_child, name, limit)
    assert conversion_child.convert(document, with_pictures=True) == fitting
    monkeypatch.setattr(conversion_child, constant, limits[constant] - 1)
    assert conversion_child.convert(document, with_pictures=True) == Conversion(problem=problem)


def test_pages_of_any_size_become_pictures_of_bounded_size() -> None:
    for size in ("0 0 1e9 0.001", "0 0 0 0", "5 5 -5 -5", "0 0 14400 14400"):
        [page] = convert(pdf(SQUARE, size=size)).pages
        assert max(pixels(page.picture)[0]) <= SCAN_PIXELS


def test_memory_is_limited() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (4000, 4000)).save(buffer, "TIFF", compression="tiff_lzw")
    data = buffer.getvalue()
    assert not convert(data).problem
    assert convert(data, memory_limit_bytes=24 << 20).problem
    assert convert(exploding_pdf(), memory_limit_bytes=128 << 20).problem == TOO_MUCH


def test_time_is_limited() -> None:
    assert convert(slow_pdf(), cpu_limit_s=1).problem == TOO_MUCH


def test_changed_documents_are_read_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_CONVERSIONS", 24)
    rng, original = random.Random(5), REPORT + picture("WEBP")

    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(rng.choice((1, 4, 20))):
            changed[rng.randrange(8, len(changed))] = rng.randrange(256)
        return bytes(changed)

    async def run() -> list[Conversion]:
        converter = Converter()
        changed = [change(data) for _ in range(12) for data in (original, picture("WEBP"))]
        jobs = (converter.convert(data, with_pictures=True) for data in changed)
        return await asyncio.gather(*jobs)

    for conversion in asyncio.run(run()):
        assert bool(conversion.pages) != bool(conversion.problem)


@pytest.mark.parametrize(
    ("file", "field", "message"),
    [
        (None, "file_data", "must be a data URL"),
        ({"file_id": "file-1"}, "file_data", "stores no files"),
        ({"file_data": "https://example.com/a.pdf"}, "file_data", "works offline"),
        ({"file_data": "data:application/pdf,abc"}, "data", "must be in base64"),
        ({"file_data": "?"}, "data", "'p.data' is not valid base64"),
        ({"file_data": encode(b"a\0b")}, "file_data", "neither a PDF document nor text"),
        ({"file_data": encode("é".encode("latin-1"))}, "file_data", "neither"),
    ],
)
def test_other_files_are_refused(file: object, field: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as raised:
        files.read_file(file, "p", field)
    assert raised.value.param == f"p.{field}"


def expand(*parts: dict[str, Any]) -> list[ContentPart]:
    """Return the parts of a message after its files were expanded, for a pair that reads pictures."""
    message = ChatMessage("user", msgspec.convert(parts, list[ContentPart]))
    asyncio.run(files.expand_files([message], Converter(), pair="p", reads_pictures=True))
    assert isinstance(message.content, list)
    return message.content


def test_files_and_pictures_are_counted_together_before_any_is_read() -> None:
    bad, shown = file_part(b"a\0b"), picture_part(png(3))
    message = "'messages\\[0\\].content\\[65\\]': a request may have at most 64 files and pictures"
    with pytest.raises(InvalidRequest, match=message):
        expand({"type": "text", "text": "?"}, *[bad, shown] * 32, bad)
    parts = [file_part(b"x"), shown] * 32
    assert len(expand(*parts)) == 64


def test_other_requests_are_served_while_files_are_expanded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoding_threads = set[threading.Thread]()

    def decode(data: str, path: str) -> bytes:
        decoding_threads.add(threading.current_thread())
        return decode_base64(data, path)

    monkeypatch.setattr(files, "decode_base64", decode)
    document = file_part(pdf(show("A")))

    async def expand_cached(shared: Converter) -> int:
        """Return how often another task had its turn."""
        turns = 0
        for n_files in (1, 64):
            content = msgspec.convert([document] * n_files, list[ContentPart])
            messages = [ChatMessage("user", content)]
            expansion = files.expand_files(messages, shared, pair="p", reads_pictures=True)
            task, turns = asyncio.create_task(expansion), 0
            while not task.done():
                await asyncio.sleep(0)
                turns += 1
        return turns

    assert asyncio.run(expand_cached(Converter())) > 64
    assert threading.main_thread() not in decoding_threads


def test_a_package_is_found_once_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = set[str]()
    monkeypatch.setattr(files, "find_spec", lambda name: name if name in installed else None)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="is a picture, for which localspec needs another"):
            files.require_extra("made_up_package", "a picture", "p")
    installed.add("made_up_package")
    files.require_extra("made_up_package", "a picture", "p")


@pytest.mark.parametrize(
    ("constant", "what"),
    [("MAX_TEXT_CHARS", "25 characters of text"), ("MAX_PICTURE_BYTES", "0 MiB of pictures")],
)
def test_what_the_files_of_a_request_become_is_limited(
    constant: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [
        file_part("字字字字".encode(), "a"),
        picture_part(picture("WEBP")),
        file_part(pdf(show("A")), "b"),
        picture_part(picture("TIFF")),
    ]
    [first, _, second, _] = fitting = expand(*parts)
    urls = [picture_url(part) or "" for part in fitting]
    limits = {
        "MAX_TEXT_CHARS": len(f"{first.text}{second.text}"),
        "MAX_PICTURE_BYTES": len("".join(urls)),
    }
    for name, limit in limits.items():
        monkeypatch.setattr(files, name, limit)
    assert expand(*parts) == fitting
    monkeypatch.setattr(files, constant, limits[constant] - 1)
    with pytest.raises(InvalidRequest, match=f"the files of the request become more than {what}"):
        expand(*parts)


def test_the_largest_request_fits_into_a_frame() -> None:
    text_bytes = MAX_TEXT_CHARS * len("\U0001f600".encode())
    assert text_bytes + files.MAX_PICTURE_BYTES + MAX_BODY_BYTES < MAX_FRAME_BYTES


def test_a_name_is_one_short_line() -> None:
    file = {"filename": f" a\n b{'c' * 999}", "file_data": encode(b"x")}
    name = files.read_file(file, "p").name
    assert name.startswith("a bccc")
    assert len(name) == 200


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """Run one daemon with a pair that reads pictures, for tests that leave nothing behind."""
    folder = tmp_path_factory.mktemp("seeing")
    pair = contextual_pair(folder)
    write_projector(folder / "mmproj-target-F16.gguf", CONTEXT_SHAPE.n_embd)
    blind = contextual_pair(folder / "blind")
    with temporary_home() as home:
        home.environment["LOCALSPEC_PAIR"] = f"{pair.target},{pair.draft}"
        home.environment["LOCALSPEC_EXACT"] = "true"  # so that equal questions have equal answers
        RunningDaemon(home)
        home.must_run("add", "blind", "--target", blind.target, "--draft", str(blind.draft))
        yield home


def file_part(data: bytes, name: str = "a.pdf") -> dict[str, Any]:
    url = f"data:application/pdf;base64,{encode(data)}"
    return {"type": "file", "file": {"filename": name, "file_data": url}}


def input_file(data: bytes, name: str = "a.pdf") -> dict[str, Any]:
    return {"type": "input_file", "filename": name, "file_data": encode(data)}


def asked(file: dict[str, Any], text: str = "What?") -> dict[str, Any]:
    """Return a question about a file as OpenAI's Responses have it."""
    return {"role": "user", "content": [file, {"type": "input_text", "text": text}]}


def picture_part(data: bytes) -> dict[str, Any]:
    url = f"data:image/webp;base64,{encode(data)}"
    return {"type": "image_url", "image_url": {"url": url}}


def ask(home: Home, *parts: dict[str, Any], **fields: Any) -> Answer:
    content = [*parts, {"type": "text", "text": "What?"}]
    body = {"messages": [{"role": "user", "content": content}], **GREEDY, **fields}
    return home.request("POST", "/v1/chat/completions", body)


def prompt(home: Home, *parts: dict[str, Any], **fields: Any) -> str:
    """Return the text of the prompt that such a question has."""
    content = [*parts, {"type": "text", "text": "What?"}]
    body = {"messages": [{"role": "user", "content": content}], **fields}
    answer = home.request("POST", "/apply-template", body)
    assert answer.status == 200, answer.body
    return str(answer.json["prompt"])


def test_a_document_is_text_and_pictures(seeing: Home) -> None:
    expected = "a.pdf, page 1 of 2:\nHello\n\na.pdf, page 2 of 2:\nLook\n<__media__>What?"
    assert expected in prompt(seeing, file_part(REPORT))
    assert "note" not in ask(seeing, file_part(REPORT)).json["localspec"]


def test_a_pair_without_a_projector_gets_the_text(seeing: Home) -> None:
    expected = "a.pdf, page 1 of 2:\nHello\n\na.pdf, page 2 of 2:\nLook\n\nWhat?"
    assert expected in prompt(seeing, file_part(REPORT), model="blind")
    answer = ask(seeing, file_part(REPORT), model="blind")
    assert answer.status == 200, answer.body
    note = "so drawings and pictures on 1 page of 'a.pdf' were left out."
    assert answer.json["localspec"]["note"].endswith(note)
    text_only = ask(seeing, file_part(pdf(show("Hello"))), model="blind")
    assert "note" not in text_only.json["localspec"]


def test_a_pair_without_a_projector_refuses_scans_and_pictures(seeing: Home) -> None:
    scan = ask(seeing, file_part(pdf(SQUARE)), model="blind")
    assert scan.status == 400
    assert "'a.pdf' has no text" in scan.error["message"]
    refused = ask(seeing, picture_part(picture("WEBP")), model="blind")
    assert refused.status == 400
    assert "reads text and no pictures" in refused.error["message"]


def test_a_converted_picture_is_read_like_the_original(seeing: Home) -> None:
    webp = picture_part(picture("WEBP", lossless=True))
    answers = [ask(seeing, part) for part in (webp, picture_part(png(3)), picture_part(png(4)))]
    assert answers[0].text == answers[1].text != answers[2].text


def test_a_page_is_read_once(seeing: Home) -> None:
    question = {"type": "text", "text": "And?"}
    for parts, is_new in (([], True), ([question], False)):
        timings = ask(seeing, file_part(ONCE), *parts, exact=False).json["timings"]
        assert (timings["prompt_n"] > PICTURE_TOKENS) == is_new


def test_a_text_file_is_text(seeing: Home) -> None:
    assert "x.py:\nprint(1)\n\nWhat?" in prompt(seeing, file_part(b"print(1)\n", "x.py"))


def test_all_protocols_give_the_same_answer(seeing: Home) -> None:
    expected = ask(seeing, file_part(REPORT)).text
    responses = respond(seeing, REPORT, speculative=GREEDY["speculative"]).json
    assert responses["output"][-1]["content"][0]["text"] == expected
    source = {"type": "base64", "media_type": "application/pdf", "data": encode(REPORT)}
    document = {"type": "document", "title": "a.pdf", "source": source}
    messages = [{"role": "user", "content": [document, {"type": "text", "text": "What?"}]}]
    message = seeing.request("POST", "/v1/messages", {"messages": messages, **GREEDY}).json
    assert message["content"][-1]["text"] == expected
    webp = picture("WEBP", lossless=True)
    body = {
        "messages": [{"role": "user", "content": "What?", "images": [encode(webp)]}],
        "options": {"temperature": 0, "num_predict": GREEDY["max_tokens"]},
        "stream": False,
    }
    chat = seeing.request("POST", "/api/chat", body).json
    assert chat["message"]["content"] == ask(seeing, picture_part(png(3))).text


def test_tokens_of_a_document_are_counted(seeing: Home) -> None:
    source = {"type": "base64", "media_type": "application/pdf", "data": encode(REPORT)}
    document = {"type": "document", "title": "a.pdf", "source": source}
    result: dict[str, Any] = {"type": "tool_result", "tool_use_id": "a1", "content": [document]}
    call = {"type": "tool_use", "id": "a1", "name": "read", "input": {}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Read it."},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    path = "/v1/messages/count_tokens"
    counted = seeing.request("POST", path, {"messages": messages}).json["input_tokens"]
    result["content"] = [{"type": "text", "text": "a.pdf, page 1 of 2:\nHello\n"}]
    text = seeing.request("POST", path, {"messages": messages}).json["input_tokens"]
    assert counted > text + PICTURE_TOKENS


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ({"type": "text", "media_type": "text/plain", "data": "Hello"}, "T:\nHello"),
        ({"type": "content", "content": "Hello"}, "Hello"),
        ({"type": "content", "content": [{"type": "text", "text": "Hello"}]}, "Hello"),
    ],
)
def test_documents_of_text_are_text(seeing: Home, source: dict[str, Any], text: str) -> None:
    def answer(*blocks: dict[str, Any]) -> Any:
        messages = [{"role": "user", "content": [*blocks, {"type": "text", "text": "What?"}]}]
        return seeing.request("POST", "/v1/messages", {"messages": messages, **GREEDY}).json

    block = {"type": "document", "title": "T", "context": "C", "source": source}
    expected = [{"type": "text", "text": "C"}, {"type": "text", "text": text}]
    if source["type"] == "text":
        expected[1]["text"] += "\n"
    assert answer(block)["content"] == answer(*expected)["content"]
    cited = answer({**block, "citations": {"enabled": True}})
    assert cited["localspec"]["ignored"] == ["messages[0].content[0].citations"]


def test_the_history_keeps_a_documents_text(seeing: Home) -> None:
    answer = ask(seeing, file_part(REPORT), localspec={"conversation": "new"})
    name = answer.json["localspec"]["conversation"]
    [question, _] = seeing.request("GET", f"/localspec/conversations/{name}").json["messages"]
    assert question["content"].startswith("a.pdf, page 1 of 2:\nHello\n")
    assert question["content"].endswith("Look\n[picture]What?")


@pytest.mark.parametrize("kind", ["text", "picture", "converted", "document"])
def test_an_agent_that_sends_everything_again_continues_its_conversation(
    seeing: Home, kind: str
) -> None:
    part = {
        "text": {"type": "input_text", "text": "Look."},
        "picture": {"type": "input_image", "image_url": picture_part(png(3))["image_url"]["url"]},
        "converted": {
            **{"type": "input_image"},
            "image_url": picture_part(picture("WEBP"))["image_url"]["url"],
        },
        "document": input_file(REPORT),
    }[kind]
    conversations = "/localspec/conversations"
    before = len(seeing.request("GET", conversations).json["conversations"])
    items: list[Any] = []
    for text in (f"Is it {kind}?", "And now?", "And then?"):
        content = [{"type": "input_text", "text": text}, *([] if items else [part])]
        items.append({"role": "user", "content": content})
        body = {"input": items, "max_output_tokens": 4, "temperature": 0}
        answer = seeing.request("POST", "/v1/responses", body)
        assert answer.status == 200, answer.body
        items += answer.json["output"]
    assert len(seeing.request("GET", conversations).json["conversations"]) == before + 1
    messages = seeing.request("GET", f"{conversations}/last").json["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 3


def respond(home: Home, data: bytes, **fields: Any) -> Answer:
    """Ask about a document by OpenAI's Responses."""
    body = {"input": [asked(input_file(data))], "temperature": 0}
    return home.request("POST", "/v1/responses", {**body, "max_output_tokens": 16, **fields})


def await_response(home: Home, name: str) -> Any:
    def ended() -> Any:
        response = home.request("GET", f"/v1/responses/{name}").json
        return None if response["status"] in ("queued", "in_progress") else response

    return wait_for(ended, "the response's end")


@pytest.mark.parametrize("model", ["", "blind"])
def test_a_response_in_the_background_reads_the_same(seeing: Home, model: str) -> None:
    expected = respond(seeing, REPORT, model=model).json
    begun = respond(seeing, REPORT, model=model, background=True).json
    ended = await_response(seeing, begun["id"])
    assert ended["output"][0]["content"] == expected["output"][0]["content"]
    assert ended["usage"]["input_tokens"] == expected["usage"]["input_tokens"]
    target = f"/v1/responses/{begun['id']}/input_items"
    [item] = seeing.request("GET", target).json["data"]
    assert item["content"][0]["text"].startswith("a.pdf, page 1 of 2:\nHello\n")
    events = seeing.request("GET", f"/v1/responses/{begun['id']}?stream=true").body.decode()
    assert ("were left out" in events) == (model == "blind")


def test_a_response_in_the_background_is_there_before_its_document_is_read(seeing: Home) -> None:
    """The document would take half a minute."""
    begun = respond(seeing, slow_pdf(), background=True)
    assert begun.json["status"] == "queued", begun.body
    target = f"/v1/responses/{begun.json['id']}"
    assert seeing.request("GET", target).json["status"] == "queued"
    assert ask(seeing).status == 200
    assert seeing.request("POST", f"{target}/cancel", b"").json["status"] == "cancelled"
    assert seeing.request("GET", target).json["status"] == "cancelled"
    [item] = seeing.request("GET", f"{target}/input_items").json["data"]
    assert item["content"][0]["text"] == "[a.pdf]\nWhat?"


def test_a_response_in_the_background_fails_with_its_document(seeing: Home) -> None:
    begun = respond(seeing, REPORT[:200], background=True).json
    ended = await_response(seeing, begun["id"])
    assert ended["status"] == "failed"
    assert ended["error"]["code"] == "invalid_prompt"
    assert ended["error"]["message"].startswith("The document 'a.pdf' is damaged")
    events = seeing.request("GET", f"/v1/responses/{begun['id']}?stream=true").body.decode()
    assert "event: response.failed" in events
    assert '"param":"input"' in events
    assert respond(seeing, REPORT[:200]).status == 400


def test_an_agent_in_the_background_continues_its_conversation(seeing: Home) -> None:
    first = await_response(seeing, respond(seeing, REPORT, background=True).json["id"])
    items = [asked(input_file(REPORT)), *first["output"], {"role": "user", "content": "And?"}]
    body = {"input": items, "max_output_tokens": 16, "background": True}
    name = seeing.request("POST", "/v1/responses", body).json["id"]
    assert await_response(seeing, name)["status"] in ("completed", "incomplete")
    messages = seeing.request("GET", "/localspec/conversations/last").json["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2


def title_of(home: Home, *content: dict[str, Any], **options: Any) -> str:
    """Return the title of a new conversation that begins with such a question."""
    body: Any = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    body |= {"localspec": {"conversation": "new", **options}}
    answer = home.request("POST", "/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    name = answer.json["localspec"]["conversation"]
    return str(home.request("GET", f"/localspec/conversations/{name}").json["title"])


def test_a_title_is_the_question_and_not_a_files_text(seeing: Home) -> None:
    document, picture = file_part(REPORT, "report.pdf"), picture_part(png(3))
    question = {"type": "text", "text": "\nWhat does it say?\nIn short."}
    assert title_of(seeing, document, question) == "What does it say?"
    assert title_of(seeing, document, question, title="Mine") == "Mine"
    assert title_of(seeing, picture, question) == "What does it say?"
    assert title_of(seeing, picture, document) == "report.pdf"
    assert title_of(seeing, picture) == "[picture]"
    assert title_of(seeing, {"type": "text", "text": " "}) == ""
    assert title_of(seeing, file_part(b"x", "")) == "document"


def test_the_title_of_a_response_is_the_question(seeing: Home) -> None:
    question = asked(input_file(REPORT, "report.pdf"), "What does it say?")
    body = {"input": [question], "max_output_tokens": 1}
    assert seeing.request("POST", "/v1/responses", body).status == 200
    conversation = seeing.request("GET", "/localspec/conversations/last").json
    assert conversation["title"] == "What does it say?"


def test_ask_reads_documents_and_pictures(seeing: Home, tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(REPORT)
    (tmp_path / "a.webp").write_bytes(picture("WEBP", lossless=True))
    (tmp_path / "a.bmp").write_bytes(picture("BMP"))
    options = ("--temperature", "0", "-n", "16", "--no-log", "--draft", "0", "--plain")
    shown = picture_part(png(3))
    for name, part in (("a.pdf", file_part(REPORT)), ("a.webp", shown), ("a.bmp", shown)):
        run = seeing.run("ask", *options, "-f", str(tmp_path / name), "What?")
        assert run.returncode == 0, run.stderr
        assert run.stdout.strip() == ask(seeing, part).text.strip()


def test_too_many_pictures_of_pages_are_refused(seeing: Home) -> None:
    answer = ask(seeing, file_part(pdf(*[SQUARE] * 65)))
    assert answer.status == 400
    assert "at most 64 pictures, pages of documents among them" in answer.error["message"]


def test_bystanders_answer_the_same_beside_bad_files(seeing: Home) -> None:
    bystander = {"type": "text", "text": "Count from one to ten."}
    expected = ask(seeing, bystander, max_tokens=64).text
    deaths = seeing.status()["counts"]["worker_deaths"]
    bad = [exploding_pdf(), exploding_pdf(20), REPORT[:300], b"%PDF-"]
    with ThreadPoolExecutor(7) as pool:
        hostile = [pool.submit(ask, seeing, file_part(data)) for data in bad]
        answers = [pool.submit(ask, seeing, bystander, max_tokens=64) for _ in range(3)]
        assert [answer.result().text for answer in answers] == [expected] * 3
        assert {answer.result().status for answer in hostile} == {400}
    assert seeing.status()["counts"]["worker_deaths"] == deaths


def test_without_the_extra_the_error_says_how_to_install_it(home: Home, tmp_path: Path) -> None:
    home.environment |= without_pictures_extra(tmp_path)
    RunningDaemon(home)
    for part, kind in (
        (file_part(REPORT), "a PDF document"),
        (picture_part(picture("WEBP")), "a WebP picture"),
        (picture_part(picture("AVIF")), "an AVIF picture"),
        (picture_part(picture("TIFF")), "a TIFF picture"),
        (picture_part(picture("PNG", transparency=(0, 0, 0))), "a picture with transparency"),
    ):
        refused = ask(home, part)
        assert refused.status == 400
        assert f"is {kind}" in refused.error["message"]
        assert install_extra_command("pictures") in refused.error["message"]
    assert ask(home, file_part(b"text", "a.txt")).status == 200
