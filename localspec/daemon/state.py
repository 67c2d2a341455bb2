"""The state that all handlers share."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from starlette.requests import Request
from starlette.types import Receive

from localspec.config import Config, explain_unread_variables
from localspec.daemon.completion.agents import AgentSessions
from localspec.daemon.completion.files import Converter
from localspec.daemon.completion.llama_server import Editors
from localspec.daemon.history.store import ConversationStore
from localspec.daemon.http import tcp
from localspec.daemon.http.recordings import Recordings
from localspec.daemon.http.requests import from_our_client, read_shell_variables, while_connected
from localspec.daemon.http.tcp import TcpAuth
from localspec.daemon.logs import SharedWork, ThreadPool
from localspec.daemon.pairs import names
from localspec.daemon.worker.table import PairTable
from localspec.errors import ModelNotFound
from localspec.paths import Paths
from localspec.protocol.frames import Generate, PairFiles
from localspec.registry.registry import BUILTIN, NoSuchPair, NotPulled, Registry, is_file_name

_CHECK_THREADS = 8  # pairs that are checked at once
_LONG_WORK_THREADS = 4
_ANY_MODEL_HINT = (
    "to have the configured pair answer for such names: localspec config set any_model true"
)


Part = TypeVar("Part")


@dataclass
class DaemonState:
    """The parts of a running daemon. `stop` begins the drain, `configure` reads config.toml again."""

    paths: Paths
    pairs: PairTable
    registry: Registry
    conversations: ConversationStore
    stop: Callable[[], None]
    configure: Callable[[], Awaitable[None]]
    editors: Editors = field(default_factory=Editors)
    agents: AgentSessions = field(default_factory=AgentSessions)
    converter: Converter = field(default_factory=Converter)
    # The chats that are being answered: by the id of the answer, its pair and its requests.
    running_chats: dict[str, tuple[PairFiles, Sequence[Generate]]] = field(default_factory=dict)
    recordings: Recordings = field(default_factory=Recordings)  # streams that can be resumed
    # What extras keep while the daemon runs, by its type; see `part`.
    parts: dict[type, Any] = field(default_factory=dict)
    # Checks of pairs before a load. A file that has changed is hashed, which may take minutes.
    pair_checks: SharedWork[PairFiles] = field(
        default_factory=lambda: SharedWork(ThreadPool("pair check", _CHECK_THREADS))
    )
    # Long work that a person requested: adding, verifying and measuring pairs.
    long_work: ThreadPool = field(
        default_factory=lambda: ThreadPool("long work", _LONG_WORK_THREADS)
    )
    draining: bool = False
    n_embedding_requests: int = 0  # running and waiting requests for embeddings
    tcp: TcpAuth | None = None  # set while TCP is served
    tcp_problem: str = ""  # why TCP is not served although it is configured
    # Problems that no answer has mentioned yet.
    unreported_problems: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def part(self, kind: type[Part]) -> Part:
        """Return the daemon's only `kind`, made without arguments when it is first needed."""
        if kind not in self.parts:
            self.parts[kind] = kind()
        part: Part = self.parts[kind]
        return part

    @property
    def config(self) -> Config:
        """The configuration in use. A change of the file replaces it."""
        return self.pairs.config

    async def resolve_pair(
        self, name: str, receive: Receive, role: names.Role = "chat"
    ) -> PairFiles:
        """Return the files of the pair that answers for this name.

        That is the pair `name`, or the pair of the `role` if no pair has that name and the configuration
        allows that (`any_model`). Raises ClientGone if the client behind `receive` left meanwhile.
        """
        resolved_name = await self._in_role(name, role)
        try:
            return await self.resolve_named(resolved_name, receive)
        except ModelNotFound as error:
            if name in names.DEFAULT_NAMES:
                raise self._without_configured(role, resolved_name, error) from None
            if not isinstance(error, NoSuchPair):
                raise
            if not self.config.any_model:
                if from_our_client():
                    raise  # the hint is for other programs: a person wants the pair that was named
                if tcp.is_tcp_request() and is_file_name(name):
                    raise  # without the hint: all paths get one message, see names.hidden_file_errors
                # A new error, because several requests may share the check and its error.
                message = f"{error.message}; {_ANY_MODEL_HINT}"
                raise NoSuchPair(message, param=error.param) from None
        return await self.resolve_named(await self._in_role("", role), receive)

    def _without_configured(
        self, role: names.Role, name: str, error: ModelNotFound
    ) -> ModelNotFound:
        """Return the error that a configured pair does not exist here, with ways out."""
        key = f"pair_{role}" if role != "chat" and getattr(self.config, f"pair_{role}") else "pair"
        pair = getattr(self.config, key)
        hidden = tcp.is_tcp_request() and is_file_name(pair)
        if hidden or pair == BUILTIN or name not in (*names.DEFAULT_NAMES, pair):
            return error
        subject = "The configured pair" if key == "pair" else f"The pair that '{key}' configures"
        origin = self.config.origin.get(key, "")
        variable = origin if origin.startswith("LOCALSPEC_") else ""
        reset = f"unset {variable}" if variable else f"localspec config unset {key}"
        choose = "localspec use NAME" if key == "pair" else f"localspec config set {key} NAME"
        cure = f"To choose another: {choose}; to go back to the default: {reset}"
        if isinstance(error, NotPulled):
            predicate = f"'{pair}' is not pulled yet; run: localspec pull {pair}."
        elif isinstance(error, NoSuchPair):
            predicate = f"'{pair}' does not exist."
        else:
            predicate = f"cannot be used. {error.message}"
        error_class = type(error)
        return error_class(f"{subject} {predicate} {cure}", param=error.param)

    async def _in_role(self, name: str, role: names.Role) -> str:
        """Return `name`, or if it is empty the name of the pair with the role. Raises ModelNotFound."""
        if role == "chat" or name not in names.DEFAULT_NAMES:
            return name
        return await asyncio.to_thread(names.pair_of_role, role, self.config, self.registry)

    async def resolve_named(self, name: str, receive: Receive) -> PairFiles:
        """Return the files of a pair, checked unless it is loaded already; see `Registry.resolve`."""
        name, resolve = names.resolve_default(name, self.config), self.registry.resolve
        files = self.pairs.loaded_files(name)
        if name == BUILTIN and not files:
            files = resolve(name)
        elif not files or self._is_retired(files.draft):
            check = self.pair_checks.get(name, lambda cancelled: resolve(name, cancelled))
            # Requests share one check, so errors are hidden here for each request that came over TCP.
            is_file = is_file_name(name)
            with names.hidden_file_errors() if is_file else contextlib.nullcontext():
                files = await while_connected(receive, check)
        if self.registry.has_presets:
            files = await asyncio.to_thread(self.registry.apply_preset, files)
        return files

    async def unload_if_idle(self, name: str) -> None:
        """Unload the pair if it is loaded and nothing runs in it."""
        if self.pairs.is_loaded_or_loading(name) and not self.pairs.get(name).busy:
            await self.pairs.unload({name})

    async def forget_states(self, name: str | None) -> None:
        """Remove the saved states and recorded streams of a conversation, or of all with None.

        The engine comes first, because it may be writing. Then follow the files, also of old engines.
        """
        self.recordings.forget(name)
        self.agents.beginnings.clear()
        await self.pairs.forget(name)
        await self.conversations.run(lambda store: store.remove_states(name))
        await self.unload_retired_drafts()

    async def unload_retired_drafts(self) -> None:
        """Unload the idle pairs whose draft has been deleted. A busy one is reloaded by its next request."""
        for pair in self.pairs.loaded:
            if pair.files and self._is_retired(pair.files.draft):
                await self.unload_if_idle(pair.name)

    def _is_retired(self, draft: str | None) -> bool:
        """Return whether this is a tuned draft that has been deleted."""
        return (
            draft is not None
            and Path(draft).is_relative_to(self.paths.tuned)
            and not Path(draft).exists()
        )

    def take_notice(self, pair: str) -> str:
        """Return what only the next answer should mention. Clients over TCP get no problems of the files."""
        notices = [self.registry.take_notice(pair)]
        if not tcp.is_tcp_request():
            notices += explain_unread_variables(read_shell_variables())
            problems, self.unreported_problems = self.unreported_problems, []
            notices += [text for text in problems if text in self.problems]
        return " ".join(filter(None, notices))

    @property
    def problems(self) -> list[str]:
        """Sentences about errors in files that people edit, and their consequences."""
        problems = [problem.sentence for problem in self.config.problems]
        return [text for text in (*problems, self.tcp_problem, self.registry.problem) if text]


def state_of(request: Request) -> DaemonState:
    return cast(DaemonState, request.app.state.daemon)
