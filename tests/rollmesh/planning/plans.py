"""Plans of runs that exist as configurations alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollmesh.learner.builders import build_algorithm
from rollmesh.mesh.config import load_config
from rollmesh.mesh.config.models import Config
from rollmesh.planning.cluster import parse_devices
from rollmesh.planning.command import plan_run
from rollmesh.planning.models import RunModels
from rollmesh.planning.plan import Plan, make_plan
from rollmesh.planning.report import Findings

ARCHITECTURES = Path(__file__).parent / "architectures"
_FOUND: dict[object, Findings] = {}


def configured(model: str, **sections: Any) -> Config:
    """A run of one of the architectures, by default without generators."""
    values = {
        "model": {"path": str(ARCHITECTURES / model), "dtype": "bfloat16"},
        "data": {"train": "prompts.jsonl"},
        "rollout": {"engine": "vllm", "replicas": 0},
    }
    return load_config(values | sections)


def over(nodes: int) -> dict[str, Any]:
    """`learner.distributed` for several nodes."""
    return {"nodes": nodes, "rendezvous": "node0:2000"} if nodes > 1 else {}


def planned(config: Config, devices: str, nodes: int = 1, **host: str) -> Plan:
    """Its plan; `host` as `parse_devices` takes it."""
    cluster = parse_devices(devices, nodes, **host)
    return make_plan(config, cluster, build_algorithm(config).needs.roles, RunModels(config))


def found(config: Config, devices: str, nodes: int = 1, **host: str) -> Findings:
    """All that the command finds; once for all tests, since it tries many plans."""
    key = config.model_dump_json(), devices, nodes, *host.items()
    if key not in _FOUND:
        _FOUND[key] = plan_run(config, parse_devices(devices, nodes, **host))
    return _FOUND[key]
