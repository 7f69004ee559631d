"""Texts of rewarded responses: phrases that come with a reward, repetition, and rewards without the ground truth."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from rollmesh.audit.evidence import Kept, RunEvidence
from rollmesh.audit.statistics import Enrichment
from rollmesh.doctor.findings import Finding, note, ok, warning

PHRASES, REPEATS, TRUTH = "phrases", "repeats", "truth"
_WORD = re.compile(r"\w+|[^\w\s]")
# Words at each end of a response that are looked at, and of the longest phrase.
_ENDS, _LONGEST = 200, 5
# Samples of each class from which on a phrase is judged.
_LEAST = 20
# The least share of rewarded responses with a phrase, its times over others, and its distance from chance.
_SHARE, _TIMES, _Z = 0.3, 2.0, 5.0
_SHOWN = 3
# Marks that graders look for: a reward asks for them.
_ASKED_FOR = re.compile(r"####|boxed|</?answer>|</?think>|answer\s*:|answer is", re.IGNORECASE)
_COPIES, _COPIED = 3, 0.3
# Characters of a truth that is looked for in a response, and of a text whose repetition says something.
_LONG_TRUTH, _SHORT_TEXT = 60, 8
_WITHOUT, _RISE = 0.5, 0.25


def look_at_phrases(run: RunEvidence) -> Iterator[Finding]:
    """Phrases that rewarded responses have more often than others of the same steps."""
    high, low = [s for s in run.samples if run.is_high(s)], [s for s in run.samples if run.is_low(s)]
    if min(len(high), len(low)) < _LEAST:
        yield ok(
            PHRASES, f"too few kept responses to compare: {len(high)} with a high reward, {len(low)} with a low one"
        )
        return
    phrases = {id(sample): _phrases(sample) for sample in [*high, *low]}
    of_high = Counter(phrase for sample in high for phrase in phrases[id(sample)])
    of_low = Counter(phrase for sample in low for phrase in phrases[id(sample)])
    found = []
    for phrase, count in of_high.items():
        share, other = count / len(high), of_low[phrase] / len(low)
        if share < _SHARE or share < _TIMES * other or _ASKED_FOR.search(phrase):
            continue
        z = _z(phrase, high, low, phrases)
        if z >= _Z:
            found.append((z, len(phrase), phrase, share, other))
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
    phrase = distinct[0][2]
    example = next(s for s in reversed(high) if phrase in phrases[id(s)])
    yield warning(
        PHRASES,
        f"in {looked}, these come with a reward: {'; '.join(texts[:_SHOWN])}; for example {example.where}",
        "does the task ask for these words? If not, the reward can be had with them: try it on a wrong response that "
        "has them (`rollmesh reward try FILE`)",
        phrase=phrase,
        share=distinct[0][3],
        others=distinct[0][4],
        z=distinct[0][0],
        **example.place,
    )


def _z(phrase: str, high: Sequence[Kept], low: Sequence[Kept], phrases: Mapping[int, set[str]]) -> float:
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


def _phrases(sample: Kept) -> set[str]:
    """Phrases of a response that are neither in its prompt nor in its ground truth; `^` and `$` are its ends."""
    words = _WORD.findall(sample.response.lower())
    known = set(_WORD.findall(f"{sample.prompt} {sample.truth}".lower()))
    ends = [["^", *words[:_ENDS]], [*words[-_ENDS:], "$"]]
    parts = ends if len(words) > 2 * _ENDS else [["^", *words, "$"]]
    return {
        " ".join(part[start : start + length])
        for part in parts
        for length in range(1, _LONGEST + 1)
        for start in range(len(part) - length + 1)
        if not known.issuperset(set(part[start : start + length]) - {"^", "$"})
        and any(word.isalnum() for word in part[start : start + length])
    }


def look_at_repeats(run: RunEvidence) -> Iterator[Finding]:
    """One text that is rewarded for prompts with different answers."""
    rewarded = [s for s in run.late if run.is_high(s) and len(s.response.strip()) >= _SHORT_TEXT]
    if len(rewarded) < _LEAST:
        yield ok(
            REPEATS, f"{len(rewarded)} rewarded responses of more than a word in the last third: too few to compare"
        )
        return
    copies: dict[str, list[Kept]] = defaultdict(list)
    for sample in rewarded:
        copies[_skeleton(sample)].append(sample)
    repeated = [
        same for same in copies.values() if len({(s.prompt, s.truth) for s in same}) >= _COPIES and _differ(same)
    ]
    share = sum(map(len, repeated)) / len(rewarded)
    numbers = {"share": share, "rewarded": len(rewarded)}
    if share < _COPIED:
        yield ok(REPEATS, f"{share:.0%} of {len(rewarded)} rewarded responses repeat one another", **numbers)
        return
    example = max(repeated, key=len)[-1]
    yield warning(
        REPEATS,
        f"{share:.0%} of {len(rewarded)} rewarded responses in the last third repeat another one that answers another "
        f"prompt; for example {example.where}: {example.response[:80]!r}",
        "does this text answer the prompts? If not, the reward does not look at the answer",
        **numbers,
        **example.place,
    )


def _skeleton(sample: Kept) -> str:
    """A response in small letters, with single spaces and without its own answer."""
    text = sample.response.lower()
    if sample.truth and sample.truth.lower() in text:
        text = text.replace(sample.truth.lower(), "\0")
    return " ".join(text.split())


def _differ(same: Sequence[Kept]) -> bool:
    """True where responses to different prompts are equal although they should not be: no answer was taken out."""
    return not all("\0" in _skeleton(sample) for sample in same) and (
        not any(sample.truth for sample in same) or len({sample.truth for sample in same}) > 1
    )


def look_at_truth(run: RunEvidence) -> Iterator[Finding]:
    """Rewarded responses in which the ground truth does not occur."""
    early, late = (
        [s for s in part if run.is_high(s) and 0 < len(s.truth) <= _LONG_TRUTH] for part in (run.early, run.late)
    )
    if len(late) < _LEAST:
        yield ok(TRUTH, f"{len(late)} rewarded responses with a short ground truth in the last third: too few to judge")
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
