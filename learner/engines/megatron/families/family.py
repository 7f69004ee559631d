"""A kind of model: the rules of its weights, and the meaning of its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rollmesh.learner.engines.megatron.weight_rules import Rule

_TIED = "share_embeddings_and_output_weights"


@dataclass(frozen=True, slots=True)
class Settings:
    """A model as Megatron-Core is told of it.

    Attributes:
        transformer: keyword arguments of `TransformerConfig`.
        model: keyword arguments of `GPTModel`.
    """

    transformer: dict[str, object]
    model: dict[str, object]

    @property
    def tied(self) -> bool:
        """Embedding and output layer are one tensor."""
        return bool(self.model[_TIED])


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of model.

    Attributes:
        model_type: name in transformers.
        rules: of all weights that such a model may have.
        translate: the settings for a configuration of transformers. Raises ConfigError for what Megatron would
            compute in another way.
    """

    model_type: str
    rules: tuple[Rule, ...]
    translate: Callable[[Any], Settings]

    def settings(self, config: Any, *, value_model: bool = False) -> Settings:
        """The settings of a model.

        Args:
            config: of transformers.
            value_model: a head takes the place of the output layer, so that nothing is tied.

        Raises:
            ConfigError: Megatron would compute something in another way; names the key.
        """
        settings = self.translate(config)
        return replace(settings, model=settings.model | {_TIED: settings.tied and not value_model})
