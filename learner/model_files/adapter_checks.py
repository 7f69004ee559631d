"""Checks of a low-rank adapter against the files of its model, before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rollmesh.learner.model_files.adapter_folder import FolderAdapter, read_adapter_config
from rollmesh.learner.model_files.checks import tensor_shapes
from rollmesh.mesh.config.lora import LoraSection
from rollmesh.mesh.errors import ConfigError, DataError

_END = ".weight"


def check_adapter(section: LoraSection, folder: Path) -> None:
    """Refuses what the files of a model already rule out; engines check the rest when they have built it.

    Args:
        section: of the adapter.
        folder: of the model, with complete files.

    Raises:
        ConfigError: the model has no such layers.
        DataError: `start_from` cannot be read, or is of other layers, another rank or another scale.
    """
    shapes = tensor_shapes(folder)
    layers = {name.removesuffix(_END) for name, shape in shapes.items() if name.endswith(_END) and len(shape) == 2}
    # Blocks are numbered; experts in one tensor and layers of other kinds are known to the engine alone.
    known = {layer.rpartition(".")[2] for layer in layers if any(part.isdigit() for part in layer.split("."))}
    if section.targets != "all-linear" and (unknown := sorted(set(section.targets) - known)):
        raise ConfigError(
            f"learner.lora.targets: the model in {folder} has no linear layer {unknown[0]!r} in its blocks",
            hint=f"known: {', '.join(sorted(known))}; or all-linear",
        )
    if section.start_from is not None:
        _check_start(FolderAdapter(section.start_from), section, shapes)


def describe_other_base(section: LoraSection, model: str) -> str | None:
    """A sentence about an adapter that was trained next to a base of another name; None where there is none.

    Args:
        section: of the adapter.
        model: folder or hub id of the model.

    Raises:
        DataError: the folder of the adapter cannot be read.
    """
    if section.start_from is None:
        return None
    base = read_adapter_config(section.start_from)[1]
    if not base or base == model or _same_folder(base, model):
        return None
    return (
        f"learner.lora.start_from {section.start_from} was trained next to {base}, and model.path is {model}: "
        "with other weights its product means nothing"
    )


def _same_folder(first: str, second: str) -> bool:
    return Path(first).is_dir() and Path(second).is_dir() and Path(first).samefile(second)


def _check_start(stored: FolderAdapter, section: LoraSection, shapes: Mapping[str, tuple[int, ...]]) -> None:
    stored.check_scale(section)
    for layer in sorted(stored.layers):
        a, b = stored.read(layer)
        weight = shapes.get(layer + _END)
        if weight is not None and weight != (b.shape[0], a.shape[1]):
            raise DataError(
                f"{stored.origin}: the adapter of {layer} is for a weight of shape {[b.shape[0], a.shape[1]]}, and "
                f"the model has {list(weight)}",
                hint="give the model with which the adapter was trained",
            )
        if a.shape[0] != section.rank:
            raise DataError(
                f"{stored.origin} has rank {a.shape[0]}, and learner.lora says {section.rank}",
                hint="set learner.lora.rank as it has",
            )
