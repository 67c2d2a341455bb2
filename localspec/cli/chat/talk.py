"""A conversation with the daemon, without the terminal around it.

What was said is what the daemon keeps, and is read from there after every answer: an answer that was
interrupted, one of thoughts alone, and a question that was refused are then the same on both sides.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from localspec.cli import ask
from localspec.cli.terminal import figures, hints, render
from localspec.client.conversations import ConversationsClient
from localspec.config import load_config
from localspec.errors import LocalspecError, NoDaemon, NotFound
from localspec.paths import default_paths

# Of a kept message, what a request's messages have too.
_SENT = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
_NEW = "new"


class _Listening(render.Printer):
    """Prints as another printer does, and remembers; at the end `rest` of what was said is printed too."""

    def __init__(self, printer: render.Printer, rest: Callable[[str], str]) -> None:
        self.said = ""
        self._printer = printer
        self._rest = rest

    def text(self, piece: str, drafted: list[list[int]]) -> None:
        self.said += piece
        self._printer.text(piece, drafted)

    def close(self) -> None:
        try:
            if rest := self._rest(self.said):
                self.text(rest, [])
        finally:
            self._printer.close()


class Talk:
    """What was said. The daemon keeps it too, unless `options["no_log"]`.

    `options` are those of `chat`, and may be changed between questions.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.client = ConversationsClient(autostart=not options["no_daemon_start"])
        self.options = options
        self.id = _NEW
        self.messages: list[dict[str, Any]] = []  # without the system message
        self.last: dict[str, Any] = {}  # statistics of the last answer
        self.context = 0
        self.configured = load_config(default_paths().config_file).pair
        self._lost = False  # the daemon could not keep an answer
        self._behind = False  # what the daemon kept of the last answer could not be read
        self._lost_turn: list[
            dict[str, Any]
        ] = []  # a question and its answer whose daemon was killed
        self._lost_place = 0  # how many questions came before it
        self._titles: dict[str, str] = {}  # of questions: their words without files
        self._said_system: str | None = None
        wanted = "last" if options["last"] else options["conversation"]
        if wanted:
            found = self.client.conversation(wanted)
            self._take(found)
            self.model = self.model or found["model"]
            self.system = self.system or self._said_system

    @property
    def model(self) -> str:
        return self.options["model"] or ""

    @model.setter
    def model(self, name: str) -> None:
        self.options["model"] = name

    @property
    def system(self) -> str | None:
        """The system message from the next question on."""
        system: str | None = self.options["system"]
        return system

    @system.setter
    def system(self, text: str | None) -> None:
        self.options["system"] = text

    @property
    def keeps_nothing(self) -> bool:
        """Whether all that was said goes with every question: the daemon keeps none of it."""
        return bool(self.options["no_log"]) or self._lost

    @property
    def questions(self) -> list[str]:
        return [str(each["content"]) for each in self.messages if each["role"] == "user"]

    # ------------------------------------------------------------------ said

    def say(self, question: str, title: str = "") -> bool:
        """Ask, and print the answer; whether anything came, which is then part of the conversation.

        Without a question the last answer goes on. Ctrl-C ends the answer alone. `title` is what the
        history calls the conversation where this is the first question: its words without files.

        Raises:
            LocalspecError: why there is no answer, or no more of it.
        """
        self.catch_up()
        before, stopped = len(self.messages), False
        begun = "" if question else self._begun()
        self._titles.setdefault(question, title)
        plain, tinted = self.options["plain"], self.options["show_draft"]
        printer = _Listening(
            render.printer(plain=plain, tinted=tinted, begun=begun),
            lambda said: self._settled(begun + said, begun=bool(begun)),
        )
        self.last = {}
        try:
            ask.stream(
                self.client,
                self._request(question),
                printer,
                hide_reasoning=bool(self.options["hide_reasoning"]),
                seen=self.last,
            )
        except KeyboardInterrupt:
            stopped = True
        except NoDaemon:
            self._note_lost(question, printer.said)
            raise
        finally:
            ours = self.last.get("localspec") or {}
            ask.tell(self.last)
            if ours.get("limit"):
                hints.cut_off(self.last, "/continue")
            if ours.get("not_kept"):
                self._lost = True
                render.error("What follows is not saved either; /save FILE writes everything.")
            came_here = printer.said or self.last.get("thoughts") or self.last.get("timings")
            if self.keeps_nothing and came_here:
                self._add(question, printer.said)
        came = len(self.messages) > before or bool(begun and printer.said)
        if stopped:
            _say_where_it_stopped(came=came, goes_on=bool(begun))
        return came

    def _note_lost(self, question: str, answer: str) -> None:
        """Remember a turn whose daemon was killed before it could keep the turn."""
        if self.keeps_nothing or not answer:
            return
        if not question:
            return  # the answer that was going on is kept as far as it was before
        self._lost_place = len(self.questions)
        self._lost_turn = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]

    def _begun(self) -> str:
        """What the last answer has said.

        Raises:
            NotFound: there is none.
        """
        said = [*self.messages, *self._lost_turn]
        if not said or said[-1]["role"] != "assistant":
            raise NotFound("There is no answer to continue.")
        return str(said[-1]["content"])

    def _add(self, question: str, said: str) -> None:
        """As the daemon would have kept it."""
        if question:
            asked = {"role": "user", "content": question}
            self.messages += [asked, {"role": "assistant", "content": ""}]
        answer = self.messages[-1]
        answer["content"] += said
        if thoughts := "".join(self.last.get("thoughts") or []):
            answer["reasoning_content"] = answer.get("reasoning_content", "") + thoughts

    def _request(self, question: str) -> dict[str, Any]:
        request = ask.wanted(self.options)
        messages = [{"role": "user", "content": question}] if question else []
        if not question:
            request["continue_final_message"] = True
        kept = not self.keeps_nothing
        if kept:
            messages = [*self._lost_turn, *messages]
            request["localspec"] = {"conversation": self.id, "kind": "chat"}
            if self.id == _NEW and self._titles.get(question):
                request["localspec"]["title"] = self._titles[question][:1000]
        else:
            messages = [*self.messages, *messages]
            if self.options["no_log"]:
                request["localspec"] = {"private": True}
        told = kept and (not question or self.system == self._said_system)
        if self.system and not told:
            messages.insert(0, {"role": "system", "content": ask.clean(self.system)})
        request["messages"] = messages
        return request

    def _settled(self, printed: str = "", *, begun: bool = False) -> str:
        """Read what the daemon has kept; of the last answer what came after `printed`.

        `begun`: that answer was there before.
        """
        self.id = (self.last.get("localspec") or {}).get("conversation", self.id)
        if self.keeps_nothing or self.id == _NEW:
            return ""
        before, self._behind = len(self.messages), True
        try:
            self._take(self.client.conversation(self.id, wait=True))
        except NotFound:  # nothing of the first answer came, or somebody removed all of it
            lost = self._lost_turn
            self.renew()
            self._lost_turn = lost
        except LocalspecError:
            return ""  # there is an error to tell already, and another time to ask
        self._behind = False
        answer = str(self.messages[-1]["content"]) if len(self.messages) > before - begun else ""
        return answer[len(printed) :] if answer.startswith(printed) else ""

    def catch_up(self) -> None:
        """Have what the daemon keeps, where that could not be read after the last answer."""
        if self._behind:
            self._settled()

    def _take(self, found: dict[str, Any]) -> None:
        """Make a kept conversation this one."""
        self.id = found["id"]
        system = [each["content"] for each in found["messages"] if each["role"] == "system"]
        self._said_system = system[0] if system else None
        self.messages = [
            {key: each[key] for key in _SENT if each.get(key) is not None}
            for each in found["messages"]
            if each["role"] != "system"
        ]
        if self._lost_turn and len(self.questions) > self._lost_place:
            self._lost_turn = []  # it has been kept with the next one, or after all

    # ------------------------------------------------------------------ changed

    def renew(self) -> None:
        """Begin a new conversation; the settings stay."""
        self.id, self.messages, self._said_system, self._lost = _NEW, [], None, False
        self._lost_turn = []

    def undo(self) -> str:
        """Take back the last question and its answer; the question.

        Raises:
            NotFound: nothing was said.
        """
        self.catch_up()
        if self._lost_turn:
            lost, self._lost_turn = self._lost_turn, []
            return str(lost[0]["content"])
        if not self.questions:
            raise NotFound("There is no question to remove.")
        question = self.questions[-1]
        if self.keeps_nothing:
            asked = [at for at, each in enumerate(self.messages) if each["role"] == "user"]
            self.messages = self.messages[: asked[-1]]
        else:
            question = self.client.undo(self.id)
            self._settled()
        return question

    # ------------------------------------------------------------------ shown

    def kept(self) -> dict[str, Any]:
        """The conversation in the form of the history."""
        if not self.keeps_nothing and self.id != _NEW:
            return self.client.conversation(self.id, wait=True)
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {
            "id": "not saved",
            "created": time.time(),
            "model": self.last.get("model") or self.model,
            "messages": [*system, *self.messages],
        }

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
        parts = [str(self.last.get("model") or self.model or self.configured)]
        if used is not None:
            parts.append(f"{used}/{self.context} tokens" if self.context else f"{used} tokens")
        if told := figures.rate_of(timings):
            parts.append(f"{told} tokens/s")
        if spec.get("drafted"):
            parts.append(f"{figures.share(spec['accepted'] / spec['drafted'])} accepted")
        if faster := figures.speed_up(spec.get("speed_up"), timings.get("predicted_n", 0)):
            parts.append(faster)
        return " · ".join(parts)


def _say_where_it_stopped(*, came: bool, goes_on: bool) -> None:
    """Say what has become of an answer that Ctrl-C ended. goes_on: it had begun before."""
    if came:
        render.dim("Stopped; the partial answer is part of the conversation.")
    elif goes_on:
        render.dim("Stopped before anything was added to the answer.")
    else:
        render.dim("Stopped before the answer began; the question is not part of the conversation.")
