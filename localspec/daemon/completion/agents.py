"""How the sessions of agents begin that `localspec launch` starts.

An agent sends the same instructions and tools each time. They are kept in memory only, and are read while it
starts and its first task is written.
"""

from __future__ import annotations

import msgspec
from starlette.datastructures import Address

from localspec.errors import NotFound
from localspec.protocol.frames import ChatPrompt, Generate, Message

_MOST = 64  # agents and beginnings; the oldest go first


class AgentSessions:
    """The beginnings of sessions by agent and pair, and the agents by the peer that sends their requests."""

    def __init__(self) -> None:
        self._agents: dict[Address, str] = {}
        self.beginnings: dict[tuple[str, str], ChatPrompt] = {}

    def begin(self, peer: Address, agent: str, pair: str) -> Generate:
        """Return the request that reads how an agent's session begins. Raises NotFound if none was seen."""
        self._agents[peer] = agent
        if len(self._agents) > _MOST:
            del self._agents[next(iter(self._agents))]
        if (prompt := self.beginnings.get((agent, pair))) is None:
            raise NotFound(f"No session of {agent} with {pair} was seen yet.")
        return Generate(0, prompt, max_tokens=0, priority="ahead")

    def note(self, peer: Address | None, pair: str, request: Generate) -> None:
        """Keep how an agent's session begins, from a request with tools that is not private."""
        agent, prompt = peer and self._agents.get(peer), request.prompt
        if not agent or request.private or not (request.tools and isinstance(prompt, ChatPrompt)):
            return
        roles = [message.role for message in prompt.messages]
        if "user" in roles and "assistant" not in roles:
            messages = [*prompt.messages[: roles.index("user")], Message("user", "")]
            self.beginnings[agent, pair] = msgspec.structs.replace(
                prompt, messages=messages, continued="content", pictures=[]
            )
            if len(self.beginnings) > _MOST:
                del self.beginnings[next(iter(self.beginnings))]
