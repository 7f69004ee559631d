"""The fault proxy as a command."""

from __future__ import annotations

import argparse
import asyncio
import sys
from urllib.parse import urlsplit

from rollmesh.mesh.errors import ConfigError, PortInUseError
from rollmesh.mesh.runtime.end_signals import end_signals
from rollmesh.reward_service.conformance.grpc_transport import channels
from rollmesh.reward_service.conformance.opening import SCHEMES
from rollmesh.reward_service.conformance.proxy.faults import Faults
from rollmesh.reward_service.conformance.proxy.http_server import HttpFaultProxy
from rollmesh.reward_service.conformance.proxy.server import FaultProxy


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `run`."""
    parser.add_argument("--to", required=True, help="grpc://HOST:PORT or http://HOST:PORT/BASE of the server")
    parser.add_argument("--listen", default="127.0.0.1:0", help="[HOST:]PORT; any free port, if left out")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds that answers may come later")
    for name, words in (
        ("error-rate", "share of calls that fail at once"),
        ("drop", "share of calls whose answer never comes"),
        ("lose", "share of results that are missing"),
        ("duplicate", "share of calls that reach the server twice"),
    ):
        parser.add_argument(f"--{name}", type=float, default=0.0, help=words)
    parser.add_argument("--reorder", action="store_true", help="results come in any order")
    parser.add_argument("--cut-after", type=int, default=0, help="calls after which all connections are cut")
    parser.add_argument("--seed", type=int, default=0, help="of all chances")


def run(chosen: argparse.Namespace) -> int:
    """Serves until it is told to end.

    Raises:
        ConfigError: a malformed address.
        PortInUseError: the port is taken.
    """
    faults = Faults(
        chosen.delay,
        chosen.error_rate,
        chosen.drop,
        chosen.lose,
        chosen.duplicate,
        chosen.reorder,
        chosen.cut_after,
        chosen.seed,
    )
    asyncio.run(serve(chosen.to, chosen.listen, faults))
    return 0


async def serve(to: str, listen: str, faults: Faults) -> None:
    """Forwards calls until it is interrupted or told to end; says where it listens, and at last what it has done.

    Raises:
        ConfigError: a malformed address.
        PortInUseError: the port is taken.
    """
    url, (host, _, port) = urlsplit(to), listen.rpartition(":")
    if url.scheme not in SCHEMES or not url.netloc or not port.isdecimal():
        raise ConfigError(
            f"proxy from {listen!r} to {to!r}",
            hint="give --to grpc://host:port or http://host:port/base, and --listen [host:]port",
        )
    is_http = url.scheme.startswith("http")
    proxy: FaultProxy | HttpFaultProxy
    if is_http:
        proxy = HttpFaultProxy(to, faults)
    else:
        proxy = FaultProxy(channels(url.netloc, None, tls=url.scheme == "grpcs"), faults)
    try:
        await proxy.start(host or "127.0.0.1", int(port))
    except RuntimeError as error:
        raise PortInUseError(f"{listen}: {error}", hint="give another --listen") from error
    print(f"listening on {'http' if is_http else 'grpc'}://{host or '127.0.0.1'}:{proxy.port}", flush=True)  # noqa: T201 - a command
    ended = asyncio.Event()
    for number in end_signals():
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await ended.wait()
    print(str(proxy.counts), file=sys.stderr)  # noqa: T201 - a command
    await proxy.stop()
