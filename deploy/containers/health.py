"""The health check of a container: `health.py [PORT PATH]` asks its service, by default for its metrics.

An answer shows that the service's event loop runs. Only the standard library is imported: this starts every few
seconds in each container.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys
from pathlib import Path

# As `compose.yaml` sets them for the service itself.
_KEY, _AUTHORITY = "ROLLMESH__SECURITY__METRICS_KEY_FILE", "ROLLMESH__SECURITY__TLS_CA"
_TIMEOUT_S = 5.0


def main(port: str = "9100", path: str = "/metrics") -> None:
    """Ends with status 0 only after an answer of 200."""
    connection = http.client.HTTPConnection("localhost", int(port), timeout=_TIMEOUT_S)
    if authority := os.environ.get(_AUTHORITY):
        context = ssl.create_default_context(cafile=authority)
        connection = http.client.HTTPSConnection("localhost", int(port), timeout=_TIMEOUT_S, context=context)
    key = Path(os.environ[_KEY]).read_text(encoding="utf-8").strip()
    connection.request("HEAD", path, headers={"Authorization": f"Bearer {key}"})
    status = connection.getresponse().status
    raise SystemExit(0 if status == http.client.OK else f"port {port}, {path}: status {status}")


if __name__ == "__main__":
    main(*sys.argv[1:])
