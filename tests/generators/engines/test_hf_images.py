"""The `hf` engine answers prompts with images."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from rollmesh.generators.engines import create_engine
from rollmesh.generators.engines.hf.model.prefill import Prefiller
from rollmesh.generators.engines.types import EngineSettings, GenerationRequest, KvPolicy, SamplingParams
from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.trajectory.images import ImageProcessor
from tests.generators.engines import tiny_vlm
from tests.generators.engines.collector import DEADLINE_S, Collector
from tests.generators.engines.harness import V1, V2, prefix_of
from tests.generators.engines.tiny import ContractModel
from tests.generators.engines.tiny_vlm import IMAGE, TinyVlm, picture

PROMPT = [3, 4, IMAGE, 5, 6]
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=["llava"])
def vlm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyVlm:
    torch.set_num_threads(1)
    return TinyVlm(tmp_path_factory.mktemp("vlm"), request.param)


class Engine:
    """An engine with the weights of seed 1."""

    def __init__(self, vlm: TinyVlm, kv: KvPolicy) -> None:
        self.vlm, self.collector = vlm, Collector()
        self.engine = create_engine("hf", vlm.folder, EngineSettings(slots=4, kv=kv), self.collector)
        self.engine.start()
        self.weights = self.update(1, V1)

    def update(self, seed: int, version: object) -> dict[str, torch.Tensor]:
        weights = self.vlm.random_weights(seed)
        self.engine.update_weights(version, weights.items(), str(version)).result(180)  # type: ignore[arg-type]
        return weights

    def run(self, *requests: GenerationRequest) -> list:
        self.engine.submit(requests)
        return self.collector.wait([request.request_id for request in requests])


@pytest.fixture
def start(vlm: TinyVlm) -> Iterator[Callable[..., Engine]]:
    started: list[Engine] = []

    def start(kv: KvPolicy = "keep") -> Engine:
        started.append(Engine(vlm, kv))
        return started[-1]

    yield start
    for one in started:
        one.engine.stop()


def asked(name: str, *images: int, prompt: list[int] = PROMPT, tokens: int = 12, **more: object) -> GenerationRequest:
    encoded = tuple(picture(seed, "JPEG" if seed % 2 else "PNG") for seed in images)
    sampling = SamplingParams(max_tokens=tokens, seed=7)
    return GenerationRequest(name, prompt, sampling, images=encoded, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("vlm", ["llava", "idefics3"], indirect=True)
def test_log_probs_are_those_of_the_models_own_forward_pass(start: Callable[..., Engine], vlm: TinyVlm) -> None:
    engine = start()
    requests = [
        asked("one", 1),
        asked("other", 2),
        asked("two", 1, 2, prompt=[IMAGE, 7, IMAGE, 8]),
        asked("text", prompt=[3, 4, 5, 6, 7, 8, 9]),
    ]
    results = engine.run(*requests)
    for request, result in zip(requests, results, strict=True):
        assert len(result.sampled.response_ids), "sampled"
        vlm.check(result, engine.weights, request.prompt_ids, request.images, TOLERANCE)
    # Their seeds are equal: what they see is not.
    assert results[0].sampled.response_ids.tolist() != results[1].sampled.response_ids.tolist()
    with pytest.raises(AssertionError):
        vlm.check(results[0], engine.weights, PROMPT, requests[1].images, TOLERANCE)


def test_members_share_the_prefill_of_equal_prompts_with_equal_images(
    start: Callable[..., Engine], vlm: TinyVlm, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    prefilled: list[int] = []
    run = Prefiller.run

    def counting(self: Prefiller, sequences: list, images: list | None = None) -> list:
        prefilled.append(len(sequences))
        return run(self, sequences, images)

    monkeypatch.setattr(Prefiller, "run", counting)
    requests = [asked(f"a{member}", 1) for member in range(2)] + [asked(f"b{member}", 2) for member in range(2)]
    for request, result in zip(requests, engine.run(*requests), strict=True):
        vlm.check(result, engine.weights, PROMPT, request.images, TOLERANCE)
    assert sum(prefilled) == 2


@pytest.mark.parametrize("kv", ["recompute", "interrupt"])
def test_a_swap_amid_a_response_sees_the_images_again(start: Callable[..., Engine], vlm: TinyVlm, kv: KvPolicy) -> None:
    engine = start(kv)
    request = asked("long", 1, tokens=200, stream=True)
    stopped: list[object] = []
    engine.collector.when_streamed({"long": 5}, lambda: stopped.append(engine.engine.pause()))
    engine.engine.submit([request])
    engine.collector.wait_streamed({"long": 5})
    newer = engine.update(2, V2)
    engine.engine.resume().result(180)
    [result] = engine.collector.wait(["long"])
    versions = list(result.sampled.versions)
    before = versions.count(V1)
    assert 5 <= before < len(versions)
    ids = result.sampled.response_ids.tolist()
    old = vlm.log_probs(engine.weights, PROMPT, request.images, ids[:before])
    np.testing.assert_allclose(result.sampled.log_probs[:before], old, atol=TOLERANCE)
    # All keys and values are those of the new weights.
    new = vlm.log_probs(newer, PROMPT, request.images, ids)[before:]
    np.testing.assert_allclose(result.sampled.log_probs[before:], new, atol=TOLERANCE)


def test_a_response_goes_on_behind_its_prefix(start: Callable[..., Engine], vlm: TinyVlm) -> None:
    engine = start()
    [whole] = engine.run(asked("whole", 1))
    # A sampled image token is a token like any other.
    draft = prefix_of(whole, 4)
    draft.response_ids[2] = IMAGE
    request = asked("behind", 1, prefix=draft)
    [result] = engine.run(request)
    ids = result.sampled.response_ids.tolist()
    assert ids[:4] == draft.response_ids.tolist()
    assert len(ids) > 4
    expected = vlm.log_probs(engine.weights, PROMPT, request.images, ids)
    np.testing.assert_allclose(result.sampled.log_probs[4:], expected[4:], atol=TOLERANCE)


def test_a_placeholder_sampled_in_an_earlier_turn_is_a_token(start: Callable[..., Engine], vlm: TinyVlm) -> None:
    engine, earlier = start(), [9, IMAGE, 8]
    request = asked("turn-2", 1, prompt=[*PROMPT, *earlier], earlier=len(earlier))
    [result] = engine.run(request)
    ids = result.sampled.response_ids.tolist()
    assert ids
    expected = vlm.log_probs(engine.weights, PROMPT, request.images, [*earlier, *ids])
    np.testing.assert_allclose(result.sampled.log_probs, expected[len(earlier) :], atol=TOLERANCE)


def test_widened_prompts_count_in_the_context(start: Callable[..., Engine], vlm: TinyVlm) -> None:
    engine = start()
    room = tiny_vlm.CONTEXT - len(vlm.wide)
    [long] = engine.run(asked("long", 1, prompt=[*[3] * room, IMAGE]))
    assert "no room is left" in long.refusal
    [result] = engine.run(asked("full", 1, prompt=[*[3] * (room - 3), IMAGE]))
    assert len(result.sampled.response_ids) <= 3


def test_what_cannot_be_seen_is_refused(start: Callable[..., Engine], contract_model: ContractModel) -> None:
    engine = start()
    for wrong, reason in (
        (asked("few", 1, prompt=[3, IMAGE, IMAGE]), "placeholders"),
        (asked("many", 1, 2), "placeholders"),
    ):
        with pytest.raises(PayloadError, match=reason):
            engine.run(wrong)
    [broken] = engine.run(replace(asked("broken"), images=(b"no image",)))
    assert "cannot be read" in broken.refusal
    [result] = engine.run(asked("fine", 1))
    assert len(result.sampled.response_ids)
    text = create_engine("hf", contract_model.folder, EngineSettings(), Collector())
    with pytest.raises(PayloadError, match="text alone"):
        text.submit([asked("blind", 1, prompt=[3, 4])])


def test_images_are_read_beside_everything_else(start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose images are being read can be aborted, keeps a swap waiting where it is pinned, and stops with the
    engine.
    """
    engine, opened = start(), threading.Event()
    widened = ImageProcessor.widened

    def slow(self: ImageProcessor, ids: list[int], images: tuple[bytes, ...]) -> list[int]:
        assert opened.wait(DEADLINE_S)
        return widened(self, ids, images)

    monkeypatch.setattr(ImageProcessor, "widened", slow)
    pinned = replace(asked("pinned", 3), pinned=True)
    engine.engine.submit([asked("gone", 1), pinned])
    swap = engine.engine.update_weights(V2, engine.weights.items(), "again")
    engine.engine.abort(["gone"])
    [gone] = engine.collector.wait(["gone"])
    assert (gone.finish_reason, gone.refusal) == ("aborted", "")
    assert engine.engine.probe([3, 4]).result(DEADLINE_S).version == V1
    assert not swap.done()
    opened.set()
    [result] = engine.collector.wait(["pinned"])
    assert set(result.sampled.versions) == {V1}
    assert swap.result(DEADLINE_S).version == V2
    opened.clear()
    engine.engine.submit([asked("left", 1)])
    engine.engine.stop()
    [left] = engine.collector.wait(["left"])
    opened.set()
    assert left.finish_reason == "aborted"
