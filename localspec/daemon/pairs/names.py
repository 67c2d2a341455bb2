"""What the `model` of a client's request may mean, beside the names of pairs that the registry resolves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

from localspec.config import Config
from localspec.daemon.http import tcp
from localspec.errors import ModelNotFound, RegistryError
from localspec.registry.registry import NoSuchPair, Registry

# Names that mean the configured pair. Clients that must send a name send one of these.
DEFAULT_NAMES = ("", "default", "localspec")

# What a pair is used for. The configuration may name a pair for each role. Otherwise the configured pair
# has the first two roles, and pairs for the others are recognized by their files.
Role = Literal["chat", "fim", "embed", "rerank"]
# The noun for a model with the role, and an example from the catalogue.
_ROLE_EXAMPLES = {
    "embed": ("embedding model", "nomic-embed"),
    "rerank": ("reranker", "bge-reranker"),
}


def resolve_default(name: str, config: Config) -> str:
    """Return the pair that a client's `model` means: the configured one if it names none."""
    return config.pair if name in DEFAULT_NAMES else name


def pair_of_role(role: Role, config: Config, registry: Registry) -> str:
    """Return the name of the pair that has the role: the configured one, or the only one installed for it.

    Reads files. Raises ModelNotFound if no pair, or more than one, is installed for embeddings or reranking.
    """
    configured = {"embed": config.pair_embed, "rerank": config.pair_rerank, "fim": config.pair_fim}
    if role == "chat" or configured[role]:
        return configured.get(role, config.pair)
    records = registry.store.listing().records
    if role == "fim":
        candidates = [record.name for record in records if record.roles == ("fim",)]
        return candidates[0] if len(candidates) == 1 else config.pair
    candidates = [record.name for record in records if role in record.roles]
    if len(candidates) == 1:
        return candidates[0]
    noun, example = _ROLE_EXAMPLES[role]
    if candidates:
        raise ModelNotFound(
            f"Several {noun}s are installed: {', '.join(candidates)}. Name one of them as `model`, "
            f"or: localspec config set pair.{role} {candidates[0]}",
            param="model",
        )
    raise ModelNotFound(
        f"No {noun} is installed. To pull one: localspec pull {example}", param="model"
    )


@contextlib.contextmanager
def hidden_file_errors() -> Iterator[None]:
    """Replace all errors about a path by one over TCP, so that no response reveals which files exist.

    Raises:
        ModelNotFound: Over TCP, in place of any ModelNotFound or RegistryError. Without TCP these
            errors are raised unchanged.
    """
    try:
        yield
    except (ModelNotFound, RegistryError) as error:
        if tcp.is_tcp_request():
            error_class = NoSuchPair if isinstance(error, NoSuchPair) else ModelNotFound
            raise error_class("There is no usable model at that path.", param="model") from None
        raise
