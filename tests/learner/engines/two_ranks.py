"""One of two gloo ranks: trains from a checkpoint and from scratch, and writes what it saw for the tests to compare.

Started by `conftest.two_rank_results`; arguments: model folder, one-rank checkpoint, output folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from learner.checkpoint.store import CheckpointStore
from mesh.versions import PolicyVersion
from tests.learner.engines.models import make_engine
from tests.learner.engines.training import GROUPS, gradients, train_step, weights

torch.set_num_threads(1)


def main(model: Path, checkpoint: Path, out: Path) -> None:
    engine = make_engine(model)
    result = train_step(engine, seed=1)
    seen = {"gradients": gradients(engine), "weights": weights(engine)}
    # Fewer groups than ranks could share evenly: one rank has fewer micro-batches than the other.
    train_step(engine, seed=2, groups=3, token_budget=16)
    seen["uneven"] = gradients(engine)
    train_step(engine, seed=3, groups=1, token_budget=1 << 20)
    seen["idle_rank"] = gradients(engine)
    CheckpointStore(out / "checkpoints", keep=2).save({"actor": engine}, PolicyVersion(1, 3), {"cursor": 7})
    train_step(engine, seed=4)
    seen["after_checkpoint"] = weights(engine)
    extra = engine.load_checkpoint(checkpoint)
    train_step(engine, seed=5)
    seen["resumed"] = weights(engine)
    if engine.rank == 0:
        torch.save(seen, out / "seen.pt")
        (out / "seen.json").write_text(json.dumps({"metrics": result.metrics, "extra": extra, "groups": GROUPS}))
    engine.close()


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:4]))
