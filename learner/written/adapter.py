"""A written adapter's folder, opened as peft will open it, and compared with the model to which it belongs."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.weights.adapter import PEFT_A, PEFT_B, PEFT_PREFIX
from rollmesh.mesh.weights.peft_folder import CONFIG_NAME, WEIGHTS_NAME


def check_written_adapter(folder: Path, base: Path) -> None:
    """Refuses an adapter that peft would put elsewhere than where it was trained, or that is not whole.

    Args:
        folder: just written.
        base: folder of the model that was trained.

    Raises:
        DataError: something differs; names it.
    """
    try:
        config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        with safe_open(folder / WEIGHTS_NAME, framework="pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, ValueError, SafetensorError) as error:
        raise _refused(folder, base, f"it cannot be read: {error}") from error
    sides = [
        {name.removeprefix(PEFT_PREFIX).removesuffix(end) for name in shapes if name.endswith(end)}
        for end in (PEFT_A, PEFT_B)
    ]
    layers = sides[0]
    if not layers or layers != sides[1] or layers != set(config.get("target_modules") or ()):
        raise _refused(folder, base, "its layers are not those that its configuration names")
    with StoredModel(base, backbone_only=bool(config.get("modules_to_save"))) as source:
        described = source.describe()
    for layer in sorted(layers):
        weight = described.get(f"{layer}.weight")
        a, b = (shapes[f"{PEFT_PREFIX}{layer}{end}"] for end in (PEFT_A, PEFT_B))
        if weight is None or list(weight.shape) != [b[0], a[1]] or [a[0], b[1]] != [config["r"]] * 2:
            raise _refused(folder, base, f"its product for {layer} does not fit the model's weight")


def _refused(folder: Path, base: Path, reason: str) -> DataError:
    return DataError(
        f"the written adapter {folder.name} is not what was trained on {base}: {reason}",
        hint="the checkpoint stays, and `rollmesh export RUN OUT --adapter` writes it again",
    )
