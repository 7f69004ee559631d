"""Settings of an SGLang server without a CUDA device; nothing of it is used where there is one.

SGLang's package is made for accelerators. On a CPU two of its imports fail: see the shims `sgl_kernel` and
`sitecustomize`, which the server's processes find on their PYTHONPATH. Adapters ask for memory that no device can read
faster: see `unpinned`. And some defaults choose kernels that do not
exist there. Without a device the processes can be forked: see `forking_server`, in the same folder.
"""

from __future__ import annotations

from pathlib import Path

_SHIMS = Path(__file__).parent / "shims"
# Script that starts the server.
FORKING_SERVER = _SHIMS / "forking_server.py"
# The KV cache is allocated at once. It holds this many sequences of full length; seldom are more of them that long.
_FULL_SEQUENCES = 64


def environment() -> dict[str, str]:
    """Variables for the server's processes."""
    # The first response under a grammar would wait for a compiler, which has to be there.
    return {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(_SHIMS), "TORCHDYNAMO_DISABLE": "1"}


def arguments(slots: int, context: int) -> dict[str, object]:
    """Server arguments by name; what the configuration says goes before them.

    Args:
        slots: sequences decoded together, at most.
        context: tokens of the longest one.
    """
    return {
        "device": "cpu",
        "attention-backend": "torch_native",
        "lora-backend": "torch_native",
        "sampling-backend": "pytorch",
        "disable-overlap-schedule": True,
        "disable-cuda-graph": True,
        # Its scheduler looks for work in a loop otherwise, on a core that others could use.
        "sleep-on-idle": True,
        "mem-fraction-static": 0.5,
        "max-total-tokens": min(slots, _FULL_SEQUENCES) * context,
    }
