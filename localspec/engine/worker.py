"""The worker process: frames in, one engine, frames out.

Four threads. The reader takes frames off the socket and answers pings; two preparers turn requests
into tokens, one of them those that take long, so that nobody else waits for them; the main thread runs
the step loop and everything that touches a context. When the daemon goes, its end of the socket closes
and this process ends too.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback

import msgspec

from localspec.engine import llama
from localspec.engine.engine import Engine
from localspec.engine.pair.load import load_pair
from localspec.engine.prompt.prepare import Preparer
from localspec.engine.prompt.template import TemplateRenderer
from localspec.engine.sequence import TokenizedRequest
from localspec.errors import Cancelled, InvalidRequest, LocalspecError, Unavailable
from localspec.protocol import frames
from localspec.protocol.frames import (
    MOST_PIECES,
    MOST_TEXT,
    MOST_TOKENS,
    ApplyTemplate,
    Cancel,
    Detokenize,
    Failed,
    Forget,
    Frame,
    Generate,
    Load,
    Loaded,
    LoadError,
    Loading,
    Ping,
    Pong,
    Preparing,
    Reply,
    Shutdown,
    Tokenize,
)

QUICK = 0.3  # seconds of preparing that others may wait for
SAVE_EVERY = 50  # answers between two savings of what was learned
_Small = Tokenize | Detokenize | ApplyTemplate


class Worker:
    """Serves one socket until it closes."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()
        self._inbox: queue.SimpleQueue[Frame | TokenizedRequest] = queue.SimpleQueue()
        self._to_prepare: queue.SimpleQueue[Generate | _Small] = queue.SimpleQueue()
        self._slow_to_prepare: queue.SimpleQueue[Generate | _Small] = queue.SimpleQueue()
        self._preparing: set[int] = set()  # requests between reader and engine
        self._cancelled: set[int] = set()  # of those, the ones nobody waits for any more
        self._engine: Engine | None = None
        self._preparers: tuple[Preparer, Preparer] | None = (
            None  # for quick requests, for slow ones
        )
        self._renderer: TemplateRenderer | None = None
        self._finished = 0
        self._resting = True  # nothing to do: no step is waited for

    def run(self) -> None:
        """The step loop. Returns on Shutdown."""
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        threading.Thread(target=self._prepare_quick, name="preparer", daemon=True).start()
        threading.Thread(target=self._prepare_slow, name="slow preparer", daemon=True).start()
        while True:
            engine = self._engine
            busy = engine is not None and engine.active
            self._resting = not busy
            try:
                item = self._inbox.get(block=not busy)
            except queue.Empty:
                item = None
            llama.beat()
            self._resting = False
            if item is not None:
                if isinstance(item, Shutdown):
                    break
                self._handle(item)
                continue  # everything that waits is heard before the next step
            assert engine is not None
            engine.step()
            self._keep_learned(engine)
        self._close()

    def send(self, frame: Frame) -> None:
        """Send one frame; the daemon being gone is noticed by the reader."""
        data = frames.encode(frame)
        with self._sending:
            try:
                self._socket.sendall(data)
            except OSError:
                os._exit(0)

    def _emit(self, frame: Frame) -> None:
        self.send(frame)
        if isinstance(frame, frames.Done):
            self._finished += 1

    def _keep_learned(self, engine: Engine) -> None:
        """Now and then; not being able to is nobody's trouble."""
        if self._finished < SAVE_EVERY:
            return
        self._finished = 0
        try:
            engine.pair.save()
        except Exception:
            traceback.print_exc()

    # ------------------------------------------------------------------------ reader thread

    def _read(self) -> None:
        while True:
            try:
                body = frames.read_blocking(self._socket)
            except (OSError, ValueError):
                body = None
            if body is None:
                os._exit(0)  # the daemon is gone; llama.cpp may be deep in a pass
            try:
                frame = frames.to_worker_decoder.decode(body)
            except msgspec.DecodeError as error:
                sys.stderr.write(f"a frame from the daemon cannot be read: {error}\n")
                os._exit(2)
            if isinstance(frame, Generate):
                self._preparing.add(frame.id)
                self._to_prepare.put(frame)
            elif isinstance(frame, Ping):  # a pass may take longer than the daemon waits
                still_s = 0.0 if self._resting else time.monotonic() - llama.last_beat()
                self.send(Pong(frame.id, still_s))
            elif isinstance(frame, Tokenize | Detokenize | ApplyTemplate):
                self._to_prepare.put(frame)
            else:
                if isinstance(frame, Forget):
                    self._forget(frame)
                self._inbox.put(frame)

    def _forget(self, frame: Forget) -> None:
        """Out of the files at once: the loop may be deep in a pass, or saving before it ends."""

        def forgotten() -> None:
            self.send(frames.Forgotten(frame.id))

        engine = self._engine
        if engine is None:
            forgotten()  # nothing of any conversation has come yet, or all is closed
        else:
            engine.pair.sessions.forget(frame.conversation, forgotten)

    # ------------------------------------------------------------------------ preparer threads

    def _prepare_quick(self) -> None:
        while True:
            request = self._to_prepare.get()
            preparer = self._preparers[0] if self._preparers else None
            if preparer is not None and preparer.seconds(request) > QUICK:
                self._slow_to_prepare.put(request)
            else:
                self._prepare(preparer, request)

    def _prepare_slow(self) -> None:
        while True:
            request = self._slow_to_prepare.get()
            self._prepare(self._preparers[1] if self._preparers else None, request)

    def _prepare(self, preparer: Preparer | None, request: Generate | _Small) -> None:
        self.send(Preparing(request.id, begins=True))
        try:
            if preparer is None:
                raise Unavailable("No pair is loaded.")
            if request.id in self._cancelled:
                raise Cancelled("The request was cancelled.")
            if isinstance(request, Generate):
                self._inbox.put(preparer.prepare(request))
            else:
                self.send(Reply(request.id, self._small(preparer, request)))
        except LocalspecError as error:
            self._preparing.discard(request.id)
            self._cancelled.discard(request.id)
            sizes = error.n_prompt_tokens, error.n_ctx
            self.send(Failed(request.id, error.code, error.message, error.param, *sizes))
        except Exception as error:  # a bug of ours must not end the thread and hang all requests
            traceback.print_exc()
            self._preparing.discard(request.id)
            self._cancelled.discard(request.id)
            message = f"Internal error while preparing the request: {error!r}."
            self.send(Failed(request.id, "internal_error", message))
        finally:
            self.send(Preparing(request.id, begins=False))

    def _small(self, preparer: Preparer, request: _Small) -> dict[str, object]:
        assert self._engine is not None
        vocab = self._engine.pair.vocab
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
                        f"The text has {len(tokens)} tokens; at most {most} are given"
                        f"{' with their pieces' if request.pieces else ''}.",
                        param="content",
                    )
                if not request.pieces:
                    return {"tokens": tokens}
                return {"tokens": tokens, "pieces": [vocab.piece(t, special=True) for t in tokens]}
            case Detokenize():
                pieces = b"".join(vocab.piece(token, special=True) for token in request.tokens)
                if len(pieces) > MOST_TEXT:
                    raise InvalidRequest(
                        f"The text of these tokens has {len(pieces)} bytes; at most {MOST_TEXT} are "
                        "given at once.",
                        param="tokens",
                    )
                return {"content": pieces.decode("utf-8", "replace")}
            case ApplyTemplate():
                return {"prompt": preparer.render(request.prompt)}

    # ------------------------------------------------------------------------ main thread

    def _handle(self, item: Frame | TokenizedRequest) -> None:
        match item:
            case TokenizedRequest():
                self._submit(item)
            case Load():
                self._load(item)
            case Cancel():
                known = self._engine is not None and self._engine.cancel(item.id)
                if not known and item.id in self._preparing:
                    self._cancelled.add(item.id)
            case Forget():
                if self._engine is not None:
                    self._engine.forget(item.conversation)

    def _submit(self, prepared: TokenizedRequest) -> None:
        request = prepared.request.id
        self._preparing.discard(request)
        if request in self._cancelled:
            self._cancelled.discard(request)
            error = Cancelled("The request was cancelled.")
            self.send(Failed(request, error.code, error.message))
            return
        assert self._engine is not None
        self._engine.submit(prepared)

    def _load(self, load: Load) -> None:
        self._close()
        last = [0.0]

        def progress(stage: str, fraction: float) -> None:
            if fraction in (0.0, 1.0) or abs(fraction - last[0]) >= 0.02:
                last[0] = fraction
                self.send(Loading(stage, fraction))
            llama.beat()

        try:
            pair = load_pair(
                load.pair, load.settings, progress, lambda text: self.send(frames.Notice(text))
            )
        except LocalspecError as error:
            self.send(LoadError(error.message))
            return
        vocab = pair.vocab
        renderer = TemplateRenderer(
            pair.models.target.chat_template, vocab.text(vocab.bos), vocab.text(vocab.eos)
        )
        self._engine, self._renderer = Engine(pair, self._emit), renderer
        self._preparers = Preparer(pair, renderer), Preparer(pair, renderer)
        self.send(Loaded(pair.info()))

    def _close(self) -> None:
        if self._engine is not None:
            self._engine.pair.close()
            self._engine = None
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
        self._preparers = None


def main(descriptor: int) -> None:
    """Serve the socket `descriptor`, inherited from the daemon."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the client; the daemon ends us
    os.dup2(2, 1)  # llama.cpp's libraries may print; frames never travel on stdout
    sock = socket.socket(fileno=descriptor)
    llama.initialise()
    Worker(sock).run()
