"""Optimizers: those of torch where torch has them; moments in bfloat16 that do not stall; schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.learner.tiny_models import ARCHITECTURES
from rollmesh.learner.engines.fsdp2.optimizers import compact_adamw
from rollmesh.learner.engines.fsdp2.optimizers.build import build_optimizer
from rollmesh.learner.engines.fsdp2.optimizers.compact_adamw import _rows
from rollmesh.learner.engines.fsdp2.optimizers.muon import Muon, orthogonalize
from rollmesh.learner.engines.fsdp2.optimizers.quantized_adamw import dequantize, quantize
from rollmesh.learner.engines.fsdp2.optimizers.rounded_adamw import round_stochastically
from rollmesh.learner.engines.fsdp2.preparation.blocks import transformer_blocks
from rollmesh.learner.engines.schedule import RunStep, learning_rate
from rollmesh.mesh.config.learner import OptimizerSection

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("keys", "rates"),
    [
        ({"schedule": "wsd", "decay_ratio": 0.4}, [1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0]),
        ({"schedule": "wsd", "decay_ratio": 0.2, "warmup_ratio": 0.2}, [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 0.5, 0]),
        ({"schedule": "linear", "warmup_steps": 2, "min_lr_ratio": 0.2}, [0.5, 1, 1, 0.9, 0.8, 0.7, 0.6, 0.5]),
        ({"warmup_ratio": 0.5}, [0.2, 0.4, 0.6, 0.8, 1, 1]),
    ],
)
def test_schedules(keys, rates):
    section = OptimizerSection(lr=1.0, **keys)
    assert [learning_rate(section, RunStep(step, 10)) for step in range(len(rates))] == pytest.approx(rates)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [{}, {"warmup_steps": 3}, {"warmup_ratio": 0.3}, {"warmup_ratio": 1.0}])
@pytest.mark.parametrize("begins_at", [0, 4])
def test_a_rate_rises_then_falls_and_is_never_0_before_the_end(schedule, warmup, begins_at):
    section = OptimizerSection(lr=1.0, schedule=schedule, **warmup)
    for end in (5, 9, 40):
        steps = [RunStep.of(version, end, begins_at=begins_at) for version in range(begins_at, end)]
        rates = [learning_rate(section, step) for step in steps]
        assert min(rates) > 0
        highest = rates.index(max(rates))
        assert rates[:highest] == sorted(rates[:highest])
        assert rates[highest:] == sorted(rates[highest:], reverse=True)


@pytest.mark.parametrize(
    "keys", [{"warmup_steps": 1, "warmup_ratio": 0.1}, {"name": "muon", "state_dtype": "bfloat16"}]
)
def test_settings_that_contradict_one_another_are_refused(keys):
    with pytest.raises(ValidationError):
        OptimizerSection(**keys)


class Tiny(nn.Module):
    """An embedding, two layers with a norm, experts and a convolution, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 24), nn.LayerNorm(24), nn.Linear(24, 8)) for _ in "ab")
        self.layers[0].experts = nn.Parameter(torch.randn(3, 8, 16))
        self.layers[1].conv = nn.Conv1d(8, 8, 4, groups=8)
        self.head = nn.Linear(8, 50, bias=False)

    def set_gradients(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("keys", [{}, {"state_dtype": "bfloat16"}, {"state_dtype": "8bit"}, {"name": "muon"}])
def test_vectors_do_not_decay(keys):
    model = Tiny()
    before = named(model)
    optimizer = build_optimizer(OptimizerSection(lr=0.1, weight_decay=0.5, **keys), model, model.layers)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 0.95 if parameter.dim() > 1 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor, msg=name)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("kind", "settings", "vectors"),
    [
        ("gpt_oss", ARCHITECTURES["gpt_oss"].settings, "_bias"),
        ("cohere", ARCHITECTURES["cohere2"].settings | {"use_qk_norm": True}, "q_norm.weight"),
        ("jamba", ARCHITECTURES["jamba"].settings, "A_log"),
    ],
)
def test_vectors_that_are_stored_as_a_matrix_are_vectors(name, kind, settings, vectors):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))
    optimizer = build_optimizer(OptimizerSection(name=name, weight_decay=0.1), model, transformer_blocks(model))
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    assert len(groups) == len(list(model.parameters()))
    rows = [p for parameter, p in model.named_parameters() if parameter.endswith(vectors) and p.dim() > 1]
    assert rows
    for parameter in rows:
        group = groups[id(parameter)]
        assert (group["weight_decay"], "momentum" in group) == (0.0, False)


@pytest.mark.parametrize("form", ["bfloat16", "8bit"])
def test_long_rows_are_computed_by_columns(monkeypatch, form):
    """As the rows of stacked experts are: a step's memory does not grow with them."""

    def after_steps() -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Module()
        model.experts = nn.Parameter(torch.randn(3, 40, 50))
        optimizer = build_optimizer(OptimizerSection(lr=1e-3, state_dtype=form), model, [model])
        for seed in range(3):
            model.experts.grad = torch.randn(3, 40, 50, generator=torch.Generator().manual_seed(seed))
            optimizer.step()
        return model.experts.detach()

    whole = after_steps()
    seen = []
    update = compact_adamw._update

    def counted(group, number, values, *others):
        seen.append(values.shape)
        return update(group, number, values, *others)

    monkeypatch.setattr(compact_adamw, "_PIECE", 768)
    monkeypatch.setattr(compact_adamw, "_update", counted)
    # Each of three steps moves a weight by up to 1e-3, but for the rounding of moments.
    torch.testing.assert_close(after_steps(), whole, rtol=0, atol=5e-4)
    assert {tuple(shape) for shape in seen} == {(1, 768), (1, 464)}


def test_muon_is_that_of_torch_and_adamw_has_the_rest():
    ours, theirs = Tiny(), Tiny()
    optimizer = build_optimizer(OptimizerSection(name="muon", lr=0.01, weight_decay=0.1), ours, ours.layers)
    assert isinstance(optimizer, Muon)
    hidden = {n: p for n, p in theirs.named_parameters() if n.startswith("layers") and p.dim() == 2}
    others = [p for n, p in theirs.named_parameters() if n not in hidden and "experts" not in n]
    muon = torch.optim.Muon(hidden.values(), lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": [p for p in others if p.dim() > 1]}, {"params": [p for p in others if p.dim() == 1]}]
    groups[1]["weight_decay"] = 0.0
    adamw = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, fused=True)
    for seed in range(3):
        for model in (ours, theirs):
            model.set_gradients(seed)
        for each in (optimizer, muon, adamw):
            each.step()
    expected = named(theirs)
    for name, parameter in named(ours).items():
        if name in hidden:
            # Products of bfloat16 in another order; an update has a root mean square of 0.2 lr.
            torch.testing.assert_close(parameter, expected[name], atol=2e-4, rtol=0)
        elif "experts" not in name:
            torch.testing.assert_close(parameter, expected[name], atol=0, rtol=0)


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (3, 8, 16)])
def test_an_orthogonalized_matrix_has_singular_values_near_one(shape):
    found = orthogonalize(torch.randn(shape, generator=torch.Generator().manual_seed(0))).float()
    values = torch.linalg.svdvals(found)
    assert 0.5 < float(values.min()) <= float(values.max()) < 1.4


def test_rounding_is_to_a_neighbour_and_right_on_average():
    value = 1.0 + 2**-7 * 0.3
    generator = torch.Generator().manual_seed(0)
    rounded = round_stochastically(torch.full((100_000,), value), generator).float()
    assert set(rounded.tolist()) == {1.0, 1.0 + 2**-7}
    assert float(rounded.mean()) == pytest.approx(value, abs=1e-4)
    negative = round_stochastically(torch.full((1000,), -value), generator).float()
    assert set(negative.tolist()) == {-1.0, -1.0 - 2**-7}


@pytest.mark.parametrize(("signed", "sign"), [(True, 1), (True, -1), (False, 1)])
def test_codes_are_those_of_a_neighbour_and_right_on_average(signed, sign):
    """Whatever the size of other blocks, and of other numbers of a block."""
    values = sign * torch.tensor([1.0, 0.7, 0.033, -0.2 if signed else 0.2, 4e-5, 0.0]).repeat(100, 50)
    values[:, 256:] *= 1e-4
    generator = torch.Generator().manual_seed(0)
    found = torch.stack([dequantize(*quantize(values, generator, signed=signed), signed=signed) for _ in range(100)])
    assert torch.equal(found[:, :, 5], torch.zeros(100, 100))
    mean = found.mean((0, 1))
    torch.testing.assert_close(mean, values[0], rtol=0.01, atol=0)
    torch.testing.assert_close(mean[0], values[0, 0])
    gap = (found - values).abs() / values.abs().clamp_min(1e-12)
    assert float(gap[..., :3].max()) < 0.08
    if not signed:
        tiny = values * torch.tensor([1.0, 1e-9]).repeat(150)
        assert bool((dequantize(*quantize(tiny, generator, signed=False), signed=False) > 0).eq(tiny > 0).all())


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("width", [512, 300, 7])
def test_a_shard_without_rows_has_codes_and_scales_without_rows(width, signed):
    codes, scales = quantize(torch.zeros(0, width), torch.Generator(), signed=signed)
    assert (codes.shape, scales.shape) == ((0, width), (0, -(-width // min(width, 256))))
    assert dequantize(codes, scales, signed=signed).shape == (0, width)


@pytest.mark.parametrize(("form", "distance", "share"), [("bfloat16", 0.02, 0.52), ("8bit", 0.1, 0.7)])
def test_moments_in_fewer_bits_follow_those_in_float32(form, distance, share):
    """A second moment that was rounded to the nearest number would stay where it began."""
    models = Tiny(), Tiny()
    sections = OptimizerSection(lr=1e-3), OptimizerSection(lr=1e-3, state_dtype=form)
    exact, rounded = (
        build_optimizer(section, model, model.layers) for section, model in zip(sections, models, strict=True)
    )
    begin = named(models[0])
    for step in range(60):
        for model, optimizer in zip(models, (exact, rounded), strict=True):
            model.set_gradients(step)
            for parameter in model.parameters():
                parameter.grad.mul_(1.0 if step < 20 else 0.1).add_(0.05)
            optimizer.step()
    moved = torch.cat([(p - begin[n]).flatten() for n, p in named(models[0]).items()])
    apart = torch.cat([(p - q).flatten() for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True)])
    assert float(apart.detach().norm() / moved.norm()) < distance
    kept, wanted = (
        sum(value.nbytes for state in optimizer.state.values() for value in state.values())
        for optimizer in (rounded, exact)
    )
    assert kept < share * wanted
    found = sum(float(_second(rounded, parameter).sum()) for parameter in models[1].parameters())
    expected = sum(float(state["exp_avg_sq"].sum()) for state in exact.state.values())
    assert found == pytest.approx(expected, rel=distance / 2)


@pytest.mark.parametrize("form", ["bfloat16", "8bit"])
def test_moments_are_loaded_without_a_copy(form):
    """A copy in float32, as torch's own loading makes, would not fit where the moments do."""
    model = Tiny()
    optimizer = build_optimizer(OptimizerSection(state_dtype=form), model, model.layers)
    model.set_gradients(0)
    optimizer.step()
    state = optimizer.state_dict()
    saved = [tensor for moments in state["state"].values() for tensor in moments.values()]
    optimizer.load_state_dict(state)
    loaded = [tensor for moments in optimizer.state.values() for tensor in moments.values()]
    assert [tensor.data_ptr() for tensor in loaded] == [tensor.data_ptr() for tensor in saved]


def _second(optimizer: Any, parameter: nn.Parameter) -> torch.Tensor:
    kept = {name: _rows(value) for name, value in optimizer.state[parameter].items() if name != "step"}
    return optimizer._read(kept)[1]
