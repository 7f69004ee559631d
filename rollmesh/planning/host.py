"""Host memory of the first rank's node, and of a node of generators: versions, copies, what is offloaded."""

from __future__ import annotations

from collections.abc import Sequence

from rollmesh.learner.engines.tensors.export import GATHER_BYTES
from rollmesh.learner.weights.publish_rules import LINK_SHARE, VERSIONS_IN_FLIGHT
from rollmesh.mesh.config.models import Config
from rollmesh.planning.placement import Placement
from rollmesh.planning.role_memory import RoleSetup
from rollmesh.planning.shape import ModelShape

IN_SHM = "versions in shared memory"
"""The component that is in `/dev/shm`."""
RESTING = "learner at rest"
"""The component that the learner's devices hold in its turn."""

# A batch of full tensors, and the shards of as much as they leave and as they arrive.
_GATHERED = 3 * GATHER_BYTES


def learner_node(
    config: Config, setups: Sequence[RoleSetup], shape: ModelShape, dtype_bytes: int, placement: Placement
) -> dict[str, int]:
    """Bytes on the node of the learner's first rank, by component.

    Args:
        config: of the run.
        setups: of all roles.
        shape: of the actor.
        dtype_bytes: of an element of the weights that travel.
        placement: how many ranks and generators are there.
    """
    parts = of_learner(config, setups, shape, dtype_bytes, placement)
    for name, nbytes in of_generator(config, shape, dtype_bytes, same_node=True).items():
        if placement.on_learner_nodes:
            parts[name] = placement.on_learner_nodes * nbytes
    return parts


def generators_node(config: Config, shape: ModelShape, dtype_bytes: int, placement: Placement) -> dict[str, int]:
    """Bytes on a node of generators alone, by component; empty without such a node."""
    parts = of_generator(config, shape, dtype_bytes, same_node=False)
    return {name: placement.elsewhere * nbytes for name, nbytes in parts.items() if placement.elsewhere}


def of_learner(
    config: Config, setups: Sequence[RoleSetup], shape: ModelShape, dtype_bytes: int, placement: Placement
) -> dict[str, int]:
    """Bytes of the ranks on the first node, by component; see `learner_node`."""
    ranks = placement.ranks_per_node
    parts = _published(config, shape, dtype_bytes)
    staged, away = sum(setup.staged for setup in setups), sum(setup.on_host for setup in setups)
    for name, nbytes in (("copy for checkpoints", ranks * staged), ("offloaded roles", ranks * away)):
        if nbytes:
            parts[name] = nbytes
    if placement.rests_on_host:
        parts[RESTING] = ranks * sum(setup.away_in_turns for setup in setups)
    if inputs := ranks * max(setup.inputs_on_host for setup in setups):
        parts["offloaded activations"] = inputs
    return parts


def _published(config: Config, shape: ModelShape, dtype_bytes: int) -> dict[str, int]:
    """Bytes of the versions that the first rank publishes, by component; of adapters with the base, which stays."""
    base, version = _travelling(config, shape, dtype_bytes)
    weights = config.weights
    where = IN_SHM if weights.transport in ("auto", "shm") else "versions"
    parts = {where: base + (config.kept_versions + VERSIONS_IN_FLIGHT) * version, "export's staging": _GATHERED}
    if weights.encoding != "full" and weights.transport != "shm":
        parts["deltas"] = round(weights.chain * LINK_SHARE * version)
    return parts


def of_generator(config: Config, shape: ModelShape, dtype_bytes: int, *, same_node: bool) -> dict[str, int]:
    """Bytes of host memory of a generator, by component.

    Args:
        config: of the run.
        shape: of the model.
        dtype_bytes: of an element of the weights that travel.
        same_node: it maps the learner's files where the transport is shared memory.
    """
    base, version = _travelling(config, shape, dtype_bytes)
    parts = {}
    mapped = same_node and config.weights.transport in ("auto", "shm")
    if not mapped:
        parts["version received"] = base + version
    vllm = config.rollout.vllm
    if config.rollout.engine == "vllm" and (vllm.transfer == "shm" or vllm.tensor_parallel * vllm.data_parallel > 1):
        # An adapter that it computes with comes as a file; merged weights are as many as the base's.
        served = config.learner.served_adapter is not None
        parts["version for vLLM's workers"] = 0 if served else shape.merged * dtype_bytes
    return parts


def _travelling(config: Config, shape: ModelShape, dtype_bytes: int) -> tuple[int, int]:
    """Bytes that travel once, and with each version: the base and its adapter, or nothing and the whole model."""
    if config.learner.pushed_adapter is None:
        return 0, shape.merged * dtype_bytes
    return shape.merged * dtype_bytes, shape.trained * dtype_bytes
