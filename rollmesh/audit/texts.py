"""Texts of rewarded responses: phrases that come with a reward, repetition, and rewards without the ground truth."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from rollmesh.audit.evidence import Kept, RunEvidence
from rollmesh.audit.near_copies import near_copies
from rollmesh.audit.phrases import Phrase, Words, frequent_phrases
from rollmesh.audit.statistics import Enrichment
from rollmesh.doctor.findings import Finding, not_checked, note, ok, warning

PHRASES, REPEATS, TRUTH = "phrases", "repeats", "truth"
# Samples of each class from which on a phrase is judged, and the most that are compared.
_LEAST, _MOST = 20, 2000
# The least share of rewarded responses with a phrase, its times over others, and its distance from chance.
_SHARE, _TIMES, _Z = 0.3, 2.0, 5.0
_SHOWN = 3
_COPIES, _COPIED = 3, 0.3
# Characters of a truth that is looked for in a response, and of a text whose repetition says something.
_LONG_TRUTH, _SHORT_TEXT = 60, 8
_WITHOUT, _RISE = 0.5, 0.25


def look_at_phrases(run: RunEvidence) -> Iterator[Finding]:
    """Phrases that rewarded responses have more often than others of the same steps."""
    high, low = (_spread([s for s in run.samples if is_one(s)]) for is_one in (run.is_high, run.is_low))
    if min(len(high), len(low)) < _LEAST:
        yield not_checked(
            PHRASES, f"too few kept responses to compare: {len(high)} with a high reward, {len(low)} with a low one"
        )
        return
    words = {id(s): Words.of(s.response, f"{s.prompt} {s.truth}") for s in (*high, *low)}
    candidates = frequent_phrases([words[id(s)] for s in high], math.ceil(_SHARE * len(high)))
    phrases = {place: text.own(candidates) for place, text in words.items()}
    of_high = Counter(phrase for sample in high for phrase in phrases[id(sample)])
    of_low = Counter(phrase for sample in low for phrase in phrases[id(sample)])
    found = []
    for phrase, count in of_high.items():
        share, other = count / len(high), of_low[phrase] / len(low)
        if share < _SHARE or share < _TIMES * other:
            continue
        z = _z(phrase, high, low, phrases)
        if z >= _Z:
            found.append((z, len(phrase), " ".join(phrase), share, other))
    looked = f"{len(high)} rewarded responses and {len(low)} others"
    if not found:
        yield ok(PHRASES, f"no phrase comes with a reward in {looked}", high=len(high), low=len(low))
        return
    # The longest phrase says most where several are equally strong.
    found.sort(key=lambda one: (round(one[3], 2), one[1]), reverse=True)
    distinct: list[tuple[float, int, str, float, float]] = []
    for one in found:
        if not any(one[2] in other[2] or other[2] in one[2] for other in distinct):
            distinct.append(one)
    texts = [
        f"{phrase!r} ({share:.0%} of rewarded ones, {other:.0%} of others)" for _, _, phrase, share, other in distinct
    ]
    strongest = distinct[0][2]
    example = next(s for s in reversed(high) if tuple(strongest.split(" ")) in phrases[id(s)])
    yield warning(
        PHRASES,
        f"in {looked}, these come with a reward: {'; '.join(texts[:_SHOWN])}; for example {example.where}",
        "does the task ask for these words? If not, the reward can be had with them: try it on a wrong response that "
        "has them (`rollmesh reward try FILE`)",
        phrase=strongest,
        share=distinct[0][3],
        others=distinct[0][4],
        z=distinct[0][0],
        **example.place,
    )


def _z(phrase: Phrase, high: Sequence[Kept], low: Sequence[Kept], phrases: Mapping[int, set[Phrase]]) -> float:
    # By step: what changes over the run in all responses says nothing.
    counts: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for offset, samples in ((0, high), (2, low)):
        for sample in samples:
            counts[sample.step][offset] += phrase in phrases[id(sample)]
            counts[sample.step][offset + 1] += 1
    enrichment = Enrichment()
    for step in counts.values():
        enrichment.add(*step)
    return enrichment.z


def _spread(samples: Sequence[Kept]) -> Sequence[Kept]:
    """At most so many as can be compared, spread over the run."""
    return samples[:: max(1, -(-len(samples) // _MOST))]


def look_at_repeats(run: RunEvidence) -> Iterator[Finding]:
    """Texts that are rewarded for several prompts although they lack their answers, word for word or nearly."""
    rewarded = [s for s in run.late if run.is_high(s) and len(s.response.strip()) >= _SHORT_TEXT]
    if len(rewarded) < _LEAST:
        yield not_checked(
            REPEATS, f"{len(rewarded)} rewarded responses of more than a word in the last third: too few to compare"
        )
        return
    looked = _spread(rewarded)
    # Right answers to like prompts may well be alike.
    without = [s for s in looked if not s.truth or not _has_truth(s)]
    groups = [
        [without[place] for place in group] for group in near_copies([s.response.lower().split() for s in without])
    ]
    repeated = [same for same in groups if len({s.prompt for s in same}) >= _COPIES]
    share = sum(map(len, repeated)) / len(looked)
    numbers = {"share": share, "rewarded": len(looked)}
    if share < _COPIED:
        yield ok(REPEATS, f"{share:.0%} of {len(looked)} rewarded responses repeat others without an answer", **numbers)
        return
    example = max(repeated, key=len)[-1]
    yield warning(
        REPEATS,
        f"{share:.0%} of {len(looked)} rewarded responses in the last third repeat, or nearly repeat, a response to "
        f"another prompt, and lack the answer; for example {example.where}: {example.response[:80]!r}",
        "does this text answer the prompts? If not, the reward does not look at the answer",
        **numbers,
        **example.place,
    )


def look_at_truth(run: RunEvidence) -> Iterator[Finding]:
    """Rewarded responses in which the ground truth does not occur."""
    early, late = (
        [s for s in part if run.is_high(s) and 0 < len(s.truth) <= _LONG_TRUTH] for part in (run.early, run.late)
    )
    if len(late) < _LEAST:
        yield not_checked(
            TRUTH, f"{len(late)} rewarded responses with a short ground truth in the last third: too few to judge"
        )
        return
    without = [s for s in late if not _has_truth(s)]
    share = len(without) / len(late)
    before = fmean(not _has_truth(s) for s in early) if len(early) >= _LEAST // 2 else None
    text = f"{share:.0%} of {len(late)} rewarded responses in the last third do not contain their ground truth"
    text += f" ({before:.0%} in the first third)" if before is not None else ""
    numbers = {"share": share, "before": before, "rewarded": len(late)}
    if share < _WITHOUT or not without:
        yield ok(TRUTH, text, **numbers)
        return
    shown = f"{text}; for example {without[-1].where}: {without[-1].response[-60:]!r}, truth {without[-1].truth!r}"
    if before is None or share - before >= _RISE:
        yield warning(
            TRUTH,
            shown,
            "score such responses by another function: `rollmesh reward audit RUN --against exact_match`",
            **numbers,
            **without[-1].place,
        )
    else:
        yield note(TRUTH, shown, "as it is where the truth is a pattern, a rubric or a test", **numbers)


def _has_truth(sample: Kept) -> bool:
    compact = "".join(sample.response.lower().replace(",", "").split())
    return "".join(sample.truth.lower().replace(",", "").split()) in compact
