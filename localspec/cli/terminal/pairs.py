"""Print pairs, files, drafts and pulls as plain columns, the same on a terminal and in a pipe."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from typing import Any

from localspec.cli.terminal import render
from localspec.cli.terminal.figures import format_about, format_time
from localspec.files import format_size

# What drafts for a pair: a word for columns, and a description.
_DRAFTS = {
    "model": ("model", "a draft model"),
    "mtp-embedded": ("MTP heads", "the MTP heads in the target's file"),
    "mtp-sidecar": ("MTP heads", "the MTP heads in the draft's file"),
    "eagle3": ("EAGLE-3", "an EAGLE-3 draft, which reads layers of the target"),
    "dflash": ("DFlash", "a DFlash draft, which reads layers of the target"),
    "dspark": ("DSpark", "a DSpark draft, which reads layers of the target"),
    "ngram": ("n-gram", "from the text itself (n-gram)"),
    "none": ("", ""),
    "upstream": ("there", "what the server has"),
}
_TARGET_SUFFIXES = {"mtp-embedded": " with its own MTP heads", "none": "", "upstream": ""}
_POOLINGS = {"mean": "the mean of its tokens", "cls": "its first token", "last": "its last token"}
_FIT_NOTES = {"yes": "", "partly": ", partly on the GPU", "no": ", does not fit"}
_MAX_LICENCE_CHARS = 120  # shown of a licence; some files contain the full text


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
        memory = f", at most {format_size(entry['takes'])}" if entry.get("takes") else ""
        loaded = f" (loaded{memory})" if entry["loaded"] else ""
        mark = "(see below) " if entry["problem"] else ""
        description = f"{mark}{entry['summary'] or _format_files(entry)}{loaded}"
        name = _mark_configured(entry["name"], configured)
        rows.append([name, _format_size(entry), ",".join(entry["roles"]), description])
    render.table(rows)
    for entry in entries:
        if entry["problem"]:
            render.line(f"{entry['name']}: {entry['problem']}")


def _mark_configured(name: str, configured: str) -> str:
    return f"{name} *" if name == configured else name


def catalogue_rows(entries: list[dict[str, Any]], configured: str = "") -> list[list[str]]:
    """Return the pairs that can be pulled, whether they fit into memory and how fast they should be.

    Fitting and new ones come first.
    """
    rows = [
        ["NAME", "YEAR", "SIZE", "MEMORY", "DRAFTS", "HERE?", "FITS?", "TOKENS/S", "DESCRIPTION"]
    ]
    order = {"yes": 0, "partly": 1}
    for entry in sorted(entries, key=lambda entry: (order.get(entry["fits"], 2), -entry["year"])):
        memory = entry["memory"] if entry["memory"] in ("", "cpu") else f"{entry['memory']} GB"
        name = _mark_configured(entry["name"], configured)
        rows.append([name, str(entry["year"] or ""), _format_size(entry), memory])
        rows[-1] += [_DRAFTS[entry["kind"]][0], "yes" if entry["here"] else ""]
        rate = format_forecast(entry.get("forecast"), short=True)
        texts = [entry["summary"] or _format_files(entry), entry.get("advice", "")]
        rows[-1] += [entry["fits"] or "", rate, "; ".join(filter(None, texts))]
    return rows


def format_forecast(forecast: dict[str, Any] | None, *, short: bool = False) -> str:
    """Return what is expected of a pair, or "" if that cannot be told. short: of writing alone."""
    if not forecast:
        return ""
    plain, drafted, reading = forecast["plain"], forecast["drafted"], forecast["reading"]
    if short:
        return f"{format_about(plain['low'])} to {format_about((drafted or plain)['high'])}"
    parts = [f"{_format_interval(plain)} tokens/s without drafts"]
    if drafted:
        known = forecast["acceptance"].items()
        accepted = ", ".join(f"{kind} {share:.0%}" for kind, share in known)
        accepted = f"accepted: {accepted}" if accepted else "how many are accepted is unknown"
        parts.append(f"{_format_interval(drafted)} with drafts ({accepted})")
    if reading:
        parts.append(f"reads {_format_interval(reading)}")
    count = forecast["loads"]
    origin = (
        f"learned from {count} model{'s' * (count != 1)} loaded here" if count else "assumed speeds"
    )
    return f"{', '.join(parts)}; {origin}"


def _format_interval(rate: dict[str, Any]) -> str:
    bounds = f"{format_about(rate['low'])} to {format_about(rate['high'])}"
    return f"about {format_about(rate['likely'])} ({bounds})" if rate["likely"] else bounds


def format_memory(listed: dict[str, Any]) -> str:
    """Return the free memory by which the column FITS? was computed."""
    gpu = f"{format_size(listed['vram'])} of GPU memory and " if listed["vram"] else ""
    return f"{gpu}{format_size(listed['ram'])} of memory free"


def _format_size(entry: dict[str, Any]) -> str:
    if entry["kind"] == "upstream":
        return "elsewhere"
    return "?" if entry["size"] is None else format_size(entry["size"])


def _format_files(entry: dict[str, Any]) -> str:
    draft = f" with {entry['draft']}" if entry["draft"] else ""
    return f"{entry['target']}{draft or _TARGET_SUFFIXES.get(entry['kind'], ', no draft')}"


def pair(view: dict[str, Any]) -> None:
    """Print the output of `localspec show`."""
    is_upstream = view["kind"] == "upstream"
    loaded = " (loaded)" if view["loaded"] and not is_upstream else ""
    rows = [("pair", f"{view['name']}{loaded}"), ("summary", view["summary"])]
    rows.append(("for", ", ".join(view["roles"])))
    if is_upstream:
        rows.append(("server", view["target"]["path"]))
        rows.append(("model", view["target"]["file"] or "the server's own"))
        rows += [("note", note) for note in view["notes"]]
    else:
        rows += _rows_of_files(view)
    render.fields([(name, text) for name, text in rows if text])


def _rows_of_files(view: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("licence", view["licence"]), ("files", view["problem"])]
    for role in ("target",) if view["kind"] == "none" else ("target", "draft"):
        rows += _model_rows(role, view[role])
    if projector := view.get("projector"):
        rows.append(("pictures", f"{projector['file']} ({format_size(projector['size'])})"))
    rows.append(("tool calls", view["calls"]))
    if view["matched"] is not None:
        rows.append(("tokenizers", "match" if view["matched"] else f"differ: {view['reason']}"))
    rows += [("note", note) for note in view["notes"]]
    rows.append(("drafts", _DRAFTS[view["kind"]][1]))
    rows += format_tuned(view["tuned"]) if view.get("tuned") else []
    memory = f"{format_size(view['needed'])} with {view['context']} tokens of context"
    rows.append(("memory", memory))
    if len(view["contexts"]) > 1:
        for option in view["contexts"]:
            needed = f"{format_size(option['needed'])} with {option['context']}"
            rows.append(("", needed + _FIT_NOTES[option["fits"]]))
    rows.append(("here", _format_fit(view["fit"], view["kind"])))
    if view["fit"]:
        rows.append(("", format_plan(view["fit"])))
    unknown = "unknown" if view["fit"] else ""
    rows.append(("forecast", format_forecast(view.get("forecast")) or unknown))
    return rows + [("", note) for note in view["fit_notes"]]


def format_tuned(tuned: dict[str, Any]) -> list[tuple[str, str]]:
    """Return rows about a tuned draft: since when it is used, and its figures beside the pair's own draft."""
    origin = f"{tuned['method']}, from {tuned['tokens']} tokens of answers"
    rows = [("tuned", f"since {format_time(tuned['created'])}: {origin}")]
    for kind, rate in sorted(tuned["tokens_per_second"].items()):
        text = f"{kind}: {rate['before']:.1f} → {rate['after']:.1f} tokens/s"
        if tokens := tuned["tokens_per_pass"].get(kind):
            text += f", {tokens['before']:.2f} → {tokens['after']:.2f} tokens per pass"
        rows.append(("", text))
    return rows


def _model_rows(role: str, model: dict[str, Any] | None) -> list[tuple[str, str]]:
    if model is None:
        return [(role, "none")]
    count, sizes = model["parameters"], model["types"]
    parameters = f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.2f} M"
    shares = {name: round(100 * size / (sum(sizes.values()) or 1)) for name, size in sizes.items()}
    mix = ", ".join(f"{name} {share}%" for name, share in shares.items() if share)
    lines = [
        f"{model['file']}, {format_size(model['size'])}, {model['quantization']} ({mix})",
        f"{model['architecture']}, {parameters} parameters, {model['layers']} layers, vocabulary "
        f"{model['vocabulary']}, context {model['context']}",
        _describe_abilities(model),
        f"weights {format_size(model['weights'])}, KV cache {format_size(model['cache'])}, compute "
        f"{format_size(model['compute'])}",
    ]
    if model["licence"]:
        licence = model["licence"].strip().partition("\n")[0]
        is_long = len(licence) > _MAX_LICENCE_CHARS
        lines.append(f"licence {licence[:_MAX_LICENCE_CHARS]}{'…' * is_long}")
    lines.append(f"{model['repo']} at {model['revision'][:12]}" if model["repo"] else model["path"])
    return list(zip([role, *[""] * len(lines)], lines, strict=False))


def _describe_abilities(model: dict[str, Any]) -> str:
    """Return what requests a model supports, according to its file."""
    if model["pooling"] == "rank":
        return "reranker: a score for each document"
    if model["pooling"]:
        pooling = _POOLINGS[model["pooling"]]
        return f"embeddings of {model['width']} numbers, of a text {pooling}"
    template, fills = model["template"], "supports" if model["fim"] else "no"
    heads = f", {model['heads']} MTP layers" if model["heads"] else ""
    others = f"{fills} fill-in-the-middle (FIM){heads}"
    if template is None:
        return f"no chat template, {others}"
    tools, system = "with" if template["tools"] else "without", "a" if template["system"] else "no"
    return (
        f"chat template of {template['length']} characters ({template['sha256'][:12]}…), "
        f"{tools} tools, {system} system role, {others}"
    )


def _format_fit(fit: dict[str, Any] | None, kind: str) -> str:
    if fit is None:
        return "does not fit"
    some = f"{fit['gpu_layers']} layers on the GPU"
    layers = {-1: "all on the GPU", 0: "in main memory"}.get(fit["gpu_layers"], some)
    if fit["cpu_moe_layers"]:
        layers += f" but the experts of the first {fit['cpu_moe_layers']}"
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


def print_installed(name: str, size: int, roles: Sequence[str]) -> None:
    """Print that a pair was installed, and what to do with it."""
    render.line(f"{name} is installed ({format_size(size)}). {format_first_use(name, roles)}")


def disk(report: dict[str, Any]) -> None:
    """Print the models on a disk, why some cannot be used, and the commands that create pairs from them."""
    usable = [model for model in report["models"] if not model["problem"]]
    uses = Counter(draft for model in usable for draft in model["drafts"])
    rows = [["MODEL", "SIZE", "DRAFTS", "DRAFTS FOR", "WHERE"]]
    for model in usable:
        drafts_text = count(len(model["drafts"]), "draft")
        targets_text = count(uses[model["path"]], "target")
        size = format_size(model["size"])
        rows.append([model["name"], size, drafts_text, targets_text, model["origin"]])
    if usable:
        render.table(rows)
    else:
        render.line("No models found. To search other folders: localspec import FOLDER")
    for model in report["models"]:
        if model["problem"]:
            message = f"cannot use {model['name']} ({model['origin']}): {model['problem']}"
            render.line(render.harmless(message, lines=False))
    problems(report)
    if report["pairs"]:
        render.line("\nTo create pairs from them (or use --add):")
        for each in report["pairs"]:
            render.line(f"  {format_add_command(each['name'], each['target'], each['draft'])}")


def count(number: int, noun: str) -> str:
    """Return a number with its noun, as in "2 drafts", or "-"."""
    return f"{number} {noun}{'s' if number > 1 else ''}" if number else "-"


def format_add_command(name: str, target: str, draft: str | None) -> str:
    """Return the command that creates a pair of these files, quoted for a shell."""
    words = ["localspec", "add", name, "--target", target, *(["--draft", draft] if draft else [])]
    return render.harmless(shlex.join(words), lines=False)


def drafts(report: dict[str, Any]) -> None:
    """Print the drafts that match as a table, then why the others do not match."""
    matching = [draft for draft in report["drafts"] if draft["matched"]]
    measured = [draft for draft in matching if draft["gain"]]
    heads = ["ACCEPTED", "SPEED-UP", "AT DEPTH"] if measured else ["TARGET IS", "TOKENS/S"]
    rows = [["DRAFT", "KIND", "SIZE", *heads, "WHERE"]]
    for draft in matching:
        rate = format_forecast(draft.get("forecast"), short=True)
        figures = _format_gain(draft["gain"]) if measured else [f"{draft['ratio']:.1f}×", rate]
        label, size = _DRAFTS[draft["kind"]][0], format_size(draft["size"])
        rows.append([draft["name"], label, size, *figures, draft["origin"]])
    if not matching:
        render.line("Nothing on this disk can draft for the target but its text itself (n-gram).")
    else:
        render.table(rows)
    if measured:
        render.line(f"The target alone: {report['plain']:.1f} tokens/s.")
        for draft, faster in zip(matching[1:], matching, strict=False):
            if draft["tied"]:
                names = f"{faster['name']} and {draft['name']}"
                render.line(f"{names} are equally fast within the measurement error.")
        if measured[0]["gain"]["speed_up"] <= 1:
            render.line("None of them pays, so drafts come from the text itself (n-gram).")
    elif matching:
        render.line("To measure the speed-up of each: add --measure")
    if matching:
        render.line("\nTo create a pair with one of them:")
    for draft in matching:
        render.line(f"  {format_add_command(report['pair'], report['file'], draft['file'])}")
    for draft in report["drafts"]:
        if not draft["matched"]:
            render.line(f"cannot use {draft['name']} ({draft['origin']}): {draft['reason']}")


def _format_gain(gain: dict[str, Any] | None) -> list[str]:
    if gain is None:
        return ["", "not measured", ""]
    low, high = gain["acceptance_low"], gain["acceptance_high"]
    accepted = f"{gain['acceptance']:.0%} ({low:.0%} to {high:.0%})"
    speed_up = f"{gain['speed_up']:.2f}× ({gain['low']:.2f} to {gain['high']:.2f})"
    return [accepted, speed_up + ", slower" * (gain["speed_up"] < 1), str(gain["depth"])]


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
        rows.append([entry["quant"], format_size(entry["size"]), entry["fits"] or "", chosen])
    render.table(rows)
    if len(quantizations) > 1:
        render.line(f"To choose another: localspec pull {repository}:QUANTIZATION")


def problems(listed: dict[str, Any]) -> None:
    """Print files that could not be read, on stderr and not in the list."""
    for problem in listed["problems"]:
        render.error(problem)
