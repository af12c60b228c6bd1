"""What each grade of evidence may be used for."""

import pytest
import torch

from offdrift.divergence.evidence import Divergence, Grade
from offdrift.errors import EvidenceError

ASSUMED = "the tail is tame"
FLAGS = torch.tensor([False, True])
LO, HI = torch.tensor([0.1, 0.2]), torch.tensor([0.3, 0.2])


@pytest.mark.parametrize(
    ("divergence", "grade", "upper"),
    [
        (Divergence.exact("tv", LO), "exact", LO),
        (Divergence.interval("tv", LO, HI), "interval", HI),
        (Divergence.capped("tv", LO, HI, assumes=ASSUMED, refuted=FLAGS), "capped interval", HI),
    ],
)
def test_exact_values_and_upper_ends_may_certify(divergence, grade, upper):
    assert str(divergence.grade) == grade
    assert divergence.may_certify
    assert divergence.value is LO
    assert divergence.upper is divergence.hi is upper


def test_a_sample_never_certifies_and_says_what_would():
    sampled = Divergence.sampled("k3", LO)
    assert str(sampled.grade) == "sampled"
    assert not sampled.may_certify
    assert sampled.value is sampled.hi is LO
    with pytest.raises(EvidenceError, match=r'k3 is a sampled.*evidence="full"'):
        _ = sampled.upper


def test_only_a_capped_interval_assumes_something():
    assert Divergence.capped("tv", LO, HI, assumes=ASSUMED, refuted=FLAGS).assumes == ASSUMED
    assert Divergence.interval("tv", LO, HI).assumes is None
    with pytest.raises(EvidenceError, match="states its assumption"):
        Divergence("tv", Grade.CAPPED, LO, HI)
    with pytest.raises(EvidenceError, match='grade "interval" and assumes='):
        Divergence("tv", Grade.INTERVAL, LO, HI, assumes=ASSUMED)


def test_the_weakest_grade_wins():
    order = [Grade.EXACT, Grade.INTERVAL, Grade.CAPPED, Grade.SAMPLED]
    for i, a in enumerate(order):
        for j, b in enumerate(order):
            assert Grade.weakest([str(a), str(b)]) is order[max(i, j)]


def parts(*divergences):
    """The i-th divergence is about the i-th token from the back, and the one before the front."""
    n = 2 * len(divergences)
    rows = torch.arange(n).flip(0).view(-1, 2)
    return list(zip(rows, divergences, strict=True)), n


def test_what_is_put_together_keeps_its_places_its_weakest_grade_and_every_assumption():
    capped = Divergence.capped("tv", LO, HI, assumes=ASSUMED, refuted=FLAGS)
    other = Divergence.capped("tv", LO, HI, assumes="so is this", refuted=~FLAGS)
    exact = Divergence.exact("tv", LO + 1)
    whole = Divergence.joined(*parts(exact, capped, other, capped))
    assert whole.grade is Grade.CAPPED
    assert whole.assumes == f"{ASSUMED} and so is this"
    expected = torch.cat([LO + 1, LO, LO, LO]).flip(0)
    assert torch.equal(whole.lo, expected)
    assert torch.equal(whole.hi, torch.cat([LO + 1, HI, HI, HI]).flip(0))
    none = torch.zeros(2, dtype=torch.bool)
    assert torch.equal(whole.refuted, torch.cat([none, FLAGS, ~FLAGS, FLAGS]).flip(0))


def test_exact_parts_are_exact_and_one_sample_makes_all_a_sample():
    exact, capped = (Divergence.exact("tv", LO), Divergence.capped("tv", LO, HI, assumes=ASSUMED, refuted=FLAGS))
    whole = Divergence.joined(*parts(exact, exact))
    assert whole.grade is Grade.EXACT
    assert whole.hi is whole.lo
    sampled = Divergence.joined(*parts(capped, Divergence.sampled("tv", LO)))
    assert sampled.grade is Grade.SAMPLED
    assert sampled.assumes is None
    assert not sampled.may_certify


def test_map_reaches_every_tensor():
    capped = Divergence.capped("tv", LO, HI, assumes=ASSUMED, refuted=FLAGS)
    last = capped.map(lambda x: x[1:])
    assert (len(last.lo), len(last.hi), len(last.refuted)) == (1, 1, 1)
    assert last.assumes == ASSUMED
    exact = Divergence.exact("tv", LO).map(lambda x: x * 2)
    assert exact.hi is exact.lo
