"""Compiled layers: the same results, and the same code for batches of every length."""

from __future__ import annotations

import logging

import pytest
import torch
from torch._dynamo.utils import counters

from benchmarks.learner.tiny_models import save_model
from rollmesh.learner.engines.fsdp2.preparation import compilation
from rollmesh.mesh.config.learner import LearnerSection
from rollmesh.mesh.errors import ConfigError
from tests.learner.engines.models import make_engine, make_model
from tests.learner.engines.test_gradients import assert_same
from tests.learner.engines.training import gradients, log_probs, make_batches, train_step, weights

torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "architecture"),
    # Layers of GPT-2 have the fewest operations: torch takes half as long to capture them.
    [("eager", "gpt2"), pytest.param("aot_eager", "llama", marks=pytest.mark.exhaustive)],
)
def test_compiled_layers_give_the_same_and_no_length_compiles_them_again(tmp_path, monkeypatch, backend, architecture):
    """Graphs are captured as for inductor, or divided too, and then computed operation by operation: in seconds."""
    monkeypatch.setattr(compilation, "_BACKEND", backend)
    torch._dynamo.reset()
    counters.clear()
    save_model(tmp_path, architecture, num_hidden_layers=2)
    engines = [
        make_engine(tmp_path, param_dtype="bfloat16", activation_checkpointing=True, compile=choice)
        for choice in (False, True)
    ]
    graphs = []
    for number, groups in enumerate((2, 5, 3)):
        for engine in engines:
            train_step(engine, seed=number, groups=groups)
        graphs.append(counters["stats"]["unique_graphs"])
        assert_same(*(gradients(engine) for engine in engines))
    assert graphs == [graphs[0]] * 3
    assert 0 < graphs[0] <= 4, "layers share them"
    assert weights(engines[0]).keys() == weights(engines[1]).keys()
    # Without gradient everything is captured again.
    if backend != "eager":
        (batch,) = make_batches(engines[0], seed=9, token_budget=1 << 20)
        assert torch.equal(*(log_probs(engine, batch) for engine in engines))
        engines[1].probe()
    for engine in engines:
        engine.close()


def test_models_with_attention_of_their_own_are_not_compiled_and_it_is_said(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        engine = make_engine(make_model(tmp_path, "lfm2"), compile=True)
    assert "its layers are not compiled: its layers carry a state from token to token" in caplog.text
    counters.clear()
    train_step(engine, seed=1)
    assert not counters["stats"]


def test_what_cannot_be_compiled_is_refused_by_name(tmp_path, monkeypatch):
    def broken(graph, inputs):
        raise NotImplementedError("no compiler here")

    monkeypatch.setattr(compilation, "_BACKEND", broken)
    torch._dynamo.reset()
    engine = make_engine(make_model(tmp_path, "gpt2", num_hidden_layers=1), compile=True)
    with pytest.raises(ConfigError, match=r"cannot be compiled: BackendCompilerFailed: .*no compiler here") as refused:
        engine.probe()
    assert refused.value.hint == "set learner.compile: false"


def test_selective_recomputation_is_refused():
    with pytest.raises(ValueError, match="set that to true or false"):
        LearnerSection(compile=True, activation_checkpointing="selective")
