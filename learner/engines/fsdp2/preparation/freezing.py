"""Parts of a model that are not trained, as the vision part often is."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from rollmesh.mesh.errors import ConfigError

KEY = "learner.frozen"


def freeze(model: nn.Module, parts: Sequence[str], name: str) -> None:
    """Excludes parts of a model from training.

    Args:
        model: before it is prepared.
        parts: last parts of modules' names, such as `vision_tower` or `layers.0`.
        name: the model, for errors.

    Raises:
        ConfigError: it has no such part, or nothing is left to train.
    """
    for part in parts:
        found = [module for own, module in model.named_modules() if f".{own}".endswith(f".{part}")]
        if not found:
            raise ConfigError(
                f"{KEY}: model {name!r} has no part {part!r}",
                hint=f"its parts: {', '.join(_parts(model))}; their own parts can be named too",
            )
        for module in found:
            module.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"{KEY}: nothing of model {name!r} is left to train", hint="leave a part out of the list")


def _parts(model: nn.Module) -> list[str]:
    """The parts at the top, and their own."""
    return [own for own, _ in model.named_modules() if own and own.count(".") <= 1]
