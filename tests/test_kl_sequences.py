"""The penalty on whole sequences, by enumerating a tree: what the reward and the loss each miss."""

import pytest
import torch
from torch import Tensor

from offdrift.penalty import KLPenalty, kl_estimate, penalized_rewards
from offdrift.segments import Segments
from tests.test_kl import CORRECTED, exactly


class Tree:
    """All sequences of `horizon` tokens, packed, under pi (with gradient) and the reference."""

    def __init__(self, horizon: int, vocab: int = 3, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        draw = lambda t: torch.randn(vocab**t, vocab, generator=g, dtype=torch.float64)  # noqa: E731
        self.logits = [draw(t).requires_grad_() for t in range(horizon)]
        self.ref = [draw(t).log_softmax(-1) for t in range(horizon)]
        self.mu = [draw(t).log_softmax(-1) for t in range(horizon)]
        self.pi = [x.log_softmax(-1) for x in self.logits]
        y = torch.cartesian_prod(*[torch.arange(vocab)] * horizon).reshape(-1, horizon)
        self.count = vocab**horizon
        assert len(y) == self.count
        self.context = [
            sum((y[:, s] * vocab ** (t - 1 - s) for s in range(t)), torch.zeros(len(y)).long()) for t in range(horizon)
        ]
        self.y = y
        self.segments = Segments.from_lengths([horizon] * self.count)

    def logp(self, levels: list[Tensor]) -> Tensor:
        """Log-prob of every token of every sequence, packed."""
        columns = [levels[t][c, self.y[:, t]] for t, c in enumerate(self.context)]
        return torch.stack(columns, 1).reshape(-1)

    def law(self, levels: list[Tensor]) -> Tensor:
        return self.logp(levels).reshape(self.count, -1).sum(1).exp()

    def gradient(self, objective: Tensor) -> Tensor:
        return torch.cat(
            [
                g.reshape(-1)
                for g in torch.autograd.grad(
                    objective, self.logits, retain_graph=True, materialize_grads=True, allow_unused=True
                )
            ]
        )

    def sequence_kl(self) -> Tensor:
        law = self.law(self.pi)
        return (law * (law.log() - self.law(self.ref).log())).sum()

    def context_kl(self) -> list[Tensor]:
        return [(p.exp() * (p - r)).sum(-1) for p, r in zip(self.pi, self.ref)]

    def context_law(self, levels: list[Tensor]) -> list[Tensor]:
        """Probability of every context, position by position."""
        laws = [levels[0].new_ones(1)]
        for level in levels[:-1]:
            laws.append((laws[-1][:, None] * level.exp()).reshape(-1))
        return laws


def score_gradient(tree: Tree, rewards: Tensor, estimator: str, coef: float) -> Tensor:
    """Expected score-function gradient of the return with the penalty in the reward."""
    logp, logp_ref = tree.logp(tree.pi), tree.logp(tree.ref)
    penalty = KLPenalty(estimator=estimator, coef=coef, place="reward")  # type: ignore[arg-type]
    kl = penalty(logp, logp_ref)
    returns = tree.segments.sum(penalized_rewards(rewards, tree.segments, kl, penalty.coef))
    law = tree.law(tree.pi).detach()
    return tree.gradient((law * returns * tree.segments.sum(logp)).sum())


@pytest.mark.parametrize("horizon", [1, 2, 3])
def test_k1_in_the_reward_gives_the_gradient_of_the_sequence_kl(horizon):
    tree = Tree(horizon)
    rewards = torch.randn(tree.count, dtype=torch.float64)
    exact = (tree.law(tree.pi) * rewards).sum() - 0.3 * tree.sequence_kl()
    exactly(score_gradient(tree, rewards, "k1", 0.3), tree.gradient(exact))
    assert tree.gradient(tree.sequence_kl()).norm() > 0.05


def test_k1_in_the_reward_with_rewards_to_go():
    tree = Tree(3)
    logp = tree.logp(tree.pi)
    kl = kl_estimate(logp, tree.logp(tree.ref), estimator="k1")
    r = penalized_rewards(torch.zeros(tree.count, dtype=torch.float64), tree.segments, kl, 1.0)
    to_go = tree.segments.spread(tree.segments.sum(r)) - tree.segments.prefix_sum(r) + r
    law = tree.segments.spread(tree.law(tree.pi).detach())
    exactly(tree.gradient((law * to_go * logp).sum()), -tree.gradient(tree.sequence_kl()))


@pytest.mark.parametrize("estimator", ["k2", "k3", "abs"])
def test_any_other_estimate_in_the_reward_misses_its_own_gradient(estimator):
    """grad E_pi[x] = E[score x] + E[grad x]; the reward has only the first term."""
    tree = Tree(2)
    logp, law = tree.logp(tree.pi), tree.law(tree.pi)
    sums = tree.segments.sum(kl_estimate(logp, tree.logp(tree.ref), estimator=estimator))
    missed = tree.gradient((law.detach() * sums).sum())
    zero = torch.zeros(tree.count, dtype=torch.float64)
    exactly(-score_gradient(tree, zero, estimator, 1.0), tree.gradient((law * sums).sum()) - missed)
    assert missed.norm() > 0.1
    if estimator == "k3":  # its mean is the sequence KL, so the shortfall is from that KL itself
        exactly((law * sums).sum().detach(), tree.sequence_kl().detach())


@pytest.mark.parametrize("estimator", ["k2", "k1+", "abs+", "k3+"])
def test_in_the_loss_the_contexts_are_held_fixed(estimator):
    tree = Tree(3)
    law = tree.segments.spread(tree.law(tree.pi).detach())
    kl = kl_estimate(tree.logp(tree.pi), tree.logp(tree.ref), estimator=estimator)
    got = tree.gradient((law * kl).sum())
    pairs = list(zip(tree.context_law(tree.pi), tree.context_kl()))
    assert len(pairs) == 3
    fixed = tree.gradient(torch.stack([(p.detach() * k).sum() for p, k in pairs]).sum())
    missed = tree.gradient(torch.stack([(p * k.detach()).sum() for p, k in pairs]).sum())
    exactly(got, fixed)
    exactly(tree.gradient(tree.sequence_kl()) - got, missed)
    assert missed.norm() > 0.1


def test_corrected_holds_the_contexts_of_the_rollout_policy_fixed():
    tree = Tree(3)
    logp, logp_mu = tree.logp(tree.pi), tree.logp(tree.mu)
    kl = kl_estimate(logp, tree.logp(tree.ref), estimator=CORRECTED, log_ratio=logp - logp_mu)
    got = (tree.segments.spread(tree.law(tree.mu)) * kl).sum()
    pairs = zip(tree.context_law(tree.mu), tree.context_kl())
    expected = torch.stack([(p * k).sum() for p, k in pairs]).sum()
    exactly(got.detach(), expected.detach())
    exactly(tree.gradient(got), tree.gradient(expected))
