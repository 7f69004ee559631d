"""The cost of the endpoint's clients to its generator: the longest pause of its event loop, a call of a long session.

    python -m benchmarks.services.endpoint --model DIR --json endpoint.json

Pauses: a real server with the model's tokenizer, and an engine that says one token at once. A client in a process of
its own sends a prompt of 0.3, 4 and 16 MB, words of English. It goes to a context that is far too small for it, and to
one in which it has room. The event loop wakes each millisecond, and the longest time between two wakings is the pause.
The answer's status and the time that the call took are given with it.

Sessions: conversations that grow, by 100 sampled tokens and 40 others in each call, and single calls of 4,000 tokens
that start from nothing. Timed is what a call of the n-th turn costs: to find its parent, and to take its answer down.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry
from transformers import AutoTokenizer

from benchmarks.common import HelpFormatter, machine, summarize, table, write_json, yardstick
from rollmesh.generators.engines.types import GenerationResult
from rollmesh.generators.openai_server.completions import Completions
from rollmesh.generators.openai_server.conversations.sessions import Sessions
from rollmesh.generators.openai_server.conversations.turn_tree import Turn, TurnTree
from rollmesh.generators.openai_server.engine_client import EngineClient
from rollmesh.generators.openai_server.http_server import EndpointServer
from rollmesh.generators.openai_server.metrics import EndpointMetrics
from rollmesh.generators.openai_server.template_codec import TemplateChatCodec
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.config.rollout import EndpointSection
from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.mesh.trajectory.versions import PolicyVersion, VersionRuns

_MEGABYTES = (0.3, 4.0, 16.0)
_SMALL = 2048
_TURNS = (10, 500, 2000)
_WORDS = ("alpha", "beta", "the", "x1", "gamma,", "don't", "12345", "which", "of", "these")
_VERSION = PolicyVersion(1, 1)


class _OneToken:
    """As much of an engine as the endpoint needs: every request is answered with one token."""

    def __init__(self) -> None:
        self.calls: EngineClient

    def status(self) -> Any:
        return type("Status", (), {"serving": _VERSION})()

    def submit(self, requests: Any) -> None:
        loop = asyncio.get_running_loop()
        for request in requests:
            tokens = _tokens(1)
            result = GenerationResult(request.request_id, tokens, "length")
            loop.call_soon(self.calls.accept_results, [result])

    def abort(self, _names: Any) -> None:
        """There is never anything to abort."""


def _tokens(count: int) -> Trajectory:
    return Trajectory.sampled(
        np.arange(3, 3 + count, dtype=np.int32), np.zeros(count, np.float32), VersionRuns(((count, _VERSION),))
    )


# Posts a file; prints the status and the seconds that it took.
_CLIENT = """
import sys, time, urllib.error, urllib.request
body = open(sys.argv[2], "rb").read()
asked = urllib.request.Request(sys.argv[1], body, {"Content-Type": "application/json"})
began = time.perf_counter()
try:
    with urllib.request.urlopen(asked) as answer:
        status = answer.status
except urllib.error.HTTPError as error:
    status = error.code
print(status, time.perf_counter() - began)
"""


async def _post(url: str, body: Path) -> tuple[int, float]:
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CLIENT, url, str(body), stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await client.communicate()
    status, seconds = printed.split()
    return int(status), float(seconds)


async def _pause(tokenizer: Any, context: int, body: Path) -> dict[str, Any]:
    engine = _OneToken()
    calls = engine.calls = EngineClient(engine)  # type: ignore[arg-type]  # as much of one as is needed
    codec = TemplateChatCodec(tokenizer, end_ids=frozenset({2}))
    completions = Completions(engine, calls, codec, context=context, max_running=64)  # type: ignore[arg-type]
    server = EndpointServer(
        completions,
        Sessions(EndpointSection(), time.monotonic),
        EndpointMetrics(CollectorRegistry()),
        model="m",
        security=SecuritySection(),
        created=0,
    )
    await server.start(host="127.0.0.1", port=0, advertise=None, public=True)
    longest, last = 0.0, time.perf_counter()
    try:
        answered = asyncio.ensure_future(_post(f"{server.url}/v1/completions", body))
        while not answered.done():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        status, seconds = await answered
    finally:
        await server.close()
    return {"context": context, "status": status, "seconds": seconds, "pause_ms": 1e3 * longest}


def pauses(model: Path, rounds: int) -> list[dict[str, Any]]:
    """One entry for each size and context."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = []
    for megabytes in _MEGABYTES:
        text = ""
        drawn = random.Random(1)
        while len(text) < megabytes * 1e6:
            text += " ".join(drawn.choices(_WORDS, k=10_000)) + " "
        with tempfile.NamedTemporaryFile("w", suffix=".json") as body:
            json.dump({"model": "m", "prompt": text[: int(megabytes * 1e6)], "max_tokens": 1}, body)
            body.flush()
            for context in (_SMALL, int(2 * megabytes * 1e6)):
                runs = [asyncio.run(_pause(tokenizer, context, Path(body.name))) for _ in range(rounds)]
                pause = summarize(run["pause_ms"] for run in runs)
                found.append({**runs[0], "megabytes": megabytes, "pause_ms": pause, "runs": runs})
    return found


def session_costs(prompt: int, after: int, rounds: int) -> dict[int, Any]:
    """Milliseconds of one call, by the number of turns before it; `after` 0: each call starts from nothing."""
    costs: dict[int, list[float]] = {turns: [] for turns in _TURNS}
    for _ in range(rounds):
        record, before = TurnTree(), None
        for number in range(max(_TURNS) + 1):
            began = time.perf_counter()
            known: Turn | None = before if after else None
            new = list(range(after if known is not None else prompt))
            before = record.add(number, 0, record.locate(known, new), _tokens(100), "stop")
            if number in costs:
                costs[number].append(1e3 * (time.perf_counter() - began))
    return {turns: summarize(found) for turns, found in costs.items()}


def main(argv: list[str] | None = None) -> int:
    """Measures both; prints two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with a tokenizer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    document: dict[str, Any] = {"benchmark": "endpoint", "machine": machine(), "yardstick": yardstick()}
    document["sessions"] = {
        "continues": session_costs(4000, 40, args.rounds),
        "starts": session_costs(4000, 0, args.rounds),
    }
    document["pauses"] = pauses(args.model, args.rounds)
    rows = [
        (found["megabytes"], found["context"], found["status"], f"{found['seconds']:.2f}", found["pause_ms"])
        for found in document["pauses"]
    ]
    print(table(("prompt, MB", "context", "status", "call, s", "longest pause of the loop, ms"), rows))
    print()
    calls = [(kind, *(costs[turns] for turns in _TURNS)) for kind, costs in document["sessions"].items()]
    print(table(("ms per call, by turns before it", *map(str, _TURNS)), calls))
    if args.json:
        write_json(args.json, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
