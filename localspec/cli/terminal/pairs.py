"""Print pairs, files, drafts and pulls as plain columns, the same on a terminal and in a pipe."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from localspec.cli.terminal import render
from localspec.cli.terminal.figures import format_time
from localspec.files import format_size

_DRAFT_LABELS = {
    "model": "model",
    "mtp-embedded": "MTP heads",
    "mtp-sidecar": "MTP heads",
    "eagle3": "EAGLE-3",
    "dflash": "DFlash",
    "dspark": "DSpark",
    "ngram": "n-gram",
    "none": "",
    "upstream": "there",
}
_DRAFT_DESCRIPTIONS = {
    "model": "a draft model",
    "mtp-embedded": "the MTP heads in the target's file",
    "mtp-sidecar": "the MTP heads in the draft's file",
    "eagle3": "an EAGLE-3 draft, which reads layers of the target",
    "dflash": "a DFlash draft, which reads layers of the target",
    "dspark": "a DSpark draft, which reads layers of the target",
    "ngram": "from the text itself (n-gram)",
    "none": "",
    "upstream": "what the server has",
}
_TARGET_SUFFIXES = {"mtp-embedded": " with its own MTP heads", "none": "", "upstream": ""}
_POOLING_DESCRIPTIONS = {
    "mean": "the mean of its tokens",
    "cls": "its first token",
    "last": "its last token",
}
_MAX_LICENCE_CHARS = 120  # shown of a licence; some files contain the full text
_FITS_LABELS = {"yes": "yes", "partly": "partly", "no": "no", None: ""}


def format_span(seconds: float) -> str:
    """Return a time in seconds in a readable form, rounded up so that it is rarely exceeded."""
    rounded = int(seconds) + 1
    if rounded < 90:
        return f"{rounded} s"
    if rounded < 90 * 60:
        return f"{rounded // 60 + 1} min"
    return f"{rounded // 3600} h {rounded % 3600 // 60:02} min"


def pairs(entries: list[dict[str, Any]], configured: str = "") -> None:
    """Print the installed pairs, the `configured` one with a mark."""
    rows = [["NAME", "SIZE", "FOR", "DESCRIPTION"]]
    for entry in entries:
        description = f"{entry['summary'] or _format_files(entry)}{_format_loaded(entry)}"
        mark = "(see below) " if entry["problem"] else ""
        name = _mark_configured(entry["name"], configured)
        rows.append([name, _format_size(entry), ",".join(entry["roles"]), f"{mark}{description}"])
    render.table(rows)
    for entry in entries:
        if entry["problem"]:
            render.line(f"{entry['name']}: {entry['problem']}")


def _format_loaded(entry: dict[str, Any]) -> str:
    if not entry["loaded"]:
        return ""
    memory_text = f", at most {format_size(entry['takes'])}" if entry.get("takes") else ""
    return f" (loaded{memory_text})"


def _mark_configured(name: str, configured: str) -> str:
    return f"{name} *" if name == configured else name


def catalogue(entries: list[dict[str, Any]], configured: str = "") -> None:
    """Print the pairs that can be pulled and whether they fit into memory: fitting and new ones first."""
    rows = [["NAME", "YEAR", "SIZE", "MEMORY", "DRAFTS", "HERE?", "FITS?", "DESCRIPTION"]]
    order = {"yes": 0, "partly": 1}
    entries = sorted(entries, key=lambda entry: (order.get(entry["fits"], 2), -entry["year"]))
    for entry in entries:
        installed = "yes" if entry["here"] else ""
        memory = f"{entry['memory']} GB" if entry["memory"] not in ("", "cpu") else entry["memory"]
        description = entry["summary"] or _format_files(entry)
        year, fits = str(entry["year"] or ""), _FITS_LABELS[entry["fits"]]
        kind = _DRAFT_LABELS[entry["kind"]]
        name = _mark_configured(entry["name"], configured)
        rows.append([name, year, _format_size(entry), memory, kind, installed, fits, description])
    render.table(rows)


def format_memory(listed: dict[str, Any]) -> str:
    """Return the free memory by which the column FITS? was computed."""
    gpu = f"{format_size(listed['vram'])} of GPU memory and " if listed["vram"] else ""
    return f"{gpu}{format_size(listed['ram'])} of memory free"


def _format_size(entry: dict[str, Any]) -> str:
    if entry["kind"] == "upstream":
        return "elsewhere"
    return "?" if entry["size"] is None else format_size(entry["size"])


def _format_files(entry: dict[str, Any]) -> str:
    draft = (
        f" with {entry['draft']}"
        if entry["draft"]
        else _TARGET_SUFFIXES.get(entry["kind"], ", no draft")
    )
    return f"{entry['target']}{draft}"


def pair(view: dict[str, Any]) -> None:
    """Print the output of `localspec show`."""
    if view["kind"] == "upstream":
        _print_upstream(view)
        return
    rows = [
        ("pair", view["name"] + (" (loaded)" if view["loaded"] else "")),
        ("summary", view["summary"]),
        ("for", ", ".join(view["roles"])),
        ("licence", view["licence"]),
        ("files", view["problem"]),
    ]
    for role in ("target",) if view["kind"] == "none" else ("target", "draft"):
        rows += _model_rows(role, view[role])
    if projector := view.get("projector"):
        rows.append(("pictures", f"{projector['file']} ({format_size(projector['size'])})"))
    rows.append(("tool calls", view["calls"]))
    rows.append(("tokenizers", _format_match(view)))
    rows += [("note", note) for note in view["notes"]]
    rows.append(("drafts", _DRAFT_DESCRIPTIONS[view["kind"]]))
    if tuned := view.get("tuned"):
        rows += format_tuned(tuned)
    rows.append(
        ("memory", f"{format_size(view['needed'])} with {view['context']} tokens of context")
    )
    if len(view["contexts"]) > 1:
        rows += [("", _format_context(option)) for option in view["contexts"]]
    rows.append(("here", _format_fit(view["fit"], view["kind"])))
    if view["fit"]:
        rows.append(("", format_plan(view["fit"])))
    rows += [("", note) for note in view["fit_notes"]]
    render.fields([(name, text) for name, text in rows if text])


def format_tuned(tuned: dict[str, Any]) -> list[tuple[str, str]]:
    """Return rows about a tuned draft: since when it is used, and its figures beside the pair's own draft."""
    since = format_time(tuned["created"])
    rows = [
        ("tuned", f"since {since}: {tuned['method']}, from {tuned['tokens']} tokens of answers")
    ]
    for kind, rate in sorted(tuned["tokens_per_second"].items()):
        text = f"{kind}: {rate['before']:.1f} → {rate['after']:.1f} tokens/s"
        if tokens := tuned["tokens_per_pass"].get(kind):
            text += f", {tokens['before']:.2f} → {tokens['after']:.2f} tokens per pass"
        rows.append(("", text))
    return rows


def _print_upstream(view: dict[str, Any]) -> None:
    """Print a pair that another server answers for."""
    rows = [
        ("pair", view["name"]),
        ("summary", view["summary"]),
        ("for", ", ".join(view["roles"])),
        ("server", view["target"]["path"]),
        ("model", view["target"]["file"] or "the server's own"),
        *(("note", note) for note in view["notes"]),
    ]
    render.fields([(name, text) for name, text in rows if text])


def _model_rows(role: str, model: dict[str, Any] | None) -> list[tuple[str, str]]:
    if model is None:
        return [(role, "none")]
    parameters = f"{model['parameters'] / 1e9:.2f} B parameters"
    if model["parameters"] < 1e8:
        parameters = f"{model['parameters'] / 1e6:.2f} M parameters"
    lines = [
        f"{model['file']}, {format_size(model['size'])}, {_format_quantization(model)}",
        f"{model['architecture']}, {parameters}, {model['layers']} layers, vocabulary "
        f"{model['vocabulary']}, context {model['context']}",
        _describe_abilities(model),
        f"weights {format_size(model['weights'])}, KV cache {format_size(model['cache'])}, compute "
        f"{format_size(model['compute'])}",
    ]
    origin = f"{model['repo']} at {model['revision'][:12]}" if model["repo"] else model["path"]
    if model["licence"]:
        lines.append(f"licence {_shorten_licence(model['licence'])}")
    return [(role if index == 0 else "", text) for index, text in enumerate((*lines, origin))]


def _format_quantization(model: dict[str, Any]) -> str:
    """Return a quantization with its parts, as in "Q4_K_M (Q4_K 75%, Q6_K 25%)"."""
    total = sum(model["types"].values()) or 1
    shares = {name: round(100 * count / total) for name, count in model["types"].items()}
    mix = ", ".join(f"{name} {share}%" for name, share in shares.items() if share)
    return f"{model['quantization']} ({mix})"


def _describe_abilities(model: dict[str, Any]) -> str:
    """Return what requests a model supports, according to its file."""
    if model["pooling"] == "rank":
        return "reranker: a score for each document"
    if model["pooling"]:
        size, pooling = model["width"], _POOLING_DESCRIPTIONS[model["pooling"]]
        return f"embeddings of {size} numbers, of a text {pooling}"
    template = model["template"]
    fills = "supports fill-in-the-middle (FIM)" if model["fim"] else "no fill-in-the-middle (FIM)"
    heads = f", {model['heads']} MTP layers" if model["heads"] else ""
    if template is None:
        return f"no chat template, {fills}{heads}"
    tools = "with" if template["tools"] else "without"
    system = "a" if template["system"] else "no"
    return (
        f"chat template of {template['length']} characters ({template['sha256'][:12]}…), "
        f"{tools} tools, {system} system role, {fills}{heads}"
    )


def _shorten_licence(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= _MAX_LICENCE_CHARS else f"{line[:_MAX_LICENCE_CHARS]}…"


def _format_context(option: dict[str, Any]) -> str:
    fits = {"yes": "", "partly": ", partly on the GPU", "no": ", does not fit"}[option["fits"]]
    return f"{format_size(option['needed'])} with {option['context']}{fits}"


def _format_match(view: dict[str, Any]) -> str:
    if view["matched"] is None:
        return ""
    return "match" if view["matched"] else f"differ: {view['reason']}"


def _format_fit(fit: dict[str, Any] | None, kind: str) -> str:
    if fit is None:
        return "does not fit"
    layers = {-1: "all on the GPU", 0: "in main memory"}.get(
        fit["gpu_layers"], f"{fit['gpu_layers']} layers on the GPU"
    )
    draft = "" if fit["draft"] or kind in _TARGET_SUFFIXES else ", without a draft"
    return f"fits with {fit['context']} tokens of context, {layers}{draft} ({format_size(fit['free'])} free)"


def format_plan(fit: dict[str, Any]) -> str:
    """Return how the memory of a loaded pair is divided."""
    target, draft = fit["target"], fit["drafting"]
    parts = [
        f"{format_size(target[part] + draft[part])} {name}"
        for part, name in (("weights", "weights"), ("cache", "KV cache"), ("compute", "buffers"))
    ]
    if fit["prefixes"]:
        parts.append(f"up to {format_size(fit['prefixes'])} for cached prompts")
    return f"{format_size(fit['needed'])} in all: {', '.join(parts)}"


def format_first_use(name: str, roles: Sequence[str]) -> str:
    """Return what a person can do with a pair that was just installed."""
    if "rerank" in roles:
        return f'It ranks documents: POST /v1/rerank with "model": "{name}"'
    if "embed" in roles:
        return f"Try: localspec embed -m {name} FILE"
    if "text" in roles:
        return (
            "This is a base model: it completes text and cannot chat. "
            f'Try: localspec ask -m {name} "Once upon a time"'
        )
    return f'Try: localspec ask -m {name} "…"'


def format_add_command(name: str, target: str, draft: str | None) -> str:
    """Return the command that creates a pair of these files, quoted for a shell."""
    words = ["localspec", "add", name, "--target", target, *(["--draft", draft] if draft else [])]
    return render.harmless(shlex.join(words), lines=False)


def drafts(report: dict[str, Any]) -> None:
    """Print the drafts that match as a table, then why the others do not match."""
    matching = [draft for draft in report["drafts"] if draft["matched"]]
    measured = [draft for draft in matching if draft["gain"]]
    if not matching:
        render.line("Nothing on this disk can draft for the target but its text itself (n-gram).")
    elif measured:
        heads = ["DRAFT", "KIND", "SIZE", "ACCEPTED", "SPEED-UP", "AT DEPTH", "WHERE"]
        render.table(
            [heads, *(_draft_row(draft, *_format_gain(draft["gain"])) for draft in matching)]
        )
        render.line(f"The target alone: {report['plain']:.1f} tokens/s.")
        for draft, faster in zip(matching[1:], matching, strict=False):
            if draft["tied"]:
                render.line(
                    f"{faster['name']} and {draft['name']} are equally fast within the measurement error."
                )
        if measured[0]["gain"]["speed_up"] <= 1:
            render.line("None of them pays, so drafts come from the text itself (n-gram).")
    else:
        heads = ["DRAFT", "KIND", "SIZE", "TARGET IS", "WHERE"]
        render.table([heads, *(_draft_row(draft, f"{draft['ratio']:.1f}×") for draft in matching)])
        render.line("To measure the speed-up of each: add --measure")
    if matching:
        render.line("\nTo create a pair with one of them:")
    for draft in matching:
        render.line(f"  {format_add_command(report['pair'], report['file'], draft['file'])}")
    for draft in report["drafts"]:
        if not draft["matched"]:
            render.line(f"cannot use {draft['name']} ({draft['origin']}): {draft['reason']}")


def _draft_row(draft: dict[str, Any], *figures: str) -> list[str]:
    label, size = _DRAFT_LABELS[draft["kind"]], format_size(draft["size"])
    return [draft["name"], label, size, *figures, draft["origin"]]


def _format_gain(gain: dict[str, Any] | None) -> tuple[str, str, str]:
    if gain is None:
        return "", "not measured", ""
    low, high = gain["acceptance_low"], gain["acceptance_high"]
    accepted = f"{gain['acceptance']:.0%} ({low:.0%} to {high:.0%})"
    speed_up = f"{gain['speed_up']:.2f}× ({gain['low']:.2f} to {gain['high']:.2f})"
    if gain["speed_up"] < 1:
        speed_up += ", slower"
    return accepted, speed_up, str(gain["depth"])


def format_retry(retry: dict[str, Any]) -> str:
    """Return that a request is repeated, when and why."""
    when = f"{retry['seconds']:.0f} s" if retry["seconds"] >= 1 else "a moment"
    return f"retrying in {when}: {retry['cause']} (attempt {retry['attempt']} of {retry['tries']})"


def pulls(states: list[dict[str, Any]]) -> None:
    """Print pulls as a table."""
    rows = [["PAIR", "STATE", "DONE", "SIZE", "RATE", "LEFT"]]
    for state in states:
        done = state["hashed" if state["state"] == "verifying" else "done"]
        share = f"{100 * done // state['size']}%" if state["size"] else ""
        rate = f"{format_size(state['rate'])}/s" if state["rate"] else ""
        time_left = format_span(state["seconds_left"]) if state["seconds_left"] else ""
        total = format_size(state["size"]) if state["size"] else ""
        rows.append([state["name"], state["state"], share, total, rate, time_left])
    render.table(rows)
    for state in states:
        if state["message"]:
            render.line(f"{state['name']}: {state['message']}")
        elif state["retry"]:
            render.line(f"{state['name']}: {format_retry(state['retry'])}")


def offers(repository: str, quantizations: list[dict[str, Any]]) -> None:
    """Print the quantizations of a repository, for a pull that named none."""
    rows = [["QUANTIZATION", "SIZE", "FITS?", ""]]
    for entry in quantizations:
        chosen = "taken" if entry["taken"] else ""
        rows.append(
            [entry["quant"], format_size(entry["size"]), _FITS_LABELS[entry["fits"]], chosen]
        )
    render.table(rows)
    if len(quantizations) > 1:
        render.line(f"To choose another: localspec pull {repository}:QUANTIZATION")


def problems(listed: dict[str, Any]) -> None:
    """Print files that could not be read, on stderr and not in the list."""
    for problem in listed["problems"]:
        render.error(problem)
