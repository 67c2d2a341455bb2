"""`localspec launch`: start a coding agent with this daemon and a pair, and change no file for it."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
import sys
from contextlib import closing, suppress
from functools import partial
from typing import Any

import click

from localspec.cli import inputs, options
from localspec.cli.commands.ask import click_option
from localspec.cli.terminal import progress, render
from localspec.client.pairs import PairsClient
from localspec.errors import LocalspecError
from localspec.extras.launch import bridge
from localspec.extras.launch.agents import AGENTS, TOKEN_VARIABLE, Agent, Endpoint

_LISTEN = "127.0.0.1:8012"
_TOKEN_COMMAND = "$(localspec token)"


def _run(name: str | None, words: tuple[str, ...], only_print: bool, **values: Any) -> int:
    missing = {key: f"npm install -g {agent.package}" for key, agent in AGENTS.items()}
    if name is None:
        programs = [shutil.which(key) or f"not installed: {missing[key]}" for key in AGENTS]
        render.table([("name", "program"), *zip(AGENTS, programs, strict=True)])
        return 0
    agent, program = AGENTS[name], shutil.which(name)
    if not program and not only_print:
        raise LocalspecError(f"{agent.title} is not on the PATH; to install it: {missing[name]}")
    client = PairsClient()
    pair = inputs.resolve_query(options.AskOptions(**values)).model
    view = client.pair(inputs.resolve_pair(pair) if pair else "default")
    context = check_pair(agent, view)
    if only_print:
        token, url = _TOKEN_COMMAND, client.status()["listen"]
        if not url:
            render.note(f"It needs TCP, which is off: localspec config set listen {_LISTEN}")
    else:
        with progress.spinning(client, "loading"), closing(client.load(view["name"])) as states:
            *_, state = states
        context = state["n_ctx"] or context
        size = f"{context:,} tokens" if context else "unknown size"
        render.note(f"{agent.title} uses {view['name']}, with a context of {size}.")
        token = secrets.token_hex()
        url = bridge.start(client.socket_path, token, partial(_announce, name, view["name"]))
    endpoint = Endpoint(url or f"http://{_LISTEN}", token, view["name"], context)
    variables, arguments = agent.launch(endpoint)
    hosts = os.environ.get("NO_PROXY") or os.environ.get("no_proxy")
    without_proxy = f"{hosts},127.0.0.1" if hosts else "127.0.0.1"
    variables |= {TOKEN_VARIABLE: token, "NO_PROXY": without_proxy, "no_proxy": without_proxy}
    command = [name, *arguments, *words]
    if only_print:
        for key, value in variables.items():  # the shell that reads them fetches the token
            quoted = f'"{value}"' if value == _TOKEN_COMMAND else shlex.quote(value)
            render.verbatim(f"export {key}={quoted}")
        render.verbatim(f"# {shlex.join(command)}")
        return 0
    sys.stdout.flush()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and so would the agent
        signal.signal(number, signal.SIG_DFL)
    return os.execve(str(program), command, {**os.environ, **variables})


def _announce(agent: str, pair: str) -> None:
    """Say whose requests come from this process. The daemon reads how that agent's sessions begin."""
    chat = {"model": pair, "messages": [{"role": "user", "content": ""}]}
    with suppress(LocalspecError):  # no session was seen, or somebody waits
        PairsClient(autostart=False).chat({**chat, "localspec": {"ahead": True, "agent": agent}})


def check_pair(agent: Agent, view: dict[str, Any]) -> int:
    """Return the context that a pair will have, in tokens; 0 if it is unknown.

    Raises LocalspecError if the agent cannot work with the pair.
    """
    name, target, needed = view["name"], view["target"], agent.min_context
    remedy = "To choose another pair: -m PAIR. To find one: localspec catalogue"
    if view["kind"] == "upstream":
        return 0
    if not (template := target["template"]):
        raise LocalspecError(f"{name} has no chat template, which an agent needs. {remedy}")
    context: int = (view["fit"] or view)["context"]
    if context < needed:
        if target["context"] >= needed:
            remedy = f"To enlarge it: localspec config set context {needed}"
        what = f"{agent.title} needs {needed:,} for its instructions and a small job"
        raise LocalspecError(f"{name} has a context of {context:,} tokens, and {what}. {remedy}")
    if not template["tools"]:
        render.note(f"{name} was not trained to call tools, so it may use none.")
    return context


_PRINT_HELP = "Only print the variables for a shell, and the command."
launch_command = click.Command(
    "launch",
    callback=_run,
    params=[
        click.Argument(["name"], required=False, type=click.Choice(list(AGENTS))),
        click.Argument(["words"], nargs=-1, metavar="[-- ARGS...]"),
        *map(click_option, options.select_options("model", "query")),
        click.Option(["--print", "only_print"], is_flag=True, help=_PRINT_HELP),
    ],
    help="Start a coding agent, with ARGS of its own, that uses this daemon. Its environment and arguments "
    "have all it needs; no file is changed. Without a name, list the agents.",
    epilog="Examples:\n\n\b\n  localspec launch\n  localspec launch claude\n"
    '  localspec launch codex -m coder-7b -- exec "Add a test"\n  localspec launch pi --print',
)
