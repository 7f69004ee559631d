"""The rules of the contract, each with the one place that enforces it and the words that take it away.

A rule is stated once in the scripts and once, in other words, in the machine. `test_rules_are_needed` takes one rule at
a time out of the scripts and sees a test fail; docs/buffer.md lists the rules by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from rollmesh.buffer.redis_backend.scripts import Script, link, load_scripts, sources


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Attributes:
        name: of the rule, as documented.
        file: script that enforces it.
        text: what stands there.
        without: the same without the rule.
        walk: number of the walk that misses it soonest, as far as is known; it is tried first.
    """

    name: str
    file: str
    text: str
    without: str = ""
    walk: int = 0


# Seen by comparing the scripts with the machine, command by command.
COMPARED = (
    Rule(
        "the gate admits by demand",
        "admit",
        "if demand() + counters.samples_per_insert - 1 >= live_limit then",
        "if false then",
        walk=9,
    ),
    Rule(
        "the byte budget gates admission",
        "admit",
        "if counters.bytes + counters.reserved + reserve > counters.max_bytes then",
        "if false then",
    ),
    Rule("evaluation goes first at bound 0", "admit", "if evaluating() then return 'evaluation' end"),
    Rule("re-admission obeys the bound", "admit", "if g.deadline >= counters.u then", "if true then", walk=2),
    Rule("a holder that lost a group hears of it", "admit", "if g.attempt > 0 then cancel(gid, g) end", walk=6),
    Rule("writes are fenced by the lease", "write_permission", "(g.state ~= 'generating' or g.lease == lease)", "true"),
    Rule("writes are fenced by the attempt", "write_permission", "g.attempt == tonumber(attempt) and", "", walk=6),
    Rule("one value per member", "write", "if is_done(g, position) then return duplicate() end"),
    Rule(
        "sealed when all members have an outcome",
        "write",
        "if string.find(g.done, '0', 1, true) then return STORED end",
    ),
    Rule("too few scored members fail", "write", "if scored(g) < counters.min_members then", "if false then", walk=2),
    Rule(
        "the oldest token makes the deadline", "write", "g.ranges = merge_ranges(g.ranges, ranges)", "g.ranges = ranges"
    ),
    Rule("a stored member needs no draft", "write", "drop_draft(gid, g, member)\n", walk=4),
    Rule("a shorter draft replaces none", "write", "known.tokens >= tokens", "false", walk=3),
    Rule(
        "a stored member is progress",
        "write",
        "string.sub(g.done, position + 1)\n  record_progress()",
        "string.sub(g.done, position + 1)",
    ),
    Rule(
        "a longer draft is progress",
        "write",
        "if not known or tokens > known.tokens then record_progress() end",
        walk=3,
    ),
    Rule("drafts continue within the bound", "grant_drafts", "if deadline >= counters.u then", "if true then", walk=2),
    Rule("leased groups are ready groups", "sample", "and g.state == 'ready'", ""),
    Rule("a lease is within the bound", "sample", "and g.deadline >= version", ""),
    Rule("a batch has its quota", "sample", "#answer < room and", "", walk=6),
    Rule("a claimed version takes no more", "sample", "if version < counters.u then room = 0 end", walk=6),
    Rule(
        "a claim needs the lease",
        "claim",
        "g and g.lease == lease and g.state == 'leased'",
        "g and g.state == 'leased'",
    ),
    Rule("a claim is within the bound", "claim", "elseif g.deadline < version then", "elseif false then", walk=2),
    Rule("a group is claimed once at a time", "claim", "elseif seen[gid] then", "elseif false then", walk=5),
    Rule("all or none is claimed", "claim", "if #refused > 0 then return {'ok', snapshot(), 0, refused} end"),
    Rule("a claim uses each group once", "claim", "elseif not claimed then", "else", walk=5),
    Rule(
        "a group is used once per version",
        "claim",
        "elseif g.uses and last_use(g) >= version then",
        "elseif false then",
        walk=20,
    ),
    Rule("one batch per version", "claim", "version < counters.u and 'version_claimed'", "false"),
    Rule("no version is left out", "claim", "version > counters.u and 'version_ahead'", "false", walk=17),
    Rule(
        "a repeated claim changes nothing",
        "claim",
        "if #fresh == 0 then return {'ok', snapshot(), 1, {}, checkpoint_wanted()} end",
        walk=5,
    ),
    Rule("a claim moves the next version", "claim", "if counters.bounded == 1 then put('u', version + 1) end", walk=1),
    Rule("uses are limited", "claim", "#uses + 1 < counters.max_reuse and", ""),
    Rule("used again only within the bound", "claim", "and g.deadline > version", "", walk=5),
    Rule(
        "consumed bytes ask for a checkpoint",
        "claim",
        "counters.consumed_bytes * 2 > counters.max_bytes",
        "false",
        walk=6,
    ),
    Rule("only the lease gives back", "nack", "and g.lease == ARGV[i + 1]", walk=7),
    Rule("only the lease is given up", "release", "and g.lease == ARGV[i + 1]"),
    Rule("only the holder gives up", "release", "and g.holder == ARGV[2]", walk=13),
    Rule("only the lease ends what cannot be given", "fail_groups", "and g.lease == ARGV[i + 1]"),
    Rule("used groups do not fail", "fail_groups", "and g.state ~= 'consumed'", walk=6),
    Rule(
        "a commit marks what is not undone",
        "commit",
        "if version > run.committed then redis.call('HSET', RUN, 'committed', version) end",
        walk=5,
    ),
    Rule("a commit covers what lies below it", "commit", "local limit = '(' .. version", "local limit = version"),
    Rule("a claim is progress", "claim", "record_progress()\n", walk=2),
    Rule("a fate is progress", "transitions", "record_progress()\n", walk=1),
    Rule("a takeover is progress", "take_over", "record_progress()\n"),
    Rule("a takeover undoes later uses", "take_over", "if version < k then", "if true then", walk=17),
    Rule(
        "discarded versions count the way back", "lineage", "return 2 * ancestor - version", "return version", walk=17
    ),
    Rule(
        "an evicted prompt gets another group",
        "evict",
        "finish(gid, g, 'evicted_stale', reason, true)",
        "finish(gid, g, 'evicted_stale', reason, false)",
        walk=1,
    ),
    Rule("refills are bounded", "transitions", "requeue and refills <= counters.max_attempts", "requeue"),
    Rule(
        "what was used is not evicted",
        "transitions",
        "if g.uses and g.state ~= 'consumed' then return retire(gid, g) end",
        walk=20,
    ),
    Rule("a lease is over with its term", "expire", "'-inf', now, 'LIMIT'", "'-inf', now - 1, 'LIMIT'"),
    Rule(
        "lost holders count",
        "expire",
        "end_lease(gid, read_group(gid), 1)",
        "end_lease(gid, read_group(gid), 0)",
        walk=4,
    ),
    Rule(
        "unnamed groups are taken from their holder",
        "end_unnamed_leases",
        "if g and g.holder == holder and not alive[gid] then",
        "if false then",
        walk=3,
    ),
    Rule(
        "the lease counts and not the group",
        "end_unnamed_leases",
        "g.holder == holder and g.lease == lease",
        "g.holder == holder",
        walk=7,
    ),
    Rule(
        "naming takes from no one else", "end_unnamed_leases", "g.holder == holder and not alive", "not alive", walk=3
    ),
    Rule(
        "groups between two holders are not dead",
        "end_unnamed_leases",
        "is_orphan(g) and g.lease == lease",
        "false",
        walk=3,
    ),
    Rule(
        "a holder that forgets a group has lost it",
        "end_unnamed_leases",
        "end_lease(gid, g, 1)",
        "end_lease(gid, g, 0)",
        walk=3,
    ),
    Rule(
        "a replaced stream names nothing",
        "end_unnamed_leases",
        "if replaced(holder, ARGV[4]) then",
        "if false then",
        walk=7,
    ),
    Rule(
        "attempts are bounded", "transitions", "if g.lost + lost >= counters.max_attempts then", "if false then", walk=2
    ),
    Rule("a new stream begins a full term", "attach", "redis.call('ZREM', table_key .. ':holders', holder)", walk=6),
    Rule("a broken stream shortens leases", "detach", "if expires > short then", "if false then", walk=3),
    Rule(
        "only an open stream renews",
        "heartbeat",
        "if redis.call('HEXISTS', table_key .. ':streams', holder) == 1 then",
        "if true then",
        walk=13,
    ),
    Rule(
        "only the present connection renews",
        "heartbeat",
        "generation_of(member) == tonumber(ARGV[3]) and 1 or 0",
        "1",
        walk=7,
    ),
    Rule(
        "only its own end breaks a stream",
        "detach",
        "if redis.call('HGET', table_key .. ':streams', holder) ~= ARGV[3] then return {'ok', snapshot()} end",
        walk=7,
    ),
    Rule(
        "a member that has joined again has not left",
        "leave",
        "if generation_of(member) ~= tonumber(ARGV[3]) then return {'ok'} end",
        walk=2,
    ),
    Rule(
        "late seeding takes nothing back",
        "seed",
        "incarnation > counters.seed_by or call > counters.seed_call",
        "true",
        walk=5,
    ),
    Rule("late priorities change nothing", "set_priorities", "draw.call < call", "true", walk=3),
    Rule("only prompts in use are named", "prompts", "'GETDEL'", "'GET'", walk=5),
    Rule("seeding twice is harmless", "seed", "if ordinal > counters.seeded then", "if true then", walk=4),
    Rule(
        "the worker of a group hears of its end",
        "transitions",
        "if g.state == 'generating' and string.find(g.done, '0', 1, true) then cancel(gid, g) end",
        walk=6,
    ),
    Rule("ended groups give their bytes back", "transitions", "add('bytes', -g.bytes)", walk=1),
    Rule(
        "sealed groups give their reservation back",
        "transitions",
        "if g.state == 'generating' then add('reserved', -g.reserve) end\n  g.state",
        "g.state",
    ),
    Rule("used groups demand less", "common", " - counters.spent\nend", "\nend", walk=5),
    Rule("draws follow the weights", "transitions", "/ weight_of(g) * WEIGHT_UNIT", "", walk=17),
    Rule("a failed prompt is driven again once", "transitions", "note.kept, note.redriven = false, true", ""),
    Rule(
        "connections have a generation",
        "admit",
        "if generation_of(member) ~= tonumber(ARGV[3]) then",
        "if false then",
        walk=7,
    ),
    Rule("a replaced stream takes no grants", "admit", "if replaced(member, ARGV[9]) then", "if false then", walk=7),
    Rule(
        "a replaced stream takes no leases", "sample", "if replaced('learner', ARGV[4]) then", "if false then", walk=7
    ),
    Rule(
        "only the incarnation in force is served",
        "admit",
        "if serving_inc ~= run.incarnation then",
        "if false then",
        walk=7,
    ),
    Rule(
        "proposals that are out of date are refused",
        "admit",
        "if counters.bounded == 1 and tonumber(ARGV[7]) ~= counters.u then",
        "if false then",
        walk=1,
    ),
    Rule("a takeover needs the lease to be over", "resume", "run.learner_until > now and", "false and", walk=7),
    Rule(
        "a repeated takeover is one takeover",
        "resume",
        "if call == number then return {'ok', snapshot(), unpack(given)} end",
    ),
    Rule(
        "a late copy of a takeover changes nothing",
        "resume",
        "if call < number or (call == number and at ~= k) then",
        "if false then",
        walk=3,
    ),
    Rule("no resume below the commit", "resume", "if k < run.committed and ARGV[5] ~= '1' then", "if false then"),
    Rule(
        "an older incarnation is fenced", "common", "if incarnation < run.incarnation then return 'fenced' end", walk=7
    ),
)


class NoSuchRuleError(Exception):
    """The text that a rule takes away does not stand where it should: nothing would be tried. No walk may take it for a
    find.
    """


@cache
def without(rule: Rule, clock: str | None = None, guard: str = "") -> dict[str, Script]:
    """The scripts without one rule, as `load_scripts` has them with these arguments.

    Raises:
        NoSuchRuleError: the rule does not stand where it should, once, or taking it away changes no script.
    """
    texts = sources()
    text = texts[rule.file]
    if text.count(rule.text) != 1:
        raise NoSuchRuleError(f"{rule.name}: {text.count(rule.text)} times in {rule.file}.lua, not once: {rule.text}")
    changed = link({**texts, rule.file: text.replace(rule.text, rule.without)}, clock, guard)
    if changed == load_scripts(clock, guard):
        raise NoSuchRuleError(f"{rule.name}: the scripts are the same without it")
    return changed


def documented() -> str:
    """The rules by the script that enforces them, as a table."""
    files_of = sorted({rule.file for rule in COMPARED})
    lines = ["| script | rules |", "|---|---|"]
    names_of = {file: "<br>".join(rule.name for rule in COMPARED if rule.file == file) for file in files_of}
    return "\n".join([*lines, *(f"| `{file}.lua` | {names} |" for file, names in names_of.items())])
