"""What a model folder says of the model, read before any engine is started: what can be refused early is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from transformers import AutoConfig, PreTrainedTokenizerBase

from rollmesh.generators.engines.hf.model.loading import eos_ids, load_tokenizer
from rollmesh.generators.engines.request_validation import Limits
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.trajectory.images import ImageProcessor


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model as its folder describes it.

    Attributes:
        limits: what it takes.
        tokenizer: None where the folder has no tokenizer files.
        images: the processor of a model that takes images; None: it takes text alone.
        experts: it is a mixture of experts.
    """

    limits: Limits
    tokenizer: PreTrainedTokenizerBase | None
    images: ImageProcessor | None = None
    experts: bool = False

    def for_text(self) -> ModelInfo:
        """The same model, of which only text is asked."""
        return replace(self, limits=replace(self.limits, images=False), images=None)


def read_folder(folder: Path, context: int | None) -> ModelInfo:
    """Reads configuration and tokenizer; local files only.

    Args:
        folder: a Hugging Face model folder; no weights needed.
        context: tokens of the longest sequence that will be asked for; None, or more than the model can: what it
            can.

    Raises:
        DataError: it is missing or cannot be read.
    """
    if not (folder / "config.json").is_file():
        raise DataError(f"{folder}: no config.json", hint="give a Hugging Face model folder")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{folder}/config.json: {error}") from error
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if not isinstance(longest, int):
        raise DataError(f"{folder}/config.json: no max_position_embeddings", hint="state the model's context length")
    tokenizer = load_tokenizer(folder)
    pictured = getattr(config, "vision_config", None) is not None
    images = ImageProcessor.load(folder) if pictured else None
    limits = Limits(
        context=min(longest, context or longest),
        vocabulary=int(text.vocab_size),
        eos=frozenset(eos_ids(folder, text, tokenizer)),
        text=tokenizer is not None,
        images=images is not None,
    )
    return ModelInfo(limits, tokenizer, images, bool(getattr(text, "num_experts_per_tok", None)))
