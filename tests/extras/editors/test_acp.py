"""Test the agent of the Agent Client Protocol with the protocol's own library."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, cast

import acp
import pytest

from tests.support.daemons import RunningDaemon
from tests.support.patience import PATIENCE


class Editor:
    """An editor that collects the text of the agent."""

    def __init__(self) -> None:
        self.text = ""
        self.started = asyncio.Event()

    async def session_update(self, session_id: str, update: Any, **_: Any) -> None:
        self.text += update.content.text
        self.started.set()

    def on_connect(self, conn: acp.Agent) -> None:
        """Ignore the connection."""


async def run_session(daemon: RunningDaemon) -> None:
    home, editor = daemon.home, Editor()
    file = home.root / "a b.txt"
    file.write_text("as it is there")
    command = (sys.executable, "-m", "localspec", "acp")
    async with acp.spawn_agent_process(
        cast("acp.Client", editor), *command, env=home.environment
    ) as (agent, _):
        await agent.initialize(protocol_version=acp.PROTOCOL_VERSION)
        session = (await agent.new_session(cwd=str(home.root), mcp_servers=[])).session_id

        async def ask(*blocks: Any) -> str:
            editor.text = ""
            return (await agent.prompt(session_id=session, prompt=[*blocks])).stop_reason

        assert await ask(acp.text_block("say one two")) == "end_turn"
        assert editor.text.strip() == "one two"
        assert await ask(acp.resource_link_block("a b.txt", file.as_uri())) == "end_turn"
        # The scripted engine repeats a question.
        assert editor.text == "a b.txt:\n\nas it is there"
        (conversation,) = home.request("GET", "/localspec/conversations").json["conversations"]
        messages = home.request("GET", f"/localspec/conversations/{conversation['id']}").json[
            "messages"
        ]
        assert [message["role"] for message in messages] == ["user", "assistant"] * 2
        assert messages[2]["content"] == editor.text
        editor.started.clear()
        request = asyncio.create_task(ask(acp.text_block("forever")))
        await editor.started.wait()
        await agent.cancel(session_id=session)
        assert await request == "cancelled"
        while home.status()["running"]:
            await asyncio.sleep(0.01)
        with pytest.raises(acp.RequestError, match=r"gone\.txt cannot be read"):
            await ask(acp.resource_link_block("gone.txt", (home.root / "gone.txt").as_uri()))
        with pytest.raises(acp.RequestError, match="not found"):
            await agent.prompt(session_id="other", prompt=[acp.text_block("say no")])


def test_a_chat_is_streamed_kept_and_cancelled(daemon: RunningDaemon) -> None:
    asyncio.run(asyncio.wait_for(run_session(daemon), PATIENCE))
