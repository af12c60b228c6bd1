"""Axes are read off the parts; what a method really does is tried on a small batch, and has to agree."""

import json
from dataclasses import dataclass, replace
from typing import get_args

import pytest
import torch

from offdrift.aggregate import AggregateName
from offdrift.correction import Correction, Gate, Weight
from offdrift.correction.gate import GateUnit
from offdrift.divergence.evidence import Distributions
from offdrift.errors import MethodError
from offdrift.logprobs import LogProbs
from offdrift.methods import METHODS, Method, override, probe
from offdrift.methods import describe as axes
from offdrift.methods.describe import CHOICES, catalog
from offdrift.methods.method import PLAIN, UNSAID, Bias, Status
from offdrift.methods.table import FAMILIES, SYSTEMS
from offdrift.objectives import Clipped, Reinforce, TokenLoss
from offdrift.ratios import RatioName, Unit
from offdrift.show.method_table import chosen, find, select

ALL = pytest.mark.parametrize("name", METHODS)

# What a method shares between tokens without that the log-probs of one change the loss of another here.
UNSEEN = {
    "m2po": "the least widths bind on this batch",
    "bapo": "the search ends at the same bounds on this batch",
    "ac_mis_po": "the bounds move between steps",
    "r2vpo": "the price of variance moves between steps",
    "r2vpo_clip": "the range of widths binds on this batch",
    "quatro": "the multiplier is that of rewards",
    "oapl": "the value is that of rewards",
    "vcpo": "the learning rate is scaled, not the loss",
    "echo2": "the gate reads versions",
    "roll_flash": "the gate reads versions",
}
# Losses that are not the integral of their gradient although the ratio is differentiated.
NOT_AN_INTEGRAL = {
    "a3po": "the anchor holds the current policy, stopped",
    "aspo": "the flip divides by the stopped ratio",
    "st_ppo_renorm": "the mean that ratios are divided by is stopped",
    "fipo": "the weight of what follows holds the current policy, stopped",
    "real": "every answer carries its prompt's loss, and the gradient is its own part of it",
    "online_dpo": "each answer's loss is half a pair's, and the gradient is its own part of the pair's",
}


# -- what is tried ----------------------------------------------------------------------------


@ALL
def test_only_tokens_of_its_units_influence_a_token(name):
    """Move one token's log-probs: whose loss changes?"""
    row, given = METHODS[name], probe.batch()
    before = probe.token_losses(row, given)
    sequence = given.logprobs.segments.seq_ids
    group = given.logprobs.segments.group_ids[sequence]
    own = elsewhere = siblings = earlier = 0
    for token in (0, 2, 4, 8, 13, 20, 23, 30, 40):
        for by in (14.0, 2.0, 0.2, -0.2, -5.0):
            changed = (probe.token_losses(row, probe.moved(token, by)) - before).abs() > 1e-9
            changed[token] = False
            mine = sequence == sequence[token]
            own += int((changed & mine).sum())
            earlier += int((changed & mine)[:token].sum())
            siblings += int((changed & ~mine & (group == group[token])).sum())
            elsewhere += int((changed & (group != group[token])).sum())
    units = axes.units(row)
    if name in UNSEEN:
        assert own + siblings + elsewhere == 0 or units > {"sequence"}, "it is seen: take it off the list"
        return
    assert (own > 0) == bool(units - {"token"}), (units, own)
    assert (siblings > 0) == bool(units & {"group", "batch"}), (units, siblings)
    assert (elsewhere > 0) == ("batch" in units), (units, elsewhere)
    if units <= {"token", "prefix", "prefix_min"}:
        assert earlier == 0, "a prefix ends at its token"


def test_what_is_not_seen_is_no_excuse_for_many():
    assert set(UNSEEN) | set(NOT_AN_INTEGRAL) <= set(METHODS)
    assert len(METHODS) - len(UNSEEN) > 90


@ALL
def test_it_reads_the_policies_of_its_ratios(name):
    row, given = METHODS[name], probe.batch()
    lp, before = given.logprobs, probe.token_losses(row, given)

    def reads(field: str) -> bool:
        x, draw = getattr(lp, field), torch.Generator().manual_seed(1)
        noise = torch.rand(len(x), generator=draw, dtype=x.dtype)
        changed = (replace(lp, **{field: x + s * noise}) for s in (0.3, -0.3, 15.0, -15.0))
        return any(not torch.equal(losses(c), before) for c in changed)

    def losses(logprobs: LogProbs) -> torch.Tensor:
        """Of a batch whose distributions are those of its log-probs."""
        both = Distributions.of_two(logprobs.old, logprobs.current)
        batch_info = replace(given.batch_info, distributions=both)
        return probe.token_losses(row, replace(given, logprobs=logprobs, batch_info=batch_info))

    ratios = axes.ratios(row)
    if name == "clip_cov":
        assert reads("logp_rollout"), "its random choice is keyed by all log-probs of a token"
    else:
        assert reads("logp_rollout") == bool(ratios & {"full", "mismatch"})
    assert reads("logp_old") == row.needs_old
    if row.anchor is None:
        assert row.needs_old or not ratios & {"mismatch", "staleness"}


@ALL
def test_the_gradient_goes_where_it_is_said_to_go(name):
    """Where nothing is stopped, the gradient is the derivative of the loss; else it need not be."""
    row, given = METHODS[name], probe.batch()
    lp, draw = given.logprobs, torch.Generator().manual_seed(2)
    along = torch.randn(len(lp.current), generator=draw, dtype=torch.float64)

    def loss(logp):
        there = replace(lp, logp=logp)
        batch_info = probe.differentiable(given.batch_info, there)
        return probe.token_losses(row, replace(given, logprobs=there, batch_info=batch_info)).sum()

    logp = lp.current.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(logp), logp)
    step = 1e-6
    slope = (loss(lp.current + step * along) - loss(lp.current - step * along)) / (2 * step)
    same = torch.allclose(slope, gradient @ along, rtol=1e-5, atol=1e-6)
    said = axes.stop_gradient(row)
    if name in NOT_AN_INTEGRAL:
        assert not same, "it is one: take it off the list"
    elif said in ("no", "n/a"):
        assert same
    elif any(w.on != "mismatch" for w in row.correction.weights):
        assert not same
    if said == "yes" and row.objective.on is None and not row.correction.weights:
        assert set(axes.ratios(row)) == {g.on for g in row.correction.gates}


@ALL
def test_sign_is_that_of_the_whole_loss(name):
    """Symmetric parts make a symmetric loss."""
    row, given = METHODS[name], probe.batch()
    if axes.sign(row) == axes.BY_SIGN:
        return
    losses = [probe.token_losses(row, replace(given, advantages=s * given.advantages)) for s in (1, 0, -1)]
    up, flat, down = losses
    torch.testing.assert_close(up - flat, flat - down, rtol=1e-9, atol=1e-12)


def test_signs_of_methods_whose_papers_say_so():
    signs = {name: axes.sign(row) for name, row in METHODS.items()}
    by_sign = "ppo_clip dual_clip aspo gmpo gspo dispo sapo vespo dppo_tv dppo_kl m2po opsm"
    alike = "none token_tis seq_tis trm_max token_is cispo gpg full_is minpro logit_fusion oapl"
    assert {signs[n] for n in by_sign.split()} == {"by sign of the advantage"}
    assert {signs[n] for n in alike.split()} == {"symmetric"}
    assert {signs[n] for n in ("topr", "dispo_paper")} == {"by outcome of the answer"}


# -- what is read -----------------------------------------------------------------------------


def test_units_of_gates_of_ratios_are_those_of_ratios():
    def gated(statistic: str, unit: str) -> Method:
        gate = Gate(statistic=statistic, on="full", unit=unit, high=2.0)  # type: ignore[arg-type]
        return Method(objective=Reinforce(), correction=Correction((gate,)))

    assert axes.units(gated("ratio", "seq_mean")) == {"geometric"}
    assert axes.units(gated("ratio", "seq_sum")) == {"sequence"}
    assert axes.units(gated("k3", "seq_mean")) == {"seq_mean"}
    assert axes.units(gated("k3", "seq_max")) == {"worst"}
    assert axes.units(Method(objective=Reinforce())) == {"token"}


def test_evidence_is_the_most_that_is_needed():
    grades = {name: axes.evidence(row) for name, row in METHODS.items()}
    assert grades["none"] == grades["gpg"] == {"none"}
    assert grades["trm_max"] == {"exact"}
    assert grades["trm_max_k2"] == {"sampled"}
    assert grades["echo2"] == grades["a3po"] == {"sampled", "versions"}
    versions = Gate(statistic="version_lag", on="full", unit="seq_max", high=2.0)
    alone = Method(objective=Reinforce(), correction=Correction((versions,)))
    assert axes.evidence(alone) == {"versions"}
    assert axes.ratios(alone) == frozenset()
    assert axes.stop_gradient(alone) == "n/a"
    exact = {name for name, row in METHODS.items() if row.needs_divergences}
    assert exact == {name for name, found in grades.items() if "exact" in found}
    assert len(exact) >= 4


def test_stopping_of_methods_whose_papers_say_so():
    stopped = {name: axes.stop_gradient(row) for name, row in METHODS.items()}
    assert {stopped[n] for n in ("cispo", "token_tis", "topr", "dppo_tv", "vespo")} == {"yes"}
    assert stopped["gspo_token"] == "unit"
    assert {stopped[n] for n in ("ppo_clip", "gspo", "gmpo", "trm_max", "m2po", "sapo")} == {"no"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("none", "none"),
        ("token_tis", "token weight on full, truncated at 2"),
        ("seq_mis_band", "sequence weight on full, masked outside [0.333333, 3]"),
        ("cispo", "token weight on staleness, clipped to [0.8, 1.2]"),
        ("normalized_tis", "sequence weight on full, truncated at 2, divided by its mean"),
        ("topr", "sequence weight on full, truncated at 1 (incorrect answers)"),
        ("dispo_paper", "token weight on staleness, clipped to [0.8, 11] (correct answers); token weight on staleness, truncated at 101 (incorrect answers)"),
        ("vespo", "sequence weight on full (variational)"),
        ("gspo", "geometric ratio on staleness in the objective"),
        ("m2po", "token ratio on staleness in the objective"),
    ],
)  # fmt: skip
def test_importance_sampling_in_words(name, words):
    assert axes.is_treatment(METHODS[name]) == words


def test_limits_that_no_row_has_are_worded_too():
    low = Weight(on="full", floor=0.5, outside="mask")
    assert (
        axes.is_treatment(Method(objective=Reinforce(), correction=Correction(weights=(low,))))
        == "token weight on full, masked below 0.5"
    )
    raised = replace(low, outside="truncate")
    assert axes.is_treatment(Method(objective=Reinforce(), correction=Correction(weights=(raised,)))).endswith(
        "at least 0.5"
    )


@dataclass(frozen=True, kw_only=True)
class Bare:
    """An objective that says as little as the protocol asks for."""

    on = "staleness"
    formula = "L = -A u"

    def __call__(self, logprobs, advantages, batch_info=None) -> TokenLoss:
        return TokenLoss(-advantages * (logprobs.current - logprobs.old).exp())


def test_an_objective_that_says_nothing_gets_the_documented_defaults():
    row = Method(objective=Bare())
    assert axes.units(row) == {"token"}
    assert axes.ratios(row) == {"staleness"}
    assert axes.stop_gradient(row) == "no"
    assert axes.sign(row) == "symmetric"
    assert axes.is_treatment(row) == "token ratio on staleness in the objective"


# -- words ------------------------------------------------------------------------------------


def test_every_word_is_explained():
    assert set(axes.BIASES) == set(get_args(Bias))
    assert set(axes.STATUS) == set(get_args(Status))
    assert set(axes.AGGREGATES) == set(get_args(AggregateName))
    assert set(get_args(Unit)) <= set(axes.UNITS)
    assert set(get_args(GateUnit)) - {"seq_max"} <= set(axes.UNITS)
    rows = [row for row in catalog().values() if row["kind"] == "method"]
    assert len(rows) == len(METHODS)
    for row in rows:
        assert set(row["unit"]) <= set(axes.UNITS), row["name"]
        assert set(row["ratio"]) <= set(get_args(RatioName))
        assert set(row["evidence"]) <= set(axes.EVIDENCE)
        assert row["sign"] in axes.SIGNS
        assert row["stop_gradient"] in axes.STOPPED


def test_parts_whose_units_are_given_here_exist():
    parts = {type(part).__name__ for row in METHODS.values() for part in row.parts}
    assert set(UNSAID) <= parts


@ALL
def test_every_row_says_what_people_ask(name):
    row = METHODS[name]
    for said in ("summary", "mechanism", "target", "fails", "reference"):
        text = getattr(row, said)
        assert text == text.strip() != "", said
        assert "\n" not in text
    assert not row.summary.endswith(".")


def test_every_row_is_in_one_family():
    names = [name for rows in FAMILIES.values() for name in rows]
    assert len(names) == len(set(names))
    assert set(names) == set(METHODS)
    assert axes.facts("trm_max", METHODS["trm_max"])["family"] == "trust region masking"


# -- numbers ----------------------------------------------------------------------------------


@ALL
def test_every_path_that_is_shown_changes_its_value(name):
    row = METHODS[name]
    paths = axes.settings(row)
    assert set(PLAIN) <= set(paths)
    for path, value in paths.items():
        given = tuple(value) if isinstance(value, list) else value
        assert override(row, {path: given}) == row, path


def test_paths_number_parts_only_where_there_are_several():
    assert "gate.0.high" in axes.settings(METHODS["trm_max_avg"])
    assert "weight.1.cap" in axes.settings(METHODS["dispo"])
    assert axes.settings(METHODS["trm_max"])["gate.high"] == 0.05
    assert axes.settings(METHODS["vcpo"])["lr_scale.power"] == 0.5
    assert axes.settings(METHODS["deepseek_v32"])["penalty.estimator"] == "k3_corrected"


def test_facts_are_plain_data():
    rows = catalog()
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    parts = {part["path"]: part for part in rows["vcpo"]["parts"]}
    assert parts["lr_scale"]["values"]["weight"]["cap"] == 2.0
    assert parts["weight"]["type"] == "Weight"
    assert [p["role"] for p in rows["trm_max_avg"]["parts"]] == ["objective", "gate", "gate"]
    unbounded = Method(objective=Clipped(), correction=Correction(weights=(Weight(on="mismatch", cap=float("inf")),)))
    assert axes.settings(unbounded)["weight.cap"] == "inf"


# -- choosing ---------------------------------------------------------------------------------


def test_filters_add_up():
    rows = catalog()
    exact = select(rows, evidence="exact")
    assert set(exact) == {n for n, row in METHODS.items() if row.needs_divergences}
    both = select(rows, evidence="exact", unit="seq_mean")
    assert set(both) == {"trm_avg", "trm_max_avg"}
    assert set(select(rows, unit="seq_max")) == set(select(rows, unit="worst")) >= {"trm_max"}
    assert set(select(rows, ratio="none")) == {"none", "gpg", "online_dpo", "asympo", "spo_scaled"}
    assert set(select(rows, kind="system")) == set(SYSTEMS)
    assert set(select(rows, kind="presets")) == set(FAMILIES["presets"])
    assert "trm_max" in select(rows, reference="2512.23075")
    assert "keep_routing" in select(rows, reference="deepseek")
    assert len(select(rows)) == len(METHODS) + len(SYSTEMS)


def test_every_choice_finds_exactly_the_rows_that_have_it():
    rows, found = catalog(), 0
    for axis in set(CHOICES) - {"ratio", "kind", "situation"}:
        for choice in CHOICES[axis]:
            have = {n: r[axis] if isinstance(r[axis], list) else [r[axis]] for n, r in rows.items()}
            having = {n for n, values in have.items() if choice in values}
            if having:
                assert set(select(rows, **{axis: choice})) == having, choice
                found += 1
    assert found > 20
    for situation in CHOICES["situation"]:
        assert len(select(rows, situation=situation)) >= 3


@pytest.mark.parametrize(
    ("axis", "value", "meant"),
    [
        ("sign", "by-sign", "by sign of the advantage"),
        ("sign", "SYMMETRIC", "symmetric"),
        ("bias", "none inside", "none inside limits"),
        ("bias", "none", "none"),
        ("bias", "o(drift)", "O(drift)"),
        ("unit", "turn", "turn"),
        ("unit", "Seq_Max", "worst"),
        ("kind", "trust-region-masking", "trust region masking"),
    ],
)
def test_values_are_taken_as_people_type_them(axis, value, meant):
    assert chosen(axis, value) == meant


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"unit": "tokn"}, "--unit 'tokn' is not one of: token; prefix;"),
        ({"unit": "pre"}, "--unit 'pre' is not one of"),
        ({"stop_gradient": "maybe"}, "--stop-gradient 'maybe' is not one of: yes; unit; no; n/a"),
        ({"color": "red"}, "no filter 'color'; filters are unit, ratio"),
        ({"unit": "prefix", "ratio": "mismatch"}, "drop --ratio for 3 (prefix_is, ctpo, ctpo_paper)"),
        ({"reference": "nowhere"}, f"drop --reference for {len(METHODS) + len(SYSTEMS)}"),
        ({"unit": "prefix", "ratio": "mismatch", "kind": "system"}, "drop more than one: --unit alone has 3"),
    ],
)  # fmt: skip
def test_a_filter_that_finds_nothing_says_what_to_do(wanted, said):
    with pytest.raises(MethodError) as error:
        select(catalog(), **wanted)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("given", "name"),
    [("trm_max", "trm_max"), ("GSPO-token", "gspo_token"), ("R²VPO", "r2vpo"), ("R3", "r3"), ("Keep Routing", "keep_routing")],
)  # fmt: skip
def test_names_are_taken_as_people_type_them(given, name):
    assert find(given)["name"] == name


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("trm_mx", "no method 'trm_mx'; did you mean trm_max or"),
        ("LlamaRL", "it is part of async_topologies"),
        ("qqqq", f"no method 'qqqq'; `offdrift methods` lists all {len(METHODS) + len(SYSTEMS)}"),
    ],
)
def test_an_unknown_name_is_answered_with_names(given, said):
    with pytest.raises(MethodError) as error:
        find(given)
    assert said in str(error.value)
