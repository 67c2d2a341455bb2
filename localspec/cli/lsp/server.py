"""The language server protocol, by pygls: requests of the editor are passed to the desk.

A keystroke never causes an error message. Without a suggestion there is none, and the editor's log
says why, once.
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
# Characters behind which a completion is useful although no word has begun.
_TRIGGERS = [*".([{,=:"]
_REWRITE = types.CodeActionKind.RefactorRewrite


class Server(LanguageServer):
    """A language server for one editor. Explanations are files in `folder`, which the caller removes."""

    def __init__(self, desk: Desk, folder: Path) -> None:
        super().__init__("localspec", localspec.__version__, protocol_cls=Protocol)
        self.desk = desk
        self._folder = folder
        self._numbers = itertools.count(1)
        self._last_warning = ""
        self._running: set[asyncio.Task[None]] = set()

    async def suggested(self, uri: str, position: types.Position) -> Suggestion | None:
        """Return the desk's suggestion. Errors are logged and give None."""
        try:
            suggestion = await self.desk.suggest(uri, position.line, position.character)
        except Cancelled:  # a newer keystroke has replaced the request
            return None
        except LocalspecError as error:
            if error.message != self._last_warning:
                self._last_warning = error.message
                message = types.LogMessageParams(types.MessageType.Warning, error.message)
                self.window_log_message(message)
            return None
        self._last_warning = ""
        return suggestion

    def run(self, name: str, arguments: Sequence[Any]) -> None:
        """Start a command for the lines `{"uri", "first", "last"}`, with an optional instruction.

        It continues after this returns, because some editors do nothing else while they wait, and
        give up soon.

        Raises:
            JsonRpcInvalidParams: the command or its arguments are invalid.
        """
        try:
            location, *words = arguments
            uri, first, last = str(location["uri"]), int(location["first"]), int(location["last"])
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
        """Show a text as a document if the editor can open one, else as a message."""
        window = self.client_capabilities.window
        if window and window.show_document and window.show_document.support:
            path = self._folder / f"explanation-{next(self._numbers)}.md"
            path.write_text(text + "\n", encoding="utf-8")
            request = types.ShowDocumentParams(path.as_uri(), external=False, take_focus=False)
            if (await self.window_show_document_async(request)).success:
                return
        self.say(text)

    async def _apply(self, edit: Edit) -> None:
        uri, version = edit.lines.document.uri, edit.lines.document.version
        change = types.TextEdit(_to_range(edit.lines), edit.text)
        workspace = self.client_capabilities.workspace
        has_versions = (
            workspace and workspace.workspace_edit and workspace.workspace_edit.document_changes
        )
        if has_versions:  # the editor then refuses the edit if the user has typed meanwhile
            document = types.OptionalVersionedTextDocumentIdentifier(uri, version)
            workspace_edit = types.WorkspaceEdit(
                document_changes=[types.TextDocumentEdit(document, [change])]
            )
        else:
            workspace_edit = types.WorkspaceEdit(changes={uri: [change]})
        params = types.ApplyWorkspaceEditParams(workspace_edit, label="localspec")
        result = await self.workspace_apply_edit_async(params)
        if not result.applied:
            reason = f": {result.failure_reason}" if result.failure_reason else "."
            self.say(f"The editor did not take the change{reason}", types.MessageType.Error)


class _Progress:
    """The progress that an editor shows while an answer is generated, with a way to cancel it."""

    def __init__(self, server: Server, what: str) -> None:
        self._server = server
        self._title = f"localspec: {what}"
        window = server.client_capabilities.window
        self._is_supported = bool(window and window.work_done_progress)
        self._token = f"localspec-{id(self)}"

    async def __aenter__(self) -> None:
        if not self._is_supported:
            return
        progress = self._server.work_done_progress
        await progress.create_async(self._token)
        progress.begin(self._token, types.WorkDoneProgressBegin(self._title, cancellable=True))
        if task := asyncio.current_task():
            progress.tokens[self._token].add_done_callback(lambda _: task.cancel())

    async def __aexit__(self, *_: object) -> None:
        if self._is_supported:
            progress = self._server.work_done_progress
            progress.tokens.pop(self._token, None)
            progress.end(self._token, types.WorkDoneProgressEnd())


class Protocol(LanguageServerProtocol):
    """pygls' protocol with our own documents and commands.

    pygls splits lines as str.splitlines does, and requires each command to declare its arguments.
    """

    _server: Server

    @lsp_method(types.TEXT_DOCUMENT_DID_OPEN)
    def lsp_text_document__did_open(self, params: types.DidOpenTextDocumentParams) -> None:
        item = params.text_document
        kind = types.PositionEncodingKind(self.workspace.position_encoding or "utf-16")
        document = Document(item.uri, item.text, kind.value, str(item.language_id), item.version)
        self._server.desk.open(document)

    @lsp_method(types.TEXT_DOCUMENT_DID_CHANGE)
    def lsp_text_document__did_change(self, params: types.DidChangeTextDocumentParams) -> None:
        document = self._server.desk.documents.get(params.text_document.uri)
        if document is None:
            return
        for change in params.content_changes:
            if isinstance(change, types.TextDocumentContentChangePartial):
                start, end = (
                    document.place(position.line, position.character)
                    for position in (change.range.start, change.range.end)
                )
                document.replace(start, end, change.text)
                self._server.desk.at(document, start.line)
            else:
                document.replace_all(change.text)
        document.version = params.text_document.version

    @lsp_method(types.TEXT_DOCUMENT_DID_CLOSE)
    def lsp_text_document__did_close(self, params: types.DidCloseTextDocumentParams) -> None:
        self._server.desk.close(params.text_document.uri)

    # pygls has a generator here that awaits its own commands. Ours return at once.
    @lsp_method(types.WORKSPACE_EXECUTE_COMMAND)
    def lsp_workspace__execute_command(  # type: ignore[override]
        self, params: types.ExecuteCommandParams
    ) -> None:
        self._server.run(params.command, params.arguments or [])


# The handlers that are registered below. pygls passes the server to each of them.


async def suggest_inline(
    ls: Server, params: types.InlineCompletionParams
) -> types.InlineCompletionList:
    """Return a suggestion that the editor shows as ghost text."""
    items = []
    if suggestion := await ls.suggested(params.text_document.uri, params.position):
        cursor = types.Range(params.position, params.position)
        items = [types.InlineCompletionItem(suggestion.text, range=cursor)]
    return types.InlineCompletionList(items)


async def suggest_in_menu(ls: Server, params: types.CompletionParams) -> types.CompletionList:
    """Return a suggestion that the editor shows in its completion menu."""
    items = []
    if suggestion := await ls.suggested(params.text_document.uri, params.position):
        item = suggestions.item(suggestion.text, suggestion.before)
        place = suggestion.place._replace(column=suggestion.place.column - len(item.back))
        start = types.Position(place.line, suggestion.document.units(place))
        preview = questions.fenced(item.text, suggestion.document.language)
        items = [
            types.CompletionItem(
                item.label,
                kind=types.CompletionItemKind.Text,
                detail="localspec",
                documentation=types.MarkupContent(types.MarkupKind.Markdown, preview),
                filter_text=item.text,
                text_edit=types.TextEdit(types.Range(start, params.position), item.text),
                insert_text_mode=types.InsertTextMode.AsIs,
            )
        ]
    return types.CompletionList(is_incomplete=True, items=items)


def list_code_actions(ls: Server, params: types.CodeActionParams) -> list[types.CodeAction]:
    """Return the actions for the selected lines: explain and edit."""
    uri, (start, end) = params.text_document.uri, (params.range.start, params.range.end)
    last = end.line - (end.character == 0 and end.line > start.line)
    location = {"uri": uri, "first": start.line, "last": last}
    document = ls.desk.documents.get(uri)
    instruction = questions.instruction(document.content(start.line)) if document else ""
    edit_title = (
        f"localspec: edit: {instruction}" if instruction else "localspec: edit as a comment says"
    )
    choices = [("localspec: explain", "", EXPLAIN), (edit_title, _REWRITE, EDIT)]
    return [
        types.CodeAction(title, kind=kind, command=types.Command(title, name, arguments=[location]))
        for title, kind, name in choices
        if _is_requested(kind, params.context.only)
    ]


def _to_range(lines: Lines) -> types.Range:
    document, first, last = lines
    end = Place(last, len(document.content(last)))
    return types.Range(types.Position(first, 0), types.Position(last, document.units(end)))


def _is_requested(kind: str, only: Any) -> bool:
    """Return whether an action's kind is one of the requested kinds, or inside one of them."""
    return only is None or any(f"{kind}.".startswith(f"{outer}.") or outer == "" for outer in only)


def create_server(desk: Desk, folder: Path) -> Server:
    """Return a server that offers what the editor can show."""
    server = Server(desk, folder)

    @server.feature(types.INITIALIZE)
    def initialize(params: types.InitializeParams) -> None:
        text_document = params.capabilities.text_document
        if text_document and text_document.inline_completion:
            feature = server.feature(
                types.TEXT_DOCUMENT_INLINE_COMPLETION, types.InlineCompletionOptions()
            )
            feature(suggest_inline)
        else:
            options = types.CompletionOptions(trigger_characters=_TRIGGERS)
            server.feature(types.TEXT_DOCUMENT_COMPLETION, options)(suggest_in_menu)

    options = types.CodeActionOptions(code_action_kinds=["", _REWRITE])
    server.feature(types.TEXT_DOCUMENT_CODE_ACTION, options)(list_code_actions)
    for name in (EXPLAIN, EDIT):
        # This only declares the command. The protocol calls `Server.run` instead.
        server.command(name)(lambda *_: None)
    return server


def serve(model: str) -> None:
    """Serve until the editor or its connection ends."""
    # pygls warns about a cancel that comes after its request has ended, which is harmless.
    logging.getLogger("pygls").setLevel(logging.ERROR)
    # pygls closes the stream that it writes to, so it gets a duplicate of standard output.
    stdout = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    with tempfile.TemporaryDirectory(prefix="localspec-lsp-") as folder:
        create_server(Desk(Daemon(), model), Path(folder)).start_io(sys.stdin.buffer, stdout)
