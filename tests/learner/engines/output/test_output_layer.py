"""Log-probs straight from hidden states: those of all logits at once, whatever is kept, cut, scaled or rounded."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.learner import tiny_models
from rollmesh.learner.engines.fsdp2.opaque import Opaque
from rollmesh.learner.engines.fsdp2.output_layer import OutputLayer
from rollmesh.learner.engines.output import layer as output_layer
from rollmesh.learner.engines.output.layer import LogitMemory
from rollmesh.learner.engines.output.log_probs import token_log_probs
from rollmesh.learner.engines.output.logit_form import LogitForm, UnknownFormError, read_logit_form
from rollmesh.learner.engines.output.softmax_pieces import Targets
from rollmesh.mesh.config.learner import MemorySection
from tests.learner.engines.models import make_engine, make_frozen, make_model, make_sequences
from tests.learner.engines.output.test_log_prob_kernel import _Largest
from tests.learner.engines.test_gradients import assert_same
from tests.learner.engines.training import gradients, log_probs, policy_loss, train_step

torch.set_num_threads(1)

ROWS, WIDTH, VOCABULARY = 37, 8, 83
FORMS = [LogitForm(), LogitForm(scale=0.3), LogitForm(scale=2.0, cap=1.5), LogitForm(columns=70)]
ALL, NOTHING = 1 << 40, 0


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of which neither tokens nor vocabulary are a multiple."""
    monkeypatch.setitem(output_layer.TILES, "cpu", (16, 32))


def make_case(dtype: torch.dtype = torch.float32, *, bias: bool = True) -> tuple[Tensor, nn.Linear, Targets]:
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, VOCABULARY, bias=bias)
    nn.init.normal_(layer.weight)
    targets = Targets(torch.randint(0, 70, (ROWS,)), 0.5 + torch.rand(ROWS), entropy_gradient=True, sum_pi_squared=True)
    return torch.randn(ROWS, WIDTH).to(dtype).requires_grad_(), layer.to(dtype), targets


def plain(hidden: Tensor, layer: nn.Linear, targets: Targets, form: LogitForm):
    """All logits, by autograd."""
    logits = functional.linear(hidden, layer.weight, layer.bias)[:, : form.columns] * form.scale
    if math.isfinite(form.cap):
        logits = form.cap * torch.tanh(logits / form.cap)
    return token_log_probs(logits, targets)


def pull(log_probs: Tensor, entropy: Tensor) -> None:
    weights = torch.randn(2, ROWS, generator=torch.Generator().manual_seed(1))
    ((log_probs * weights[0]).sum() + (entropy * weights[1]).sum()).backward()


def gradients_of(hidden: Tensor, layer: nn.Linear) -> list[Tensor]:
    found = [tensor.grad for tensor in (hidden, *layer.parameters())]
    hidden.grad = None
    layer.zero_grad()
    return found


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kept", [ALL, NOTHING])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_all_logits(form, kept, bias):
    hidden, layer, targets = make_case(bias=bias)
    wanted = plain(hidden, layer, targets, form)
    pull(*wanted.policy())
    expected = gradients_of(hidden, layer)
    found = OutputLayer(layer, form, LogitMemory(kept))(hidden, Opaque(targets))
    for value, exact in zip(found, (wanted.log_probs, wanted.entropy, wanted.sum_pi_squared), strict=True):
        torch.testing.assert_close(value, exact, atol=1e-5, rtol=1e-5)
    pull(*found[:2])
    for gradient, exact in zip(gradients_of(hidden, layer), expected, strict=True):
        torch.testing.assert_close(gradient, exact, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("kept", [ALL, NOTHING])
def test_logits_of_a_bfloat16_model_are_rounded_only_if_asked(kept):
    hidden, layer, targets = make_case(torch.bfloat16)
    exact_layer = nn.Linear(WIDTH, VOCABULARY)
    exact_layer.load_state_dict({name: tensor.float() for name, tensor in layer.state_dict().items()})
    exact = plain(hidden.detach().float(), exact_layer, targets, LogitForm()).policy()[0]
    log_probs = OutputLayer(layer, LogitForm(), LogitMemory(kept))(hidden, Opaque(targets))[0]
    torch.testing.assert_close(log_probs, exact, atol=1e-5, rtol=1e-5)
    rounded = OutputLayer(layer, LogitForm(), LogitMemory(kept, rounded=True))(hidden, Opaque(targets))[0]
    as_transformers = plain(hidden, layer, targets, LogitForm()).policy()[0]
    assert (rounded - as_transformers).abs().mean() < 0.2 * (rounded - exact).abs().mean()


def test_no_tensor_spans_tokens_and_vocabulary(small_tiles):
    rows, columns = 100, 300
    layer = nn.Linear(WIDTH, columns)
    hidden = torch.randn(rows, WIDTH, requires_grad=True)
    targets = Targets(torch.zeros(rows, dtype=torch.int64), entropy_gradient=True, sum_pi_squared=True)
    with _Largest() as seen:
        pulled = OutputLayer(layer, LogitForm(), LogitMemory(rows * columns * 4 - 1))(hidden, Opaque(targets))
        (pulled[0].sum() + pulled[1].sum()).backward()
    assert seen.elements == WIDTH * columns
    with torch.no_grad(), _Largest() as seen:
        OutputLayer(layer, LogitForm(), LogitMemory(ALL))(hidden, Opaque(targets))
    assert seen.elements < rows * columns


@pytest.mark.parametrize(
    ("architecture", "settings", "form"),
    [
        ("llama", {}, LogitForm()),
        ("gemma2", {"final_logit_softcapping": 5.0}, LogitForm(cap=5.0)),
        ("cohere2", {"logit_scale": 0.25}, LogitForm(scale=0.25)),
        ("granite", {"logits_scaling": 8.0}, LogitForm(scale=0.125)),
        ("minicpm3", {"hidden_size": 32, "dim_model_base": 8}, LogitForm(scale=0.25)),
        ("falcon_h1", {"lm_head_multiplier": 0.5}, LogitForm(scale=0.5)),
    ],
)
def test_the_form_of_logits_is_read_from_the_models_code(architecture, settings, form):
    known = tiny_models.ARCHITECTURES.get(architecture, tiny_models.ARCHITECTURES["llama"])
    config = AutoConfig.for_model(architecture, **(known.settings | settings))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert read_logit_form(model) == form
    assert "forward" not in vars(model.get_output_embeddings())


def test_another_way_to_logits_is_named():
    config = AutoConfig.for_model("llama", **tiny_models.ARCHITECTURES["llama"].settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    forward = model.forward

    def shifted(**inputs):
        output = forward(**inputs)
        output.logits = output.logits + 1.0
        return output

    model.forward = shifted
    with pytest.raises(UnknownFormError, match="in a way of its own"):
        read_logit_form(model)
    model.lm_head = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(UnknownFormError, match="of the type Sequential"):
        read_logit_form(model)


# Tied and capped, tied, untied, experts.
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("architecture", ["gemma2", "gpt2", "llama", "qwen3_moe"])
@pytest.mark.parametrize("logits_mib", [0, 1024])
def test_a_step_has_the_gradient_of_all_logits(tmp_path, architecture, logits_mib):
    folder = make_model(tmp_path / "model", architecture)
    sequences = [dataclasses.replace(s, temperature=0.7 + 0.1 * (i % 4)) for i, s in enumerate(make_sequences(3))]
    found = []
    for whole in (True, False):
        engine = make_engine(folder, memory=MemorySection(logits_mib=logits_mib), entropy_gradient=True)
        assert not engine._runner._whole_logits
        engine._runner._whole_logits = whole
        train_step(engine, seed=0, sequences=sequences, loss=policy_loss(entropy_bonus=0.1))
        found.append(gradients(engine))
    assert_same(found[1], found[0])


def test_a_model_with_a_way_of_its_own_computes_all_logits(tmp_path, caplog):
    engine = make_frozen(tiny_models.save_model(tmp_path, "opt"))
    assert "held at once: its code does not call its backbone as a whole" in caplog.text
    assert engine._runner._whole_logits
    engine.probe()


def test_the_probe_compares_with_the_logits_of_transformers(model_folder):
    engine = make_engine(model_folder)
    engine.probe()
    engine._runner.module.lm_head._form = LogitForm(scale=1.1)
    with pytest.raises(Exception, match="cannot be trained right"):
        engine.probe()


def test_log_probs_agree_between_micro_batches_of_every_size(tmp_path):
    from rollmesh.learner.batching.pack import pack

    folder = make_model(tmp_path / "model", "qwen3")
    batch = pack(make_sequences(1))
    found = []
    for mib in (0, 1024):
        engine = make_frozen(folder, param_dtype="bfloat16", memory=MemorySection(logits_mib=mib))
        found.append(log_probs(engine, batch))
        engine.close()
    assert torch.equal(*found)
