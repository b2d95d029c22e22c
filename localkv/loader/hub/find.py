"""The model that a name means: in the cache, or on Hugging Face.

A model that is in the cache is used as it is, without asking the hub; `find(..., update=True)` asks
for the current revision.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from localkv.errors import HubError, printable
from localkv.loader.hub.cache import CachedModel, cached_models
from localkv.loader.hub.client import (
    FILE_INSTEAD,
    NO_NETWORK,
    HubUnreachableError,
    host,
    is_offline,
    list_files,
)
from localkv.loader.hub.download import Download, fetch, plan_download
from localkv.loader.hub.reference import (
    DEFAULT_QUANTS,
    MAX_LISTED,
    HubReference,
    RepoModel,
    choose,
    matching,
    names_the_hub,
    parse_reference,
    repo_models,
)


@dataclass(frozen=True)
class HubModel:
    """A model on the hub: the request, the revision of the repository, and its files."""

    reference: HubReference
    commit: str
    model: RepoModel


def find(
    reference: HubReference, *, offline: bool = False, update: bool = False
) -> CachedModel | Download:
    """The model that a reference means: in the cache, or an argument for `fetch`.

    Args:
        offline: make no request.
        update: ask for the current revision even if the model is in the cache.

    Raises:
        HubError: there is no such model, several could be meant, the hub can't be reached, or
            the disk is too full.
    """
    found = locate(reference, offline=offline, update=update)
    if isinstance(found, CachedModel):
        return found
    return plan_download(found.reference, found.commit, found.model)


def locate(
    reference: HubReference, *, offline: bool = False, update: bool = False
) -> CachedModel | HubModel:
    """Do what `find` does, but leave open whether the model could be fetched."""
    if not update:
        if found := find_cached(reference):
            return found
        if offline or is_offline():
            return _choose_cached(cached_models(reference.repo), reference)
    try:
        listing = list_files(reference)
    except HubUnreachableError as error:
        cached = cached_models(reference.repo)
        if cached and error.hint in (None, NO_NETWORK) and not update:
            raise HubUnreachableError(
                error.message, hint=f"--offline uses the cache, which has: {_names(cached)}"
            ) from error
        raise
    model = choose(repo_models(listing.files), reference, host())
    return HubModel(reference, listing.commit, model)


def find_cached(reference: HubReference) -> CachedModel | None:
    """The model in the cache, if it is beyond doubt the one that is meant."""
    cached = cached_models(reference.repo)
    if reference.file is None and reference.quant is None:
        # Another type than this one is meant only where the repository lacks this one.
        reference = replace(reference, quant=DEFAULT_QUANTS[0])
    meant = {model.path for model in matching([item.model for item in cached], reference)}
    found = [item for item in cached if item.model.path in meant]
    return found[0] if len(found) == 1 else None


def local_path(model: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """A path as it is; the file of a model on Hugging Face ("hf.co/org/repo"), fetched if need be.

    Raises:
        HubError: as `find` and `fetch`.
    """
    if not isinstance(model, str) or os.path.exists(model) or not names_the_hub(model):
        return model
    found = find(parse_reference(model))
    return (fetch(found, lambda _: None) if isinstance(found, Download) else found).path


def _choose_cached(cached: list[CachedModel], reference: HubReference) -> CachedModel:
    if not cached:
        raise HubError(
            f"{reference} is not in the cache, and requests are turned off",
            hint=f"without --offline and HF_HUB_OFFLINE it is fetched from {host()}; "
            f"{FILE_INSTEAD}",
        )
    model = choose([item.model for item in cached], reference, "the cache")
    return next(item for item in cached if item.model == model)


def _names(cached: list[CachedModel]) -> str:
    more = len(cached) - MAX_LISTED
    names = ", ".join(printable(item.name) for item in cached[:MAX_LISTED])
    return f"{names} and {more} more" if more > 0 else names
