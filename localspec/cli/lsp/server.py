"""The protocol, by pygls: what an editor asks becomes a question to the desk, and the answer its items.

Nothing that a key asks for is an error: where there is no suggestion there is none, and the log of the
editor's says why, once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lsprotocol import types
from pygls.exceptions import JsonRpcException, JsonRpcInvalidParams
from pygls.lsp.server import LanguageServer
from pygls.protocol import LanguageServerProtocol, lsp_method

import localspec
from localspec.cli.lsp import questions, suggestions
from localspec.cli.lsp.desk import Desk, Edit, Lines, Suggestion
from localspec.cli.lsp.documents import Document, Place
from localspec.client.tasks import Daemon
from localspec.errors import Cancelled, LocalspecError

EXPLAIN, EDIT = "localspec.explain", "localspec.edit"
# Behind these there may be something to complete, although no word has begun.
_TRIGGERS = [*".([{,=:"]
_REWRITE = types.CodeActionKind.RefactorRewrite


class Server(LanguageServer):
    """For one editor. Explanations are files in `folder`, which its owner removes."""

    def __init__(self, desk: Desk, folder: Path) -> None:
        super().__init__("localspec", localspec.__version__, protocol_cls=Protocol)
        self.desk = desk
        self._folder = folder
        self._numbers = itertools.count(1)
        self._told = ""
        self._running: set[asyncio.Task[None]] = set()

    async def suggested(self, uri: str, position: types.Position) -> Suggestion | None:
        try:
            found = await self.desk.suggest(uri, position.line, position.character)
        except Cancelled:  # a newer key has taken over
            return None
        except LocalspecError as error:
            if error.message != self._told:
                self._told = error.message
                said = types.LogMessageParams(types.MessageType.Warning, error.message)
                self.window_log_message(said)
            return None
        self._told = ""
        return found

    def run(self, name: str, arguments: Sequence[Any]) -> None:
        """A command: for lines `{"uri", "first", "last"}`, and an instruction. It goes on when this returns,
        for some editors wait, for the answer and for nothing else, and not long.

        Raises:
            JsonRpcInvalidParams: it is none of ours, or other arguments belong to it.
        """
        try:
            where, *words = arguments
            uri, first, last = str(where["uri"]), int(where["first"]), int(where["last"])
            if name not in (EXPLAIN, EDIT) or not all(isinstance(word, str) for word in words):
                raise ValueError(f"{name} {words}")
        except (KeyError, TypeError, ValueError) as error:
            raise JsonRpcInvalidParams.of(error) from error
        task = asyncio.create_task(self._run(name, uri, first, last, " ".join(words)))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _run(self, name: str, uri: str, first: int, last: int, words: str) -> None:
        try:
            lines = self.desk.lines(uri, first, last)
            async with _Progress(self, name.partition(".")[2]):
                if name == EXPLAIN:
                    await self._show(await self.desk.explain(lines))
                elif edit := await self.desk.edit(lines, words):
                    await self._apply(edit)
                else:
                    self.say("The answer changes nothing.")
        except (LocalspecError, JsonRpcException) as error:
            self.say(str(error), types.MessageType.Error)

    def say(self, text: str, kind: types.MessageType = types.MessageType.Info) -> None:
        self.window_show_message(types.ShowMessageParams(kind, text))

    async def _show(self, text: str) -> None:
        """As a document beside the others, where the editor opens one; else as a message."""
        window = self.client_capabilities.window
        if window and window.show_document and window.show_document.support:
            path = self._folder / f"explanation-{next(self._numbers)}.md"
            path.write_text(text + "\n", encoding="utf-8")
            asked = types.ShowDocumentParams(path.as_uri(), external=False, take_focus=False)
            if (await self.window_show_document_async(asked)).success:
                return
        self.say(text)

    async def _apply(self, edit: Edit) -> None:
        uri, version = edit.lines.document.uri, edit.lines.document.version
        change = types.TextEdit(_range(edit.lines), edit.text)
        workspace = self.client_capabilities.workspace
        known = workspace and workspace.workspace_edit and workspace.workspace_edit.document_changes
        if known:  # then the editor refuses it where somebody has typed meanwhile
            document = types.OptionalVersionedTextDocumentIdentifier(uri, version)
            whole = types.WorkspaceEdit(
                document_changes=[types.TextDocumentEdit(document, [change])]
            )
        else:
            whole = types.WorkspaceEdit(changes={uri: [change]})
        params = types.ApplyWorkspaceEditParams(whole, label="localspec")
        result = await self.workspace_apply_edit_async(params)
        if not result.applied:
            why = f": {result.failure_reason}" if result.failure_reason else "."
            self.say(f"The editor did not take the change{why}", types.MessageType.Error)


class _Progress:
    """What an editor shows while an answer is written, and where it can be stopped."""

    def __init__(self, server: Server, what: str) -> None:
        self._server = server
        self._title = f"localspec: {what}"
        window = server.client_capabilities.window
        self._known = bool(window and window.work_done_progress)
        self._token = f"localspec-{id(self)}"

    async def __aenter__(self) -> None:
        if not self._known:
            return
        progress = self._server.work_done_progress
        await progress.create_async(self._token)
        progress.begin(self._token, types.WorkDoneProgressBegin(self._title, cancellable=True))
        if task := asyncio.current_task():
            progress.tokens[self._token].add_done_callback(lambda _: task.cancel())

    async def __aexit__(self, *_: object) -> None:
        if self._known:
            progress = self._server.work_done_progress
            progress.tokens.pop(self._token, None)
            progress.end(self._token, types.WorkDoneProgressEnd())


class Protocol(LanguageServerProtocol):
    """Texts are kept by us: pygls ends lines where str.splitlines does. And so are commands: it would have
    each tell what arguments it takes."""

    _server: Server

    @lsp_method(types.TEXT_DOCUMENT_DID_OPEN)
    def lsp_text_document__did_open(self, params: types.DidOpenTextDocumentParams) -> None:
        given = params.text_document
        kind = types.PositionEncodingKind(self.workspace.position_encoding or "utf-16")
        document = Document(
            given.uri, given.text, kind.value, str(given.language_id), given.version
        )
        self._server.desk.open(document)

    @lsp_method(types.TEXT_DOCUMENT_DID_CHANGE)
    def lsp_text_document__did_change(self, params: types.DidChangeTextDocumentParams) -> None:
        document = self._server.desk.documents.get(params.text_document.uri)
        if document is None:
            return
        for change in params.content_changes:
            if isinstance(change, types.TextDocumentContentChangePartial):
                start, end = (
                    document.place(each.line, each.character)
                    for each in (change.range.start, change.range.end)
                )
                document.replace(start, end, change.text)
                self._server.desk.at(document, start.line)
            else:
                document.replace_all(change.text)
        document.version = params.text_document.version

    @lsp_method(types.TEXT_DOCUMENT_DID_CLOSE)
    def lsp_text_document__did_close(self, params: types.DidCloseTextDocumentParams) -> None:
        self._server.desk.close(params.text_document.uri)

    # pygls has a generator there that awaits its own commands; ours answer at once.
    @lsp_method(types.WORKSPACE_EXECUTE_COMMAND)
    def lsp_workspace__execute_command(  # type: ignore[override]
        self, params: types.ExecuteCommandParams
    ) -> None:
        self._server.run(params.command, params.arguments or [])


# What is registered: pygls gives each its server.


async def inline(ls: Server, params: types.InlineCompletionParams) -> types.InlineCompletionList:
    items = []
    if found := await ls.suggested(params.text_document.uri, params.position):
        here = types.Range(params.position, params.position)
        items = [types.InlineCompletionItem(found.text, range=here)]
    return types.InlineCompletionList(items)


async def plain(ls: Server, params: types.CompletionParams) -> types.CompletionList:
    items = []
    if found := await ls.suggested(params.text_document.uri, params.position):
        item = suggestions.item(found.text, found.before)
        place = found.place._replace(column=found.place.column - len(item.back))
        start = types.Position(place.line, found.document.units(place))
        shown = questions.fenced(item.text, found.document.language)
        items = [
            types.CompletionItem(
                item.label,
                kind=types.CompletionItemKind.Text,
                detail="localspec",
                documentation=types.MarkupContent(types.MarkupKind.Markdown, shown),
                filter_text=item.text,
                text_edit=types.TextEdit(types.Range(start, params.position), item.text),
                insert_text_mode=types.InsertTextMode.AsIs,
            )
        ]
    return types.CompletionList(is_incomplete=True, items=items)


def actions(ls: Server, params: types.CodeActionParams) -> list[types.CodeAction]:
    uri, (start, end) = params.text_document.uri, (params.range.start, params.range.end)
    last = end.line - (end.character == 0 and end.line > start.line)
    where = {"uri": uri, "first": start.line, "last": last}
    document = ls.desk.documents.get(uri)
    asked = questions.instruction(document.content(start.line)) if document else ""
    edit = f"localspec: edit: {asked}" if asked else "localspec: edit as a comment says"
    made = [("localspec: explain", "", EXPLAIN), (edit, _REWRITE, EDIT)]
    return [
        types.CodeAction(title, kind=kind, command=types.Command(title, name, arguments=[where]))
        for title, kind, name in made
        if _is_wanted(kind, params.context.only)
    ]


def _range(lines: Lines) -> types.Range:
    document, first, last = lines
    end = Place(last, len(document.content(last)))
    return types.Range(types.Position(first, 0), types.Position(last, document.units(end)))


def _is_wanted(kind: str, only: Any) -> bool:
    """Whether an action's kind is one of those that are asked for, or inside one."""
    return only is None or any(f"{kind}.".startswith(f"{each}.") or each == "" for each in only)


def made(desk: Desk, folder: Path) -> Server:
    """A server that offers what the editor which starts it can show."""
    server = Server(desk, folder)

    @server.feature(types.INITIALIZE)
    def initialize(params: types.InitializeParams) -> None:
        known = params.capabilities.text_document
        if known and known.inline_completion:
            feature = server.feature(
                types.TEXT_DOCUMENT_INLINE_COMPLETION, types.InlineCompletionOptions()
            )
            feature(inline)
        else:
            options = types.CompletionOptions(trigger_characters=_TRIGGERS)
            server.feature(types.TEXT_DOCUMENT_COMPLETION, options)(plain)

    options = types.CodeActionOptions(code_action_kinds=["", _REWRITE])
    server.feature(types.TEXT_DOCUMENT_CODE_ACTION, options)(actions)
    for name in (EXPLAIN, EDIT):
        server.command(name)(lambda *_: None)  # listed as ours; `run` is what is called
    return server


def serve(model: str) -> None:
    """Until the editor ends it, or itself."""
    logging.getLogger("pygls").setLevel(
        logging.ERROR
    )  # a request that ended before its cancel is no news
    # pygls closes what it writes to; standard output is closed by whoever opened it.
    stdout = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    with tempfile.TemporaryDirectory(prefix="localspec-lsp-") as folder:
        made(Desk(Daemon(), model), Path(folder)).start_io(sys.stdin.buffer, stdout)
