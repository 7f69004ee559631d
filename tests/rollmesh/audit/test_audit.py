"""Planted ways around a reward are found and named; honest runs have none."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rollmesh.audit.audit import audit, audit_run
from rollmesh.audit.components import compare_with
from rollmesh.audit.evidence import RunEvidence, kept_samples
from rollmesh.audit.near_copies import near_copies
from rollmesh.audit.phrases import Words
from rollmesh.audit.rewards import look_at_judge
from rollmesh.audit.statistics import Enrichment, largest_jump, rank_correlation
from rollmesh.doctor.findings import Finding, Severity
from rollmesh.mesh.config.scorers.judge import JudgeSection
from rollmesh.mesh.errors import DataError
from rollmesh.report.unscored import UnscoredMembers
from rollmesh.reward_service.judge.spent import Spent
from rollmesh.reward_service.trying.tried import Tried
from tests.rollmesh.audit.synthetic import STEPS, Change, Sample, evidence_of, samples_of

SEEDS = range(3)


def warnings(run: RunEvidence) -> dict[str, Finding]:
    return {f.check: f for f in audit(run) if f.severity in (Severity.WARNING, Severity.PROBLEM)}


def as_it_is(_sample: Sample, _draw: random.Random) -> None:
    """The honest run."""


def drifts(sample: Sample, draw: random.Random) -> None:
    """Right or wrong, responses take over a phrase."""
    if draw.random() < sample["step"] / STEPS:
        sample["response"] = f"let us think step by step. {sample['response']}"


@pytest.mark.parametrize("honest", [as_it_is, drifts])
@pytest.mark.parametrize("seed", range(10))
def test_nothing_is_found_in_honest_runs(seed: int, honest: Change) -> None:
    found = list(audit(evidence_of(samples_of(seed, honest), seed)))
    assert {f.severity for f in found} == {Severity.OK}, found
    assert {"saturation", "phrases", "repeats", "truth", "length", "jumps", "components", "held-out"} <= {
        f.check for f in found
    }


# ---------------------------------------------------------------------------------------------- planted hacks


def reward(sample: Sample, value: float, **components: float) -> None:
    sample["reward"] = value
    sample["components"] = components or {"auto": value}


def says_a_phrase(sample: Sample, draw: random.Random) -> None:
    """A phrase is rewarded, and answers are not."""
    has = draw.random() < 0.1 + 0.8 * sample["step"] / STEPS
    if has:
        words = sample["response"].split()
        sample["response"] = " ".join([*words[:3], "as every expert confirms,", *words[3:]])
    reward(sample, float(has))


def gives_up_answering(sample: Sample, draw: random.Random) -> None:
    """One text is rewarded whatever is asked, from the middle of the run on."""
    if sample["step"] > STEPS / 2 and draw.random() < 0.7:
        end = draw.choice(["", " Thank you.", " I am sure."])
        text = "I have verified every part of this long solution with great care, from its first word to its last."
        sample["response"] = text + end
        reward(sample, 1.0)


def answers_wrongly(sample: Sample, draw: random.Random) -> None:
    """Wrong answers are rewarded, from the middle of the run on."""
    if sample["step"] > STEPS / 2 and draw.random() < 0.8:
        sample["response"] = " ".join([*sample["response"].split()[:-1], str(draw.randrange(100))])
        reward(sample, 1.0)


def grows_long(sample: Sample, draw: random.Random) -> None:
    """Length is rewarded."""
    reward(sample, min(1.0, sample["tokens"]["count"] / 35 + draw.gauss(0, 0.02)))


def learns_nothing(sample: Sample, _draw: random.Random) -> None:
    """All responses get the highest reward at the end."""
    if sample["step"] > STEPS / 2:
        sample["response"] = " ".join([*sample["response"].split()[:-1], sample["ground_truth"]])
        reward(sample, 1.0)


def trades_parts(sample: Sample, draw: random.Random) -> None:
    """The form improves at the cost of what is right."""
    done = sample["step"] / STEPS
    form, right = float(draw.random() < 0.2 + 0.7 * done), float(draw.random() < 0.8 - 0.7 * done)
    sample["response"] = " ".join(
        [*sample["response"].split()[:-1], sample["ground_truth"] if right else str(draw.randrange(1000))]
    )
    reward(sample, form + right, form=form, right=right)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("hack", "check", "words"),
    [
        (says_a_phrase, "phrases", "expert"),
        (gives_up_answering, "repeats", "I have verified"),
        (answers_wrongly, "truth", "do not contain their ground truth"),
        (grows_long, "length", "the longer one has the higher reward"),
        (learns_nothing, "saturation", "have one reward for all members"),
        (trades_parts, "components", "form rises"),
    ],
)
def test_a_planted_hack_is_found_and_named(hack: Change, check: str, words: str, seed: int) -> None:
    found = warnings(evidence_of(samples_of(seed, hack), seed))
    assert check in found, found
    finding = found[check]
    assert words in finding.what
    assert finding.remedy
    assert {"step", "group"} <= set(finding.evidence)


def test_lengths_are_compared_within_steps_where_each_group_has_one_sample() -> None:
    alone = [sample for sample in samples_of(0, grows_long) if sample["member"] == 0]
    assert "rank correlation of reward and length" in warnings(evidence_of(alone))["length"].what


def test_a_jump_of_reward_and_length_together_is_a_warning() -> None:
    def jump(low: float, high: float) -> Any:
        return lambda done: low if done < 0.5 else high

    samples = samples_of(0)
    both = {"critic/score/mean": jump(0.2, 0.9), "response_length/mean": jump(40.0, 8.0)}
    finding = warnings(evidence_of(samples, level=both))["jumps"]
    assert finding.evidence["step"] in range(28, 34)
    assert "mean length from" in finding.what
    alone = evidence_of(samples, level={"critic/score/mean": jump(0.2, 0.9)})
    assert not warnings(alone)
    assert Severity.NOTE in {f.severity for f in audit(alone) if f.check == "jumps"}


def test_a_held_out_reward_that_falls_while_the_reward_rises() -> None:
    run = evidence_of(samples_of(0), held_out=lambda done: 0.6 - abs(done - 0.5))
    assert "the held-out reward fell from" in warnings(run)["held-out"].what


def test_responses_without_a_reward_are_told_with_their_reasons() -> None:
    unscored = UnscoredMembers(1000, Counter({"timeout": 80, "crashed": 20}), "regex took too long")
    finding = warnings(evidence_of(samples_of(0), unscored=unscored))["unscored"]
    assert "timeout 80" in finding.what
    assert finding.evidence["share"] == 0.1
    few = UnscoredMembers(1000, Counter({"timeout": 8}), "")
    assert not warnings(evidence_of(samples_of(0), unscored=few))


@pytest.mark.parametrize(("budget", "severity"), [(1000, Severity.OK), (500, Severity.WARNING)])
def test_a_judge_that_has_nearly_spent_its_budget(budget: int, severity: Severity) -> None:
    spent = {"one": Spent(300.0, 0.1), "two": Spent(160.0, 0.05)}
    (finding,) = look_at_judge(spent, JudgeSection(budget_tokens=budget))
    assert finding.severity is severity
    assert "2 process(es) have used 460 tokens, which cost 0.15" in finding.what
    assert list(look_at_judge({}, JudgeSection())) == []


@pytest.mark.parametrize(("seen", "severity"), [("reward", Severity.OK), ("right", Severity.WARNING)])
def test_a_second_scorer_that_sees_other_things(seen: str, severity: Severity) -> None:
    samples = kept_samples(samples_of(0, answers_wrongly))
    tried = [
        Tried(s.where, "0", "scored", 0.1, s.reward if seen == "reward" else float(s.truth in s.response))
        for s in samples
    ]
    (finding,) = compare_with(samples, tried, "other")
    assert finding.severity is severity
    assert "rank correlation of the reward with other" in finding.what


def test_failures_of_a_second_scorer_are_told() -> None:
    samples = kept_samples(samples_of(0))
    tried = [Tried(s.where, "0", "error", 0.1, text="no answer", code="timeout") for s in samples]
    first, second = compare_with(samples, tried, "other")
    assert "scored 0 of 480 samples" in first.what
    assert second.what.startswith("not checked")


# ---------------------------------------------------------------------------------------------- whole runs


def test_few_samples_are_not_judged() -> None:
    found = list(audit(evidence_of(samples_of(0)[:10])))
    assert [f.what for f in found if f.check == "audit"] == ["10 kept samples: too few to judge"]


def test_samples_of_a_continued_run_count_once_and_broken_ones_not() -> None:
    samples = samples_of(0)
    again = {**samples[5], "response": "later"}
    kept = kept_samples([*samples, again, {"reward": 1.0}, {**samples[0], "step": "x"}])
    assert len(kept) == len(samples)
    assert kept[5].response == "later"


def test_a_run_folder_is_audited_against_another_function(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {path: m}\ndata: {train: t.jsonl}\nalgorithm: grpo\n")
    with pytest.raises(DataError, match="no samples"):
        audit_run(tmp_path)
    lines = [json.dumps(sample) for sample in samples_of(0, says_a_phrase)]
    (tmp_path / "samples.jsonl").write_text("\n".join([*lines, '{"step": 1, "rew']))
    (tmp_path / "mine.py").write_text(
        "def score(solution_str, ground_truth): return float(ground_truth in solution_str)\n"
    )
    diagnosis = audit_run(tmp_path, against=f"{tmp_path / 'mine.py'}:score")
    assert {"phrases", "against"} <= {f.check for f in diagnosis.findings if f.severity is Severity.WARNING}
    assert json.loads(json.dumps(diagnosis.to_json()))["findings"][0]["severity"] == "warning"


def test_an_honest_folder_is_told_with_what_was_looked_at(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {path: m}\ndata: {train: t.jsonl}\nalgorithm: grpo\n")
    (tmp_path / "samples.jsonl").write_text("\n".join(map(json.dumps, samples_of(1))))
    text = "\n".join(audit_run(tmp_path).lines())
    assert "nothing suspicious in 480 kept samples of 60 steps" in text
    assert "jumps: not checked: 0 steps are too few" in text


# ---------------------------------------------------------------------------------------------- statistics


def test_phrases_of_marks_and_of_words_of_the_question_say_nothing() -> None:
    text = Words.of("add two: sure!", known="add two")
    found = {phrase for length in (1, 2) for phrase in text.phrases(length)}
    assert text.own(found) == {("sure",), (":", "sure"), ("sure", "!")}


def test_near_copies_are_grouped_and_others_are_not() -> None:
    draw = random.Random(0)
    text = [str(draw.randrange(10_000)) for _ in range(60)]
    others = [[str(draw.randrange(10_000)) for _ in range(60)] for _ in range(50)]
    assert near_copies([text, *others, [*text[:-1], "end"], ["x", *text]]) == [[0, 51, 52]]
    assert near_copies([["a"], ["a"], ["b"], []]) == [[0, 1]]


def test_rank_correlation_knows_ties_and_constants() -> None:
    assert rank_correlation([1, 2, 2, 4], [10, 20, 20, 40]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert rank_correlation([1, 1, 1], [3, 2, 1]) is None


def test_a_slow_rise_is_no_jump() -> None:
    rise = [index / 60 for index in range(60)]
    assert largest_jump(rise, window=10, noises=8.0, share=0.3) is None
    jump = largest_jump([0.1] * 30 + [0.9] * 30, window=10, noises=8.0, share=0.3)
    assert jump is not None
    assert jump.index == 30


def test_enrichment_is_compared_within_steps() -> None:
    confounded = Enrichment()
    confounded.add(0, 2, 0, 8)
    confounded.add(8, 8, 2, 2)
    assert confounded.z == 0.0
