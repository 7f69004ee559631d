"""Routes each data_source to named functions or to endpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollmesh.mesh.addresses import join_address, split_address
from rollmesh.mesh.config.scorers.parts import PartSection, describe
from rollmesh.mesh.errors import ConfigError

SCHEMES = ("grpc://", "grpcs://")


def is_endpoint(text: str) -> bool:
    """True if an entry of `reward.by_data_source` is the address of a reward service."""
    return text.startswith(SCHEMES)


def target_of(endpoint: str) -> str:
    """`grpc://host:port` -> `host:port`.

    Raises:
        ConfigError: where the address has not that form.
    """
    target = endpoint
    for scheme in SCHEMES:
        target = target.removeprefix(scheme)
    return join_address(*split_address(target, "reward endpoint"))


def split_routes(
    by_data_source: Mapping[str, Sequence[str | PartSection]],
) -> tuple[dict[str, tuple[str | PartSection, ...]], dict[str, tuple[str, ...]]]:
    """Splits `reward.by_data_source` into (functions by source, endpoints by source).

    Raises:
        ConfigError: a source that mixes the two, or has neither.
    """
    functions: dict[str, tuple[str | PartSection, ...]] = {}
    endpoints: dict[str, tuple[str, ...]] = {}
    for source, entries in by_data_source.items():
        remote = [entry for entry in entries if isinstance(entry, str) and is_endpoint(entry)]
        if not entries or 0 < len(remote) < len(entries):
            raise ConfigError(
                f"reward.by_data_source.{source}: {list(map(describe, entries))!r}",
                hint="give function names, which are summed, or grpc://host:port endpoints, which share the load",
            )
        if remote:
            for entry in remote:
                target_of(entry)
            endpoints[source] = tuple(remote)
        else:
            functions[source] = tuple(entries)
    return functions, endpoints
