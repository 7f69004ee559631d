"""Writes the table of layouts by model: `python -m rollmesh.planning.docs_reference PAGE --architectures FOLDER`.

Each row is what `rollmesh plan` says of a learner with a rank on every device, and the defaults otherwise. Models are
configurations without weights.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rollmesh.learner.algorithms.docs_reference import markdown_table
from rollmesh.learner.builders import build_algorithm
from rollmesh.mesh.config import load_config
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.text import with_part
from rollmesh.planning.cluster import GIB, Cluster, parse_devices
from rollmesh.planning.megatron.layouts import divisions, in_parallel
from rollmesh.planning.models import RunModels
from rollmesh.planning.plan import MEGATRON, Plan, make_plan
from rollmesh.planning.settings import with_settings

MODELS = {
    "llama-3.1-8b": "Llama-3.1-8B",
    "qwen2.5-32b": "Qwen2.5-32B",
    "qwen2.5-72b": "Qwen2.5-72B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "qwen3-235b-a22b": "Qwen3-235B-A22B",
    "mixtral-8x7b": "Mixtral-8x7B",
}
"""Folder of a configuration, and the model's name."""
DEVICES = {8: 1, 64: 8}
"""Devices, and the nodes on which they are."""
HEADER = ("model", "devices", "FSDP2", "GiB per device", "Megatron", "GiB per device")

_BEGIN, _END = "<!-- layouts: begin -->", "<!-- layouts: end -->"
_NONE = "does not fit"


def page(text: str, architectures: Path) -> str:
    """The page with its table as it should be.

    Args:
        text: the page, with markers.
        architectures: folder with a folder for each of `MODELS`.
    """
    return with_part(text, _BEGIN, _END, table(architectures) + "\n")


def table(architectures: Path) -> str:
    """All rows, as Markdown."""
    return markdown_table(HEADER, [row(architectures, model, count) for model in MODELS for count in DEVICES])


def row(architectures: Path, model: str, devices: int) -> tuple[str, ...]:
    """One row.

    Args:
        architectures: see `page`.
        model: of `MODELS`.
        devices: of `DEVICES`.
    """
    nodes = DEVICES[devices]
    cluster = parse_devices(f"{devices // nodes}xH100-80G", nodes)
    sharded = _plan(_config(architectures / model, devices, "fsdp2"), cluster)
    cells = "full shard" if _has_room(sharded) else _NONE, _gib(sharded)
    return MODELS[model], str(devices), *cells, *_least_division(architectures / model, devices, cluster)


def _least_division(folder: Path, devices: int, cluster: Cluster) -> tuple[str, str]:
    """The least division that fits and its bytes; without one, those of the division that needs least."""
    least: Plan | None = None
    for plan in _divided(_config(folder, devices, MEGATRON), cluster):
        if _has_room(plan):
            return plan.roles[0].setup.division.removeprefix("Megatron: "), _gib(plan)
        least = plan if least is None or plan.learner_peak < least.learner_peak else least
    assert least is not None, "the undivided model is a division too"
    return _NONE, _gib(least)


def _divided(config: Config, cluster: Cluster) -> Iterator[Plan]:
    learner = config.learner
    facts = RunModels(config).sizes("actor").facts
    for keys in divisions(learner.parallel, learner.ranks, cluster.per_node, facts):
        yield _plan(with_settings(config, in_parallel(keys)), cluster)


def _plan(config: Config, cluster: Cluster) -> Plan:
    return make_plan(config, cluster, build_algorithm(config).needs.roles, RunModels(config))


def _has_room(plan: Plan) -> bool:
    return all(use.fits for use in plan.devices)


def _gib(plan: Plan) -> str:
    return f"{plan.learner_peak / GIB:.1f}"


def _config(folder: Path, devices: int, engine: str) -> Config:
    nodes = DEVICES[devices]
    distributed: dict[str, Any] = {"nodes": nodes, "rendezvous": "node0:29500"} if nodes > 1 else {}
    return load_config(
        {
            "model": {"path": str(folder), "dtype": "bfloat16"},
            "data": {"train": "prompts.jsonl"},
            "rollout": {"replicas": 0},
            "learner": {"engine": engine, "ranks": devices, "distributed": distributed},
        }
    )


def write_page(
    write: Callable[[str, Path], str], module: str, description: str | None, arguments: Sequence[str] | None
) -> int:
    """The command line of a module that writes a table into a page; returns the exit code.

    Args:
        write: from the page and the folder of architectures, the page as it should be.
        module: its name.
        description: for `--help`.
        arguments: of the command line; None: those of this process.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("page", type=Path)
    parser.add_argument("--architectures", type=Path, required=True)
    options = parser.parse_args(arguments)
    options.page.write_text(write(options.page.read_text(encoding="utf-8"), options.architectures), encoding="utf-8")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    return write_page(page, "rollmesh.planning.docs_reference", __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
