"""The worker process: frames in, one engine, frames out.

It has four threads. The reader takes frames off the socket and answers pings. Two preparers turn requests
into tokens; one of them takes the requests that need long, so that the others need not wait for them. The
main thread runs the step loop and everything that touches a context. When the daemon ends, its end of the
socket closes and this process ends, too.
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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from localspec import extras
from localspec.engine import llama
from localspec.engine.engine import Engine
from localspec.engine.interruption import Interruption
from localspec.engine.llama import Model
from localspec.engine.pair.cpu_lock import CpuLock
from localspec.engine.pair.load import load_pair
from localspec.engine.pair.models import physical_cores
from localspec.engine.prompt.picture_child import OpenProjector
from localspec.engine.prompt.pictures import Pictures
from localspec.engine.prompt.prepare import Preparer
from localspec.engine.prompt.preparers import SLOW_THREADS, Preparers
from localspec.engine.prompt.special_tokens import SpecialTokens
from localspec.engine.prompt.template import TemplateRenderer
from localspec.engine.prompt.template_process import end_spare_children
from localspec.engine.read_ahead import is_own
from localspec.engine.sampling.grammars.compile import Grammars
from localspec.errors import Cancelled, LoadFailed, LocalspecError
from localspec.protocol import frames
from localspec.protocol.frames import (
    ApplyTemplate,
    Cancel,
    CountTokens,
    Delta,
    Detokenize,
    Embed,
    Failed,
    Forget,
    Frame,
    Generate,
    Load,
    Loaded,
    LoadError,
    Loading,
    PairFiles,
    Ping,
    Pong,
    Rerank,
    Shutdown,
    Tokenize,
)
from localspec.protocol.settings import PICTURE_PASS_ROWS


class Tokenized(Protocol):
    """A request as tokens, for whichever kind of model."""

    @property
    def request(self) -> Generate | Embed | Rerank: ...


class Serving(Protocol):
    """What the step loop needs of a loaded model."""

    interruption: Interruption

    @property
    def accepts(self) -> type[Tokenized]: ...
    @property
    def active(self) -> bool: ...
    @property
    def has_waiting_editor(self) -> bool: ...
    @property
    def has_idle_work(self) -> bool: ...
    def submit(self, tokenized: Any, /) -> None: ...
    def cancel(self, request: int, /) -> bool: ...
    def forget(self, conversation: str | None, /) -> None: ...
    def forget_saved(self, conversation: str | None, done: Callable[[], None], /) -> None: ...
    def shrink_prompt_cache(self, most: int, /) -> int: ...
    def end_thoughts(self, request: int, /) -> bool: ...
    def save(self) -> None: ...
    def step(self) -> None: ...
    def use_idle_time(self) -> None: ...
    def close(self) -> None: ...


PreparedFrame = Generate | Embed | Rerank | Tokenize | Detokenize | ApplyTemplate | CountTokens

# How long a thread that prepares requests may hold the interpreter while the step loop waits for it. The loop
# needs it a dozen times per round; with Python's default of 5 ms, rounds beside four busy threads took 0.3 s.
SWITCH_INTERVAL_S = 0.0005
ANSWERS_PER_SAVE = 50  # what was learned is saved after this many answers
# Text of this many seconds is sent together, about the time of one picture of a film. Every frame costs the
# daemon and its client processor time, on cores that the next pass needs.
FLUSH_INTERVAL_S = 0.03


class Worker:
    """Serves one socket until it closes."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()
        self._inbox: queue.SimpleQueue[Frame | Tokenized] = queue.SimpleQueue()
        self._preparers: Preparers[Tokenized] = Preparers(self.send, self._enqueue_prepared)
        self._engine: Serving | None = None
        self._renderers: list[TemplateRenderer] = []
        self._grammars: Grammars | None = None
        self._pictures: Pictures | None = None  # if the pair has a projector
        self._turns = CpuLock(None, 0.0)
        self._finished = 0  # answers since what was learned was last saved
        self._idle = True  # no step is running or due
        self._unsent: dict[int, Delta] = {}  # per request, the text that goes with the next frames
        self._sent = 0.0  # when text was last sent (time.monotonic)
        # Requests that have started and sent no text yet.
        self._awaiting_first_text: set[int] = set()

    def run(self) -> None:
        """Run the step loop until Shutdown comes."""
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        self._preparers.start()
        while True:
            engine = self._engine
            busy = engine is not None and engine.active
            self._idle = not busy
            if not busy:
                self._turns.leave_queue()
            if engine is not None:
                engine.interruption.clear()
            has_work = busy or (engine is not None and engine.has_idle_work)
            try:
                item = self._inbox.get(block=not has_work)
            except queue.Empty:
                item = None
            llama.record_heartbeat()
            self._idle = False
            if item is not None:
                self._flush()  # the new request may make the next pass a long one
                if isinstance(item, Shutdown):
                    break
                self._handle(item)
                continue  # the inbox is emptied before the next step
            assert engine is not None
            with self._turns.hold(engine.has_waiting_editor):
                if busy:
                    engine.step()
                else:
                    engine.use_idle_time()
            if not engine.active or time.monotonic() - self._sent >= FLUSH_INTERVAL_S:
                self._flush()
            self._save_learned(engine)
        self._close()

    def send(self, frame: Frame) -> None:
        """Send one frame that the daemon awaits. If the daemon is gone, this process ends."""
        if not is_own(frame):
            self._send(frames.encode_frame(frame))

    def _send(self, data: bytes | bytearray) -> None:
        with self._sending:
            try:
                self._socket.sendall(data)
            except OSError:
                os._exit(0)

    def _emit(self, frame: Frame) -> None:
        """Send a frame of the engine, in order. Text may wait for more, except the first of an answer."""
        match frame:
            case Delta() if frame.id not in self._awaiting_first_text:
                unsent = self._unsent.get(frame.id)
                self._unsent[frame.id] = frame if unsent is None else unsent.merge(frame)
                return
            case frames.Started():
                self._awaiting_first_text.add(frame.id)
            case frames.Done():
                self._finished += 1
                self._awaiting_first_text.discard(frame.id)
            case Delta() | Failed():
                self._awaiting_first_text.discard(frame.id)
        self._flush(frame)

    def _flush(self, *frames_after: Frame) -> None:
        """Send the text that waits, and then `frames_after`."""
        if self._unsent or frames_after:
            self._send(b"".join(map(frames.encode_frame, (*self._unsent.values(), *frames_after))))
            self._unsent.clear()
            self._sent = time.monotonic()

    def _save_learned(self, engine: Serving) -> None:
        """Save what was learned after every few answers. A failure is logged and otherwise ignored."""
        if self._finished < ANSWERS_PER_SAVE:
            return
        self._finished = 0
        try:
            engine.save()
        except Exception:  # a full disk, say
            traceback.print_exc()

    # ------------------------------------------------------------------------ reader thread

    def _read(self) -> None:
        while True:
            try:
                body = frames.read_frame(self._socket)
            except (OSError, ValueError):
                body = None
            if body is None:
                os._exit(0)  # the daemon is gone; llama.cpp may be deep in a pass
            try:
                frame = frames.to_worker_decoder.decode(body)
            except msgspec.DecodeError as error:
                sys.stderr.write(f"a frame from the daemon cannot be read: {error}\n")
                os._exit(2)
            if isinstance(frame, PreparedFrame):
                self._preparers.put(frame)
            elif isinstance(frame, Ping):
                # Answered here: a pass may take longer than the daemon waits.
                still_s = 0.0 if self._idle else time.monotonic() - llama.last_heartbeat()
                self.send(Pong(frame.id, still_s))
            else:
                if isinstance(frame, Forget):
                    self._forget(frame)
                self._inbox.put(frame)
                if (engine := self._engine) is None:
                    continue
                if isinstance(frame, Cancel):
                    engine.interruption.request_left(frame.id)
                elif isinstance(frame, Shutdown):  # which use of idle time would delay
                    engine.interruption.request_came()

    def _enqueue_prepared(self, tokenized: Tokenized) -> None:
        """Put a prepared request into the inbox; called in a preparer's thread."""
        self._inbox.put(tokenized)
        if (engine := self._engine) is not None:
            engine.interruption.request_came()

    def _forget(self, frame: Forget) -> None:
        """Delete a conversation's files at once.

        The step loop does the rest later: it may be deep in a pass, or saving before the process ends.
        """

        def confirm() -> None:
            self.send(frames.Reply(frame.id, {}))

        engine = self._engine
        if engine is None:
            confirm()  # no model is loaded, so nothing of a conversation is held
        else:
            engine.forget_saved(frame.conversation, confirm)

    # ------------------------------------------------------------------------ main thread

    def _handle(self, item: Frame | Tokenized) -> None:
        match item:
            case Load():
                self._load(item)
            case Cancel():
                known = self._engine is not None and self._engine.cancel(item.id)
                if not known:
                    self._preparers.cancel(item.id)
            case frames.Spare():
                n_bytes = 0 if self._engine is None else self._engine.shrink_prompt_cache(item.most)
                self.send(frames.Reply(item.id, {"room": n_bytes}))
            case frames.EndThoughts():
                ended = self._engine is not None and self._engine.end_thoughts(item.request)
                self.send(frames.Reply(item.id, {"ended": ended}))
            case Forget():
                if self._engine is not None:
                    self._engine.forget(item.conversation)
            case _ if not isinstance(item, Frame):
                self._submit(item)

    def _submit(self, tokenized: Tokenized) -> None:
        try:
            self._preparers.discard(tokenized.request.id)
        except Cancelled as error:
            self.send(Failed(tokenized.request.id, error.code, error.message))
        else:
            if self._engine is not None and isinstance(tokenized, self._engine.accepts):
                self._engine.submit(tokenized)

    def _load(self, load: Load) -> None:
        self._close()
        last_fraction = [0.0]

        def progress(stage: str, fraction: float) -> None:
            if fraction in (0.0, 1.0) or abs(fraction - last_fraction[0]) >= 0.02:
                last_fraction[0] = fraction
                self.send(Loading(stage, fraction))
            llama.record_heartbeat()

        on_cpu = llama.backend() == "cpu" or not load.settings.n_gpu_layers
        file = Path(load.settings.turns) if load.settings.turns and on_cpu else None
        self._turns = CpuLock(file, load.settings.gap_s)
        load_model = self._load_embedding_model if load.pair.pooling else self._load_pair
        try:
            info = load_model(load, progress)
        except LocalspecError as error:
            self._close()
            self.send(LoadError(error.message))
        else:
            self.send(info)

    def _load_pair(self, load: Load, progress: Callable[[str, float], None]) -> Loaded:
        """Load a pair of models that write text. Raises LoadFailed."""
        notice = lambda text: self.send(frames.Notice(text))  # noqa: E731
        turn = partial(self._turns.hold, False)
        learning: list[threading.Thread] = []
        self._open_projector(load)

        def learn_dialect(target: Model) -> None:
            if not learning:  # else the target was opened again, with less memory
                learning.append(self._learn_dialect(load.pair, target))

        try:
            pair = load_pair(load.pair, load.settings, progress, notice, turn, learn_dialect)
        finally:
            for thread in learning:
                thread.join()
        self._engine = Engine(pair, self._emit, prepare=self._preparers.put)
        # Each thread gets its own renderer: a template may take seconds over a long chat.
        texts, dialect = self._renderers[0].texts, self._renderers[0].dialect
        self._renderers += [TemplateRenderer(*texts, dialect) for _ in range(SLOW_THREADS)]
        self._grammars = grammars = Grammars(pair.vocab, isolated=True)
        special = SpecialTokens(pair.vocab, pair.chat_template)
        info = msgspec.structs.replace(pair.info(), dialect=dialect)
        if self._pictures is not None and (problem := self._pictures.why_unusable()):
            info.notes.append(f"No pictures: {problem}.")
            pair.files.projector_hint = f"Its projector cannot be used: {problem}."
            self._close_pictures()
        info.reads_pictures = self._pictures is not None
        quick, *slow = (
            Preparer(pair, renderer, grammars, special, self._pictures)
            for renderer in self._renderers
        )
        self._preparers.use(quick, slow)
        return info

    def _open_projector(self, load: Load) -> None:
        """Start the process that encodes pictures, if the pair has a projector."""
        files, settings = load.pair, load.settings
        if files.projector is None:
            return
        job = OpenProjector(
            files.projector,
            files.target,
            settings.n_threads or physical_cores(),
            settings.n_gpu_layers != 0 and bool(llama.gpus()),
            min(settings.n_batch, PICTURE_PASS_ROWS),
        )
        try:
            self._pictures = Pictures(job)
        except OSError as error:
            raise LoadFailed(
                f"The projector {files.projector} cannot be loaded: {error}."
            ) from None

    def _close_pictures(self) -> None:
        if self._pictures is not None:
            self._pictures.close()
            self._pictures = None

    def _learn_dialect(self, files: PairFiles, target: Model) -> threading.Thread:
        """Make the first renderer, and learn the dialect beside the rest of the load; return the thread."""
        template = files.chat_template or target.chat_template
        vocab = target.vocab
        renderer = TemplateRenderer(template, vocab.text(vocab.bos), vocab.text(vocab.eos))
        self._renderers = [renderer]
        thread = threading.Thread(target=lambda: renderer.dialect, name="dialect", daemon=True)
        thread.start()
        return thread

    def _load_embedding_model(self, load: Load, progress: Callable[[str, float], None]) -> Loaded:
        """Load a model that embeds or reranks texts. Raises LoadFailed."""
        end_spare_children()  # no template will be rendered
        embeddings = extras.load("embeddings", "engine")
        if embeddings is None:
            raise LoadFailed("This installation of localspec lacks the extra 'embeddings'.")
        model = embeddings.load_embedding_model(load.pair, load.settings, progress)
        self._engine = embeddings.Encoder(model, self._emit)
        quick, *slow = (embeddings.InputPreparer(model) for _ in range(1 + SLOW_THREADS))
        self._preparers.use(quick, slow)
        info: Loaded = model.info()
        return info

    def _close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        self._close_pictures()
        for renderer in self._renderers:
            renderer.close()
        self._renderers = []
        if self._grammars is not None:
            self._grammars.close()
            self._grammars = None
        self._preparers.close()


def main(descriptor: int) -> None:
    """Serve the socket `descriptor`, which is inherited from the daemon."""
    # Ctrl-C is for the client; the daemon ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    os.dup2(2, 1)  # llama.cpp's libraries may print; frames never travel on stdout
    sock = socket.socket(fileno=descriptor)
    llama.initialise()
    Worker(sock).run()
