"""The location of the model: a local Hugging Face folder, or the local copy of a hub id."""

from __future__ import annotations

import json
from pathlib import Path

from rollmesh.learner.folder_facts.given_path import is_folder
from rollmesh.learner.model_files.checks import check_model_files, declared_context
from rollmesh.learner.vision.families import FAMILIES
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.model_config import read_config


def resolve_model(model: ModelSection, setting: str = "model") -> ModelSection:
    """Resolves a model to a local folder; a hub id is downloaded (or found in the local cache) at its revision.

    Args:
        model: as configured.
        setting: where, for errors.

    Raises:
        DataError: no such folder, no model in it, or the hub id cannot be loaded.
    """
    folder = local_folder(model, setting)
    _check(folder, setting)
    return model.model_copy(update={"path": str(folder), "revision": None})


def local_folder(model: ModelSection, setting: str = "model") -> Path:
    """The local folder of a model, checked no further.

    Args:
        model: as configured.
        setting: where, for errors.

    Raises:
        DataError: no such folder, or the hub id cannot be loaded.
    """
    return Path(model.path) if is_folder(model.path, f"{setting}.path") else _download(model, setting)


def _check(folder: Path, setting: str) -> None:
    check_model_files(folder, f"{setting}.path", tokenizer=setting == "model")
    refuse_untrainable(folder, f"{setting}.path")


def refuse_untrainable(folder: Path, setting: str) -> None:
    """Refuses vision-language models of families without a forward pass over images here.

    Models that transformers also loads as a causal language model are trained on text alone.

    Args:
        folder: has a readable config.json.
        setting: key of the configuration that names it.

    Raises:
        DataError: the model is one.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(config, dict) or "vision_config" not in config or config.get("model_type") in FAMILIES:
        return
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if config.get("model_type") not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise DataError(
            f"{setting}: {folder} is a vision-language model ({config.get('model_type')}) of a kind that the "
            "learner does not train",
            hint=f"generators answer prompts with images; to train choose one of {', '.join(sorted(FAMILIES))}",
        )


def _download(model: ModelSection, setting: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                model.path,
                revision=model.revision,
                allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"],
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise DataError(
            f"model {model.path!r} is neither a local folder nor available from the hub: {error}",
            hint=f"check {setting}.path and {setting}.revision; without network the hub's local cache must hold it",
        ) from error


def context_length(folder: Path) -> int | None:
    """Longest sequence of the model in tokens, from its configuration; None where it has none."""
    return declared_context(read_config(folder).get_text_config().to_dict())


def embedding_rows(folder: Path) -> int | None:
    """Token ids that the model has an embedding for, from its configuration; None if that does not say."""
    if not (folder / "config.json").is_file():
        return None
    found = getattr(read_config(folder).get_text_config(), "vocab_size", None)
    return found if isinstance(found, int) else None
