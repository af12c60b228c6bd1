"""Score tokens that were already drawn with the training engine (teacher forcing).

Prompts are padded on the left, responses on the right, so that all responses begin in the same column
and only those columns' logits are computed. Lengths decide what is real, never `ids != pad`: a policy
can sample the pad id. The logits of one call are `rows x (longest response + 1) x vocabulary` plus a
float32 copy of the response tokens' rows; callers bound it by how many tokens they score (`chunks`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call

from offdrift.certificate.control import ratio_means
from offdrift.divergence.evidence import Divergence
from offdrift.divergence.fused import exact_divergences
from offdrift.divergence.interval import topk_divergences
from offdrift.divergence.losses import kl_rollout_current
from offdrift.engines.hf_fixed_order import is_batch_invariant
from offdrift.engines.output_head import logits_in_pieces
from offdrift.engines.retention import imposed
from offdrift.errors import EvidenceError
from offdrift.numerics import at_least_float32
from offdrift.records.rollouts import FullVocab, HiddenStates, Rollouts, TopK


class Score(NamedTuple):
    """The training engine's view of `n` response tokens."""

    logp: Float[Tensor, " n"]
    """log-prob of each token, nats; carries the gradient if the model does."""
    entropy: Float[Tensor, " n"]
    """Entropy of the whole distribution at each token, nats; no gradient."""
    sum_pi_squared: Float[Tensor, " n"]
    """Sum over the vocabulary of squared probabilities, 1; no gradient."""
    logits: Float[Tensor, "n v"]
    """Tempered float32 logits: evidence for exact divergences. Detached, unless asked for otherwise."""
    states: Float[Tensor, "n h"] | None = None
    """What the output head made the logits of, at each token, where asked for; carries the gradient."""


def score(
    model: nn.Module,
    rollouts: Rollouts,
    *,
    temperature: float = 1.0,
    keep_graph: bool = False,
    half: torch.dtype | None = None,
    with_states: bool = False,
    backward_scope: contextlib.ExitStack | None = None,
) -> Score:
    """Log-probs, entropies and logits of every response token, on the packed layout.

        logp_t = log softmax(logits_t / temperature)[token_t]

    Args:
        model: a causal language model with the `transformers` call signature.
        rollouts: prompts and responses; only tokens, cuts, the sampler's support and the cache's retention are read.
            Where they record what a compressed cache kept (`Rollouts.retention`), attention sees no more than that.
        temperature: the sampling temperature, so that both policies are tempered alike. The tokens that the
            sampler's filters left over are replayed where the rollouts record them (`Rollouts.support`): all others
            have logit -inf, hence no probability and no gradient. Without that record, mass that a filter removed
            counts as drift.
        keep_graph: leave the logits attached, for penalties on whole distributions.
        half: bfloat16 or float16, in which the model multiplies matrices (`torch.autocast`); weights, norms, residual
            stream and what follows the logits stay as they are. A batch-invariant model (`engines.hf_fixed_order`)
            computes as the engine does: on weights of that precision. Absent: everything at the weights' precision.
        with_states: also give the hidden states that the head reads, for a value head beside it.
        backward_scope: what has to stay as it is while activations are computed again, in a backward pass, is closed
            with it.

    Gradient: to the model's parameters through `logp`, through `states`, and through `logits` with `keep_graph`.
    """
    device = next(model.parameters()).device
    inputs = left_right_padded(rollouts, device=device)
    read: list[Tensor] = []
    invariant = is_batch_invariant(model)
    with contextlib.ExitStack() as contexts:
        if with_states:
            head = getattr(model, "module", model).get_output_embeddings()  # type: ignore[operator]
            hook = head.register_forward_pre_hook(lambda module, arguments: read.append(arguments[0]))
            contexts.callback(hook.remove)
        shadow = imposed(model, rollouts.retention, inputs.positions, computed_cells(inputs))
        (contexts if backward_scope is None else backward_scope).enter_context(shadow)
        rows_btv = _logits(  # column j predicts the token at place j behind the prompt
            model,
            half,
            input_ids=inputs.ids,
            attention_mask=inputs.attention,
            position_ids=inputs.positions,
            logits_to_keep=int(rollouts.lengths_with_context.max()) + 1,
            use_cache=False,
        )
    logits = at_least_float32(rows_btv[inputs.rows, inputs.columns]) / temperature  # [n, v]
    if (support := rollouts.support) is not None:
        logits.masked_fill_(support.left_out(slice(None), logits.shape[1], device=logits.device), -torch.inf)
    tokens = rollouts.tokens.to(device=logits.device, dtype=torch.int64)
    if invariant:
        logits = logits.log_softmax(-1)  # what engines do, whose bits it has to have
    log_total = logits.new_zeros(len(logits)) if invariant else logits.logsumexp(-1)
    logp = logits.gather(-1, tokens[:, None]).squeeze(-1) - log_total
    score_logits = logits if keep_graph else logits.detach()
    states = read[0][inputs.rows, inputs.columns] if with_states else None
    return Score(logp, *moments(logits.detach(), log_total.detach()), score_logits, states)


def _logits(model: nn.Module, half: torch.dtype | None, **inputs: Any) -> Float[Tensor, "b t v"]:
    """The model's logits; with `half` by autocast, or on cast weights if the model is batch-invariant."""
    if half is None:
        return model(**inputs).logits
    if is_batch_invariant(model):
        weights = {name: weight.to(half) for name, weight in model.named_parameters()}
        return functional_call(model, weights, (), inputs).logits
    # Every weight is read once a pass: a cache of them in half precision would only hold all of them at once.
    with torch.autocast(next(model.parameters()).device.type, half, cache_enabled=False):
        return model(**inputs).logits


def moments(
    logits: Float[Tensor, "n v"], log_total: Float[Tensor, " n"]
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Entropy and sum of squared probabilities, from one pass over the probabilities.

        H = log sum e^x - sum p x   (nats; a token of probability 0 adds nothing),   sum p^2

    Gradient: none.
    """
    p = (logits - log_total[:, None]).exp()
    squared = torch.linalg.vecdot(p, p)
    return log_total - torch.linalg.vecdot(p, logits.where(p > 0, 0.0)), squared


class Padded(NamedTuple):
    """A model's input, and where in its output each response token is predicted."""

    ids: Int[Tensor, "b t"]
    attention: Int[Tensor, "b t"]
    positions: Int[Tensor, "b t"]
    rows: Int[Tensor, " n"]
    columns: Int[Tensor, " n"]


def left_right_padded(rollouts: Rollouts, *, device: torch.device | str = "cpu") -> Padded:
    """Prompts flush right, responses flush left, meeting in one column of every row.

    What an environment wrote between turns stands where it stood, and no column is its own.
    """
    prompts, responses, turns = rollouts.prompt_cu_seqlens.diff(), rollouts.lengths_with_context, rollouts.turns
    widest, longest, b = int(prompts.max()), int(responses.max()), len(responses)
    rows, columns = _cells(rollouts.cu_seqlens)
    prompt_rows, prompt_columns = _cells(rollouts.prompt_cu_seqlens)
    prompt_columns = prompt_columns + (widest - prompts)[prompt_rows]
    ids = torch.zeros(b, widest + longest, dtype=torch.int64)
    ids[prompt_rows, prompt_columns] = rollouts.prompt_tokens.long()
    if turns is not None:
        columns, context_columns = turns.columns(rollouts.cu_seqlens)
        context_rows, _ = _cells(turns.context_cu_seqlens)
        ids[context_rows, widest + context_columns] = turns.context_tokens.long()
    ids[rows, widest + columns] = rollouts.tokens.long()
    place = torch.arange(widest + longest)
    attention = ((place >= (widest - prompts)[:, None]) & (place < (widest + responses)[:, None])).long()
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    return Padded(*(x.to(device) for x in (ids, attention, positions, rows, columns)))


def computed_cells(inputs: Padded) -> Int[Tensor, " p"]:
    """Cells of the padded batch, row after row, that a rollout engine computes: all real ones but each row's last."""
    real = inputs.attention.bool()
    followed = real & real.roll(-1, 1)
    followed[:, -1] = False
    return followed.flatten().nonzero().flatten().cpu()


def chunks(rollouts: Rollouts, *, token_budget: int) -> Iterator[Int[Tensor, " s"]]:
    """Cut a batch into pieces of at most `token_budget` padded tokens, similar lengths together.

    A piece costs `sequences x (widest prompt + longest response)`; a single sequence longer than
    the budget is a piece of its own.
    """
    prompts, responses = rollouts.prompt_cu_seqlens.diff(), rollouts.lengths_with_context
    order = torch.argsort(prompts + responses, stable=True).tolist()
    piece: list[int] = []
    widest = longest = 0
    for i in order:
        p, r = int(prompts[i]), int(responses[i])
        if piece and (len(piece) + 1) * (max(widest, p) + max(longest, r)) > token_budget:
            yield torch.tensor(piece)
            piece, widest, longest = [], 0, 0
        piece.append(i)
        widest, longest = max(widest, p), max(longest, r)
    if piece:
        yield torch.tensor(piece)


def _cells(cu_seqlens: Int[Tensor, " cuts"]) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
    """Row and column of every token of a ragged stream."""
    lengths = cu_seqlens.diff().long()
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return rows, torch.arange(int(cu_seqlens[-1])) - cu_seqlens[:-1].long()[rows]


def divergences(
    rollouts: Rollouts, logits: Float[Tensor, "n v"], *, tail_log_ratio_cap: float | int | None = None
) -> dict[str, Divergence]:
    """Divergences of the current policy from the recorded rollout policy, by name.

    Full-vocabulary evidence and hidden states give exact values, top-k evidence certified intervals,
    and no evidence gives none. Where the rollouts record the sampler's support, both policies live on it.

    Args:
        logits: `Score.logits` of the same tokens.
        tail_log_ratio_cap: assume |log mu - log pi| <= this outside the recorded top k, nats; the
            intervals' upper ends then rest on it, and say so.

    Raises: `EvidenceError` if the evidence is over another vocabulary.
    """
    evidence = rollouts.evidence
    if isinstance(evidence, TopK):
        kl, tv = topk_divergences(
            evidence.ids.to(logits.device).long(),
            evidence.logp.to(logits.device),
            rollouts.tokens.to(logits.device).long(),
            rollouts.logp_rollout.to(logits.device),
            logits,
            one_support=rollouts.support is not None,
            tail_log_ratio_cap=tail_log_ratio_cap,
        )
        return {kl.name: kl, tv.name: tv}
    pieces: Iterable[tuple[slice, Tensor]]
    if isinstance(evidence, FullVocab):
        size, pieces = evidence.logp.shape[1], [(slice(None), evidence.logp.to(logits.device))]
    elif isinstance(evidence, HiddenStates):
        # The engine's logits are computed again, at its precision and a few tokens at a time;
        # `hidden_divergences` does without either side's.
        temperature = rollouts.provenance.sampling.temperature
        size = len(evidence.head.weight)
        pieces = logits_in_pieces(evidence.to(logits.device), temperature=temperature, support=rollouts.support)
    else:
        return {}
    if size != logits.shape[1]:
        raise EvidenceError(
            f"the rollouts' evidence covers {size} tokens, the model has {logits.shape[1]}; both must "
            "share one vocabulary"
        )
    parts = [exact_divergences(rollout, logits[piece]) for piece, rollout in pieces]
    kl, tv = torch.cat([p.kl_rollout_current for p in parts]), torch.cat([p.tv for p in parts])
    return {
        "kl_rollout_current": Divergence.exact("kl_rollout_current", kl),
        "tv_rollout_current": Divergence.exact("tv_rollout_current", tv),
    }


def rollout_ratio_means(rollouts: Rollouts, logits: Float[Tensor, "n v"]) -> Float[Tensor, " n"] | None:
    """E_mu[min(pi / mu, C) | c_t] of every token, for control variates (`certificate.control`); None unless exact.

    Args:
        logits: `Score.logits` of the same tokens.
    """
    evidence = rollouts.evidence
    pieces: Iterable[tuple[slice, Tensor]]
    if isinstance(evidence, FullVocab):
        pieces = [(slice(None), evidence.logp.to(logits.device))]
    elif isinstance(evidence, HiddenStates):
        temperature = rollouts.provenance.sampling.temperature
        pieces = logits_in_pieces(evidence.to(logits.device), temperature=temperature, support=rollouts.support)
    else:
        return None
    return torch.cat([ratio_means(rollout, logits[piece]) for piece, rollout in pieces])


def old_divergences(logits_old: Float[Tensor, "n v"], logits: Float[Tensor, "n v"]) -> dict[str, Divergence]:
    """Divergences of the current policy from the old one, by name, over the whole vocabulary.

        kl_old_current = KL(pi_old || pi)      tv_old_current = TV(pi_old, pi)      kl_current_old = KL(pi || pi_old)

    What gates with on="staleness" and statistic "kl" or "tv" read, what KL-Cov's exact penalty differentiates, and
    what TROLL's projection bounds. Memory: a few rows at a time; the gradient of the logits is the only tensor of
    their size.

    Args:
        logits_old: tempered logits or log-probs of the training engine at the weights that sampled.
        logits: tempered logits of the current policy, of the same tokens.

    Returns: exact divergences, nats and probability.

    Gradient: of kl_old_current to `logits`, (pi - pi_old); none of the others, none to `logits_old`.

    Raises: `ShapeError` if the two are not of one shape.

    Example:
        >>> old, logits = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
        >>> exact = old_divergences(old, logits)
        >>> exact["kl_old_current"].value, exact["tv_old_current"].value
        (tensor([0.1438]), tensor([0.2500]))

    Reference: Cui et al., arXiv:2505.22617, eq. 14 (the penalty); DPPO, arXiv:2602.04879 (the bound).
    """
    kl = kl_rollout_current(logits_old.detach(), logits)
    both = exact_divergences(logits_old.detach(), logits.detach())
    named = {"kl_old_current": kl, "tv_old_current": both.tv, "kl_current_old": both.kl_current_rollout}
    return {name: Divergence.exact(name, x) for name, x in named.items()}
