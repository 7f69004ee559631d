"""Divisions that FSDP2 has, and those that it refuses: it shards parameters, and divides sequences by Ulysses."""

from __future__ import annotations

from rollmesh.learner.engines.fsdp2.preparation.shard_mesh import check_shards
from rollmesh.learner.engines.fsdp2.ulysses.division import check_division
from rollmesh.mesh.config.parallel import ParallelSection
from rollmesh.mesh.errors import ConfigError

# Keys of another engine, each with what serves instead.
_OTHERS = {
    "tp": "fsdp2 shards matrices over all ranks without it",
    "pp": "every rank computes all layers",
    "vpp": "every rank computes all layers",
    "layers": "every rank computes all layers",
    "cp": "fsdp2 divides sequences with sp",
    "ep": "fsdp2 shards experts over all ranks without it",
    "etp": "fsdp2 shards experts over all ranks without it",
}


def check_parallel(
    parallel: ParallelSection, *, heads: int, processes: int, name: str, key: str = "learner.parallel"
) -> None:
    """Refuses a division that the ranks or the model do not allow.

    Args:
        parallel: the division.
        heads: of the model's queries; 0: not known.
        processes: of the learner.
        name: the model, for the error.
        key: of the division in the configuration, for the error.

    Raises:
        ConfigError: names the key, and the nearest number that works.
    """
    for field, instead in _OTHERS.items():
        if (value := getattr(parallel, field)) != ParallelSection.model_fields[field].default:
            engine = f"{key.removesuffix('parallel')}engine"
            raise ConfigError(
                f"{key}.{field}: {value} is for engine megatron, and this one is fsdp2: {instead}",
                hint=f"leave it out, or set {engine}: megatron",
            )
    check_shards(parallel.shards or processes, processes, f"{key}.shards")
    parts = parallel.sp or 1
    check_division(parts, heads=heads, processes=processes, name=name, key=f"{key}.sp")
    if parallel.dp not in (None, processes // parts):
        raise ConfigError(
            f"{key}.dp: {parallel.dp}, and {processes} ranks with sp {parts} make {processes // parts} data-parallel "
            "ones",
            hint=f"set {key}.dp: {processes // parts}, or leave it out",
        )
