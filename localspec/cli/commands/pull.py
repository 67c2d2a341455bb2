"""`localspec pull` and `localspec pulls`: download pairs, and show or cancel what is being downloaded."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Iterator
from typing import Any

import click

from localspec.cli import suggest
from localspec.cli.app import Group, flag, json_option
from localspec.cli.terminal import pairs, render
from localspec.cli.terminal.progress import Progress
from localspec.client.pairs import PairsClient
from localspec.errors import LocalspecError, NoAnswer, NoDaemon, UsageError, error_from_code

_RUNNING_STATES = ("checking", "downloading", "verifying")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class _Rate(click.ParamType[int]):
    """A number of bytes per second, which may end with K, M or G (powers of 1024)."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([kmg]?)(?:i?b)?(?:/s)?", str(value).lower())
        rate = int(float(match[1]) * _UNITS[match[2]]) if match else 0
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
@flag("--no-draft", help="Use no draft model; draft from the text itself.")
@flag("--no-projector", help="Leave out the file by which the model reads pictures.")
@click.option("--name", "pair", metavar="NAME", help="Name for the pair.")
@click.option(
    "--limit-rate", type=_Rate(), metavar="RATE", help="Maximum bytes per second, e.g. 10M."
)
@flag("--no-wait", help="Return at once; see `localspec pulls`.")
@flag("--json", "as_json", help="Output progress as lines of JSON.")
def pull_command(
    names: tuple[str, ...],
    draft: str | None,
    no_draft: bool,
    no_projector: bool,
    pair: str | None,
    limit_rate: int | None,
    no_wait: bool,
    as_json: bool,
) -> int:
    if len(names) > 1 and (draft or pair):
        raise UsageError("--draft and --name can only be used when pulling one pair.")
    if draft and no_draft:
        raise UsageError("--draft and --no-draft cannot be used together.")
    pulls = _Pulls(names, as_json)
    parts = {"draft": draft, "no_draft": no_draft, "no_projector": no_projector}
    pulls.start(**parts, pair=pair, limit_rate=limit_rate or 0)
    if no_wait:
        pulls.print_started()
        return pulls.outcome()
    try:
        pulls.watch()
    except KeyboardInterrupt:
        for pair_name in pulls.waiting:
            render.error(
                f"The pull of {pair_name} continues in the daemon. To watch it: localspec pull {pair_name}; "
                f"to cancel it: localspec pulls cancel {pair_name}"
            )
        raise
    return pulls.outcome()


class _PullWatcher(threading.Thread):
    """A thread that collects the states of one pull until somebody iterates over them."""

    def __init__(self, client: PairsClient, pair_name: str) -> None:
        super().__init__(daemon=True)
        self._client, self._pair_name = client, pair_name
        self._states: queue.SimpleQueue[dict[str, Any] | Exception | None] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        try:
            for state in self._client.watch_pull(self._pair_name):
                self._states.put(state)
            self._states.put(None)
        except Exception as error:  # passed on to the thread that iterates over the states
            self._states.put(error)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while (state := self._states.get()) is not None:
            if isinstance(state, Exception):
                raise state
            yield state


class _Pulls:
    """The pulls of one command, which are all started and watched at once, and shown one after another."""

    def __init__(self, names: tuple[str, ...], as_json: bool) -> None:
        self._client, self._json = PairsClient(), as_json
        self._names = tuple(dict.fromkeys(names))
        self._states: dict[str, dict[str, Any]] = {}  # by the name on the command line
        self._failures: list[str] = []

    def start(self, **options: Any) -> None:
        for name in self._names:
            try:
                self._states[name] = self._client.start_pull(name, **options)
            except LocalspecError as error:
                self._fail(name, error)

    @property
    def waiting(self) -> list[str]:
        """The names of the pairs that are still being pulled, as far as is known."""
        states = self._states.values()
        return [state["name"] for state in states if state["state"] in _RUNNING_STATES]

    def print_started(self) -> None:
        for state in self._states.values():
            if self._json:
                render.record(state)
            else:
                render.line(f"Pulling {state['name']}; to see its progress: localspec pulls")

    def watch(self) -> None:
        self._client.autostart = False  # watching must not start what `stop` has ended
        pulls = self._states.items()
        watchers = {name: _PullWatcher(self._client, pull["name"]) for name, pull in pulls}
        for name, watcher in watchers.items():
            try:
                self._show(name, watcher)
                state = self._states[name]
                if state["state"] != "done":
                    raise error_from_code(state["code"], state["message"])
            except LocalspecError as error:
                self._fail(name, error)
                continue
            if not self._json:
                for note in state["notes"]:
                    render.line(f"note: {note}")
                roles = self._client.pair(state["name"])["roles"]
                pairs.print_installed(state["name"], state["size"], roles)

    def outcome(self) -> int:
        if self._failures:
            count = f"{len(self._failures)} of {len(self._names)}"
            render.error(f"{count} pulls failed: {', '.join(self._failures)}")
        return int(bool(self._failures))

    def _fail(self, name: str, error: LocalspecError) -> None:
        if len(self._names) == 1:
            raise error
        self._failures.append(name)
        render.error(f"{name}: {error.message}")

    def _show(self, name: str, watcher: _PullWatcher) -> None:
        choice_printed = forecast_printed = False
        with Progress(self._states[name]["name"]) as progress:
            for state in watcher:
                self._states[name] = state
                if self._json:
                    render.record(state)
                    continue
                if not choice_printed and (state["offers"] or state["said"]):
                    choice_printed = True
                    progress.clear()
                    _print_choice(name, state)
                if not forecast_printed and state.get("forecast"):
                    forecast_printed = True
                    progress.clear()
                    render.line(f"Forecast: {pairs.format_forecast(state['forecast'])}.")
                if state["state"] in _RUNNING_STATES:
                    done = state["hashed" if state["state"] == "verifying" else "done"]
                    sizes = done, state["size"], state["rate"], state["seconds_left"]
                    progress.show(state["state"], *sizes, waiting=state["retry"])


def _print_choice(name: str, state: dict[str, Any]) -> None:
    """Print which files were chosen, where the command line did not name them."""
    if state["offers"]:
        pairs.offers(name, state["offers"])
    for sentence in state["said"]:
        render.line(sentence)
    render.line(f"Pair name: {state['name']}")


@click.group(
    cls=Group,
    invoke_without_command=True,
    help="Show running and recent pulls, or cancel one. Pulls interrupted by stopping the "
    "daemon resume when it starts again.",
    epilog="Examples:\n\n\b\n  localspec pulls\n  localspec pulls cancel coder-7b",
)
@json_option
@click.pass_context
def pulls_command(context: click.Context, as_json: bool) -> None:
    if context.invoked_subcommand:
        return
    try:
        states = PairsClient(autostart=False).pulls()  # a list must not start what `stop` has ended
    except NoAnswer:
        raise
    except NoDaemon:
        states = []
        if not as_json:
            render.line(
                "No daemon is running, so nothing is pulled. What was interrupted goes on when it starts: "
                "localspec start"
            )
            return
    if as_json:
        render.record(states)
    elif states:
        pairs.pulls(states)
    else:
        render.line("No pulls are running. To start one: localspec pull NAME")


@pulls_command.command(
    help="Cancel a pull, or remove one that has ended from the list. What was downloaded is kept.",
    epilog="Example: localspec pulls cancel coder-7b",
)
@click.argument("name", shell_complete=suggest.pulls)
def cancel(name: str) -> None:
    state = PairsClient().cancel_pull(name)
    if ended := {"done": "is complete", "failed": "has failed"}.get(state["state"]):
        render.line(f"The pull of {state['name']} {ended}, and is no longer listed.")
    else:
        render.line(state["message"] or f"The pull of {state['name']} is {state['state']}.")
