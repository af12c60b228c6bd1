"""What is measured between two engines: against formulas, against other routes, and null pairs."""

import math
from dataclasses import replace

import pytest
import torch

from offdrift.check import bench as pair
from offdrift.check import rescore
from offdrift.check.bench import EngineSpec
from offdrift.check.measure import Measured, clustered_error, logged, measure, measured, surprise_z
from offdrift.check.rescore import THETAS, Scored, rescored, smallest_caps, surprise_cgf, tail_sums
from offdrift.check.verdict import conclusion
from offdrift.divergence.interval import topk_divergences
from offdrift.engines.generate import Generation, rollouts_from
from offdrift.errors import EvidenceError
from offdrift.judge import load_rules
from offdrift.records.provenance import Provenance, Sampling
from offdrift.records.rollouts import Rollouts
from tests.check.benches import BFLOAT16, FLOAT32, bench_of
from tests.engines.models import VOCAB


@pytest.fixture(scope="module")
def bench():
    with bench_of(sampling=Sampling(max_tokens=16, stop_token_ids=(1,))) as made:
        yield made


def made_up(logp: list[float], lengths: list[int]) -> Rollouts:
    draws = Generation(torch.zeros(len(logp), dtype=torch.int64), torch.tensor(lengths), torch.tensor(logp), None)
    provenance = Provenance("made up", "0", "none", "float32", None, Sampling(max_tokens=max(lengths)))
    return rollouts_from([draws], [[i] for i in range(len(lengths))], version=0, provenance=provenance)


def test_the_comparison_takes_one_thread_and_the_model_all(bench, monkeypatch):
    seen, exact = [], rescore.exact_divergences

    def watched(*arguments, **named):
        seen.append(torch.get_num_threads())
        return exact(*arguments, **named)

    monkeypatch.setattr(rescore, "exact_divergences", watched)
    drawn, before, forward = bench.rollouts(BFLOAT16), torch.get_num_threads(), []
    handle = bench.model.register_forward_pre_hook(lambda *_: forward.append(torch.get_num_threads()))  # fmt: skip
    try:
        torch.set_num_threads(2)
        rescored(bench.model, drawn, details=True)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
        handle.remove()
    assert seen
    assert set(seen) == {1}
    assert set(forward) == {2}


def test_the_numbers_are_those_of_their_formulas():
    rollouts = made_up([-1.0, -2.0, -0.5], [2, 1])
    scored = Scored(
        logp=torch.tensor([-1.1, -1.8, -0.5]),
        entropy=torch.ones(3),
        kl=torch.tensor([0.1, 0.2, 0.6]),
        tv=torch.tensor([0.0, 0.1, 0.4]),
        chi2=torch.tensor([0.3, 0.3, 0.6]),
        logp_recorded=torch.tensor([-1.0, -2.3, -0.5]),
        surprise=torch.tensor([1.0, 1.0, -4.0]),
        surprise_cgf=torch.tensor([[t * t / 2, t * t / 2, t * t] for t in THETAS]).T,
        tail_cap=torch.tensor([0.2, 0.1, 0.0]),
    )
    found = measured(rollouts, scored)
    assert found.kl_mean == pytest.approx(0.3)
    assert found.kl_max == pytest.approx(0.6)
    assert found.tv_mean == pytest.approx(0.5 / 3)
    assert found.tv_max == pytest.approx(0.4)
    assert found.abs_log_ratio_max == pytest.approx(0.2)
    ratios = [math.exp(-0.1), math.exp(0.2), 1.0]
    assert found.chi2_token == pytest.approx(sum(r * r for r in ratios) / 3 - 1)
    assert found.chi2_exact == pytest.approx(0.4)
    assert found.record_deviation == pytest.approx(0.1)
    assert found.drawn_z == pytest.approx(-2 / math.sqrt(4))
    assert (found.tail_log_ratio_cap, found.tail_log_ratio_cap_all) == (pytest.approx(0.2), pytest.approx(0.2))  # fmt: skip
    # Residuals 0.1 - 0.3 + 0.2 - 0.3 = -0.3 and 0.3: sqrt(2 / 1 * 0.18) / 3.
    assert found.kl_se == pytest.approx(math.sqrt(0.36) / 3)
    assert found.metrics["divergence/kl_rollout_old_mean"] == pytest.approx(0.3)
    assert not [name for name in found.metrics if name.startswith("staleness/")]


def test_what_the_evidence_does_not_say_is_missing_not_zero():
    found = measured(made_up([-1.0], [1]), Scored(torch.tensor([-1.0]), torch.ones(1)))
    for name in ("kl_mean", "kl_max", "tv_max", "kl_se", "record_deviation", "drawn_z", "tv_p95"):
        assert math.isnan(getattr(found, name)), name
    assert found.tail_log_ratio_cap is None


def test_the_clustered_error_is_the_plain_one_for_sequences_of_one_token():
    x = torch.randn(50, generator=torch.Generator().manual_seed(0))
    rollouts = made_up([-1.0] * 50, [1] * 50)
    log = logged(rollouts, Scored(torch.full((50,), -1.0), torch.ones(50)))
    assert clustered_error(x, log.segments) == pytest.approx(float(x.std() / math.sqrt(50)), rel=1e-6)


def test_the_cap_on_the_tail_is_the_smallest_that_covers():
    v, n = 300, 40
    generator = torch.Generator().manual_seed(1)
    rollout = 2 * torch.randn(n, v, generator=generator)
    train = rollout + 0.2 * torch.randn(n, v, generator=generator)
    log_mu, log_pi = rollout.log_softmax(-1), train.log_softmax(-1)
    tokens = torch.multinomial(log_mu.exp(), 1, generator=generator).squeeze(1)
    caps = smallest_caps(*tail_sums(log_mu, log_pi, tokens))
    assert bool((caps > 0).all())
    top = log_mu.topk(rescore.TOP)
    record = (top.indices, top.values, tokens, log_mu.gather(1, tokens[:, None]).squeeze(1))
    exact = (log_mu.exp() * (log_mu - log_pi)).sum(1)
    compared = 0
    for i in range(n):
        row = tuple(x[i : i + 1] for x in record)
        for factor, covers in ((1.01, True), (0.97, False)):
            kl, _ = topk_divergences(*row, train[i : i + 1], tail_log_ratio_cap=factor * float(caps[i]))  # fmt: skip
            if bool(kl.refuted[0]):
                continue  # there, the upper end does without the cap
            assert (float(kl.hi[0]) >= float(exact[i])) is covers, (i, factor)
            compared += 1
    assert compared >= n


def test_without_a_tail_there_is_no_cap():
    log_mu = torch.randn(3, rescore.TOP).log_softmax(-1)
    log_pi = torch.randn(3, rescore.TOP).log_softmax(-1)
    assert smallest_caps(*tail_sums(log_mu, log_pi, torch.zeros(3, dtype=torch.int64))).tolist() == [0.0] * 3


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
def test_a_float32_engine_against_itself_differs_by_nothing(bench, temperature):
    sampling = Sampling(max_tokens=16, temperature=temperature, stop_token_ids=(1,))
    found = measure(bench, bench.rollouts(FLOAT32, sampling=sampling), FLOAT32, details=True)
    assert found.tokens > 100
    assert found.kl_max < 1e-6
    assert found.tv_max < 1e-5
    assert found.abs_log_ratio_max < 1e-4
    assert found.record_deviation < 1e-5
    assert abs(found.drawn_z) < 5


def test_hidden_states_and_full_distributions_measure_the_same(bench, monkeypatch):
    full = measure(bench, bench.rollouts(BFLOAT16), FLOAT32)
    monkeypatch.setitem(pair.FULL_ENTRIES, "transformers", 10)
    hidden = measure(bench, bench.rollouts(BFLOAT16, repeat=7), FLOAT32)
    assert full.tokens == hidden.tokens > 100
    assert hidden.kl_mean == pytest.approx(full.kl_mean, rel=0.02)
    assert hidden.kl_max == pytest.approx(full.kl_max, rel=0.1)


def test_pieces_and_their_order_change_nothing(bench, monkeypatch):
    rollouts = bench.rollouts(BFLOAT16)
    whole = bench.score(rollouts, FLOAT32, details=True)
    monkeypatch.setattr(rescore, "LOGITS", VOCAB * 40)
    monkeypatch.setattr(rescore, "CHUNK", VOCAB * 3)
    pieces = bench.score(rollouts, FLOAT32, details=True)
    for name, a, b in zip(Scored._fields, whole, pieces, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-6, msg=name)
    order = torch.randperm(rollouts.num_sequences, generator=torch.Generator().manual_seed(0))
    moved = rescored(bench.model, rollouts.select(order))
    parts = moved.kl.split(rollouts.lengths[order].tolist())
    back = torch.cat([parts[i] for i in order.argsort().tolist()])
    torch.testing.assert_close(back, whole.kl, rtol=1e-3, atol=2e-6)


def test_the_surprise_of_a_token_has_mean_zero_and_the_stated_moments(bench):
    """By enumeration: sum mu (log mu + H) = 0, and log sum mu e^(theta (log mu + H))."""
    rollouts = bench.rollouts(FLOAT32)
    scored = bench.score(rollouts, FLOAT32, details=True)
    mu = rollouts.evidence.logp.double().log_softmax(-1)
    surprise = mu + -(mu.exp() * mu).sum(1, keepdim=True)
    assert float((mu.exp() * surprise).sum(1).abs().max()) < 1e-6
    cgf = torch.stack([(mu.exp() * (t * surprise).exp()).sum(1).log() for t in THETAS], dim=1)
    torch.testing.assert_close(scored.surprise_cgf, cgf, rtol=1e-3, atol=1e-7)
    drawn = surprise.gather(1, rollouts.tokens[:, None]).squeeze(1).float()
    torch.testing.assert_close(scored.surprise, drawn, rtol=1e-3, atol=1e-5)
    assert len(drawn) > 100


MAX_Z = load_rules().limits["drawn_z"]


@pytest.mark.parametrize("rare", [1e-2, 1e-3, 1e-4])
def test_nearly_sure_tokens_are_no_alarm(rare):
    """20,000 honest draws of 200 tokens each, another token than the likely one with a small chance."""
    checks, tokens = 20_000, 200
    log_mu = torch.tensor([[1 - rare, rare]], dtype=torch.float64).log()
    entropy = -(log_mu.exp() * log_mu).sum()
    cgf = surprise_cgf(log_mu).expand(tokens, -1)
    events = torch.binomial(torch.full((checks,), float(tokens)), torch.tensor(rare), generator=torch.Generator().manual_seed(0))  # fmt: skip
    variance = tokens * float((log_mu.exp() * (log_mu + entropy).square()).sum())
    alarms = {"ours": 0, "normal": 0}
    for k, count in zip(*(x.tolist() for x in events.unique(return_counts=True)), strict=True):
        surprise = torch.full((tokens,), float(log_mu[0, 0] + entropy)).double()
        surprise[: int(k)] = log_mu[0, 1] + entropy
        scored = Scored(log_mu[0, :1], log_mu[0, :1], surprise=surprise, surprise_cgf=cgf)
        alarms["ours"] += count * (abs(surprise_z(scored)) > MAX_Z)
        alarms["normal"] += count * (abs(float(surprise.sum())) / math.sqrt(variance) > MAX_Z)
    assert alarms["ours"] <= 1  # one in 130,000 at most
    if rare < 1e-2:
        assert alarms["normal"] > 10  # what a normal approximation would do


def test_tokens_that_were_not_drawn_from_the_record_alarm():
    """Drawn at temperature 1, recorded at 0.7: 2,000 tokens over 50."""
    g = torch.Generator().manual_seed(0)
    z = 2 * torch.randn(2000, 50, generator=g)
    tokens = torch.multinomial(z.softmax(-1), 1, generator=g)
    log_mu = (z / 0.7).double().log_softmax(-1)
    surprise = log_mu.gather(1, tokens).squeeze(1) - (log_mu.exp() * log_mu).sum(1)
    scored = Scored(surprise, surprise, surprise=surprise, surprise_cgf=surprise_cgf(log_mu))
    assert surprise_z(scored) < -MAX_Z


def test_wider_arithmetic_comes_closer(bench):
    """float16 has 3 more mantissa bits than bfloat16: KL goes with the square of the rounding."""
    kl = {d: measure(bench, bench.rollouts(EngineSpec("transformers", d)), FLOAT32).kl_mean for d in ("float16", "bfloat16")}  # fmt: skip
    assert kl["float16"] < kl["bfloat16"] / 8
    assert isinstance(measure(bench, bench.rollouts(BFLOAT16), BFLOAT16), Measured)


def test_the_cap_on_a_tail_that_one_policy_has_more_of():
    """20 known tokens, and a tail of 100 with r = 0.2 and s = 0.05: the two masses are not alike."""
    mu = torch.tensor([0.04] * 20 + [0.002] * 100)
    pi = torch.tensor([0.0475] * 20 + [0.0005] * 100)
    cap = float(smallest_caps(*tail_sums(mu.log()[None], pi.log()[None], torch.tensor([0]))))
    # sum mu log(mu / pi) - mu + pi over the tail, and the bound that is to equal it.
    terms = 0.2 * math.log(4) - 0.2 + 0.05
    bound = cap * math.tanh(cap / 2) * 0.05 + (cap / math.tanh(cap) - 1) * (0.2 - 0.05)
    assert bound == pytest.approx(terms, rel=1e-4)
    assert cap == pytest.approx(math.log(4), rel=0.3)


def test_a_token_beyond_the_trainers_vocabulary_is_named():
    with bench_of(count=2) as bench:
        drawn = bench.rollouts(FLOAT32)
        tokens = drawn.tokens.clone()
        tokens[3] = 71
        with pytest.raises(EvidenceError, match=r"token 71.*64 tokens"):
            measure(bench, drawn.with_(tokens=tokens, evidence=None), FLOAT32)


def test_likeliest_tokens_give_certified_ends_around_the_exact_kl(bench):
    """And a limit is held against the estimate of the drawn tokens, unless it is certain that the KL is above."""
    full, few = (bench.rollouts(BFLOAT16, evidence=kind) for kind in ("full", 8))
    exact, told = measure(bench, full, FLOAT32), measure(bench, few, FLOAT32)
    assert math.isnan(exact.kl_low)
    assert math.isnan(told.kl_mean)
    assert 0 <= told.kl_low <= exact.kl_mean <= told.kl_high < math.inf
    assert exact.kl_known == exact.kl_mean
    assert told.kl_known == told.metrics["mismatch/k3"] > 0
    assert told.within(None)
    assert told.within(2 * told.kl_known)
    assert not told.within(told.kl_known / 2)
    assert not replace(told, kl_low=1.0, kl_high=2.0).within(0.5), "certain, though the estimate is below"
    size = conclusion(told, [], level="ok", pair="a against b").details[0]
    assert "estimated from the drawn tokens" in size
    assert "for certain" in size
