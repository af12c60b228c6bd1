"""Every configured part says whether it is alive, and a dead one is not passed over."""

import logging

import pytest
import torch

from offdrift.adapters.base import Adapter, liveness
from offdrift.batch_info import BatchInfo
from offdrift.correction import Correction, Weight
from offdrift.divergence.evidence import Divergence
from offdrift.errors import LivenessError
from offdrift.logprobs import LogProbs
from offdrift.loss import policy_loss
from offdrift.methods import Method, method
from offdrift.objectives import Clipped, Reinforce
from offdrift.segments import Segments

LENGTHS = [3, 5, 2, 6]
N = sum(LENGTHS)


def batch(engines: float = 0.0, lag: float = 0.0, seed: int = 0) -> LogProbs:
    """Log-probs whose mismatch and staleness have these standard deviations, nats."""
    g = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(N, generator=g) - 0.5
    old = rollout + engines * torch.randn(N, generator=g).clamp(-1, 0.5)
    current = old + lag * torch.randn(N, generator=g).clamp(-1, 0.5)
    return LogProbs.pack(rollout, current, old, segments=Segments.from_lengths(LENGTHS))


def states(name: str, logprobs: LogProbs) -> dict[str, list[str]]:
    stats = policy_loss(logprobs, method(name), torch.ones(N)).stats
    found: dict[str, list[str]] = {}
    for part in liveness(stats.to_host(), method(name)):
        found.setdefault(part.kind, []).append(part.state)
    return found


@pytest.mark.parametrize(
    ("engines", "gate", "weight"), [(0.3, "acted", "acted"), (1e-6, "idle", "acted"), (0.0, "blind", "blind")]
)
def test_a_part_acts_or_has_nothing_to_do_or_cannot(engines: float, gate: str, weight: str) -> None:
    found = states("decoupled_geo_rs_token_tis", batch(engines=engines, lag=0.1))
    assert found["gate"] == [gate]
    assert found["weight"] == [weight]


def test_what_is_not_called_is_dead_and_staleness_before_the_first_update_is_not() -> None:
    parts = liveness({}, method("decoupled_geo_rs_token_tis"))
    assert [(p.state, p.dead) for p in parts] == [("not called", True)] * 3
    with pytest.raises(LivenessError, match="never called"):
        Adapter("token_tis", framework="plain").end_step(1)
    numbers = policy_loss(batch(engines=0.2), method("grpo"), torch.ones(N)).stats.to_host()
    (objective,) = liveness(numbers, method("grpo"))
    assert (objective.state, objective.dead) == ("blind", False)


def test_what_a_part_changed_is_counted() -> None:
    lp = batch(engines=0.3)
    result = policy_loss(lp, method("decoupled_geo_rs_token_tis"), torch.ones(N))
    gate, weight, _ = liveness(result.stats.to_host(), method("decoupled_geo_rs_token_tis"))
    mean = torch.stack([x.mean() for x in (lp.old - lp.logp_rollout).split(LENGTHS)])
    outside = (mean.exp() > 1.001) | (mean.exp() < 0.999)
    assert 0 < gate.changed == int((outside * torch.tensor(LENGTHS)).sum())
    assert weight.changed == int((lp.old != lp.logp_rollout).sum()) == N
    assert f"{gate.changed:,} of {N:,} tokens changed" in str(gate)


def test_one_token_below_the_others_is_a_live_ratio() -> None:
    """It moves the mean ratio by less than the gate's bound, and a cap above 1 leaves it."""
    rollout = torch.full((N,), -1.0)
    old = rollout.clone()
    old[3] -= 1e-4
    lp = LogProbs.pack(rollout, old, old, segments=Segments.from_lengths(LENGTHS))
    assert states("decoupled_geo_rs", lp)["gate"] == ["idle"]


def test_copied_log_probs_end_the_run_and_warn_goes_on_and_says_it_once(caplog: pytest.LogCaptureFixture) -> None:
    adapter = Adapter("decoupled_token_is", framework="plain")
    adapter.loss(batch(lag=0.2), torch.ones(N))
    with pytest.raises(LivenessError, match=r"equal at every token.*on_idle=\"warn\""):
        adapter.end_step(1)
    caplog.clear()
    adapter = Adapter("decoupled_token_is", framework="plain", on_idle="warn")
    with caplog.at_level(logging.INFO, logger="offdrift.plain"):
        for step in (1, 2):
            adapter.loss(batch(lag=0.2, seed=step), torch.ones(N))
            assert adapter.end_step(step)
    told = [r for r in caplog.records if "cannot act" in r.message]
    assert [r.levelname for r in told] == ["WARNING"], "the weight, once; the objective acts"


def test_a_weight_that_sees_nothing_does_not_hide_behind_another() -> None:
    """The staleness moves, and weights multiply: the one on the mismatch changed none of them."""
    part = Correction() & Weight(on="mismatch", cap=2.0) & Weight(on="staleness", cap=2.0)
    row = Method(objective=Reinforce(), correction=part)
    stats = policy_loss(batch(lag=0.2), row, torch.ones(N)).stats
    mismatch, staleness, _ = liveness(stats.to_host(), row)
    assert (mismatch.state, mismatch.changed, mismatch.dead) == ("blind", 0, True)
    assert (staleness.state, staleness.changed) == ("acted", N)


def test_an_objective_on_copies_of_the_log_probs_is_dead() -> None:
    """No gate and no weight: the ratio of the rollout policy stands in the objective alone."""
    row = Method(objective=Clipped(on="full"))
    copies = liveness(policy_loss(batch(), row, torch.ones(N)).stats.to_host(), row)
    assert [(p.state, p.dead) for p in copies] == [("blind", True)]
    apart = liveness(policy_loss(batch(engines=1e-4), row, torch.ones(N)).stats.to_host(), row)
    assert [(p.state, p.dead) for p in apart] == [("idle", False)]


@pytest.mark.parametrize(("largest", "state"), [(0.0, "blind"), (1e-5, "idle")])
def test_a_gate_on_divergences_that_are_all_zero_is_blind(largest: float, state: str) -> None:
    """Logits of the trainer in the place of the engine's: log-probs may differ, and it sees nothing."""
    kl = torch.zeros(N).index_fill(0, torch.tensor([3]), largest)
    given = {"kl_rollout_current": Divergence.exact("kl_rollout_current", kl)}
    stats = policy_loss(batch(engines=0.2), method("trm_max"), torch.ones(N), BatchInfo(divergences=given))
    gate, _ = liveness(stats.stats.to_host(), method("trm_max"))
    assert (gate.kind, gate.state) == ("gate", state)


def test_tokens_of_which_every_policy_is_sure_decide_nothing() -> None:
    """Their honest log-probs are 0 in any engine: the verdict waits for others, and then falls."""
    sure = LogProbs.pack(torch.zeros(2), torch.zeros(2), torch.zeros(2), segments=Segments.from_lengths([2]))
    for engines in (0.0, 0.2):
        adapter = Adapter("decoupled_token_is", framework="plain")
        adapter.loss(sure, torch.ones(2))
        assert adapter.end_step(1)
        adapter.loss(batch(engines=engines, lag=0.2), torch.ones(N))
        if engines:
            assert adapter.end_step(2)
        else:
            with pytest.raises(LivenessError, match="equal at every token"):
                adapter.end_step(2)


def test_a_step_without_a_token_is_not_a_hook_that_was_never_called() -> None:
    """Every completion was truncated and masked; the verdict waits for the next step."""
    adapter = Adapter("decoupled_token_is", framework="plain")
    adapter.skip()
    assert adapter.end_step(1) == {}
    adapter.loss(batch(), torch.ones(N))
    with pytest.raises(LivenessError, match="equal at every token"):
        adapter.end_step(2)
