"""A model's folder, examined before anything starts: every command asks here, and gets the same answer.

Folders that would compute another model, or would fail later, are refused. Parts that are left out are told, by name
and number.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rollmesh.learner.examination.custom_code import describe_model_code, describe_tokenizer_code
from rollmesh.learner.examination.tokenizer_probe import describe_other_reading
from rollmesh.learner.examination.unused import describe_unused
from rollmesh.learner.folder_facts.weight_names import weight_file_names
from rollmesh.learner.model_files.checks import check_model_files, refuse_classifier
from rollmesh.learner.model_files.location import refuse_untrainable
from rollmesh.learner.model_files.reading import read_all, refuse_other_twins
from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.learner.model_files.tokenizer_checks import check_loaded_tokenizer
from rollmesh.mesh.tokenizer_files import load_tokenizer

READ_S = 60.0
"""Seconds for which weights are read before services start; what is left is checked by who loads it."""
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx")
_NAMED = 3


def examine(
    folder: Path, setting: str, *, tokenizer: bool = True, backbone_only: bool = False, read_s: float | None = None
) -> list[str]:
    """Refuses a folder that cannot be used as the model that it says it is.

    Args:
        folder: of the model.
        setting: key of the configuration that names it.
        tokenizer: it must have one, of this model.
        backbone_only: see `StoredModel`.
        read_s: seconds for which the weights are read, where those who load them start later; None: the caller loads
            them, and finds the same.

    Returns:
        Sentences about what is in the folder, and is not used.

    Raises:
        DataError: naming the file, tensor or token, and the key.
    """
    check_model_files(folder, setting, tokenizer=tokenizer)
    refuse_untrainable(folder, setting)
    if not backbone_only:
        refuse_classifier(folder, setting)
    with StoredModel(folder, backbone_only=backbone_only) as source:
        notices = [*describe_model_code(folder, setting, source.model), *_unread(folder, setting)]
        refuse_other_twins(source)
        if (unused := describe_unused(source)) is not None:
            notices.append(f"{unused}. They are not trained, and written folders have them as they are")
        if tokenizer:
            notices += _of_tokenizer(folder, setting, source.embedding_rows)
        if read_s is not None:
            notices += _of_values(source, read_s)
    return notices


def _of_tokenizer(folder: Path, setting: str, places: int) -> Iterator[str]:
    tokenizer = load_tokenizer(folder)
    check_loaded_tokenizer(tokenizer, folder, setting, places)
    yield from describe_tokenizer_code(folder, tokenizer)
    yield from describe_other_reading(folder, tokenizer)


def _of_values(source: StoredModel, read_s: float) -> Iterator[str]:
    read, whole = read_all(source, read_s)
    if read < whole:
        yield (
            f"{read / 1e9:.1f} of {whole / 1e9:.1f} GB of weights in {source.folder} were read in {read_s:.0f} s, and "
            "their numbers are finite; the rest is checked when it is loaded"
        )


def _unread(folder: Path, setting: str) -> Iterator[str]:
    """Says which files of weights are not the model's."""
    found = {path.name for pattern in _WEIGHTS for path in folder.glob(pattern)}
    others = sorted(found.difference(weight_file_names(folder, setting)))
    if others:
        more = f" and {len(others) - _NAMED} more" * (len(others) > _NAMED)
        yield f"{folder} also holds {', '.join(others[:_NAMED])}{more}, which are not read"
