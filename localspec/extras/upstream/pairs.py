"""Add, remove and show pairs that another server answers for. Blocks, so call it in a thread."""

from __future__ import annotations

import msgspec

from localspec.daemon.pairs.names import DEFAULT_NAMES
from localspec.errors import Conflict, InvalidRequest, ModelNotFound
from localspec.paths import expand_user, read_private_file
from localspec.protocol.pairs import AddUpstreamRequest, ModelView, PairEntry, PairView, RemovedView
from localspec.protocol.reading import explain
from localspec.protocol.settings import Upstream
from localspec.registry.registry import BUILTIN, Registry, is_file_name


def add_upstream(registry: Registry, request: AddUpstreamRequest) -> PairEntry:
    """Write the pair into models.toml. The server is not contacted.

    Raises:
        InvalidRequest: The name or a setting of the server is not valid.
        Conflict: The name is taken.
        ModelNotFound: The fallback does not exist.
        CatalogueError, StoreError: models.toml cannot be read or written.
    """
    from localspec.extras.upstream import catalogue as upstreams
    from localspec.registry.catalogue import check_pair_name

    name, catalogue = request.name, registry.catalogue
    registry.refuse_reserved(name)
    check_pair_name(name)
    if registry.readable_record(name) or name in catalogue.pairs or name in catalogue.aliases:
        raise Conflict(
            f"There is a pair '{name}' of this machine or the catalogue; choose another name."
        )
    fallback, known = request.fallback, (BUILTIN, *DEFAULT_NAMES)
    if fallback and not is_file_name(fallback) and fallback not in known:
        try:
            registry.installed(fallback)
        except ModelNotFound as error:
            raise ModelNotFound(error.message, param="fallback") from None
    settings = {
        key: getattr(request, key) for key in Upstream.__struct_fields__ if hasattr(request, key)
    }
    try:
        upstream = msgspec.convert(settings, Upstream)
    except msgspec.ValidationError as error:
        raise InvalidRequest(explain(str(error), Upstream).message) from None
    try:  # other users must not be able to read it; a missing file may be created later
        if upstream.key_file:
            read_private_file(expand_user(upstream.key_file))
    except OSError as error:
        if error.strerror == "it is open to other users":
            raise InvalidRequest(
                f"The key file {upstream.key_file} is open to other users; close it to them: chmod 600",
                param="key_file",
            ) from None
    upstreams.add_upstream(registry.paths.user_catalogue, name, upstream, replace=request.replace)
    registry.reload()
    return upstream_entry(name, upstream)


def remove_upstream(registry: Registry, name: str) -> RemovedView | None:
    """Remove the pair from models.toml. Return None if no other server answers for it.

    Raises:
        CatalogueError, StoreError: the file cannot be changed.
    """
    from localspec.extras.upstream import catalogue as upstreams

    pair = registry.upstream(name)
    if pair is None:
        return None
    upstreams.remove_upstream(registry.paths.user_catalogue, pair.name)
    registry.reload()
    return RemovedView(pair.name, 0, ())


def upstream_entry(name: str, upstream: Upstream) -> PairEntry:
    """Return the entry of such a pair in the list of pairs."""
    model = f"{upstream.upstream_model} at " if upstream.upstream_model else ""
    target, roles, summary = model + upstream.upstream, upstream.roles, upstream.summary
    return PairEntry(
        name, "upstream", here=True, summary=summary, roles=roles, target=target, kind="upstream"
    )


def upstream_view(name: str, upstream: Upstream, *, by_tcp: bool = False) -> PairView:
    """Return the details of such a pair. There are no files to describe, so `notes` describe the server.

    A client that came by TCP does not learn where the key is stored.
    """
    model = ModelView(
        upstream.upstream_model, upstream.upstream, repo="", revision="", sha256="", architecture="",
        parameters=0, layers=0, context=0, vocabulary=0, size=0, rollback="full", has_template=True,
        weights=0, cache=0, compute=0, quantization="", types={}, licence="", template=None,
        fim="fim" in upstream.roles, heads=0,
    )  # fmt: skip
    notes = [f"Its server is of the kind {upstream.upstream_kind}."]
    if upstream.upstream_kind == "auto":
        notes = ["The kind of server is detected with the first request."]
    if (upstream.key_env or upstream.key_file) and not by_tcp:
        source = f"variable {upstream.key_env}" if upstream.key_env else f"file {upstream.key_file}"
        notes.append(f"Its key is in the {source}.")
    if upstream.fallback:
        notes.append(f"While it does not answer, '{upstream.fallback}' answers in its place.")
    return PairView(
        name, "upstream", upstream.summary, "", upstream.roles, 0.0, 0, model, None, None, "",
        tuple(notes), 0, 0, None, (), False, "upstream", [], "",
    )  # fmt: skip
