"""The processes that the weight benchmarks measure: a learner that publishes, a generator that receives.

    python -m benchmarks.weights.node learner --bind 127.0.0.1 --mib 256 --bucket-mib 32
    python -m benchmarks.weights.node generator --bind 127.0.0.1 --learner 127.0.0.1:7000

Each prints one line of JSON when it is ready and answers each line of JSON on its input with one line. Publisher,
service, transport and relay are the mesh's own; the generator has no engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from rollmesh.generators.weights.learner_connection import LearnerConnection
from rollmesh.generators.weights.relay import Relay
from rollmesh.generators.weights.transports import Transfer, Transport
from rollmesh.generators.weights.transports.broadcast import Broadcast
from rollmesh.generators.weights.transports.disk import Disk
from rollmesh.generators.weights.transports.grpc_transport import GrpcTransport
from rollmesh.generators.weights.transports.shm import SharedMemory
from rollmesh.generators.weights.verified_transfer import receive_verified
from rollmesh.mesh.config.network import NetworkSection, SecuritySection
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.rpc.server import bind, new_server
from rollmesh.mesh.runtime.hosts import host_id
from rollmesh.mesh.runtime.memory_tuning import TENSOR_BYTES, keep_freed_memory
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights import BucketSet
from rollmesh.protos import weights_pb2, weights_pb2_grpc

SECURITY = SecuritySection(allow_insecure=True)
Answer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


async def learner(args: argparse.Namespace) -> None:
    """Publishes a new version whenever it is asked to; keeps one."""
    import torch

    from rollmesh.learner.weights import PublishRules, WeightPublisher, WeightsService

    publisher = WeightPublisher(
        "benchmark",
        {},
        PublishRules(keep_versions=1, bucket_bytes=args.bucket_mib << 20, transport=args.transport),
        offers=_offers(args),
    )
    server = new_server(SECURITY)
    weights_pb2_grpc.add_WeightsServicer_to_server(WeightsService(publisher, args.fanout), server)
    port = bind(server, args.bind, 0, SECURITY)
    await server.start()
    tensors = {f"{i}": torch.randint(-128, 128, (1 << 20,), dtype=torch.int8) for i in range(args.mib)}
    count = 0

    async def publish(_request: dict[str, Any]) -> dict[str, Any]:
        nonlocal count
        count += 1
        manifest = publisher.publish(PolicyVersion(1, count), tensors.items(), "float32")
        return {"manifest": manifest.SerializeToString().hex()}

    try:
        await _converse({"address": f"{args.bind}:{port}"}, publish)
    finally:
        await server.stop(0)
        publisher.close()


def _offers(args: argparse.Namespace) -> list[Any]:
    from rollmesh.learner.weights.transports import Broadcast, Disk, Rendezvous

    if args.transport == "gloo":
        return [Broadcast("gloo", Rendezvous(NetworkSection(host=args.bind), SECURITY), timeout_s=60.0)]
    return [Disk(args.dir, "benchmark")] if args.transport == "disk" else []


def _transport(args: argparse.Namespace) -> Transport:
    made: dict[str, Callable[[], Transport]] = {
        "grpc": lambda: GrpcTransport(streams=args.streams),
        "gloo": lambda: Broadcast("gloo"),
        "shm": lambda: SharedMemory(host_id()),
        "disk": lambda: Disk(args.dir),
    }
    return made[args.transport]()


async def generator(args: argparse.Namespace) -> None:
    """Receives a version whenever it is given a manifest; relays it unless told otherwise."""
    server = new_server(SECURITY)
    port = bind(server, args.bind, 0, SECURITY)
    relay = Relay(f"{args.bind}:{port}")
    relay.add_to(server)
    await server.start()
    connection = LearnerConnection("learner", args.learner, partial(open_channel, args.learner, SECURITY))
    transport = _transport(args)

    async def fetch(request: dict[str, Any]) -> dict[str, Any]:
        bucket_set = BucketSet.full(weights_pb2.Manifest.FromString(bytes.fromhex(request["manifest"])))
        relays, verify = request["relay"], request["verify"]
        fetch = Transfer(
            bucket_set,
            connection,
            60.0,
            superseded=lambda: False,
            member_id=args.name if relays or args.transport == "gloo" else "",
            relay_address=relay.address if relays else "",
        )
        began = time.perf_counter()
        source = ""
        if verify:
            holding = relay.begin(bucket_set)
            source = (await receive_verified(transport, fetch, holding.add_verified)).source
            seconds = time.perf_counter() - began
            relay.finish(holding)
        else:
            await transport.receive(fetch, lambda _data, _index: None)
            seconds = time.perf_counter() - began
        return {"seconds": seconds, "nbytes": bucket_set.nbytes, "source": source}

    try:
        await _converse({"address": relay.address}, fetch)
    finally:
        relay.close()
        await transport.close()
        await connection.close()
        await server.stop(0)


async def _converse(ready: dict[str, Any], answer: Answer) -> None:
    """Answers lines until the input ends."""
    print(json.dumps(ready), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await answer(json.loads(line))), flush=True)


def main(argv: list[str] | None = None) -> int:
    """Runs one role."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=["learner", "generator"])
    parser.add_argument("--bind", default="127.0.0.1")
    parser.add_argument("--learner", default="")
    parser.add_argument("--name", default="generator-1")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--bucket-mib", type=int, default=32)
    parser.add_argument("--transport", default="grpc")
    parser.add_argument("--dir", type=Path, help="for transport disk")
    parser.add_argument("--fanout", type=int, default=2)
    parser.add_argument("--streams", type=int, default=2)
    args = parser.parse_args(argv)
    keep_freed_memory(TENSOR_BYTES)
    uvloop.run(learner(args) if args.role == "learner" else generator(args))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
