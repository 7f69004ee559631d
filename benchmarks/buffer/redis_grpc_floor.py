"""The rates of Redis alone and gRPC alone for the same bytes, and the shares that the buffer keeps of them.

    python -m benchmarks.buffer.redis_grpc_floor --json raw.json

Redis: writers SET payloads and push their keys, pipelined by 64, over the Unix socket of a server without persistence.
A reader pops keys, reads the values and removes them.

gRPC: writers stream messages of up to 1 MB of payload bytes, without protobuf, to a counting server. The server is
grpc.aio on uvloop, as in the mesh. Ours: the whole way of `throughput`. The three alternate. Redis and gRPC alone do
nothing but move the bytes, so the shares say what all else costs.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import redis
import uvloop

from benchmarks.buffer.load_processes import trajectories
from benchmarks.buffer.options import add_cell_options
from benchmarks.buffer.plan import Plan
from benchmarks.buffer.throughput import TOKENS, measure
from benchmarks.common import machine, summarize, table, write_json, yardstick
from rollmesh.buffer.redis_backend.embedded import EmbeddedRedis
from rollmesh.mesh.trajectory.payload_codec import encode

_PIPELINED = 64
_MESSAGE_BYTES = 1 << 20
_QUEUE = "queue"
# Keys that may wait for the reader before writers pause.
_BACKLOG = 1024
_METHOD = "/raw.Sink/Take"


def payloads(tokens: int) -> list[bytes]:
    """The payloads that all contenders store."""
    return [encode(item) for item in trajectories(tokens, 1)]


def redis_writer(conn: Connection, url: str, tokens: int, number: int) -> None:
    """SETs payloads until it receives the order to end."""
    client, values = redis.Redis.from_url(url), payloads(tokens)
    count = 0
    conn.send("up")
    conn.recv()
    while not conn.poll():
        pipe = client.pipeline(transaction=False)
        keys = [f"{number}:{count + i}" for i in range(_PIPELINED)]
        for i, key in enumerate(keys):
            pipe.set(key, values[i % len(values)])
        pipe.rpush(_QUEUE, *keys)
        waiting = pipe.execute()[-1]
        count += _PIPELINED
        while waiting > _BACKLOG and not conn.poll(0.001):
            waiting = client.llen(_QUEUE)


def redis_reader(conn: Connection, url: str, tokens: int) -> None:
    """Reads and removes until it receives the order to end; answers what it read in the time."""
    client, size = redis.Redis.from_url(url), len(payloads(tokens)[0])
    conn.send("up")
    conn.recv()
    began, count = time.perf_counter(), 0
    while not conn.poll():
        keys: Any = client.lpop(_QUEUE, _PIPELINED)
        if not keys:
            continue
        pipe = client.pipeline(transaction=False)
        pipe.mget(keys)
        pipe.unlink(*keys)
        values = pipe.execute()[0]
        assert all(len(value) == size for value in values)
        count += len(values)
    conn.send(count / (time.perf_counter() - began))


def grpc_server(conn: Connection) -> None:
    """Counts messages' bytes; answers the total when asked."""

    async def main() -> None:
        total = 0

        async def read(requests: Any, _context: Any) -> bytes:
            nonlocal total
            async for message in requests:
                total += len(message)
            return b""

        server = grpc.aio.server(options=[("grpc.max_receive_message_length", 8 << 20)])
        handler: Any = grpc.stream_unary_rpc_method_handler(read)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("raw.Sink", {"Take": handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        conn.send(port)
        asked = asyncio.Event()
        asyncio.get_running_loop().add_reader(conn.fileno(), asked.set)
        for _ in range(2):
            await asked.wait()
            conn.recv()
            asked.clear()
            conn.send(total)
        await server.stop(0)

    uvloop.run(main())


def grpc_writer(conn: Connection, port: int, tokens: int) -> None:
    """Streams messages until it receives the order to end."""
    values = payloads(tokens)
    per_message = max(1, _MESSAGE_BYTES // len(values[0]))
    batch = [values[i % len(values)] for i in range(per_message)]

    async def main() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call: Any = channel.stream_unary(_METHOD)()
            conn.send("up")
            # The sink may end first.
            with suppress(grpc.aio.AioRpcError):
                while not conn.poll():
                    await call.write(b"".join(batch))
                call.cancel()

    uvloop.run(main())


def measure_redis(tokens: int, writers: int, seconds: float) -> float:
    """Payloads/s that went through Redis."""
    with tempfile.TemporaryDirectory(prefix="rollmesh-raw-") as folder:
        server = EmbeddedRedis(Path(folder), durability="none")
        asyncio.run(server.start())
        try:
            reader, *others = _started(
                [(redis_reader, server.url, tokens)]
                + [(redis_writer, server.url, tokens, number) for number in range(writers)]
            )
            for conn, _ in (*others, reader):
                conn.send("begin")
            time.sleep(seconds)
            reader[0].send("end")
            rate = float(reader[0].recv())
            _end([reader, *others])
        finally:
            asyncio.run(server.stop())
    return rate


def measure_grpc(tokens: int, writers: int, seconds: float) -> float:
    """Payloads/s that arrived at the server."""
    ((server, process),) = _launch([(grpc_server,)])
    port = server.recv()
    ends = _started([(grpc_writer, port, tokens)] * writers)
    time.sleep(0.3)
    server.send("count")
    before, began = server.recv(), time.perf_counter()
    time.sleep(seconds)
    server.send("count")
    after, span = server.recv(), time.perf_counter() - began
    _end([*ends, (server, process)])
    return float(after - before) / len(payloads(tokens)[0]) / span


def _launch(wanted: list[tuple[Any, ...]]) -> list[tuple[Connection, Any]]:
    context = multiprocessing.get_context("spawn")
    launched = []
    for target, *arguments in wanted:
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        process.start()
        launched.append((ours, process))
    return launched


def _started(wanted: list[tuple[Any, ...]]) -> list[tuple[Connection, Any]]:
    launched = _launch(wanted)
    for conn, _ in launched:
        conn.recv()
    return launched


def _end(processes: list[tuple[Connection, Any]]) -> None:
    for _, process in processes:
        process.terminate()
        process.join(10)


def main(argv: list[str] | None = None) -> int:
    """Prints the shares and writes every repetition to --json."""
    args = _parse(argv)
    rates: dict[str, list[float]] = {}
    moods = []
    for repetition in range(args.repetitions):
        moods.append(yardstick())
        for tokens in args.tokens:
            for writers in args.writers:
                cell = f"T{tokens}/w{writers}"
                plan = Plan(tokens=tokens, writers=writers, group=8, seconds=args.seconds)
                contenders: list[tuple[str, Callable[..., float]]] = [
                    ("redis", lambda plan: measure_redis(plan.tokens, plan.writers, plan.seconds)),
                    ("grpc", lambda plan: measure_grpc(plan.tokens, plan.writers, plan.seconds)),
                    ("ours", lambda plan: measure(plan).items_s),
                ]
                turn = repetition % len(contenders)
                for name, run in contenders[turn:] + contenders[:turn]:
                    rates.setdefault(f"{cell}/{name}", []).append(run(plan))
                    print(repetition, f"{cell}/{name} {rates[f'{cell}/{name}'][-1]:.0f}/s", flush=True)
    rows = []
    for tokens in args.tokens:
        for writers in args.writers:
            ours, store, wire = (summarize(rates[f"T{tokens}/w{writers}/{name}"]) for name in ("ours", "redis", "grpc"))
            of_store, of_wire = (f"{ours.median / other.median:.2f}" for other in (store, wire))
            rows.append([tokens, writers, ours, store, of_store, wire, of_wire])
    print(table(("tokens", "writers", "ours /s", "Redis alone /s", "share", "gRPC alone /s", "share"), rows))
    if args.json:
        write_json(args.json, {"machine": machine(), "yardstick": moods, "items_s": rates})
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_cell_options(parser, repetitions=3, tokens=TOKENS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
