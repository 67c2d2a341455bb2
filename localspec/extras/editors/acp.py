"""The Agent Client Protocol. Each session is a conversation of the history."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any, cast
from urllib.parse import unquote, urlsplit

import acp
from acp import schema

import localspec
from localspec.cli import inputs
from localspec.client.tasks import AsyncDaemon, CancellableClient
from localspec.errors import LocalspecError

Block = (
    schema.TextContentBlock
    | schema.ImageContentBlock
    | schema.AudioContentBlock
    | schema.ResourceContentBlock
    | schema.EmbeddedResourceContentBlock
)
_REASONS: dict[str, schema.StopReason] = {"length": "max_tokens", "cancelled": "cancelled"}


class Agent:
    """An agent for one editor. `model`: the pair that answers; "": the configured one."""

    def __init__(self, daemon: AsyncDaemon, model: str = "") -> None:
        self._daemon = daemon
        self._model = {"model": model} if model else {}
        self._conversations: dict[str, str] = {}  # id by session; "new" before the first answer
        self._running: dict[str, asyncio.Task[str]] = {}

    def on_connect(self, conn: acp.Client) -> None:
        self._editor = conn

    async def initialize(self, protocol_version: int, **_: Any) -> acp.InitializeResponse:
        return acp.InitializeResponse(
            protocol_version=min(protocol_version, acp.PROTOCOL_VERSION),
            agent_capabilities=schema.AgentCapabilities(
                prompt_capabilities=schema.PromptCapabilities(embedded_context=True)
            ),
            agent_info=schema.Implementation(name="localspec", version=localspec.__version__),
        )

    async def new_session(self, cwd: str, **_: Any) -> acp.NewSessionResponse:
        del cwd  # a chat does nothing in the editor's folder
        session = uuid.uuid4().hex
        self._conversations[session] = "new"
        return acp.NewSessionResponse(session_id=session)

    async def prompt(self, session_id: str, prompt: list[Block], **_: Any) -> acp.PromptResponse:
        """Answer a prompt.

        Raises:
            acp.RequestError: there is no such session, or no answer for another reason.
        """
        if session_id not in self._conversations:
            raise acp.RequestError.resource_not_found(session_id)
        try:
            question = "\n\n".join(map(_to_text, prompt))
            task = asyncio.create_task(self._answer(session_id, question))
            self._running[session_id] = task
            reason = await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise  # the connection is closing, and the editor has not cancelled the prompt
            reason = "cancelled"
        except LocalspecError as error:
            raise acp.RequestError(-32603, error.message) from error
        finally:
            self._running.pop(session_id, None)
        return acp.PromptResponse(stop_reason=_REASONS.get(reason, "end_turn"))

    async def cancel(self, session_id: str, **_: Any) -> None:
        if task := self._running.get(session_id):
            task.cancel()

    async def _answer(self, session: str, question: str) -> str:
        """Send the answer to the editor while it is generated, and return why it ended."""
        extensions = {"kind": "chat", "conversation": self._conversations[session]}
        messages = [{"role": "user", "content": question}]
        request = {"messages": messages, "localspec": extensions, **self._model}
        loop, chunks = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any]]()

        def call(client: CancellableClient) -> None:
            for chunk in client.stream_chat(request):
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)

        request_task = asyncio.create_task(self._daemon.run(call))
        # An empty chunk marks the end.
        request_task.add_done_callback(lambda _: chunks.put_nowait({}))
        reason = ""
        try:
            while chunk := await chunks.get():
                conversation = (chunk.get("localspec") or {}).get("conversation")
                self._conversations[session] = conversation or self._conversations[session]
                for choice in chunk["choices"]:
                    reason = choice.get("finish_reason") or reason
                    await self._send_update(session, choice["delta"])
            await request_task
        finally:
            request_task.cancel()
        return reason

    async def _send_update(self, session: str, delta: dict[str, Any]) -> None:
        if thought := delta.get("reasoning_content"):
            await self._editor.session_update(session, acp.update_agent_thought_text(thought))
        if text := delta.get("content"):
            await self._editor.session_update(session, acp.update_agent_message_text(text))


def _to_text(block: Block) -> str:
    """Return a part of a question as text; a file that is named comes with its content.

    Raises UsageError if the file cannot be read.
    """
    match block:
        case schema.TextContentBlock():
            return block.text
        case schema.EmbeddedResourceContentBlock(
            resource=schema.TextResourceContents() as resource
        ):
            return f"{_file_name(resource.uri)}:\n\n{resource.text}"
        case schema.ResourceContentBlock(uri=uri) if uri.startswith("file:"):
            return f"{_file_name(uri)}:\n\n{inputs.read_text(_file_path(uri))}"
    return f"({block.type} without text)"


def _file_path(uri: str) -> str:
    return unquote(urlsplit(uri).path)


def _file_name(uri: str) -> str:
    return _file_path(uri).rpartition("/")[2]


def serve(model: str) -> None:
    """Serve until the editor closes the pipe."""
    asyncio.run(acp.run_agent(cast("acp.Agent", Agent(AsyncDaemon(), model))))
