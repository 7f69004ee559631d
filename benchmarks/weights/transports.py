"""Rates of the transports, compared with those of the machine and of gRPC alone.

    python -m benchmarks.weights.transports --json transports.json

`shm`: a learner's version in /dev/shm, received by the mesh's transport and copied into tensors that exist, on one
thread as decoding would. The yardstick is one copy of as many bytes. When *warm*, the pages are in this process's page
table already; *first* has a new mapping, as at every version. `grpc`: the mesh's publisher, service and transport in
two processes on loopback. The yardstick is the shortest gRPC program that moves the same bytes. It is a synchronous
server and client, one stream of 1 MiB messages, no serializer, into memory that exists, unverified. All cells
alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from concurrent import futures
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import torch

from benchmarks.common import Summary, machine, summarize, table, write_json, yardstick
from benchmarks.weights.node_process import Host
from rollmesh.generators.weights.learner_connection import LearnerConnection
from rollmesh.generators.weights.transports import Transfer
from rollmesh.generators.weights.transports.shm import SharedMemory
from rollmesh.generators.weights.verified_transfer import receive_verified
from rollmesh.learner.weights import PublishRules, WeightPublisher
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.runtime.hosts import host_id
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights import BucketSet
from rollmesh.mesh.weights.tensors import named_tensors

_MESSAGE_BYTES = 1 << 20
_TENSOR_BYTES = 4 << 20
_METHOD = "/raw.Source/Give"
_UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)]
_HEADER = ("path", "GB/s", "of the yardstick")
Cell = Callable[[], float]


def shm_cells(mib: int, bucket_mib: int) -> tuple[dict[str, Cell], Callable[[], None]]:
    """Cells that answer GB/s, and what ends them."""
    torch.set_num_threads(1)
    publisher = WeightPublisher("benchmark", {}, PublishRules(bucket_bytes=bucket_mib << 20, transport="shm"))
    bits = [torch.randint(-(1 << 15), 1 << 15, (_TENSOR_BYTES // 2,), dtype=torch.int16) for _ in range(mib // 4)]
    source = {f"{i}": words.view(torch.bfloat16) for i, words in enumerate(bits)}
    target = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    manifest = publisher.publish(PolicyVersion(1, 1), source.items(), "bfloat16")
    bucket_set = BucketSet.full(manifest)
    transport = SharedMemory(host_id())
    connection = _unused_connection()

    def fetch() -> Transfer:
        return Transfer(bucket_set, connection, 60.0, superseded=lambda: False, member_id="")

    async def mapped() -> memoryview:
        return (await transport.receive(fetch(), lambda _data, _index: None)).data

    async def verified() -> memoryview:
        return (await receive_verified(transport, fetch())).data

    runner = asyncio.Runner()
    warm = runner.run(verified())

    def fill(data: memoryview) -> None:
        for name, tensor in named_tensors(manifest, data):
            target[name].copy_(tensor)

    def verify_warm() -> None:
        for index in range(len(bucket_set.buckets)):
            bucket_set.verify(index, bucket_set.part(warm, index))

    flat, other = torch.zeros(bucket_set.nbytes, dtype=torch.uint8), torch.ones(bucket_set.nbytes, dtype=torch.uint8)

    def memcpy() -> None:
        flat.copy_(other)

    def rate(work: Callable[[], None]) -> float:
        began = time.perf_counter()
        work()
        return bucket_set.nbytes / (time.perf_counter() - began) / 1e9

    fill(warm)

    def verify_and_fill() -> None:
        verify_warm()
        fill(warm)

    cells: dict[str, Cell] = {
        "memcpy": lambda: rate(memcpy),
        "shm, warm: copy": lambda: rate(lambda: fill(warm)),
        "shm, warm: verify": lambda: rate(verify_warm),
        "shm, warm: verify and copy": lambda: rate(verify_and_fill),
        "shm, first: copy": lambda: rate(lambda: fill(runner.run(mapped()))),
        "shm, first: receive (map and verify)": lambda: rate(lambda: _drop(runner.run(verified()))),
        "shm, first: receive and copy": lambda: rate(lambda: fill(runner.run(verified()))),
    }

    def end() -> None:
        runner.run(connection.close())
        runner.close()
        publisher.close()

    return cells, end


def _unused_connection() -> LearnerConnection:
    """Shared memory asks the learner nothing."""

    async def make() -> LearnerConnection:
        return LearnerConnection("none", "", partial(open_channel, "127.0.0.1:1", SecuritySection()))

    return asyncio.run(make())


def _drop(_data: memoryview) -> None:
    """Received is enough."""


def raw_server(conn: Connection, nbytes: int) -> None:
    """The yardstick's server."""
    data = memoryview(os.urandom(1 << 20) * (nbytes >> 20))

    def send_all(_request: bytes, _context: Any) -> Any:
        for offset in range(0, nbytes, _MESSAGE_BYTES):
            yield bytes(data[offset : offset + _MESSAGE_BYTES])

    server = grpc.server(futures.ThreadPoolExecutor(2), options=_UNLIMITED)
    handler: Any = grpc.unary_stream_rpc_method_handler(send_all)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("raw.Source", {"Give": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    conn.send(port)
    conn.recv()
    server.stop(None)


def raw_client(conn: Connection, port: int, nbytes: int) -> None:
    """The yardstick's client: answers the GB/s of one stream whenever it is asked."""
    target = memoryview(bytearray(b"x" * nbytes))
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=_UNLIMITED) as channel:
        fetch: Any = channel.unary_stream(_METHOD)
        conn.send("up")
        while conn.recv():
            began, end = time.perf_counter(), 0
            for message in fetch(b""):
                target[end : end + len(message)] = message
                end += len(message)
            assert end == nbytes
            conn.send(nbytes / (time.perf_counter() - began) / 1e9)


def grpc_cells(mib: int, bucket_mib: int) -> tuple[dict[str, Cell], Callable[[], None]]:
    """Cells that answer GB/s, and what ends them."""
    spawn = multiprocessing.get_context("spawn")
    server, far_server = spawn.Pipe()
    client, far_client = spawn.Pipe()
    processes = [spawn.Process(target=raw_server, args=(far_server, mib << 20), daemon=True)]
    processes[0].start()
    port = server.recv()
    processes.append(spawn.Process(target=raw_client, args=(far_client, port, mib << 20), daemon=True))
    processes[1].start()
    client.recv()
    learner = Host("learner", ["--mib", str(mib), "--bucket-mib", str(bucket_mib)])
    generators = {n: Host("generator", ["--learner", learner.address, "--streams", str(n)]) for n in (1, 2, 4)}
    manifest = learner.ask({})["manifest"]

    def raw() -> float:
        client.send(True)
        rate: float = client.recv()
        return rate

    def ours(streams: int, verify: bool) -> float:
        found = generators[streams].ask({"manifest": manifest, "relay": False, "verify": verify})
        return float(found["nbytes"] / found["seconds"] / 1e9)

    cells: dict[str, Cell] = {"raw gRPC": raw}
    for streams in generators:
        cells[f"grpc, {streams} streams"] = partial(ours, streams, verify=False)
    cells["grpc, 2 streams, verified"] = partial(ours, 2, verify=True)

    def end() -> None:
        for host in (*generators.values(), learner):
            host.__exit__(None, None, None)
        client.send(False)
        server.send(False)
        for process in processes:
            process.join(5)
            process.terminate()

    return cells, end


def main(argv: list[str] | None = None) -> int:
    """Prints a table per part and writes every repetition to --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--parts", nargs="+", choices=["shm", "grpc"], default=["shm", "grpc"])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--bucket-mib", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=7)
    args = parser.parse_args(argv)
    document: dict[str, Any] = {"machine": machine(), "mib": args.mib, "bucket_mib": args.bucket_mib, "parts": {}}
    for part in args.parts:
        make = shm_cells if part == "shm" else grpc_cells
        document["parts"][part] = found = _measure(make, args)
        print(table(_HEADER, found.pop("rows")), flush=True)
    if args.json:
        write_json(args.json, document)
    return 0


def _measure(make: Callable[[int, int], tuple[dict[str, Cell], Callable[[], None]]], args: Any) -> dict[str, Any]:
    cells, end = make(args.mib, args.bucket_mib)
    runs: dict[str, list[float]] = {name: [] for name in cells}
    moods = []
    try:
        # Memory that the machine has not touched before, connections, first imports: not what is asked about.
        for cell in cells.values():
            cell()
        for repetition in range(args.repetitions):
            moods.append(yardstick())
            for name in random.Random(repetition).sample(list(cells), len(cells)):
                runs[name].append(cells[name]())
    finally:
        end()
    medians: dict[str, Summary] = {name: summarize(rates) for name, rates in runs.items()}
    limit = next(iter(runs))
    # Each run is compared with the yardstick of its own repetition: the machine's mood changes between them.
    ratios = {
        name: summarize([own / best for own, best in zip(rates, runs[limit], strict=True)])
        for name, rates in runs.items()
    }
    rows = [(name, medians[name], ratios[name]) for name in runs]
    return {"rows": rows, "runs": runs, "rates": medians, "ratios": ratios, "yardsticks": moods}


if __name__ == "__main__":
    raise SystemExit(main())
