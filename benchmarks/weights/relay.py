"""The load of a version on the learner's link, and when the last generator has it, as generators become more.

    python -m benchmarks.weights.relay --json relay.json

Learner and generators are hosts of their own: network namespaces on one switch, made by `ip` and `tc`, as root. Each is
on a link of `--mbit` each way. *Tree*: as in the mesh, with `weights.fanout`; *direct*: every generator fetches from
the learner. Completion runs from the announcement to the last generator that has verified everything; the learner's
bytes are those of its link, headers and all. The ideal is the time of one transfer over the link. Cells alternate.
"""

from __future__ import annotations

import argparse
import random
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import machine, summarize, table, write_json, yardstick
from benchmarks.netns import StarHost, star
from benchmarks.weights.node_process import Host

_HEADER = ("generators", "way", "learner sent, of one copy", "completion s", "of one transfer", "hops of the deepest")


class Mesh:
    """A learner and generators on a network.

    Args:
        stack: ends the processes.
        hosts: the learner's first.
        args: of the command line.
    """

    def __init__(self, stack: ExitStack, hosts: list[StarHost], args: argparse.Namespace) -> None:
        self._host = hosts[0]
        size = ["--mib", str(args.mib), "--bucket-mib", str(args.bucket_mib), "--fanout", str(args.fanout)]
        self._learner = stack.enter_context(Host("learner", ["--bind", hosts[0].address, *size], hosts[0].command()))
        self._generators = []
        for number, host in enumerate(hosts[1:]):
            options = ["--bind", host.address, "--learner", self._learner.address, "--name", f"g{number}"]
            self._generators.append(stack.enter_context(Host("generator", options, host.command())))

    def push(self, count: int, *, relay: bool) -> dict[str, float]:
        """One version to the first `count` generators."""
        manifest = self._learner.ask({})["manifest"]
        before, began = self._host.sent_bytes(), time.perf_counter()
        for generator in self._generators[:count]:
            generator.send({"manifest": manifest, "relay": relay, "verify": True})
        answers = [generator.receive() for generator in self._generators[:count]]
        seconds = time.perf_counter() - began
        sent = self._host.sent_bytes() - before
        return {"seconds": seconds, "copies": sent / answers[0]["nbytes"], "hops": self._hops(answers)}

    def _hops(self, answers: list[dict[str, Any]]) -> int:
        sources = {g.address: a["source"] for g, a in zip(self._generators, answers, strict=False)}

        def hops(address: str) -> int:
            return 1 + (hops(sources[address]) if sources[address] else 0)

        return max(hops(address) for address in sources)


def main(argv: list[str] | None = None) -> int:
    """Prints the table and writes every repetition to --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--mbit", type=float, default=200.0)
    parser.add_argument("--mib", type=int, default=32)
    parser.add_argument("--bucket-mib", type=int, default=2)
    parser.add_argument("--fanout", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args(argv)
    cells = [(count, relay) for count in args.counts for relay in (True, False)]
    runs: dict[tuple[int, bool], list[dict[str, float]]] = {cell: [] for cell in cells}
    moods = []
    with ExitStack() as stack:
        mesh = Mesh(stack, stack.enter_context(star(args.mbit * 1e6, max(args.counts) + 1)), args)
        for repetition in range(args.repetitions):
            moods.append(yardstick())
            for count, relay in random.Random(repetition).sample(cells, len(cells)):
                runs[count, relay].append(mesh.push(count, relay=relay))
    one = args.mib * (8 << 20) / (args.mbit * 1e6)
    rows, cells_found = [], []
    for (count, relay), found in runs.items():
        copies, seconds = (summarize(run[key] for run in found) for key in ("copies", "seconds"))
        of_one = summarize(run["seconds"] / one for run in found)
        way = "tree" if relay else "direct"
        rows.append((count, way, copies, seconds, of_one, max(int(run["hops"]) for run in found)))
        cells_found.append({"generators": count, "way": way, "runs": found, "copies": copies, "seconds": seconds})
    print(table(_HEADER, rows))
    if args.json:
        write_json(
            args.json,
            {"machine": machine(), "settings": vars(args), "yardsticks": moods, "cells": cells_found},
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
