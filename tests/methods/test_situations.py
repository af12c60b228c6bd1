"""Suggestions by what an audit said: methods that exist, evidence that says whether it was measured, pages to read."""

from pathlib import Path

import pytest

from offdrift.methods import METHODS
from offdrift.methods.situations import SITUATIONS, USED_BY
from offdrift.methods.table import SYSTEMS

ROOT = Path(__file__).parents[2]
FRAMEWORKS = {"ms-swift", "AReaL", "NeMo-RL", "OpenRLHF", "prime-rl", "verl", "TRL"}


def test_the_situations_have_three_suggestions_each():
    assert list(SITUATIONS) == ["stale", "moe", "quantized", "async", "dense"]
    for situation in SITUATIONS.values():
        assert len(situation.suggested) == 3
        assert len({s.method for s in situation.suggested}) == 3
        assert len(situation.methods) >= 8


@pytest.mark.parametrize("name", SITUATIONS)
def test_every_name_is_a_row_and_every_claim_says_what_it_rests_on(name):
    situation = SITUATIONS[name]
    assert set(situation.methods) <= {*METHODS, *SYSTEMS}
    for s in situation.suggested:
        assert any(word in s.evidence for word in ("measured here", "claimed", "not measured", "suggests it")), s.method
        assert s.where
        page = s.where.partition(",")[0]
        assert not page.startswith("docs/") or (ROOT / page).is_file()


@pytest.mark.parametrize("name", SITUATIONS)
def test_where_the_survey_begins_otherwise_the_reason_is_said(name):
    situation = SITUATIONS[name]
    assert set(situation.survey) <= {*METHODS, *SYSTEMS}
    assert bool(situation.differs) == (situation.suggested[0].method not in situation.survey[:1])
    assert situation.survey_why


def test_numbers_of_suggestions_are_those_of_the_pages():
    said = {s.method: s.evidence for s in SITUATIONS["stale"].suggested}
    faq, evidence, training = ((ROOT / "docs" / f"{page}.md").read_text() for page in ("faq", "evidence", "training"))
    assert "the clip ends at .82, a mask at .20 and nothing at .23" in faq
    assert "| token_tis: ratios truncated at 2 | 0.33 → **0.22**" in training
    assert all(number in said["bypass_ppo_clip"] for number in (".82", ".23", ".22"))
    assert "gspo over whole episodes .623" in evidence
    assert ".62;" in said["gspo"]


def test_eight_methods_are_marked_and_each_by_three_frameworks():
    assert len(USED_BY) == 8
    assert set(USED_BY) <= set(METHODS)
    assert all(len(set(names)) == len(names) >= 3 for names in USED_BY.values())
    assert {name for names in USED_BY.values() for name in names} == FRAMEWORKS
