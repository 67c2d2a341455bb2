"""What every handler needs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import cast

from starlette.requests import Request
from starlette.types import Receive

from localspec.config import Config
from localspec.daemon.completion.responses.running import Running
from localspec.daemon.completion.takeover import Editors
from localspec.daemon.history.store import Conversations
from localspec.daemon.http import tcp
from localspec.daemon.http.requests import from_our_client, unless_gone
from localspec.daemon.http.tcp import TcpAuth
from localspec.daemon.pairs import names
from localspec.daemon.pairs.registry import Registry
from localspec.daemon.threads import Shared, Threads
from localspec.daemon.worker.supervisor import Supervisor
from localspec.errors import ModelNotFound
from localspec.paths import Paths
from localspec.protocol.frames import PairFiles

_LOOKS = 8  # pairs at once; more than anybody asks for
_ERRANDS = 4
_STAND_IN = "to have the configured pair answer for such names: localspec config set any_model true"


@dataclass
class State:
    """The parts of a running daemon. `stop` begins the drain, `configure` reads config.toml again."""

    paths: Paths
    supervisor: Supervisor
    registry: Registry
    conversations: Conversations
    stop: Callable[[], None]
    configure: Callable[[], Awaitable[None]]
    editors: Editors = field(default_factory=Editors)
    responses: Running = field(default_factory=Running)
    # Pairs that are looked at before a load: one that changed is hashed, which takes its time.
    looks: Shared[PairFiles] = field(default_factory=lambda: Shared(Threads("look", _LOOKS)))
    # What a person asked for and watches: files made pairs, verified, measured.
    errands: Threads = field(default_factory=lambda: Threads("errand", _ERRANDS))
    draining: bool = False
    embedding: int = 0  # requests for embeddings that run or wait
    tcp: TcpAuth | None = None  # where TCP is served
    tcp_problem: str = ""  # why it is not, though it is wanted
    unsaid: list[str] = field(default_factory=list)  # problems that no answer has mentioned yet
    started: float = field(default_factory=time.monotonic)

    @property
    def config(self) -> Config:
        """As it is in use now: an edit of the file replaces it."""
        return self.supervisor.residents.config

    async def pair(self, name: str, receive: Receive, role: names.Role = "chat") -> PairFiles:
        """The files of the pair that answers for this name: `named`, or that of the `role` where none has
        the name and the configuration says so (`any_model`).

        Raises:
            ClientGone: whoever asked, the client behind `receive`, has left meanwhile.
        """
        wanted = await self._in_role(name, role)
        try:
            return await self.named(wanted, receive)
        except ModelNotFound as error:
            if name in names.CONFIGURED:
                raise self._without_configured(role, wanted, error) from None
            if not isinstance(error, names.NoSuchPair):
                raise
            if not self.config.any_model:
                if from_our_client():
                    raise  # a person named a pair, and wants no other one
                if tcp.answers_tcp() and names.names_files(name):
                    raise  # in the one sentence that all paths get; see names.unseen
                # A new error, because the look and so this one may be shared.
                message = f"{error.message}; {_STAND_IN}"
                raise names.NoSuchPair(message, param=error.param) from None
        return await self.named(await self._in_role("", role), receive)

    def _without_configured(
        self, role: names.Role, name: str, error: ModelNotFound
    ) -> ModelNotFound:
        """Return the error that the configuration names a pair that is not here, with ways out."""
        key = f"pair_{role}" if role != "chat" and getattr(self.config, f"pair_{role}") else "pair"
        pair = getattr(self.config, key)
        hidden = tcp.answers_tcp() and names.names_files(pair)
        if hidden or pair == names.BUILTIN or name not in (*names.CONFIGURED, pair):
            return error
        which = "The configured pair" if key == "pair" else f"The pair that '{key}' configures"
        origin = self.config.origin.get(key, "")
        variable = origin if origin.startswith("LOCALSPEC_") else ""
        reset = f"unset {variable}" if variable else f"localspec config unset {key}"
        choose = "localspec use NAME" if key == "pair" else f"localspec config set {key} NAME"
        cure = f"To choose another: {choose}; to go back to the default: {reset}"
        if isinstance(error, names.NotPulled):
            what = f"'{pair}' is not pulled yet; run: localspec pull {pair}."
        elif isinstance(error, names.NoSuchPair):
            what = f"'{pair}' does not exist."
        else:
            what = f"cannot be used. {error.message}"
        kind = type(error)
        return kind(f"{which} {what} {cure}", param=error.param)

    async def _in_role(self, name: str, role: names.Role) -> str:
        """`name`; where it says nothing, that of whoever has the role. Raises ModelNotFound."""
        if role == "chat" or name not in names.CONFIGURED:
            return name
        return await asyncio.to_thread(names.in_role, role, self.config, self.registry)

    async def named(self, name: str, receive: Receive) -> PairFiles:
        """The files of a pair, checked unless it is loaded already; see pairs.resolve."""
        found = await self._found(name, receive)
        if self.registry.has_presets:
            found = await asyncio.to_thread(self.registry.preset, found)
        return found

    async def _found(self, name: str, receive: Receive) -> PairFiles:
        name = names.full_name(name, self.config)
        held = self.supervisor.residents.holds(name)
        if held or not names.needs_a_look(name):
            return held or names.resolve(name, self.config, self.registry)
        config = self.config
        look = self.looks.get(name, lambda left: names.resolve(name, config, self.registry, left))
        # One look for all who ask, so what each is told of it is decided here.
        with names.unseen() if names.names_files(name) else contextlib.nullcontext():
            return await unless_gone(receive, look)

    async def rest(self, name: str) -> None:
        """Unload the pair if it is loaded and nothing runs in it."""
        residents = self.supervisor.residents
        if residents.uses(name) and not residents.of(name).busy:
            await residents.unload({name})

    async def forget_states(self, name: str | None) -> None:
        """What the engine keeps of a conversation, with None of all.

        First the engine, which may be writing; then the files, of engines that are gone too.
        """
        await self.supervisor.residents.forget(name)
        await self.conversations.run(lambda each: each.remove_states(name))

    def news(self, pair: str) -> str:
        """What the next answer should mention, and no later one: to the owner alone, not over TCP."""
        said = self.registry.news(pair)
        if self.unsaid and not tcp.answers_tcp():
            still, self.unsaid = [each for each in self.unsaid if each in self.problems], []
            said = " ".join([*filter(None, [said]), *still])
        return said

    @property
    def problems(self) -> list[str]:
        """Sentences about what is wrong in files that people edit, and what that prevents."""
        said = [each.what for each in self.config.problems]
        return [each for each in (*said, self.tcp_problem, self.registry.problem) if each]


def state_of(request: Request) -> State:
    return cast(State, request.app.state.daemon)
