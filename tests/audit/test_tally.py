"""A tally: any split gives what one pass gives, and one order of parts the same bits.

The worst sequences and tokens: the right ones, in a fixed order, with what is needed to look.
"""

import itertools
import json
import math
from dataclasses import replace
from functools import reduce

import pytest
import torch

from offdrift.audit.facets import Facets, by_step, chunks
from offdrift.audit.partial import AuditPartial
from offdrift.audit.tally import SEQUENCES, TOKENS, WINDOW, Tally, Worst
from offdrift.records.batch import Logged
from offdrift.stats import DriftStats, signature, summarize
from tests.audit.logs import close, log_ratios, make_log, stored


def split(log: Logged, sizes: list[int]) -> list[Logged]:
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    assert ends[-1] == log.num_sequences
    return [log.select(torch.arange(a, b)) for a, b in itertools.pairwise(ends)]


def text(tally: Tally) -> str:
    return json.dumps(tally.as_dict())


def without_shapes(told: dict) -> dict:
    """Shapes compare a sequence with those beside it (medians of a step, the first of a group): they depend on how a
    log is cut, which the files alone decide."""
    return {name: x for name, x in told.items() if name != "shapes"}


@pytest.mark.parametrize(("seed", "sizes"), [(0, [24]), (0, [1] * 24), (1, [5, 19]), (1, [3, 1, 0, 20]), (0, [23, 1])])
def test_merge_over_any_split_equals_one_pass(seed, sizes):
    log = make_log(seed)
    parts = [Tally.of(part, file="f") for part in split(log, [s for s in sizes if s])]
    merged, whole = reduce(Tally.merge, parts).as_dict(), Tally.of(log, file="f").as_dict()
    # a group that is cut by a split is counted in both parts
    merged["counts"]["prompts"] = whole["counts"]["prompts"]
    assert close(without_shapes(merged), without_shapes(whole), rel=1e-7, near=1e-9) > 2500
    assert merged["shapes"]["whole"] == pytest.approx(whole["shapes"]["whole"])


def test_merging_in_order_is_the_same_to_the_last_bit_whoever_computed_the_parts():
    log = make_log(3, lengths=[200] * 90, dtype=torch.float32)
    parts = split(log, [30, 1, 29, 30])
    here = reduce(Tally.merge, [Tally.of(p, file="f") for p in parts])
    there = [stored(Tally.of(p, file="f")) for p in reversed(parts)]
    assert text(reduce(Tally.merge, reversed(there))) == text(here)
    # resumed from what was stored of the first two
    resumed = stored(there[-1].merge(there[-2])).merge(there[-3]).merge(there[-4])
    assert text(resumed) == text(here)


def test_threads_change_nothing():
    log, threads = make_log(0, lengths=[100_000, 100_000], dtype=torch.float32), torch.get_num_threads()
    found = []
    for count in (1, 2):
        torch.set_num_threads(count)
        found.append(text(Tally.of(log)))
        assert torch.get_num_threads() == count
    torch.set_num_threads(threads)
    assert found[0] == found[1]


def test_storing_loses_nothing():
    log = make_log(0)
    odd = replace(log, completions=("\ud800\x00</script>",) * log.num_sequences)
    for tally in (Tally.of(log), Tally.of(odd), Tally.of(make_log(1, fields=())), Tally.of(log).merge(Tally.of(make_log(1, fields=("logp",))))):  # fmt: skip
        again = stored(tally)
        assert text(again) == text(tally)
        assert again.worst == tally.worst
        assert AuditPartial(tally=again).to_bytes() == AuditPartial(tally=tally).to_bytes()


@pytest.mark.parametrize("tokens", [1, 100, 10**6])
def test_chunks_of_a_batch_are_an_inner_matter(monkeypatch, tokens):
    log = make_log(4, lengths=[0, 50, 0, 30, 200, 0, 0, 70, 0])
    whole = Tally.of(log).as_dict()
    monkeypatch.setattr("offdrift.audit.tally.chunks", lambda batch: chunks(batch, tokens=tokens))
    assert close(without_shapes(Tally.of(log).as_dict()), without_shapes(whole), rel=1e-7, near=1e-9) > 1000
    cut = list(chunks(log, tokens=tokens))
    assert sum(c.num_sequences for c in cut) == 9
    assert sum(c.num_tokens for c in cut) == 350
    assert all(c.num_tokens for c in cut)


def test_each_step_is_a_batch_of_its_own():
    log = make_log(5, steps=[7, 3] * 12)
    for row in Tally.of(log).as_dict()["steps"]:
        own = log.select((log.step == row["step"]).nonzero().squeeze(-1))
        lp = own.logprobs()
        stats = DriftStats.of(lp).plus(signature(lp, advantages=own.advantages, position=own.position))
        expected = {k: v for k, v in summarize(stats).items() if not k.startswith(("batch/", "response/"))}
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, rel=1e-9, abs=1e-12, nan_ok=True), name
        assert len(expected) > 80
        assert (row["sequences"], row["tokens"]) == (12, own.num_tokens)
    assert [r["step"] for r in Tally.of(log).as_dict()["steps"]] == [3, 7]


def test_facts_of_a_step():
    log = make_log(6, steps=[1] * 24)
    log = replace(log, rewards=torch.cat([log.rewards[:-1], torch.tensor([math.nan])]), response_lengths=log.response_lengths + 10)  # fmt: skip
    (row,) = Tally.of(log).as_dict()["steps"]
    expected = {
        "reward/mean": log.rewards[:-1].mean(),
        "response/length_mean": log.response_lengths.double().mean(),
        "response/length_max": log.response_lengths.max(),
        "response/truncated_frac": log.truncated.double().mean(),
        "version_lag/mean": log.lag.double().mean(),
        "version_lag/max": log.lag.max(),
        "current/entropy": log.entropy.mean(),
        "divergence/kl_rollout_old_mean": log.divergences["kl_rollout_old"].mean(),
        "divergence/kl_rollout_old_max": log.divergences["kl_rollout_old"].max(),
    }
    for name, value in expected.items():
        assert row[name] == pytest.approx(float(value)), name


def test_bands_of_a_step():
    log = make_log(7, lengths=[300] * 10, steps=[1] * 10)
    (row,) = Tally.of(log).as_dict()["steps"]
    ls = torch.tensor([x for held in log_ratios(log, "full") for x in held], dtype=torch.float64)
    assert row["quantiles"].keys() == {"response_length", "reward", "mismatch/log_ratio", "staleness/log_ratio", "full/log_ratio"}  # fmt: skip
    for name, q in {"p05": 0.05, "p95": 0.95, "p99": 0.99}.items():
        exact = float(torch.quantile(ls, q))
        assert row["quantiles"]["full/log_ratio"][name] == pytest.approx(exact, rel=0.1)
    assert row["quantiles"]["reward"]["p50"] in (0.0, 0.5, 1.0)
    assert row["quantiles"]["response_length"] == {"p05": 300.0, "p50": 300.0, "p95": 300.0, "p99": 300.0}


def test_text_alone_is_counted():
    log = make_log(0, fields=("rewards", "texts"))
    log = replace(log, logp_rollout=None, cu_seqlens=torch.zeros(25, dtype=torch.int64), length_unit="character")
    got = Tally.of(log).as_dict()
    assert got["has"] == ["rewards", "prompts", "completions"]
    assert got["counts"] == {"rows": 24, "sequences": 24, "tokens": 0, "steps": 3, "prompts": None, "trainable": 0, "unscored": {}, "empty": 0, "length_unit": "character"}  # fmt: skip
    assert got["overall"]["reward/mean"] == pytest.approx(float(log.rewards.mean()))
    assert got["overall"]["response/length_mean"] == pytest.approx(float(log.response_lengths.double().mean()))
    assert not any(name.startswith(("mismatch", "full", "rollout")) for name in got["overall"])
    assert got["worst"] == {"sequences": [], "tokens": []}
    assert sum(r["sequences"] for r in got["facets"]["length"]) == 24


def test_only_the_rollout_policy_was_logged():
    got = Tally.of(make_log(0, fields=())).as_dict()
    assert got["overall"]["rollout/ppl"] > 1
    assert got["histograms"] == {}
    assert got["worst"]["sequences"] == []
    assert {r["label"] for r in got["facets"]["token_class"]} >= {"sure", "last token"}


def test_a_step_without_a_scored_token():
    log = make_log(0, lengths=[0, 0, 5, 6], steps=[1, 1, 2, 2])
    first, second = Tally.of(log).as_dict()["steps"]
    assert (first["tokens"], second["tokens"]) == (0, 11)
    assert "mismatch/k3" not in first
    assert first["reward/mean"] >= 0
    assert second["mismatch/k3"] > 0


def test_logs_that_hold_different_fields_add_up_to_what_each_holds():
    full, some = make_log(0), make_log(1, fields=("logp", "rewards"))
    both = Tally.of(full).merge(Tally.of(some)).as_dict()
    alone = Tally.of(full).as_dict()
    for name in ("mismatch/k3", "mismatch/log_ppl_gap", "mismatch/chi2_seq", "old/ppl", "version_lag/mean", "current/entropy", "divergence/kl_rollout_old_mean", "staleness/clip_frac", "response/truncated_frac", "mismatch/acceptance_sum"):  # fmt: skip
        assert both["overall"][name] == pytest.approx(alone["overall"][name]), name
    assert both["overall"]["full/k3"] != pytest.approx(alone["overall"]["full/k3"])
    assert set(both["has"]) == set(alone["has"])
    rows, own = ({r["label"]: r for r in d["facets"]["lag"]} for d in (both, alone))
    assert rows.keys() == own.keys()
    for label, row in own.items():
        assert rows[label]["tokens"] == row["tokens"]


def test_long_runs_are_binned_the_same_whatever_the_order(monkeypatch):
    monkeypatch.setattr("offdrift.audit.tally.MAX_POINTS", 20)
    log = make_log(0, lengths=[9] * 41, steps=[5 * i for i in range(41)], fields=("logp_old",))
    whole = Tally.of(log).as_dict()
    parts = [Tally.of(p) for p in split(log, [15, 15, 11])]
    one, other = reduce(Tally.merge, parts).as_dict(), reduce(Tally.merge, parts[::-1]).as_dict()
    assert close(one, whole, rel=1e-7, near=1e-9) > 1000
    assert close(other, whole, rel=1e-7, near=1e-9) > 1000
    # 41 steps from 0 to 200: at width 8 there are 26 points, at 16 there are 13
    assert whole["steps_per_point"] == 16
    assert len(whole["steps"]) == 13
    assert whole["counts"]["steps"] == 41
    assert [r["step"] for r in whole["steps"][:3]] == [0, 20, 35]  # the first at 0, 16, 32 or later
    assert sum(r["sequences"] for r in whole["steps"]) == 41


def test_dropped_tokens_rows_and_units():
    some = torch.arange(24)
    holes = {"logp_rollout/missing": 1 * (some < 2), "logp_rollout/zero": 1 * (some == 5), "logp/absent": 1 * (some == 5)}  # fmt: skip
    log = replace(make_log(0), unscored=holes, row=torch.arange(24) // 2)
    both = Tally.of(log).merge(Tally.of(replace(log, length_unit="character"))).as_dict()
    assert both["counts"]["unscored"] == {"logp_rollout": 6, "logp": 2}
    assert both["counts"]["rows"] == 24
    assert both["counts"]["prompts"] == 6  # two batches of the same prompts
    assert both["counts"]["length_unit"] == "mixed"
    assert both["has"][:3] == ["logp_rollout", "logp_old", "logp"]


def test_order_of_steps_is_stable():
    log = make_log(0, steps=[2, 1] * 12)
    assert by_step(log).row.tolist() == [*range(2, 25, 2), *range(1, 25, 2)]
    assert by_step(make_log(0)).row.tolist() == list(range(1, 25))


def test_a_part_is_small_however_large_its_batch():
    sizes = [
        len(AuditPartial(tally=Tally.of(make_log(0, lengths=[n] * 30, steps=[1] * 30))).to_bytes())
        for n in (1000, 4000)
    ]
    assert sizes[1] < 1.3 * sizes[0]
    assert sizes[1] < 1.5 * 2**20


@pytest.mark.parametrize(("versions", "kept"), [([4, 4, 4], True), ([4, 5, 6], True), ([4, 4, 5], True)])
def test_versions_are_versions_also_where_they_never_change(versions, kept):
    log = make_log(seed=3, lengths=list(range(2, 14)))
    step = torch.arange(12) // 4
    version = torch.tensor(versions)[step]
    drawn = (version - 1)[log.segments.seq_ids]
    log = replace(log, step=step, version=version, rollout_version=drawn)
    for tally in (Tally.of(log), reduce(Tally.merge, (stored(Tally.of(p)) for p in split(log, [4, 4, 4])))):
        told = tally.as_dict()
        assert ("version_lag/mean" in told["overall"]) == kept
        assert [("version_lag/max" in s) for s in told["steps"]] == [kept] * 3
        assert bool(told["facets"]["lag"]) == kept
        assert [("version_lag/mean" in row) for row in told["facets"]["worker"]] == [kept] * 4
        assert ("version_lag/mixed_frac" in told["overall"]) == kept
        assert {"version", "rollout_version"} <= set(told["has"]) if kept else not {"version", "rollout_version"} & set(told["has"])  # fmt: skip
    told = Tally.of(replace(log, rollout_version=drawn - log.tokens % 2)).as_dict()
    assert "version_lag/mean" in told["overall"], "the engine's counter moves"
    alone = Tally.of(replace(log, step=torch.zeros(12, dtype=torch.int64), version=torch.full((12,), 9)))
    assert "version_lag/mean" in alone.as_dict()["overall"], "within one step it may well stand still"


def test_responses_of_several_versions_are_counted_and_the_worst_are_shared_among_workers() -> None:
    log = make_log(seed=3, lengths=[3, 3, 3, 0, 1, 4], steps=[1] * 6)
    versions = torch.tensor([1, 1, 2, 5, 5, 5, 3, 4, 3, 2, 0, 0, 0, 1])
    log = replace(log, rollout_version=versions, version=torch.full((6,), 5), workers=tuple("abcdab"))
    told = Tally.of(log).as_dict()
    assert told["overall"]["version_lag/mixed_frac"] == pytest.approx(3 / 5)  # of those with a token
    shares = {row["label"]: row["worst_frac"] for row in told["facets"]["worker"]}
    drawn_by = [e["worker"] for e in told["worst"]["sequences"]]
    assert shares == {name: drawn_by.count(name) / 5 for name in "abcd"}
    assert [shares[name] for name in "abcd"] == pytest.approx([0.4, 0.4, 0.2, 0])
    without = Tally.of(replace(log, rollout_version=None, workers=None)).as_dict()
    assert "version_lag/mixed_frac" not in without["overall"]
    assert "worker" not in without["worst"]["sequences"][0]


def worst_of(log: Logged, on: str = "mismatch", file: str = "a.jsonl") -> Worst:
    return Worst.of(log, on, Facets.of(log)[1][on], file=file)


@pytest.mark.parametrize("on", ["mismatch", "full"])
def test_the_worst_by_their_definition(on):
    log = make_log(0, lengths=[0, *[30 + i for i in range(60)]])
    ls, got = log_ratios(log, on), worst_of(log, on)
    drift = {i: sum(math.expm1(x) - x for x in held) for i, held in enumerate(ls) if held}
    order = sorted(drift, key=lambda i: -drift[i])[:SEQUENCES]
    assert [e["row"] for e in got.sequences] == [i + 1 for i in order]
    assert [e["k3_sum"] for e in got.sequences] == pytest.approx([drift[i] for i in order])
    assert [e["k3_mean"] for e in got.sequences] == pytest.approx([drift[i] / len(ls[i]) for i in order])
    assert [e["max_abs_log_ratio"] for e in got.sequences] == [max(map(abs, ls[i])) for i in order]
    places = [(i, t) for i, held in enumerate(ls) for t in range(len(held))]
    tokens = sorted(places, key=lambda p: -abs(ls[p[0]][p[1]]))[:TOKENS]
    assert [(e["row"] - 1, e["position"]) for e in got.tokens] == tokens
    assert [e["log_ratio"] for e in got.tokens] == [ls[i][t] for i, t in tokens]
    assert len(got.tokens) == TOKENS


def test_ties_go_to_the_earlier_place_however_parts_are_merged():
    log = make_log(0, lengths=[5] * 60)
    one = torch.ones(300, dtype=torch.float64)
    log = replace(log, logp_rollout=-one, logp_old=-1.5 * one)
    whole = worst_of(log)
    assert [e["row"] for e in whole.sequences] == list(range(1, SEQUENCES + 1))
    assert [(e["row"], e["position"]) for e in whole.tokens] == [(1 + i // 5, i % 5) for i in range(TOKENS)]
    a, b, c = (worst_of(log.select(torch.arange(i, i + 20))) for i in (0, 20, 40))
    assert a.merge(b).merge(c) == c.merge(b).merge(a) == b.merge(a.merge(c))
    assert a.merge(b).merge(c).tokens == whole.tokens


def test_agreement_is_nothing_to_show():
    log = make_log(0, lengths=[5] * 3)
    assert worst_of(replace(log, logp_old=log.logp_rollout)) == Worst()


def test_a_window_around_the_worst_token():
    log = make_log(0, lengths=[4000], drift=0.001)
    log.logp_old[2500] -= 3.0
    (entry,) = worst_of(log).sequences
    assert entry["first"] == 2500 - WINDOW // 2
    shown = slice(entry["first"], entry["first"] + WINDOW)
    assert entry["log_ratio"] == (log.logp_old - log.logp_rollout)[shown].tolist()
    assert entry["tokens"] == log.tokens[shown].tolist()
    assert entry["kl"] == log.divergences["kl_rollout_old"][shown].tolist()
    assert len(entry["log_ratio"]) == len(entry["logp_rollout"]) == WINDOW


def test_turns_are_counted_from_the_first_token_of_their_response():
    log = make_log(0, lengths=[7, 9, 4])
    assert [e["turns"] for e in worst_of(log).sequences] == [None] * 3
    turn_ids = torch.tensor([0, 1, 0, 1, 2, 0]).repeat_interleave(torch.tensor([3, 4, 2, 2, 5, 4]))
    entries = worst_of(replace(log, turn_ids=turn_ids)).sequences
    assert {e["row"]: e["turns"] for e in entries} == {1: [0, 3], 2: [0, 2, 4], 3: [0]}


def test_what_is_known_of_a_sequence():
    log = make_log(0, lengths=[7, 9])
    for entry in worst_of(log, file="x/y.parquet").sequences:
        i = entry["row"] - 1
        assert (entry["file"], entry["step"]) == ("x/y.parquet", int(log.step[i]))
        assert entry["reward"] == float(log.rewards[i])
        assert entry["advantage"] == float(log.advantages[int(log.cu_seqlens[i])])
        assert entry["length"] == (7, 9)[i]
        assert entry["prompt"] == f"question {i}"
    bare = worst_of(make_log(0, lengths=[7, 9], fields=("logp_old",)))
    assert all(e[k] is None for e in bare.sequences for k in ("reward", "advantage", "prompt", "completion", "tokens", "kl"))  # fmt: skip
    assert len(bare.sequences) == 2


def test_text_is_kept_in_bounds_around_the_place():
    log = make_log(0, lengths=[100], drift=0.0)
    text = "".join(f"<b>{i:05}</b>" for i in range(10_000))
    log = replace(log, prompts=("p" * 10**6,), completions=(text,))
    log.logp_old[80] -= 2.0
    got = worst_of(log)
    (sequence,), token = got.sequences, got.tokens[0]
    assert len(sequence["prompt"]) < 2100
    assert len(sequence["completion"]) < 6100
    assert token["position"] == 80
    assert token["context_is"] == "near"
    # the 81st of 100 tokens: about character 0.805 of 120,000, the middle of tag 8050
    assert "08050" in token["context"]
    assert token["context"].startswith("…")
    assert len(token["context"]) < 170
