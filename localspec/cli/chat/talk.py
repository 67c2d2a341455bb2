"""A conversation with the daemon, independent of the terminal.

The daemon's copy of the conversation is authoritative and is read after every answer. Interrupted
answers, answers that are only reasoning, and refused questions are then the same on both sides.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from localspec.cli import ask
from localspec.cli.options import AskOptions
from localspec.cli.terminal import figures, hints, render
from localspec.client.api import Client
from localspec.client.conversations import ConversationsClient
from localspec.config import load_config
from localspec.errors import LocalspecError, NoDaemon, NotFound
from localspec.paths import default_paths

# The fields of a saved message that are sent back in a request.
_MESSAGE_FIELDS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
_NEW_ID = "new"
_SUMMARISE = (
    "Summarise this conversation so that it can go on from your summary alone: what was asked and decided, "
    "the facts, names, numbers and code that are still needed, and what is open. Write the summary only."
)
_SUMMARY = "Summary of the conversation so far:"


def _without_summary(system: str | None) -> str | None:
    """Return the person's own system message, without the summary that `compact` has added."""
    if system is None or _SUMMARY not in system:
        return system
    return system.partition(_SUMMARY)[0].strip() or None


class _RecordingPrinter(render.Printer):
    """A printer that also records the text.

    When it closes, it also prints what `missing_text` returns for the recorded text, which is the part
    of the answer that the stream did not deliver.
    """

    def __init__(self, printer: render.Printer, missing_text: Callable[[str], str]) -> None:
        self.said, self._printer, self._missing_text = "", printer, missing_text

    def text(self, piece: str, drafted: list[list[int]]) -> None:
        self.said += piece
        self._printer.text(piece, drafted)

    def close(self) -> None:
        try:
            if remainder := self._missing_text(self.said):
                self.text(remainder, [])
        finally:
            self._printer.close()


class Conversation:
    """A conversation, which the daemon saves unless `options.no_log` is set.

    `options` are those of `chat`, and may be changed between questions.
    """

    def __init__(self, options: AskOptions) -> None:
        self.client = ConversationsClient(autostart=not options.no_daemon_start)
        self.options = options
        self.id = _NEW_ID
        self.messages: list[dict[str, Any]] = []  # without the system message
        self.last: dict[str, Any] = {}  # statistics of the last answer
        self.context = 0
        self.configured = load_config(default_paths().config_file).pair
        self._saving_failed = False  # the daemon could not save an answer
        self._is_outdated = False  # the daemon's copy could not be read after the last answer
        # A question whose daemon was killed, and the time when it was asked.
        self._unanswered: tuple[str, float] | None = None
        self._titles: dict[str, str] = {}  # question → its words without files
        self._saved_system: str | None = None
        # The conversation that was replaced by its summary, and its system message.
        self._whole: tuple[str, list[dict[str, Any]], str | None] | None = None
        conversation_id = "last" if options.last else options.conversation
        if conversation_id:
            conversation = self.client.conversation(conversation_id)
            self._load(conversation)
            options.model = options.model or conversation["model"]
            options.system = options.system or self._saved_system

    @property
    def is_unsaved(self) -> bool:
        """Whether the daemon saves nothing, so that every request has to carry all messages."""
        return self.options.no_log or self._saving_failed

    @property
    def questions(self) -> list[str]:
        return [str(message["content"]) for message in self.messages if message["role"] == "user"]

    def say(self, question: str, title: str = "") -> bool:
        """Send a question and print the answer.

        Returns whether any part of an answer arrived, which is then part of the conversation. An empty
        question continues the last answer. Ctrl-C only ends the answer. `title` names a new conversation
        in the history: the words of the question without files.

        Raises:
            LocalspecError: why there is no answer, or no more of it.
        """
        self.catch_up()
        n_messages, stopped, begun = len(self.messages), False, time.time()
        beginning = "" if question else self._unfinished_answer()
        self._titles.setdefault(question, title)
        plain, tinted = self.options.plain, self.options.show_draft
        printer = _RecordingPrinter(
            render.printer(plain=plain, tinted=tinted, beginning=beginning),
            lambda printed: self._refresh(beginning + printed, continued=bool(beginning)),
        )
        self.last, request, hides = {}, self._build_request(question), self.options.hide_reasoning
        try:
            ask.stream(self.client, request, printer, hide_reasoning=hides, result=self.last)
        except KeyboardInterrupt:
            stopped = True
        except NoDaemon:
            self._unanswered = question, begun
            raise
        finally:
            extension = self.last.get("localspec") or {}
            ask.print_notes(self.last)
            if extension.get("limit"):
                hints.print_cut_off(self.last, "/continue")
            if extension.get("not_kept"):
                self._saving_failed = True
                render.error("What follows is not saved either; /save FILE writes everything.")
            received = printer.said or self.last.get("thoughts") or self.last.get("timings")
            if self.is_unsaved and received:
                self._add_turn(question, printer.said)
        answered = len(self.messages) > n_messages or bool(beginning and printer.said)
        if stopped and answered:
            render.dim("Stopped; the partial answer is part of the conversation.")
        elif stopped and beginning:
            render.dim("Stopped before anything was added to the answer.")
        elif stopped:
            what = "the question is not part of the conversation."
            render.dim(f"Stopped before the answer began; {what}")
        return answered

    def read_ahead(self, begun: str) -> None:
        """Have the daemon read the question that is being typed, in a thread, if it has nothing else to do.

        Only in a conversation that it keeps, with which the text is deleted.
        """
        if self.is_unsaved or self.id == _NEW_ID or self._is_outdated:
            return
        request = self._build_request(ask.clean(begun))
        request["localspec"] = {"conversation": self.id, "ahead": True}
        client = Client(self.client.socket_path, autostart=False)

        def send() -> None:
            with contextlib.suppress(LocalspecError):
                client.chat(request)

        threading.Thread(target=send, name="ahead", daemon=True).start()

    def _find_kept(self, question: str, begun: float) -> None:
        """Continue the conversation of a first question whose daemon was killed before it said its id.

        The daemon keeps a question before it answers, so the next one has it as the newest.
        """
        if self.is_unsaved or self.id != _NEW_ID:
            return
        with contextlib.suppress(LocalspecError):
            kept = self.client.conversation("last")
            asked = [each["content"] for each in kept["messages"] if each["role"] == "user"]
            if kept["created"] >= begun and asked == [question]:
                self._load(kept)

    def _unfinished_answer(self) -> str:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise NotFound("There is no answer to continue.")
        return str(self.messages[-1]["content"])

    def _add_turn(self, question: str, text: str) -> None:
        """Append a turn to the messages in the same form in which the daemon would have saved it."""
        if question:
            user_message = {"role": "user", "content": question}
            self.messages += [user_message, {"role": "assistant", "content": ""}]
        answer = self.messages[-1]
        answer["content"] += text
        if reasoning := "".join(self.last.get("thoughts") or []):
            answer["reasoning_content"] = answer.get("reasoning_content", "") + reasoning

    def _build_request(self, question: str) -> dict[str, Any]:
        request = ask.sampling_request(self.options)
        messages = [{"role": "user", "content": question}] if question else []
        if not question:
            request["continue_final_message"] = True
        is_saved = not self.is_unsaved
        if is_saved:
            request["localspec"] = {"conversation": self.id, "kind": "chat"}
            if self.id == _NEW_ID and self._titles.get(question):
                request["localspec"]["title"] = self._titles[question][:1000]
        else:
            messages = [*self.messages, *messages]
            if self.options.no_log:
                request["localspec"] = {"private": True}
        # The daemon already has the system message if it saved the same one.
        knows_system = is_saved and (not question or self.options.system == self._saved_system)
        request["messages"] = messages if knows_system else [*self._system_messages(), *messages]
        return request

    def _system_messages(self) -> list[dict[str, Any]]:
        """Return the system message as a request has it, or nothing if there is none."""
        system = self.options.system
        return [{"role": "system", "content": ask.clean(system)}] if system else []

    def _refresh(self, printed: str = "", *, continued: bool = False) -> str:
        """Read the daemon's copy, and return the part of the last answer that comes after `printed`.

        `continued`: that answer existed before and was continued.
        """
        self.id = (self.last.get("localspec") or {}).get("conversation", self.id)
        if self.is_unsaved or self.id == _NEW_ID:
            return ""
        n_messages, self._is_outdated = len(self.messages), True
        try:
            self._load(self.client.conversation(self.id, wait=True))
        except NotFound:
            # No part of the first answer arrived, or somebody removed the conversation.
            self._begin()
        except LocalspecError:
            return ""  # an error is already being reported, and the next question reads it again
        self._is_outdated = False
        has_answer = len(self.messages) > n_messages - continued
        answer = str(self.messages[-1]["content"]) if has_answer else ""
        return answer[len(printed) :] if answer.startswith(printed) else ""

    def catch_up(self) -> None:
        """Read the daemon's copy if that failed after the last answer."""
        if self._unanswered is not None:
            unanswered, self._unanswered = self._unanswered, None
            self._find_kept(*unanswered)
        if self._is_outdated:
            self._refresh()

    def _load(self, conversation: dict[str, Any]) -> None:
        self.id, messages = conversation["id"], conversation["messages"]
        system = (message["content"] for message in messages if message["role"] == "system")
        self._saved_system = next(system, None)
        self.messages = [
            {key: message[key] for key in _MESSAGE_FIELDS if message.get(key) is not None}
            for message in messages
            if message["role"] != "system"
        ]

    def start_new(self) -> None:
        """Begin a new conversation; the settings stay."""
        self._whole, self.options.system = None, _without_summary(self.options.system)
        self._begin()

    def _begin(self) -> None:
        self.id, self.messages, self._saved_system, self._saving_failed = _NEW_ID, [], None, False
        self._unanswered = None

    def undo(self) -> str:
        """Remove the last question and its answer, and return the question.

        Raises NotFound if there is no question.
        """
        self.catch_up()
        if not self.questions and self._whole is not None:
            self.id, self.messages, self.options.system = self._whole
            self._saved_system, self._whole = self.options.system, None
            return _SUMMARY
        if not self.questions:
            raise NotFound("There is no question to remove.")
        question = self.questions[-1]
        if self.is_unsaved:
            while self.messages.pop()["role"] != "user":
                pass
        else:
            question = self.client.undo(self.id)
            self._refresh()
        self.last = {key: self.last[key] for key in self.last if key == "model"}
        return question

    def compact(self) -> None:
        """Print a summary of the conversation, and go on in a new one that has the summary in its place.

        `undo` goes back as long as nothing was asked. Raises LocalspecError if there is no summary.
        """
        self.catch_up()
        if not self.questions:
            raise NotFound("There is no conversation to summarise.")
        system, request = self.options.system, ask.sampling_request(self.options)
        question = {"role": "user", "content": _SUMMARISE}
        request["messages"] = [*self._system_messages(), *self.messages, question]
        request["localspec"] = {"private": True}
        printer = _RecordingPrinter(render.printer(plain=self.options.plain), lambda _: "")
        self.last, hides = {}, self.options.hide_reasoning
        ask.stream(self.client, request, printer, hide_reasoning=hides, result=self.last)
        if not printer.said.strip():
            raise NotFound("There is no summary; the conversation stays as it is.")
        self._whole = self.id, self.messages, system
        self._begin()
        own = _without_summary(system) or ""
        self.options.system = f"{own}\n\n{_SUMMARY}\n\n{printer.said.strip()}".strip()

    def as_history_entry(self) -> dict[str, Any]:
        """Return the conversation in the form of the history."""
        if not self.is_unsaved and self.id != _NEW_ID:
            return self.client.conversation(self.id, wait=True)
        system = [{"role": "system", "content": self.options.system}] if self.options.system else []
        return {
            "id": "not saved",
            "updated": time.time(),
            "model": self.last.get("model") or self.options.model or "",
            "messages": [*system, *self.messages],
        }

    def markdown(self) -> str:
        """Return the conversation as a Markdown document."""
        parts = [f"> {self.options.system}\n"] if self.options.system else []
        for message in self.messages:
            heading = "You" if message["role"] == "user" else "Answer"
            parts.append(f"## {heading}\n\n{message['content'].rstrip()}\n")
        return "\n".join(parts)

    def state(self) -> str:
        """Return one line with pair, context, speed and drafts."""
        timings = self.last.get("timings") or {}
        spec = (self.last.get("localspec") or {}).get("speculation") or {}
        used = (self.last.get("usage") or {}).get("total_tokens")
        rate, share = figures.format_rate_of(timings), ""
        if spec.get("drafted"):
            share = f"{figures.format_share(spec['accepted'] / spec['drafted'])} accepted"
        parts = [
            str(self.last.get("model") or self.options.model or self.configured),
            "" if used is None else f"{used}{f'/{self.context}' * bool(self.context)} tokens",
            f"{rate} tokens/s" if rate else "",
            share,
            figures.format_speed_up(spec.get("speed_up"), timings.get("predicted_n", 0)),
        ]
        return " · ".join(filter(None, parts))
