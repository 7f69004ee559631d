"""Variables of the environment that Megatron-Core and Transformer Engine need; a value of the user's own stays."""

from __future__ import annotations

import os


def prepare_environment() -> None:
    """Sets them; before CUDA starts."""
    # Megatron counts on it for the order of kernels and messages; read when CUDA starts.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Transformer Engine asks for TF32 where all is float32; read with the first product of matrices.
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
