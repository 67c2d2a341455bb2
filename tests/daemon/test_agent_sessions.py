"""Test what the daemon remembers of the agents that `localspec launch` starts."""

from __future__ import annotations

import contextlib

from starlette.datastructures import Address

from localspec.daemon.completion.agents import AgentSessions
from localspec.errors import NotFound
from localspec.protocol.calls import EXPLAINED, ToolSet
from localspec.protocol.frames import ChatPrompt, Generate, Message

N_LAUNCHES = 1000


def _begins(sessions: AgentSessions, peer: Address, agent: str) -> bool:
    """Announce an agent, and return whether the daemon knows how its sessions begin."""
    with contextlib.suppress(NotFound):
        return sessions.begin(peer, agent, "pair").priority == "ahead"
    return False


def test_the_last_agents_are_remembered() -> None:
    sessions = AgentSessions()
    peers = [Address("", number) for number in range(N_LAUNCHES)]
    agents = [f"agent {number}" for number in range(N_LAUNCHES)]
    question = ChatPrompt([Message("system", "You may."), Message("user", "Begin.")])
    request = Generate(0, question, tools=ToolSet(EXPLAINED, {"look": {}}))
    for peer, agent in zip(peers, agents, strict=True):
        assert not _begins(sessions, peer, agent)
        sessions.note(peer, "pair", request)
    assert _begins(sessions, peers[-1], agents[-1])
    assert not _begins(sessions, peers[0], agents[0])
    assert len(sessions.beginnings) < N_LAUNCHES
