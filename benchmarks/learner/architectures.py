"""The architectures that train correctly, as the probe finds: writes the table of docs/architectures.md.

    python -m benchmarks.learner.architectures docs/architectures.md

Every row is a tiny random model, probed as at the start of a run, in float32 and in bfloat16. Half a minute on a CPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.learner.generated_tables import fill_page
from benchmarks.learner.tiny_models import ARCHITECTURES, save_model
from rollmesh.learner.algorithms.docs_reference import markdown_table
from rollmesh.learner.batching.types import Packing
from rollmesh.learner.engines.interface import EngineSpec
from rollmesh.learner.engines.registry import create_engine
from rollmesh.learner.engines.tolerances import FLOORS, Evidence
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.config.learner import OptimizerSection
from rollmesh.mesh.errors import DataError

_PACKINGS = {
    Packing.SHARED: "prompts shared",
    Packing.REPEATED: "prompts shared but in recurrent layers",
    Packing.ROWS: "rows",
}
REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Row:
    """The probe's findings about an architecture.

    Attributes:
        packing: how its sequences are computed; `refused` where float32 is.
        found: by compute dtype, how far from transformers; `refused`, where it is.
    """

    packing: str
    found: dict[str, str]


def probe(folder: Path, architecture: str) -> Row:
    """Probes a tiny model of an architecture.

    Args:
        folder: where the model is written.
        architecture: one of `ARCHITECTURES`.
    """
    save_model(folder, architecture)
    packing = ""
    found = {}
    for dtype in FLOORS:
        spec = EngineSpec(ModelSection(path=str(folder)), OptimizerSection(), 1, param_dtype=dtype)
        try:
            with closing(create_engine(spec)) as engine:
                found[dtype] = _differences(engine.probe())
                packing = packing or _PACKINGS[engine.packing]
        except DataError:
            found[dtype] = REFUSED
            packing = packing or REFUSED
    return Row(packing, found)


def table() -> str:
    """The table of all architectures, as Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            (f"`{name}`", about.kind, row.packing, *row.found.values())
            for name, about in ARCHITECTURES.items()
            for row in [probe(Path(folder) / name, name)]
        ]
    return markdown_table(("model type", "layers", "packing", *FLOORS), rows)


def _differences(evidence: Evidence) -> str:
    found = evidence.rounded or evidence.truth
    return f"{found.outputs:.0e}, {found.gradient:.0e}"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    fill_page(arguments, __doc__, "architectures", table)


if __name__ == "__main__":
    main()
