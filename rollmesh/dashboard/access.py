"""Protection of the page: who may read its data, and what a browser may do with it.

Invariants: without the key no data leave the server; the page itself holds none. The key stands in the fragment of the
URL, which browsers send to no one. It travels in a header, so that no other site can use it. On loopback the `Host`
header must name this machine: a foreign name that resolves to it (DNS rebinding) is refused. The page may load nothing
from elsewhere, and texts of runs are only ever shown as text.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable

from aiohttp import web

from rollmesh.mesh.http.server import is_bearer
from rollmesh.mesh.runtime.hosts import is_loopback

API = "/api/"


class Access:
    """Judges requests.

    Args:
        key: that requests for data must show.
        host: address that is bound.
    """

    def __init__(self, key: str, host: str) -> None:
        self._key = key
        self._local = is_loopback(host)

    def refusal(self, request: web.BaseRequest) -> web.Response | None:
        """The answer to a request that is refused; None for one that is let in."""
        if self._local and not _names_loopback(request.headers.get("Host", "")):
            return web.Response(status=403, text="the Host header names another machine\n")
        if request.path.startswith(API) and not is_bearer(request.headers.get("Authorization", ""), self._key):
            return web.Response(
                status=401,
                text="missing or wrong key: the command that serves this page has printed it\n",
                # No `Basic`: a browser would ask for a password.
                headers={"WWW-Authenticate": "Bearer"},
            )
        return None


def _names_loopback(host: str) -> bool:
    """True for `localhost` and loopback addresses, with or without a port."""
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    return is_loopback(name)


def security_headers(inline: Iterable[str]) -> dict[str, str]:
    """Headers of every answer.

    Args:
        inline: the page's own scripts, which alone may run next to files of this server.
    """
    policy = content_policy(["'self'", *map(source_of, inline)], ["'self'"], ["'self'"])
    return {
        "Content-Security-Policy": f"{policy}; frame-ancestors 'none'",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def content_policy(scripts: Iterable[str], styles: Iterable[str], data: Iterable[str]) -> str:
    """The policy of a page by its sources of scripts, of style sheets, and of data that it loads later."""
    return (
        f"default-src 'none'; script-src {' '.join(scripts)}; style-src {' '.join(styles)}; "
        # Plotly sets the `style` attribute of what it draws.
        "style-src-attr 'unsafe-inline'; "
        f"img-src data: blob:; connect-src {' '.join(data)}; base-uri 'none'; form-action 'none'"
    )


def source_of(text: str) -> str:
    """The source that allows exactly one script or style sheet in the page."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
