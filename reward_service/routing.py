"""Routes each data_source to named functions or to endpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from rollmesh.mesh.addresses import join_address, split_address
from rollmesh.mesh.config.base import http_parts
from rollmesh.mesh.config.scorers.parts import PartSection, describe
from rollmesh.mesh.errors import ConfigError

GRPC = ("grpc", "grpcs")
OPENRLHF = "openrlhf+"
NEMO_GYM = "nemo-gym+"
# The contract over HTTP, and servers that were written for other projects.
_HTTP = tuple(f"{form}{scheme}" for form in ("", OPENRLHF, NEMO_GYM) for scheme in ("http", "https"))
_PORTS = {"http": 80, "https": 443}
_HINT = "grpc://host:port, https://host/base, openrlhf+http://host:port/path or nemo-gym+http://host:port"


def is_endpoint(text: str) -> bool:
    """True if an entry of `reward.by_data_source` is the address of a reward service."""
    return text.partition("://")[0] in (*GRPC, *_HTTP) and "://" in text


def is_grpc(endpoint: str) -> bool:
    """True if a server is called over gRPC: the scheme says so, or there is none."""
    scheme, separator, _ = endpoint.partition("://")
    return not separator or scheme in GRPC


def url_of(endpoint: str) -> tuple[str, str]:
    """(form, URL without a slash at its end) of an endpoint over HTTP; the form of the contract itself is empty.

    Raises:
        ConfigError: where the address is no such URL.
    """
    form = next((form for form in (OPENRLHF, NEMO_GYM) if endpoint.startswith(form)), "")
    url = endpoint.removeprefix(form)
    parts = http_parts(url)
    if parts is None or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(f"reward endpoint {endpoint!r} is no URL without login and options", hint=_HINT)
    return form, url.rstrip("/")


def target_of(endpoint: str) -> str:
    """`host:port` of an endpoint.

    Raises:
        ConfigError: where the address has none of the known forms.
    """
    scheme, separator, rest = endpoint.partition("://")
    if not separator:
        return join_address(*split_address(endpoint, "reward endpoint"))
    if scheme in GRPC:
        return join_address(*split_address(rest, "reward endpoint"))
    if scheme not in _HTTP:
        raise ConfigError(f"reward endpoint {endpoint!r}: the scheme is not known", hint=_HINT)
    parts = urlsplit(url_of(endpoint)[1])
    return join_address(parts.hostname or "", parts.port or _PORTS[parts.scheme])


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
                hint="give function names, which are summed, or endpoints, which share the load: " + _HINT,
            )
        if remote:
            for entry in remote:
                target_of(entry)
            endpoints[source] = tuple(remote)
        else:
            functions[source] = tuple(entries)
    return functions, endpoints
