"""The threads that make requests ready, and what they ask of whoever does it.

One takes the short requests, some share those whose text takes long. A request whose grammar must be compiled
gets a thread of its own for that, since nobody can say how long it takes. So none of them delays a short one,
and none delays an answer.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from localspec.engine.llama import Vocab, check_tokens
from localspec.errors import Cancelled, InvalidRequest, LocalspecError, Unavailable
from localspec.protocol.frames import (
    MOST_PIECES,
    MOST_TEXT,
    MOST_TOKENS,
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

QUICK = 0.05  # seconds of preparing that others may wait for
SLOW_THREADS = 4  # a text of megabytes in one of them delays no other long prompt
Small = Tokenize | Detokenize | ApplyTemplate | CountTokens  # answered by a preparer itself
Work = Generate | Embed | Rerank  # what an engine does, once it is prepared
Ready_co = TypeVar("Ready_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Unfinished(Generic[Ready_co]):
    """A request whose preparing may take any time from here on.

    finish: does the rest, in any thread. Given a function that says whether nobody waits any more; raises
    Cancelled where that is so, and InvalidRequest.
    """

    finish: Callable[[Callable[[], bool]], Ready_co]


class Prepares(Protocol[Ready_co]):
    """Makes requests ready for one loaded model, in one thread."""

    def seconds(self, request: Work | Small) -> float:
        """What preparing may cost."""

    def begin(self, request: Work) -> Ready_co | Unfinished[Ready_co]:
        """For the engine, or what is left to do. Raises InvalidRequest."""

    def answer(self, request: Small) -> dict[str, object]:
        """What needs no engine. Raises InvalidRequest."""


class Preparers(Generic[Ready_co]):
    """The threads, and the requests that are with them.

    send: to the daemon, from any thread. ready: given each request that can run.
    """

    def __init__(self, send: Callable[[Frame], None], ready: Callable[[Ready_co], None]) -> None:
        self._send = send
        self._ready = ready
        self._waiting: queue.SimpleQueue[Work | Small] = queue.SimpleQueue()
        self._slow: queue.SimpleQueue[Work | Small] = queue.SimpleQueue()
        self._held: set[int] = set()  # requests between reader and engine
        self._cancelled: set[int] = set()  # of those, the ones nobody waits for any more
        self._quick_preparer: Prepares[Ready_co] | None = None
        self._slow_preparers: Sequence[Prepares[Ready_co]] = ()

    def start(self) -> None:
        threading.Thread(target=self._prepare_quick, name="preparer", daemon=True).start()
        for number in range(SLOW_THREADS):
            name = f"slow preparer {number}"
            threading.Thread(
                target=self._prepare_slow, args=(number,), name=name, daemon=True
            ).start()

    def use(self, quick: Prepares[Ready_co], slow: Sequence[Prepares[Ready_co]]) -> None:
        """Prepare by these from now on: quick requests, and slow ones, in SLOW_THREADS threads."""
        self._quick_preparer, self._slow_preparers = quick, slow

    def close(self) -> None:
        """No pair is loaded any more."""
        self._quick_preparer, self._slow_preparers = None, ()

    def put(self, request: Work | Small) -> None:
        if isinstance(request, Work):
            self._held.add(request.id)
        self._waiting.put(request)

    def cancel(self, request: int) -> None:
        """Nobody waits for it any more, if it is here."""
        if request in self._held:
            self._cancelled.add(request)

    def taken(self, request: int) -> None:
        """It has come to the engine.

        Raises:
            Cancelled: nobody waits for it any more.
        """
        self._held.discard(request)
        if request in self._cancelled:
            self._cancelled.discard(request)
            raise Cancelled("The request was cancelled.")

    def _prepare_quick(self) -> None:
        while True:
            request = self._waiting.get()
            preparer = self._quick_preparer
            if preparer is not None and preparer.seconds(request) > QUICK:
                self._slow.put(request)
            else:
                self._prepare(request, preparer)

    def _prepare_slow(self, number: int) -> None:
        while True:
            request = self._slow.get()
            preparers = self._slow_preparers
            self._prepare(request, preparers[number] if preparers else None)

    def _prepare(self, request: Work | Small, preparer: Prepares[Ready_co] | None) -> None:
        def act() -> Ready_co | Unfinished[Ready_co] | None:
            if preparer is None:
                raise Unavailable("No pair is loaded.")
            if isinstance(request, Work):
                return preparer.begin(request)
            self._send(Reply(request.id, preparer.answer(request)))
            return None

        ready: Ready_co | Unfinished[Ready_co] | None = self._attempt(request, act)
        if isinstance(ready, Unfinished):
            name = f"grammar of request {request.id}"
            threading.Thread(
                target=self._finish, args=(request, ready), name=name, daemon=True
            ).start()
        elif ready is not None:
            self._ready(ready)

    def _finish(self, request: Work | Small, unfinished: Unfinished[Ready_co]) -> None:
        ready = self._attempt(
            request, lambda: unfinished.finish(lambda: request.id in self._cancelled)
        )
        if ready is not None:
            self._ready(ready)

    def _attempt(self, request: Work | Small, act: Callable[[], Any]) -> Any:
        """Return what `act` returns; None where it failed, which the daemon has been sent then.

        The result is handed on after the last frame about preparing: a pass that ends the process is not
        the fault of this request's text.
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
        except Exception as error:  # a bug of ours must not end the thread and hang all requests
            traceback.print_exc()
            self._forget(request.id)
            message = f"Internal error while preparing the request: {error!r}."
            self._send(Failed(request.id, "internal_error", message))
        finally:
            self._send(Preparing(request.id, begins=False))
        return None

    def _forget(self, request: int) -> None:
        self._held.discard(request)
        self._cancelled.discard(request)


def about_tokens(vocab: Vocab, request: Tokenize | Detokenize) -> dict[str, object]:
    """A text's tokens, or the text of some. Raises InvalidRequest."""
    match request:
        case Tokenize():
            tokens = vocab.tokenize(
                request.text,
                add_special=request.add_special,
                parse_special=request.parse_special,
            )
            most = MOST_PIECES if request.pieces else MOST_TOKENS
            if len(tokens) > most:
                raise InvalidRequest(
                    f"The text has {len(tokens)} tokens; at most {most} are "
                    f"returned{' with their pieces' if request.pieces else ''}.",
                    param="content",
                )
            if not request.pieces:
                return {"tokens": tokens}
            return {"tokens": tokens, "pieces": [vocab.piece(t, special=True) for t in tokens]}
        case Detokenize():
            check_tokens(vocab, request.tokens, "tokens")
            pieces = b"".join(vocab.piece(token, special=True) for token in request.tokens)
            if len(pieces) > MOST_TEXT:
                raise InvalidRequest(
                    f"The text of these tokens has {len(pieces)} bytes; at most {MOST_TEXT} are "
                    "returned at once.",
                    param="tokens",
                )
            return {"content": pieces.decode("utf-8", "replace")}
