"""The command line of `scripts/bench agents`: tokens read, by kind of model and by event."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from benchmarks.agents import sessions
from benchmarks.agents.ledger import Ledger, ratio
from benchmarks.agents.prompts import as_template_body
from benchmarks.agents.sessions import Request
from benchmarks.command import add_shared, positive, say
from benchmarks.measuring.report import Verdict, table, verdict_line
from benchmarks.measuring.runs import Setting
from benchmarks.servers.daemon import Daemon
from benchmarks.servers.llama_server import Running, Server
from benchmarks.synthetic import Shape, target_cycle
from benchmarks.synthetic_targets import TargetArchitecture, write_target
from localspec.engine.pair.models import physical_cores
from localspec.errors import LocalspecError
from localspec.paths import default_paths

LIMIT = 1.05  # tokens read for each that is new or stands behind a change
ANSWER_TOKENS = 4
MAX_DIFFERENCE = 0.02  # of the tokens of a prompt, between the daemon's count and ours
LIMITS = {"max_tokens", "max_completion_tokens", "max_output_tokens"}
SHAPE = Shape(n_layer=4, n_embd=256, n_ff=512, n_head=4, n_vocab=32_000, n_ctx=65_536, code=True)
KINDS: Mapping[str, TargetArchitecture] = {
    "dense": "llama",
    "window": "gpt-oss",
    "hybrid": "qwen35",
}
UNLOAD = None  # in a list of requests: the pair is unloaded, as by a restart or for another pair
Steps = Sequence[Request | None]
SCENARIOS: dict[str, Callable[[], Sequence[Steps]]] = {
    "each": lambda: list(sessions.recorded().values()),
    "turns": lambda: [sessions.in_turns(list(sessions.recorded().values()))],
    "helpers": lambda: [sessions.returning_helpers(name, 8) for name in ("claude", "opencode")],
    "edited": lambda: [sessions.edited_first_message()],
    "reminder": lambda: [sessions.moving_reminder()],
    "unloaded": lambda: [_unloaded(session) for session in sessions.recorded().values()],
}
DESCRIPTION = f"""What the target reads of coding agents' requests, and what is new or stands behind a change.

Recorded requests of Claude Code, Codex, opencode and pi are sent to a daemon of the benchmark's own.
Scenarios: each agent alone; all in turns; helpers that come back; an edited first message; a reminder that
moves; and each agent with an unload in the middle ({", ".join(SCENARIOS)})."""


def main(arguments: list[str]) -> int:
    """Print the report; 1 where more was read than may be."""
    options = _parser().parse_args(arguments)
    try:
        if unknown := {*options.scenarios} - {*SCENARIOS}:
            raise LocalspecError(
                f"There is no scenario '{min(unknown)}'; they are {', '.join(SCENARIOS)}."
            )
        ledgers = {
            (kind, name): _measure(options, target, name)
            for kind, target in _targets(options).items()
            for name in options.scenarios or SCENARIOS
        }
    except (LocalspecError, OSError) as error:
        sys.stderr.write(f"localspec: {error}\n")
        return 1
    verdicts = [
        Verdict(f"tokens read / new, {kind}, {name}", ratio(ours.rows), LIMIT, at_least=False)
        for (kind, name), (ours, _) in ledgers.items()
    ]
    sys.stdout.write(_report(ledgers) + "\n" + "".join(map(verdict_line, verdicts)))
    if options.json is not None:
        facts = {
            f"{kind} {name}": [[asdict(row) for row in ledger.rows] for ledger in both if ledger]
            for (kind, name), both in ledgers.items()
        }
        options.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return 0 if all(verdict.holds for verdict in verdicts) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "scripts/bench agents",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("scenarios", nargs="*", metavar="SCENARIO", help="what is sent (all of them)")
    add("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS], help="of synthetic targets (all)")
    add("--model", type=Path, metavar="FILE", help="this GGUF, not synthetic targets")
    add("--context", type=positive, default=49_152, help="tokens (49152)")
    add("--parallel", type=positive, default=4, help="slots (4)")
    add("--memory", type=int, default=1024, help="MiB for prefixes (1024)")
    add_shared(parser)
    return parser


def _targets(options: argparse.Namespace) -> dict[str, Path]:
    """Return the targets by what they are called in the report."""
    if options.model is not None:
        return {options.model.stem: options.model.absolute()}
    work = Path(options.work or default_paths().cache / "bench").absolute() / "agents"
    work.mkdir(parents=True, exist_ok=True)
    targets = {}
    for kind in options.kinds:
        targets[kind] = work / f"{kind}.gguf"
        if not targets[kind].exists():
            part = work / f"{kind}.part"
            write_target(part, SHAPE, target_cycle(SHAPE.n_vocab), KINDS[kind])
            part.rename(targets[kind])
    return targets


def _unloaded(session: Sequence[Request]) -> Steps:
    """Return a session in the middle of which the pair is unloaded."""
    middle = len(session) // 2
    return [*session[:middle], UNLOAD, *session[middle:]]


def _measure(
    options: argparse.Namespace, target: Path, scenario: str
) -> tuple[Ledger, Ledger | None]:
    """Send a scenario's sessions, each to a daemon of its own, and perhaps to llama-server."""
    say(f"{target.stem}: {scenario}")
    ours, theirs = Ledger(), Ledger() if options.llama_server else None
    for steps in SCENARIOS[scenario]():
        daemon = Daemon(
            pair=target,
            context=options.context,
            parallel=options.parallel,
            threads=options.threads or physical_cores(),
            prefix_memory=options.memory,
        )
        with daemon:
            prompts = [_send(daemon, ours, step) for step in steps]
        if theirs is not None:
            _send_to_llama_server(options, target, theirs, steps, prompts)
        for ledger in filter(None, (ours, theirs)):
            ledger.forget_texts()
    return ours, theirs


def _send(daemon: Daemon, ledger: Ledger, request: Request | None) -> list[int]:
    """Send a request, book it, and return the tokens of its prompt."""
    if request is UNLOAD:
        daemon.post("/localspec/unload", {})
        return []
    text = daemon.post("/apply-template", as_template_body(request))["prompt"]
    body = {"content": text, "add_special": False, "parse_special": True}
    tokens: list[int] = daemon.post("/tokenize", body)["tokens"]
    answer = daemon.post(request.path, {**_limited(request), "model": "", "temperature": 0})
    total, cached = _usage(answer["usage"])
    # The daemon reads a text in pieces, so that nobody's text becomes a marker of the template.
    if abs(total - len(tokens)) > MAX_DIFFERENCE * total:
        raise LocalspecError(f"A prompt has {total} tokens, and its template {len(tokens)}.")
    ledger.add(request.agent, request.event, tokens, [], total - cached)
    return tokens


def _limited(request: Request) -> dict[str, Any]:
    """Return the body of a request, whose answer may have a few tokens only."""
    body = {k: v for k, v in request.body.items() if k not in LIMITS}
    limit = "max_output_tokens" if request.path.endswith("/responses") else "max_tokens"
    return {**body, limit: ANSWER_TOKENS}


def _usage(usage: Mapping[str, Any]) -> tuple[int, int]:
    """Return the tokens of a prompt, and those that were cached, in any protocol's words."""
    if "cache_read_input_tokens" in usage:
        cached = int(usage["cache_read_input_tokens"])
        return int(usage["input_tokens"]) + cached, cached
    for total, details in (
        ("prompt_tokens", "prompt_tokens_details"),
        ("input_tokens", "input_tokens_details"),
    ):
        if total in usage:
            return int(usage[total]), int((usage.get(details) or {}).get("cached_tokens", 0))
    raise LocalspecError(f"An answer does not say what was read: {usage}")


def _send_to_llama_server(
    options: argparse.Namespace,
    target: Path,
    ledger: Ledger,
    steps: Steps,
    prompts: Sequence[list[int]],
) -> None:
    """Send the same prompts to a llama-server with its own defaults; an unload restarts it."""
    server = Server(
        options.llama_server.absolute(),
        target,
        None,
        options.context,
        options.threads or physical_cores(),
        parallel=options.parallel,
        extra=("--cache-ram", "8192", "--kv-unified"),
    )
    pairs = list(zip(steps, prompts, strict=True))
    ends = [at for at, step in enumerate(steps) if step is UNLOAD]
    for start, end in zip([0, *(at + 1 for at in ends)], [*ends, len(pairs)], strict=True):
        with Running(server, Setting(0, server=True)) as running:
            for request, tokens in pairs[start:end]:
                answer = running.post(
                    "/completion", {"prompt": tokens, "n_predict": ANSWER_TOKENS, "temperature": 0}
                )
                request = cast("Request", request)
                read = int(answer["timings"]["prompt_n"])
                ledger.add(request.agent, request.event, tokens, [], read)


def _report(ledgers: Mapping[tuple[str, str], tuple[Ledger, Ledger | None]]) -> str:
    """Return a table with a row per target, scenario and event."""
    header = ["target, scenario, event", "requests", "new", "read", "×", "llama-server read", "×"]
    rows = []
    for (kind, name), (ours, theirs) in ledgers.items():
        others = theirs.totals() if theirs is not None else {}
        for event, (new, read) in ours.totals().items():
            count = sum(row.event is event for row in ours.rows)
            known = others.get(event)
            rows.append(
                [
                    f"{kind}, {name}, {event}",
                    *map(str, (count, new, read)),
                    f"{read / max(new, 1):.3f}",
                    str(known[1]) if known else "",
                    f"{known[1] / max(new, 1):.3f}" if known else "",
                ]
            )
    return f"# Agents\n\n{table(header, rows)}"
