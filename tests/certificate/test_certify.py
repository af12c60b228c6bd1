"""From a batch to a certificate: it is right as often as it says, and says what it rests on."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from offdrift.certificate import samples
from offdrift.certificate.batch import BatchEvidence, HostEvidence
from offdrift.certificate.bounds import all_bounds
from offdrift.certificate.certify import LOGGED, certify
from offdrift.certificate.guarantees import VIOLATED, Certificate
from offdrift.certificate.regions import TrustRegion
from offdrift.certificate.samples import K3_CAP, SHARES, power_curve, unit_rewards, variables
from offdrift.divergence.evidence import Divergence
from offdrift.divergence.interval import topk_divergences
from offdrift.errors import BadValueError, MethodError
from offdrift.logprobs import LogProbs
from offdrift.segments import Segments
from offdrift_lab.exact import divergences, perturbed, random_policies, returns
from offdrift_lab.exact.policy import TabularPolicy, token_kl, token_tv

INF = math.inf
PROMPTS, HORIZON = 30, 4


class World:
    """A population of prompts, each with its own pair of policies and rewards, known exactly."""

    def __init__(self, scale: float, seed: int = 0, *, better: bool = False) -> None:
        g = torch.Generator().manual_seed(seed)
        self.mu = random_policies(PROMPTS, vocab=3, horizon=HORIZON, generator=g)
        self.pi = perturbed(self.mu, scale=scale, generator=g)
        self.rewards = (torch.rand(PROMPTS, 3**HORIZON, generator=g) < 0.5).double()
        if better:  # reward what the current policy does more often
            self.rewards = (self.pi.law() > self.mu.law()).double()
        d, r = divergences(self.mu, self.pi), returns(self.mu, self.pi, self.rewards)
        self.gain = float((r.current - r.rollout).mean())
        self.surrogate = float(r.surrogate.mean())
        self.kl_max, self.tv_max = float(d.kl_max.max()), float(d.tv_max.max())
        self.kl_seq, self.mean_tv = float(d.kl_seq.mean()), d.mean_tv.mean(0).numpy()
        levels = list(zip(self.mu.levels, self.pi.levels))
        self.kl = [token_kl(a, b) for a, b in levels]
        self.tv = [token_tv(a, b) for a, b in levels]
        self.log_w = [b.log() - a.log() for a, b in levels]

    def draw(self, prompts: int, answers: int, g: torch.Generator, **kwargs) -> BatchEvidence:
        """Independent prompts with some answers each, and their exact evidence."""
        prompt = torch.randint(PROMPTS, (prompts,), generator=g)
        who = prompt.repeat_interleave(answers)
        sequence = torch.multinomial(self.mu.law()[who], 1, generator=g).squeeze(1)
        log_w, kl, tv = self.along(who, sequence)
        n = len(who) * HORIZON
        rollout = torch.full((n,), -5.0, dtype=torch.float64)
        groups = torch.arange(prompts).repeat_interleave(answers)
        lp = LogProbs(rollout, Segments.from_lengths([HORIZON] * len(who), group_ids=groups), rollout + log_w)
        rewards = self.rewards[who, sequence]
        exact = {k: Divergence.exact(k, x) for k, x in (("kl_rollout_current", kl), ("tv_rollout_current", tv))}
        return BatchEvidence.of(lp, rewards, divergences=exact, **kwargs)

    def along(self, who: Tensor, sequence: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """log w, KL and TV at every token of the drawn sequences, packed."""
        found = []
        for t in range(HORIZON):
            prefix = sequence // 3 ** (HORIZON - 1 - t)
            context, token = prefix // 3, prefix % 3
            found.append([self.log_w[t][who, context, token], self.kl[t][who, context], self.tv[t][who, context]])
        log_w, kl, tv = (torch.stack(x, 1).flatten() for x in zip(*found))
        return log_w, kl, tv

    def every_sequence(self) -> tuple[LogProbs, dict[str, Divergence], Tensor, Tensor]:
        """Every sequence of every prompt once: log-probs, exact evidence, probabilities under mu, and rewards."""
        who = torch.arange(PROMPTS).repeat_interleave(3**HORIZON)
        log_w, kl, tv = self.along(who, torch.arange(3**HORIZON).repeat(PROMPTS))
        rollout = torch.full_like(log_w, -5.0)
        lp = LogProbs(rollout, Segments.from_lengths([HORIZON] * len(who)), rollout + log_w)
        exact = {k: Divergence.exact(k, x) for k, x in (("kl_rollout_current", kl), ("tv_rollout_current", tv))}
        return lp, exact, self.mu.law().flatten(), self.rewards.flatten()


RUNS, ALPHA = 150, 0.2
MISSES = RUNS * ALPHA + 3 * math.sqrt(RUNS * ALPHA * (1 - ALPHA))


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize("constants", ["sharp", "paper"])
@pytest.mark.parametrize(("scale", "answers"), [(0.05, 4), (0.3, 4), (1.0, 1)])
def test_no_statement_is_wrong_more_often_than_alpha(scale, answers, constants):
    world = World(scale)
    premise = TrustRegion(horizon=HORIZON, delta=world.kl_max, eps=world.tv_max)
    shift = float((world.mean_tv * premise.weights()).sum())
    g, wrong = torch.Generator().manual_seed(1), {}
    for _ in range(RUNS):
        batch = world.draw(60, answers, g, region=premise)
        c = certify(batch, alpha=ALPHA, constants=constants)
        e = c.estimates
        assert c.precondition == "not falsified"
        assert c.unseen is not None
        statements = {
            "gain": c.gain_low <= world.gain,
            "surrogate": e["surrogate"].low <= world.surrogate,
            "kl_seq": world.kl_seq <= e["kl_seq"].high,
            "prefix_kl": world.kl_seq <= e["prefix_kl"].high,
            "shift": shift <= e["shift"].high,
            "prefix_shift": shift <= e["prefix_shift"].high,
            "bound": abs(world.gain - world.surrogate) <= c.bound.value,
        }
        for name, right in {**statements, "all": all(statements.values())}.items():
            wrong[name] = wrong.get(name, 0) + (not right)
        assert all(c.gain_of(x) <= c.gain_low for x in c.guarantees)
    assert len(wrong) == 8
    assert max(wrong.values()) <= MISSES, wrong


@pytest.mark.usefixtures("without_shape_checks")
def test_a_region_of_tv_alone_has_one_premise_and_its_bounds_hold():
    """delta is infinite: B* comes from eps and measured TV, and only TV is asked whether the region was left."""
    world, g, runs = World(0.3), torch.Generator().manual_seed(6), 20
    wrong = 0
    for left, eps in ((False, world.tv_max), (True, world.tv_max / 2)):
        region = TrustRegion(horizon=HORIZON, delta=INF, eps=eps)
        for _ in range(runs):
            c = certify(world.draw(60, 4, g, region=region), alpha=ALPHA)
            assert c.premises == {"tv": "falsified" if left else "not falsified"}
            assert c.certified or (f"TV <= {eps:g} is {VIOLATED}" in c.verdict) is left
            assert (c.estimates["acceptance"].mean < 1) is left
            assert {x.name for x in c.guarantees} == {"direct", "TRM"}
            if left:
                assert c.bound is None
            else:
                assert c.bound is not None
                assert abs(world.gain - world.surrogate) <= c.bound.value < 1
            wrong += any(c.gain_of(x) > world.gain for x in c.guarantees)
    mean = 2 * runs * ALPHA
    assert wrong <= mean + 3 * math.sqrt(mean * (1 - ALPHA))


def test_means_are_lower_ends_whichever_tokens_the_engine_did_not_score():
    """Enumerated: what is not scored depends on the token that was drawn, to each sum's disadvantage."""
    world = World(0.3, seed=5)
    scored, exact, law, rewards = world.every_sequence()
    rollout, log_w = scored.logp_rollout, scored.current - scored.logp_rollout
    kl, k3 = exact["kl_rollout_current"].lo, log_w.expm1() - log_w
    first = scored.segments.position == 0
    holes = {"first": first & (k3 < kl), "up": log_w > 0.2, "down": log_w < -0.2, "none": k3 < 0}
    for delta in (world.kl_max, float(kl.median())):
        region = TrustRegion(horizon=HORIZON, delta=delta)
        for name, hidden in holes.items():
            hole = rollout.masked_fill(hidden, -INF)
            lp = LogProbs.pack(hole, scored.current, segments=scored.segments)
            assert (lp.unscored is None) == (name == "none")
            e = BatchEvidence.of(lp, rewards, region=region, divergences=exact)
            product = e.column("log_product").exp().clamp(max=2.0)
            assert (law * rewards * (product - 1)).sum() / PROMPTS <= world.gain
            assert (law * rewards * e.column("excess")).sum() / PROMPTS <= world.surrogate + 1e-12
            accepted = e.column("kl_high") <= delta
            spent = (law * scored.segments.sum(k3) * accepted).view(PROMPTS, -1).sum(1)
            limit = (law * e.column("prefix_kl")).view(PROMPTS, -1).sum(1)
            assert (spent <= limit + 1e-12).all(), (name, delta)
            omega = torch.tensor(region.weights()).repeat(len(rewards))
            for rule in (
                accepted,
                accepted & (torch.arange(len(accepted)) % 3 > 0),
            ):  # what lies inside, and less of it
                host = e.to_host()
                error = variables(host, rewards.numpy(), rule.numpy(), region)["prefix_error"].values
                overstated = rule * rewards * (e.column("excess") - e.column("log_product").expm1())
                assert float((law * overstated.where(rule, 0.0)).sum()) <= float(law.numpy() @ error) + 1e-12
            churn = (law * scored.segments.sum(omega * log_w.expm1().abs() / 2) * accepted).view(PROMPTS, -1).sum(1)
            assert (churn <= (law * e.column("prefix_shift")).view(PROMPTS, -1).sum(1) + 1e-12).all(), (name, delta)
            assert float(spent.max()) > 0


@pytest.mark.parametrize("scale", [0.3, 2.0])
def test_what_the_masked_surrogate_overstates_is_the_mean_of_its_variable(scale):
    """Enumerated, for (mu, pi'): L'_masked - E[M R (w - 1)], to every digit; and never less where sequences are cut."""
    world = World(scale, seed=5)
    lp, exact, law, rewards = world.every_sequence()
    law, kl = law.numpy() / PROMPTS, exact["kl_rollout_current"].lo
    del exact["tv_rollout_current"]
    differs = 0
    for delta in (world.kl_max, float(kl.median())):
        region = TrustRegion(horizon=HORIZON, delta=delta)
        host = BatchEvidence.of(lp, rewards, region=region, divergences=exact).to_host()
        accepted = host["kl_high"] <= delta
        reward = np.where(accepted, host["reward"], 0.0)
        overstated = law @ (reward * (host["excess"] - np.expm1(host["log_product"])))
        x = variables(host, host["reward"], accepted, region)["prefix_error"]
        assert x.values.max() <= x.high
        assert law @ x.values >= overstated - 1e-15
        whole = np.expm1(host["log_product"]) - host["log_product"]
        uncut = max(host["prefix_k3"].max(), (reward * whole).max()) < K3_CAP
        assert not uncut or law @ x.values == pytest.approx(overstated, abs=1e-14)
        assert uncut == (scale == 0.3)
        assert law @ x.values < 0.7 * (law @ host["prefix_kl"])
        differs += accepted.all()
    assert differs == 1


def test_a_certificate_says_that_tokens_were_not_scored():
    """Policies that agree wherever they were scored, in a batch with a hole in half of it."""
    rollout = torch.full((400,), -1.0)
    segments = Segments.from_lengths([1] * 400)
    current = LogProbs.pack(rollout, rollout, segments=segments)
    unscored = torch.arange(400) % 2 == 0
    hole = LogProbs.pack(rollout.masked_fill(unscored, -INF), rollout, segments=segments)
    kl = {"kl_rollout_current": Divergence.exact("kl_rollout_current", torch.zeros(400))}
    region = TrustRegion(horizon=4, delta=0.05, tau=0.1)
    whole, holed = (
        certify(BatchEvidence.of(lp, torch.ones(400), region=region, divergences=kl)) for lp in (current, hole)
    )
    assert (whole.unscored, holed.unscored) == (0, 200)
    assert holed.estimates["gain"].mean == pytest.approx(-0.5)
    assert holed.estimates["surrogate"].mean == pytest.approx(-0.5)
    assert holed.estimates["acceptance"].mean == pytest.approx(0.5)
    assert holed.estimates["prefix_kl"].mean == pytest.approx(0.025)
    assert whole.unseen is not None
    assert holed.unseen is not None
    assert whole.unseen < 0.02 < 0.5 < holed.unseen
    assert holed.gain_low < -0.5 < whole.gain_low
    assert set(whole.asymptotic) == {"gain", "surrogate", "surrogate_masked"}
    assert holed.asymptotic == {}
    assert "200 of 400 sequences have a token that the engine did not score" in holed.verdict
    assert holed.as_dict()["unscored"] == 200


@pytest.mark.usefixtures("without_shape_checks")
def test_it_is_right_where_the_region_is_left_and_ratios_are_cut():
    # no premise holds: a third of all sequences leave the region, ratios exceed the cap
    world = World(1.0, seed=3)
    region = TrustRegion(horizon=HORIZON, delta=0.4, tau=1.0)
    g, wrong, seen = torch.Generator().manual_seed(2), 0, 0
    for _ in range(RUNS):
        c = certify(world.draw(60, 2, g, region=region), alpha=ALPHA)
        seen += c.precondition == "falsified"
        wrong += c.gain_low > world.gain
        assert c.bound is None
        assert {x.name for x in c.guarantees} == {"direct", "TRM", "masked"}
        assert all(x.provided == () for x in c.guarantees)
    assert seen == RUNS
    assert wrong <= MISSES


def test_trm_needs_no_premise_where_short_answers_change_a_lot_and_whole_ratios_say_more():
    """One token: mu finds the answer in one of ten, pi in four; a prompt outside the region changes everything."""
    n, g = 4000, torch.Generator().manual_seed(0)
    outside = torch.arange(n) % 20 == 0
    mu, pi = torch.full((n,), 0.1).double(), torch.where(outside, 1e-9, 0.4).double()
    right = torch.rand(n, generator=g, dtype=torch.float64) < mu
    logp_rollout, logp = (torch.where(right, p, 1 - p).log() for p in (mu, pi))
    kl = mu * (mu / pi).log() + (1 - mu) * ((1 - mu) / (1 - pi)).log()
    lp = LogProbs(logp_rollout, Segments.from_lengths([1] * n), logp)
    region = TrustRegion(horizon=1, delta=0.3)
    exact = {"kl_rollout_current": Divergence.exact("kl_rollout_current", kl)}
    c = certify(BatchEvidence.of(lp, right.double(), region=region, divergences=exact))
    gain = float((pi - mu).mean())
    assert c.precondition == "falsified"
    bounds = {x.name: c.gain_of(x) for x in c.guarantees if x.provided == ()}
    assert 0.15 < bounds["TRM"] < bounds["direct"] == c.gain_low <= gain
    # Ratios of 4 are whole: cut at 2, the gain's mean would be .1 (.95 (2 - 1) - .05) = .09.
    assert bounds["direct"] > 0.2


@pytest.mark.usefixtures("without_shape_checks")
def test_a_real_improvement_is_certified_from_enough_prompts():
    world = World(0.5, better=True)
    assert world.gain > 0.1
    region = TrustRegion(horizon=HORIZON, delta=world.kl_max)
    c = certify(world.draw(2000, 2, torch.Generator().manual_seed(3), region=region))
    assert c.certified
    assert 0.4 * world.gain < c.gain_low < world.gain
    assert c.verdict.startswith(
        f"J improves by at least {c.gain_low:.4g} with probability 0.95 (one policy, one look; direct)"
    )
    # What the masked surrogate overstates is measured, which says more than the KL of accepted prefixes alone.
    trm = next(g for g in c.guarantees if g.name == "TRM")
    direct = next(g for g in c.guarantees if g.name == "direct")
    assert trm.error == c.estimates["prefix_error"].high < 0.5 * c.estimates["prefix_kl"].high
    assert c.gain_of(direct) > c.gain_of(trm) > c.gain_of(replace(trm, error=c.estimates["prefix_kl"].high))
    assert "did not learn from these prompts" in c.verdict
    assert "of k certificates" in c.verdict
    assert c.as_dict()["holds_for"] == "one policy, one look"
    assert c.as_metrics()["certificate/certified"] == 1


@pytest.mark.usefixtures("without_shape_checks")
def test_unseen_limits_what_the_batch_did_not_show():
    # one prompt in thirty has sequences outside a region that the others never leave
    world = World(0.3, seed=5)
    per_prompt = torch.cat(world.kl, 1).amax(1).sort().values
    region = TrustRegion(horizon=HORIZON, delta=float(per_prompt[-2] + per_prompt[-1]) / 2)
    _, exact, law, _ = world.every_sequence()
    leaves = (exact["kl_rollout_current"].lo.view(-1, HORIZON) > region.delta).any(-1)
    q = float((law * leaves).sum() / PROMPTS)
    assert 0 < q < 0.1
    g, wrong, none_seen = torch.Generator().manual_seed(4), 0, 0
    for _ in range(RUNS):
        c = certify(world.draw(30, 4, g, region=region), alpha=ALPHA)
        assert c.unseen is not None
        wrong += q > c.unseen
        if c.precondition == "not falsified":
            none_seen += 1
            assert c.unseen == pytest.approx(1 - (ALPHA / 72) ** (1 / 30))  # only "direct" can win
    assert none_seen > 5
    assert wrong <= MISSES


# -- one batch, by hand -----------------------------------------------------------------------

LENGTHS, T = [3, 1], 5
KL = [0.01, 0.02, 0.03, 0.04]
TV = [0.05, 0.06, 0.07, 0.08]


def batch(
    kl=KL, tv=TV, make=Divergence.exact, rewards=(1.0, 0.0), delta=0.05, eps=None, copies=1, **kwargs
) -> BatchEvidence:
    double = lambda x: torch.tensor(list(x) * copies, dtype=torch.float64)  # noqa: E731
    rollout = double([-1.0] * 4)
    lp = LogProbs.pack(
        rollout, rollout + double([0.1, -0.1, 0.05, 0.0]), segments=Segments.from_lengths(LENGTHS * copies)
    )
    found = {
        k: make(k, double(x)) for k, x in (("kl_rollout_current", kl), ("tv_rollout_current", tv)) if x is not None
    }
    region = TrustRegion(horizon=T, delta=delta, eps=eps)
    return BatchEvidence.of(
        lp, None if rewards is None else double(rewards), region=region, divergences=found, **kwargs
    )


def test_positions_after_a_sequences_end_count_as_zero_divergence():
    c = certify(batch())
    assert c.mean_tv == pytest.approx([(0.05 + 0.08) / 2, 0.06 / 2, 0.07 / 2, 0, 0])
    assert c.kl_seq == pytest.approx(0.1 / 2)
    assert c.estimates["surrogate"].mean == pytest.approx((math.expm1(0.1) + math.expm1(-0.1) + math.expm1(0.05)) / 2)
    assert c.estimates["gain"].mean == pytest.approx(math.expm1(0.05) / 2)
    assert c.delta_seen == (0.04, 0.04)
    assert c.eps_seen == (0.08, 0.08)
    assert (c.sequences, c.prompts) == (2, 2)


@pytest.mark.parametrize("constants", ["paper", "sharp"])
def test_the_bound_is_the_unified_one_at_the_upper_ends(constants):
    c = certify(batch(copies=50), constants=constants)
    e, factor = c.estimates, {"paper": 4, "sharp": 2}[constants]
    candidates = {
        b.name: b.value
        for b in all_bounds(horizon=T, delta=0.05, kl_seq=e["kl_seq"].high, constants=constants)
        if b.unified
    }
    candidates["adaptive"] = factor * e["shift"].high
    if constants == "sharp":
        candidates["sequence_kl"] = e["kl_seq"].high
    assert c.bound.value == pytest.approx(min(candidates.values()))
    assert c.bound.name == min(candidates, key=candidates.__getitem__)
    assert c.margin == pytest.approx(e["surrogate"].mean - c.bound.value)
    # the adaptive sum of the batch itself, eps by Pinsker
    omega = np.sqrt(np.array([4, 3, 2]) * 0.025)
    assert e["shift"].mean == pytest.approx((omega @ [0.05, 0.06, 0.07] + omega[0] * 0.08) / 2)


@pytest.mark.parametrize(("delta", "said"), [(0.04, "not falsified"), (0.0399, "falsified")])
def test_one_token_above_delta_falsifies_the_precondition(delta, said):
    c = certify(batch(delta=delta))
    assert c.precondition == said
    assert (c.bound is None) == (said == "falsified")
    assert c.as_metrics()["certificate/falsified"] == (said == "falsified")
    if said == "falsified":
        assert f"KL <= 0.0399 is {VIOLATED}" in c.verdict


def test_each_premise_has_its_own_status():
    assert certify(batch(eps=0.07)).premises == {"kl": "not falsified", "tv": "falsified"}
    assert certify(batch(eps=0.08)).premises == {"kl": "not falsified", "tv": "not falsified"}
    assert certify(batch(eps=0.08), assume=["tv"]).premises["tv"] == "known"
    assert certify(batch(eps=0.07), assume=["tv"]).premises["tv"] == "falsified"
    assert certify(batch(delta=INF, eps=0.08)).premises == {"tv": "not falsified"}
    assert certify(batch(delta=INF)).premises == {}  # nothing is asked, nothing can fall
    assert certify(batch(delta=INF)).precondition == "known"
    assert certify(batch(tv=None, eps=0.08)).premises == {"kl": "not falsified", "tv": "unknown"}


@pytest.mark.parametrize("bad", [INF, math.nan])
def test_infinite_and_nan_divergences_falsify(bad):
    assert certify(batch(kl=[0.01, bad, 0.03, 0.04])).precondition == "falsified"


def test_intervals_falsify_by_their_lower_ends_and_bound_by_their_upper():
    interval = lambda name, x: Divergence.interval(name, x, (x + 1.0).clamp(max=1.0))  # noqa: E731
    exact, wide = certify(batch(copies=50)), certify(batch(copies=50, make=interval))
    assert certify(batch(make=interval, delta=0.035)).precondition == "falsified"
    assert wide.grades == {"kl": "interval", "tv": "interval"}
    assert wide.precondition == "not falsified"
    assert wide.bound.value > exact.bound.value
    assert wide.unseen == 1  # every token's upper end is above delta: none surely inside
    assert wide.estimates["acceptance"].mean == 0
    assert wide.delta_seen == (0.04, 1.0)
    limited = certify(batch(copies=50, make=interval, delta=INF, eps=0.1))  # TV from 0.08 up to 1
    assert (limited.premises, limited.unseen) == ({"tv": "not falsified"}, 1)
    assert limited.estimates["acceptance"].mean == 0


def capped(refuted: int | None):
    def make(name: str, x: Tensor) -> Divergence:
        flags = torch.zeros_like(x, dtype=torch.bool)
        if refuted is not None:
            flags[refuted] = True
        return Divergence.capped(name, x, x, assumes="a cap of 1 nat", refuted=flags)

    return make


def test_what_the_evidence_assumes_is_stated_and_nothing_stands_on_it_once_refuted():
    stands, fell = certify(batch(make=capped(None))), certify(batch(make=capped(2)))
    assert stands.grades == {"kl": "capped interval", "tv": "capped interval"}
    assert stands.assumes == {"a cap of 1 nat"}
    assert stands.bound is not None
    assert {g.name for g in stands.guarantees} == {"direct", "TRM"}
    assert fell.refuted == 1
    assert (fell.bound, fell.unseen) == (None, None)
    assert {g.name for g in fell.guarantees} == {"direct"}
    assert "1 sequences contradict a cap of 1 nat" in fell.verdict
    assert certify(batch(make=capped(2)), assume=["kl"]).bound is None


@pytest.mark.parametrize("make", [Divergence.sampled, None])
def test_without_distributions_only_the_direct_guarantee_is_left(make):
    c = certify(batch(make=make) if make else batch(kl=None, tv=None))
    assert c.bound is None
    assert c.precondition == "unknown"
    assert c.unseen is None
    assert [g.name for g in c.guarantees] == ["direct"]
    metrics = c.as_metrics()
    for name in ("bound", "row", "falsified", "delta_hat", "eps_hat", "unseen", "kl_seq"):
        assert metrics[f"certificate/{name}"] is None
    assert certify(batch(kl=None, tv=None), assume=["kl"]).bound is not None


def test_agreeing_policies_are_certified_not_to_lose_more_than_the_unseen():
    zero = [0.0] * 4
    c = certify(batch(kl=zero, tv=zero, copies=200))
    assert c.bound.value < 0.02
    # 400 sequences, half of them with rewards: nothing is lost but what was not seen
    lp = LogProbs.pack(torch.full((400,), -1.0), torch.full((400,), -1.0), segments=Segments.from_lengths([1] * 400))
    same = BatchEvidence.of(lp, torch.ones(400), region=TrustRegion(horizon=1, delta=0.1))
    assert -0.02 < certify(same).gain_low < 0


def test_sequences_of_one_prompt_are_one_draw():
    one = certify(batch(copies=64))
    found = batch(copies=64)
    grouped = BatchEvidence(
        found.region, found.columns, torch.arange(128) // 16, found.tv_by_position, found.grades, True
    )
    many = certify(grouped)
    assert (one.prompts, many.prompts) == (128, 8)
    assert many.gain_low < one.gain_low - 0.05
    assert many.unseen is not None
    assert many.unseen > 10 * one.unseen
    assert {k: e.alpha for k, e in many.estimates.items()} == {k: e.alpha for k, e in one.estimates.items()}
    assert many.estimates["gain"].mean == pytest.approx(one.estimates["gain"].mean)


def test_the_order_of_pieces_does_not_matter():
    found = batch(copies=40)
    shuffled = torch.randperm(80, generator=torch.Generator().manual_seed(0))
    parts = [
        BatchEvidence(
            found.region, found.columns[rows], torch.arange(80)[rows], found.tv_by_position / 2, found.grades, True
        )
        for rows in shuffled.split(40)
    ]
    one, other = certify(parts[0].merge(parts[1])), certify(parts[1].merge(parts[0]))
    assert one.as_dict() == other.as_dict()


def test_a_batch_the_policy_learned_from_certifies_nothing():
    c = certify(batch(copies=50), fresh=False)
    assert c.gain_low == -INF
    assert not c.certified
    assert "learned from these very prompts" in c.verdict
    assert c.as_metrics()["certificate/gain_low"] is None


def test_without_rewards_the_bound_remains():
    c = certify(batch(rewards=None))
    assert c.bound is not None
    assert c.margin is None
    assert c.verdict == "no certificate: the batch has no rewards"
    assert "certificate/surrogate" in c.as_metrics()


def test_rewards_of_another_range_are_rescaled_when_told():
    unit = certify(batch(copies=50))
    wide = certify(batch(copies=50, rewards=(3.0, -2.0)), reward_range=(-2.0, 3.0))
    assert wide.gain_low == pytest.approx(5 * unit.gain_low)
    assert wide.bound.value == pytest.approx(5 * unit.bound.value)
    assert wide.estimates["kl_seq"] == unit.estimates["kl_seq"]
    assert wide.margin == pytest.approx(5 * unit.margin)


@pytest.mark.parametrize("rewards", [(1.0, 1.5), (1.0, -0.1), (1.0, math.nan), (1.0, INF)])
def test_rewards_outside_their_range_are_refused_by_name(rewards):
    with pytest.raises(BadValueError, match=r"reward of sequence 1 is .* outside \[0, 1\]"):
        certify(batch(rewards=rewards))


@pytest.mark.parametrize("bad", [(1.0, 0.0), (0.0, 0.0), (0.0, math.nan), (-INF, 0.0)])
def test_impossible_reward_ranges_are_refused(bad):
    with pytest.raises(BadValueError, match="reward_range"):
        certify(batch(), reward_range=bad)


def test_other_bad_input_is_refused_by_name():
    short = batch()
    object.__setattr__(short, "region", TrustRegion(horizon=2, delta=0.05))
    object.__setattr__(short, "tv_by_position", short.tv_by_position[:2])
    with pytest.raises(BadValueError, match="sequence 0 has 3 tokens, horizon = 2"):
        certify(short)
    with pytest.raises(BadValueError, match="alpha = 0"):
        certify(batch(), alpha=0.0)
    with pytest.raises(MethodError, match="constants = 'tight'"):
        certify(batch(), constants="tight")
    with pytest.raises(MethodError, match="assume='chi2'"):
        certify(batch(), assume=["chi2"])
    lp = LogProbs(torch.zeros(0), Segments.from_lengths([]), torch.zeros(0))
    with pytest.raises(BadValueError, match="no sequences"):
        certify(BatchEvidence.of(lp, region=TrustRegion(horizon=2, delta=0.05)))


def test_shares_of_alpha_are_all_of_it():
    assert math.fsum(SHARES.values()) == pytest.approx(1)
    c = certify(batch(), alpha=0.04)
    assert {k: e.alpha for k, e in c.estimates.items()} == pytest.approx(
        {k: 0.04 * s for k, s in SHARES.items() if k != "unseen"}
    )


def planned(gains: list[float]) -> dict[int, float]:
    """`power_curve` of one sequence a prompt with these gains, rewards 1."""
    columns = {"excess": np.array(gains), "log_product": np.log1p(gains)}
    return power_curve(HostEvidence(columns, None, np.zeros(0)), np.ones(len(gains)), alpha=0.05)


def test_a_plan_doubles_until_the_gain_is_all_but_certain(monkeypatch):
    assert planned([0.2] * 40) == {10: 0, 20: 1}
    curve = planned([-0.3] * 10 + [0.4] * 20)
    assert list(curve) == [8, 15, 30, 60, 120]
    *before, last = curve.values()
    assert 0.9 < max(before) <= 0.99 < last
    # At most 256 times the prompts there are, or the largest plan.
    assert list(planned([1e-6] * 4)) == [2**i for i in range(11)]
    monkeypatch.setattr(samples, "LARGEST_PLAN", 64)
    assert list(planned([1e-6] * 32)) == [8, 16, 32, 64]


@pytest.mark.parametrize("gain", [0.0, -0.1])
def test_no_larger_batch_is_planned_for_a_gain_that_was_not_seen(gain):
    assert list(planned([gain] * 40)) == [10, 20, 40]


@pytest.mark.parametrize(
    "made", [batch(), batch(kl=None, tv=None, rewards=None), batch(delta=0.001), batch(delta=INF, kl=[INF] * 4)]
)
@pytest.mark.parametrize("constants", ["sharp", "paper"])
def test_everything_is_json(made: BatchEvidence, constants: str):
    c: Certificate = certify(made, constants=constants)
    for found in (c.as_dict(), c.as_metrics()):
        assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert len(c.as_metrics()) == 20
    assert c.verdict.startswith("no certificate: ")


def test_every_logged_number_is_documented():
    assert list(certify(batch()).as_metrics()) == list(LOGGED)


def test_intervals_that_know_the_drawn_token_do_not_open_the_prefix_route():
    """The drawn token is part of what a top-k interval knows: its ends are not decided before it.

    Two tokens over {0, 1} and a third of probability 1e-12; the current policy prefers 1 less at
    first and more later, and pays for both. With top-1 evidence the accepted prefixes are those
    whose drawn tokens made the interval narrow, and their KL says too little.
    """
    tiny = 1e-12

    def row(q: float) -> list[float]:
        return [1 - q - tiny, q, tiny]

    mu = torch.tensor([row(0.2), row(0.45)], dtype=torch.float64)
    pi = torch.tensor([row(0.2 * 0.4), row(0.45 * 1.55)], dtype=torch.float64)
    truth = float(pi[0, 1] * pi[1, 1] - mu[0, 1] * mu[1, 1])
    n, g = 60_000, torch.Generator().manual_seed(0)
    drawn = torch.stack([torch.multinomial(m, n, replacement=True, generator=g) for m in mu], 1)
    place, tokens = torch.arange(2).repeat(n), drawn.reshape(-1)
    log_mu, log_pi = mu.log().float()[place], pi.log().float()[place]
    top = log_mu.topk(1)
    picked = [x.gather(1, tokens[:, None])[:, 0] for x in (log_mu, log_pi)]
    kl, tv = topk_divergences(top.indices, top.values, tokens, picked[0], log_pi)
    lp = LogProbs.pack(*picked, segments=Segments.from_lengths([2] * n))
    region = TrustRegion(horizon=2, delta=0.25)
    rewards = (drawn == 1).all(1).float()
    found = {kl.name: kl, tv.name: tv}
    said = certify(BatchEvidence.of(lp, rewards, region=region, divergences=found))
    assert said.gain_low <= truth
    assert all(g.name == "direct" or g.provided for g in said.guarantees)
    exact = Divergence.exact(kl.name, token_kl(mu, pi)[place])
    rigorous = certify(BatchEvidence.of(lp, rewards, region=region, divergences={kl.name: exact}))
    assert [g.provided for g in rigorous.guarantees if g.name == "TRM"] == [()]
    assert rigorous.gain_low <= truth


def test_files_in_order_of_time_are_not_taken_for_independent_draws():
    """Bets follow the order of the draws; numbering prompts by file must not decide an interval."""
    x = torch.cat([torch.zeros(500), torch.ones(500)])
    lp = LogProbs.pack(torch.full((1000,), -1.0), torch.full((1000,), -1.0), segments=Segments.from_lengths([1] * 1000))
    batch = BatchEvidence.of(lp, x, region=TrustRegion(horizon=1, delta=0.1, tau=0.0))
    found = certify(batch).estimates["gain"]
    assert found.low <= 0 <= found.high


def test_measured_surrogates_keep_the_lower_bound_where_the_rollout_policy_is_filtered():
    """mu cannot draw what pi can: the measured L' misses its reward, and J gains at least L' - B."""
    g = torch.Generator().manual_seed(3)
    checked = 0
    for _ in range(200):
        full = random_policies(1, vocab=3, horizon=3, spread=1.5, generator=g)
        pi = perturbed(full, scale=0.3, generator=g)
        levels = [level.where(level > level.amin(-1, keepdim=True), 0.0) for level in full.levels]
        mu = TabularPolicy(tuple(level / level.sum(-1, keepdim=True) for level in levels))
        rewards = torch.rand(1, 27, generator=g, dtype=torch.float64)
        exact, drift = returns(mu, pi, rewards), divergences(mu, pi)
        laws, ratios = mu.law()[0], torch.zeros(27, dtype=torch.float64)
        for t in range(3):
            context = torch.arange(27) // 3 ** (3 - t)
            token = torch.arange(27) // 3 ** (2 - t) % 3
            w = pi.levels[t][0, context, token] / mu.levels[t][0, context, token]
            ratios += w.where(w.isfinite(), 0.0) - 1
        measured = float((laws * rewards[0] * ratios).sum())
        gain = float(exact.current - exact.rollout)
        assert measured < float(exact.surrogate) - 1e-6
        assert abs(gain - measured) <= float(drift.kl_seq) + 1e-12  # two-sided, for either form
        rows = all_bounds(
            horizon=3, delta=float(drift.kl_max), eps=float(drift.tv_max), kl_seq=float(drift.kl_seq),
            tv_seq=float(drift.tv_seq), mean_tv=drift.mean_tv[0].numpy(), constants="sharp",
        )  # fmt: skip
        assert all(gain >= measured - b.value - 1e-12 for b in rows)
        checked += 1
    assert checked == 200


@pytest.mark.parametrize("kind", ["top 20", "top 20 under a cap", "whole"])
def test_top_k_evidence_that_says_nothing_says_what_to_record(kind: str):
    """No drift at all over a broad vocabulary: upper ends of ten nats, and advice."""
    z = 3.0 * torch.randn(64, 8000, generator=torch.Generator().manual_seed(0))
    logp, ids = (x[:, :20] for x in z.log_softmax(-1).topk(20))
    tokens = ids[:, 0]
    cap = 1e-3 if kind == "top 20 under a cap" else None
    kl, tv = topk_divergences(ids, logp, tokens, logp[:, 0], z, tail_log_ratio_cap=cap)
    if kind == "whole":
        kl, tv = (Divergence.exact(d.name, torch.zeros(64)) for d in (kl, tv))
    lp = LogProbs.pack(logp[:, 0], logp[:, 0], segments=Segments.from_lengths([1] * 64))
    region = TrustRegion(horizon=1, delta=0.05)
    batch = BatchEvidence.of(lp, torch.ones(64), region=region, divergences={d.name: d for d in (kl, tv)})
    found = certify(batch)
    if kind == "top 20":
        assert found.delta_seen[0] == 0.0
        assert found.delta_seen[1] > 5
        assert "Record the whole vocabulary or hidden states" in found.verdict
        assert found.as_dict()["advice"] in found.verdict
    else:
        assert found.advice is None
        assert "Record the whole vocabulary" not in found.verdict


def test_rewards_at_the_ends_of_their_range_may_be_rounded_to_float32():
    stored = np.array([1.1, 0.3, -0.7, 0.0], np.float32).astype(np.float64)
    assert stored[0] > 1.1
    unit = unit_rewards(stored, (-0.7, 1.1))
    assert unit[0] == 1.0
    assert np.allclose(unit, (stored + 0.7) / 1.8, atol=1e-7)
    with pytest.raises(BadValueError, match=r"sequence 0 is 1.10001"):
        unit_rewards(np.array([1.10001]), (-0.7, 1.1))
