"""Names of headless services, for pods of a trial: `python -m deploy.kubernetes.trial_names ADDRESS KUBECONFIG`.

It answers A queries for SERVICE.NAMESPACE.svc.cluster.local with the addresses of the ready pods, as a cluster does.
"""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import time

_FRESH_S = 1.0
_SUFFIX = ".svc.cluster.local"
_TYPE_A, _NO_ERROR, _NO_NAME = 1, 0, 3


class Endpoints:
    """Addresses by service, read from the API at most once a second."""

    def __init__(self, kubeconfig: str) -> None:
        self._command = ["kubectl", f"--kubeconfig={kubeconfig}", "get", "endpoints", "--all-namespaces", "-o", "json"]
        self._found: dict[str, list[str]] = {}
        self._read_at = float("-inf")

    def of(self, name: str) -> list[str] | None:
        """Addresses of a name; None: there is no such service."""
        if time.monotonic() - self._read_at > _FRESH_S:
            self._read()
        return self._found.get(name.lower().rstrip("."))

    def _read(self) -> None:
        done = subprocess.run(self._command, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode == 0:
            self._found = {
                f"{item['metadata']['name']}.{item['metadata']['namespace']}{_SUFFIX}": [
                    address["ip"] for subset in item.get("subsets", ()) for address in subset.get("addresses", ())
                ]
                for item in json.loads(done.stdout)["items"]
            }
        self._read_at = time.monotonic()


def answer(query: bytes, endpoints: Endpoints) -> bytes:
    """The answer to a DNS query with one question (RFC 1035)."""
    labels, at = [], 12
    while query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode("ascii", "replace"))
        at += 1 + query[at]
    question = query[12 : at + 5]
    (kind,) = struct.unpack(">H", query[at + 1 : at + 3])
    addresses = endpoints.of(".".join(labels))
    found = (addresses or []) if kind == _TYPE_A else []
    code = _NO_NAME if addresses is None else _NO_ERROR
    header = query[:2] + struct.pack(">HHHHH", 0x8580 | code, 1, len(found), 0, 0)
    records = (b"\xc0\x0c" + struct.pack(">HHIH", _TYPE_A, 1, 1, 4) + socket.inet_aton(address) for address in found)
    return header + question + b"".join(records)


def main() -> None:
    """The command line."""
    address, kubeconfig = sys.argv[1:]
    endpoints = Endpoints(kubeconfig)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((address, 53))
        while True:
            query, caller = server.recvfrom(512)
            server.sendto(answer(query, endpoints), caller)


if __name__ == "__main__":
    main()
