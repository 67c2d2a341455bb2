"""Start pulls, verify pairs and measure drafts for requests. Blocks, so call it in a thread."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from localspec.daemon.http.sse import rate_limited
from localspec.daemon.worker.table import PairTable
from localspec.errors import Conflict, InvalidRequest, LocalspecError, NetworkSettings, Unavailable
from localspec.protocol import frames
from localspec.protocol.frames import PairFiles
from localspec.protocol.pairs import DraftKind, DraftView, Network, PullRequest, Verifying
from localspec.protocol.settings import DrafterKind
from localspec.registry.disk.drafts import Trial
from localspec.registry.header.model import read_local_model
from localspec.registry.hub.offline import check_online, find_endpoint, is_hub_url
from localspec.registry.pulls.running import Pull
from localspec.registry.pulls.targets import PullTarget, is_cached, resolve_target
from localspec.registry.registry import Registry
from localspec.registry.store import integrity, local
from localspec.registry.store.store import Record, explain_own_pair


def start_pull(registry: Registry, request: PullRequest, *, whole_disk: bool = True) -> Pull:
    """Start a pull or join the running one.

    With `whole_disk` False, no draft is searched for among the files of other programs.

    Raises:
        ModelNotFound: The pair is not in the catalogue.
        Offline: The network may not be used, but is needed.
        NetworkSettings: A variable of the network cannot be used.
        InvalidRequest: The endpoint is not an address, or the name is not a repository.
        Conflict: Another pair or another pull has the name.
    """
    registry.refuse_reserved(request.name)
    environment = pull_environment(request)
    endpoint = (request.endpoint or find_endpoint(environment)).rstrip("/")
    if not is_hub_url(endpoint):
        raise InvalidRequest(
            "The hub's endpoint (HF_ENDPOINT) must begin with http:// or https://.",
            param="endpoint",
        )
    target = None
    if not (request.draft or request.no_draft or request.no_projector or request.pair):
        target = registry.pulls.find_target(request.name.strip().lower())
    target = target or _new_target(registry, request, endpoint, whole_disk)
    if not is_cached(target, environment):
        check_online(environment)
    return registry.pulls.start(target, environment, endpoint=endpoint, token=request.token or "")


def pull_environment(request: PullRequest) -> dict[str, str]:
    """Return the variables of a pull's process.

    They are those of this process, but where the request has the network settings of a client's shell, these
    stand in place of this process's own.

    Raises:
        NetworkSettings: A variable contains an unprintable character.
    """
    environment = dict(os.environ)
    names = {*Network.__struct_encode_fields__}
    if request.network is not None:
        for name in (*names, "HUGGING_FACE_HUB_TOKEN"):
            environment.pop(name, None)
            environment.pop(name.lower(), None)
        stated = msgspec.to_builtins(request.network)
        environment |= {name: value for name, value in stated.items() if value is not None}
    if request.offline:
        environment["HF_HUB_OFFLINE"] = "1"
    # With it huggingface_hub would log in as the daemon's service.
    environment.pop("HF_OIDC_RESOURCE", None)
    environment["HF_TOKEN"] = "".join(environment.get("HF_TOKEN", "").split())
    for name, value in environment.items():
        if name.upper() in names and not value.strip().isprintable():
            raise NetworkSettings(f"{name} contains an unprintable character; correct it.")
    return environment


def _new_target(
    registry: Registry, request: PullRequest, endpoint: str, whole_disk: bool
) -> PullTarget:
    """Return the target of a request, under a name that is not taken."""
    target = resolve_target(
        request,
        registry.catalogue,
        registry.readable_record,
        registry.store.part_path,
        endpoint=endpoint,
        whole_disk=whole_disk,
    )
    registry.refuse_reserved(target.name)
    record = registry.readable_record(target.name)
    if record and record.source == "own":
        raise Conflict(explain_own_pair(target.name))
    if record and record.asked != target.asked:
        raise Conflict(
            f"A pair '{target.name}' already exists; it was pulled as "
            f"{record.asked or record.name}, not as {target.described}. Choose another name (--name "
            f"NAME), or run: localspec rm {target.name}"
        )
    return target


def verify_pair(registry: Registry, pair: str | PairFiles, report: Report) -> Verifying:
    """Hash every file of a pair in the store, or files that belong to no pair, and report the progress.

    Raises:
        ModelNotFound: There is no such pair.
        InvalidRequest: It is the built-in pair.
        BadGguf, UnsafeModel, NotMatched, CannotRollBack: Own files cannot be used as they are now.
    """
    if pair == "builtin":
        raise InvalidRequest(
            "The pair 'builtin' is part of the installation; only pulled pairs have checksums."
        )
    if isinstance(pair, PairFiles):
        draft = Path(pair.draft) if pair.draft else None
        record = local.make_record(pair.name, Path(pair.target), draft)
    else:
        record = registry.installed(pair)
        progress = _progress_reporter(record, report)
        record = registry.refresh(record.name, progress=progress)
    progress = _progress_reporter(record, report)
    progress(0, record.size)
    if isinstance(pair, PairFiles):
        reports, news = integrity.verify_files(record, progress), ""
        cure = "Download it again with the program it belongs to."
    else:
        reports = integrity.verify(registry.store, record.name, progress)
        news, cure = registry.take_notice(record.name), integrity.describe_remedy(record)
    damaged = any(file.problem for file in reports)
    return Verifying(record.name, record.size, record.size, reports, cure if damaged else "", news)


def _progress_reporter(record: Record, report: Report) -> Callable[[int, int], None]:
    """Return a function that reports the bytes hashed, at a limited rate."""
    limited_report = rate_limited(report)
    return lambda done, size: limited_report(Verifying(record.name, done, size))


# Beginnings of typical texts: code, prose, a list, data, an answer, a diff. How often drafts are accepted
# depends on the kind of text, so a single one says little.
PROMPTS = (
    "def read_lines(path):\n",
    "The history of the steam engine begins",
    "Ten things to check before you travel:\n1.",
    '{"users": [{"name": "Ada", "mail": "',
    "Question: How do I list the files of a folder in Python?\nAnswer:",
    "diff --git a/main.py b/main.py\n--- a/main.py\n+++ b/main.py\n",
)
TOKENS_PER_PROMPT = 64  # generated for each prompt
TRIAL_DEPTH = 4  # draft tokens per round; the best depth is computed afterwards
TIME_LIMIT_S = 60.0  # no further prompt is started after this time, except for the second
_GREEDY = frames.Sampling(temperature=0.0, ignore_eos=True)


Report = Callable[[Verifying], None]
# The field `kind` of requests for each kind of draft.
_DRAFTER_KINDS: dict[DraftKind, DrafterKind] = {
    "model": "draft", "mtp-embedded": "mtp", "mtp-sidecar": "mtp", "eagle3": "eagle3",
    "dflash": "dflash", "dspark": "dflash",
}  # fmt: skip


class Interrupted(Exception):
    """Another request needs the engine, so measuring ends."""


class DraftTrials:
    """A function that measures what drafts are worth: it loads them and counts the accepted tokens.

    It is created in the event loop and called from a thread.
    """

    def __init__(self, pairs: PairTable) -> None:
        """Prepare to measure. Raises Conflict while the engine is busy, as the figures would be wrong."""
        if pairs.busy:
            raise Conflict("The engine is busy; measure when it is idle.")
        self._pairs = pairs
        self._loop = asyncio.get_running_loop()
        self._measured = ""

    def __call__(self, target: Path, draft: DraftView) -> Trial:
        """Measure the target with this draft.

        Raises Interrupted if another request needs the engine, and LocalspecError if this draft cannot be
        used.
        """
        files = frames.PairFiles(f"{target},{draft.path}", str(target))
        block = 0
        if draft.kind != "mtp-embedded":
            files.draft = draft.path
            block = read_local_model(Path(draft.path), as_draft=True).block_drafts
        measured = self._measure(files, _DRAFTER_KINDS[draft.kind])
        trial = asyncio.run_coroutine_threadsafe(measured, self._loop).result()
        return replace(trial, block=block)

    def end(self) -> None:
        """Unload the pair that was measured last, unless it is in use."""
        asyncio.run_coroutine_threadsafe(self._release(), self._loop).result()

    async def _measure(self, files: frames.PairFiles, kind: DrafterKind) -> Trial:
        await self._release()  # frees the memory of the pair before
        self._measured = files.name
        texts: list[tuple[int, int]] = []
        costs = frames.PassCosts({}, {}, 0.0)
        deadline = self._loop.time() + TIME_LIMIT_S
        for prompt in PROMPTS:
            if len(texts) >= 2 and self._loop.time() > deadline:
                break
            if self._pairs.busy:
                raise Interrupted
            request = frames.Generate(
                0,
                frames.TextPrompt(prompt),
                sampling=_GREEDY,
                max_tokens=TOKENS_PER_PROMPT,
                speculative=frames.SpeculationSettings(depth=TRIAL_DEPTH, kind=kind),
                cache_prompt=False,
            )
            try:
                done = await self._pairs.generate(files, request)
            except LocalspecError as error:
                # Some of its subclasses mean that this draft cannot be loaded. Unavailable itself does not.
                if type(error) is Unavailable:
                    raise Interrupted from error
                raise
            texts.append(count_verified(done))
            info = self._pairs.info(files.name)
            if info is None or info.costs is None or not info.costs.draft_ms:
                reason = (info and info.speculation) or done.speculation.reason
                raise LocalspecError(
                    f"It could not be measured: {reason or 'no draft was loaded'}."
                )
            costs = info.costs
        return Trial(texts, costs.target_ms, costs.draft_ms, costs.overhead_ms)

    async def _release(self) -> None:
        pair = self._pairs.get(self._measured)
        if self._measured and not pair.busy:
            await pair.unload()


def count_verified(done: frames.Done) -> tuple[int, int]:
    """Return how many draft tokens were verified, and how many of them were accepted.

    In `accepts[n]` rounds n tokens were accepted. Each of these rounds verified one more token, the rejected
    one, unless it had accepted all that it drafted.
    """
    rounds_without_draft = done.depths[0] if done.depths else 0
    rejections = max(0, sum(done.accepts[:TRIAL_DEPTH]) - rounds_without_draft)
    accepted_tokens = sum(count * rounds for count, rounds in enumerate(done.accepts))
    return accepted_tokens + rejections, accepted_tokens
