"""The threads that prepare requests.

One thread takes the short requests, and some others share those whose text takes long. A request whose
grammar must be compiled gets a thread of its own, because the time for that is unknown. Pictures are encoded
in one more thread, one of each request in turn. None of them delays a short request or an answer.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from localspec.engine.llama import Vocab, check_tokens
from localspec.engine.prompt.pictures import RequestPictures
from localspec.errors import Cancelled, InvalidRequest, LocalspecError, Unavailable
from localspec.protocol.frames import (
    MAX_REPLY_PIECES,
    MAX_REPLY_TEXT_BYTES,
    MAX_REPLY_TOKENS,
    ApplyTemplate,
    CountTokens,
    Detokenize,
    Embed,
    Failed,
    Frame,
    Generate,
    Preparing,
    Reply,
    Rerank,
    Tokenize,
)

MAX_QUICK_S = 0.05  # Seconds; a request that takes longer goes to the slow threads.
SLOW_THREADS = 4  # With several, a text of megabytes does not delay every other long prompt.
# Requests that a preparer answers itself.
SmallRequest = Tokenize | Detokenize | ApplyTemplate | CountTokens
EngineRequest = Generate | Embed | Rerank  # Requests that the engine runs once they are prepared.
Request = EngineRequest | SmallRequest
_WithPictures = tuple[Request, RequestPictures]
IsCancelled = Callable[[], bool]
Ready_co = TypeVar("Ready_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Unfinished(Generic[Ready_co]):
    """A request whose remaining preparation may take any time.

    finish: completes the request, in any thread. It takes a function that returns whether the request was
    cancelled, and raises Cancelled if it was, or InvalidRequest.
    """

    finish: Callable[[IsCancelled], Ready_co]


class PreparerProtocol(Protocol[Ready_co]):
    """A preparer of requests for one loaded model, used by one thread."""

    def estimate_s(self, request: Request) -> float:
        """Estimate the seconds that preparing the request takes."""

    def find_pictures(self, request: Request) -> RequestPictures:
        """Find out which pictures of a request are encoded already."""

    def encode_next(
        self, request: Request, pictures: RequestPictures, is_cancelled: IsCancelled
    ) -> None:
        """Encode the first missing picture, in any thread. Raises InvalidRequest or Cancelled."""

    def begin(
        self, request: EngineRequest, pictures: RequestPictures
    ) -> Ready_co | Unfinished[Ready_co]:
        """Return the request ready for the engine, or unfinished. Raises InvalidRequest."""

    def answer(self, request: SmallRequest, pictures: RequestPictures) -> dict[str, object]:
        """Return the answer to a request that needs no engine. Raises InvalidRequest."""


class Preparers(Generic[Ready_co]):
    """The preparing threads and their requests.

    send: sends a frame to the daemon, from any thread. ready: receives each request that can run.
    """

    def __init__(self, send: Callable[[Frame], None], ready: Callable[[Ready_co], None]) -> None:
        self._send = send
        self._ready = ready
        self._waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._slow: queue.SimpleQueue[_WithPictures] = queue.SimpleQueue()
        self._pictured: queue.SimpleQueue[_WithPictures] = queue.SimpleQueue()
        self._pending: set[int] = set()  # Requests on their way from the reader to the engine.
        self._cancelled: set[int] = set()  # Pending requests that were cancelled.
        self._quick_preparer: PreparerProtocol[Ready_co] | None = None
        self._slow_preparers: Sequence[PreparerProtocol[Ready_co]] = ()

    def start(self) -> None:
        targets: dict[str, Callable[[], None]] = {
            "preparer": self._prepare_quick,
            "pictures": self._encode_pictures,
            **{f"slow preparer {n}": partial(self._prepare_slow, n) for n in range(SLOW_THREADS)},
        }
        for name, target in targets.items():
            threading.Thread(target=target, name=name, daemon=True).start()

    def use(
        self, quick: PreparerProtocol[Ready_co], slow: Sequence[PreparerProtocol[Ready_co]]
    ) -> None:
        """Use these preparers from now on, `slow` with one for each of the SLOW_THREADS threads."""
        self._quick_preparer, self._slow_preparers = quick, slow

    def close(self) -> None:
        """Stop using the preparers, because no pair is loaded any more."""
        self._quick_preparer, self._slow_preparers = None, ()

    def put(self, request: Request) -> None:
        if isinstance(request, EngineRequest):
            self._pending.add(request.id)
        self._waiting.put(request)

    def cancel(self, request: int) -> None:
        """Cancel a request by its id, if it is pending."""
        if request in self._pending:
            self._cancelled.add(request)

    def discard(self, request: int) -> None:
        """Forget a request that has arrived at the engine, by its id.

        Raises:
            Cancelled: the request was cancelled in the meantime.
        """
        self._pending.discard(request)
        if request in self._cancelled:
            self._cancelled.discard(request)
            raise Cancelled("The request was cancelled.")

    def _prepare_quick(self) -> None:
        while True:
            request = self._waiting.get()
            preparer = self._quick_preparer
            pictures = RequestPictures() if preparer is None else preparer.find_pictures(request)
            if pictures.missing:
                self._pictured.put((request, pictures))
            elif preparer is not None and preparer.estimate_s(request) > MAX_QUICK_S:
                self._slow.put((request, pictures))
            else:
                self._prepare(request, pictures, preparer)

    def _encode_pictures(self) -> None:
        """Encode the pictures of all requests. Each request in turn has one of its pictures encoded."""
        while True:
            request, pictures = self._pictured.get()
            if self._attempt(request, partial(self._encode_next, request, pictures)):
                (self._pictured if pictures.missing else self._slow).put((request, pictures))

    def _encode_next(self, request: Request, pictures: RequestPictures) -> bool:
        if (preparer := self._quick_preparer) is None:
            raise _no_pair()
        preparer.encode_next(request, pictures, lambda: request.id in self._cancelled)
        return True

    def _prepare_slow(self, number: int) -> None:
        while True:
            request, pictures = self._slow.get()
            preparers = self._slow_preparers
            self._prepare(request, pictures, preparers[number] if preparers else None)

    def _prepare(
        self,
        request: Request,
        pictures: RequestPictures,
        preparer: PreparerProtocol[Ready_co] | None,
    ) -> None:
        def act() -> Ready_co | Unfinished[Ready_co] | None:
            if preparer is None:
                raise _no_pair()
            if isinstance(request, EngineRequest):
                return preparer.begin(request, pictures)
            self._send(Reply(request.id, preparer.answer(request, pictures)))
            return None

        self._pass_on(request, act)

    def _pass_on(
        self, request: Request, act: Callable[[], Ready_co | Unfinished[Ready_co] | None]
    ) -> None:
        """Pass what `act` returns on to the engine, or have a thread finish it."""
        ready = self._attempt(request, act)
        if isinstance(ready, Unfinished):
            finish = partial(ready.finish, lambda: request.id in self._cancelled)
            name = f"grammar of request {request.id}"
            threading.Thread(
                target=self._pass_on, args=(request, finish), name=name, daemon=True
            ).start()
        elif ready is not None:
            self._ready(ready)

    def _attempt(self, request: Request, act: Callable[[], Any]) -> Any:
        """Return what `act` returns, or None after sending its error to the daemon.

        The caller passes the result on after the last `Preparing` frame. A later crash of the process is then
        not attributed to this request's text.
        """
        self._send(Preparing(request.id, begins=True))
        try:
            if request.id in self._cancelled:
                raise Cancelled("The request was cancelled.")
            return act()
        except LocalspecError as error:
            self._forget(request.id)
            sizes = error.n_prompt_tokens, error.n_ctx
            self._send(Failed(request.id, error.code, error.message, error.param, *sizes))
        except Exception as error:  # A bug must not end the thread, which would hang all requests.
            traceback.print_exc()
            self._forget(request.id)
            message = f"Internal error while preparing the request: {error!r}."
            self._send(Failed(request.id, "internal_error", message))
        finally:
            self._send(Preparing(request.id, begins=False))
        return None

    def _forget(self, request: int) -> None:
        self._pending.discard(request)
        self._cancelled.discard(request)


def _no_pair() -> Unavailable:
    return Unavailable("No pair is loaded.")


def answer_tokenize(vocab: Vocab, request: Tokenize | Detokenize) -> dict[str, object]:
    """Return the tokens of a text, or the text of tokens. Raises InvalidRequest."""
    if isinstance(request, Detokenize):
        check_tokens(vocab, request.tokens, "tokens")
        text = b"".join(vocab.piece(token, special=True) for token in request.tokens)
        if len(text) > MAX_REPLY_TEXT_BYTES:
            raise InvalidRequest(
                f"The text of these tokens has {len(text)} bytes; at most {MAX_REPLY_TEXT_BYTES} are "
                "returned at once.",
                param="tokens",
            )
        return {"content": text.decode("utf-8", "replace")}
    tokens = vocab.tokenize(
        request.text, add_special=request.add_special, parse_special=request.parse_special
    )
    max_tokens = MAX_REPLY_PIECES if request.pieces else MAX_REPLY_TOKENS
    if len(tokens) > max_tokens:
        raise InvalidRequest(
            f"The text has {len(tokens)} tokens; at most {max_tokens} are "
            f"returned{' with their pieces' if request.pieces else ''}.",
            param="content",
        )
    if not request.pieces:
        return {"tokens": tokens}
    return {"tokens": tokens, "pieces": [vocab.piece(t, special=True) for t in tokens]}
