"""A scripted engine: a real process that speaks frames and does what the prompt tells it to.

Run it as `python fake_worker.py [--first-decode SIGSEGV] --fd N`. Words in the last message:

    say WORD…      answer with these words (the default: the prompt itself)
    slow N         N pieces, one each 20 ms
    forever        pieces until cancelled
    late S         begin at once, and answer after S seconds, unless cancelled
    read N [M]     the prompt, of M tokens (100), is read in so many passes of 50 ms each
    think          the same, as thoughts
    flood          10 MiB as fast as can be
    stall          answer nothing more, not even pings, but stay alive
    deadly SIGNAL  die by that signal while the text becomes tokens
    die SIGNAL [TEXT]   two pieces, or this text three characters at a time, then die by that signal
    exit N         leave with this status
    starve         leave as llama.cpp does that gets no memory
    refuse CODE    Failed with this code
    full           some words, and then the context is full
    echo           answer with the Generate frame as JSON
    raw TEXT       answer with this text as it is, three characters at a time
    mixed JSON     answer with the `pieces` of a `family` of `mixtures`, read as the engine reads its tokens
    running        answer with the number of requests that are active and not cancelled

In an /infill the command is `prompt` after an exclamation mark. In a message or text it may be behind one
that begins a line.

`--first-delay S` waits before the first piece of every answer;
`--first-decode SIGNAL` dies by it at the first decode unless safe mode is on, `--always SIGNAL` in
safe mode too; `--load-delay S` loads slowly, `--measure-delay S` measures slowly at the end of a load;
`--load-error` refuses to load; `--pace S` waits
before each word of "say"; `--end-delay S` takes its time when told to end; `--alone FILE` writes
its number to FILE.PAIR, and FILE.two when another engine of the same pair is alive; `--most N` has no memory
for a larger context, and with `--killed FILE` is killed for it, as the kernel kills and counts in FILE.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from localspec.chat.dialect import learn_dialect
from localspec.chat.reader import reader_of
from localspec.chat.token_report import ScoredText, TokenReport
from localspec.engine.prompt.template_process import TemplateProcess
from localspec.engine.sampling.settings import default_settings
from localspec.engine.text_stream import TextStream
from localspec.protocol import frames
from localspec.protocol.calls import EXPLAINED
from localspec.protocol.dialect import Dialect
from localspec.protocol.pieces import Piece
from tests.support.mixtures import STYLES


class MixedText:
    """Reads the pieces of a mixture as the engine reads the text of tokens."""

    def __init__(self, frame: frames.Generate, script: dict[str, Any]) -> None:
        style = STYLES[script["family"]]
        if frame.tools is not None:
            frame.tools = msgspec.structs.replace(frame.tools, format=style.form)
        reader = reader_of(frame, script["tail"], [style.thoughts], reasoning=bool(frame.thoughts))
        self._stream = TextStream(frame.stop, reader)
        self._report = TokenReport()
        self._n_bytes = 0

    @property
    def stopped(self) -> str | None:
        return self._stream.stopped

    def feed(
        self, text: str, tokens: Sequence[frames.TokenLogprob] = (), *, final: bool = False
    ) -> tuple[list[Piece], list[frames.TokenLogprob]]:
        begin, self._n_bytes = self._n_bytes, self._n_bytes + len(text.encode())
        for token in tokens:
            self._report.add(begin, self._n_bytes, token)
        chunk = self._stream.flush() if final else self._stream.push(text.encode())
        self._report.show(chunk.chars)
        return chunk.pieces, self._report.take(final=final)


class FakeWorker:
    def __init__(self, sock: socket.socket, options: argparse.Namespace) -> None:
        self.sock = sock
        self.options = options
        self.cancelled: set[int] = set()
        self.thinking: set[int] = set()
        self.active: set[int] = set()
        self.lock = threading.Lock()
        self.safe = False

    def send(self, frame: frames.Frame) -> None:
        with self.lock:
            try:
                self.sock.sendall(frames.encode_frame(frame))
            except OSError:
                os._exit(0)

    def run(self) -> None:
        while (body := frames.read_frame(self.sock)) is not None:
            frame = frames.to_worker_decoder.decode(body)
            match frame:
                case frames.Load():
                    self.load(frame)
                case frames.Generate():
                    self.active.add(frame.id)
                    threading.Thread(target=self.generate, args=(frame,), daemon=True).start()
                case frames.Cancel():
                    self.cancelled.add(frame.id)
                    self.active.discard(frame.id)
                case frames.EndThoughts():
                    ended = frame.request in self.thinking
                    self.thinking.discard(frame.request)
                    self.send(frames.Reply(frame.id, {"ended": ended}))
                case frames.Ping():
                    self.send(frames.Pong(frame.id))
                case frames.Forget():
                    self.send(frames.Reply(frame.id, {}))
                case frames.Tokenize():
                    data = frame.text.encode()
                    pieces = [bytes([byte]) for byte in data]
                    extra = {"pieces": pieces} if frame.pieces else {}
                    self.send(frames.Reply(frame.id, {"tokens": list(data), **extra}))
                case frames.Detokenize():
                    text = bytes(token % 256 for token in frame.tokens).decode("utf-8", "replace")
                    self.send(frames.Reply(frame.id, {"content": text}))
                case frames.ApplyTemplate():
                    text = "".join(f"<{m.role}>{m.content}" for m in frame.prompt.messages)
                    self.send(frames.Reply(frame.id, {"prompt": text}))
                case frames.CountTokens():
                    count = len(text_of(frame.prompt).split())
                    self.send(frames.Reply(frame.id, {"tokens": count}))
                case frames.Shutdown():
                    time.sleep(self.options.end_delay)
                    os._exit(0)
        os._exit(0)

    def alone(self, file: str, pair: str) -> None:
        self.held = open(f"{file}.{pair}", "w")  # noqa: PTH123, SIM115 - the system closes it at the end
        print(os.getpid(), file=self.held, flush=True)
        try:
            fcntl.flock(self.held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            Path(f"{file}.two").touch()

    def load(self, frame: frames.Load) -> None:
        if self.options.alone:
            self.alone(self.options.alone, Path(frame.pair.target).stem)
        self.safe = not frame.settings.extra_buffers
        self.send(frames.Loading("target", 0.5))
        time.sleep(self.options.load_delay)
        if self.options.most and frame.settings.n_ctx > self.options.most:
            if self.options.killed:
                kills = int(self.options.killed.read_text().split()[1])
                self.options.killed.write_text(f"oom_kill {kills + 1}\n")
                die("SIGKILL")
            sys.stderr.write("failed to allocate the cache\n")
            os.abort()
        if self.options.load_error:
            self.send(frames.LoadError("The file is no GGUF."))
            return
        self.send(frames.Loading("profile", 0.0))
        time.sleep(self.options.measure_delay)
        info = frames.Loaded(
            name=frame.pair.name,
            target_description="fake target",
            draft_description="fake draft",
            n_ctx=4096,
            parallel=frame.settings.parallel,
            chat_template=self.options.template,
            bos_token="<s>",
            eos_token="</s>",
            dialect=dialect_of(self.options.template),
            sampling_defaults=default_settings({}),
        )
        self.send(info)

    def generate(self, frame: frames.Generate) -> None:
        started = time.monotonic()
        prompt = text_of(frame.prompt)
        words = prompt.split() or [""]
        command, argument = words[0], words[1] if len(words) > 1 else ""
        if command == "refuse":
            self.send(frames.Failed(frame.id, argument, "Refused as told.", "messages"))
            return
        self.send(frames.Preparing(frame.id, begins=True))
        if command == "deadly":
            time.sleep(0.2)  # others come to where they are
            die(argument)
        self.send(frames.Preparing(frame.id, begins=False))
        time.sleep(self.options.first_delay)
        count = prompt_tokens(words) if command == "read" else len(prompt.split())
        reading = frames.PromptCost(0.01)
        self.send(frames.Started(frame.id, count, cached_tokens=1, reading=reading))
        if self.options.always or (self.options.first_decode and not self.safe):
            die(self.options.always or self.options.first_decode)
        piece_count = 0
        reason = "stop"
        text: ScoredText | MixedText = (
            MixedText(frame, json.loads(prompt.removeprefix("mixed ")))
            if command == "mixed"
            else ScoredText(reader_of(frame, reasoning=bool(frame.thoughts)))
        )
        for piece in self.pieces(frame, command, argument, prompt):
            if frame.id in self.cancelled:
                reason = "cancelled"
                break
            if frame.max_tokens is not None and piece_count >= frame.max_tokens:
                reason = "length"
                break
            logprobs = []
            if frame.top_logprobs is not None:
                raw = piece.encode()
                top = [(7, raw, -0.5), (8, b"\xff", -1.5)][: frame.top_logprobs]
                logprobs = [frames.TokenLogprob(7, raw, -0.5, top)]
            piece_count += 1
            shown, logprobs = text.feed(piece, logprobs)
            delta = frames.Delta(frame.id, shown, logprobs, tokens=piece_count)
            delta.ids = [7] if frame.return_tokens else []
            delta.timings = frames.Timings(predicted_n=piece_count) if frame.timings else None
            self.send(delta)
            if isinstance(text, MixedText) and text.stopped:
                break
        if any(last := text.feed("", final=True)):
            self.send(frames.Delta(frame.id, *last, tokens=piece_count))
        spent = (time.monotonic() - started) * 1000
        timings = frames.Timings(
            prompt_n=len(words),
            prompt_ms=1.0,
            predicted_n=piece_count,
            predicted_ms=spent,
            predicted_per_second=1000 * piece_count / max(spent, 0.001),
            draft_n=4,
            draft_n_accepted=3,
        )
        speculation = frames.Speculation(
            active=True,
            kind="draft",
            drafted=4,
            accepted=3,
            rounds=2,
            mean_tokens_per_pass=2.5,
            plain_tokens_per_second=10.0,
            speed_up=1.8,
            predicted_accepted=2 if frame.speculative.prediction else 0,
        )
        self.active.discard(frame.id)
        ending = frames.Done(frame.id, reason, len(words), piece_count, timings, speculation)
        ending.stop_string = text.stopped if isinstance(text, MixedText) else None
        if command == "full":
            ending.finish_reason, ending.truncated = "length", True
        self.send(ending)

    def pieces(
        self, frame: frames.Generate, command: str, argument: str, prompt: str
    ) -> Iterator[str]:
        match command:
            case "say":
                words = prompt.split()[1:]
                for index, word in enumerate(words):
                    time.sleep(self.options.pace)
                    yield word if index == 0 else f" {word}"
            case "slow" | "forever" | "think":
                if command == "think":
                    self.thinking.add(frame.id)
                    yield "<think>"
                count = int(argument) if command == "slow" else 1_000_000
                for index in range(count):
                    if command == "think" and frame.id not in self.thinking:
                        yield "</think>so"
                        return
                    yield f"{index} "
                    time.sleep(0.02)
            case "late":
                until = time.monotonic() + float(argument)
                while time.monotonic() < until and frame.id not in self.cancelled:
                    time.sleep(0.01)
                yield "late"
            case "read":
                passes = int(argument)
                for number in range(1, passes + 1):
                    time.sleep(0.05)
                    read_count = prompt_tokens(prompt.split()) * number // passes
                    if frame.progress or number < passes:
                        self.send(frames.Reading(frame.id, read_count, 50.0 * number))
                yield "read"
            case "flood":
                yield from ["x" * 65_536] * 160
            case "stall":
                self.lock.acquire()  # pings go unanswered too
                time.sleep(3600)
            case "die":
                text = prompt.partition(argument)[2][1:]
                yield from split_text(text) if text else ("one ", "two ")
                die(argument)
            case "exit":
                sys.stderr.write("the last words of the engine\n")
                sys.stderr.flush()
                os._exit(int(argument))
            case "starve":
                sys.stderr.write("ggml_backend_cuda_buffer_type_alloc: out of memory\n")
                sys.stderr.flush()
                os._exit(1)
            case "raw":
                yield from split_text(prompt.removeprefix("raw "))
            case "mixed":
                yield from json.loads(prompt.removeprefix("mixed "))["pieces"]
            case "full":
                yield from ("as much ", "as fits")
            case "echo":
                yield msgspec.json.encode(frame).decode()
            case "running":
                yield str(len(self.active - {frame.id}))
            case _:
                yield prompt


def dialect_of(template: str | None) -> Dialect:
    if template is None:
        return Dialect(EXPLAINED)
    process = TemplateProcess()
    try:
        return learn_dialect(template, partial(process.render, template), "<s>", "</s>")
    finally:
        process.close()


def text_of(prompt: frames.Prompt) -> str:
    match prompt:
        case frames.ChatPrompt():
            return (prompt.messages[-1].content or "").rpartition("\n!")[2]
        case frames.TextPrompt():
            return prompt.text.rpartition("\n!")[2]
        case frames.TokenPrompt():
            return "say " + " ".join(map(str, prompt.tokens))
        case frames.MixedPrompt():
            return "say " + " ".join(map(str, prompt.parts))
        case frames.InfillPrompt():
            if prompt.prompt.startswith("!"):
                return prompt.prompt[1:]
            return f"say {prompt.prefix}|{prompt.suffix}"


def split_text(text: str) -> Iterator[str]:
    return (text[at : at + 3] for at in range(0, len(text), 3))


def prompt_tokens(words: list[str]) -> int:
    return int(words[2]) if len(words) > 2 else 100


def die(name: str) -> None:
    number = signal.Signals[name]
    sys.stderr.write(f"about to die by {name}\n")
    sys.stderr.flush()
    os.kill(os.getpid(), number)
    time.sleep(10)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--first-decode")
    parser.add_argument("--always")
    parser.add_argument("--first-delay", type=float, default=0.0)
    parser.add_argument("--load-delay", type=float, default=0.0)
    parser.add_argument("--measure-delay", type=float, default=0.0)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--end-delay", type=float, default=0.0)
    parser.add_argument("--alone")
    parser.add_argument("--load-error", action="store_true")
    parser.add_argument("--most", type=int, default=0)
    parser.add_argument("--killed", type=Path)
    parser.add_argument("--template")
    options = parser.parse_args()
    FakeWorker(socket.socket(fileno=options.fd), options).run()


if __name__ == "__main__":
    main()
