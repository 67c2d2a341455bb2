"""How pairs, files and drafts look in a terminal; plain columns, the same in a pipe."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from localspec.cli.terminal import render

_KINDS = {
    "model": "model",
    "mtp-embedded": "MTP heads",
    "mtp-sidecar": "MTP heads",
    "ngram": "n-gram",
    "none": "",
    "upstream": "there",
}
_DRAFTS = {
    "model": "a draft model",
    "mtp-embedded": "the MTP heads in the target's file",
    "mtp-sidecar": "the MTP heads in the draft's file",
    "ngram": "from the text itself (n-gram)",
    "none": "",
    "upstream": "what the server has",
}
_OWN = {"mtp-embedded": " with its own MTP heads", "none": "", "upstream": ""}
_POOLINGS = {
    "mean": "the mean of its tokens",
    "cls": "its first token",
    "last": "its last token",
}
_LICENCE = 120  # characters of a licence; some files hold all of it
_FITS = {"yes": "yes", "partly": "partly", "no": "no", None: ""}


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit != "MiB" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def span(seconds: float) -> str:
    """Seconds for people, rounded up so that it is rarely longer."""
    whole = int(seconds) + 1
    if whole < 90:
        return f"{whole} s"
    if whole < 90 * 60:
        return f"{whole // 60 + 1} min"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def pairs(entries: list[dict[str, Any]], configured: str = "") -> None:
    """Print the installed pairs, the `configured` one with a mark."""
    rows = [["NAME", "SIZE", "FOR", "DESCRIPTION"]]
    for each in entries:
        what = f"{each['summary'] or _files(each)}{_loaded(each)}"
        mark = "(see below) " if each["problem"] else ""
        name = _marked(each["name"], configured)
        rows.append([name, _size(each), ",".join(each["roles"]), f"{mark}{what}"])
    render.table(rows)
    for each in entries:
        if each["problem"]:
            render.line(f"{each['name']}: {each['problem']}")


def _loaded(each: dict[str, Any]) -> str:
    if not each["loaded"]:
        return ""
    takes = f", at most {size(each['takes'])}" if each.get("takes") else ""
    return f" (loaded{takes})"


def _marked(name: str, configured: str) -> str:
    return f"{name} *" if name == configured else name


def catalogue(entries: list[dict[str, Any]], configured: str = "") -> None:
    """Print what could be here, and whether this machine's memory holds it: what fits first, newest ahead."""
    rows = [["NAME", "YEAR", "SIZE", "MEMORY", "DRAFTS", "HERE?", "FITS?", "DESCRIPTION"]]
    order = {"yes": 0, "partly": 1}
    entries = sorted(entries, key=lambda each: (order.get(each["fits"], 2), -each["year"]))
    for each in entries:
        here = "yes" if each["here"] else ""
        memory = f"{each['memory']} GB" if each["memory"] not in ("", "cpu") else each["memory"]
        what = each["summary"] or _files(each)
        year, fits = str(each["year"] or ""), _FITS[each["fits"]]
        kind = _KINDS[each["kind"]]
        name = _marked(each["name"], configured)
        rows.append([name, year, _size(each), memory, kind, here, fits, what])
    render.table(rows)


def memory(listed: dict[str, Any]) -> str:
    """What FITS? was judged by."""
    gpu = f"{size(listed['vram'])} of GPU memory and " if listed["vram"] else ""
    return f"{gpu}{size(listed['ram'])} of memory free"


def _size(each: dict[str, Any]) -> str:
    if each["kind"] == "upstream":
        return "elsewhere"
    return "?" if each["size"] is None else size(each["size"])


def _files(each: dict[str, Any]) -> str:
    draft = f" with {each['draft']}" if each["draft"] else _OWN.get(each["kind"], ", no draft")
    return f"{each['target']}{draft}"


def pair(view: dict[str, Any]) -> None:
    """`localspec show`."""
    if view["kind"] == "upstream":
        _upstream(view)
        return
    rows = [
        ("pair", view["name"] + (" (loaded)" if view["loaded"] else "")),
        ("summary", view["summary"]),
        ("for", ", ".join(view["roles"])),
        ("licence", view["licence"]),
        ("files", view["problem"]),
    ]
    for role in ("target",) if view["kind"] == "none" else ("target", "draft"):
        rows += _model(role, view[role])
    rows.append(("tool calls", view["calls"]))
    rows.append(("tokenizers", _verdict(view)))
    rows += [("note", note) for note in view["notes"]]
    rows.append(("drafts", _DRAFTS[view["kind"]]))
    rows.append(("memory", f"{size(view['needed'])} with {view['context']} tokens of context"))
    if len(view["contexts"]) > 1:
        rows += [("", _context(each)) for each in view["contexts"]]
    rows.append(("here", _fit(view["fit"], view["kind"])))
    if view["fit"]:
        rows.append(("", plan(view["fit"])))
    rows += [("", note) for note in view["fit_notes"]]
    render.fields([(name, text) for name, text in rows if text])


def _upstream(view: dict[str, Any]) -> None:
    """A pair that another server answers for."""
    rows = [
        ("pair", view["name"]),
        ("summary", view["summary"]),
        ("for", ", ".join(view["roles"])),
        ("server", view["target"]["path"]),
        ("model", view["target"]["file"] or "the server's own"),
        *(("note", note) for note in view["notes"]),
    ]
    render.fields([(name, text) for name, text in rows if text])


def _model(role: str, model: dict[str, Any] | None) -> list[tuple[str, str]]:
    if model is None:
        return [(role, "none")]
    parameters = f"{model['parameters'] / 1e9:.2f} B parameters"
    if model["parameters"] < 1e8:
        parameters = f"{model['parameters'] / 1e6:.2f} M parameters"
    about = [
        f"{model['file']}, {size(model['size'])}, {_quantization(model)}",
        f"{model['architecture']}, {parameters}, {model['layers']} layers, vocabulary "
        f"{model['vocabulary']}, context {model['context']}",
        _abilities(model),
        f"weights {size(model['weights'])}, KV cache {size(model['cache'])}, compute "
        f"{size(model['compute'])}",
    ]
    origin = f"{model['repo']} at {model['revision'][:12]}" if model["repo"] else model["path"]
    if model["licence"]:
        about.append(f"licence {_short(model['licence'])}")
    return [(role if at == 0 else "", text) for at, text in enumerate((*about, origin))]


def _quantization(model: dict[str, Any]) -> str:
    """As in "Q4_K_M (Q4_K 75 %, Q6_K 25 %)"."""
    whole = sum(model["types"].values()) or 1
    shares = {name: round(100 * count / whole) for name, count in model["types"].items()}
    mix = ", ".join(f"{name} {share}%" for name, share in shares.items() if share)
    return f"{model['quantization']} ({mix})"


def _abilities(model: dict[str, Any]) -> str:
    """What it can be asked for, by its file."""
    if model["pooling"] == "rank":
        return "reranker: a score for each document"
    if model["pooling"]:
        size, pooling = model["width"], _POOLINGS[model["pooling"]]
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


def _short(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= _LICENCE else f"{line[:_LICENCE]}…"


def _context(each: dict[str, Any]) -> str:
    fits = {"yes": "", "partly": ", partly on the GPU", "no": ", does not fit"}[each["fits"]]
    return f"{size(each['needed'])} with {each['context']}{fits}"


def _verdict(view: dict[str, Any]) -> str:
    if view["matched"] is None:
        return ""
    return "match" if view["matched"] else f"differ: {view['reason']}"


def _fit(fit: dict[str, Any] | None, kind: str) -> str:
    if fit is None:
        return "does not fit"
    layers = {-1: "all on the GPU", 0: "in main memory"}.get(
        fit["gpu_layers"], f"{fit['gpu_layers']} layers on the GPU"
    )
    draft = "" if fit["draft"] or kind in _OWN else ", without a draft"
    return (
        f"fits with {fit['context']} tokens of context, {layers}{draft} ({size(fit['free'])} free)"
    )


def plan(fit: dict[str, Any]) -> str:
    """What a loaded pair's memory goes to."""
    ours, theirs = fit["target"], fit["drafting"]
    parts = [
        f"{size(ours[each] + theirs[each])} {name}"
        for each, name in (("weights", "weights"), ("cache", "KV cache"), ("compute", "buffers"))
    ]
    if fit["prefixes"]:
        parts.append(f"up to {size(fit['prefixes'])} for cached prompts")
    return f"{size(fit['needed'])} in all: {', '.join(parts)}"


def first_use(name: str, roles: Sequence[str]) -> str:
    """What a person does with a pair that is new."""
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


def add_line(name: str, target: str, draft: str | None) -> str:
    """The command that makes such a pair, as a shell takes it."""
    words = ["localspec", "add", name, "--target", target, *(["--draft", draft] if draft else [])]
    return render.harmless(shlex.join(words), lines=False)


def drafts(found: dict[str, Any]) -> None:
    """Those that match as a table, then why the others do not."""
    possible = [each for each in found["drafts"] if each["matched"]]
    if not possible:
        render.line("No draft model on this disk matches the target.")
    elif any(each["gain"] for each in possible):
        rows = [["DRAFT", "SIZE", "ACCEPTED", "SPEED-UP", "AT DEPTH", "WHERE"]]
        for each in possible:
            rows.append([each["name"], size(each["size"]), *_gain(each["gain"]), each["origin"]])
        render.table(rows)
        render.line(f"The target alone: {found['plain']:.1f} tokens/s.")
        for each, before in zip(possible[1:], possible, strict=False):
            if each["tied"]:
                render.line(
                    f"{before['name']} and {each['name']} are equally fast within the measurement error."
                )
    else:
        rows = [["DRAFT", "SIZE", "TARGET IS", "WHERE"]]
        for each in possible:
            rows.append([each["name"], size(each["size"]), f"{each['ratio']:.1f}×", each["origin"]])
        render.table(rows)
        render.line("To measure the speed-up of each: add --measure")
    if possible:
        render.line("\nTo create a pair with one of them:")
    for each in possible:
        render.line(f"  {add_line(found['pair'], found['file'], each['file'])}")
    for each in found["drafts"]:
        if not each["matched"]:
            render.line(f"cannot use {each['name']} ({each['origin']}): {each['reason']}")


def _gain(gain: dict[str, Any] | None) -> tuple[str, str, str]:
    if gain is None:
        return "", "not measured", ""
    low, high = gain["acceptance_low"], gain["acceptance_high"]
    accepted = f"{gain['acceptance']:.0%} ({low:.0%} to {high:.0%})"
    speed_up = f"{gain['speed_up']:.2f}× ({gain['low']:.2f} to {gain['high']:.2f})"
    if gain["speed_up"] < 1:
        speed_up += ", slower"
    return accepted, speed_up, str(gain["depth"])


def retrying(retry: dict[str, Any]) -> str:
    """That a request is tried again, when, and why."""
    when = f"{retry['seconds']:.0f} s" if retry["seconds"] >= 1 else "a moment"
    return f"retrying in {when}: {retry['cause']} (attempt {retry['attempt']} of {retry['tries']})"


def pulls(states: list[dict[str, Any]]) -> None:
    rows = [["PAIR", "STATE", "DONE", "SIZE", "RATE", "LEFT"]]
    for each in states:
        done = each["hashed" if each["state"] == "verifying" else "done"]
        share = f"{100 * done // each['size']}%" if each["size"] else ""
        rate = f"{size(each['rate'])}/s" if each["rate"] else ""
        left = span(each["seconds_left"]) if each["seconds_left"] else ""
        whole = size(each["size"]) if each["size"] else ""
        rows.append([each["name"], each["state"], share, whole, rate, left])
    render.table(rows)
    for each in states:
        if each["message"]:
            render.line(f"{each['name']}: {each['message']}")
        elif each["retry"]:
            render.line(f"{each['name']}: {retrying(each['retry'])}")


def offers(repository: str, found: list[dict[str, Any]]) -> None:
    """The quantizations of a repository, where none was named."""
    rows = [["QUANTIZATION", "SIZE", "FITS?", ""]]
    for each in found:
        taken = "taken" if each["taken"] else ""
        rows.append([each["quant"], size(each["size"]), _FITS[each["fits"]], taken])
    render.table(rows)
    if len(found) > 1:
        render.line(f"To choose another: localspec pull {repository}:QUANTIZATION")


def problems(listed: dict[str, Any]) -> None:
    """Files that could not be read: beside the list, not in it."""
    for problem in listed["problems"]:
        render.error(problem)
