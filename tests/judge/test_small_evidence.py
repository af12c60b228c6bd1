"""Verdicts that say no more than a few tokens, one column of numbers, or another unit can show."""

import json
import math

import numpy as np
import pytest

import offdrift as od
from offdrift.errors import RecordError
from offdrift.judge import verdict
from tests.judge.histories import altered, both, clean


def rows(lengths, *, noise=0.05, top_p=1.0, seed=0, base=math.e):
    """Tokens that were drawn as logged from 64 random ones, sharp or flat, by an engine whose logits are noisy."""
    g, content = np.random.default_rng(seed), []
    for length in lengths:
        old = g.standard_normal((length, 64)) * g.choice([6.0, 1.5], (length, 1))
        engine = old + noise * g.standard_normal(old.shape)
        mu, old = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (engine, old))
        order = np.argsort(-mu, -1)
        before = np.cumsum(np.exp(np.take_along_axis(mu, order, -1)), -1) - np.exp(np.take_along_axis(mu, order, -1))
        kept = np.zeros(mu.shape, bool)
        np.put_along_axis(kept, order, before < top_p, -1)
        mu = np.where(kept, mu, -np.inf)
        mu = mu - np.log(np.exp(mu).sum(-1, keepdims=True))
        token = (mu + g.gumbel(size=mu.shape)).argmax(-1)[:, None]
        taken = [np.take_along_axis(x, token, -1)[:, 0] for x in (mu / math.log(base), old)]
        content.append({"step": 1, "logp_rollout": taken[0].tolist(), "logp_old": taken[1].tolist()})
    return content


def told(folder, content):
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return od.audit(folder / "log.jsonl")


@pytest.mark.parametrize(("length", "seed"), [(2, s) for s in range(6)] + [(3, 42), (6, 4), (6, 7)])
def test_a_few_tokens_prove_nothing(length, seed, tmp_path):
    assert [f.rule for f in told(tmp_path, rows([length], seed=seed)).findings if f.severity != "info"] == []


def test_one_response_proves_a_filter_by_its_tokens(tmp_path):
    swapped = [
        row | {"logp_rollout": row["logp_old"], "logp_old": row["logp_rollout"]}
        for row in rows([400], noise=0.0, top_p=0.8)
    ]
    first = told(tmp_path, swapped).findings[0]
    assert (first.rule, first.fact) == ("filter_or_swap", False)  # a filter that the record lacks looks the same
    assert "engine's own answer" in first.decides


@pytest.mark.parametrize("base", [2, 10])
def test_another_base_of_logarithms_is_no_temperature(base, tmp_path):
    first = told(tmp_path, rows([60] * 40, base=base)).findings[0]
    assert (first.rule, first.confidence, first.fact) == ("other_base", "medium", False)
    assert f"log{base} p" in first.decides


def test_a_copied_column_is_no_agreement():
    numbers = {**clean()[8], "mismatch/abs_log_ratio_mean": 0.0}
    assert "copy" in verdict([], numbers)["text"]
    assert "copy" not in verdict([], altered(both(abs_log_ratio_mean=1e-6))[0])["text"]


def test_a_mask_of_zeros_is_named(tmp_path):
    found = told(tmp_path, [row | {"mask": [0] * 20} for row in rows([20] * 4)])
    assert found.verdict.text.startswith("The mask leaves out every token.")
    assert "no token" in found.findings[0].symptom


def test_rows_of_tokens_and_a_missing_last_token_are_told_as_such(tmp_path):
    tokens = [{"step": 1, "logp_rollout": -0.5, "logp_old": -0.6}] * 8
    with pytest.raises(RecordError, match="one response, with one list per column"):
        told(tmp_path, tokens)
    short = [row | {"logp_rollout": row["logp_rollout"][:-1]} for row in rows([20] * 4)]
    with pytest.raises(RecordError, match="logp_rollout is one short") as told_short:
        told(tmp_path, short)
    assert "--columns" not in str(told_short.value)
