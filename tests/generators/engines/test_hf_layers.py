"""Models that the `hf` engine cannot serve are known by their configuration, and named with what serves them."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import (
    BloomConfig,
    JambaConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
    RwkvConfig,
)

from generators.engines.hf.layers import layout_of, read_config
from mesh.errors import DataError


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (Lfm2Config(full_attn_idxs=[1], num_hidden_layers=2), "conv"),
        (Qwen3NextConfig(), "linear_attention"),
        (Qwen3_5TextConfig(), "linear_attention"),
        (MambaConfig(), "linear_attention"),
        (JambaConfig(), "linear_attention"),
        (RwkvConfig(), "recurrence"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_layers_with_a_state_are_refused_by_name(tmp_path: Path, config: PreTrainedConfig, kind: str) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(DataError, match=rf"\({config.model_type}\) has layers of the kind {kind}") as refused:
        layout_of(read_config(tmp_path), tmp_path)
    assert "vllm or sglang" in refused.value.hint


def test_a_model_that_does_not_say_how_much_it_sees_is_refused(tmp_path: Path) -> None:
    BloomConfig().save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"\(bloom\) does not say how long a sequence may be"):
        layout_of(read_config(tmp_path), tmp_path)


def test_attention_is_served(tmp_path: Path) -> None:
    layers = {"num_hidden_layers": 2, "max_position_embeddings": 64}
    plain = layout_of(LlamaConfig(**layers), tmp_path)
    assert (plain.layer_types, plain.window, plain.longest) == (("full_attention",) * 2, None, 64)
    sliding = layout_of(MistralConfig(**layers, sliding_window=8), tmp_path)
    assert (sliding.layer_types, sliding.window) == (("sliding_attention",) * 2, 8)
    unused = layout_of(Qwen3Config(**layers, use_sliding_window=False, sliding_window=8), tmp_path)
    assert (unused.layer_types, unused.window) == (("full_attention",) * 2, None)
