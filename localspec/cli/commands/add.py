"""`localspec add`: a pair of files, or one that another server answers for."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from localspec.cli import inputs, suggest
from localspec.cli.app import flag
from localspec.cli.terminal import pairs, progress, render
from localspec.client.pairs import PairsClient
from localspec.errors import UsageError

# The same as in protocol/settings.py, by which the daemon checks the request.
_SERVER_KINDS = ("auto", "openai", "llama-server", "localspec", "vllm", "sglang", "tensorrt-llm")
_file_option = partial(click.option, metavar="FILE", shell_complete=suggest.files)


@click.command(
    help="Create a pair from your own files, or for another server. Files are checked like a pull and "
    "stay where they are; a server is contacted when the pair is asked something, not before.",
    epilog="Examples:\n\n\b\n  localspec add mine --target big.gguf --draft small.gguf\n"
    "  localspec add qwen --target qwen2.5:7b --draft qwen2.5:0.5b\n"
    "  localspec add big --upstream http://tower:8000/v1 --fallback builtin",
)
@click.argument("name")
@_file_option("--target", help="Target model: a file, or the name of a model in Ollama.")
@_file_option(
    "--draft",
    help="Draft model or sidecar (default: a sidecar beside the target, else drafts come from the text).",
)
@flag("--no-draft", help="Use no draft, not even a sidecar beside the target.")
@_file_option(
    "--projector",
    help="File by which the target reads pictures (default: one beside the target, mmproj-….gguf).",
)
@flag("--no-projector", help="Use no projector; read text only.")
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
@flag("--replace", help="Replace an existing pair of that name.")
def command(
    name: str,
    target: str | None,
    draft: str | None,
    projector: str | None,
    roles: tuple[str, ...],
    replace: bool,
    no_draft: bool,
    no_projector: bool,
    pooling: str | None,
    **server: str | None,
) -> None:
    server_options = {key: value for key, value in server.items() if value is not None}
    if (target is None) == ("upstream" not in server_options):
        raise UsageError("Give either --target or --upstream.")
    if "upstream" in server_options:
        if draft or no_draft or pooling or projector or no_projector:
            raise UsageError(
                "--draft, --no-draft, --projector, --no-projector and --pooling are for files; a server has "
                "its own."
            )
        _add_upstream(name, server_options, {"roles": list(roles), "replace": replace})
        return
    if server_options:
        raise UsageError(f"--{next(iter(server_options)).replace('_', '-')} needs --upstream.")
    assert target is not None
    client = PairsClient()
    with progress.spinning(client, "checking"):
        entry = client.add(
            name,
            inputs.resolve_model(target),
            inputs.resolve_model(draft) if draft else None,
            list(roles),
            no_draft=no_draft,
            replace=replace,
            pooling=pooling,
            projector=inputs.absolute(projector) if projector else None,
            no_projector=no_projector,
        )
    pairs.print_installed(entry["name"], entry["size"], entry["roles"])
    for note in entry["notes"]:
        render.line(f"note: {note}")


def _add_upstream(name: str, server: dict[str, str], others: dict[str, Any]) -> None:
    for key in {"key_file", "ca"} & server.keys():
        server[key] = inputs.absolute(server[key])
    if "fallback" in server:
        server["fallback"] = inputs.resolve_pair(server["fallback"])
    url = server.pop("upstream")
    entry = PairsClient().add_upstream(name, url, **server, **others)
    render.line(f"{entry['name']} is added; {url} is contacted with its first request.")
    render.line(pairs.format_first_use(name, entry["roles"]))
    if url.startswith("http://") and {"key_env", "key_file"} & server.keys():
        render.line("note: the key goes over the network unencrypted; use https, or a tunnel.")
