"""What each grade of evidence may be used for."""

import pytest
import torch

from offdrift.divergence.evidence import Divergence, Grade
from offdrift.errors import EvidenceError

LO, HI = torch.tensor([0.1, 0.2]), torch.tensor([0.3, 0.2])


@pytest.mark.parametrize(
    ("divergence", "grade", "upper"),
    [
        (Divergence.exact("tv", LO), Grade.EXACT, LO),
        (Divergence.interval("tv", LO, HI), Grade.INTERVAL, HI),
    ],
)
def test_exact_values_and_upper_ends_may_certify(divergence, grade, upper):
    assert divergence.grade is grade
    assert divergence.may_certify
    assert divergence.value is LO
    assert divergence.upper is upper


def test_a_sample_never_certifies_and_says_what_would():
    sampled = Divergence.sampled("k3", LO)
    assert sampled.grade is Grade.SAMPLED
    assert not sampled.may_certify
    assert sampled.value is LO
    with pytest.raises(EvidenceError, match=r'k3 is a sampled estimate.*evidence="full"'):
        _ = sampled.upper


def test_only_an_interval_has_two_ends():
    assert Divergence.exact("tv", LO).hi is LO
    assert Divergence.sampled("k2", LO).hi is LO
    assert Divergence.interval("tv", LO, HI).hi is HI


def test_grades_read_as_words_best_first():
    assert [str(g) for g in Grade] == ["exact", "interval", "sampled"]
