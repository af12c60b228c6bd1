"""The method table: exactly the rows it should have, overrides, and compositions that make no sense."""

import pytest

from offdrift.correction import Correction, Weight
from offdrift.errors import MethodError
from offdrift.methods import METHODS, Method, method, override
from offdrift.methods.table import FAMILIES
from offdrift.objectives import Clipped, ImportanceSampled, Reinforce

PUBLISHED = {
    "trm_max": [0.05],
    "trm_avg": [0.001],
    "trm_max_avg": [0.1, 0.002],
    "trm_max_k2": [0.05],
    "trm_avg_k3": [0.001],
    "trm_max_avg_k2_k3": [0.1, 0.002],
}


PRESETS = {
    "disabled", "decoupled_token_is", "decoupled_seq_is", "decoupled_seq_is_rs", "decoupled_geo_rs",
    "decoupled_geo_rs_seq_tis", "decoupled_geo_rs_token_tis", "decoupled_k3_rs",
    "decoupled_k3_rs_seq_tis", "decoupled_k3_rs_token_tis", "decoupled_token_icepop",
    "bypass_ppo_clip", "bypass_ppo_clip_geo_rs", "bypass_ppo_clip_k3_rs", "bypass_pg_is",
    "bypass_pg_geo_rs", "bypass_pg_geo_rs_seq_tis", "bypass_pg_geo_rs_token_tis",
    "bypass_pg_token_icepop",
}  # fmt: skip


def test_the_nineteen_presets_are_there_by_name():
    assert set(FAMILIES["presets"]) == PRESETS
    assert len(PRESETS) == 19


def test_no_two_rows_are_one_composition():
    """Aliases are told apart by words alone: each is listed here with its reason."""
    same = {}
    for name, row in METHODS.items():
        parts = (
            row.objective,
            row.correction,
            row.aggregate,
            row.penalty,
            row.anchor,
            row.lr_scale,
            row.advantage,
            row.old_policy,
        )
        same.setdefault(parts, []).append(name)
    assert [names for names in same.values() if len(names) > 1] == ALIASES


# verl's presets under their own names beside the papers' rows
ALIASES = [["seq_tis", "bypass_pg_is"], ["dual_clip", "disabled"], ["decoupled_ppo", "decoupled_token_is"]]


@pytest.mark.parametrize("name", PUBLISHED)
def test_thresholds_are_the_papers(name):
    row = METHODS[name]
    assert [g.high for g in row.correction.gates] == PUBLISHED[name]
    assert row.aggregate == "seq_mean_token_sum"
    assert row.needs_divergences == (not name.endswith(("k2", "k3")))
    assert not row.needs_old


def test_overrides_change_one_value_and_leave_the_table_alone():
    changed = override(method("trm_max_avg"), {"gate.1.high": 0.5, "aggregate": "token_mean"})
    assert [g.high for g in changed.correction.gates] == [0.1, 0.5]
    assert changed.aggregate == "token_mean"
    assert [g.high for g in METHODS["trm_max_avg"].correction.gates] == [0.1, 0.002]
    assert override(method("token_tis"), {"weight.on": "mismatch"}).needs_old


@pytest.mark.parametrize(
    ("name", "path", "words"),
    [
        ("trm_max", "gate.hihg", "no 'hihg', only"),
        ("trm_max_avg", "gate.high", "has 2 gates, say which"),
        ("trm_max", "gate.1.high", "numbered 0 to 0"),
        ("none", "weight.cap", "not a part of this method"),
        ("none", "learning_rate", "not a part of this method"),
    ],
)
def test_an_override_that_hits_nothing_is_an_error(name, path, words):
    with pytest.raises(MethodError, match=words):
        override(method(name), {path: 1.0})


def test_unknown_method_names_the_table():
    with pytest.raises(MethodError, match="no method 'pp_clip'; did you mean ppo_clip"):
        method("pp_clip")


@pytest.mark.parametrize(
    ("objective", "on", "fine"),
    [
        (Reinforce(), "full", True),
        (Clipped(), "mismatch", True),
        (Clipped(), "full", False),
        (Clipped(), "staleness", False),
        (Clipped(on="full"), "mismatch", False),
        (ImportanceSampled(), "full", False),
        (ImportanceSampled(on="mismatch"), "staleness", True),
    ],
)
def test_no_ratio_may_count_twice(objective, on, fine):
    correction = Correction(weights=(Weight(on=on, cap=2.0),))
    if fine:
        assert Method(objective=objective, correction=correction).correction.weights
    else:
        with pytest.raises(MethodError, match="count it twice"):
            Method(objective=objective, correction=correction)


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("trm_max_k2", "gate.on", "bogus"),
        ("trm_max_k2", "gate.advantage", "sideways"),
        ("trm_max_k2", "gate.high", float("nan")),
        ("trm_max_k2", "gate.high", "0.1"),
        ("trm_max_k2", "gate.unit", "sequence"),
        ("token_tis", "weight.outside", "Mask"),
        ("token_tis", "weight.on", "old"),
        ("token_tis", "weight.cap", True),
        ("trm_max", "objective.on", "bogus"),
        ("none", "aggregate", "bogus"),
    ],
)
def test_a_misspelled_part_is_refused_when_it_is_built(name, path, value):
    # MethodError for users; where tests check types, beartype may be first to refuse
    with pytest.raises((MethodError, Exception), match=rf"{path} = .*must be"):
        override(method(name), {path: value})


def test_changes_of_one_part_are_made_together_whatever_their_order():
    row = METHODS["deepseek_v32"]
    for names in (("place", "estimator"), ("estimator", "place")):
        values = {"place": "reward", "estimator": "k1"}
        changed = override(row, {f"penalty.{n}": values[n] for n in names})
        assert (changed.penalty.place, changed.penalty.estimator) == ("reward", "k1")


def test_overrides_may_be_nested_and_whole_numbers_are_floats():
    changed = override(METHODS["trm_max_avg"], {"gate": {"0": {"high": 1}, "1": {"high": 2}}})
    assert [g.high for g in changed.correction.gates] == [1.0, 2.0]
    assert all(isinstance(g.high, float) for g in changed.correction.gates)
    assert override(METHODS["dispo"], {"weight.1.cap": 7}).correction.weights[1].cap == 7.0
    assert override(METHODS["clip_cov"], {"objective.seed": 3}).objective.seed == 3
