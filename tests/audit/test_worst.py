"""The worst sequences and tokens: the right ones, in a fixed order, with what is needed to look."""

import math
from dataclasses import replace

import pytest
import torch

from offdrift.audit.facets import Facets
from offdrift.audit.worst import SEQUENCES, TOKENS, WINDOW, Worst
from offdrift.records.batch import Logged
from tests.audit.logs import log_ratios, make_log


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
