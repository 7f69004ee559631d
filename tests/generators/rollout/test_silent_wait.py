"""Members that are held and of which nothing comes."""

from __future__ import annotations

from rollmesh.generators.rollout.silent_wait import SilenceClock


def test_an_engine_that_samples_nothing_of_what_it_has_is_named() -> None:
    silence = SilenceClock()
    assert silence.reason(tokens=0, generating=4, now_s=100.0) == ""
    assert silence.reason(tokens=0, generating=4, now_s=110.0) == ""
    assert silence.reason(tokens=0, generating=4, now_s=112.0) == "no token was sampled for 12 s, 4 members held"
    assert silence.reason(tokens=1, generating=4, now_s=113.0) == "", "it samples again"
    assert silence.reason(tokens=1, generating=0, now_s=200.0) == "", "nothing is held"
    assert silence.reason(tokens=1, generating=2, now_s=205.0) == ""
    assert silence.reason(tokens=1, generating=2, now_s=211.0) == "no token was sampled for 11 s, 2 members held"
