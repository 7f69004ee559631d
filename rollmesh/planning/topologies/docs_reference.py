"""Writes the table of placements: `python -m rollmesh.planning.topologies.docs_reference PAGE --architectures FOLDER`.

Each cell is a layout that `rollmesh plan` says fits, with engine `vllm` and the defaults otherwise. Models are
configurations without weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rollmesh.learner.algorithms.docs_reference import markdown_table
from rollmesh.learner.builders import build_algorithm
from rollmesh.mesh.config import load_config
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.text import with_part
from rollmesh.planning.cluster import GIB, parse_devices
from rollmesh.planning.docs_reference import write_page
from rollmesh.planning.models import RunModels
from rollmesh.planning.plan import Plan, make_plan

MODELS = {
    "qwen2.5-0.5b": "Qwen2.5-0.5B",
    "qwen2.5-1.5b": "Qwen2.5-1.5B",
    "qwen2.5-7b": "Qwen2.5-7B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
}
"""Folder of a configuration, and the model's name."""
DEVICES = (1, 2, 4, 8)
MODES = ("split", "collocated")
HEADER = ("model", "devices", *MODES)
NONE = "does not fit"

_BEGIN, _END = "<!-- placements: begin -->", "<!-- placements: end -->"
# Tried one after another: where the learner does not fit as it is, its optimizer rests on the host while it computes.
_OFFLOADS = (False, True)


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks of the learner, and generators.

    Attributes:
        ranks: a device each.
        generators: number of them.
        tensor: devices of each.
        offload: the optimizer's state rests on the host.
    """

    ranks: int
    generators: int
    tensor: int
    offload: bool

    def describe(self, plan: Plan) -> str:
        """A cell of the table: GiB of a rank, tokens in a generator's KV cache, GiB of the host."""
        assert plan.generator is not None
        divided = f" of {self.tensor} devices" if self.tensor > 1 else ""
        offload = ", optimizer on the host" if self.offload else ""
        return (
            f"{self.ranks} rank(s) with {plan.learner_peak / GIB:.0f} GiB{offload}; {self.generators} "
            f"generator(s){divided} with KV cache for {plan.generator.kv_tokens // 1000:,}k tokens; host "
            f"{sum(plan.host.values()) / GIB:.0f} GiB"
        )


def page(text: str, architectures: Path) -> str:
    """The page with its table as it should be.

    Args:
        text: the page, with markers.
        architectures: folder with a folder for each of `MODELS`.
    """
    rows = [row(architectures, model, devices) for model in MODELS for devices in DEVICES]
    return with_part(text, _BEGIN, _END, markdown_table(HEADER, rows) + "\n")


def row(architectures: Path, model: str, devices: int) -> tuple[str, ...]:
    """One row.

    Args:
        architectures: see `page`.
        model: of `MODELS`.
        devices: of `DEVICES`.
    """
    return MODELS[model], str(devices), *(_cell(architectures / model, devices, mode) for mode in MODES)


def layouts(devices: int, mode: str) -> Iterator[Layout]:
    """Layouts in the order in which they are tried.

    With devices of their own the learner has as few as it needs, and generators the rest. In turns both have all.
    """
    for offload in _OFFLOADS:
        for ranks in _powers(devices):
            for tensor in _powers(devices):
                left = devices if mode == "collocated" else devices - ranks
                if left >= tensor and (ranks == devices or mode == "split"):
                    yield Layout(ranks, left // tensor, tensor, offload)


def _cell(folder: Path, devices: int, mode: str) -> str:
    cluster = parse_devices(f"{devices}xH100-80G")
    for layout in layouts(devices, mode):
        config = _config(folder, layout, mode)
        plan = make_plan(config, cluster, build_algorithm(config).needs.roles, RunModels(config))
        if plan.fits:
            return layout.describe(plan)
    return NONE


def _config(folder: Path, layout: Layout, mode: str) -> Config:
    return load_config(
        {
            "model": {"path": str(folder), "dtype": "bfloat16"},
            "data": {"train": "prompts.jsonl"},
            "rollout": {
                "engine": "vllm",
                "replicas": layout.generators,
                "vllm": {"tensor_parallel": layout.tensor},
            },
            "learner": {"ranks": layout.ranks, "memory": {"offload_optimizer": layout.offload}},
            "placement": mode,
        }
    )


def _powers(most: int) -> Iterator[int]:
    power = 1
    while power <= most:
        yield power
        power *= 2


if __name__ == "__main__":
    sys.exit(write_page(page, "rollmesh.planning.topologies.docs_reference", __doc__, None))
