"""The `hf` engine records the experts to which each token was routed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rollmesh.generators.engines.errors import EngineSettingsError
from rollmesh.generators.engines.hf.engine import HfEngine
from rollmesh.generators.engines.types import EngineSettings
from rollmesh.mesh.config.rollout import HfSection
from tests.generators.engines import tiny
from tests.generators.engines.collector import DEADLINE_S, Collector
from tests.generators.engines.harness import V1, request

RECORDED = EngineSettings(slots=2, hf=HfSection(routed_experts=True))


def test_experts_are_those_of_a_forward_pass_over_the_whole_sequence(tmp_path: Path) -> None:
    """Sequences take turns in two slots, and change their places as others end."""
    torch.set_num_threads(1)
    model = tiny.build_model(tiny.configs()["qwen3_moe"])
    collector = Collector()
    engine = HfEngine.from_folder(tiny.save_folder(tmp_path, model, None), RECORDED, collector)
    engine.start()
    engine.update_weights(V1, model.state_dict().items(), "").result(DEADLINE_S)
    prompts = {f"r{number}": tuple(range(5, 7 + number)) for number in range(5)}
    lengths = {name: 1 + 9 * number % 31 for number, name in enumerate(prompts)}
    engine.submit([request(name, prompt, max_tokens=lengths[name]) for name, prompt in prompts.items()])
    assert engine.drain(DEADLINE_S)
    engine.stop()
    for name, prompt in prompts.items():
        result = collector.results[name]
        ids = [*prompt, *result.sampled.response_ids.tolist()]
        with torch.no_grad():
            logits = model(torch.tensor([ids[:-1]]), output_router_logits=True, use_cache=False).router_logits
        expected = torch.stack([layer.topk(2).indices.sort(-1).values for layer in logits], 1)
        found = result.side["routed_experts"]
        assert found.dtype == np.uint8
        assert np.array_equal(np.sort(found, -1), expected.numpy()), name


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    folder = tiny.save_folder(tmp_path, tiny.build_model(tiny.configs()["qwen3"]), None)
    with pytest.raises(EngineSettingsError, match=r"rollout.hf.routed_experts"):
        HfEngine.from_folder(folder, RECORDED, Collector())
