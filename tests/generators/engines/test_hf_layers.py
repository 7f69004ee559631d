"""Models that the `hf` engine cannot serve are known by their configuration, and named with what serves them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    BartConfig,
    BertConfig,
    BlenderbotConfig,
    BloomConfig,
    CamembertConfig,
    FalconConfig,
    GPTNeoConfig,
    JambaConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Olmo2Config,
    PreTrainedConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
    RwkvConfig,
)

from rollmesh.generators.engines import create_engine
from rollmesh.generators.engines.errors import EngineSettingsError
from rollmesh.generators.engines.hf.kv_cache import SlotCache
from rollmesh.generators.engines.hf.model.attention_masks import AttentionMask
from rollmesh.generators.engines.hf.model.loading import LoadedModel, load_model
from rollmesh.generators.engines.hf.model.served_layers import layout_of
from rollmesh.generators.engines.hf.model.traced_forward import DirectForward
from rollmesh.generators.engines.hf.probe import probe
from rollmesh.generators.engines.types import EngineSettings
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.model_config import read_config
from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests.generators.engines import tiny
from tests.generators.engines.collector import DEADLINE_S, Collector


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


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (BertConfig(), "it is an encoder"),
        (CamembertConfig(), "it is an encoder"),
        (BartConfig(), "BartForCausalLM takes no position_ids"),
        (BlenderbotConfig(), "BlenderbotForCausalLM takes no position_ids"),
        (FalconConfig(alibi=True), "alibi"),
        (GPTNeoConfig(), "its local attention"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_what_cannot_be_decoded_side_by_side_is_refused(tmp_path: Path, config: PreTrainedConfig, why: str) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(DataError, match=rf"\({config.model_type}\) cannot be served by rollout.engine: hf: .*{why}"):
        layout_of(read_config(tmp_path), tmp_path)


@pytest.mark.parametrize("kind", [LlamaConfig, Olmo2Config])
def test_a_window_counts_where_the_class_has_one(kind: type[PreTrainedConfig], tmp_path: Path) -> None:
    kind(num_hidden_layers=2, sliding_window=8).save_pretrained(tmp_path)
    config = read_config(tmp_path)
    assert getattr(config, "sliding_window", None) == 8
    layout = layout_of(config, tmp_path)
    assert (layout.layer_types, layout.window) == (("full_attention",) * 2, None)


@pytest.fixture(scope="module")
def tokenless(tmp_path_factory: pytest.TempPathFactory) -> Callable[[PreTrainedConfig], LoadedModel]:
    """Loads models with random weights, as an engine would under its first."""
    torch.set_num_threads(1)

    def load(config: PreTrainedConfig) -> LoadedModel:
        model = tiny.build_model(config)
        loaded = load_model(
            tiny.save_folder(tmp_path_factory.mktemp(config.model_type), model, None), dtype="float32", device="cpu"
        )
        loaded.model.load_state_dict(model.state_dict())
        return loaded

    return load


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "layers"), [("mistral", "full_attention"), ("gemma3", "sliding_attention")])
@torch.inference_mode()
def test_other_layers_than_the_models_are_refused_by_the_probe(
    name: str, layers: str, dtype: torch.dtype, tokenless: Callable[[PreTrainedConfig], LoadedModel]
) -> None:
    """A short sequence shows it, however long the window; nothing of the model is changed."""
    config = tiny.configs()[name]
    config.sliding_window = 128
    loaded = tokenless(config)
    loaded.model.to(dtype)
    forward = DirectForward(loaded.model)
    probe(loaded, forward)
    with pytest.raises(EngineSettingsError, match=rf"{config.model_type} cannot be served right by rollout.engine: hf"):
        probe(replace(loaded, layer_types=(layers,) * len(loaded.layer_types)), forward)
    text = loaded.model.config
    assert (text.sliding_window, text._attn_implementation) == (128, "sdpa")


@torch.inference_mode()
def test_decode_steps_are_proven(tokenless: Callable[[PreTrainedConfig], LoadedModel]) -> None:
    loaded = tokenless(tiny.configs()["qwen3"])
    forward = DirectForward(loaded.model)

    def shifted(ids: torch.Tensor, positions: torch.Tensor, mask: AttentionMask, cache: SlotCache) -> torch.Tensor:
        return forward(ids, positions * 2, mask, cache)

    with pytest.raises(EngineSettingsError, match="log-probs of random tokens"):
        probe(loaded, shifted)
    probe(replace(loaded, context=4), shifted)
    for parameter in loaded.model.parameters():
        parameter.fill_(torch.nan)
    probe(loaded, forward)


def test_an_engine_does_not_serve_what_it_computes_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a class that has a window is taken for one without."""
    monkeypatch.setattr("rollmesh.generators.engines.hf.model.served_layers._has_sliding_window", lambda model: False)
    model, collector = tiny.build_model(tiny.configs()["mistral"]), Collector()
    engine = create_engine("hf", tiny.save_folder(tmp_path, model, None), EngineSettings(slots=2), collector)
    engine.start()
    try:
        update = engine.update_weights(PolicyVersion(1, 0), model.state_dict().items(), "")
        with pytest.raises(EngineSettingsError, match="mistral cannot be served right") as refused:
            update.result(DEADLINE_S)
        assert "vllm or sglang" in refused.value.hint
        assert isinstance(collector.wait_failure(), EngineSettingsError)
    finally:
        engine.stop()
