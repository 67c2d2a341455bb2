"""Handle POST /localspec/next-edit: propose how the lines around the cursor should be next."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localspec.chat.rewriting import Rewriting
from localspec.daemon.completion.answer import AnswerRun, PendingAnswer, Shape
from localspec.daemon.completion.llama_server import EditorPosition
from localspec.daemon.completion.request import completion_frames
from localspec.daemon.handlers.completions import answer_notes, prepare_chat
from localspec.daemon.history.turn import figures_callback
from localspec.daemon.http.connection import UNIX_HOST
from localspec.daemon.http.requests import read_body, while_connected
from localspec.daemon.state import DaemonState, state_of
from localspec.daemon.worker.process import Event
from localspec.errors import InvalidRequest
from localspec.extras.next_edit.form import Form
from localspec.extras.next_edit.plain import Plain
from localspec.extras.next_edit.sweep import Sweep
from localspec.extras.next_edit.wire import ChangedLines, NextEdit, NextEditRequest
from localspec.extras.next_edit.zeta1 import Zeta1
from localspec.extras.next_edit.zeta2 import Zeta2
from localspec.protocol.answers import Extra
from localspec.protocol.frames import Generate, PairFiles, Rewrite, Tokenize
from localspec.protocol.pieces import Piece
from localspec.protocol.requests import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    LocalspecOptions,
    Prediction,
)

TRAINED = (Zeta1(), Zeta2(), Sweep())
FORMS: Sequence[Form] = (*TRAINED, Plain(is_chat=True), Plain(is_chat=False))
# An answer of fewer lines than this share of the window is one of a model that has not understood.
_MIN_LINES_SHARE = 1 / 3
_SPARE_TOKENS = 256  # beside one token for each two characters of the window


async def next_edit(request: Request) -> Response:
    """Handle POST /localspec/next-edit."""
    daemon = state_of(request)
    arrival = daemon.editors.next_arrival()
    body = await read_body(request, NextEditRequest)
    if not body.window.strip():
        raise InvalidRequest.at("before", "and 'after' are the window, which must have some text.")
    pair = await daemon.resolve_pair(body.model, request.receive, "fim")
    form = await while_connected(request.receive, _choose_form(daemon, pair, body))
    if marker := form.find_marker(body):
        message = f"The text has {marker!r}, a marker of this model's prompts: nothing is proposed."
        raise InvalidRequest(message, param="form")
    requests, shape = await _prepare(request, body, pair, form)
    client = request.client
    process = client.port if client and client.host == UNIX_HOST else None
    editor = client and client.host, process, body.user, "next edit", body.path
    place = EditorPosition(editor, 0, process is not None or bool(body.user), arrival)
    context = daemon.editors.completing(place)
    return await AnswerRun(daemon.pairs, pair, requests, shape, context).respond(request)


async def _choose_form(daemon: DaemonState, pair: PairFiles, body: NextEditRequest) -> Form:
    """Return the form that is asked for, the one that the pair's target was trained on, or a plain one."""
    by_name = {form.name: form for form in FORMS}
    if body.form:
        return by_name[body.form]
    if pair.upstream is not None:
        names, template = f"{pair.name} {pair.upstream.upstream_model}", True
    else:
        names = f"{pair.name} {PurePath(pair.target).name}"
        template = bool((await daemon.pairs.ready(pair)).chat_template)
    for form in TRAINED:
        is_named = re.search(form.models, names, re.IGNORECASE)
        if is_named and await _has_tokens(daemon, pair, form.tokens):
            return form
    return by_name["chat" if template else "text"]


async def _has_tokens(daemon: DaemonState, pair: PairFiles, markers: Sequence[str]) -> bool:
    """Return whether each marker is one token of the vocabulary, as far as that can be known."""
    if pair.upstream is not None or not markers:
        return True
    reply = await daemon.pairs.ask(pair, Tokenize(0, "".join(markers), pieces=False))
    return len(reply.value["tokens"]) == len(markers)


async def _prepare(
    request: Request, body: NextEditRequest, pair: PairFiles, form: Form
) -> tuple[Sequence[Generate], Shape]:
    """Return the engine's request, and the shape of its answer."""
    prompt, private = form.render(body), bool(body.localspec and body.localspec.private)
    shared: dict[str, Any] = {
        "temperature": 0.0,
        "stop": list(prompt.stops),
        "max_tokens": body.max_tokens or len(body.window) // 2 + _SPARE_TOKENS,
        "prediction": Prediction(body.window + form.end),
        "localspec": LocalspecOptions(kind="edit", private=private),
    }
    if form.is_chat:
        messages = [ChatMessage("user", prompt.text), ChatMessage("assistant", prompt.opening)]
        chat = ChatRequest(messages=messages, reasoning_effort="none", **shared)
        _, requests, answer = await prepare_chat(request, chat, None, pair)
    else:
        text = CompletionRequest(prompt=prompt.text + prompt.opening, **shared)
        requests = completion_frames(text)
        keep = figures_callback(state_of(request).conversations, text, pair.name)
        notes = answer_notes(request, pair)
        answer = PendingAnswer(pair.name, requests, n=1, ended=keep, notes=notes)
    answer.notes.ignored = tuple  # what no struct declares is refused
    requests[0].priority, requests[0].max_predict_ms = "editor", body.max_ms
    requests[0].rewrite = Rewrite(body.window, [*form.marks])
    return requests, _NextEditShape(answer, form, body.window)


class _NextEditShape(Shape):
    """Formats an answer as the changed lines of a window."""

    def __init__(self, answer: PendingAnswer, form: Form, window: str) -> None:
        super().__init__(answer)
        self._form, self._window = form, window

    def chunks(self, index: int, event: Event, pieces: Sequence[Piece]) -> Sequence[object]:
        return ()  # nothing of an edit is shown before all of it is known

    def complete(self) -> NextEdit:
        choice = self.answer.choices[0]
        assert choice.done is not None
        window, rewriting = (
            self._form.parse(choice.content),
            Rewriting(self._window, self._form.marks),
        )
        finish = "length" if choice.finish_reason == "length" else "stop"
        if finish == "stop" and rewriting.push(choice.content) == len(choice.content):
            finish = "unchanged"
            window += "".join(self._window.splitlines(keepends=True)[rewriting.rest :])
        few = window.count("\n") < self._window.count("\n") * _MIN_LINES_SHARE
        if finish == "length" or few:
            window = self._window
        return NextEdit(
            self.answer.model,
            self._form.name,
            window,
            changed_lines(self._window, window),
            finish,  # type: ignore[arg-type]
            self.answer.usage(),
            choice.done.timings,
            self.answer.extension(Extra, self.answer.done),
        )


def changed_lines(old: str, new: str) -> list[ChangedLines]:
    """Return what differs between two windows, from top to bottom."""
    before, after = old.split("\n")[:-1], new.split("\n")[:-1]
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return [
        ChangedLines(start, end, before[start:end], after[first:last])
        for kind, start, end, first, last in matcher.get_opcodes()
        if kind != "equal"
    ]


ROUTES = (("POST", "/localspec/next-edit", next_edit),)
PATH_ALIASES: dict[str, str] = {}
