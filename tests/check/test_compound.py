"""A drift of several settings, split: the sums that have to hold, the single factors it agrees with, and refusals."""

import pytest
import torch

from offdrift.check.check import check
from offdrift.check.compound import attributed, check_together, combined, subsets
from offdrift.check.factors import chosen
from offdrift.check.paired_view import compound_lines
from offdrift.errors import BadValueError, NotOfferedError
from tests.check.benches import BFLOAT16, FLOAT32, NULL, ROUNDED, bench_of, run

NAMES = "rollout_dtype,train_dtype,quantization"


@pytest.fixture(scope="module")
def bench():
    with bench_of(count=8) as made:
        yield made


@pytest.fixture(scope="module")
def found(bench):
    return check(bench, FLOAT32, FLOAT32, noise=False, together=combined(chosen(NAMES)))


def test_shares_and_effects_add_up_to_the_whole_change(found):
    parts = found["compound"]
    total = parts["total"]["change"]
    assert parts["exact"] is True
    assert parts["before"] == pytest.approx(found["baseline"]["kl_mean"], abs=1e-12)
    assert total == pytest.approx(parts["after"] - parts["before"], rel=1e-9)
    assert len(parts["effects"]) == 7
    for rows in (parts["shares"], parts["effects"]):
        assert sum(row["change"] for row in rows) == pytest.approx(total, rel=1e-9)
        assert all(row["low"] <= row["change"] <= row["high"] for row in rows)


@pytest.mark.parametrize("name", NAMES.split(","))
def test_an_effect_alone_is_that_of_the_factor(bench, found, name):
    row = run(name, bench, NULL)
    alone = next(e for e in found["compound"]["effects"] if e["factors"] == [name])
    assert alone["change"] == pytest.approx(row.kl_mean - row.baseline_kl_mean, rel=1e-6)
    assert found["compound"]["changed"][name] == row.changed


def test_two_engines_that_round_alike_interact(found):
    """Both in bfloat16 lie nearer to each other than one in bfloat16 and one in float32."""
    pair = ["rollout_dtype", "train_dtype"]
    both = next(e for e in found["compound"]["effects"] if e["factors"] == pair)
    assert both["high"] < 0


def test_effects_that_only_add_have_no_interaction_and_a_planted_one_is_shared_evenly(bench):
    drawn = bench.rollouts(FLOAT32)
    noise = torch.rand(len(drawn.tokens), generator=torch.Generator().manual_seed(0)).double()
    sizes = {"a": 1.0, "b": 2.0, "c": 4.0}
    runs = {s: noise * sum(sizes[name] for name in s) + (6 * noise if {"a", "c"} <= s else 0) for s in subsets("abc")}
    split, mean = attributed(runs, drawn), float(noise.mean())
    effects = {"".join(row["factors"]): row["change"] / mean for row in split["effects"]}
    assert effects == pytest.approx({"a": 1, "b": 2, "c": 4, "ab": 0, "ac": 6, "bc": 0, "abc": 0}, abs=1e-9)
    shares = {row["factor"]: row["change"] / mean for row in split["shares"]}
    assert shares == pytest.approx({"a": 4, "b": 2, "c": 7})


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("rollout_dtype", "2 to 4"),
        ("rollout_dtype,train_dtype,quantization,train_lm_head,train_attention", "2 to 4"),
        ("rollout_dtype,float16", "float16"),
        ("rollout_dtype,no_such", "no_such"),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(names, words):
    with pytest.raises(BadValueError, match=words):
        combined(chosen(names))


def test_settings_that_overwrite_each_other_or_that_the_pair_lacks_are_refused_before_drawing(bench):
    with pytest.raises(BadValueError, match="train_dtype and train_lm_head"):
        check_together(ROUNDED, bench, chosen("train_dtype,train_lm_head"))
    with pytest.raises(NotOfferedError, match="kv_cache_dtype"):
        check_together(ROUNDED, bench, chosen("kv_cache_dtype,train_dtype"))
    check_together(ROUNDED, bench, chosen("rollout_dtype,train_lm_head"))


def test_the_lines_name_shares_and_interactions(found):
    lines = dict(compound_lines(found))
    first, last = "share of rollout dtype", "interaction of rollout dtype, train dtype"
    assert {"all", first, "quantization alone", last} < set(lines)
    assert compound_lines({}) == []


def test_an_engine_that_fails_costs_only_this_entry(bench):
    def broken(spec, model):
        return "an option that no engine has", spec.with_(no_such_option=1)

    rows = combined(chosen("rollout_dtype,train_dtype"))
    rows[0] = type(rows[0])(**{**vars(rows[0]), "change": broken})
    told = check(bench, BFLOAT16, FLOAT32, noise=False, together=rows)
    assert "no_such_option" in told["compound"]["why"]
    assert told["verdict"]["level"] == "ok"
    assert compound_lines(told)[0][0] == "not measured"
