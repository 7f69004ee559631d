"""Host memory for published versions, of the learner's node and of a generator."""

from __future__ import annotations

from rollmesh.learner.engines.fsdp2.export import GATHER_BYTES
from rollmesh.learner.weights.publish_rules import LINK_SHARE, VERSIONS_IN_FLIGHT
from rollmesh.mesh.config.models import Config
from rollmesh.planning.shape import ModelShape

# A batch of full tensors, and the shards of as much as they leave and as they arrive.
_GATHERED = 3 * GATHER_BYTES


def learner_host(config: Config, shape: ModelShape, dtype_bytes: int) -> dict[str, int]:
    """Bytes on the node of the learner's first rank, by component.

    Args:
        config: of the run.
        shape: of the actor.
        dtype_bytes: of an element of the weights that travel.
    """
    version = shape.elements * dtype_bytes
    weights = config.weights
    where = "versions in shared memory" if weights.transport in ("auto", "shm") else "versions"
    parts = {where: (weights.keep_versions + VERSIONS_IN_FLIGHT) * version, "export's staging": _GATHERED}
    if weights.encoding != "full" and weights.transport != "shm":
        parts["deltas"] = round(weights.chain * LINK_SHARE * version)
    return parts


def generator_host(config: Config, shape: ModelShape, dtype_bytes: int, *, same_node: bool) -> dict[str, int]:
    """Bytes of host memory of a generator, by component.

    Args:
        config: of the run.
        shape: of the model.
        dtype_bytes: of an element of the weights that travel.
        same_node: it maps the learner's files where the transport is shared memory.
    """
    version = shape.elements * dtype_bytes
    parts = {}
    mapped = same_node and config.weights.transport in ("auto", "shm")
    if not mapped:
        parts["version received"] = version
    vllm = config.rollout.vllm
    if config.rollout.engine == "vllm" and (vllm.transfer == "shm" or vllm.tensor_parallel * vllm.data_parallel > 1):
        parts["version for vLLM's workers"] = version
    return parts
