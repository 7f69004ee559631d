"""Signs of quantized weights, which are neither trained nor evaluated here: in the configuration, in stored tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollmesh.mesh.errors import DataError

_KEYS = ("quantization_config", "compression_config")
# GPTQ and AWQ; compressed-tensors; fp8; bitsandbytes; MXFP4.
_NAMES = re.compile(
    r"(qweight|qzeros|weight_packed|weight_scale(_inv)?|SCB|absmax|quant_map|quant_state\..*|proj_(blocks|scales))$"
)
# Weights of these dtypes need scales.
_INTEGERS = ("I8", "U8", "I32")
_FLOATS = ("F8", "F6", "F4")


def refuse_quantized(folder: Path, config: Mapping[str, Any], dtypes: Mapping[str, str]) -> None:
    """Refuses a model whose weights are quantized.

    Args:
        folder: for the error.
        config: its `config.json`.
        dtypes: of its stored tensors by name, as safetensors calls them.

    Raises:
        DataError: naming the sign.
    """
    sign = _sign(config, dtypes)
    if sign is not None:
        raise DataError(
            f"model {folder} has quantized weights ({sign})",
            hint="choose the model in bfloat16, float16 or float32",
        )


def _sign(config: Mapping[str, Any], dtypes: Mapping[str, str]) -> str | None:
    inner = config.get("text_config")
    for section in (config, inner if isinstance(inner, Mapping) else {}):
        for key in _KEYS:
            if section.get(key):
                return f"{key} in its config.json"
    for name, dtype in dtypes.items():
        if _NAMES.search(name):
            return f"it holds {name}"
        if dtype.startswith(_FLOATS) or (dtype in _INTEGERS and name.endswith(".weight")):
            return f"{name} is stored as {dtype}"
    return None
