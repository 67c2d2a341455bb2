"""Encode pictures in a process of its own: `python -m localspec.engine.prompt.picture_child`.

A picture comes from anywhere, and llama.cpp's library, which decodes it, ends the process on what it does not
expect. Then only this process ends, and no answer with it.

The first frame of the parent says what to load, and each other one is a picture.
"""

from __future__ import annotations

import struct
import zlib

import msgspec

from localspec.attached_files import PNG_SIGNATURE, png_chunks, read_orientation
from localspec.children import become_helper, limit_cpu_time
from localspec.engine import llama
from localspec.errors import LoadFailed
from localspec.protocol.frames import Frame, encode_frame, read_frame

# Decoding 25 million pixels takes about one. The formats allow files of some megabytes that take minutes.
DECODING_LIMIT_S = 10
_UNPACKED_BYTES = 1 << 20  # unpacked at once, to count them


class OpenProjector(Frame):
    """Load a projector, and the vocabulary of its target. The reply is ProjectorReady."""

    projector: str
    target: str
    n_threads: int
    on_gpu: bool
    # Rows of a picture that a pass holds, for targets that read all of them at once; 0: any number.
    max_rows: int = 0
    # Seconds of processor time that decoding one picture may take.
    decoding_limit_s: int = DECODING_LIMIT_S


class ProjectorReady(Frame):
    """The projector is loaded, or cannot be used because of `problem`, a clause."""

    # Numbers of a row that the target reads.
    n_embd: int = 0
    problem: str = ""


class Picture(Frame):
    """A picture file to encode. The reply is EncodedPicture."""

    data: bytes


class PicturePart(msgspec.Struct, omit_defaults=True):
    """Tokens of text around a picture, or float32 rows of the picture itself, as in `PictureRows`."""

    tokens: list[int] = msgspec.field(default_factory=list)
    rows: bytes = b""
    n_places: int = 0
    positions: bytes = b""
    both_ways: bool = False


class EncodedPicture(Frame, omit_defaults=True):
    """The parts of a picture in their order, or why there are none, as a sentence."""

    parts: list[PicturePart] = msgspec.field(default_factory=list)
    problem: str = ""


def encode(projector: llama.Projector, picture: bytes, decoding_limit_s: int) -> EncodedPicture:
    """Return what the target reads for a picture file."""
    if has_surplus_data(picture):
        return EncodedPicture(problem="The picture is damaged: it has more pixels than it states.")
    try:
        limit_cpu_time(decoding_limit_s)
        bitmap = projector.decode(picture, read_orientation(picture))
        limit_cpu_time(None)
        parts = projector.encode(bitmap)
    except llama.UnreadablePicture as error:
        return EncodedPicture(problem=error.message)
    reply = EncodedPicture()
    for part in parts:
        if isinstance(part, list):
            reply.parts.append(PicturePart(tokens=part))
            continue
        positions = b"" if part.positions is None else part.positions.tobytes()
        rows = part.rows.tobytes()
        reply.parts.append(PicturePart([], rows, part.n_places, positions, part.both_ways))
    return reply


def encode_reply(reply: EncodedPicture) -> bytes:
    """Return the frame of a reply, or of a refusal if it is too large for one."""
    try:
        return encode_frame(reply)
    except ValueError:
        problem = "The picture has too many rows for one request; send a smaller one."
        return encode_frame(EncodedPicture(problem=problem))


def has_surplus_data(picture: bytes) -> bool:
    """Return whether a PNG file unpacks to much more than the pixels that it states.

    llama.cpp's decoder would unpack all of it, up to 4 GiB.
    """
    if not picture.startswith(PNG_SIGNATURE):
        return False
    width, height = struct.unpack_from(">II", picture, 16)
    # Eight bytes for each pixel, and one or more for each row, of seven pictures if it is interlaced.
    remaining = 8 * width * height + 8 * height + 1024
    unpacker = zlib.decompressobj()
    for kind, start, end in png_chunks(picture):
        data = picture[start:end]
        while kind == b"IDAT" and data and not unpacker.eof:
            try:
                remaining -= len(unpacker.decompress(data, _UNPACKED_BYTES))
            except zlib.error:
                return False  # the decoder finds that, too
            if remaining < 0:
                return True
            data = unpacker.unconsumed_tail
    return False


def main() -> None:
    """Serve the parent until it closes the connection."""
    connection = become_helper()
    llama.initialise()
    if (body := read_frame(connection)) is None:
        return
    job = msgspec.msgpack.decode(body, type=OpenProjector)
    try:
        projector = llama.Projector(
            job.projector,
            job.target,
            n_threads=job.n_threads,
            on_gpu=job.on_gpu,
            max_rows=job.max_rows,
        )
    except LoadFailed as error:
        connection.sendall(encode_frame(ProjectorReady(problem=error.message)))
        return
    ready = ProjectorReady(projector.n_embd, projector.why_unusable)
    connection.sendall(encode_frame(ready))
    while (body := read_frame(connection)) is not None:
        picture = msgspec.msgpack.decode(body, type=Picture)
        connection.sendall(encode_reply(encode(projector, picture.data, job.decoding_limit_s)))


if __name__ == "__main__":
    main()
