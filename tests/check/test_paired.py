"""Paired differences and claims about two engines that are led along the same tokens."""

import io

import numpy as np
import pytest
import torch

from offdrift.check.bench import Bench, EngineSpec
from offdrift.check.check import check
from offdrift.check.claim import claimed_equal_to
from offdrift.check.entry import check as asked
from offdrift.check.measure import measure
from offdrift.check.other_machine import with_digest
from offdrift.check.paired import Paired, paired, paired_rows
from offdrift.errors import BadValueError, EngineError
from offdrift.records.provenance import Sampling
from tests.check.benches import BFLOAT16, FLOAT32, bench_of
from tests.engines.test_openai_broken import VOCAB, Played, playing

EQUAL = EngineSpec("transformers", "float16", {"batch_invariant": True})
SAMPLING = Sampling(max_tokens=10)


@pytest.fixture(scope="module")
def measured_pair():
    """Rollouts of float32, their baseline, and the same tokens in bfloat16."""
    with bench_of(count=6, sampling=SAMPLING) as bench:
        drawn = bench.rollouts(FLOAT32)
        baseline = measure(bench, drawn, FLOAT32)
        rows = paired_rows(bench, FLOAT32, drawn, baseline.logged.logp_old, FLOAT32, against=BFLOAT16)
        other = bench.engine(BFLOAT16).rescore(drawn)
    return drawn, other, baseline.logged.logp_old, rows


def test_a_paired_difference_is_the_documented_one(measured_pair):
    drawn, other, logp, (row,) = measured_pair
    mu, nu, pi = (x.double().numpy() for x in (drawn.logp_rollout, other.logp_rollout, logp))
    change = ((pi - nu) ** 2 - (pi - mu) ** 2) / 2
    groups = np.split(change - change.mean(), drawn.cu_seqlens[1:-1].tolist())
    error = np.sqrt(6 / 5 * sum(g.sum() ** 2 for g in groups)) / len(change)
    assert row["factor"] == "another engine"
    assert row["computed"] == "decoded in this process"
    assert row["self_kl"] == pytest.approx(((nu - mu) ** 2).mean() / 2)
    assert row["kl_change"] == pytest.approx(change.mean())
    assert row["kl_change_low"] == pytest.approx(change.mean() - 1.96 * error)
    assert row["kl_change_high"] == pytest.approx(change.mean() + 1.96 * error)
    assert row["kl_change_low"] > 0  # bfloat16 is further from the float32 trainer than float32 is
    assert row["equal_tokens"] < row["tokens"] == len(change)


def test_other_tokens_are_not_paired(measured_pair):
    drawn, other, logp, _ = measured_pair
    with pytest.raises(EngineError, match="the same"):
        paired("x", "", "", drawn, other.with_(tokens=other.tokens.flip(0)), logp)


def test_at_another_temperature_nothing_is_paired_and_nothing_claimed():
    with bench_of(count=3, sampling=Sampling(max_tokens=4, temperature=0.7)) as bench:
        drawn = bench.rollouts(FLOAT32)
        logp = measure(bench, drawn, FLOAT32).logged.logp_old
        (row,) = paired_rows(bench, FLOAT32, drawn, logp, FLOAT32, against=BFLOAT16)
        assert "temperature 1" in row["why"]
        with pytest.raises(BadValueError, match="temperature 1"):
            claimed_equal_to(bench, drawn, FLOAT32, BFLOAT16)


def claim(rollout: EngineSpec, against: EngineSpec, made: type[Bench] = Bench, **options) -> dict:
    with bench_of(count=6, made=made, sampling=SAMPLING, **options) as bench:
        return check(bench, rollout, FLOAT32, noise=False, claim="equal", against=against)


def test_two_engines_that_are_equal_are_proved_equal_whatever_the_trainer_is():
    found = claim(EQUAL, EQUAL)
    assert found["claim"]["equal"] is True
    assert found["claim"]["whole"] is True
    assert found["claim"]["other"] == str(EQUAL)
    assert found["claim"]["digest_rollout"] == found["claim"]["digest_train"]
    assert found["passed"] is True
    assert found["paired"][0]["equal_tokens"] == found["tokens"]


def test_two_engines_that_round_differently_are_not_equal():
    found = claim(FLOAT32, BFLOAT16)
    assert found["claim"]["equal"] is False
    assert 0 < found["claim"]["kl_low"] < found["claim"]["kl"] < found["claim"]["kl_high"]
    assert "in the other one" in found["claim"]["text"]
    assert "bisect" not in found
    assert found["passed"] is False


def test_the_digest_of_another_machine_is_held_against_this_one():
    found = claim(EQUAL, EQUAL)["claim"]
    digest = found["digest_rollout"]
    assert with_digest(found, digest.upper())["same_digest"] is True
    other = digest[:-1] + ("0" if digest[-1] != "0" else "1")
    with bench_of(count=6, sampling=SAMPLING) as bench:
        refused = check(bench, EQUAL, EQUAL, noise=False, claim="equal", digest=other)
    assert refused["claim"]["equal"] is True
    assert refused["claim"]["same_digest"] is False
    assert refused["passed"] is False
    assert refused["verdict"]["level"] == "act"


@pytest.mark.parametrize(("options", "named"), [({"digest": "ab"}, "64"), ({"digest": "a" * 64}, "--claim equal")])
def test_a_digest_that_cannot_be_is_refused_before_anything_is_loaded(options, named):
    with pytest.raises(BadValueError, match=named):
        asked("no-such-model", **options)


class Unused(Bench):
    """A rollout engine with one bit of a weight flipped: `place` names it."""

    place: tuple[str, tuple[int, ...], int] = ("", (), 0)

    def engine(self, spec):
        fresh = spec.kind not in self._engines
        made = super().engine(spec)
        if fresh:
            name, at, bit = self.place
            with torch.no_grad():
                made.model.get_parameter(name).view(torch.int16)[at] ^= 1 << bit
        return made


UNSEEN_TOKEN = 60
"""No prompt holds it, and no response of this seed."""


@pytest.mark.parametrize(
    ("name", "at", "bit", "seen"),
    [
        ("model.layers.0.self_attn.v_proj.weight", (0, 0), 9, True),
        ("model.layers.0.self_attn.v_proj.weight", (0, 0), 12, True),
        ("lm_head.weight", (UNSEEN_TOKEN, 0), 9, True),
        ("model.embed_tokens.weight", (UNSEEN_TOKEN, 0), 12, False),
    ],
)
def test_a_flipped_bit_is_seen_where_a_token_multiplies_it_and_nowhere_else(name, at, bit, seen):
    made = type("Flipped", (Unused,), {"place": (name, at, bit)})
    with bench_of("moe", count=6, made=made, sampling=SAMPLING) as bench:
        found = check(bench, EQUAL, EQUAL, noise=False, claim="equal")
        tokens = bench.rollouts(EQUAL)
    assert seen or UNSEEN_TOKEN not in [*tokens.tokens.tolist(), *tokens.prompt_tokens.tolist()]
    assert found["claim"]["equal"] is not seen
    assert found["passed"] is not seen


# -- servers that only read --------------------------------------------------------------------------


class Reading(Played):
    """SGLang, which reads given tokens and decodes none."""

    def generated(self, body: dict) -> dict:
        said = super().generated(body)
        if body["logprob_start_len"] == 0:
            shown = self.rows(body["sampling_params"], 1)[2]
            rows = [[None, body["input_ids"][0], None]]
            rows += [[float(shown[t]), t, None] for t in body["input_ids"][1:]]
            said["meta_info"]["input_token_logprobs"] = rows
        return said


def test_a_server_that_only_reads_is_labelled_so_and_both_sides_read():
    from offdrift.check.paired import READ, UNASKED
    from offdrift.engines.server.settings import SETTINGS
    from tests.engines.models import tiny

    small = tiny("dense")
    small.resize_token_embeddings(VOCAB)
    with playing(Reading("sglang", mode="tempered")) as server:
        spec = EngineSpec.parse(f"sglang:{server.url},dtype=bfloat16")
        with Bench(small, None, [[1, 2], [3]], sampling=Sampling(max_tokens=4)) as bench:
            drawn = bench.rollouts(spec, evidence="sampled")
            logp = measure(bench, drawn, FLOAT32).logged.logp_old
            rows = paired_rows(bench, spec, drawn, logp, FLOAT32, against=spec)
            found = claimed_equal_to(bench, drawn, spec, spec)
    assert [r["factor"] for r in rows[:3]] == ["prefill", "repeats, batch, prefix_cache", "another engine"]
    assert [r["factor"] for r in rows[3:]] == [setting.name for setting in SETTINGS]
    assert {r["why"] for r in rows[3:]} == {UNASKED}
    assert rows[-1]["changed"] == "--dtype float16"
    assert rows[0]["equal_tokens"] == rows[0]["tokens"]
    assert "decodes no given tokens" in rows[1]["why"]
    assert rows[2]["computed"] == found.computed == READ
    assert found.equal
    assert READ in str(found)


def test_rows_stand_on_terminal_and_page():
    from rich.console import Console

    from offdrift.check.page import render_check
    from offdrift.check.paired_view import paired_lines
    from offdrift.check.view import check_view

    found = claim(FLOAT32, BFLOAT16)
    words = paired_lines(found)[0][1]
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(check_view(found))
    for shown in (console.export_text(), render_check(found)):
        assert words[:60] in shown
        assert found["claim"]["digest_rollout"] in shown or "first difference" in shown
    off, one, two = (
        Paired(name, change, "", why="off") for name, change in (("batch", ""), ("a_b", "--a"), ("c", "--c"))
    )
    assert paired_lines({"paired": [off.as_dict()]}) == [("batch", "not measured: off")]
    together = paired_lines({"paired": [off.as_dict(), one.as_dict(), two.as_dict()]})
    assert together[1:] == [("not changed", "off: a b, --a; c, --c")]
