"""Verbs are linked with the functions that they share."""

from __future__ import annotations

import re

from rollmesh.buffer.redis_backend.scripts import link, load_scripts, sources

ONE = "local A, B = 1, 2\n"
TWO = "local function two() return A end\n"
THREE = "local function three()\n  return two() + B\nend\n"
FOUR = "local function four() return three() end\n"
FIVE = "local function five() return 5 end\n"
CLOCK = "local function now_ms() return 0 end\n"


def _linked(verb: str) -> str:
    texts = dict.fromkeys(sources(), "") | {
        "common": f"-- Of all.\n{ONE}-- five\n{TWO}{THREE}",
        "write_permission": FOUR + FIVE,
    }
    return link({**texts, "read_table": verb}, CLOCK, "-- guard\n")["read_table"].source.removeprefix("-- guard\n")


def test_a_verb_has_what_it_needs_in_order_and_nothing_else() -> None:
    assert _linked("return four()\n") == f"{ONE}{TWO}{THREE}{FOUR}return four()\n"
    assert _linked("return B\n") == f"{ONE}return B\n"
    assert _linked("-- five\nreturn now_ms()\n") == f"{CLOCK}return now_ms()\n"


def test_every_shared_definition_serves_a_verb() -> None:
    used = "".join(script.source for script in load_scripts().values())
    for name, text in sources().items():
        for line in re.findall(r"^local .*", text, re.MULTILINE):
            assert line in used, f"{name}.lua: no verb needs `{line}`"
