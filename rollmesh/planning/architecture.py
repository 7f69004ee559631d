"""Reads a model's sizes from its configuration alone: the model is built on the meta device, which holds no bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from rollmesh.learner.engines.fsdp2.experts.modules import expert_layers
from rollmesh.learner.engines.fsdp2.lora.layers import add_adapters
from rollmesh.learner.engines.fsdp2.preparation.blocks import transformer_blocks
from rollmesh.learner.engines.layer_kinds import layer_kinds, properties_of
from rollmesh.learner.engines.output.logit_form import UnknownFormError, read_logit_form
from rollmesh.learner.model_files.stored_model import quiet_transformers
from rollmesh.learner.vision.families import family_of
from rollmesh.mesh.config.lora import LoraSection
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.model_config import naming_config
from rollmesh.planning.shape import ModelShape, ParameterGroup, Rows


def build_on_meta(config: PreTrainedConfig, lora: LoraSection | None = None) -> PreTrainedModel:
    """The model without bytes, in float32.

    Args:
        config: of the model.
        lora: adds an adapter, and freezes the rest.

    Raises:
        ConfigError: there are no layers for an adapter.
        DataError: the architecture is no causal language model, or one with a vision part, or sizes contradict one
            another.
    """
    if family_of(config) is not None:
        raise DataError(
            f"model {config.name_or_path} ({config.model_type}) has a vision part, whose memory is not planned yet",
            hint="plan with a language model of the same sizes, and add 18 bytes for each weight of the vision part, "
            "or 2 where it is frozen",
        )
    with naming_config(str(config.name_or_path)), torch.device("meta"), quiet_transformers():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    if lora is not None:
        add_adapters(model, lora, str(config.name_or_path))
    return model.eval()


def read_shape(name: str, model: PreTrainedModel) -> ModelShape:
    """The sizes of a model.

    Args:
        name: for messages.
        model: on any device.

    Raises:
        DataError: it has no list of blocks, or no output layer.
    """
    blocks = transformer_blocks(model)
    output = model.get_output_embeddings()
    if not blocks or output is None:
        raise DataError(f"model {name!r} has no list of blocks or no output layer", hint="choose another model")
    text = model.config.get_text_config()
    kinds, layers = kinds_of(blocks, layer_kinds(text))
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    experts = {id(parameter) for layer in expert_layers(model) for parameter in layer.module.parameters()}
    weight = output.weight
    assert isinstance(weight, torch.Tensor)
    return ModelShape(
        name=name,
        model_type=model.config.model_type,
        hidden=text.hidden_size,
        heads=getattr(text, "num_attention_heads", 0),
        vocabulary=len(weight),
        kinds=tuple(_group(blocks[layers.index(kind)].parameters(), experts) for kind in range(kinds)),
        layers=tuple(layers),
        root=_group(rest, experts),
        output=weight.numel(),
        tiled_output=_tiled(model),
        kv_elements=_kv_elements(text, compressed=False),
        compressed_kv_elements=_kv_elements(text, compressed=True),
    )


def kinds_of(blocks: list[nn.Module], layer_types: list[str]) -> tuple[int, list[int]]:
    """Numbers blocks by kind: equal parameters, and the same type of layer.

    Returns:
        Number of kinds, and the kind of every block.
    """
    known: dict[Any, int] = {}
    layers = []
    for place, block in enumerate(blocks):
        named = tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())
        kind = layer_types[place] if place < len(layer_types) else ""
        layers.append(known.setdefault((type(block), kind, named), len(known)))
    return len(known), layers


def _tiled(model: PreTrainedModel) -> bool:
    try:
        read_logit_form(model)
    except UnknownFormError:
        return False
    return True


def _group(parameters: Iterable[nn.Parameter], experts: Collection[int]) -> ParameterGroup:
    """The parameters of a group; `experts` are the identities of those that are stacks of experts."""
    trained: list[Rows] = []
    frozen: list[Rows] = []
    for found in parameters:
        rows = Rows(len(found), found[0].numel(), experts=id(found) in experts) if found.dim() else Rows(1, 1)
        (trained if found.requires_grad else frozen).append(rows)
    return ParameterGroup(tuple(trained), tuple(frozen))


def _kv_elements(text: PreTrainedConfig, *, compressed: bool) -> int:
    layers = sum(properties_of(kind).attends for kind in layer_kinds(text))
    rank = getattr(text, "kv_lora_rank", None)
    if rank and compressed:
        return layers * int(rank + text.qk_rope_head_dim)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if rank:
        return layers * int(heads * (text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim))
    return layers * 2 * int(heads * width)
