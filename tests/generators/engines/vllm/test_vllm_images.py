"""vLLM answers prompts with images."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from rollmesh.generators.engines import create_engine
from rollmesh.generators.engines.types import EngineSettings, GenerationRequest, GenerationResult, SamplingParams
from rollmesh.mesh.config.rollout import VllmSection
from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests.generators.engines.collector import Collector
from tests.generators.engines.harness import V1, V2, prefix_of
from tests.generators.engines.tiny_vlm import CONTEXT, IMAGE, TinyVlm, picture
from tests.generators.engines.vllm.step_gate import StepGate

if TYPE_CHECKING:
    from rollmesh.generators.engines.vllm.jobs.running_jobs import RunningJobs

pytestmark = [pytest.mark.engine("vllm")]

PROMPT = [3, 4, IMAGE, 5, 6]
TOLERANCE = 1e-3


class Engine:
    """vLLM over a model that takes images, with the weights of seed 1."""

    def __init__(self, vlm: TinyVlm) -> None:
        self.vlm, self.collector = vlm, Collector(120.0)
        settings = EngineSettings(slots=4, vllm=VllmSection(kv_cache_gib=0.125))
        self.engine = create_engine("vllm", vlm.folder, settings, self.collector)
        self.engine.start()
        self.weights = self.update(1, V1)

    def update(self, seed: int, version: object) -> dict[str, torch.Tensor]:
        weights = self.vlm.random_weights(seed)
        self.engine.update_weights(version, weights.items(), str(version)).result(600)  # type: ignore[arg-type]
        return weights

    def run(self, *requests: GenerationRequest) -> list[GenerationResult]:
        self.engine.submit(requests)
        return self.collector.wait([request.request_id for request in requests])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One for all tests here: it takes 20 seconds to start."""
    torch.set_num_threads(1)
    engine = Engine(TinyVlm(tmp_path_factory.mktemp("vlm"), "idefics3"))
    yield engine
    engine.engine.stop()


def asked(name: str, *images: int, prompt: list[int] = PROMPT, tokens: int = 12, **more: object) -> GenerationRequest:
    encoded = tuple(picture(seed, "JPEG" if seed % 2 else "PNG") for seed in images)
    sampling = SamplingParams(max_tokens=tokens, seed=7)
    return GenerationRequest(name, prompt, sampling, images=encoded, **more)  # type: ignore[arg-type]


def test_log_probs_are_those_of_the_models_own_forward_pass(served: Engine) -> None:
    requests = [
        asked("one", 1),
        asked("again", 1),
        asked("other", 2),
        asked("two", 1, 2, prompt=[IMAGE, 7, IMAGE, 8]),
        asked("text", prompt=[3, 4, 5, 6, 7, 8, 9]),
    ]
    results = served.run(*requests)
    for request, result in zip(requests, results, strict=True):
        assert len(result.sampled.response_ids), "sampled"
        served.vlm.check(result, served.weights, request.prompt_ids, request.images, TOLERANCE)
    # Their seeds are equal: what they see is not.
    assert results[0].sampled.response_ids.tolist() != results[2].sampled.response_ids.tolist()


def test_a_response_goes_on_behind_its_prefix(served: Engine) -> None:
    [whole] = served.run(asked("whole", 1))
    draft = prefix_of(whole, 4)
    # A sampled image token is a token like any other.
    draft.response_ids[2] = IMAGE
    [result] = served.run(asked("behind", 1, prefix=draft))
    ids = result.sampled.response_ids.tolist()
    assert ids[:4] == draft.response_ids.tolist()
    assert len(ids) > 4
    expected = served.vlm.log_probs(served.weights, PROMPT, [picture(1, "JPEG")], ids)
    np.testing.assert_allclose(result.sampled.log_probs[4:], expected[4:], atol=TOLERANCE)


def test_what_cannot_be_served_is_refused_and_changes_nothing(served: Engine) -> None:
    room = CONTEXT - len(served.vlm.wide)
    for wrong, reason in (
        (asked("few", 1, prompt=[3, IMAGE, IMAGE]), "placeholders"),
        (asked("many", 1, 2), "placeholders"),
    ):
        with pytest.raises(PayloadError, match=reason):
            served.run(wrong)
    broken, long = served.run(
        replace(asked("broken"), images=(b"no image",)), asked("long", 1, prompt=[*[3] * room, IMAGE])
    )
    assert "cannot be read" in broken.refusal
    assert "no room is left for a response" in long.refusal
    [result] = served.run(asked("full", 1, prompt=[*[3] * (room - 3), IMAGE]))
    assert result.finish_reason in ("length", "stop")
    assert len(result.sampled.response_ids) <= 3


def test_new_weights_reach_the_vision_part_amid_a_response(served: Engine) -> None:
    request = asked("amid", 1, tokens=60, stream=True)
    with StepGate().at_most(5):
        served.engine.submit([request])
        served.collector.wait_streamed({"amid": 5})
        served.engine.pause().result(240)
    former = served.weights
    newer = served.update(2, V2)
    served.engine.resume().result(240)
    [result] = served.collector.wait(["amid"])
    versions = list(result.sampled.versions)
    assert set(versions) == {V1, V2}
    before = versions.count(V1)
    old = served.vlm.log_probs(former, PROMPT, request.images, result.sampled.response_ids.tolist()[:before])
    np.testing.assert_allclose(result.sampled.log_probs[:before], old, atol=TOLERANCE)
    # The same image again: nothing that the former vision part made of it is found.
    [fresh] = served.run(asked("fresh", 1))
    assert set(fresh.sampled.versions) == {V2}
    served.vlm.check(fresh, newer, PROMPT, request.images, TOLERANCE)
    # Only the vision part changes.
    mixed = served.vlm.random_weights(3)
    mixed = {name: mixed[name] if "vision" in name else tensor for name, tensor in newer.items()}
    served.engine.update_weights(PolicyVersion(1, 3), mixed.items(), "mixed").result(240)
    [seen] = served.run(asked("seen", 1))
    served.vlm.check(seen, mixed, PROMPT, request.images, TOLERANCE)
    with pytest.raises(AssertionError):
        served.vlm.check(seen, newer, PROMPT, request.images, TOLERANCE)


def test_images_that_are_read_during_a_swap_are_submitted_once(served: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, swapped = threading.Event(), threading.Event()
    from rollmesh.generators.engines.vllm.jobs.running_jobs import RunningJobs

    read = RunningJobs._read_images

    async def slow(self: RunningJobs, running: Any) -> Any:
        found = await read(self, running)
        reading.set()
        while not swapped.is_set():
            await asyncio.sleep(0.01)
        return found

    monkeypatch.setattr(RunningJobs, "_read_images", slow)
    request = asked("during", 1)
    served.engine.submit([request])
    assert reading.wait(240)
    weights = served.vlm.random_weights(4)
    served.engine.update_weights(PolicyVersion(1, 4), weights.items(), "during").result(240)
    swapped.set()
    [result] = served.collector.wait(["during"])
    assert set(result.sampled.versions) == {PolicyVersion(1, 4)}
    served.vlm.check(result, weights, PROMPT, request.images, TOLERANCE)


def test_images_that_become_other_tokens_than_the_learners_are_refused(served: Engine) -> None:
    [result] = served.run(replace(asked("other-tokens", 1), seen="0" * 16))
    assert "not those of the learner's processor" in result.refusal
