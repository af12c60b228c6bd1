"""Rescore rollouts with the training engine and compare it with the recorded policy, over whole vocabularies.

A few tokens at a time are compared, so that memory does not grow with the number of rollouts. On a CPU the
comparison uses one thread: its many small steps each fit in a core's cache, and a second thread costs more.

Shape suffixes: c tokens of a chunk, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from offdrift.divergence.chunks import by_rows
from offdrift.divergence.fused import exact_divergences
from offdrift.divergence.interval import topk_divergences
from offdrift.engines.output_head import logits_in_pieces
from offdrift.engines.score import chunks, score
from offdrift.errors import EvidenceError
from offdrift.numerics import one_thread
from offdrift.records.rollouts import FullVocab, HiddenStates, Rollouts, TopK
from offdrift.segments import Segments

LOGITS = 2**26
"""Logits of one forward pass: 256 MiB in float32."""
PADDED = 8192
"""Padded tokens of one forward pass at most, which bounds the memory of activations."""
CHUNK = 2**21
"""Log-probs of a full record that are compared at a time."""

TOP = 20
"""Log-probs that engines commonly record: the k of the cap on the tail."""

THETAS = tuple(sign * 2.0**-j for sign in (1, -1) for j in range(7, 0, -1))
"""Arguments of the cumulant-generating function of a token's surprise: +-1/128, +-1/64, ... +-1/2."""


class Scored(NamedTuple):
    """The training engine's view of `n` drawn tokens, in the order of the rollouts.

    pi is the training engine, mu the recorded rollout policy. Fields that need mu's whole vocabulary are
    None for rollouts without it; details are None unless asked for.
    """

    logp: Float[Tensor, " n"]
    """log pi(token), nats."""
    entropy: Float[Tensor, " n"]
    """Entropy of pi, nats."""
    kl: Float[Tensor, " n"] | None = None
    """KL(mu || pi), nats, exact."""
    tv: Float[Tensor, " n"] | None = None
    """TV(mu, pi), exact."""
    chi2: Float[Tensor, " n"] | None = None
    """chi2(pi || mu), exact; +inf where mu was filtered."""
    logp_recorded: Float[Tensor, " n"] | None = None
    """log mu(token) by the recorded distribution, nats; the reported log-prob is to equal it."""
    surprise: Float[Tensor, " n"] | None = None
    """log mu(token) + H(mu), nats: 0 in expectation if the token was drawn from mu."""
    surprise_cgf: Float[Tensor, "n g"] | None = None
    """Detail: log E e^(theta surprise) at `THETAS` if the token was drawn from mu, float64."""
    tail_cap: Float[Tensor, " n"] | None = None
    """Detail: the smallest `tail_log_ratio_cap` with which the top 20 and the drawn token give an upper
    end of at least KL(mu || pi), nats; 0 where they leave no tail."""
    kl_low: Float[Tensor, " n"] | None = None
    """Certified lower end of KL(mu || pi), nats, where the likeliest tokens of mu are recorded and it is unfiltered."""
    kl_high: Float[Tensor, " n"] | None = None
    """Certified upper end, without any assumption about the other tokens."""


@torch.no_grad()
def rescored(model: nn.Module, rollouts: Rollouts, *, details: bool = False) -> Scored:
    """Score sampled tokens with a model, at the temperature they were sampled at.

    Filters are not replayed: a policy that cut its tail off differs from one that did not, and that is
    part of what is measured. Divergences need evidence of the whole vocabulary (full, or hidden states).

    Raises: `EvidenceError` if the evidence is over another vocabulary, or a token is beyond the model's.
    """
    device = next(model.parameters()).device
    vocabulary = int(model.config.get_text_config().vocab_size)  # type: ignore[union-attr,operator]
    if len(rollouts.tokens) and (largest := int(rollouts.tokens.max())) >= vocabulary:
        raise EvidenceError(
            f"the rollout engine drew token {largest}, and the trainer's vocabulary has {vocabulary} tokens: the "
            "engine's is padded and its padding not masked, or it holds another model"
        )
    budget = min(PADDED, max(1, LOGITS // vocabulary))
    segments = Segments(rollouts.cu_seqlens)
    parts: list[Scored] = []
    rows: list[Tensor] = []
    for piece in chunks(rollouts, token_budget=budget):
        part = rollouts.select(piece)
        support, part = part.support, part.with_(support=None)
        scores = score(model, part, temperature=part.provenance.sampling.temperature)
        # The recorded policy over the vocabulary, log-probs or logits, some tokens at a time.
        evidence, temperature = part.evidence, part.provenance.sampling.temperature
        recorded: Iterable[tuple[slice, Tensor]] = ()
        if isinstance(evidence, FullVocab):
            step = max(1, CHUNK // evidence.logp.shape[1])
            cuts = (slice(start, start + step) for start in range(0, len(evidence.logp), step))
            recorded = ((at, evidence.logp[at]) for at in cuts)
        elif isinstance(evidence, HiddenStates):
            recorded = logits_in_pieces(evidence.to(device), temperature=temperature, support=support)
        compared = [
            _compared(mu.to(device), scores.logits[at], part.tokens[at].to(device), details) for at, mu in recorded
        ]
        scored = Scored(scores.logp.cpu(), scores.entropy.cpu(), *_joined(compared))
        if isinstance(evidence, TopK) and not part.provenance.sampling.filtered:
            kl, _ = topk_divergences(
                evidence.ids.to(device),
                evidence.logp.to(device),
                part.tokens.to(device),
                part.logp_rollout.to(device),
                logits=scores.logits,
            )
            scored = scored._replace(kl_low=kl.lo.cpu(), kl_high=kl.hi.cpu())
        parts.append(scored)
        rows.append(segments.rows(piece))
    order = torch.cat(rows)
    fields = (x if x is None else torch.empty_like(x).index_copy_(0, order, x) for x in joined(parts))
    return Scored(*fields)  # type: ignore[arg-type]


def joined(parts: Sequence[Scored]) -> Scored:
    """Scores of consecutive pieces as one."""
    return Scored(*_joined(parts))  # type: ignore[arg-type]


def _joined(parts: Sequence[tuple[Tensor | None, ...]]) -> list[Tensor | None]:
    return [None if x[0] is None else torch.cat(x).cpu() for x in zip(*parts)]


def _compared(
    mu: Float[Tensor, "c v"], pi: Float[Tensor, "c v"], tokens: Int[Tensor, " c"], details: bool
) -> tuple[Tensor | None, ...]:
    """The fields of `Scored` from `kl` on."""
    with one_thread():
        d = exact_divergences(mu, pi, tokens=tokens.long())
        assert d.logp_rollout is not None
        surprise = d.logp_rollout + d.entropy_rollout
        plain = (d.kl_rollout_current, d.tv, d.chi2, d.logp_rollout, surprise)
        if not details:
            return (*plain, None, None)

        def sums(mu: Tensor, pi: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
            log_mu, log_pi = mu.float().log_softmax(-1), pi.float().log_softmax(-1)
            return surprise_cgf(log_mu), *tail_sums(log_mu, log_pi, tokens)

        # A row at a time on CPUs, whose temporaries stay in the cache.
        cgf, *tail = by_rows(sums, (mu, pi, tokens.long()), compiled=False)
        return (*plain, cgf, smallest_caps(*tail))


def surprise_cgf(log_mu: Float[Tensor, "c v"]) -> Float[Tensor, "c g"]:
    """log sum_a mu_a e^(theta s_a) at `THETAS`, s_a = log mu_a + H: 0 where mu is one token.

    One exponential, of the smallest theta; the others are its squares, negative thetas its inverses.

    Returns: float64, positive thetas from the smallest, then their negatives.
    """
    log_mu = log_mu.double().log_softmax(-1)  # of float32, masses add up to 1 to 1e-7 only
    mu = log_mu.exp()
    surprise = log_mu.clamp(min=-700.0)
    surprise = surprise - (mu * surprise).sum(-1, keepdim=True)
    power = (surprise * THETAS[0]).exp_()
    up, down = [], []
    for _ in range(len(THETAS) // 2):
        # Subtract 1 before the sum: the rest is of second order in theta.
        up.append((mu * (power - 1)).sum(-1))
        down.append((mu * (1 / power - 1)).sum(-1))
        power = power.square()
    return torch.stack(up + down, dim=1).log1p().clamp(min=0.0)


def tail_sums(
    log_mu: Float[Tensor, "c v"], log_pi: Float[Tensor, "c v"], tokens: Int[Tensor, " c"]
) -> tuple[Tensor, Tensor, Tensor]:
    """r, s and the left side of `smallest_caps`, float64, if the top 20 of mu were recorded."""
    listed = torch.zeros_like(log_mu, dtype=torch.bool)
    listed.scatter_(1, log_mu.topk(min(TOP, log_mu.shape[1]), dim=-1).indices, True)
    listed.scatter_(1, tokens[:, None], True)
    # float64 before the exponential: small terms are differences of the masses.
    log_mu, log_pi = log_mu.double(), log_pi.double()
    mu, pi = (x.exp().masked_fill(listed, 0.0) for x in (log_mu, log_pi))
    ratio = log_mu - log_pi
    terms = torch.where(mu > 0, mu * ratio - mu + pi, pi).masked_fill(listed, 0.0).sum(-1)
    return mu.sum(-1), pi.sum(-1), terms


def smallest_caps(r: Float[Tensor, " c"], s: Float[Tensor, " c"], terms: Float[Tensor, " c"]) -> Float[Tensor, " c"]:
    """The smallest cap L whose upper end covers the exact KL.

        sum over the tail of mu log(mu / pi) - mu + pi  <=  L tanh(L/2) s + (L / tanh(L) - 1) (r - s)

    r and s are the tail masses of mu and pi, from `tail_sums`. The right side is the upper end of a capped interval
    (`divergence.interval.most_under_cap`), which grows with L, so L follows by bisection.

    Returns: nats; 0 where the tail is empty, +inf where no cap helps. Float32.
    """
    low, high = torch.zeros_like(terms), torch.full_like(terms, 64.0)
    for _ in range(40):
        cap = (low + high) / 2
        enough = cap * (cap / 2).tanh() * s + (cap / cap.tanh() - 1) * (r - s) >= terms
        low, high = low.where(enough, cap), cap.where(enough, high)
    high = high.where(terms < torch.inf, torch.inf)
    return high.where(terms > 1e-12, 0.0).float()
