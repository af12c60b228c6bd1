"""The survey's mismatch budget."""

import math

import pytest

from offdrift.errors import BadValueError
from offdrift.judge import load_rules
from offdrift_lab.evidence.budget import Mismatch, budget_of, over_budget


def test_every_number_has_to_be_below_its_limit():
    inside = Mismatch(9e-5, 0.09, 9e-4)
    assert over_budget(inside) == ()
    for name, limit in budget_of()._asdict().items():
        assert over_budget(inside._replace(**{name: limit})) == (name,)  # at the limit is not below it
    assert over_budget(Mismatch(1.0, 1.0, 1.0)) == Mismatch._fields


def test_the_budget_is_that_of_the_rules():
    """A rules file that widens one threshold widens the budget, and no other number of it."""
    wider = load_rules().limits | {"chi2_seq_budget": 0.5}
    assert budget_of(wider) == budget_of()._replace(chi2_seq=0.5)
    assert over_budget(Mismatch(9e-5, 0.2)) == ("chi2_seq",)
    assert over_budget(Mismatch(9e-5, 0.2), wider) == ()


def test_a_dense_model_has_no_routers():
    assert over_budget(Mismatch(9e-5, 0.09)) == ()


def test_what_was_not_measured_is_refused():
    with pytest.raises(BadValueError, match="chi2_seq is NaN"):
        over_budget(Mismatch(9e-5, math.nan))
