"""The counterfactual table says what every method's own gates and weights do with a log."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from offdrift.audit.counterfactual import (
    CANDIDATES,
    GEOMETRIC,
    NUMBERS,
    Counterfactual,
    Decided,
    Decisions,
    LoggedView,
    sampled,
)
from offdrift.audit.facets import LENGTH_CUTS
from offdrift.batch_info import BatchInfo
from offdrift.divergence.evidence import Distributions
from offdrift.engines.score import old_divergences
from offdrift.errors import EvidenceError, RecordError
from offdrift.methods import METHODS
from offdrift.records.batch import Logged
from tests.audit.logs import close, log_of, logged, stored

LENGTHS = (5, 1, 9, 0, 14, 30, 7, 22, 3, 60, 11, 2, 40, 16, 8)
BATCH = logged(LENGTHS)
OF_DISTRIBUTIONS = ("dppo_tv_exact", "dppo_kl_exact")
"""They compare whole distributions of the old and the current policy, which no log has."""


ROUNDING = {"rel": 1e-12, "near": 1e-15}


def table(batch: Logged) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in Counterfactual.of(batch).table()}


def definition(name: str, batch: Logged) -> dict[str, Any]:
    """Every number of a row by its definition, token by token, from the method's own correction."""
    method, view = CANDIDATES[name].method, LoggedView(batch)
    lp = view.logprobs if method.anchor is None else method.anchor(view.logprobs, view.batch_info)
    found = method.correction(lp, batch.advantages, view.batch_info)
    used = [w if k else 0.0 for w, k in zip(found.weight.tolist(), found.keep.tolist())]
    sizes, lengths = batch.cu_seqlens.diff().tolist(), batch.response_lengths.tolist()
    parts, start = [], 0
    for size in sizes:
        parts.append(used[start : start + size])
        start += size
    scored = [i for i, size in enumerate(sizes) if size]
    kept = [i for i in scored if any(w > 0 for w in parts[i])]
    positive = [w for w in used if w > 0]
    square = sum(w * w for w in used)
    ends = [0, *LENGTH_CUTS, math.inf]

    def of_length(chosen: list[int], low: float, high: float) -> int:
        return sum(low < lengths[i] <= high for i in chosen)

    mean_kept = sum(lengths[i] for i in kept) / len(kept) if kept else None
    mean_all = sum(lengths[i] for i in scored) / len(scored)
    return {
        "kept_tokens": len(positive) / len(used),
        "kept_sequences": len(kept) / len(scored),
        "kept_length_ratio": None if mean_kept is None else mean_kept / mean_all,
        "weight_mean": sum(positive) / len(positive) if positive else None,
        "weight_max": max(positive) if positive else None,
        "limited_frac": sum(found.limited.tolist()) / len(used),
        "ess_frac": sum(used) ** 2 / (len(used) * square) if square else 0.0,
        "acceptance_by_length": [
            of_length(kept, *bucket) / of_length(scored, *bucket) if of_length(scored, *bucket) else None
            for bucket in pairwise(ends)
        ],
    }  # fmt: skip


def test_every_row_is_its_own_correction_applied_to_the_log():
    rows, compared = table(BATCH), 0
    assert len(rows) == len(METHODS) + len(GEOMETRIC)
    moved = set()
    for name, row in rows.items():
        if name in OF_DISTRIBUTIONS:
            assert "_old_current" in row["why_not"]
            continue
        assert row["why_not"] is None, name
        for key, expected in definition(name, BATCH).items():
            close(row[key], expected, near=1e-15, where=f"{name}.{key}")
            compared += 1
            if key != "acceptance_by_length" and expected not in (0.0, 1.0, None):
                moved.add((name, key))
    assert compared == 8 * (len(METHODS) + len(GEOMETRIC) - len(OF_DISTRIBUTIONS))
    assert len(moved) > 300  # the drift is such that most methods act


def test_clips_are_those_of_the_objectives():
    rows, view, compared = table(BATCH), LoggedView(BATCH), 0
    for name in ("ppo_clip", "gspo", "bypass_ppo_clip", "m2po", "r2vpo_clip", "clip_cov", "st_ppo"):
        clipped = METHODS[name].objective(view.logprobs, BATCH.advantages, view.batch_info).clipped
        assert rows[name]["clipped_frac"] == pytest.approx(float(clipped.double().mean()))
        compared += float(clipped.double().mean()) > 0
    assert compared == 7
    assert rows["token_tis"]["clipped_frac"] is None  # nothing to clip
    # PPO by hand: a token is clipped beyond 0.2 the way it is pushed.
    r, up = (BATCH.logp - BATCH.logp_old).exp(), BATCH.advantages > 0
    by_hand = ((r > 1.2) & up) | ((r < 0.8) & ~up)
    assert rows["ppo_clip"]["clipped_frac"] == pytest.approx(float(by_hand.double().mean()))


def test_numbers_by_hand():
    """Two sequences of 2 and 1 tokens: ratios 4, 1 and 1/2, lengths 100 and 40."""
    ratios = torch.tensor([4.0, 1.0, 0.5], dtype=torch.float64)
    mu = torch.full((3,), -2.0, dtype=torch.float64)
    log = log_of([2, 1], response_lengths=torch.tensor([100, 40]), logp_rollout=mu, logp=mu + ratios.log())
    rows = table(log)
    # Token TIS at 2: weights 2, 1, 1/2.
    tis = rows["token_tis"]
    assert tis["weight_mean"] == pytest.approx(3.5 / 3)
    assert tis["weight_max"] == 2.0
    assert tis["limited_frac"] == pytest.approx(1 / 3)
    assert tis["ess_frac"] == pytest.approx(3.5**2 / (3 * 5.25))
    assert tis["kept_length_ratio"] == 1.0
    # Sequence MIS at 3: the product of the first is 4, so it goes; the second weighs 1/2.
    mis = rows["seq_mis"]
    assert mis["kept_tokens"] == pytest.approx(1 / 3)
    assert mis["kept_sequences"] == 0.5
    assert mis["kept_length_ratio"] == pytest.approx(40 / 70)
    assert mis["weight_mean"] == mis["weight_max"] == pytest.approx(0.5)
    assert mis["ess_frac"] == pytest.approx(1 / 3)
    assert mis["acceptance_by_length"][:2] == [1.0, 0.0]
    # |log 4| > 0.1 and |log 1/2| > 0.1: the trust region of ratios rejects both.
    none = rows["trm_ratio"]
    assert none["kept_tokens"] == none["kept_sequences"] == none["ess_frac"] == 0.0
    assert none["weight_mean"] is none["kept_length_ratio"] is None
    assert rows["trm_ratio"]["sampled_sequences"] == 2


def test_any_split_between_steps_gives_what_one_pass_gives():
    """Also for the methods that look at a whole step: its steps are mixed, and in no order."""
    batch = logged(LENGTHS, steps=[2, 7, 5] * 5)
    one = Counterfactual.of(batch)
    parts = [Counterfactual.of(batch.select((batch.step == s).nonzero().squeeze(-1))) for s in (5, 2, 7)]
    a, b, c = map(stored, parts)
    for merged in (a.merge(b).merge(c), a.merge(b.merge(c))):
        assert close(merged.table(), one.table(), **ROUNDING) > 17 * len(CANDIDATES)
    # The step matters to them: all in one step is not the same.
    whole = table(replace(batch, step=torch.ones_like(batch.step)))
    for name, key in (("normalized_tis", "weight_mean"), ("r2vpo_clip", "clipped_frac")):
        assert abs(whole[name][key] - one.table()[list(CANDIDATES).index(name)][key]) > 1e-3


@pytest.mark.parametrize("together", [1, 2, 4])
def test_steps_that_are_looked_at_in_several_goes_are_each_counted_once(monkeypatch, together):
    """Memory bounds the steps of a go: their order, their numbers and the size of a go change nothing but rounding."""
    batch = logged(LENGTHS, steps=[901, 7, 5, 64, 3] * 3)
    one = Counterfactual.of(batch)
    monkeypatch.setattr("offdrift.audit.counterfactual.STEPS", together)
    assert close(Counterfactual.of(batch).table(), one.table(), **ROUNDING) > 17 * len(CANDIDATES)


def test_a_projection_is_seen_in_a_log_that_has_its_divergence_and_in_part_in_one_without():
    """A log has no distributions: their KL shows every token outside the ball, log-probs of drawn tokens show some."""
    g = torch.Generator().manual_seed(1)
    old, move = torch.randn(2, 200, 9, generator=g, dtype=torch.float64)
    logits, tokens = old + 0.4 * move, torch.randint(9, (200,), generator=g)
    logp_old, logp = (x.log_softmax(-1).gather(1, tokens[:, None])[:, 0] for x in (old, logits))
    log = log_of([120, 80], logp_rollout=logp_old, logp_old=logp_old, logp=logp, advantages=torch.ones(200).double())
    batch_info = BatchInfo(distributions=Distributions(old, logits, tokens))
    outside = METHODS["troll"].objective(LoggedView(log).logprobs, log.advantages, batch_info).clipped
    share = float(outside.double().mean())
    divergences = {name: d.lo.float() for name, d in old_divergences(old, logits).items()}
    known = table(replace(log, divergences=divergences))["troll"]
    assert (known["clipped_frac"], known["clipped_at_least"], known["clips"]) == (pytest.approx(share), False, True)
    assert 0.3 < share < 0.9
    part = table(log)["troll"]
    assert part["clipped_at_least"]
    assert 0 < part["clipped_frac"] < share
    seen = METHODS["troll"].objective.clipped_in_log(LoggedView(log).logprobs, BatchInfo()).clipped
    assert not (seen & ~outside).any(), "whatever a log shows is outside"
    late = table(replace(log, logp=None))["troll"]  # at the first update of a batch nothing is outside
    assert (late["clipped_frac"], late["clips"]) == (None, True)


def test_what_is_decided_step_by_step_is_about_the_right_tokens():
    batch = logged(LENGTHS, steps=[2, 7, 5] * 5)
    decisions = Decisions(batch)
    whole = decisions.correction(METHODS["normalized_tis"])
    clip = decisions.clipped(METHODS["r2vpo_clip"])
    assert isinstance(whole, Decided)
    compared = 0
    for step in (2, 5, 7):
        which = (batch.step == step).nonzero().squeeze(-1)
        rows, alone = batch.segments.rows(which), Decisions(batch.select(which))
        part, its = (alone.correction(METHODS["normalized_tis"]), alone.clipped(METHODS["r2vpo_clip"]))
        assert isinstance(part, Decided)
        assert whole.weight[rows].tolist() == part.weight.tolist()
        assert clip[0][rows].tolist() == its[0].tolist()
        compared += len(rows)
    assert compared == batch.num_tokens


def test_any_split_between_groups_gives_what_one_pass_gives_where_steps_are_not_looked_at():
    batch = logged(LENGTHS)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(1))
    pieces = [batch.select(torch.arange(3) + 3 * int(i)) for i in order]
    merged = Counterfactual.of(pieces[0])
    for piece in pieces[1:]:
        merged = merged.merge(Counterfactual.of(piece))
    looks = {n for n, c in CANDIDATES.items() if c.method.needs_whole_step}
    rows = [[r for r in x.table() if r["name"] not in looks] for x in (merged, Counterfactual.of(batch))]
    assert close(*rows, **ROUNDING) > 17 * (len(CANDIDATES) - len(looks))
    assert len(looks) == 17


ABSENT: list[tuple[str, ...]] = [
    ("logp",),
    ("logp_old",),
    ("logp", "logp_old"),
    ("logp_rollout",),
    ("advantages",),
    ("rollout_version",),
    ("rewards", "group_ids"),
    ("divergences",),
    ("logp", "divergences", "advantages"),
]


@pytest.mark.parametrize("absent", ABSENT, ids="+".join)
def test_what_a_log_lacks_is_a_sentence_and_nothing_else_changes(absent: tuple[str, ...]):
    fields: Any = {name: {} if name == "divergences" else None for name in absent}
    batch = replace(BATCH, **fields)
    rows, full, explained = table(batch), table(BATCH), 0
    assert len(rows) == len(CANDIDATES)
    for name, row in rows.items():
        assert row.keys() == full[name].keys()
        if row["why_not"] is None:
            assert row["kept_tokens"] is not None
            if "at the first update" not in row["on"]:
                unchanged = {k for k in NUMBERS if k != "clipped_frac"}
                assert {k: row[k] for k in unchanged} == {k: full[name][k] for k in unchanged}
        else:
            explained += 1
            assert len(row["why_not"]) > 40
            assert all(row[k] is None for k in NUMBERS)
            wanted = ("logp", "kl_rollout", "tv_rollout", "advantage", "version_lag", "rewards", "_old_current")
            assert any(w in row["why_not"] for w in (*wanted, "log-probs of the rollout policy"))
    expected = {
        ("logp",): 0,
        ("logp_rollout",): len(CANDIDATES) - 36,  # those compare the trainer's two policies alone
        ("rewards", "group_ids"): 3,  # topr, dispo, dispo_paper
        ("divergences",): 4,  # trm_max, trm_max_tv, trm_avg, trm_max_avg
        ("rollout_version",): 3,  # a3po, echo2, roll_flash
        # dispo, mini_rl, dppo_tv, dppo_kl, both anchored at the old policy, vespo, prime_rl, opsm,
        # deepseek_v32, asymmetric_tis, spo_scaled, fipo, mu_grpo, negative_filter
        ("advantages",): 15,
    }
    if absent in expected:
        assert explained - len(OF_DISTRIBUTIONS) == expected[absent]


def test_without_the_current_policy_the_first_update_is_tried():
    """There pi = pi_old, so the log is one whose current policy is the old one."""
    rows = table(replace(BATCH, logp=None))
    old = {k.replace("old", "current"): x for k, x in BATCH.divergences.items() if "old" in k}
    told = table(replace(BATCH, logp=BATCH.logp_old, divergences=BATCH.divergences | old))
    # Divergences of a current policy that was logged are used as they are.
    own = table(replace(BATCH, logp=BATCH.logp_old))
    marked = [name for name, row in rows.items() if row["on"].endswith(", at the first update")]
    assert {"token_tis", "cispo", "trm_max_k2", "bypass_ppo_clip", "vespo"} <= set(marked)
    assert not {"decoupled_token_is", "geo_mask", "none", "disabled", "trm_max", "roll_flash"} & set(marked)
    for name, row in rows.items():
        for key in NUMBERS:
            if key != "clipped_frac":
                assert row[key] == own[name][key], (name, key)
    without = table(replace(BATCH, logp=None, divergences={k: x for k, x in BATCH.divergences.items() if "old" in k}))
    assert without["trm_max"]["kept_tokens"] == told["trm_max"]["kept_tokens"]
    assert without["trm_max"]["on"] == "full, at the first update"
    assert rows["bypass_ppo_clip"]["clipped_frac"] == own["bypass_ppo_clip"]["clipped_frac"]
    assert own["bypass_ppo_clip"]["clipped_frac"] > 0
    assert rows["ppo_clip"]["clipped_frac"] is None  # nothing is stale yet


def test_numbers_do_not_depend_on_the_number_of_threads():
    batch, before = logged([523] * 301), torch.get_num_threads()
    try:
        found = []
        for threads in (1, 3, 4):
            torch.set_num_threads(threads)
            found.append(Counterfactual.of(batch).sums)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert (found[0] == found[1]).all()
    assert (found[0] == found[2]).all()
    assert found[0].shape[0] == len(CANDIDATES)


def test_a_log_without_scored_tokens_says_so():
    nothing = BATCH.select(torch.tensor([3]))  # a response of which no token was scored
    assert nothing.num_tokens == 0
    for batch in (nothing, BATCH.select(torch.tensor([], dtype=torch.int64))):
        found = Counterfactual.of(batch)
        assert sum(bool(row["why_not"]) for row in found.table()) == len(CANDIDATES)
        tables = found.merge(Counterfactual.of(BATCH)).table(), Counterfactual.of(BATCH).table()
        # Of two reasons the first stays, so rows that no log can answer may give another one.
        answered = [[r for r in rows if r["name"] not in OF_DISTRIBUTIONS] for rows in tables]
        assert close(*answered, **ROUNDING)


def test_a_value_that_no_policy_has_is_a_reason_not_an_exception():
    bad = BATCH.logp_rollout.clone()
    bad[3] = 0.5
    for row in table(replace(BATCH, logp_rollout=bad)).values():
        assert "logp_rollout of sequence 0" in row["why_not"]


def test_stored_counts_come_back_and_are_refused_if_of_other_methods(monkeypatch):
    found = Counterfactual.of(BATCH)
    assert stored(found).table() == found.table()
    monkeypatch.setattr("offdrift.audit.counterfactual.CANDIDATES", dict(reversed(CANDIDATES.items())))
    with pytest.raises(RecordError, match="other methods"):
        stored(found)


MANY = logged([2] * 4000, group=4, steps=[1 + i // 2000 for i in range(4000)])


def rows_of(batch: Logged) -> list[int]:
    return batch.row.tolist()


def test_a_sample_is_of_whole_groups_and_of_about_that_share():
    some = sampled(MANY, 0.2, "a.parquet")
    groups = {(r - 1) // 4 for r in rows_of(some)}
    assert rows_of(some) == [r for g in sorted(groups) for r in range(4 * g + 1, 4 * g + 5)]
    # Binomial(1000, 0.2): 5 standard deviations are 63.
    assert abs(len(groups) - 200) < 63
    assert rows_of(sampled(MANY, 0.2, "b.parquet")) != rows_of(some)
    assert set(rows_of(sampled(MANY, 0.1, "a.parquet"))) < set(rows_of(some))
    assert sampled(MANY, 1.0) is MANY
    assert sampled(MANY, 0.0).num_sequences == 0


def test_a_sample_does_not_depend_on_who_draws_it():
    whole = set(rows_of(sampled(MANY, 0.3, "log")))
    pieces = [MANY.select(torch.arange(a, b)) for a, b in pairwise((0, 40, 44, 2000, 3996, 4000))]
    numbered_anew = [replace(p, group_ids=p.group_ids - p.group_ids.min()) for p in pieces]
    assert {r for p in numbered_anew for r in rows_of(sampled(p, 0.3, "log"))} == whole
    mixed = MANY.select(torch.randperm(4000, generator=torch.Generator().manual_seed(0)))
    assert set(rows_of(sampled(mixed, 0.3, "log"))) == whole
    alone = replace(MANY, group_ids=None)
    assert abs(sampled(alone, 0.3, "log").num_sequences - 1200) < 5 * math.sqrt(4000 * 0.21)
    assert len(whole) > 1000


def test_a_missing_rollout_policy_is_named():
    with pytest.raises(EvidenceError, match="no log-probs of the rollout policy"):
        replace(BATCH, logp_rollout=None).logprobs()
