"""The configuration of a Hugging Face model: read without its code, checked, and refused by one typed error.

transformers raises errors of many kinds at a configuration that contradicts itself, some only where a model is built.
Its own are imported where a configuration is read.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from rollmesh.mesh.errors import DataError, RollmeshError
from rollmesh.mesh.files import refuse_special_files

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Far beyond every model that there is: a larger number is a mistake, and building the model would never end.
_LAYERS = 10_000
_WIDTH = 1 << 24
_SIZES = {
    "num_hidden_layers": _LAYERS,
    "n_layer": _LAYERS,
    **dict.fromkeys(("hidden_size", "n_embd", "vocab_size", "intermediate_size", "head_dim"), _WIDTH),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads"), _WIDTH),
}
_LONGEST_TEXT = 300
_HINT = "give a local Hugging Face folder, or a hub id, of a causal language model that transformers knows"


def read_config(name: str | Path, revision: str | None = None) -> PreTrainedConfig:
    """The configuration of a model.

    Args:
        name: a folder, as a path: no network is used. As a text a hub id too, or the path of a `config.json`. A
            copy in the hub's local cache is read without network.
        revision: of a hub id.

    Raises:
        DataError: transformers knows no such model, or the file cannot be a model's configuration.
    """
    from transformers import AutoConfig, PreTrainedConfig

    local = isinstance(name, Path)
    if not (folder := Path(name)).exists() and not local:
        local = _is_cached(str(name), revision)
        if not local and not _hub_is_known():
            raise DataError(
                f"model {name} is neither a local folder nor in the hub's local cache, and the hub cannot be reached",
                hint="give a folder that exists; without network only models in the cache can be named by their hub id",
            )
    if folder.is_dir():
        refuse_special_files(folder)
        if not (folder / "config.json").is_file():
            raise DataError(f"{folder} has no config.json", hint=_HINT)
    with naming_config(name):
        values, _ = PreTrainedConfig.get_config_dict(name, revision=revision, local_files_only=local)
        check_sizes(values, f"model {name}: config.json")
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            name, revision=revision, local_files_only=local, trust_remote_code=False
        )
    return config


def _is_cached(name: str, revision: str | None) -> bool:
    """True where the hub's local cache holds the configuration of a hub id."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str)
    except HFValidationError:  # no hub id: reading it says so
        return False


def _hub_is_known() -> bool:
    """False where the hub's name has no address here, as without network: its client would try for a minute."""
    from huggingface_hub import constants

    host = urlsplit(constants.ENDPOINT).hostname
    if host is None or getproxies():
        return True
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True


@contextmanager
def naming_config(name: str | Path) -> Iterator[None]:
    """Makes each error of reading a configuration, or of building its model, a `DataError` that names the model."""
    try:
        yield
    except RollmeshError:
        raise
    except Exception as error:
        raise _unusable(name, error) from error


def check_sizes(config: Mapping[str, Any], where: str) -> None:
    """Refuses sizes that no model has.

    Args:
        config: a `config.json`.
        where: to find it, for the error.

    Raises:
        DataError: naming the key and its value.
    """
    inner = config.get("text_config")
    for values in (config, inner if isinstance(inner, Mapping) else {}):
        for key, most in _SIZES.items():
            size = values.get(key)
            # A list has a size for each layer; without a value the architecture has its own.
            if size is None or isinstance(size, list):
                continue
            if type(size) is not int or not 1 <= size <= most:
                raise DataError(
                    f"{where} says {key}: {json.dumps(size)[:40]}, and should have a whole number from 1 to {most}",
                    hint="download or copy the file again",
                )
        heads, shared = values.get("num_attention_heads"), values.get("num_key_value_heads")
        if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
            raise DataError(
                f"{where} says num_attention_heads: {heads}, which num_key_value_heads: {shared} does not divide",
                hint="download or copy the file again",
            )


def _unusable(name: str | Path, error: Exception) -> DataError:
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return DataError(
            f"model {name} needs custom code, which its config.json names (auto_map)",
            hint="code of a model is never run here: choose an architecture that transformers itself has",
        )
    said = text if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {text}"
    short = said if len(said) <= _LONGEST_TEXT else f"{said[:_LONGEST_TEXT]}..."
    return DataError(f"cannot load model {name}: its config.json cannot be used: {short}", hint=_HINT)
