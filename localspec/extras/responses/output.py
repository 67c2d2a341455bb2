"""Build the items of an answer as they arrive, and the events of each step.

Whole answers are built in the same way from the same pieces, and their events are not sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET, structs

from localspec.chat.notations.call_readers import Arguments, Call
from localspec.chat.parser import Piece, Text
from localspec.chat.tools import custom_input
from localspec.extras.responses import wire
from localspec.extras.responses.items import ToolKind, ToolSet, encode_reasoning
from localspec.extras.responses.wire import (
    CustomCall,
    FunctionCall,
    Message,
    OutputItem,
    OutputText,
    OutputTokenLogprob,
    Reasoning,
    ReasoningText,
    Status,
    SummaryText,
)
from localspec.protocol.answers import ToolCall


@dataclass(frozen=True, slots=True)
class ItemStyle:
    """How items are written.

    Their ids end in `key`. Reasoning is written as a `summary`, or as text; `opaque` adds an encoded copy
    that clients send back.
    """

    key: str
    tools: ToolSet
    summary: bool = False
    opaque: bool = False


class _OpenItem(ABC):
    """An item that is being written, at position `index` of the output."""

    def __init__(self, style: ItemStyle, index: int) -> None:
        self.style = style
        self.index = index
        self.text = ""

    @property
    def at(self) -> dict[str, Any]:
        return {"item_id": self.item("in_progress").id, "output_index": self.index}

    @abstractmethod
    def item(self, status: Status) -> OutputItem:
        """Return the item as far as it is written; while it is in progress it has no content."""

    def begin(self) -> Iterator[wire.Event]:
        yield wire.ItemAdded(output_index=self.index, item=self.item("in_progress"))

    @abstractmethod
    def add(self, text: str, logprobs: list[OutputTokenLogprob]) -> Iterator[wire.Event]: ...

    def end(self, status: Status) -> Iterator[wire.Event]:
        yield wire.ItemDone(output_index=self.index, item=self.item(status))


class _OpenMessage(_OpenItem):
    def __init__(self, style: ItemStyle, index: int) -> None:
        super().__init__(style, index)
        self.logprobs: list[OutputTokenLogprob] = []

    def item(self, status: Status) -> Message:
        parts = [] if status == "in_progress" else [OutputText(self.text, [], self.logprobs)]
        return Message(f"msg_{self.style.key}", "assistant", [*parts], status)

    def begin(self) -> Iterator[wire.Event]:
        yield from super().begin()
        yield wire.PartAdded(part=OutputText(""), **self.at)

    def add(self, text: str, logprobs: list[OutputTokenLogprob]) -> Iterator[wire.Event]:
        self.text += text
        self.logprobs += logprobs
        yield wire.OutputTextDelta(delta=text, logprobs=logprobs, **self.at)

    def end(self, status: Status) -> Iterator[wire.Event]:
        yield wire.TextDone(text=self.text, logprobs=self.logprobs, **self.at)
        yield wire.PartDone(part=OutputText(self.text, [], self.logprobs), **self.at)
        yield from super().end(status)


class _OpenReasoning(_OpenItem):
    def item(self, status: Status) -> Reasoning:
        item = Reasoning(f"rs_{self.style.key}", [], status=status)
        if self.style.opaque:
            item.encrypted_content = encode_reasoning(self.text)
        if status != "in_progress" and self.style.summary:
            item.summary = [SummaryText(self.text)]
        elif status != "in_progress":
            item.content = [ReasoningText(self.text)]
        return item

    def begin(self) -> Iterator[wire.Event]:
        yield from super().begin()
        if self.style.summary:
            yield wire.SummaryAdded(part=SummaryText(""), **self.at)
        else:
            yield wire.PartAdded(part=ReasoningText(""), **self.at)

    def add(self, text: str, logprobs: list[OutputTokenLogprob]) -> Iterator[wire.Event]:
        self.text += text
        delta = wire.SummaryDelta if self.style.summary else wire.ReasoningDelta
        yield delta(delta=text, **self.at)

    def end(self, status: Status) -> Iterator[wire.Event]:
        if self.style.summary:
            yield wire.SummaryDone(text=self.text, **self.at)
            yield wire.SummaryPartDone(part=SummaryText(self.text), **self.at)
        else:
            yield wire.ReasoningDone(text=self.text, **self.at)
            yield wire.PartDone(part=ReasoningText(self.text), **self.at)
        yield from super().end(status)


class _OpenCall(_OpenItem):
    def __init__(self, style: ItemStyle, index: int, call: Call) -> None:
        super().__init__(style, index)
        self.call = call
        self.kind: ToolKind = style.tools.kind(call.name)

    def item(self, status: Status) -> OutputItem:
        key, namespace = f"{self.style.key}_{self.call.index}", self.kind.namespace or UNSET
        if self.kind.custom:
            return CustomCall(
                f"ctc_{key}", self.call.id, self.kind.name, self._input(), status, namespace
            )
        return FunctionCall(f"fc_{key}", self.call.id, self.kind.name, self.text, status, namespace)

    def _input(self) -> str:
        return custom_input(self.text)

    def add(self, text: str, logprobs: list[OutputTokenLogprob]) -> Iterator[wire.Event]:
        self.text += text
        if not self.kind.custom:  # text inside of JSON can only be decoded when it is complete
            yield wire.ArgumentsDelta(delta=text, **self.at)

    def end(self, status: Status) -> Iterator[wire.Event]:
        if self.kind.custom:
            yield wire.CustomToolInputDelta(delta=self._input(), **self.at)
            yield wire.InputDone(input=self._input(), **self.at)
        else:
            name = self.kind.name
            yield wire.ArgumentsDone(name=name, arguments=self.text, **self.at)
        yield from super().end(status)


class _OpenClientCall(_OpenCall):
    """A call of a tool that OpenAI has defined, which is sent when its arguments are complete.

    If they do not have the shape of its item, it is sent as the call of a function.
    """

    def item(self, status: Status) -> OutputItem:
        assert self.kind.client_tool is not None
        key = f"{self.style.key}_{self.call.index}"
        item = self.kind.client_tool.build_item(key, self.call.id, self.text, status)
        return super().item(status) if item is None else item

    def begin(self) -> Iterator[wire.Event]:
        yield from ()

    def add(self, text: str, logprobs: list[OutputTokenLogprob]) -> Iterator[wire.Event]:
        self.text += text
        yield from ()

    def end(self, status: Status) -> Iterator[wire.Event]:
        item = self.item("in_progress")
        if isinstance(item, FunctionCall):
            text, self.text = self.text, ""
            yield from super().begin()
            yield from super().add(text, [])
            yield from super().end(status)
            return
        commands: list[str] = []
        if isinstance(item, wire.ShellCall):
            commands, item.action = item.action.commands, structs.replace(item.action, commands=[])
        yield wire.ItemAdded(output_index=self.index, item=item)
        for index, command in enumerate(commands):
            at: dict[str, Any] = {"output_index": self.index, "command_index": index}
            yield wire.CommandAdded(command="", **at)
            yield wire.CommandDelta(delta=command, **at)
            yield wire.CommandDone(command=command, **at)
        yield wire.ItemDone(output_index=self.index, item=self.item(status))


def build_items(
    style: ItemStyle,
    reasoning: str,
    content: str,
    calls: Sequence[ToolCall],
    *,
    cut: bool,
    logprobs: Sequence[OutputTokenLogprob] = (),
) -> list[OutputItem]:
    """Return the items of a whole answer; `logprobs` are those of its text."""
    output = Output(style)
    pieces: list[Piece] = [Text("reasoning", reasoning)] if reasoning else []
    pieces += [Text("content", content)] if content else []
    for index, call in enumerate(calls):
        pieces += [Call(call.id, call.function.name, index), Arguments(call.function.arguments)]
    for piece in pieces:
        is_content = isinstance(piece, Text) and piece.kind == "content"
        # The generators have to run to their end, but their events are not needed.
        deque(output.take(piece, [*logprobs] if is_content else []), 0)
    deque(output.end(cut=cut), 0)
    return output.items


@dataclass(slots=True)
class Output:
    """The items so far; each method yields the events of what it does."""

    style: ItemStyle
    items: list[OutputItem] = field(default_factory=list)
    _open: _OpenItem | None = None

    def take(self, piece: Piece, logprobs: list[OutputTokenLogprob]) -> Iterator[wire.Event]:
        """Add a piece of the answer."""
        match piece:
            case Text("content"):
                yield from self._continue_or_begin(_OpenMessage)
            case Text():
                yield from self._continue_or_begin(_OpenReasoning)
            case Call():
                is_defined = self.style.tools.kind(piece.name).client_tool is not None
                kind = _OpenClientCall if is_defined else _OpenCall
                yield from self._begin(kind(self.style, 0, piece))
                return
            case Arguments():
                pass
        if self._open is not None:
            yield from self._open.add(piece.text, logprobs)

    def score(self, logprobs: list[OutputTokenLogprob]) -> Iterator[wire.Event]:
        """Add log-probabilities of text that was sent already."""
        if logprobs and isinstance(self._open, _OpenMessage):
            yield from self._open.add("", logprobs)

    def end(self, *, cut: bool) -> Iterator[wire.Event]:
        """End the answer; `cut` means that its last item is not complete. One that is not cut has an item."""
        if not (self.items or self._open or cut):
            yield from self._continue_or_begin(_OpenMessage)
        yield from self._close("incomplete" if cut else "completed")

    def abandon(self) -> None:
        """Keep the item that is being written as incomplete, without the events of its end.

        Agents run a call as soon as its end comes, and repeat a text that has an end in their next request.
        """
        if self._open is not None:
            self.items.append(self._open.item("incomplete"))
            self._open = None

    def _continue_or_begin(
        self, kind: Callable[[ItemStyle, int], _OpenItem]
    ) -> Iterator[wire.Event]:
        if type(self._open) is not kind:
            yield from self._begin(kind(self.style, 0))

    def _begin(self, item: _OpenItem) -> Iterator[wire.Event]:
        yield from self._close("completed")
        item.index = len(self.items)
        self._open = item
        yield from item.begin()

    def _close(self, status: Status) -> Iterator[wire.Event]:
        if self._open is not None:
            yield from self._open.end(status)
            self.items.append(self._open.item(status))
            self._open = None
