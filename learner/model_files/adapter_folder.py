"""A folder with an adapter as peft writes it: `adapter_config.json` and `adapter_model.safetensors`.

Only products that are added to the weights of linear layers are taken. A folder with more is refused, because its model
would not be the one that is computed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollmesh.mesh.config.lora import LoraSection
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.files import refuse_special_files
from rollmesh.mesh.weights.adapter import adapted_weight, factor_names
from rollmesh.mesh.weights.peft_folder import CONFIG_NAME, WEIGHTS_NAME

# Settings under which a weight is more than W + scale * B A, with the values that leave it at that.
_PLAIN: dict[str, Any] = {
    "bias": "none",
    "use_dora": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "lora_bias": False,
}


def is_adapter_folder(folder: Path) -> bool:
    """True where a folder holds an adapter, and no model."""
    return (folder / CONFIG_NAME).is_file()


def read_adapter_config(folder: Path) -> tuple[float, str]:
    """The factor of an adapter's products, and the folder or hub id of its base, empty where it is not named.

    Raises:
        DataError: unreadable, or not a plain low-rank adapter.
    """
    refuse_special_files(folder)
    path = folder / CONFIG_NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        lora = LoraSection(
            rank=values["r"], alpha=values["lora_alpha"], rank_stabilized=bool(values.get("use_rslora", False))
        )
        scale = lora.scale
        base = str(values.get("base_model_name_or_path") or "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(
            f"{path} cannot be read: {type(error).__name__}: {error}", hint="give a folder that peft has written"
        ) from error
    odd = [key for key, plain in _PLAIN.items() if values.get(key) not in (plain, None)]
    if values.get("peft_type", "LORA") != "LORA" or odd:
        what = f"{odd[0]}: {values[odd[0]]!r}" if odd else f"peft_type: {values['peft_type']!r}"
        raise DataError(
            f"{path} has {what}, and only plain low-rank adapters are read",
            hint="merge it with peft (`merge_and_unload`), and give the model's folder",
        )
    return scale, base


class FolderAdapter:
    """The adapter in a folder.

    Args:
        folder: as peft writes it.

    Attributes:
        origin, scale, layers: see `rollmesh.learner.model_files.full_weights.Adapter`.

    Raises:
        DataError: unreadable, or not a plain low-rank adapter.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / WEIGHTS_NAME
        self.origin = f"adapter {folder}"
        self.scale, _ = read_adapter_config(folder)
        try:
            with safe_open(self._path, framework="pt") as file:
                shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise DataError(f"{self._path} cannot be read: {error}", hint="copy the folder again") from error
        weights = {weight for name in shapes if (weight := adapted_weight(name)) is not None}
        expected = {name for weight in weights for name in factor_names(weight)}
        if not weights or expected != set(shapes):
            odd = sorted(expected.symmetric_difference(shapes))
            raise DataError(
                f"{self._path} is not a low-rank adapter of linear layers: {odd[0] if odd else 'it is empty'}",
                hint="merge it with peft (`merge_and_unload`), and give the model's folder",
            )
        self.layers = frozenset(weight.removesuffix(".weight") for weight in weights)
        self._check_shapes(shapes)

    def check_scale(self, section: LoraSection) -> None:
        """Refuses to be continued with another scale.

        Raises:
            DataError: the scales differ.
        """
        if not math.isclose(self.scale, section.scale):
            raise DataError(
                f"{self.origin} has scale {self.scale:g}, and learner.lora says {section.scale:g}",
                hint="set learner.lora.alpha and rank_stabilized as in its adapter_config.json",
            )

    def read(self, layer: str) -> tuple[Tensor, Tensor]:
        """A and B of a layer, in float32.

        Raises:
            DataError: some of their numbers are not finite.
        """
        with safe_open(self._path, framework="pt") as file:
            a, b = (file.get_tensor(name).to(torch.float32) for name in factor_names(f"{layer}.weight"))
        if not (a.isfinite().all() and b.isfinite().all()):
            raise DataError(
                f"{self.origin}: the factors of {layer} have numbers that are not finite",
                hint="give an adapter of a training that did not diverge",
            )
        return a, b

    def _check_shapes(self, shapes: Mapping[str, Sequence[int]]) -> None:
        for layer in sorted(self.layers):
            a, b = (shapes[name] for name in factor_names(f"{layer}.weight"))
            if not (len(a) == len(b) == 2 and a[0] == b[1] > 0):
                raise DataError(
                    f"{self.origin}: the factors of {layer} have the shapes {list(a)} and {list(b)}, without a product",
                    hint="give a folder that peft has written",
                )
