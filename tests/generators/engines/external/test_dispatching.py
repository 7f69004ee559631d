"""Jobs for the backend and their times; facts that a model folder gives beforehand."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollmesh.generators.engines.external.backend import Backend, DecodeChunk
from rollmesh.generators.engines.external.model_info import ModelInfo, read_folder
from rollmesh.generators.engines.external.request_state import RequestState
from rollmesh.generators.engines.external.version_labels import VersionLabels, label_of
from rollmesh.generators.engines.interface import EngineListener
from rollmesh.generators.engines.types import EngineSettings, SleepLevel, WakeStep
from rollmesh.mesh.errors import DataError, PayloadError
from tests.generators.engines import tiny, tiny_vlm
from tests.generators.engines.collector import DEADLINE_S, Collector
from tests.generators.engines.external.driven_harness import LIMITS, ScriptedEngine, ScriptedHarness, tokenizer
from tests.generators.engines.external.scripted import ScriptedBackend, TableModel
from tests.generators.engines.harness import V1, V2, behind, constant_prefix, request


@pytest.fixture
def harness(request: pytest.FixtureRequest) -> Iterator[ScriptedHarness]:
    harness = ScriptedHarness(getattr(request, "param", "keep"))
    yield harness
    harness.close()


def test_the_backend_has_its_slots_full_and_one_to_spare(harness: ScriptedHarness) -> None:
    """The queue before the slots is ours: pinned requests pass it, aborted ones never reach the backend."""
    harness.update(V1, harness.constant_weights(10))
    names = [f"{index}" for index in range(4 * harness.slots)]
    harness.freeze([request(name, [3 + index], max_tokens=harness.long) for index, name in enumerate(names)])
    status = harness.engine.status()
    assert (status.active, status.queued) == (harness.slots, 3 * harness.slots)
    assert (status.kv_usage, status.preemptions) == (0.5, 3)
    assert len(harness.backend.jobs) == harness.slots + 1
    harness.engine.abort(names[harness.slots + 1 : -1])
    harness.resume()
    harness.collector.wait(names)
    assert harness.backend.start_limit == harness.slots + 1
    begun = [job.token_ids[0] - 3 for job in harness.backend.jobs]
    assert begun == [*range(harness.slots + 1), len(names) - 1]


@pytest.mark.parametrize("harness", ["keep", "recompute", "interrupt"], indirect=True)
def test_a_backend_computes_keys_again_unless_they_are_to_be_kept(harness: ScriptedHarness) -> None:
    harness.update(V1, harness.constant_weights(10))
    assert harness.backend.recomputed == (harness.kv != "keep")


def test_a_deeper_sleep_takes_no_memory_on_its_way(harness: ScriptedHarness) -> None:
    """Another program may have it by now."""
    harness.update(V1, harness.constant_weights(10))
    engine, calls = harness.engine, harness.backend.calls
    for before in (lambda: engine.sleep(), lambda: engine.wake(WakeStep.WEIGHTS)):
        before().result(DEADLINE_S)
        harness.update(V2, harness.constant_weights(11))
        known = len(calls)
        engine.sleep(SleepLevel.WITHOUT_WEIGHTS).result(DEADLINE_S)
        assert calls[known:] == ["sleep"]


@pytest.mark.parametrize("harness", ["interrupt"], indirect=True)
def test_what_was_interrupted_goes_on_first_and_in_order(harness: ScriptedHarness) -> None:
    """Each as a job after its tokens, with what is left of its budget, and draws of their own."""
    harness.update(V1, harness.constant_weights(10))
    asked = [request(f"{index}", [3 + index], max_tokens=100, seed=7) for index in range(2 * harness.slots)]
    before = harness.freeze(asked)
    assert len(before) == harness.slots
    harness.update(V2, harness.constant_weights(11))
    first = len(harness.backend.jobs)
    harness.resume()
    harness.collector.wait([item.request_id for item in asked])
    again = harness.backend.jobs[first : first + harness.slots + 1]
    assert [job.token_ids[0] for job in again] == [3 + index for index in range(harness.slots + 1)]
    for job in again[:-1]:
        part = before[f"{job.token_ids[0] - 3}"].sampled
        assert list(job.token_ids[1:]) == part.response_ids.tolist()
        assert job.sampling.max_tokens == 100 - len(part)
        assert job.sampling.seed not in (0, 7)
    assert (again[-1].sampling.max_tokens, again[-1].sampling.seed) == (100, 7)


def test_a_prefix_stands_before_the_job(harness: ScriptedHarness) -> None:
    """Its own seed is kept away from the draws of the first tokens; requests without one leave it to the engine."""
    harness.update(V1, harness.constant_weights(10))
    prefix = constant_prefix(9, 4, V2)
    harness.run([behind("a", prefix, [3, 4], max_tokens=10, seed=7), behind("b", prefix, [3, 4], max_tokens=10)])
    seeded, free = harness.backend.jobs
    assert list(seeded.token_ids) == list(free.token_ids) == [3, 4, 9, 9, 9, 9]
    assert seeded.sampling.max_tokens == free.sampling.max_tokens == 6
    assert seeded.sampling.seed not in (0, 7)
    assert free.sampling.seed == 0


def test_a_folder_says_what_the_model_takes(tmp_path: Path) -> None:
    model = tiny.build_model(tiny.configs()["qwen3"])
    bare = tiny.save_folder(tmp_path / "bare", model, None)
    whole = tiny.save_folder(tmp_path / "whole", model, tokenizer())
    found = read_folder(whole, None)
    assert found.limits == replace(LIMITS, eos=frozenset({tiny.EOS, tiny.EOS_2}))
    assert found.tokenizer is not None
    assert read_folder(whole, 100).limits.context == 100
    assert read_folder(whole, 10**6).limits.context == tiny.CONTEXT
    assert not read_folder(bare, None).limits.text
    with pytest.raises(DataError, match=r"no config\.json"):
        ScriptedEngine.from_folder(tmp_path, EngineSettings(), Collector())


def test_images_need_a_model_that_takes_them(harness: ScriptedHarness) -> None:
    with pytest.raises(PayloadError) as caught:
        harness.engine.submit([replace(request("a"), images=(b"",))])
    assert caught.value.field == "images"


def test_an_engine_for_text_takes_no_images_of_any_model(tmp_path: Path) -> None:
    found = read_folder(tiny_vlm.TinyVlm(tmp_path).folder, None)
    assert found.limits.images
    assert found.images is not None
    text = found.for_text()
    assert not text.limits.images
    assert text.images is None

    class TextEngine(ScriptedEngine):
        takes_images = False

        @classmethod
        def create_backend(cls, folder: Path, model: ModelInfo, settings: EngineSettings) -> Backend:
            assert model.images is None
            return ScriptedBackend(TableModel(tiny.VOCABULARY), model.limits, tokenizer(), 1, 1)

    engine = TextEngine.from_folder(tmp_path, EngineSettings(), Collector())
    with pytest.raises(PayloadError) as caught:
        engine.submit([replace(request("a"), images=(tiny_vlm.picture(0),))])
    assert caught.value.field == "images"


class Images:
    """Makes three tokens of each image once it is told to, and fails at one."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def check_places(self, ids: Sequence[int], images: tuple[bytes, ...]) -> None:
        """Any number will do."""

    def widened(self, ids: Sequence[int], images: tuple[bytes, ...]) -> list[int]:
        assert self.opened.wait(DEADLINE_S)
        if b"odd" in images:
            raise ZeroDivisionError("no height")
        return [*ids, *[5] * 3 * len(images)]


class PicturedHarness(ScriptedHarness):
    """Its model takes images, and tells of experts."""

    def build(self, listener: EngineListener) -> ScriptedEngine:
        self.images = Images()
        limits = replace(LIMITS, images=True)
        model = ModelInfo(limits, tokenizer(), self.images)  # type: ignore[arg-type]  # the part that is used
        return ScriptedEngine(self.backend, model, EngineSettings(slots=self.slots), listener)


def test_images_are_read_beside_everything_else() -> None:
    """A request whose images are being read can be aborted, keeps a swap waiting where it is pinned, and is refused
    alone.
    """
    harness = PicturedHarness()
    harness.update(V1, harness.constant_weights(10))
    pinned = request("pinned", max_tokens=4, pinned=True)
    asked = [
        request("gone"),
        request("odd"),
        request("long", [3] * (harness.context - 2)),
        request("near", [3] * (harness.context - 9), max_tokens=50),
    ]
    harness.engine.submit([replace(item, images=(item.request_id.encode(),)) for item in [pinned, *asked]])
    [other] = harness.run([request("text", max_tokens=3, pinned=True)])
    assert other.sampled.response_ids.tolist() == [10] * 3
    swap = harness.engine.update_weights(V2, harness.constant_weights(11).items(), "")
    harness.engine.abort(["gone"])
    assert harness.collector.wait(["gone"])[0].finish_reason == "aborted"
    assert harness.engine.status().active == 0
    assert not swap.done()
    harness.images.opened.set()
    found = {name: harness.collector.wait([name])[0] for name in ("pinned", "odd", "long", "near")}
    swap.result(harness.deadline_s)
    assert found["pinned"].sampled.response_ids.tolist() == [10] * 4
    assert "ZeroDivisionError: no height" in found["odd"].refusal
    assert "no room is left for a response" in found["long"].refusal
    # The prompt with its image leaves room for six.
    assert (found["near"].finish_reason, len(found["near"].sampled.response_ids)) == ("length", 6)
    harness.close()
    assert "gone" not in {job.images[0].decode() for job in harness.backend.jobs if job.images}


def test_experts_are_those_of_the_prompt_with_its_images_and_the_response() -> None:
    response = RequestState(replace(request("a"), images=(b"x",)), ModelInfo(LIMITS, tokenizer()))
    response.prompt_tokens = 9
    labels = VersionLabels()
    labels.add(V1)
    experts = np.zeros((12, 2, 2), np.uint8)
    response.add(DecodeChunk([5, 6], [0.0, 0.0], [(2, label_of(V1))], "length", experts), labels)
    response.finish = "length"
    assert response.result().side["routed_experts"].shape == (9 + 2 - 1, 2, 2)
