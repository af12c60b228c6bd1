"""The unit of a correction against the source of the gap: planted logs accuse, and controls do not."""

import pytest

from offdrift.audit.shape_table import shape_table
from offdrift.audit.shapes import Shapes
from offdrift.check.measure import Measured
from offdrift.check.recommend import unit_of_mismatch
from offdrift.judge import Context, diagnose, load_rules
from offdrift.methods import METHODS
from tests.audit.test_shape_table import log
from tests.judge.histories import altered, both, clean

FINE, COARSE = "unit_too_fine", "unit_too_coarse"


@pytest.fixture(scope="module")
def shapes():
    """What an audit sees of a log in which a quarter of the responses is of another policy, and of one without."""
    places = {"planted": lambda at: at >= 0, "control": lambda at: at > 2}
    return {name: shape_table(Shapes.of(log(size=0.8, only=only))) for name, only in places.items()}


def told(rows, **context):
    return {f.rule: f for f in diagnose(rows, context=Context(**context))}


@pytest.mark.parametrize(
    ("which", "method", "accused"),
    [
        ("planted", "token_tis", True),
        ("planted", "bypass_ppo_clip", True),  # a clip on the full ratio, token by token
        ("planted", "decoupled_geo_rs", False),
        ("planted", "trm_max_k2", False),
        ("planted", "decoupled_geo_rs_token_tis", False),
        ("planted", "ppo_clip", False),  # corrects nothing of the engine, in no unit
        ("planted", None, False),
        ("control", "token_tis", False),
    ],
)
def test_single_tokens_are_corrected_where_whole_responses_differ(shapes, which, method, accused):
    found = told(clean(), shapes=shapes[which], method=method)
    assert (FINE in found) == accused
    if accused:
        (evidence,) = found[FINE].evidence
        assert evidence.value > load_rules().limits["kl_clean"] == evidence.threshold
        assert "whole responses" in evidence.metric
        assert found[FINE].method == "decoupled_geo_rs_token_tis"
        assert not METHODS["decoupled_geo_rs_token_tis"].engine_units <= {"token"}, "the fix has the unit"


@pytest.mark.parametrize(
    ("share", "kl", "method", "accused"),
    [
        (0.7, 0.03, "decoupled_geo_rs", True),
        (0.7, 0.03, "gspo", False),  # a mean, of two versions of the weights: nothing of the engine
        (0.7, 0.03, "decoupled_geo_rs_token_tis", False),
        (0.7, 0.03, "icepop", False),
        (0.7, 0.03, None, False),
        (0.3, 0.03, "decoupled_geo_rs", False),  # spread out
        (0.7, 0.001, "decoupled_geo_rs", False),  # too small to matter
    ],
)
def test_averages_are_taken_where_single_tokens_are_far_off(share, kl, method, accused):
    found = told(altered(both(k3_top_share=share, k3=kl, k1=kl)), method=method)
    assert (COARSE in found) == accused
    if accused:
        assert {e.value for e in found[COARSE].evidence} == {share, kl}
        assert found[COARSE].method == "decoupled_token_icepop"
        assert METHODS["decoupled_token_icepop"].engine_units == {"token"}, "the fix has the unit"


def test_every_method_has_the_units_in_which_it_corrects_for_the_engine():
    units = {name: row.engine_units for name, row in METHODS.items()}
    assert units["none"] == units["ppo_clip"] == units["gspo"] == frozenset()
    assert units["trm_max"] == {"token", "worst"}
    assert units["seq_tis"] == {"sequence"}
    assert units["echo2"] == {"token"}, "an age compares no policies"
    assert sum(map(bool, units.values())) > 80


@pytest.mark.parametrize(
    ("share", "name", "source", "fits"),
    [
        (0.1, "decoupled_token_is", "noise of every token", True),
        (0.1, "decoupled_geo_rs", "noise of every token", True),
        (0.9, "icepop", "single tokens that are far off", True),
        (0.9, "decoupled_geo_rs", "single tokens that are far off", False),
        (0.9, "disabled", "single tokens that are far off", False),
    ],
)
def test_a_check_says_whether_its_method_has_the_unit_of_the_mismatch(share, name, source, fits):
    limits = load_rules().limits
    baseline = Measured.__new__(Measured)
    for field, value in {"metrics": {"mismatch/k3_top_share": share}, "abs_log_ratio_max": 0.1, "kl_max": 0.1}.items():
        object.__setattr__(baseline, field, value)
    row = unit_of_mismatch(baseline, name, limits=limits)
    assert (row["source"], row["fits"]) == (source, fits)
    assert row["evidence"] == {"metric": "mismatch/k3_top_share", "value": share, "threshold": limits["tail_heavy"]}
    experts = unit_of_mismatch(baseline, name, limits=limits, mixture_of_experts=True)
    assert experts["source"] == "single tokens that are far off"
    object.__setattr__(baseline, "abs_log_ratio_max", 0.0)
    assert unit_of_mismatch(baseline, name, limits=limits)["source"] == source, "distributions differ"
    object.__setattr__(baseline, "kl_max", float("nan"))
    assert unit_of_mismatch(baseline, name, limits=limits)["source"] is None
