"""`localspec list`."""

from __future__ import annotations

import sys
from typing import Any

import click

from localspec.cli import inputs, settings, suggest
from localspec.cli.app import NumberOption, require_consent, yes_option
from localspec.cli.terminal import pairs, progress, render
from localspec.cli.terminal.pairs import format_add_command, format_first_use
from localspec.cli.terminal.progress import Progress
from localspec.client.pairs import PairsClient
from localspec.errors import LocalspecError, NoDaemon, UsageError
from localspec.files import format_size


@click.command(
    help="List installed pairs; * marks the one that answers where none is named (`localspec use`).",
    epilog="Examples:\n\n\b\n  localspec list\n  localspec list --all",
)
@click.option("-a", "--all", "everything", is_flag=True, help="Also list pairs available to pull.")
@click.option(
    "--disk", is_flag=True, help="List models of other programs, like `localspec import`."
)
@click.option("--json", "as_json", is_flag=True, help="Output one line of JSON.")
def list_command(everything: bool, disk: bool, as_json: bool) -> int:
    if disk:
        report = look(())
        (render.record if as_json else show)(report)
        return 0
    listed = PairsClient().pairs(everything=everything)
    if as_json:
        render.record(listed)
        return 0
    (pairs.catalogue if everything else pairs.pairs)(listed["pairs"], listed.get("configured", ""))
    pairs.problems(listed)
    return 0


# ------------------------------------------------------------------------ show
# `localspec show`.


@click.command(
    help="Show a pair: its models, whether they match, and the memory they need.",
    epilog="Examples:\n\n\b\n  localspec show builtin\n  localspec show coder-7b --context 16384\n"
    "  localspec show coder-7b --template",
)
@click.argument("name", shell_complete=suggest.pairs)
@click.option(
    "--context",
    cls=NumberOption,
    type=click.IntRange(min=0),
    metavar="TOKENS",
    default=0,
    help="Compute memory for this many tokens of context.",
)
@click.option("--template", is_flag=True, help="Print only the target's chat template.")
@click.option("--json", "as_json", is_flag=True, help="Output one line of JSON.")
def show_command(name: str, context: int, template: bool, as_json: bool) -> int:
    view = PairsClient().pair(inputs.resolve_pair(name), context)
    if template:
        chat_template = view["target"]["template"]
        if chat_template is None and view["kind"] == "upstream":
            render.error(f"The chat template of '{view['name']}' is on its server.")
            return 1
        if chat_template is None:
            render.error(f"{view['target']['file']} has no chat template.")
            return 1
        render.verbatim(chat_template["text"].removesuffix("\n"))
        return 0
    (render.record if as_json else pairs.pair)(view)
    return 0


# ------------------------------------------------------------------------ use
# `localspec use`.


@click.command(
    help="Choose the pair that answers where none is named; without NAME, show it. The same as `localspec "
    "config set pair NAME`, for pairs that are installed.",
    epilog="Examples:\n\n\b\n  localspec use coder-7b\n  localspec use",
)
@click.argument("name", required=False, default="", shell_complete=suggest.pairs)
def use_command(name: str) -> int:
    if name:
        settings.use(name)
    else:
        settings.get("pair")
    return 0


# ------------------------------------------------------------------------ add
# `localspec add`.


# The same as in protocol/settings.py, by which the daemon checks the request.
_SERVER_KINDS = ("auto", "openai", "llama-server", "localspec", "vllm", "sglang", "tensorrt-llm")


@click.command(
    help="Create a pair from your own files, or for another server. Files are checked like a pull and "
    "stay where they are; a server is contacted when the pair is asked something, not before.",
    epilog="Examples:\n\n\b\n  localspec add mine --target big.gguf --draft small.gguf\n"
    "  localspec add qwen --target qwen2.5:7b --draft qwen2.5:0.5b\n"
    "  localspec add big --upstream http://tower:8000/v1 --fallback builtin",
)
@click.argument("name")
@click.option(
    "--target",
    metavar="FILE",
    shell_complete=suggest.files,
    help="Target model: a file, or the name of a model in Ollama.",
)
@click.option(
    "--draft",
    metavar="FILE",
    shell_complete=suggest.files,
    help="Draft model or sidecar (default: a sidecar beside the target, else drafts come from the text).",
)
@click.option(
    "--no-draft", is_flag=True, help="Use no draft, not even a sidecar beside the target."
)
@click.option(
    "--projector",
    metavar="FILE",
    shell_complete=suggest.files,
    help="File by which the target reads pictures (default: one beside the target, mmproj-….gguf).",
)
@click.option("--no-projector", is_flag=True, help="Use no projector; read text only.")
@click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice(["chat", "fim"]),
    default=["chat"],
    help="What the pair is for: chat or fim (fill in the middle); repeatable.",
)
@click.option(
    "--pooling",
    type=click.Choice(["mean", "cls", "last"]),
    help="Use the target for embeddings, and pool its token vectors so (default: from the model file).",
)
@click.option(
    "--upstream",
    metavar="URL",
    help="URL of an OpenAI-compatible server: vLLM, SGLang, TensorRT-LLM, llama-server, another "
    "localspec, or any other.",
)
@click.option("--upstream-model", metavar="NAME", help="The server's name for the model.")
@click.option(
    "--upstream-kind",
    type=click.Choice(_SERVER_KINDS),
    help="What server it is (default: detected).",
)
@click.option(
    "--key-env", metavar="VAR", help="Environment variable of the daemon with the API key."
)
@click.option("--key-file", metavar="FILE", help="The file that holds the server's key.")
@click.option("--ca", metavar="FILE", help="Certificates to trust instead of the system's.")
@click.option(
    "--fallback",
    metavar="PAIR",
    shell_complete=suggest.pairs,
    help="The pair that answers while the server does not.",
)
@click.option("--replace", is_flag=True, help="Replace an existing pair of that name.")
def add_command(
    name: str,
    target: str | None,
    draft: str | None,
    no_draft: bool,
    projector: str | None,
    no_projector: bool,
    roles: tuple[str, ...],
    pooling: str | None,
    replace: bool,
    **server: str | None,
) -> int:
    server_options = {key: value for key, value in server.items() if value is not None}
    if (target is None) == ("upstream" not in server_options):
        raise UsageError("Give either --target or --upstream.")
    if "upstream" in server_options:
        if draft or no_draft or pooling or projector or no_projector:
            raise UsageError(
                "--draft, --no-draft, --projector, --no-projector and --pooling are for files; a server has "
                "its own."
            )
        return _add_upstream(name, server_options, roles, replace)
    if server_options:
        raise UsageError(f"--{next(iter(server_options)).replace('_', '-')} needs --upstream.")
    assert target is not None
    files = inputs.resolve_model(target), inputs.resolve_model(draft) if draft else None
    client = PairsClient()
    indicator = progress.Spinner(client, "checking") if render.is_drawn_on(sys.stderr) else None
    try:
        entry = client.add(
            name,
            *files,
            list(roles),
            no_draft=no_draft,
            replace=replace,
            pooling=pooling,
            projector=inputs.absolute(projector) if projector else None,
            no_projector=no_projector,
        )
    finally:
        if indicator:
            indicator.stop()
    advice = format_first_use(name, entry["roles"])
    render.line(f"{entry['name']} is installed ({format_size(entry['size'])}). {advice}")
    for note in entry["notes"]:
        render.line(f"note: {note}")
    return 0


def _add_upstream(
    name: str, server_options: dict[str, str], roles: tuple[str, ...], replace: bool
) -> int:
    """Add a pair that another server answers for, and return the exit code."""
    for key in ("key_file", "ca"):
        if key in server_options:
            server_options[key] = inputs.absolute(server_options[key])
    if "fallback" in server_options:
        server_options["fallback"] = inputs.resolve_pair(server_options["fallback"])
    url = server_options.pop("upstream")
    entry = PairsClient().add_upstream(
        name, url, **server_options, roles=list(roles), replace=replace
    )
    render.line(f"{entry['name']} is added; {url} is contacted with its first request.")
    render.line(format_first_use(name, entry["roles"]))
    if url.startswith("http://") and ("key_env" in server_options or "key_file" in server_options):
        render.line("note: the key goes over the network unencrypted; use https, or a tunnel.")
    return 0


# ------------------------------------------------------------------------ rm
# `localspec rm`.


@click.command(
    help="Remove pairs. Files that another pair needs are kept, and so are your own files.",
    epilog="Example: localspec rm coder-7b",
)
@click.argument("names", metavar="NAME...", nargs=-1, required=True, shell_complete=suggest.pairs)
@yes_option
def rm_command(names: tuple[str, ...], yes: bool) -> int:
    require_consent(yes=yes)
    client, code = PairsClient(), 0
    configured = client.pairs().get("configured", "")
    for name in dict.fromkeys(names):
        try:
            removed = client.remove(name)
        except NoDaemon:
            raise
        except LocalspecError as error:  # continue with the other pairs
            render.error(error.message)
            code = error.exit_code
            continue
        render.line(f"Removed {removed['name']}; {format_size(removed['freed'])} freed.")
        for kept_file in removed["kept"]:
            render.line(f"kept: {kept_file}")
        if removed["name"] == configured:
            render.error(
                f"{configured} is the configured pair, so questions fail until another one is chosen: "
                "localspec use NAME, or localspec config unset pair"
            )
    return code


# ------------------------------------------------------------------------ import
# `localspec import`, and the output of `localspec list --disk`.


@click.command(
    help="Find models already on this disk: those of the Hugging Face cache, llama.cpp, LM "
    "Studio, Ollama, Jan and GPT4All, and in any FOLDERs. Shows which can draft for "
    "which and how to create pairs from them. The files stay where they are.",
    epilog="Examples:\n\n\b\n  localspec import\n  localspec import ~/models --add",
)
@click.argument("folders", nargs=-1, metavar="[FOLDER]...", shell_complete=suggest.files)
@click.option("--add", "adding", is_flag=True, help="Create these pairs; on a terminal, ask first.")
@click.option("--json", "as_json", is_flag=True, help="Output one line of JSON.")
def import_command(folders: tuple[str, ...], adding: bool, as_json: bool) -> int:
    report = look(folders)
    if as_json and not adding:
        render.record(report)
        return 0
    if not as_json:
        show(report)
    return _add(report["pairs"]) if adding and report["pairs"] else 0


def look(folders: tuple[str, ...]) -> dict[str, Any]:
    """Return the models on this disk. A line shows the progress while the search takes its time."""
    report: dict[str, Any] = {}
    with Progress("import") as progress:
        for report in PairsClient().disk([inputs.absolute(folder) for folder in folders]):
            if report["models"] is None:
                progress.show(f"reading {report['looking']}", 0, 0)
    return report


def show(report: dict[str, Any]) -> None:
    """Print the models, why some cannot be used, and the commands that create pairs from them."""
    usable = [model for model in report["models"] if not model["problem"]]
    if usable:
        uses_by_draft: dict[str, int] = {}
        for model in usable:
            for draft in model["drafts"]:
                uses_by_draft[draft] = uses_by_draft.get(draft, 0) + 1
        rows = [["MODEL", "SIZE", "DRAFTS", "DRAFTS FOR", "WHERE"]]
        for model in usable:
            drafts_text = _count(len(model["drafts"]), "draft")
            targets_text = _count(uses_by_draft.get(model["path"], 0), "target")
            rows.append(
                [
                    model["name"],
                    format_size(model["size"]),
                    drafts_text,
                    targets_text,
                    model["origin"],
                ]
            )
        render.table(rows)
    else:
        render.line("No models found. To search other folders: localspec import FOLDER")
    for model in report["models"]:
        if model["problem"]:
            message = f"cannot use {model['name']} ({model['origin']}): {model['problem']}"
            render.line(render.harmless(message, lines=False))
    for problem in report["problems"]:
        render.error(problem)
    if report["pairs"]:
        render.line("\nTo create pairs from them (or use --add):")
        for pair in report["pairs"]:
            render.line(f"  {format_add_command(pair['name'], pair['target'], pair['draft'])}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}" if number else "-"


def _add(pairs: list[dict[str, Any]]) -> int:
    if sys.stdin.isatty() and not click.confirm(f"Create {_count(len(pairs), 'pair')}?"):
        return 0
    exit_code = 0
    for pair in pairs:
        try:
            # Many of these pairs may never be used. The others are hashed when they are first loaded.
            entry = PairsClient().add(
                pair["name"], pair["target"], pair["draft"], ["chat"], hash_now=False
            )
            advice = format_first_use(pair["name"], entry["roles"])
            render.line(f"{pair['name']} is installed. {advice}")
        except LocalspecError as error:
            exit_code = 1
            render.error(f"{pair['name']}: {error.message}")
    return exit_code


# ------------------------------------------------------------------------ drafts
# `localspec drafts`.


@click.command(
    help="Search the models on this disk (the store, the Hugging Face cache, LM Studio, "
    "Ollama, and any FOLDERs) for what can draft for TARGET, a file or a pair: its own MTP heads, sidecars "
    "and draft models, in the order in which they would be taken.",
    epilog="Examples:\n\n\b\n  localspec drafts big.gguf ~/models\n"
    "  localspec drafts coder-7b --measure",
)
@click.argument("target", shell_complete=suggest.pairs)
@click.argument("folders", nargs=-1, metavar="[FOLDER]...", shell_complete=suggest.files)
@click.option(
    "--measure",
    is_flag=True,
    help="Load each draft with TARGET and measure the speed-up; best first.",
)
@click.option("--json", "as_json", is_flag=True, help="Output one line of JSON.")
def drafts_command(target: str, folders: tuple[str, ...], measure: bool, as_json: bool) -> int:
    client = PairsClient()
    pair, paths = inputs.resolve_pair(target), [inputs.absolute(folder) for folder in folders]
    report: dict[str, Any] = {}
    with Progress(target) as progress:
        for report in client.drafts(pair, paths, measure=measure):
            if report["measuring"] and not as_json:
                progress.show(f"measuring {report['measuring']}", 0, 0)
    (render.record if as_json else pairs.drafts)(report)
    return 0


# ------------------------------------------------------------------------ gc
# `localspec gc`.


@click.command(
    help="Delete files that no pair or conversation needs, including those of cancelled pulls.",
    epilog="Example: localspec gc --dry-run",
)
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted.")
@yes_option
@click.option("--json", "as_json", is_flag=True, help="Output one line of JSON.")
def gc_command(dry_run: bool, yes: bool, as_json: bool) -> int:
    question = "Delete all files that `localspec gc --dry-run` lists?"
    require_consent(yes=yes or dry_run, question=question)
    result = PairsClient().collect(dry_run=dry_run)
    if as_json:
        render.record(result)
        return 0
    for file in result["files"]:
        render.line(file)
    if not result["files"]:
        render.line("Nothing to delete.")
    else:
        verb = "would be freed" if dry_run else "freed"
        render.line(f"{format_size(result['freed'])} {verb}.")
    return 0


# ------------------------------------------------------------------------ verify
# `localspec verify`.


@click.command(
    help="Verify the checksums of a pair's files. Exits with 1 if a file is damaged or missing.",
    epilog="Example: localspec verify coder-7b",
)
@click.argument("name", shell_complete=suggest.pairs)
@click.option("--json", "as_json", is_flag=True, help="Output one line of JSON.")
def verify_command(name: str, as_json: bool) -> int:
    event: dict[str, Any] = {}
    with Progress(name) as progress:
        for event in PairsClient().verify(inputs.resolve_pair(name)):
            if event["files"] is None and not as_json:
                progress.show("hashing", event["done"], event["size"])
    files = event["files"]
    damaged = [file for file in files if file["problem"]]
    if as_json:
        render.record(event)
    else:
        render.fields([(file["role"], file["problem"] or _describe_intact(file)) for file in files])
        if event["news"]:
            render.line(event["news"])
    if damaged:
        render.error(f"{len(damaged)} of {len(files)} files are unusable. {event['remedy']}")
    return 1 if damaged else 0


def _describe_intact(file: dict[str, Any]) -> str:
    if file["hashed"]:
        return f"{file['file']}: OK"
    return f"{file['file']}: readable; there is no checksum to compare it with"


# ------------------------------------------------------------------------ catalogue
# `localspec catalogue`.


@click.command(
    help="List pairs available to pull, and whether each fits into this machine's free "
    "memory; 'partly' means that it needs main memory besides the GPU's. Drafts come "
    "from a draft model, from heads trained with the target (MTP) or from the text itself (n-gram). "
    "With TEXT, list only pairs whose name or description contains it.",
    epilog="Examples:\n\n\b\n  localspec catalogue --fits\n  localspec catalogue coder",
)
@click.argument("words", metavar="[TEXT]...", nargs=-1)
@click.option("--fits", is_flag=True, help="Only list pairs that fit.")
@click.option("--json", "as_json", is_flag=True, help="Output one line of JSON.")
def catalogue_command(words: tuple[str, ...], fits: bool, as_json: bool) -> int:
    listed = PairsClient().pairs(everything=True)
    listed["pairs"] = [
        entry
        for entry in listed["pairs"]
        if entry["memory"] and not (fits and entry["fits"] not in ("yes", "partly"))
        if all(word.lower() in _searched_text(entry) for word in words)
    ]
    if as_json:
        render.record(listed)
        return 0
    if words and not listed["pairs"]:
        advice = "For a model on the Hugging Face hub: localspec pull OWNER/REPO"
        mistakes = "".join(f". {problem}" for problem in listed["problems"])
        raise LocalspecError(
            f"No pair in the catalogue matches '{' '.join(words)}'. {advice}{mistakes}"
        )
    pairs.catalogue(listed["pairs"], listed.get("configured", ""))
    render.line(f"\n{pairs.format_memory(listed)}. To download one: localspec pull NAME")
    pairs.problems(listed)
    return 0


def _searched_text(entry: dict[str, Any]) -> str:
    """Return the text that a search looks through: names, description and repositories of a pair."""
    names = [entry["name"], *entry["aliases"], entry["target"], entry["draft"] or ""]
    return " ".join([*names, entry["summary"]]).lower()
