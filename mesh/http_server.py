"""What all that services answer over HTTP has in common: keys, and a log that strangers do not fill.

Invariant: a key is a bearer token, which opens nothing else of the mesh.
"""

from __future__ import annotations

import hmac
import logging
from pathlib import Path

from aiohttp.http_exceptions import HttpProcessingError

from mesh.errors import ConfigError
from mesh.private import read_secret
from mesh.rpc import is_loopback


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether it is no stranger's fault: a request that cannot be parsed is answered, and that is all."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


# For servers of aiohttp.
log = logging.getLogger(__name__)
log.addFilter(_is_ours)


def http_key(path: Path | None, setting: str, host: str, what: str, *, allow_insecure: bool) -> str | None:
    """What callers have to know; on this machine alone it may be nothing.

    Args:
        path: file with the key.
        setting: the configuration key that names the file.
        host: address to bind.
        what: is served, for the error.
        allow_insecure: `security.allow_insecure`.

    Raises:
        ConfigError: a non-loopback address without a key; an unreadable key.
    """
    if path is not None:
        return read_secret(path, setting)
    if not is_loopback(host) and not allow_insecure:
        raise ConfigError(
            f"refusing to serve {what} at {host}: others could use it without a key",
            hint=f"set {setting} (rollmesh token new), or security.allow_insecure: true",
        )
    return None


def is_bearer(authorization: str, key: str) -> bool:
    """Whether a request's header `Authorization` holds the key; takes as long whatever it holds."""
    given = authorization.removeprefix("Bearer ")
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), key.encode())
