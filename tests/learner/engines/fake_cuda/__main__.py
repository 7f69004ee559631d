"""Runs cases, given as JSON by name, and prints what was seen of each."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from rollmesh.mesh.runtime.memory_tuning import collect_garbage_seldom, freeze_heap
from tests.learner.engines.fake_cuda.device import install, load


def main(library: Path, cases: dict[str, dict[str, object]]) -> None:
    collect_garbage_seldom()
    load(library)
    install(library)
    from rollmesh.learner.engines.fsdp2.optimizers import quantized_adamw
    from tests.learner.engines.fake_cuda.flow import Case, batch_stage, run, sleep

    freeze_heap()

    seen = {}
    for name, case in cases.items():
        # On a fake device it is of one case's tensors alone.
        quantized_adamw._table.cache_clear()
        seen[name] = run(Case(**case))
    seen |= {"sleep": sleep(), "batch stage": batch_stage()}
    print(json.dumps({name: dataclasses.asdict(part) for name, part in seen.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
