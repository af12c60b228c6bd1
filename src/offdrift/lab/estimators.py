"""The gradient that a method takes from sampled sequences of a testbed, for every row of the table.

One batch is one step's data: N answers to one prompt, advantages `R - J(mu)`, the exact baseline.
What a row makes of it is a coefficient per token (the loss's gradient with respect to the token's
log-prob), which the softmax turns into a gradient of the shape of the policy's logits:

    g = sum_t c_t (onehot(y_t) - pi(. | s_t))

As in `offdrift.lab.bias`, normalizers are scaled so that on policy every token is pushed by its
advantage divided by N, penalties to a reference are left out, and version lag is 1. A sequence has
up to `TURNS` turns of equal length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from offdrift.divergence.evidence import Divergence
from offdrift.lab.enumerate import token_kl, token_tv
from offdrift.lab.markov import MarkovPolicy
from offdrift.lab.recursions import markov_returns
from offdrift.lab.testbeds import Testbed
from offdrift.logprobs import LogProbs
from offdrift.loss import policy_loss
from offdrift.methods.method import Method
from offdrift.segments import Segments

TURNS = 8


@dataclass(frozen=True)
class Draw:
    """Sequences of a testbed: tokens, the state each was drawn in, and each sequence's reward."""

    tokens: Int[Tensor, "b t"]
    states: Int[Tensor, "b t"]
    rewards: Float[Tensor, " b"]

    def rows(self, which: slice) -> Draw:
        """Some of the sequences."""
        return Draw(self.tokens[which], self.states[which], self.rewards[which])


def draw(bed: Testbed, sequences: int, *, generator: torch.Generator) -> Draw:
    """Sequences drawn by the rollout policy."""
    tokens, states = bed.rollout.sample(sequences, generator=generator)
    last = bed.rollout.automaton.next_state[states[:, -1], tokens[:, -1]]
    return Draw(tokens, states, bed.rewards[last])


def all_sequences(bed: Testbed) -> tuple[Draw, Float[Tensor, " b"]]:
    """Every sequence that starts in the first state of the testbed, and its probability under mu."""
    machine, horizon = bed.rollout.automaton, bed.horizon
    number = torch.arange(machine.vocab**horizon)
    tokens = number[:, None] // machine.vocab ** torch.arange(horizon).flip(0) % machine.vocab
    state = machine.start.argmax().expand(len(number))
    states = []
    for t in range(horizon):
        states.append(state)
        state = machine.next_state[state, tokens[:, t]]
    sequences = Draw(tokens, torch.stack(states, 1), bed.rewards[state])
    return sequences, _logp(bed.rollout, sequences).sum(1).exp()


def coefficients(row: Method, bed: Testbed, drawn: Draw) -> Float[Tensor, "b t"]:
    """Minus the gradient of N times the row's loss with respect to each token's log-prob.

    On policy it is the advantage of the token's sequence. Gradient: none.
    """
    sequences, horizon = drawn.tokens.shape
    logp = _logp(bed.current, drawn).reshape(-1).requires_grad_()
    old = _logp(bed.old, drawn).reshape(-1)
    segments = _segments(sequences, horizon)
    batch = LogProbs.pack(
        _logp(bed.rollout, drawn).reshape(-1), logp, old, logp_ref=old, segments=segments
    )
    entropy = torch.special.entr(bed.old.tokens[0, 0]).sum(-1)
    mean_reward = markov_returns(bed.rollout, bed.rollout, bed.rewards[None]).rollout
    states = drawn.states.reshape(-1)
    result = policy_loss(
        batch,
        replace(row, penalty=None),
        segments.spread(drawn.rewards - mean_reward),
        divergences=_divergences(bed, states),
        entropy=entropy[states],
        vocab=bed.rollout.vocab,
        rewards=drawn.rewards,
        version_lag=torch.ones_like(old),
        observed="this_batch",
        normalizer=1 / horizon if row.aggregate == "seq_mean_token_mean" else 1.0,
    )
    return -torch.autograd.grad(result.loss, logp)[0].view(sequences, horizon)


def gradients(
    bed: Testbed, drawn: Draw, c: Float[Tensor, "b t"], *, batch: int
) -> Float[Tensor, "k d"]:
    """The gradient of each batch of `batch` consecutive sequences, flat over states and tokens."""
    states, vocab = bed.current.states, bed.current.vocab
    which = torch.arange(len(c)) // batch
    cell = (which[:, None] * states + drawn.states) * vocab + drawn.tokens
    pushed = c.new_zeros((int(which[-1]) + 1) * states * vocab)
    pushed = pushed.index_add(0, cell.reshape(-1), c.reshape(-1)).view(-1, states, vocab)
    return (pushed - bed.current.tokens[0, 0] * pushed.sum(-1, keepdim=True)).flatten(1) / batch


def _logp(policy: MarkovPolicy, drawn: Draw) -> Float[Tensor, "b t"]:
    return policy.tokens[0, 0].log()[drawn.states, drawn.tokens]


def _divergences(bed: Testbed, states: Int[Tensor, " n"]) -> dict[str, Divergence]:
    """Exact divergences from the rollout policy at every token, by the names that gates read."""
    found = {}
    mu = bed.rollout.tokens[0, 0]
    for kind, function in (("kl", token_kl), ("tv", token_tv)):
        for name, other in (("current", bed.current), ("old", bed.old)):
            value = function(mu, other.tokens[0, 0])[states]
            found[f"{kind}_rollout_{name}"] = Divergence.exact(f"{kind}_rollout_{name}", value)
    return found


def _segments(sequences: int, horizon: int) -> Segments:
    turns = min(TURNS, horizon)
    sizes = torch.full((turns,), horizon // turns)
    sizes[: horizon % turns] += 1
    return Segments.from_lengths(
        torch.full((sequences,), horizon),
        turns=Segments.from_lengths(sizes.repeat(sequences)),
        group_ids=torch.zeros(sequences, dtype=torch.int64),
    )
