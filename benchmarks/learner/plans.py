"""Plans of four architectures on 1, 8 and 64 devices: writes the table of docs/planning.md.

    python -m benchmarks.learner.plans docs/planning.md

Each row is `rollmesh plan` for the learner alone, a rank on every device, with the defaults of the configuration. The
models are configurations without weights. Half a minute on a CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import HelpFormatter
from rollmesh.learner.algorithms.docs_reference import fill, markdown_table
from rollmesh.mesh.config import load_config
from rollmesh.mesh.config.models import Config
from rollmesh.planning.cluster import GIB, parse_devices
from rollmesh.planning.command import plan_run
from rollmesh.planning.proposal import Proposal
from rollmesh.planning.report import Findings
from rollmesh.planning.settings import flags

CONFIGURATIONS = Path(__file__).resolve().parents[2] / "tests" / "rollmesh" / "planning" / "architectures"
MODELS = {
    "qwen3-0.6b": "Qwen3-0.6B",
    "qwen2.5-7b": "Qwen2.5-7B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "llama-3-70b": "Llama-3-70B",
}
# Devices, and the nodes on which they are.
SIZES = {1: 1, 8: 1, 64: 8}
HEADER = ("model", "devices", "GiB per rank", "GiB of a host", "fits", "fits with", "smallest layout")
NONE = "none"


@dataclass(frozen=True, slots=True)
class Row:
    """The findings of a plan.

    Attributes:
        rank, host: GiB of a rank's device and of the first rank's node, without what is kept free.
        fits: everything does.
        switches: keys with which it fits, a line for each choice; empty where it does; `none` where all do not help.
        layout: that is proposed.
    """

    rank: str
    host: str
    fits: bool
    switches: str
    layout: str

    def cells(self) -> tuple[str, ...]:
        """As the page has them."""
        return self.rank, self.host, "yes" if self.fits else "no", self.switches, self.layout


def row(model: str, devices: int) -> Row:
    """Plans a model on so many H100-80G."""
    nodes = SIZES[devices]
    found = plan_run(_config(model, devices, nodes), parse_devices(f"{devices // nodes}xH100-80G", nodes))
    plan = found.plan
    return Row(
        f"{plan.learner_peak / GIB:.1f}",
        f"{sum(plan.host.values()) / GIB:.0f}",
        plan.fits,
        "" if plan.fits else _switches(found),
        _layout(found.search.proposal),
    )


def table() -> str:
    """All rows, as Markdown."""
    rows = [(name, str(devices), *row(model, devices).cells()) for model, name in MODELS.items() for devices in SIZES]
    return markdown_table(HEADER, rows)


def _config(model: str, devices: int, nodes: int) -> Config:
    distributed = {"nodes": nodes, "rendezvous": "node0:29500"} if nodes > 1 else {}
    return load_config(
        {
            "model": {"path": str(CONFIGURATIONS / model), "dtype": "bfloat16"},
            "data": {"train": "prompts.jsonl"},
            "rollout": {"replicas": 0},
            "learner": {"ranks": devices, "distributed": distributed},
        }
    )


def _switches(found: Findings) -> str:
    """Keys that make it fit, each alone; else those that are needed together."""
    enough = [saving.settings for saving in found.savings if saving.fits]
    return "<br>".join(f"`{flags(settings)}`" for settings in enough) or NONE


def _layout(proposal: Proposal | None) -> str:
    if proposal is None:
        return NONE
    nodes = f" on {proposal.nodes} nodes" if proposal.nodes > 1 else ""
    tokens = proposal.settings["learner.batch.tokens_per_micro_batch"]
    ranks = "1 rank" if proposal.ranks == 1 else f"{proposal.ranks} ranks"
    return f"{ranks}{nodes}, {tokens:,} tokens"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("page", type=Path, help="page with the markers of the table")
    page: Path = parser.parse_args(arguments).page
    page.write_text(fill(page.read_text(encoding="utf-8"), {"plans": table()}), encoding="utf-8")


if __name__ == "__main__":
    main()
