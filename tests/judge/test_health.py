"""What weights, bands and a critic do is judged on enough of it: noise, few tokens and honest drift accuse nobody."""

import math
from functools import partial

import numpy as np
import pytest

from offdrift.judge import Context, decide, diagnose, judge, load_rules, regime
from offdrift.judge.regime import MEANING
from tests.judge import foreign
from tests.judge.histories import altered, both, clean, drift, shape

NEW = {
    "ppl_below_one", "truncation_heavy", "weights_off_mean", "weights_spread", "sequence_products", "critic_blind",
    "band_at_its_limit",
}  # fmt: skip
MASK, CAP = Context(method="decoupled_token_icepop"), Context(method="token_tis")


def told(rows, context=None):
    return [f.rule for f in diagnose(rows, context=context or Context())]


def noisy(name, mean, spread, seed=0, **more):
    """The clean run with a number that scatters about its mean."""
    values = np.random.default_rng(seed).normal(mean, spread, size=60)
    return altered(lambda i, row: {name: float(values[i]), **more})


SURE = {
    "truncation_heavy": (partial(noisy, "weight/cap_frac", 0.36, 0.04), CAP),
    "band_at_its_limit": (partial(noisy, "weight/cap_frac", 0.14, 0.02), MASK),
    "weights_off_mean": (partial(noisy, "weight/mean", 0.4, 0.05), CAP),
    "weights_spread": (partial(noisy, "weight/std", 1.3, 0.1, **{"weight/mean": 1.7}), CAP),
    "critic_blind": (partial(noisy, "critic/vf_explained_var", 0.0, 0.04), Context()),
    "ppl_below_one": (
        partial(noisy, "mismatch/ppl_ratio", 0.99, 0.003, **{"mismatch/k1": -0.002, "mismatch/k3": None}),
        Context(),
    ),
}
UNSURE = {
    "truncation_heavy": (partial(noisy, "weight/cap_frac", 0.30, 0.1), CAP),
    "band_at_its_limit": (partial(noisy, "weight/cap_frac", 0.10, 0.05), MASK),
    "weights_off_mean": (partial(noisy, "weight/mean", 0.5, 0.2), CAP),
    "weights_spread": (partial(noisy, "weight/std", 1.0, 0.4, **{"weight/mean": 1.7}), CAP),
    "critic_blind": (partial(noisy, "critic/vf_explained_var", 0.05, 0.3), Context()),
    "ppl_below_one": (partial(noisy, "mismatch/ppl_ratio", 1.0, 0.02, **{"mismatch/k1": -0.002}), Context()),
}


@pytest.mark.parametrize("name", SURE)
def test_what_lies_beyond_its_scatter_is_told(name):
    rows, context = SURE[name]
    assert name in told(rows(seed=3), context)


@pytest.mark.parametrize("name", UNSURE)
def test_what_scatters_about_its_threshold_is_hardly_ever_told(name):
    rows, context = UNSURE[name]
    found = [name in told(rows(seed=seed)[:40], context) for seed in range(5)]
    assert sum(found) <= 2  # at the threshold itself either answer is right at some step


@pytest.mark.parametrize("name", SURE)
def test_few_steps_or_few_sequences_say_nothing(name):
    rows, context = SURE[name]
    assert name not in told(rows()[:4], context)
    if name != "ppl_below_one":  # its arithmetic is that of the log, whose sequences are counted apart
        few = [{**row, "sequences": 1.0} for row in rows()]
        assert name not in told(few[:25], context)


def test_the_new_rules_are_silent_on_clean_runs():
    for context in (Context(), MASK, CAP, Context(method="seq_tis")):
        assert not NEW & set(told(clean(130), context))


def test_a_perplexity_ratio_below_one_needs_a_negative_kl():
    """Where the trainer ends responses earlier, the mean over sequences is below 1 although no KL is negative."""
    honest = noisy("mismatch/ppl_ratio", 0.98, 0.002, **{"mismatch/k1": 0.004})
    assert "ppl_below_one" not in told(honest)
    below = {"ppl_below": 0.98}
    rules = load_rules()
    assert judge({**below, "kl": 1e-4, "k1": -1e-4}, rules)[0].rule == "ppl_below_one"
    assert judge({**below, "kl": 1e-4, "k1": 1e-4}, rules) == []
    assert "ppl_below_one" in [f.rule for f in judge(below, rules)]


def test_early_ends_make_that_ratio_fall_below_one_without_a_fault():
    """The claim of the test above: two honest policies that differ in where they stop."""
    g = np.random.default_rng(0)
    stop, stop_trained, count = 0.5, 0.6, 20_000
    lengths = g.geometric(stop, size=count)
    log_ratio = (lengths - 1) * math.log((1 - stop_trained) / (1 - stop)) + math.log(stop_trained / stop)
    assert np.exp(-log_ratio / lengths).mean() < 0.99
    assert -log_ratio.sum() / lengths.sum() > 0


@pytest.mark.parametrize(("z", "sequences", "fires"), [(20.0, 200, True), (5.0, 200, False), (20.0, 12, False)])
def test_of_tokens_its_error_is_clustered_by_sequence(z, sequences, fires):
    whole = shape(None, l_mean=0.002, l_z=z)
    whole["whole"]["sequences"] = sequences
    rows = altered(both(ppl_ratio=0.99, k1=-0.002, k3=None, ratio_mean=None, ratio_mean_z=None))
    assert ("ppl_below_one" in told(rows, Context(shapes=whole, overall=rows[8]))) is fires


def test_a_log_whose_records_are_too_low_is_told_and_an_honest_one_is_not(tmp_path):
    """Two thousandths of a nat, too little for the mean ratio to be far from 1, and far beyond its error."""
    play = foreign.Play(seed=0, rounding=0.01)
    honest = foreign.said(foreign.clean(play), tmp_path / "honest")
    assert not NEW & {f["rule"] for f in honest["findings"]}
    whole = honest["shapes"]["whole"]
    assert whole["l_mean"] == pytest.approx(-honest["overall"]["mismatch/k1"], rel=1e-6)
    assert abs(whole["l_z"]) < 6
    assert honest["regime"]["name"] == "TV low, chi2 low"
    low = foreign.said(foreign.plain(play, lambda step, t, c, mu, pi: (mu - 0.002, pi)), tmp_path / "low")
    assert low["findings"][0]["rule"] == "ppl_below_one"
    assert low["shapes"]["whole"]["l_z"] > 6
    assert low["suggestion"]["method"] is None


def test_a_band_that_masks_more_than_a_tenth_is_answered_with_no_other_mask():
    rows = altered({"weight/cap_frac": 0.15, **both(chi2_token=1.2)})
    (finding,) = diagnose(rows, context=MASK)
    assert (finding.rule, finding.method) == ("band_at_its_limit", None)
    asked = {"method": "decoupled_token_icepop", "settings": {}, "row": None, "why": "", "rung": "rejection"}
    assert decide([finding], asked)["method"] is None
    assert "band_at_its_limit" not in told(rows, CAP)
    assert told(altered({"weight/cap_frac": 0.3}), MASK)[0] == "systems_fix"


def test_products_that_explode_are_a_note_unless_they_train():
    rows = altered(both(chi2_seq=1e5))
    (note,) = diagnose(rows)
    assert (note.rule, note.severity) == ("sequence_products", "info")
    weighted = told(rows, Context(method="seq_tis"))
    assert "weight_variance" in weighted
    assert "sequence_products" not in weighted
    assert told(altered(lambda i, row: both(chi2_seq=1e5 if i % 3 == 0 else 0.2))) == []


SAME = {"version_lag/mean": 0.0, "version_lag/max": 0.0}


def test_lag_0_in_every_row_counts_as_the_same_weights():
    """Perplexities 6 % apart are the engines' where the log says so throughout, and only then."""
    apart = {**drift(0.04), **both(ppl_ratio=1.06)}
    (found,) = diagnose(altered({**apart, **SAME}))
    assert (found.rule, found.letter, found.severity) == ("engines_apart", "A", "act")
    by_hand = diagnose(altered(apart), context=Context(same_weights=True))
    assert [f.letter for f in by_hand] == ["A"]
    sometimes = altered(lambda i, row: {**apart, **(SAME if i else {"version_lag/mean": 1.0, "version_lag/max": 1.0})})
    assert "engines_apart" not in told(sometimes)
    assert "engines_apart" not in told(altered({**SAME, **both(ppl_ratio=1.001)}))


@pytest.mark.parametrize(
    ("numbers", "name"),
    [
        ({"full/tv_sampled": 0.02, "full/chi2_token": 0.01, "full/chi2_seq": 0.5}, "TV low, chi2 low"),
        ({"full/tv_sampled": 0.3, "full/chi2_token": 0.1, "full/chi2_seq": 5.0}, "TV high, chi2 low"),
        ({"full/tv_sampled": 0.02, "full/chi2_token": 0.01, "full/chi2_seq": 1e4}, "TV low, chi2 high"),
        ({"full/tv_sampled": 0.3, "full/chi2_token": 0.9, "full/chi2_seq": 1e4}, "TV high, chi2 high"),
        ({"mismatch/k3": 0.06, "mismatch/chi2_token": 0.1}, "TV high, chi2 low"),
        ({"mismatch/k3": 0.01, "mismatch/chi2_token": 0.4}, "TV low, chi2 high"),
    ],
)
def test_the_four_regimes_have_their_names(numbers, name):
    found = regime(numbers)
    assert (found["name"], found["meaning"]) == (name, MEANING[name])
    assert len(MEANING) == 4


def test_a_regime_needs_numbers_and_takes_other_limits():
    assert regime({}) is None
    assert regime({"full/chi2_token": 0.1}) is None
    exact = {"full/chi2_token": 0.1, "full/tv_sampled": 0.2, "divergence/tv_rollout_current_mean": 0.1}
    assert regime(exact)["name"] == "TV low, chi2 low"
    assert regime(exact, limits={**load_rules().limits, "tv_low": 0.05})["name"] == "TV high, chi2 low"


def without_gradient(every, **more):
    return altered(lambda i, row: {"optim/grad_norm": 0.0 if i % every == 0 else 0.3, **more})


def test_steps_without_a_gradient_are_told_where_they_are_taken():
    rule = "optim_moves_without_gradient"
    assert rule in told(without_gradient(every=10))
    assert rule not in told(without_gradient(every=21)), "one of the last twenty comes by chance"
    assert rule not in told(without_gradient(every=2, **{"optim/step_skipped": 1.0}))
    assert rule not in told(without_gradient(every=2, **{"optim/lr_scale": 0.0}))
    assert rule in told(without_gradient(every=2, **{"optim/step_skipped": 0.0, "optim/lr_scale": 0.5}))
    theirs = [{"actor/grad_norm": float(i % 2), "actor/ppo_kl": 0.001, "step": float(i)} for i in range(40)]
    assert rule in told(theirs), "verl's name"
    assert rule in told([{"grad_norm": float(i % 2), "reward": 0.5, "step": float(i)} for i in range(40)]), "TRL's name"
    small = altered({"optim/grad_norm": 1e-9})
    assert rule not in told(small), "small is not 0"
