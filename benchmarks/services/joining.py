"""Seconds until a node that joins, or that replaces a killed one, brings in responses.

Hosts are network namespaces with addresses of their own, and the mesh has TLS. A generator is killed (`kill -9`), and
started again after 0.2 s, as a supervisor does. Its successor is a new member with a join string and nothing else. Two
times end with the first response of it that a front has stored. One begins with the kill, one with the start of
`rollmesh generator`. The second is that of a new node, whose disk has the programs in its cache already.

Needs root and iproute2:

    python -m benchmarks.services.joining --repeats 20 --json joining.json
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from contextlib import closing
from pathlib import Path

import numpy as np

from benchmarks.common import HelpFormatter, machine, write_json
from tests.faults.world import prepare_data
from tests.nodes.world import FRONTS, GENERATORS, LEARNER, REWARD, NodeMesh, NodeSettings

_GENERATOR = GENERATORS[0]
_STORED = "members stored"
_DEADLINE_S = 300.0


def first_stored(log: Path, after: float) -> float | None:
    """Unix time at which a front has stored the first response after a moment; None: not yet."""
    with log.open(encoding="utf-8") as lines:
        found = (json.loads(line) for line in lines if _STORED in line and line.endswith("\n"))
        return next((float(record["time"]) for record in found if record["time"] > after), None)


def main(argv: list[str] | None = None) -> int:
    """Measures, prints a table, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    from_start: list[float] = []
    from_kill: list[float] = []
    with tempfile.TemporaryDirectory(prefix="rollmesh-joining-") as name:
        folder = Path(name)
        data = prepare_data(folder / "data")
        changes = {"logging": {"samples_per_step": 0, "level": "debug"}}
        with closing(NodeMesh(folder, data, {_GENERATOR: NodeSettings(executed=True)}, changes)) as mesh:
            mesh.start(FRONTS[0])
            mesh.start(REWARD, LEARNER, _GENERATOR)
            log = mesh.folder / "logs" / f"{FRONTS[0]}-0.log"
            mesh.wait_until(lambda: first_stored(log, 0.0) is not None, "first response", _DEADLINE_S)
            for _ in range(args.repeats):
                killed = time.time()
                process = mesh.kill(_GENERATOR)
                started = time.time() - (time.monotonic() - process.began)
                mesh.wait_until(lambda: first_stored(log, started) is not None, "response", _DEADLINE_S)  # noqa: B023
                stored = first_stored(log, started)
                assert stored is not None
                from_start.append(stored - started)
                from_kill.append(stored - killed)
                print(f"{from_start[-1]:6.2f} s from its start, {from_kill[-1]:6.2f} s from the kill", flush=True)
    found = {"start_to_first_stored_s": from_start, "kill_to_first_stored_s": from_kill}
    for what, values in found.items():
        p50, p99 = np.percentile(np.array(values), (50, 99))
        print(f"{what}: p50 {p50:.2f}, p99 {p99:.2f}, {len(values)} times")
    if args.json:
        write_json(args.json, {"machine": machine(), "load": os.getloadavg(), **found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
