"""What an audit concludes: the suggestion by the survey's ladder, the run's context, and the open questions."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from offdrift.audit.conclude import conclude, run_context, suggest
from offdrift.audit.counterfactual import Counterfactual
from offdrift.audit.coverage import LOG, QUESTIONS, SAME_WEIGHTS, coverage, metrics, questions
from offdrift.audit.partial import AuditPartial, Job, Unread
from offdrift.audit.stream import audit as stream
from offdrift.audit.tally import Tally
from offdrift.judge import escalate, load_rules
from offdrift.methods import METHODS, override
from offdrift.records.batch import Logged
from offdrift.records.readers import detect, pieces
from offdrift.records.recorder import write_log
from offdrift.stats import DriftStats, summarize
from tests.audit.logs import log_of, make_log

NAN = float("nan")


def row(name: str, kept: float, ess: float) -> dict[str, Any]:
    return {"name": name, "kept_tokens": kept, "ess_frac": ess, "why_not": None, "settings": {"gate.low": 0.99, "gate.high": 1.01}}  # fmt: skip


def rows(kept: float, ess: float) -> list[dict[str, Any]]:
    names = ("decoupled_geo_rs", "decoupled_geo_rs_token_tis", "bypass_pg_geo_rs", "bypass_pg_geo_rs_token_tis")
    return [row(f"{name}(0.99_1.01)", kept, ess) for name in names]


def overall(on: str = "mismatch", **said: float | None) -> dict[str, float | None]:
    healthy = {"pearson": 0.995, "ppl_ratio": 1.001, "k1": 0.01, "chi2_token": 0.02}
    return {f"{on}/{k}": v for k, v in {**healthy, **said}.items()}


@pytest.mark.parametrize(
    ("said", "kept", "ess", "method", "rung"),
    [
        ({}, 1.0, 1.0, "disabled", "none"),
        ({"k1": 0.03, "pearson": 0.97}, 0.5, 0.5, "disabled", "none"),  # mild: correction is optional
        ({"pearson": 0.93}, 1.0, 1.0, None, "systems fix"),
        ({"chi2_token": 0.5}, 0.98, 0.9, "decoupled_geo_rs", "rejection"),
        ({"k1": -0.08}, 0.98, 0.9, "decoupled_geo_rs", "rejection"),
        ({"k1": 0.09, "k3": 0.004}, 0.98, 0.9, "disabled", "none"),  # k1 is noise where the mean ratio is 1
        ({"k1": 0.09, "k3": 0.004, "ratio_mean_z": 30.0}, 0.98, 0.9, "decoupled_geo_rs", "rejection"),
        ({"chi2_token": 2.5}, 0.95, 0.9, "decoupled_geo_rs_token_tis", "rejection and token TIS"),
        ({"chi2_token": 0.5}, 0.85, 0.8, "decoupled_geo_rs_token_tis", "rejection and token TIS"),
        ({"chi2_token": 0.5}, 0.70, 0.7, None, "systems fix"),
        ({"chi2_token": 2.5}, 0.85, 0.25 * 0.85, None, "systems fix"),  # ESS is a share of what is kept
        ({"chi2_token": 2.5}, 0.85, 0.31 * 0.85, "decoupled_geo_rs_token_tis", "rejection and token TIS"),
        ({"chi2_token": 4.5}, 0.95, 0.9, None, "systems fix"),
    ],
)  # fmt: skip
def test_suggestion(said: dict, kept: float, ess: float, method: str | None, rung: str):
    for on, prefix in (("mismatch", "decoupled"), ("full", "bypass_pg")):
        found = suggest(rows(kept, ess), overall(on, **said))
        expected = method if on == "mismatch" or method is None else method.replace("decoupled", prefix)
        assert found["method"] == {"disabled": "disabled" if on == "mismatch" else "none"}.get(expected or "", expected)
        assert found["rung"] == rung
        if found["method"] is None:
            assert "repair the system" in found["why"]
            assert found["settings"] == {}
        else:
            override(METHODS[found["method"]], found["settings"])  # can be applied
        if rung.startswith("rejection"):
            assert found["settings"] == {"gate.low": 0.99, "gate.high": 1.01}
            assert found["row"] == found["method"] + "(0.99_1.01)"


def test_mild_and_clean_are_told_apart():
    assert "no meaningful mismatch" in suggest([], overall())["why"]
    # A KL just below 0.02 nat is clean, and makes the ratio of perplexities e^KL.
    assert "no meaningful mismatch" in suggest([], overall(k1=0.019, ppl_ratio=math.exp(0.019)))["why"]
    for said in ({"pearson": 0.98}, {"k1": 0.03}, {"ppl_ratio": 1.021}, {"ppl_ratio": 0.979}):
        assert "optional" in suggest([], overall(**said))["why"]


@pytest.mark.parametrize("nothing", [{}, {"mismatch/chi2_token": None}, {"full/chi2_token": NAN}])
def test_without_numbers_nothing_is_suggested(nothing: dict):
    found = suggest(rows(1.0, 1.0), nothing)
    assert found["method"] is found["rung"] is None
    assert "log the rollout engine's log-probs" in found["why"]
    assert suggest([], overall(chi2_token=0.5))["rung"] is None
    untried = [{**r, "why_not": "the log lacks it"} for r in rows(1.0, 1.0)]
    assert "was not tried" in suggest(untried, overall(chi2_token=0.5))["why"]


def drifting(scale: float, far: float = 0.0, hit: int = 0) -> Logged:
    """400 responses of 50 tokens: pi_old = mu e^d, d ~ N(0, scale), and d = far at the first token of
    `hit` responses, so that token chi2 is hit (e^(2 far) - 1) / 20,000 where scale is 0.
    """
    draw, n, length = torch.Generator().manual_seed(0), 400, 50
    mu = -5 + 4 * torch.rand(n * length, generator=draw, dtype=torch.float64)
    mu[::length] = -5
    d = scale * torch.randn(n * length, generator=draw, dtype=torch.float64)
    d[: hit * length : length] = far
    return log_of([length] * n, logp_rollout=mu, logp_old=(mu + d).clamp(max=0))


@pytest.mark.parametrize(
    ("log", "method"),
    [
        (drifting(0.01), "disabled"),
        (drifting(0.0, 2.2, 60), "disabled"),  # chi2 0.24
        (drifting(0.0, 4.0, 4), "decoupled_geo_rs"),  # chi2 0.60, 1 % of the responses
        (drifting(0.0, 4.6, 5), "decoupled_geo_rs_token_tis"),  # chi2 2.5
        (drifting(0.0, 2.5, 60), "decoupled_geo_rs_token_tis"),  # chi2 0.44, 15 % of the responses
        (drifting(0.0, 4.6, 10), None),  # chi2 4.9
        (drifting(0.6), None),  # nearly all responses are outside the band
    ],
)
def test_suggestions_on_logs_end_to_end(log: Logged, method: str | None):
    for current in (False, True):  # the same drift as bypass mode would log it
        log = replace(log, logp=log.logp_old, logp_old=None) if current else log
        metrics = summarize(DriftStats.of(log.logprobs()))
        found = suggest(Counterfactual.of(log).table(), metrics)
        renamed = None if method is None else method.replace("decoupled", "bypass_pg").replace("disabled", "none")
        assert found["method"] == (renamed if current else method), found


def aged(kl: float, lag: int | None, *, tail: float = 0.0) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics and table of 400 responses of 50 tokens whose policy moved on by `kl` nats per token.

    log pi_old - log mu ~ N(-kl, 2 kl), so E[ratio] = 1 and chi2 = e^(2 kl) - 1; a share `tail` of the
    tokens lies 3 nats below.
    """
    draw, n, length = torch.Generator().manual_seed(0), 400, 50
    mu = -1 - 4 * torch.rand(n * length, generator=draw, dtype=torch.float64)
    d = (2 * kl) ** 0.5 * torch.randn(n * length, generator=draw, dtype=torch.float64) - kl
    d -= 3 * (torch.rand(n * length, generator=draw) < tail)
    log = log_of(
        [length] * n,
        logp_rollout=mu,
        logp_old=(mu + d).clamp(max=0),
        rollout_version=None if lag is None else torch.ones(n * length, dtype=torch.int64),
        version=None if lag is None else torch.full((n,), 1 + lag),
    )
    metrics = Tally.of(log, file="log").as_dict()["overall"]
    return metrics, Counterfactual.of(log).table()


@pytest.mark.parametrize(
    ("kl", "lag", "tail", "rung"),
    [
        (0.06, 4, 0.0, "token TIS"),  # nothing is broken: the weights are four updates old
        (0.2, 4, 0.0, "token TIS"),  # chi2 0.49, ESS 0.67
        (0.06, 0, 0.0, "systems fix"),  # the same weights: the engines disagree
        (0.4, 4, 0.0, "systems fix"),  # ESS 0.45: too noisy to reweight
        (0.06, 4, 0.35, "systems fix"),  # a heavy tail
    ],
)
def test_drift_of_age_is_reweighted(kl: float, lag: int, tail: float, rung: str):
    metrics, table = aged(kl, lag, tail=tail)
    assert metrics["version_lag/mean"] == lag
    if not tail:  # as constructed: E[w]^2 / E[w^2] = 1 / (1 + chi2), up to the draw and clamping
        assert metrics["mismatch/ess_frac"] == pytest.approx(math.exp(-2 * kl), abs=0.05)
    by_name = {row["name"]: row for row in table}
    assert by_name["decoupled_geo_rs(0.99_1.01)"]["kept_tokens"] < 0.75  # the band is no measure
    assert by_name["decoupled_k3_rs"]["kept_tokens"] < 0.75
    found = suggest(table, metrics)
    assert found["rung"] == rung, found
    if rung == "token TIS":
        assert found["method"] == found["row"] == "decoupled_token_is"
        assert f"{by_name['decoupled_token_is']['ess_frac']:.1%}" in found["why"]
        assert "4 updates old" in found["why"]
    else:
        assert "repair the system" in found["why"]


def test_drift_of_unknown_age_is_reweighted_unless_the_policies_do_not_correlate():
    metrics, table = aged(0.06, None)
    assert "version_lag/mean" not in metrics
    metrics["mismatch/pearson"] = 0.968  # as of a peaked policy, whose likely tokens move little
    found = suggest(table, metrics)
    assert found["method"] == "decoupled_token_is"
    assert "if they do, repair the engines" in found["why"]
    assert suggest(table, metrics | {"mismatch/pearson": 0.94})["rung"] == "systems fix"
    full = {k.replace("mismatch", "full"): v for k, v in metrics.items()}
    names = {"decoupled_geo_rs(0.99_1.01)": "bypass_pg_geo_rs(0.99_1.01)", "decoupled_geo_rs_token_tis(0.99_1.01)": "bypass_pg_geo_rs_token_tis(0.99_1.01)", "decoupled_token_icepop": "bypass_pg_token_icepop", "decoupled_token_is": "token_tis"}  # fmt: skip
    renamed = [{**row, "name": names[row["name"]]} for row in table if row["name"] in names]
    assert len(renamed) == 4
    assert suggest(renamed, full)["method"] == "token_tis"
    assert "token_tis" in METHODS


def test_a_low_correlation_of_probabilities_near_one_is_no_reason_by_itself():
    """Probabilities within [0.9989, 0.9999] that differ by 5e-4 correlate badly and are equal."""
    near = overall(pearson=0.5, k1=1e-5, chi2_token=1e-6)
    assert suggest([], near | {"mismatch/prob_diff_max": 5e-4})["rung"] == "none"
    for more in ({}, {"mismatch/prob_diff_max": 0.2}, {"mismatch/prob_diff_max": 5e-4, "mismatch/k1": 0.03}):
        assert suggest(rows(1.0, 1.0), near | more)["rung"] == "systems fix"


def test_thresholds_of_ones_own_reach_the_suggestion():
    """The same numbers, judged by limits as `--rules FILE` gives them."""
    limits, drifted = load_rules().limits, overall(chi2_token=2.5)
    assert suggest(rows(0.95, 0.9), drifted)["rung"] == "rejection and token TIS"
    for name, value, rung in (
        ("chi2_toxic", 3.0, "rejection"),
        ("chi2_last", 2.4, "systems fix"),
        ("rs_hard", 0.04, "systems fix"),
        ("ess_wasted", 0.96, "systems fix"),
        ("pearson_broken", 0.999, "systems fix"),
        ("chi2_moderate", 2.6, "none"),
    ):
        changed = suggest(rows(0.95, 0.9), drifted, limits={**limits, name: value})
        assert changed["rung"] == rung, name
    missing = drifted | {"batch/unscored_frac": 0.4}
    assert suggest(rows(0.95, 0.9), missing, limits={**limits, "data_most": 0.3})["rung"] is None


def test_the_ladder_counts_a_low_correlation_as_the_rules_do():
    low = {"pearson": 0.4, "prob_diff_max": 0.002}
    assert escalate(0.1, 0.0, **low, kl=0.019).action == "rejection"
    assert escalate(0.1, 0.0, **low, kl=0.021).action == "systems fix"
    assert escalate(0.1, 0.0, pearson=0.4, prob_diff_max=NAN).action == "systems fix"
    assert escalate(0.1, 0.0, pearson=NAN, ess_after_rs=NAN, kl=9.0).action == "rejection"


RUN = {
    "recipe": {"arms": {"plain": {"method": "none"}, "masked": {"method": "trm_max"}}, "rollout": {"temperature": 0.7}},
    "model": {"experts": True},
}


def test_an_arm_of_ours_says_how_it_trains(tmp_path):
    log = tmp_path / "arms" / "masked" / "log"
    log.mkdir(parents=True)
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    found = run_context(str(log), "offdrift")
    assert (found.method, found.temperature, found.mixture_of_experts) == ("trm_max", 0.7, True)
    assert run_context(str(log), "offdrift", method="gspo").method == "gspo"
    assert found.filtered is False
    filtered = {**RUN, "recipe": {**RUN["recipe"], "rollout": {"top_p": 0.9}}}
    (tmp_path / "run.json").write_text(json.dumps(filtered))
    assert run_context(str(log), "offdrift").filtered is True


def test_a_run_of_several_arms_has_no_one_method(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    assert run_context(str(tmp_path), "offdrift").method is None


def test_a_foreign_log_is_known_by_what_is_said(tmp_path):
    (tmp_path / "run.json").write_text("{half a file")
    found = run_context(str(tmp_path / "log.jsonl"), "verl", mixture_of_experts=False)
    assert (found.framework, found.method, found.temperature) == ("verl", None, None)
    assert found.mixture_of_experts is False
    assert found.filtered is None


def test_tokens_at_lag_0_compare_the_engines_though_no_old_policy_was_logged(tmp_path):
    """The finding "the policies agree at the same weights" and this question are about the same rows."""

    def open_questions(lag: int) -> set[str]:
        log = replace(make_log(3, lengths=[5, 9, 30, 12, 70, 8]), logp_old=None)
        sampled = torch.full((int(log.cu_seqlens[-1]),), 7)
        log = replace(log, rollout_version=sampled, version=torch.full_like(log.step, 7 + lag))
        write_log(log, tmp_path / f"{lag}.parquet")
        job = Job(detect([str(tmp_path / f"{lag}.parquet")]))
        audit = conclude(stream(job, pieces(job.found), folder=tmp_path / f"audit-{lag}"), job)
        return {q["question"] for q in audit["questions"] if not q["answered"]}

    assert SAME_WEIGHTS in open_questions(2)
    assert SAME_WEIGHTS not in open_questions(0)


def test_a_full_log_answers_everything():
    asked = questions(LOG)
    assert len(asked) == len(QUESTIONS) >= 10
    assert all(q["answered"] and not q["log"] for q in asked)


def test_an_empty_log_answers_nothing_and_says_what_to_log():
    asked = questions([])
    assert not any(q["answered"] for q in asked)
    assert all(q["because"].startswith("The log has no ") and q["log"] for q in asked)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: q.text[:30])
def test_each_question_needs_exactly_what_it_names(question):
    fields = {*question.needs, *question.either[:1]}
    by_text = {q["question"]: q for q in questions(fields)}
    assert by_text[question.text]["answered"]
    for field in question.needs:
        told = {q["question"]: q for q in questions(fields - {field})}[question.text]
        assert not told["answered"]
        assert LOG[field] in told["log"]
    assert all(name in LOG for name in (*question.needs, *question.either))


def test_what_a_log_leaves_out_is_counted_by_its_share():
    """Six sequences of five tokens that may train, four of them scored by two policies; and two of four tokens."""
    mu, version = torch.full((24,), -1.0), torch.full((6,), 6)
    holes = {"logp_rollout/missing": torch.ones(6).long(), "logp/absent": torch.tensor([2, 0, 0, 0, 0, 0])}
    more = {"rewards": torch.ones(6), "version": version, "rollout_version": torch.full((24,), 7)}
    log = log_of([4] * 6, logp_rollout=mu, logp_old=mu, trainable=version - 1, unscored=holes, **more)
    tally = Tally.of(log).merge(Tally.of(log_of([4, 4], logp_rollout=mu[:8], logp_old=mu[:8])))
    covered = coverage(AuditPartial(Unread(rows=4, cuts=1, files=1, bytes=50), tally=tally), files="abcd", size=100)
    assert covered["causes"] == {"logp_rollout": {"missing": 6}, "logp": {"absent": 2}}
    assert len(covered["sentences"]) == 6
    assert len(covered["remarks"]) == 4
    assert metrics(covered) == pytest.approx(
        {
            "batch/unscored_frac": 6 / 38, "batch/unscored_tokens": 6, "batch/trainable_tokens": 38,
            "data/unread_frac": 0.5, "data/cuts": 1, "data/partly_frac": 2 / 38, "data/ahead_frac": 24 / 32,
            "data/probability": 0, "data/negated": 0, "data/not_per_token": 0, "data/impossible_tokens": 0,
            **{f"data/lacking_frac/{name}": 0.25 for name in ("rewards", "version", "rollout_version")},
        }
    )  # fmt: skip
