"""Adapters on a model's linear layers, made by peft: the base is frozen, and two small matrices of each layer train.

A layer computes W x + s B A x. B begins with zeros, so that a new adapter changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from rollmesh.learner.engines.fsdp2.loading import place_full
from rollmesh.learner.engines.fsdp2.preparation.blocks import transformer_blocks
from rollmesh.learner.engines.tensors.adapters import AdapterStart
from rollmesh.learner.model_files.adapter_names import A_END, B_END, NAME, is_trained_with_adapters
from rollmesh.mesh.config.lora import LoraSection
from rollmesh.mesh.errors import ConfigError


def add_adapters(model: nn.Module, section: LoraSection, name: str) -> None:
    """Adds an adapter to the chosen layers, in place, without memory.

    From then on nothing else is trained but the head of a value model, which is new and has no base.

    Args:
        model: without memory, with its parameters' final names.
        section: says to which layers.
        name: of the model, for errors.

    Raises:
        ConfigError: it has no such layer.
    """
    # It imports half of transformers: not before it is needed.
    from peft import LoraConfig, inject_adapter_in_model

    chosen = _targets(model, section, name)
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,  # type: ignore[arg-type]  # any number is divided by the rank
        target_modules=chosen,
        use_rslora=section.rank_stabilized,
        lora_dropout=0.0,
        bias="none",
    )
    inject_adapter_in_model(config, model, NAME, low_cpu_mem_usage=True)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained_with_adapters(parameter_name))


def fill_adapters(parameters: Mapping[str, nn.Parameter], section: LoraSection, seed: int) -> None:
    """Gives adapters their first values, the same whatever the number of ranks.

    Args:
        parameters: of the adapters, by plain name; they have memory.
        section: of the adapter.
        seed: of the run.

    Raises:
        DataError: see `AdapterStart`.
    """
    start = AdapterStart(section, {name: parameter.shape for name, parameter in parameters.items()}, seed)
    for name, parameter in parameters.items():
        place_full(parameter, start.values(name))


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Computes the base alone within the context; for passes without gradient."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: list[Any] = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    # Their public switch changes what is trained as well, which sharded parameters do not allow.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def pairs(named: Iterator[tuple[str, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of every adapted layer, by its name.

    Args:
        named: all tensors by plain name.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in named:
        for end in (A_END, B_END):
            if name.endswith(end):
                found.setdefault(name.removesuffix(end), {})[end] = tensor
    return {layer: (matrices[A_END], matrices[B_END]) for layer, matrices in found.items()}


def _targets(model: nn.Module, section: LoraSection, model_name: str) -> list[str]:
    blocks = {id(module) for block in transformer_blocks(model) for module in block.modules()}
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and id(module) in blocks]
    if section.targets == "all-linear":
        chosen = linear
    else:
        chosen = [name for name in linear if name.rpartition(".")[2] in section.targets]
        known = sorted({name.rpartition(".")[2] for name in linear})
        if unknown := sorted(set(section.targets) - set(known)):
            raise ConfigError(
                f"learner.lora.targets: model {model_name!r} has no linear layer {unknown[0]!r} in its blocks",
                hint=f"known: {', '.join(known)}; or all-linear",
            )
    if not chosen:
        raise ConfigError(f"learner.lora: model {model_name!r} has no linear layer in its blocks")
    return chosen
