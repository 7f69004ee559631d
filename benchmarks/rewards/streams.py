"""ScoreStream against Score: processor time of an item, and the wait of quick items beside a slow one, in turns.

The server is a process of its own. Times per item are those of both processes. The last measurement is that of finding
where the tokens of a response end.

    python -m benchmarks.rewards.streams --json out.json
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import psutil

from benchmarks.common import HelpFormatter, Summary, machine, summarize, table, write_json, yardstick
from rollmesh.mesh.trajectory.token_ends import token_ends
from rollmesh.protos import reward_pb2
from rollmesh.reward_service.client.transports.grpc_calls import GrpcTransport

_SLOW = "slow"


async def score(solution_str: str, ground_truth: str) -> float:
    """A reward that takes its time where the response says so."""
    if solution_str == _SLOW:
        await asyncio.sleep(float(ground_truth))
    return 1.0


async def serve() -> None:
    """Serves until killed; the port goes to standard output."""
    from rollmesh.reward_service.scoring.engine import ScoringEngine
    from rollmesh.reward_service.server.server import RewardServer

    server = RewardServer(ScoringEngine(["arithmetic"], {"slow": [score]}, call_timeout_s=60.0), timeout_s=60.0)
    print(await server.start(), flush=True)
    await asyncio.Event().wait()


def items_of(count: int, source: str, response: str, truth: str) -> list[reward_pb2.ScoreItem]:
    """Items in groups of eight."""
    return [
        reward_pb2.ScoreItem(
            item_id=f"{number}",
            group_id=f"{number // 8}",
            data_source=source,
            prompt="40+2=",
            response=response,
            ground_truth_json=f'"{truth}"',
        )
        for number in range(count)
    ]


async def call(transport: GrpcTransport, items: Sequence[reward_pb2.ScoreItem], *, stream: bool) -> list[float]:
    """Makes one call; seconds after which each result was there."""
    began = time.perf_counter()
    if stream:
        return [time.perf_counter() - began async for _ in transport.stream(items, 60.0)]
    response = await transport.score(reward_pb2.ScoreRequest(items=items), 60.0)
    return [time.perf_counter() - began] * len(response.results)


def processor_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure(port: int, server: psutil.Process, options: argparse.Namespace) -> dict[str, Summary]:
    transport = GrpcTransport(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
    cheap = items_of(options.items, "arithmetic", "42 " * 100, "42")
    quick = items_of(63, "slow", "quick", "0")
    slow = items_of(1, "slow", _SLOW, str(options.slow_s))
    slow[0].item_id = _SLOW
    found: dict[str, list[float]] = {}
    for _ in range(options.repeats):
        for name, stream in (("Score", False), ("ScoreStream", True)):
            own = psutil.Process(os.getpid())
            before = processor_s(own) + processor_s(server)
            for _ in range(options.calls):
                await call(transport, cheap, stream=stream)
            spent = processor_s(own) + processor_s(server) - before
            found.setdefault(f"{name}: us per item", []).append(1e6 * spent / options.calls / options.items)
            times = await call(transport, [*slow, *quick], stream=stream)
            found.setdefault(f"{name}: ms until half of 63 quick items", []).append(1e3 * sorted(times)[31])
    await transport.close()
    return {name: summarize(values) for name, values in found.items()}


def measure_ends(tokens: int, repeats: int) -> Summary:
    """Milliseconds for finding the ends of a response's tokens, four bytes each."""
    text = "naïve " * (tokens * 4 // 7)
    data = text.encode()
    spelled = {byte: chr(byte) if 33 <= byte <= 126 else None for byte in range(256)}
    others = [byte for byte in range(256) if spelled[byte] is None and not (161 <= byte <= 172 or 174 <= byte <= 255)]
    alphabet = {byte: spelled[byte] or chr(byte) for byte in range(256)}
    alphabet |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    pieces = ["".join(alphabet[byte] for byte in data[start : start + 4]) for start in range(0, len(data), 4)]

    def unused(_ids: Sequence[int]) -> str:
        raise SystemExit("the slow way was taken")

    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        token_ends(range(len(pieces)), text, lambda _ids: pieces, unused)
        seconds.append(1e3 * (time.perf_counter() - began))
    return summarize(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--items", type=int, default=512, help="items of a call")
    parser.add_argument("--calls", type=int, default=8, help="calls of one measurement")
    parser.add_argument("--slow-s", type=float, default=2.0, help="seconds of the slow item")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens whose ends are found")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each side, in turns")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve())
        return
    before = yardstick()
    command = [sys.executable, "-m", "benchmarks.rewards.streams", "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            found = asyncio.run(measure(port, psutil.Process(server.pid), options))
        finally:
            server.kill()
    found[f"ends of {options.tokens} tokens, ms"] = measure_ends(options.tokens, options.repeats)
    print(table(("measurement", "value"), list(found.items())))
    ratio = found["ScoreStream: us per item"].median / found["Score: us per item"].median
    print(f"processor time of a stream over that of one answer: {ratio:.2f}")
    if options.json:
        document = {
            "machine": machine(),
            "yardstick": [before, yardstick()],
            "options": {name: value for name, value in vars(options).items() if name not in ("json", "serve")},
            "measured": found,
            "ratio": ratio,
        }
        write_json(options.json, document)


if __name__ == "__main__":
    main()
