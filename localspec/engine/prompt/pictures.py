"""Have a process encode the pictures of prompts, keep the latest, and place them among the tokens."""

from __future__ import annotations

import contextlib
import hashlib
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from localspec.children import Child, Deadline, engine_environment
from localspec.engine.llama import PictureRows, picture_tokens
from localspec.engine.prompt.picture_child import (
    EncodedPicture,
    OpenProjector,
    Picture,
    ProjectorReady,
)
from localspec.errors import InvalidRequest, Unavailable

# Bytes of rows that are kept: 14 pictures of 576 rows for a target of 4096 numbers.
CACHE_BYTES = 128 << 20
START_LIMIT_S = 120.0  # that a projector may take to load, from a slow disk
ENCODE_LIMIT_S = 600.0  # that a picture may take, on a slow machine that is busy
_CHILD = "localspec.engine.prompt.picture_child"
IsCancelled = Callable[[], bool]


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """The encoding of a picture: the tokens that stand for it, and the rows that are read among them."""

    tokens: list[int]
    rows: list[PictureRows]

    @property
    def n_tokens(self) -> int:
        """The tokens that it counts as: those of text, and each row."""
        places = sum(part.n_places for part in self.rows)
        return len(self.tokens) - places + sum(len(part.rows) for part in self.rows)

    @property
    def n_bytes(self) -> int:
        return sum(part.rows.nbytes for part in self.rows)

    @classmethod
    def of(cls, outcome: EncodedPicture, identity: bytes, n_embd: int) -> Encoded:
        """Make it from the process's reply. identity: a hash of projector and picture."""
        tokens: list[int] = []
        parts: list[PictureRows] = []
        for part in outcome.parts:
            if part.rows:
                rows = np.frombuffer(part.rows, np.float32).reshape(-1, n_embd)
                positions: npt.NDArray[np.int32] | None = None
                if part.positions:
                    positions = np.frombuffer(part.positions, np.int32).reshape(len(rows), -1)
                start = len(tokens)
                parts.append(PictureRows(start, rows, part.n_places, positions, part.both_ways))
                number = len(parts).to_bytes(4, "little")
                tokens += picture_tokens(identity + number, part.n_places)
            tokens += part.tokens
        return cls(tokens, parts)


@dataclass(slots=True)
class RequestPictures:
    """The different picture files of a request: the encodings of some, and those that must be encoded first.

    It keeps the encodings until the request is prepared, also those that the cache has no room for.
    """

    encoded: dict[bytes, Encoded] = field(default_factory=dict)
    missing: list[bytes] = field(default_factory=list)


class Pictures:
    """The projector of a loaded pair, in a process that is started anew after it has ended.

    Any thread may use it; pictures are encoded one after the other.
    """

    def __init__(self, job: OpenProjector) -> None:
        """Start the process, which loads the projector meanwhile."""
        self._job, self._n_embd = job, 0
        state = Path(job.projector).stat()
        # The same picture has other rows with another projector. Its tokens must differ then, because
        # states of texts are kept on disk.
        file = f"{Path(job.projector).resolve()}\0{state.st_size}\0{state.st_mtime_ns}"
        self._key = hashlib.sha256(file.encode()).digest()
        self._lock = threading.Lock()
        self._cache: OrderedDict[bytes, Encoded] = OrderedDict()
        self._child = Child(_CHILD, environment=engine_environment(), quiet=False)
        self._start()

    def why_unusable(self) -> str:
        """Wait until the projector is loaded, and return why it cannot be used, as a clause, or ""."""
        with self._lock:
            try:
                return self._await_ready()
            except (EOFError, OSError):  # TimeoutError is an OSError
                return "the process that loads it has ended"

    def find(self, picture: bytes) -> Encoded | None:
        """Return what is known of a picture, without encoding it."""
        identity = self._identify(picture)
        if (known := self._cache.get(identity)) is not None:
            with contextlib.suppress(KeyError):  # another thread may have dropped it just now
                self._cache.move_to_end(identity)
        return known

    def encode(self, picture: bytes, is_cancelled: IsCancelled) -> Encoded:
        """Return what the target reads for a picture.

        Raises:
            InvalidRequest: the picture cannot be encoded.
            Cancelled: `is_cancelled` returned True.
            Unavailable: the process cannot be started, or takes too long.
        """
        if (known := self.find(picture)) is not None:
            return known
        with self._lock:
            try:
                outcome = self._ask(Picture(picture), is_cancelled)
            except EOFError:
                why, limit_s = "it ended the process that decodes it", self._job.decoding_limit_s
                if self._child.last_exit == -signal.SIGXCPU:
                    why = f"decoding it takes more than {limit_s} seconds of processor time"
                raise InvalidRequest(
                    f"The picture cannot be read: {why}.", param="messages"
                ) from None
            except TimeoutError:
                raise Unavailable("Encoding the picture takes too long; try again.") from None
            except OSError as error:
                raise Unavailable(
                    f"The process that encodes pictures cannot be started ({error}); try again."
                ) from error
        if outcome.problem:
            raise InvalidRequest(outcome.problem)
        identity = self._identify(picture)
        encoded = self._cache[identity] = Encoded.of(outcome, identity, self._n_embd)
        while len(self._cache) > 1 and self._n_bytes > CACHE_BYTES:
            with contextlib.suppress(KeyError):
                self._cache.popitem(last=False)
        return encoded

    @property
    def _n_bytes(self) -> int:
        return sum(encoded.n_bytes for encoded in list(self._cache.values()))

    def close(self) -> None:
        self._child.kill()  # a thread that waits for it sees its end
        with self._lock:
            self._child.close()

    def _identify(self, picture: bytes) -> bytes:
        return hashlib.sha256(self._key + picture).digest()

    def _start(self) -> None:
        self._n_embd = 0
        self._child.start()
        self._child.send(msgspec.msgpack.encode(self._job), Deadline(START_LIMIT_S))

    def _await_ready(self) -> str:
        if self._n_embd:
            return ""
        reply = self._child.receive(Deadline(START_LIMIT_S))
        ready = msgspec.msgpack.decode(reply, type=ProjectorReady)
        self._n_embd = 0 if ready.problem else ready.n_embd
        return ready.problem

    def _ask(self, picture: Picture, is_cancelled: IsCancelled) -> EncodedPicture:
        """Send a picture to the process, and return the reply. The process ends if that fails."""
        if not self._child.is_running:
            self._child.close()
            self._start()
        if self._await_ready():
            self._child.close()
            raise OSError("its projector cannot be loaded any more")
        deadline = Deadline(ENCODE_LIMIT_S, is_cancelled)
        reply = self._child.ask(msgspec.msgpack.encode(picture), deadline)
        return msgspec.msgpack.decode(reply, type=EncodedPicture)


def place_pictures(
    parts: Sequence[list[int]], pictures: Sequence[Encoded]
) -> tuple[list[int], list[PictureRows]]:
    """Return the tokens of a prompt, and the rows of its pictures with their places in it.

    parts: the tokens of the texts before, between and behind the pictures.
    """
    tokens, rows = list(parts[0]), list[PictureRows]()
    for picture, text in zip(pictures, parts[1:], strict=True):
        rows += (replace(part, start=part.start + len(tokens)) for part in picture.rows)
        tokens += [*picture.tokens, *text]
    return tokens, rows
