"""Bytes that a rank may hold in a training step in addition to its state, from the planner's phases and gloo's copies.

They count for the steps of `testing.engine_cases`: short sequences, in micro-batches of few tokens.
"""

from __future__ import annotations

from pathlib import Path

from rollmesh.mesh.config import load_config
from rollmesh.planning.cluster import parse_devices
from rollmesh.planning.command import plan_run
from rollmesh.planning.fsdp_memory import FsdpSetup
from rollmesh.planning.role_memory import ACTIVATIONS, GRADIENTS, MASTER, OPTIMIZER, PARAMETERS
from rollmesh.testing.engine_cases import MEMBERS

# As `make_sequences` and `make_batches` have them.
_GROUPS, _PROMPT, _RESPONSE, _TOKENS = 6, 8, 12, 48
_STATE = (PARAMETERS, GRADIENTS, OPTIMIZER)


def training_buffers(model: Path, ranks: int) -> int:
    """Bytes of a rank on a CPU.

    Args:
        model: its folder.
        ranks: of the learner, which reduce gradients with gloo.
    """
    config = load_config(
        {
            "model": {"path": str(model), "dtype": "bfloat16"},
            "data": {"train": "none.jsonl"},
            "rollout": {"n": MEMBERS, "replicas": 0, "max_prompt_tokens": _PROMPT, "max_response_tokens": _RESPONSE},
            "learner": {
                "ranks": ranks,
                "device": "cpu",
                "batch": {"groups": _GROUPS, "tokens_per_micro_batch": _TOKENS},
            },
        }
    )
    role = plan_run(config, parse_devices("1xCPU")).plan.roles[0]
    planned = [sum(n for part, n in phase.parts.items() if part not in _STATE) for phase in role.phases]
    kept = max(phase.parts.get(ACTIVATIONS, 0) for phase in role.phases)
    setup = role.setup
    assert isinstance(setup, FsdpSetup)
    return max(*planned, _reduction(setup) + kept if setup.sharded else 0)


def _reduction(setup: FsdpSetup) -> int:
    """The reduction of the largest group's gradient; meanwhile the next block is gathered already.

    FSDP holds the gradient and the float32 buffer that it is copied into. Gloo reduces a copy of that buffer whole, and
    each rank takes its shard from the result.
    """
    shape = setup.shape
    largest = max(shape.largest_block, shape.embedding, shape.output_layer)
    gradient, buffer = setup.compute_bytes * largest, MASTER * largest
    return gradient + 2 * buffer + buffer // setup.shards + setup.compute_bytes * shape.largest_block
