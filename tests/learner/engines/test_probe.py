"""The start-up probe: what is right passes and is left as it was; what is wrong is computed otherwise, or refused."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn
from transformers import AutoConfig

from benchmarks.learner.tiny_models import save_model
from rollmesh.learner.batching.types import Packing
from rollmesh.learner.engines.fsdp2.packing_choice import describe_packing, refuse_by_structure
from rollmesh.learner.engines.tolerances import FLOORS, Difference, problem_of_rounding, problem_of_structure
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.errors import DataError
from tests.learner.engines.models import make_critic, make_engine, make_frozen
from tests.learner.engines.training import critic_loss, gradients, train_step, weights

torch.set_num_threads(1)
# Where a rule has more of them, `make test-all` has the others.
IN_ALL = pytest.mark.exhaustive
BFLOAT16_FIRST = [pytest.param(dtype, marks=[IN_ALL] * (dtype != "bfloat16")) for dtype in FLOORS]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Folders of `benchmarks.learner.tiny_models`, each written once."""
    folders: dict[str, Path] = {}

    def folder(architecture: str) -> Path:
        if architecture not in folders:
            folders[architecture] = save_model(tmp_path_factory.mktemp("tiny") / architecture, architecture)
        return folders[architecture]

    return folder


@pytest.mark.parametrize("architecture", [pytest.param("qwen3_5_text", marks=IN_ALL), "lfm2", "rwkv"])
def test_sequences_that_would_leak_into_one_another_get_rows_of_their_own(tiny, architecture, caplog):
    engine = make_engine(tiny(architecture))
    assert engine.packing is (Packing.ROWS if architecture == "rwkv" else Packing.REPEATED)
    # As if no one knew of the layers next to attention: the probe finds out.
    engine._runner._use(Packing.SHARED)
    with caplog.at_level(logging.WARNING):
        engine.probe()
    assert engine.packing is Packing.ROWS
    assert "other outputs among other neighbours" in caplog.text


def test_feed_forward_layers_are_packed_as_those_beside_them(tmp_path):
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    kinds = ["mamba", "mlp", "moe", "attention"]
    save_model(tmp_path, "nemotron_h", layers_block_type=kinds, num_hidden_layers=len(kinds), **experts)
    engine = make_engine(tmp_path)
    engine.probe()
    assert engine.packing is Packing.REPEATED


@pytest.mark.parametrize("architecture", ["bloom", "gpt_oss", "llama4_text"])
def test_attention_of_another_kind_is_left_to_transformers(tiny, architecture, caplog):
    engine = make_engine(tiny(architecture))
    with caplog.at_level(logging.WARNING):
        engine.probe()
    assert engine.packing is Packing.ROWS
    kind = engine._runner.transformer.config.model_type
    assert f"({kind}): every sequence is computed in a row of its own: it" in caplog.text


@pytest.mark.parametrize("param_dtype", BFLOAT16_FIRST)
def test_attention_that_does_not_hand_the_layout_on_gets_rows(tiny, param_dtype):
    engine = make_engine(tiny("nemotron"), param_dtype=param_dtype)
    engine.probe()
    assert engine.packing is Packing.ROWS
    assert engine._runner.why_rows == "NemotronAttention cannot run packed: it keeps the layout from its layers"
    engine.close()


@pytest.mark.parametrize("make", [make_engine, pytest.param(make_frozen, marks=IN_ALL)])
def test_a_mistake_does_not_pass_for_rounding(tiny, make):
    """Shared prompts are wrong for PhiMoE, whose experts make so much of a rounding that bfloat16 could not tell."""
    engine = make(tiny("phimoe"), param_dtype="bfloat16")
    evidence = engine.probe()
    assert engine.packing is Packing.ROWS
    assert evidence.truth.outputs < 1e-5 < 0.01 < evidence.rounded.outputs
    engine.close()


@pytest.mark.parametrize("param_dtype", BFLOAT16_FIRST)
def test_a_model_with_which_transformers_disagrees_with_itself_is_refused(tiny, param_dtype):
    """Falcon's alibi: its eager attention adds it twice, the other once."""
    engine = make_engine(tiny("falcon"), param_dtype=param_dtype)
    with pytest.raises(DataError, match=r"\(falcon\) cannot be trained right: outputs differ .* by 0\.034"):
        engine.probe()
    engine.close()


@pytest.mark.parametrize(
    "make", [make_engine, *(pytest.param(each, marks=IN_ALL) for each in (make_frozen, make_critic))]
)
def test_weights_that_are_not_finite_are_named(tiny, make, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(tiny("qwen3"), folder)
    weights_of = safetensors.torch.load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    weights_of[name][0, 0] = float("nan")
    safetensors.torch.save_file(weights_of, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=rf"{name} has numbers that are not finite"):
        make(folder)


class _Only(nn.Module):
    """A layer that is as it should be in one dtype alone."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype, error: str = "") -> None:
        super().__init__()
        self.layer, self.dtype, self.error = layer, dtype, error

    def forward(self, hidden):
        if hidden.dtype == self.dtype:
            return self.layer(hidden)
        assert not self.error, self.error
        return self.layer(hidden).flip(-1)


def test_kernels_that_fail_in_the_compute_dtype_alone_are_refused(tiny):
    engine = make_engine(tiny("qwen3"), param_dtype="bfloat16")
    layer = engine._runner.transformer.base_model.layers[0]
    layer.mlp = _Only(layer.mlp, torch.float32)
    with pytest.raises(DataError, match=r"cannot be trained in bfloat16: .* float32 by 0\.\d* .*param_dtype: float32"):
        engine.probe()
    engine.close()


def test_kernels_for_half_precision_alone_are_proven_in_it(tiny):
    engine = make_engine(tiny("qwen3"), param_dtype="bfloat16")
    layer = engine._runner.transformer.base_model.layers[1]
    layer.mlp = _Only(layer.mlp, torch.bfloat16, "float32 is not supported")
    evidence = engine.probe()
    assert engine.packing is Packing.SHARED
    assert 1e-4 < evidence.truth.outputs < 0.1
    assert evidence.rounded is None
    engine.close()


@pytest.mark.parametrize(
    ("make", "param_dtype"),
    [
        pytest.param(make, dtype, marks=[IN_ALL] * ((make is make_critic) == (dtype == "bfloat16")))
        for make in (make_engine, make_critic, make_frozen)
        for dtype in FLOORS
    ],
)
def test_what_is_right_passes_in_every_role_and_dtype(tiny, make, param_dtype):
    engine = make(tiny("qwen3"), param_dtype=param_dtype)
    engine.probe()
    assert engine.packing is Packing.SHARED
    engine.close()


@pytest.mark.parametrize("architecture", [pytest.param("jamba", marks=IN_ALL), "recurrent_gemma"])
def test_recurrent_layers_that_cannot_be_told_of_sequences_get_rows(tiny, architecture):
    """Their models keep the layout from them."""
    engine = make_engine(tiny(architecture))
    engine.probe()
    assert engine.packing is Packing.ROWS


@pytest.mark.parametrize("param_dtype", BFLOAT16_FIRST)
def test_the_probe_leaves_no_trace(tiny, param_dtype):
    probed, other = (make_critic(tiny("lfm2"), param_dtype=param_dtype) for _ in range(2))
    # A head that says something, so that a gradient reaches the backbone.
    for engine in (probed, other):
        train_step(engine, seed=1, loss=critic_loss)
    random, left = torch.get_rng_state(), gradients(probed)
    probed.probe()
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(gradient, left[name]) for name, gradient in gradients(probed).items())
    assert not any(module.training for module in probed._runner.transformer.base_model.modules())
    assert probed.packing is Packing.REPEATED
    for engine in (probed, other):
        train_step(engine, seed=2, loss=critic_loss)
    for name, tensor in weights(other).items():
        torch.testing.assert_close(weights(probed)[name], tensor, atol=0, rtol=0)
    for engine in (probed, other):
        engine.close()


class _LooksAhead(nn.Module):
    """Adds to every token the mean of all tokens of its row: no packing makes that right."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden):
        return self.layer(hidden) + hidden.mean(1, keepdim=True)


@pytest.mark.parametrize("make", [make_engine, pytest.param(make_critic, marks=IN_ALL)])
def test_a_model_that_is_right_in_no_packing_is_refused(tiny, make):
    engine = make(tiny("qwen3"))
    layer = engine._runner.transformer.base_model.layers[0]
    layer.mlp = _LooksAhead(layer.mlp)
    with pytest.raises(DataError, match=r"\(qwen3\) cannot be trained right: .* differ.* by 0\.\d"):
        engine.probe()


def test_weights_that_are_not_finite_are_refused(tiny):
    engine = make_frozen(tiny("qwen3"))
    engine._runner.transformer.base_model.norm.weight.fill_(torch.nan)
    with pytest.raises(DataError, match=r"values that are not finite: model\.norm\.weight holds some"):
        engine.probe()


def test_a_model_that_does_not_run_is_refused(tiny):
    # transformers multiplies float32 with bfloat16 in its linear attention.
    engine = make_engine(tiny("minimax"), param_dtype="bfloat16")
    with pytest.raises(DataError, match=r"\(minimax\) cannot be computed in bfloat16: RuntimeError"):
        engine.probe()
    engine.close()


@pytest.mark.parametrize("architecture", [pytest.param("qwen3_5_text", marks=IN_ALL), "lfm2", "bloom"])
def test_micro_batches_do_not_change_the_gradient_of_rows_and_recurrent_layers(tiny, architecture):
    found = []
    for budget in (1 << 20, 1):
        engine = make_engine(tiny(architecture))
        train_step(engine, seed=3, token_budget=budget)
        found.append(gradients(engine))
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, atol=1e-5, rtol=1e-4, msg=name)


def test_rotary_embeddings_that_look_at_the_longest_sequence_are_refused_beyond_their_limit():
    from transformers import Phi3Config

    factors = [1.0] * 4
    config = Phi3Config(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        rope_parameters={"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "rope_theta": 1e4},
    )
    refuse_by_structure(config, "m", 64)
    with pytest.raises(DataError, match=r"beyond 64 tokens .* up to 65"):
        refuse_by_structure(config, "m", 65)


def test_windows_longer_than_its_sequences_are_probed(tmp_path):
    """OLMoE's layers name a window that its mask does not have."""
    save_model(tmp_path, "olmoe", sliding_window=64)
    engine = make_engine(tmp_path)
    engine.probe()
    assert engine.packing is Packing.ROWS
    assert engine._runner.transformer.config.sliding_window == 64


@pytest.mark.parametrize("model_type", ["deepseek_v32", "deepseek_v4", "glm_moe_dsa", "qwen4_exp", "doge"])
def test_layers_that_choose_what_they_see_are_refused_by_their_structure(model_type):
    """They choose among more tokens than the probe has."""
    with pytest.raises(DataError, match=r"cannot be trained here: .*(_attention|keep_window_size)"):
        refuse_by_structure(AutoConfig.for_model(model_type), "m", None)


def test_the_packing_is_told_without_the_weights(tiny):
    assert describe_packing(ModelSection(path=str(tiny("qwen3")))).startswith("qwen3: sequences side by side")
    assert "1 layers carry a state" in describe_packing(ModelSection(path=str(tiny("lfm2"))))
    told = describe_packing(ModelSection(path=str(tiny("gpt_oss"))))
    assert told == "gpt_oss: every sequence in a row of its own, for its attention has sinks"


_FINE = Difference(1e-6, 1e-6)


@pytest.mark.parametrize(
    ("truth", "leak", "noise", "problem"),
    [
        (_FINE, 0.0, 0.0, None),
        (Difference(1e-6, None), 0.0, 0.0, None),
        (_FINE, 2e-3, 0.0, "other neighbours"),
        (_FINE, float("nan"), 0.0, "other neighbours"),
        (Difference(2e-3, 0.0), 0.0, 0.0, "outputs differ"),
        (Difference(0.0, 2e-3), 0.0, 0.0, "gradient differs"),
        (Difference(0.0, float("nan")), 0.0, 0.0, "gradient differs"),
        # Rounding explains what it makes, and no more: as seen of gemma3n_text.
        (Difference(2e-4, 1.4e-3), 0.0, 3.5e-3, None),
        (Difference(2e-3, 1.4e-3), 0.0, 3e-4, "outputs differ"),
        # However noisy a model is: the faintest mistake, and what sequences make of one another.
        (Difference(1.4e-2, 0.0), 0.0, 1.0, "outputs differ"),
        (Difference(0.0, float("nan")), 0.0, 1.0, "gradient differs"),
        (_FINE, 2e-3, 1.0, "other neighbours"),
    ],
)
def test_verdicts_on_what_is_computed(truth, leak, noise, problem):
    found = problem_of_structure(truth, leak, "float32", noise)
    assert (found is None) == (problem is None)
    assert problem is None or problem in found


@pytest.mark.parametrize(
    ("rounded", "noise", "problem"),
    [
        (Difference(0.22, 0.21), 0.0, None),
        (Difference(0.31, 0.2), 0.0, "outputs differ"),
        (Difference(0.2, 0.61), 0.0, "gradient differs"),
        (Difference(0.6, 0.7), 0.125, None),
        (Difference(0.2, 0.8), 0.125, "gradient differs"),
        (Difference(0.2, float("nan")), 0.25, "gradient differs"),
        # A gradient of zero.
        (Difference(0.0, 1.0), 2.0, "gradient differs"),
    ],
)
def test_verdicts_on_the_compute_dtype(rounded, noise, problem):
    found = problem_of_rounding(rounded, noise)
    assert (found is None) == (problem is None)
    assert problem is None or problem in found
