"""The `hf` engine compared with transformers itself: `generate` (greedy) and a full forward pass, per architecture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rollmesh.generators.engines import create_engine
from rollmesh.generators.engines.hf.decoder import Decoder
from rollmesh.generators.engines.interface import InferenceEngine
from rollmesh.generators.engines.types import (
    EngineSettings,
    GenerationRequest,
    GenerationResult,
    KvPolicy,
    SamplingParams,
)
from rollmesh.mesh.errors import ConfigError, DataError, PayloadError
from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests.generators.engines import tiny
from tests.generators.engines.collector import DEADLINE_S, Collector

V1, V2 = PolicyVersion(1, 0), PolicyVersion(1, 1)
SLOTS = 6


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    torch.set_num_threads(1)
    return tiny.train_tokenizer()


@contextmanager
def serving(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast | None,
    *,
    dtype: str = "float32",
    kv: KvPolicy = "keep",
) -> Iterator[tuple[InferenceEngine, Collector]]:
    """An engine that serves the model's weights."""
    collector = Collector()
    settings = EngineSettings(slots=SLOTS, dtype=dtype, kv=kv)
    engine = create_engine("hf", tiny.save_folder(folder, model, tokenizer), settings, collector)
    engine.start()
    try:
        engine.update_weights(V1, model.state_dict().items(), "").result(DEADLINE_S)
        yield engine, collector
    finally:
        engine.stop()


def run(engine: InferenceEngine, collector: Collector, requests: list[GenerationRequest]) -> list[GenerationResult]:
    engine.submit(requests)
    return collector.wait([request.request_id for request in requests])


def full_log_probs(
    model: PreTrainedModel, prompt: list[int], response: list[int], temperature: float = 1.0
) -> np.ndarray:
    """Float32 [len(response)] from one forward pass without a cache; greedy counts as temperature 1."""
    ids = torch.tensor([prompt + response])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float() / (temperature or 1.0)
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0].numpy()


def greedy_by_generate(model: PreTrainedModel, prompt: list[int], max_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=tiny.PAD,
    )
    response: list[int] = output[0, len(prompt) :].tolist()
    return response


def mixed_requests(tokenizer: PreTrainedTokenizerFast) -> list[GenerationRequest]:
    """Prompts of several lengths, greedy and sampled, twice as many as there are slots."""
    texts = ["to be", "the quick brown fox jumps over the lazy dog", "7", "naïve 東京 🙂", "question: answer: 4", "x y"]
    requests = []
    for index in range(2 * SLOTS):
        prompt = tokenizer(texts[index % len(texts)] + " " * (index % 4))["input_ids"]
        temperature = [0.0, 1.0, 0.7][index % 3]
        sampling = SamplingParams(temperature=temperature, max_tokens=1 + (7 * index) % 33, seed=index + 1)
        requests.append(GenerationRequest(str(index), prompt, sampling))
    return requests


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("name", sorted(tiny.configs()))
def test_agrees_with_transformers(name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny.build_model(tiny.configs()[name])
    requests = mixed_requests(tokenizer)
    with serving(tmp_path, model, tokenizer) as (engine, collector):
        results = run(engine, collector, requests)
    for request, result in zip(requests, results, strict=True):
        prompt, response = list(request.prompt_ids), result.sampled.response_ids.tolist()
        sampling = request.sampling
        ended = response[-1] in (tiny.EOS, tiny.EOS_2)
        assert result.finish_reason == ("stop" if ended else "length")
        assert ended or len(response) == sampling.max_tokens
        expected = full_log_probs(model, prompt, response, sampling.temperature)
        np.testing.assert_allclose(result.sampled.log_probs, expected, atol=1e-4)
        if sampling.temperature == 0:
            assert response == greedy_by_generate(model, prompt, sampling.max_tokens)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_bfloat16(name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(0)
    model = tiny.build_model(tiny.configs()[name]).to(torch.bfloat16)
    requests = mixed_requests(tokenizer)
    with serving(tmp_path, model, tokenizer, dtype="bfloat16") as (engine, collector):
        results = run(engine, collector, requests)
    differences = np.concatenate(
        [
            np.abs(
                result.sampled.log_probs
                - full_log_probs(model, list(request.prompt_ids), result.sampled.response_ids.tolist())
            )
            for request, result in zip(requests, results, strict=True)
            if request.sampling.temperature != 0.7
        ]
    )
    assert np.median(differences) < 0.02
    assert np.quantile(differences, 0.95) < 0.3


@pytest.mark.parametrize(
    ("name", "kv"),
    [("qwen3", "recompute"), ("gemma2", "recompute"), ("gpt2", "recompute"), ("qwen3", "interrupt")],
)
def test_without_old_keys_a_response_continues_as_the_new_weights_would(
    name: str, kv: KvPolicy, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless they are kept, log-probs are those of a full forward pass under each token's own version."""
    old, new = tiny.build_model(tiny.configs()[name], 0), tiny.build_model(tiny.configs()[name], 1)
    prompts = [tokenizer(text)["input_ids"] for text in ("to be", "the lazy dog jumps", "7 + 35 =")]
    requests = [GenerationRequest("first", prompts[0], SamplingParams(max_tokens=4, seed=1))]
    requests += [
        GenerationRequest(str(index), prompts[index % 3], SamplingParams(max_tokens=30, seed=index + 2))
        for index in range(2 * SLOTS)
    ]
    running: list[int] = []
    recompute = Decoder.recompute

    def counted(decoder: Decoder) -> None:
        running.append(decoder.table.active)
        recompute(decoder)

    monkeypatch.setattr(Decoder, "recompute", counted)
    with serving(tmp_path, old, tokenizer, kv=kv) as (engine, collector):
        swaps = []

        def swap(_: list[GenerationResult]) -> None:
            if not swaps:
                swaps.append(engine.update_weights(V2, new.state_dict().items(), ""))

        collector.hook = swap
        results = run(engine, collector, requests)
        swaps[0].result(DEADLINE_S)
    assert any(running) == (kv == "recompute")
    crossed = 0
    for request, result in zip(requests, results, strict=True):
        prompt, response = list(request.prompt_ids), result.sampled.response_ids.tolist()
        by_version = {V1: full_log_probs(old, prompt, response), V2: full_log_probs(new, prompt, response)}
        expected = [by_version[version][index] for index, version in enumerate(result.sampled.versions)]
        np.testing.assert_allclose(result.sampled.log_probs, expected, atol=1e-4)
        crossed += len(result.sampled.versions.runs) > 1
    assert crossed > 0


def test_tied_weights_come_once_or_twice(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny.build_model(tiny.configs()["qwen3"])
    state = model.state_dict()
    once = {tensor_name: tensor for tensor_name, tensor in state.items() if tensor_name != "lm_head.weight"}
    assert len(once) == len(state) - 1
    request = GenerationRequest("a", [5, 6], SamplingParams(temperature=0, max_tokens=8))
    with serving(tmp_path, model, tokenizer) as (engine, collector):
        engine.update_weights(V2, once.items(), "").result(DEADLINE_S)
        [result] = run(engine, collector, [request])
    assert result.sampled.response_ids.tolist() == greedy_by_generate(model, [5, 6], 8)


def test_stop_strings(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """A response ends with the token that completes the match, wherever the match lies on token borders."""
    model = tiny.build_model(tiny.configs()["llama"])
    prompt = tokenizer("to be")["input_ids"]
    with serving(tmp_path, model, tokenizer) as (engine, collector):
        [free] = run(engine, collector, [GenerationRequest("free", prompt, SamplingParams(max_tokens=40, seed=3))])
        ids = free.sampled.response_ids.tolist()
        texts = [tokenizer.decode(ids[: end + 1], skip_special_tokens=True) for end in range(len(ids))]
        final = texts[-1]
        stops = [final[begin : begin + width] for begin in range(2, len(final) - 4, 7) for width in (1, 2, 4)]
        stops = [stop for stop in stops if "\ufffd" not in stop]
        assert len(stops) > 5
        requests = [
            GenerationRequest(f"stop{stop}", prompt, SamplingParams(max_tokens=40, seed=3, stop=("never there", stop)))
            for stop in dict.fromkeys(stops)
        ]
        for stop, result in zip(dict.fromkeys(stops), run(engine, collector, requests), strict=True):
            first = next(end for end, text in enumerate(texts) if stop in text)
            assert result.sampled.response_ids.tolist() == ids[: first + 1], repr(stop)
            assert result.finish_reason == "stop"


@pytest.mark.parametrize("name", ["qwen3", pytest.param("gemma3", marks=pytest.mark.exhaustive)])
def test_an_interrupted_response_goes_on_as_if_it_had_not_been(
    name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Under the same weights a seeded request draws after its prefix what it would have drawn there. Stop strings are
    found wherever the cut falls into them."""
    model = tiny.build_model(tiny.configs()[name])
    prompt = tokenizer("to be")["input_ids"]
    with serving(tmp_path, model, tokenizer) as (engine, collector):
        [free] = run(engine, collector, [GenerationRequest("free", prompt, SamplingParams(max_tokens=24, seed=3))])
        text = tokenizer.decode(free.sampled.response_ids, skip_special_tokens=True)
        parts = [text[begin : begin + 4] for begin in range(6, len(text) - 4)]
        stops = [part for part in parts if "\ufffd" not in part][::6]
        assert stops
        for stop in ("never there", *stops[:3]):
            sampling = SamplingParams(max_tokens=24, seed=3, stop=(stop,))
            [whole] = run(engine, collector, [GenerationRequest(f"whole {stop}", prompt, sampling)])
            assert (whole.finish_reason == "length") == (
                stop == "never there" and len(whole.sampled.response_ids) == 24
            )
            cut = [
                GenerationRequest(f"{stop} {count}", prompt, sampling, prefix=_first(whole, count))
                for count in range(1, len(whole.sampled.response_ids) + 1)
            ]
            for result in run(engine, collector, cut):
                assert result.sampled.response_ids.tolist() == whole.sampled.response_ids.tolist()
                assert result.finish_reason == whole.finish_reason
                np.testing.assert_allclose(result.sampled.log_probs, whole.sampled.log_probs, atol=1e-4)
        assert engine.status().active == 0


def _first(result: GenerationResult, count: int) -> Trajectory:
    return result.sampled.part(0, count)


def test_stop_strings_without_tokenizer_are_refused(tmp_path: Path) -> None:
    model = tiny.build_model(tiny.configs()["llama"])
    with serving(tmp_path, model, None) as (engine, _), pytest.raises(PayloadError, match="tokenizer"):
        engine.submit([GenerationRequest("a", [3], SamplingParams(stop=("x",)))])


def test_a_model_that_raises_is_a_reported_failure(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.build_model(tiny.configs()["qwen3"])
    with serving(tmp_path, model, tokenizer) as (engine, collector):

        def broken(*_: object, **__: object) -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(type(model), "forward", broken)
        engine.submit([GenerationRequest("a", [3], SamplingParams(max_tokens=4))])
        assert "out of memory" in str(collector.wait_failure())
        assert engine.drain(DEADLINE_S)


def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path) -> None:
    def create(engine: str, folder: Path) -> None:
        create_engine(engine, folder, EngineSettings(slots=1), Collector())

    with pytest.raises(ConfigError, match="hf"):
        create("hff", tmp_path)
    with pytest.raises(DataError, match=r"config\.json"):
        create("hf", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no_such_architecture"}')
    with pytest.raises(DataError, match="no_such_architecture"):
        create("hf", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(DataError, match="causal language model"):
        create("hf", tmp_path)
