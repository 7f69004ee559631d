"""Divisions that FSDP2 has, and those that it refuses.

It shards parameters, has experts on different ranks, and divides sequences by Ulysses.
"""

from __future__ import annotations

import math

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
    "etp": "fsdp2 divides experts by ep, and shards them over the ranks that have the same ones",
}


def check_parallel(
    parallel: ParallelSection,
    *,
    heads: int,
    experts: int | None,
    processes: int,
    name: str,
    key: str = "learner.parallel",
) -> None:
    """Refuses a division that the ranks or the model do not allow.

    Args:
        parallel: the division.
        heads: of the model's queries; 0: not known.
        experts: of a layer; 0: it has none, None: not known.
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
    _check_experts(parallel, experts, processes, name, key)
    parts = parallel.sp or 1
    check_division(parts, heads=heads, processes=processes, name=name, key=f"{key}.sp")
    if parallel.dp not in (None, processes // parts):
        raise ConfigError(
            f"{key}.dp: {parallel.dp}, and {processes} ranks with sp {parts} make {processes // parts} data-parallel "
            "ones",
            hint=f"set {key}.dp: {processes // parts}, or leave it out",
        )


def _check_experts(parallel: ParallelSection, experts: int | None, processes: int, name: str, key: str) -> None:
    """Refuses a number of ranks over which the model's experts, or the ranks of a copy, cannot be divided."""
    ep, shards = parallel.ep, parallel.shards or processes
    if ep == 1:
        return
    if experts == 0:
        raise ConfigError(
            f"{key}.ep: {ep} divides experts, and model {name!r} has none", hint=f"set {key}.ep: 1, or leave it out"
        )
    both = math.gcd(shards, experts or shards)
    if both % ep == 0:
        return
    works = [number for number in range(1, both + 1) if both % number == 0]
    nearest = min(works, key=lambda number: (abs(number - ep), -number))
    what = f"the {experts} experts of model {name!r}" if experts and experts % ep else _copy_of(parallel, processes)
    raise ConfigError(
        f"{key}.ep: {ep} does not divide {what}", hint=f"set {key}.ep: {nearest}, the nearest that divides both"
    )


def _copy_of(parallel: ParallelSection, processes: int) -> str:
    """The ranks that hold a copy of the model, in words."""
    if parallel.shards is None:
        return f"the learner's {processes} rank{'s' * (processes != 1)}"
    return f"the {parallel.shards} shards of a copy of the model"
