"""A conversation with the daemon, without the terminal around it."""

from __future__ import annotations

from typing import Any

from localspec.cli import ask, inputs
from localspec.cli.options import fields
from localspec.cli.terminal import render
from localspec.client.conversations import ConversationsClient
from localspec.errors import NotFound

# Of a kept message, what a request's messages have too.
_SENT = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")


class _Listening(render.Printer):
    """Prints as another printer does, and remembers."""

    def __init__(self, printer: render.Printer) -> None:
        self.said: list[str] = []
        self._printer = printer

    def text(self, piece: str, drafted: list[list[int]]) -> None:
        self.said.append(piece)
        self._printer.text(piece, drafted)

    def close(self) -> None:
        self._printer.close()


class Talk:
    """What was said. The daemon keeps it too, unless `options["no_log"]`."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.client = ConversationsClient(autostart=not options["no_daemon_start"])
        self.id = "new"
        self.model: str = options["model"] or ""
        self.messages: list[dict[str, Any]] = []
        self.last: dict[str, Any] = {}  # statistics of the last answer
        self.context = 0
        self._options = options
        self._lost = False  # the daemon could not keep an answer
        self._said_system: str | None = None
        self.system: str | None = options["system"]
        wanted = "last" if options["last"] else options["conversation"]
        if wanted:
            self._resume(wanted)

    @property
    def keeps_nothing(self) -> bool:
        """Whether all that was said goes with every question: the daemon keeps none of it."""
        return bool(self._options["no_log"]) or self._lost

    def _resume(self, name: str) -> None:
        found = self.client.conversation(name)
        self.id = found["id"]
        self.model = self.model or found["model"]
        for each in found["messages"]:
            if each["role"] == "system":
                self._said_system = each["content"]
                self.system = self.system or each["content"]
            else:
                self.messages.append({key: each[key] for key in _SENT if each.get(key) is not None})

    def say(self, question: str, title: str = "") -> None:
        """Ask and print the answer; interrupted or not, what came is part of the conversation.

        `title` is what the history calls it if it is the first question: its words without files.
        """
        printer = _Listening(
            render.printer(plain=self._options["plain"], tinted=self._options["show_draft"])
        )
        hidden = bool(self._options["hide_reasoning"])
        self.last = {}
        try:
            ask.stream(
                self.client,
                self._request(question, title),
                printer,
                hide_reasoning=hidden,
                seen=self.last,
            )
        finally:
            ours = self.last.get("localspec") or {}
            self.id = ours.get("conversation", self.id)
            if printer.said or self.last.get("timings"):
                self._said_system = self.system
                self.messages.append({"role": "user", "content": question})
                self.messages.append({"role": "assistant", "content": "".join(printer.said)})
            ask.tell(self.last)
            if ours.get("not_kept"):
                self._lost = True
                render.error(
                    "What is said from here on is not saved either; /save FILE writes it all."
                )

    def _request(self, question: str, title: str) -> dict[str, Any]:
        request = fields(self._options)
        if self.model:
            request["model"] = inputs.pair(self.model)
        if self._options["show_draft"]:
            request["reveal_draft"] = True
        messages = [{"role": "user", "content": question}]
        kept = not self.keeps_nothing
        if kept:
            request["localspec"] = {"conversation": self.id, "kind": "chat"}
            if self.id == "new" and title:
                request["localspec"]["title"] = title[:1000]
        else:
            messages = [*self.messages, *messages]
        if self.system and (not kept or self.system != self._said_system):
            messages.insert(0, {"role": "system", "content": self.system})
        request["messages"] = messages
        return request

    def undo(self) -> str:
        """Take back the last question and its answer; the question.

        Raises:
            NotFound: nothing was said.
        """
        asked = [at for at, each in enumerate(self.messages) if each["role"] == "user"]
        if not asked:
            raise NotFound("There is nothing to take back.")
        if not self.keeps_nothing:
            self.client.undo(self.id)
        question = str(self.messages[asked[-1]]["content"])
        del self.messages[asked[-1] :]
        return question

    def markdown(self) -> str:
        """Everything that was said, as a document."""
        parts = [f"> {self.system}\n"] if self.system else []
        for message in self.messages:
            who = "You" if message["role"] == "user" else "Answer"
            parts.append(f"## {who}\n\n{message['content'].rstrip()}\n")
        return "\n".join(parts)

    def state(self) -> str:
        """One line: pair, context, speed, drafts."""
        timings = self.last.get("timings") or {}
        spec = (self.last.get("localspec") or {}).get("speculation") or {}
        used = (self.last.get("usage") or {}).get("total_tokens")
        parts = [str(self.last.get("model") or self.model or "the configured pair")]
        if used is not None:
            parts.append(f"{used}/{self.context} tokens" if self.context else f"{used} tokens")
        if timings.get("predicted_per_second"):
            parts.append(f"{timings['predicted_per_second']:.0f} tokens/s")
        if spec.get("drafted"):
            parts.append(f"{100 * spec['accepted'] / spec['drafted']:.0f} % accepted")
        if spec.get("speed_up"):
            parts.append(f"{spec['speed_up']:.2f}×")
        return " · ".join(parts)
