"""The cost of proving each call's caller: the same work in a mesh with a token and in one without.

    python -m benchmarks.buffer.access --json access.json

`calls`: `Describe`, sixteen at a time from one process to one front, so that little but a call's own cost is in the
rate. `groups of 8` and `groups of 1`: trajectories of 256 tokens through insert, sample, claim and commit, as
`benchmarks.buffer.throughput` has them. The checks there are those of few calls and long streams. The two alternate;
ratios are of the pairs. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import uvloop

from benchmarks.buffer.mesh import Mesh, security, started
from benchmarks.buffer.plan import Plan
from benchmarks.buffer.throughput import measure
from benchmarks.common import machine, summarize, table, write_json
from rollmesh.buffer.client.client import BufferClient
from rollmesh.mesh.access.roles import Identity, Role
from rollmesh.mesh.rpc.channel import open_channel

_AT_ONCE = 16
_TOKENS = 256


def calls_per_second(plan: Plan) -> float:
    """`Describe` calls that a front answers per second."""
    with tempfile.TemporaryDirectory(prefix="rollmesh-access-") as name:
        folder = Path(name)
        with started(plan, folder) as mesh:
            return uvloop.run(_calls(mesh, plan, folder))


async def _calls(mesh: Mesh, plan: Plan, folder: Path) -> float:
    channel = open_channel(mesh.address, security(plan, folder), Identity(Role.OPERATOR))
    client = BufferClient(channel, timeout_s=10.0, retry_s=10.0)
    answered = 0

    async def call(until: float) -> None:
        nonlocal answered
        while time.perf_counter() < until:
            await client.describe("train")
            answered += 1

    for seconds in (plan.warmup, plan.seconds):
        began, answered = time.perf_counter(), 0
        await asyncio.gather(*(call(began + seconds) for _ in range(_AT_ONCE)))
        rate = answered / (time.perf_counter() - began)
    await channel.close()
    return rate


def main(argv: list[str] | None = None) -> int:
    """Prints the rates of both and the ratio of the pairs; writes every repetition to --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="measured time of a cell")
    args = parser.parse_args(argv)
    base = Plan(tokens=_TOKENS, writers=2, seconds=args.seconds)
    work = {
        # No writers, and a learner that waits: a front that has nothing else to do.
        "calls": lambda plan: (calls_per_second(replace(plan, writers=0, fill=True, ahead=0)), 0.0),
        "groups of 8": lambda plan: _stored(replace(plan, group=8)),
        "groups of 1": lambda plan: _stored(replace(plan, group=1)),
    }
    found: dict[str, dict[bool, list[tuple[float, float]]]] = {name: {False: [], True: []} for name in work}
    for repetition in range(args.repetitions):
        for name, run in work.items():
            for checked in (False, True)[:: -1 if repetition % 2 else 1]:
                found[name][checked].append(run(replace(base, checked=checked)))
                rate, cpu = found[name][checked][-1]
                print(
                    f"{repetition} {name} {'token' if checked else 'no token'} {rate:.0f}/s, {cpu:.0f} us", flush=True
                )
    rows = []
    for name, both in found.items():
        pairs = list(zip(both[False], both[True], strict=True))
        without, with_token = (summarize(rate for rate, _ in both[checked]) for checked in (False, True))
        cpu = summarize(token / none for (_, none), (_, token) in pairs if none) if name != "calls" else ""
        rows.append([name, without, with_token, summarize(token / none for (none, _), (token, _) in pairs), cpu])
    print(table(("work", "no token /s", "token /s", "ratio", "CPU per trajectory, ratio"), rows))
    if args.json:
        write_json(args.json, {"machine": machine(), "runs": {k: list(v.values()) for k, v in found.items()}})
    return 0


def _stored(plan: Plan) -> tuple[float, float]:
    cell = measure(plan)
    return cell.items_s, sum(cell.cpu_us.values())


if __name__ == "__main__":
    raise SystemExit(main())
