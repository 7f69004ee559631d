"""The web page that a call comes from, where there is no API key.

Any page can make a browser send requests, to this machine's own addresses too. The header `Origin` names the page's
server and cannot be forged by the page. But a page's server may let its name point to this machine (DNS rebinding), and
is then its own. So the origin of a call has to be its host, and the host an address or a name of ours.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from rollmesh.generators.openai_server.errors import ApiError


def check_caller(host: str, origin: str | None, names: Collection[str]) -> None:
    """Refuses calls that a foreign web page may have made.

    Args:
        host: header `Host`, which every browser sends; empty: it was not given.
        origin: header `Origin`; None: it was not given.
        names: of this machine, in lower case, in addition to `localhost`.

    Raises:
        ApiError: 403.
    """
    name = _name_in(host)
    if host and name != "localhost" and name not in names and not _is_address(name):
        raise ApiError(
            403,
            f"host {host!r} is none of this endpoint's: without an API key its address alone is answered",
            reason="foreign_host",
        )
    if origin is not None and _server_in(origin) != host.lower():
        raise ApiError(
            403,
            f"pages of {origin!r} may not call this endpoint without an API key",
            reason="foreign_origin",
        )


def _name_in(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return ""


def _server_in(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
