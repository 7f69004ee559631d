"""Parts of transformers that any model needs, made once for many processes by the one that forks them.

Each service of a run and each rank would take a tenth of a second for them.
"""

from __future__ import annotations

# With it come the modules that models share.
import transformers.models.qwen3.modeling_qwen3  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

# The first call makes the table for all models.
get_checkpoint_conversion_mapping("qwen3")
