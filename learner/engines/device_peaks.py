"""Peak arithmetic of devices in bfloat16, for the share of it that a run uses (MFU).

Numbers are those of NVIDIA's data sheets for dense matrices and float32 accumulation; sheets that give them with
sparsity alone are halved. A device that is not listed has no peak here, so that nothing wrong is reported.
"""

from __future__ import annotations

import re

# Pattern of `torch.cuda.get_device_name`, TFLOP/s. The first that matches counts.
_PEAKS = [
    (r"\bB200\b", 2250.0),
    (r"\bH200 NVL\b", 835.0),
    (r"\bH200\b|\bGH200\b", 989.0),
    (r"\bH100 PCIe\b", 756.0),
    (r"\bH100 NVL\b", 835.0),
    (r"\bH100\b|\bH800\b", 989.0),
    (r"\bH20\b", 148.0),
    (r"\bA100\b|\bA800\b", 312.0),
    (r"\bA30\b", 165.0),
    (r"\bA10\b", 125.0),
    (r"\bL40S\b", 362.0),
    (r"\bL4\b", 121.0),
    (r"\bRTX 4090$", 165.0),
]


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """Peak in TFLOP/s; None where it is not known.

    Args:
        device_name: as `torch.cuda.get_device_name` gives it.
        dtype: of the multiplications; peaks of `bfloat16` alone are known.
    """
    if dtype != "bfloat16":
        return None
    return next((peak for pattern, peak in _PEAKS if re.search(pattern, device_name)), None)
