"""`localspec pull`."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Iterator
from typing import Any

import click

from localspec.cli import suggest
from localspec.cli.terminal import pairs, render
from localspec.cli.terminal.pairs import size
from localspec.cli.terminal.progress import Progress
from localspec.client.pairs import PairsClient
from localspec.errors import LocalspecError, UsageError, from_code

INTERRUPTED = 130
_RUNNING = ("checking", "downloading", "verifying")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class _Rate(click.ParamType[int]):
    """Bytes per second, with K, M or G (of 1024) behind the number or without."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([kmg]?)(?:i?b)?(?:/s)?", str(value).lower())
        rate = int(float(found[1]) * _UNITS[found[2]]) if found else 0
        if not 0 < rate <= 1 << 40:
            self.fail("not a number of bytes per second, such as 500K, 10M or 1.5M", param, ctx)
        return rate


@click.command(
    help="Download pairs from the catalogue, or any model from the Hugging Face hub: "
    "OWNER/REPO, OWNER/REPO:QUANT, OWNER/REPO:FILE.gguf, or its URL. Files are checked "
    "before the download and verified after it. The pull continues in the daemon if you "
    "leave, and an interrupted pull resumes where it stopped.",
    epilog="Examples:\n\n\b\n  localspec pull coder-7b\n  localspec pull coder-14b --no-wait\n"
    "  localspec pull unsloth/Qwen3-4B-GGUF:Q4_K_M\n"
    "  localspec pull qwen3-8b --draft unsloth/Qwen3-0.6B-GGUF:Q8_0 --name mine",
)
@click.argument("names", nargs=-1, required=True, shell_complete=suggest.catalogue)
@click.option(
    "--draft", metavar="OWNER/REPO[:QUANT]", help="Draft model; by default, one is chosen."
)
@click.option("--no-draft", is_flag=True, help="Use no draft model; draft from the text itself.")
@click.option("--name", "pair", metavar="NAME", help="Name for the pair.")
@click.option(
    "--limit-rate", type=_Rate(), metavar="RATE", help="Maximum bytes per second, e.g. 10M."
)
@click.option("--no-wait", is_flag=True, help="Return at once; see `localspec pulls`.")
@click.option("--json", "as_json", is_flag=True, help="Output progress as lines of JSON.")
def command(
    names: tuple[str, ...],
    draft: str | None,
    no_draft: bool,
    pair: str | None,
    limit_rate: int | None,
    no_wait: bool,
    as_json: bool,
) -> int:
    if len(names) > 1 and (draft or pair):
        raise UsageError("--draft and --name can only be used when pulling one pair.")
    if draft and no_draft:
        raise UsageError("--draft and --no-draft cannot be used together.")
    options = {"draft": draft, "no_draft": no_draft, "pair": pair, "limit_rate": limit_rate or 0}
    pulls = _Pulls(PairsClient(), as_json)
    pulls.start(names, options)
    if no_wait:
        pulls.left()
        return pulls.outcome()
    try:
        pulls.watch()
    except KeyboardInterrupt:
        for own in pulls.waiting:
            render.error(
                f"The pull of {own} continues in the daemon. To watch it: localspec pull {own}; "
                f"to cancel it: localspec pulls cancel {own}"
            )
        return INTERRUPTED
    return pulls.outcome()


class _Watch(threading.Thread):
    """One pull's states, as they come: what a person sees of it may be later."""

    def __init__(self, client: PairsClient, own: str) -> None:
        super().__init__(daemon=True)
        self._client, self._own = client, own
        self._states: queue.SimpleQueue[dict[str, Any] | Exception | None] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        try:
            for state in self._client.watch_pull(self._own):
                self._states.put(state)
            self._states.put(None)
        except Exception as error:  # whoever waits for the next state must hear of it
            self._states.put(error)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Raises what the watching ended with."""
        while (state := self._states.get()) is not None:
            if isinstance(state, Exception):
                raise state
            yield state


class _Pulls:
    """The pulls of one command: all started and watched at once, and shown one after the other."""

    def __init__(self, client: PairsClient, as_json: bool) -> None:
        self._client, self._json = client, as_json
        self._named: tuple[str, ...] = ()
        self._states: dict[str, dict[str, Any]] = {}  # by what was named
        self._failures: dict[str, LocalspecError] = {}

    def start(self, names: tuple[str, ...], options: dict[str, Any]) -> None:
        self._named = tuple(dict.fromkeys(names))
        for name in self._named:
            try:
                self._states[name] = self._client.start_pull(name, **options)
            except LocalspecError as error:
                self._fail(name, error)

    @property
    def waiting(self) -> list[str]:
        """The pairs that are still being pulled, as far as is known."""
        running = [each for each in self._states.values() if each["state"] in _RUNNING]
        return [each["name"] for each in running]

    def left(self) -> None:
        for state in self._states.values():
            if self._json:
                render.record(state)
            else:
                render.line(f"Pulling {state['name']}; to see its progress: localspec pulls")

    def watch(self) -> None:
        watched = {name: _Watch(self._client, each["name"]) for name, each in self._states.items()}
        for name, states in watched.items():
            try:
                self._show(name, states)
                state = self._states[name]
                if state["state"] != "done":
                    raise from_code(state["code"], state["message"])
            except LocalspecError as error:
                self._fail(name, error)
                continue
            if not self._json:
                _welcome(state)

    def outcome(self) -> int:
        """Exit code; which failed is said at the end, where several were named."""
        if not self._failures:
            return 0
        count = len(self._failures)
        render.error(f"{count} of {len(self._named)} pulls failed: {', '.join(self._failures)}")
        return 1

    def _fail(self, name: str, error: LocalspecError) -> None:
        if len(self._named) == 1:
            raise error
        self._failures[name] = error
        render.error(f"{name}: {error.message}")

    def _show(self, name: str, states: _Watch) -> None:
        """The pull until its end."""
        own = self._states[name]["name"]
        shown = False
        with Progress(own) as progress:
            for state in states:
                self._states[name] = state
                if self._json:
                    render.record(state)
                    continue
                if not shown and (state["offers"] or state["said"]):
                    shown = True
                    progress.clear()
                    _decided(name, state)
                if state["state"] in _RUNNING:
                    progress.show(
                        state["state"],
                        state["hashed" if state["state"] == "verifying" else "done"],
                        state["size"],
                        state["rate"],
                        state["seconds_left"],
                        waiting=state["retry"],
                    )


def _decided(name: str, state: dict[str, Any]) -> None:
    """What was chosen where nothing was named."""
    if state["offers"]:
        pairs.offers(name, state["offers"])
    for sentence in state["said"]:
        render.line(sentence)
    render.line(f"Pair name: {state['name']}")


def _welcome(state: dict[str, Any]) -> None:
    for note in state["notes"]:
        render.line(f"note: {note}")
    name = state["name"]
    told = pairs.first_use(name, PairsClient().pair(name)["roles"])
    render.line(f"{name} is installed ({size(state['size'])}). {told}")
