"""torch's allocator in the processes of external engines.

Segments that grow, a usual setting for training, are of no use there. Memory that vLLM and SGLang give back while they
sleep cannot lie in them. Memory that is shared with another process by a handle is opened in another way.
"""

from __future__ import annotations

from collections.abc import Mapping

# Torch reads the first before the second.
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_GROWING = "expandable_segments"


def without_growing_segments(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables to be set in an environment so that no segments grow; all other settings of torch's stay."""
    changed = {}
    for name in _VARIABLES:
        settings = environment.get(name, "").split(",")
        kept = [setting for setting in settings if setting.partition(":")[0].strip() != _GROWING]
        if len(kept) < len(settings):
            changed[name] = ",".join(kept)
    return changed
