"""An adapter that begins with the values of a folder that peft, or `rollmesh export --adapter`, wrote."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from rollmesh.learner.engines.fsdp2.loading import place_full
from rollmesh.learner.model_files.adapter_names import is_adapter, peft_name
from rollmesh.mesh.config.lora import LoraSection
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.weights.peft_folder import read_peft_folder


def load_adapters(parameters: Mapping[str, nn.Parameter], section: LoraSection) -> None:
    """Gives adapters the values of `section.start_from`.

    Args:
        parameters: of the model, by plain name; they have memory.
        section: of the adapter that is trained.

    Raises:
        DataError: the folder cannot be read, or holds an adapter of another rank, scale, or of other layers.
    """
    folder = section.start_from
    assert folder is not None, "it was set"
    factors, scale = read_peft_folder(folder)
    own = {peft_name(name): parameter for name, parameter in parameters.items() if is_adapter(name)}
    if not math.isclose(scale, section.scale):
        raise DataError(
            f"the adapter in {folder} has scale {scale:g}, and learner.lora says {section.scale:g}",
            hint="set learner.lora.alpha and rank_stabilized as in its adapter_config.json",
        )
    if others := sorted(own.keys() ^ factors.keys()):
        which = "has no" if others[0] in own else "has a"
        raise DataError(f"the adapter in {folder} {which} {others[0]}", hint="set learner.lora.targets as it has them")
    for name, parameter in own.items():
        if factors[name].shape != parameter.shape:
            shapes = f"{list(factors[name].shape)}, and learner.lora asks for {list(parameter.shape)}"
            raise DataError(
                f"the adapter in {folder}: {name} has shape {shapes}", hint="set learner.lora.rank as it has"
            )
        place_full(parameter, factors[name].to(torch.float32))
