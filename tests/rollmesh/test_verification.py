"""`rollmesh weights verify` against real generators, and the judgement by itself."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rollmesh.cli import main
from rollmesh.generators.engines.hf import weights as engine_weights
from rollmesh.generators.weights.announced_weights import AnnouncedWeights
from rollmesh.mesh.errors import UnreachableError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights.adapter import FROZEN_BASE, factor_names
from rollmesh.mesh.weights.tensors import named_tensors
from rollmesh.verification.compare import Comparison, compare
from rollmesh.verification.verdict import GeneratorAnswer, LearnerReference, judge, tolerance_for
from tests.generators.world import SECURITY, TOKENIZER, World, mesh

V = PolicyVersion(1, 3)


def answer(**changes: object) -> GeneratorAnswer:
    fields = {"announced": "aa", "found": "aa", "not_comparable": "", "differing": [], "log_probs": [-1.0, -2.0]}
    return GeneratorAnswer("gen-1", V, **{**fields, **changes})  # type: ignore[arg-type]  # test shorthand


REFERENCE = LearnerReference(V, "aa", [-1.0, -2.0001], 1e-3)


def test_what_agrees() -> None:
    verdict = judge(answer(), REFERENCE)
    assert (verdict.outcome, verdict.why, verdict.digest) == ("agrees", "", "aa")
    assert verdict.largest_difference == pytest.approx(1e-4)
    by_probe = judge(answer(found="", not_comparable="a form of its own"), REFERENCE)
    assert by_probe.outcome == "agrees"
    assert "a form of its own" in by_probe.why


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"found": "bb", "differing": ["lm_head.weight"]}, "lm_head.weight"),
        ({"announced": "bb"}, "announced as bb"),
        ({"log_probs": [-1.0, -2.5]}, "up to 0.5 nats"),
        ({"log_probs": [float("nan"), -2.0]}, "nan"),
        ({"log_probs": [-1.0]}, "1 log-probs, 2 were"),
        ({"found": "", "not_comparable": "other form", "log_probs": [-3.0, -2.0]}, "up to 2 nats"),
    ],
)
def test_what_differs(changes: dict[str, object], said: str) -> None:
    verdict = judge(answer(**changes), REFERENCE)
    assert verdict.outcome == "differs"
    assert said in verdict.why


@pytest.mark.parametrize(
    ("log_probs", "outcome"),
    [
        ([-1.0, -2.0001], "agrees"),
        # Rounding, in any direction.
        ([-1.0004, -1.9996], "agrees"),
        ([-0.9997, -2.0003], "agrees"),
        # Within the tolerance, and yet those of the base.
        ([-1.0009, -2.0008], "differs"),
        ([-1.0008, -2.0009], "differs"),
    ],
)
def test_log_probs_of_the_base_are_a_lost_adapter(log_probs: list[float], outcome: str) -> None:
    reference = replace(REFERENCE, base_log_probs=[-1.0009, -2.0009])
    verdict = judge(answer(found="", not_comparable="other form", log_probs=log_probs), reference)
    assert verdict.outcome == outcome
    assert ("the adapter is lost" in verdict.why) == (outcome == "differs")


def test_an_adapter_that_changes_nothing_yet_is_not_missed() -> None:
    assert judge(answer(), replace(REFERENCE, base_log_probs=REFERENCE.log_probs)).outcome == "agrees"


def test_the_narrowest_dtype_decides_the_tolerance() -> None:
    assert tolerance_for(["float32"]) < tolerance_for(["float32", "bfloat16"]) < tolerance_for(["float8_e4m3fn"])


def _command(
    world: World, monkeypatch: pytest.MonkeyPatch, *arguments: str, command: tuple[str, ...] = ("weights", "verify")
) -> int:
    monkeypatch.setattr(sys, "argv", ["rollmesh", *command, "--mesh", world.address, *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


async def test_generators_are_compared_while_versions_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Fewer tokens than the probe has.
    async with mesh(tmp_path, rollout__max_response_tokens=6) as world:
        learner = await world.learner()
        await learner.publish(0)
        for name in ("gen-1", "gen-2"):
            world.generator(name)
            await world.holds_weights(name)
        ended = asyncio.Event()

        # One model for all versions: while transformers builds one, it must not build another in the command's thread.
        parameters = dict(world.model(0).named_parameters())

        async def train() -> None:
            while not ended.is_set():
                learner.version += 1
                tensors = [(name, value + 0.01 * learner.version) for name, value in parameters.items()]
                learner.publisher.publish(PolicyVersion(1, learner.version), tensors, "float32")
                await learner.client.set_policy_version(1, learner.version)
                await learner.swapped(2 * learner.version)

        training = asyncio.create_task(train())
        try:
            status = await asyncio.to_thread(_command, world, monkeypatch, "--json", "--timeout", "20")
        finally:
            ended.set()
            await training
        found = json.loads(capsys.readouterr().out)
        assert (status, found["verified"], found["learner"]) == (0, True, "learner-1"), found
        assert [entry["member_id"] for entry in found["generators"]] == ["gen-1", "gen-2"]
        for entry in found["generators"]:
            assert entry["outcome"] == "agrees"
            assert entry["largest_difference"] < 1e-3
        assert await asyncio.to_thread(_command, world, monkeypatch, "--prompt", "07+35=") == 0
        out = capsys.readouterr().out
        assert "compared with learner-1" in out
        assert out.count("agrees") == 2
        # The learner's record of the pushes is part of the mesh's status.
        assert await asyncio.to_thread(_command, world, monkeypatch, command=("status",)) == 0
        lines = capsys.readouterr().out.splitlines()
        for name in ("gen-1", "gen-2"):
            [line] = [line for line in lines if line.strip().startswith(name) and "full over shm" in line]
            assert f"1:{learner.version}: " in line
        assert "gen-1, gen-2: full versions come over shm" in lines
        assert await asyncio.to_thread(_command, world, monkeypatch, "--json", command=("status",)) == 0
        pushes = {entry["member_id"]: entry for entry in json.loads(capsys.readouterr().out)["pushes"]["receivers"]}
        assert int(pushes["gen-1"]["count"]) == learner.version + 1
        assert pushes["gen-2"]["total_us"]["p50"] > 0


async def test_other_weights_are_found_and_what_cannot_be_compared_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with mesh(tmp_path) as world:
        learner = await world.learner()
        await learner.publish(0)
        nobody = await compare(world.address, SECURITY, timeout_s=5)
        assert (nobody.verified, nobody.verdicts) == (False, [])
        task, _ = world.generator("good")
        await world.holds_weights("good")
        usable = engine_weights._usable

        def damaged(source: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            tensor = usable(source, dtype, device)
            return tensor * 1.5 if tensor.dim() > 1 else tensor

        with monkeypatch.context() as patch:
            patch.setattr(engine_weights, "_usable", damaged)
            world.generator("bad")
            await world.holds_weights("bad")
        assert await asyncio.to_thread(_command, world, monkeypatch, "--timeout", "20", "--json") == 1
        found = json.loads(capsys.readouterr().out)
        assert not found["verified"]
        bad, good = found["generators"]
        assert (bad["member_id"], bad["outcome"], bad["policy"]) == ("bad", "differs", "1:0")
        assert "other bytes than the learner's (first: model.embed_tokens.weight, " in bad["why"]
        assert "log-probs differ by up to" in bad["why"]
        assert bad["digest"] != good["digest"]
        assert good["outcome"] == "agrees"
        with pytest.raises(UnreachableError, match="at least two"):
            await compare(world.address, SECURITY, timeout_s=5, prompt=TOKENIZER.decode([]))
        task.cancel()
        await asyncio.wait({task})
        outcomes = {verdict.member_id: verdict for verdict in (await _after_a_death(world)).verdicts}
        assert outcomes["good"].outcome == "not compared"
        assert "good" in outcomes["good"].why
    with pytest.raises(UnreachableError):
        await compare(world.address, SECURITY, timeout_s=1)


async def test_a_lost_adapter_is_found_though_the_base_is_the_same_bit_by_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with mesh(tmp_path, learner__lora={"rank": 2}) as world:
        learner = await world.learner()
        base = dict(world.model(0).named_parameters())
        torch.manual_seed(0)
        factors: dict[str, torch.Tensor] = {}
        for name, weight in base.items():
            if name.endswith("q_proj.weight"):
                a, b = factor_names(name)
                factors |= {a: torch.randn(2, weight.shape[1]), b: 0.1 * torch.randn(weight.shape[0], 2)}
        learner.publisher.publish(FROZEN_BASE, base.items(), "float32")
        learner.publisher.publish(PolicyVersion(1, 0), factors.items(), "float32")
        await learner.client.set_policy_version(1, 0)
        world.generator("good")
        await world.holds_weights("good")

        def without_adapter(self: AnnouncedWeights, _data: memoryview, **_: object) -> object:
            assert self.base is not None
            return named_tensors(self.manifest.base, self.base)

        with monkeypatch.context() as patch:
            patch.setattr(AnnouncedWeights, "for_engine", without_adapter)
            world.generator("lost")
            await world.holds_weights("lost")
        assert await asyncio.to_thread(_command, world, monkeypatch, "--timeout", "20", "--json") == 1
        good, lost = json.loads(capsys.readouterr().out)["generators"]
        assert (good["member_id"], good["outcome"], good["why"]) == ("good", "agrees", "")
        assert (lost["member_id"], lost["outcome"]) == ("lost", "differs")
        assert "other bytes than the learner's (first: model.layers.0.self_attn.q_proj.weight" in lost["why"]
        assert "its log-probs are those of the base: the adapter is lost" in lost["why"]


async def _after_a_death(world: World) -> Comparison:
    comparison = await compare(world.address, SECURITY, timeout_s=1)
    assert not comparison.verified
    return comparison
