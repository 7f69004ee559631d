"""Checks of a model's files without loading them: missing files, truncated files, folders that are no model.

Nothing heavy is imported here: it is also asked before any service is started.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollmesh.learner.folder_facts.given_path import require_config
from rollmesh.learner.folder_facts.quantization import refuse_quantized
from rollmesh.learner.folder_facts.weight_names import COPY_AGAIN, SINGLE_NAME, weight_file_names
from rollmesh.learner.model_files.tokenizer_checks import check_same_tokens, check_tokenizer
from rollmesh.mesh.errors import ConfigError, DataError
from rollmesh.mesh.files import refuse_special_files
from rollmesh.mesh.model_config import check_sizes
from rollmesh.mesh.weights.safetensors_format import INDEX_NAME

_TOKENIZER = ("tokenizer.json", "tekken.json", "vocab*", "merges.txt", "*.model", "*.tiktoken")
_SIZES = ("hidden_size", "n_embd", "num_hidden_layers", "n_layer", "intermediate_size", "vocab_size")
_HEADS = ("num_attention_heads", "n_head")
_CONTEXT = ("max_position_embeddings", "n_positions")
# The header of a safetensors file has its length.
_LENGTH_BYTES = 8
_POINTER = b"version https://git-lfs"


def check_model_files(folder: Path, setting: str, *, tokenizer: bool) -> None:
    """Refuses a folder that cannot be loaded.

    Args:
        folder: of the model.
        setting: key of the configuration that names it.
        tokenizer: it must have one, of this model.

    Raises:
        DataError: naming the file and the key.
    """
    refuse_special_files(folder)
    config = read_model_config(folder, setting)
    refuse_quantized(folder, config, _check_weights(folder, setting))
    if not tokenizer:
        return
    if isinstance(places := text_section(config).get("vocab_size"), int):
        check_tokenizer(folder, setting, places)
    if not any(path for pattern in _TOKENIZER for path in folder.glob(pattern)):
        raise DataError(
            f"{setting}: {folder} has no tokenizer: neither tokenizer.json nor a vocabulary is there",
            hint="copy the tokenizer's files (tokenizer.json, tokenizer_config.json, ...) next to config.json",
        )


def check_role_tokens(actor: Path, role: Path, setting: str) -> None:
    """Refuses a role's model that has other tokens than the actor's; see `check_same_tokens`.

    Args:
        actor: folder of the actor's model.
        role: folder of the role's model.
        setting: key of the configuration that names it.

    Raises:
        DataError: naming the key and a token.
    """
    places = text_section(read_model_config(role, setting)).get("vocab_size")
    check_same_tokens(actor, role, setting, places if isinstance(places, int) else None)


def read_model_config(folder: Path, setting: str) -> dict[str, Any]:
    """The folder's `config.json`.

    Raises:
        DataError: the file is missing, is no JSON object, or has sizes of no model.
    """
    path = require_config(folder, setting)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{setting}: {path} is not valid JSON: {error}", hint=COPY_AGAIN) from error
    if not isinstance(config, dict):
        raise DataError(f"{setting}: {path} holds no object", hint=COPY_AGAIN)
    check_sizes(config, f"{setting}: {path}")
    return config


def refuse_classifier(folder: Path, setting: str) -> None:
    """Refuses a model that scores texts and generates none.

    Args:
        folder: of the model, with a readable config.json.
        setting: key of the configuration that names it.

    Raises:
        DataError: the model is one.
    """
    names = read_model_config(folder, setting).get("architectures")
    if isinstance(names, list) and any(str(name).endswith("ForSequenceClassification") for name in names):
        raise DataError(
            f"{setting}: {folder} is a {names[0]}, which scores texts and generates none",
            hint=f"give a causal language model; as a reward it is reward.functions: [model:{folder}]",
        )


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each stored tensor by name, from the headers of files that `check_model_files` has accepted."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(_LENGTH_BYTES), "little")))
        shapes |= {name: tuple(info["shape"]) for name, info in header.items() if name != "__metadata__"}
    return shapes


def text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a `config.json` about the language model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def declared_context(config: Mapping[str, Any]) -> int | None:
    """Longest sequence in tokens, from a `config.json`; None where it has none."""
    text = text_section(config)
    return next((text[name] for name in _CONTEXT if isinstance(text.get(name), int)), None)


def attention_heads(config: Mapping[str, Any]) -> int | None:
    """Heads of the queries, from a `config.json`; None where it has none."""
    text = text_section(config)
    return next((text[name] for name in _HEADS if isinstance(text.get(name), int)), None)


def architecture(config: Mapping[str, Any]) -> str:
    """`qwen2: hidden_size 64, ...`: the type and sizes in a `config.json`; another one has other weights."""
    text = text_section(config)
    sizes = ", ".join(f"{name} {text[name]}" for name in _SIZES if isinstance(text.get(name), int))
    return f"{text.get('model_type', config.get('model_type'))}: {sizes}"


def check_context(context: int | None, longest: int) -> None:
    """Refuses prompts and responses that are together longer than the model's context.

    Args:
        context: tokens that the model sees; None: not known.
        longest: tokens of prompt and response.

    Raises:
        ConfigError: naming both keys.
    """
    if context is not None and longest > context:
        raise ConfigError(
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {longest}, but the longest sequence that the "
            f"model takes has {context} tokens",
            hint="lower one of the two; or choose a model with a longer context (max_position_embeddings)",
        )


def _check_weights(folder: Path, setting: str) -> dict[str, str]:
    """The dtypes of the stored tensors by name."""
    names = weight_file_names(folder, setting)
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise DataError(f"{setting}: {folder} lacks {', '.join(missing)}, which {INDEX_NAME} names", hint=COPY_AGAIN)
    if (folder / SINGLE_NAME).is_file() and names != [SINGLE_NAME]:
        raise DataError(
            f"{setting}: {folder} has two sets of weights: {SINGLE_NAME}, and the {len(names)} files that {INDEX_NAME} "
            "names. Some programs read the one, some the other",
            hint=f"keep one: delete {SINGLE_NAME}, or {INDEX_NAME} and the files that it names",
        )
    dtypes = {path.name: _check_safetensors(path, setting) for path in sorted(folder.glob("*.safetensors"))}
    return {tensor: dtype for name in names for tensor, dtype in dtypes.get(name, {}).items()}


def _check_safetensors(path: Path, setting: str) -> dict[str, str]:
    """Compares the file's length with its header; gives the dtypes of its tensors."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            begin = file.read(len(_POINTER))
            file.seek(_LENGTH_BYTES)
            length = int.from_bytes(begin[:_LENGTH_BYTES], "little")
            header = file.read(length) if length <= size - _LENGTH_BYTES else b""
    except OSError as error:
        raise DataError(f"{setting}: {path} cannot be read: {error.strerror}") from error
    if begin == _POINTER:
        raise DataError(f"{setting}: {path} is a pointer of Git LFS, not the weights", hint="run `git lfs pull` there")
    try:
        tensors = {name: info for name, info in json.loads(header).items() if name != "__metadata__"}
        end = _LENGTH_BYTES + length + max((int(info["data_offsets"][1]) for info in tensors.values()), default=0)
        dtypes = {name: str(info.get("dtype")) for name, info in tensors.items()}
    except (ValueError, LookupError, AttributeError, TypeError, OverflowError, RecursionError) as error:
        raise DataError(
            f"{setting}: {path} is cut off or damaged: it has no readable header", hint=COPY_AGAIN
        ) from error
    if end != size:
        raise DataError(f"{setting}: {path} is cut off or damaged: {size} bytes of {end}", hint=COPY_AGAIN)
    return dtypes
