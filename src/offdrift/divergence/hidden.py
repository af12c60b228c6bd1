"""Exact divergences from hidden states and output heads, one vocabulary chunk at a time.

A hidden state is `d` numbers where a row of logits is `v`: 151,936 against 1,024 in a small Qwen3.
Engines can therefore afford to record it, and the full distributions are computed again here, a
block of `token_chunk` x `chunk` scores at a time. Two sweeps over the vocabulary:

    1. the normalizers of both policies, online: top' = max(top, max z),
       total' = total e^(top - top') + sum e^(z - top'), so that log Z = top + log total
    2. with both normalizers known, the per-token terms of `exact.all_terms`, summed

*Exact*: the sums run over the whole vocabulary, in float32 or better. An engine that samples from
bfloat16 logits samples from other numbers than the exact product (a logit of 20 moves by up to 1/16);
`Head.round_to` rounds where it rounds, after which only its order of summation is not ours.

Shape suffixes: n tokens, v vocabulary, d hidden size, c vocabulary chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from typing import no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor

from offdrift.divergence import chunks, fused, kernels
from offdrift.divergence.exact import ExactDivergences, all_terms, weighted
from offdrift.divergence.head import Head as Head
from offdrift.divergence.head import check_positive
from offdrift.errors import BadValueError, ShapeError

CHUNK, CHUNK_ELSEWHERE = {"cpu": 2048}, 8192
"""Tokens of the vocabulary per block; the upcast weights of a block are 8 MiB at d = 1,024."""

TOKEN_CHUNK, TOKEN_CHUNK_ELSEWHERE = {"cpu": 256}, 2048
"""Tokens of the batch per block: enough to reuse each weight, few enough to stay in a cache."""

KEEP_AT_LEAST = 32
"""Fewer tokens per block would read the weights more often than keeping scores saves."""

KEEP_MIB, KEEP_MIB_ELSEWHERE = {"cpu": 256}, 1024
"""MiB of scores kept by default. A GPU needs a thousand tokens at a time to multiply at full speed: 600 MiB in
bfloat16 at 151,936 tokens of the vocabulary."""


@no_type_check
def update_normalizer(
    scores: Float[Tensor, "n c"], top: Float[Tensor, " n"], total: Float[Tensor, " n"], temperature: Float[Tensor, ""]
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """The normalizer of the scores so far and of one more block: log Z = top / T + log total."""
    new_top = torch.maximum(top, scores.amax(-1))
    faded = total * ((top - new_top) / temperature).exp()
    return new_top, faded + ((scores - new_top[:, None]) / temperature).exp().sum(-1)


@no_type_check
def accumulate(
    scores_rollout: Float[Tensor, "n c"],
    scores: Float[Tensor, "n c"],
    top_rollout: Float[Tensor, " n"],
    total_rollout: Float[Tensor, " n"],
    top: Float[Tensor, " n"],
    total: Float[Tensor, " n"],
    temperature_rollout: Float[Tensor, ""],
    temperature: Float[Tensor, ""],
) -> tuple[Float[Tensor, " n"], ...]:
    """Contribution of one block of both policies' scores to the first seven fields of the result."""
    log_mu = log_prob(scores_rollout, top_rollout[:, None], total_rollout[:, None], temperature_rollout)
    log_pi = log_prob(scores, top[:, None], total[:, None], temperature)
    mu, pi = log_mu.exp(), log_pi.exp()
    entropies = (-weighted(mu, log_mu), -weighted(pi, log_pi))
    return tuple(x.sum(-1) for x in (*all_terms(log_mu, log_pi, mu, pi), *entropies, pi * pi))


@no_type_check
def log_prob(score: Tensor, top: Tensor, total: Tensor, temperature: Tensor) -> Tensor:
    """Log-probabilities from scores and their normalizer; NaN in rows that are no distribution."""
    return (score - top) / temperature - total.log().to(score.dtype)


@torch.no_grad()
def hidden_divergences(
    hidden_rollout: Float[Tensor, "n d1"],
    head_rollout: Head,
    hidden: Float[Tensor, "n d2"],
    head: Head,
    *,
    tokens: Int[Tensor, " n"] | None = None,
    temperature_rollout: float | int = 1.0,
    temperature: float | int = 1.0,
    chunk: int | None = None,
    token_chunk: int | None = None,
    keep_mib: float | int | None = None,
    compiled: bool | None = None,
) -> ExactDivergences:
    """Every exact divergence at every token, from hidden states, without `[tokens, vocab]`.

        mu = softmax(head_rollout(hidden_rollout) / temperature_rollout)
        pi = softmax(head(hidden) / temperature)

    and the equations of the fields of `ExactDivergences`. Zeros and infinities behave as in
    `exact.definition`; a token with NaN or an infinity in a hidden state is NaN in every field.

    Beyond the results, at most this is held at once, whatever the batch and the vocabulary: 5 blocks
    of `token_chunk` x `chunk` scores, one of `chunk` x `d` weights if they are upcast, and `keep_mib`
    (on a CPU 10 MiB + 8 MiB at d = 1,024 + 256 MiB; not compiled, about 20 MiB more). On a GPU whose `keep_mib`
    takes both policies' scores of some tokens, these are two products and one kernel over whole rows.

    Args:
        hidden_rollout: the rollout engine's states at the positions that drew the tokens, after the
            model's final norm, any float dtype.
        head_rollout: the output head that the rollout engine used.
        hidden: the current policy's states at the same positions; its size may be another.
        head: its output head, over the same vocabulary.
        tokens: the drawn tokens, if their log-probs are wanted.
        temperature_rollout: what the rollout engine divided its logits by before it sampled. Filters
            (top-k, top-p) are not undone here: mu is what would have been sampled without them.
        temperature: the same for the current policy, in practice the same number.
        chunk: tokens of the vocabulary per block.
        token_chunk: tokens of the batch per block.
        keep_mib: MiB of scores that may be kept between the two sweeps; None: 256 on a CPU, 1024 elsewhere.
            2 products with the head are taken if they suffice for a block of 32 tokens over the vocabulary, else 4.
        compiled: None compiles large inputs where that works; True compiles and lets a failure
            through; False never compiles. `TORCH_COMPILE_DISABLE=1` means False.

    Returns: float32 or better. Gradient: none, it is evidence.

    Raises:
        ShapeError: the arguments describe different tokens, vocabularies, or hidden sizes.
        BadValueError: a temperature that is not positive and finite, a chunk below 1.

    Example:
        >>> head = Head(torch.tensor([[1.0], [0.0]]))
        >>> mu, pi = torch.tensor([[0.0]]), torch.tensor([[3.0]]).log()
        >>> d = hidden_divergences(mu, head, pi, head, tokens=torch.tensor([0]))
        >>> d.kl_rollout_current, d.tv, d.logp.exp()
        (tensor([0.1438]), tensor([0.2500]), tensor([0.7500]))

    Reference: Li et al., Trust Region Masking, arXiv:2512.23075v5, eq. 23 (KL) and Definition 2.2
    (TV); online normalizer: Milakov and Gimelshein, arXiv:1805.02867, algorithm 3.
    """
    _check(hidden_rollout, head_rollout, hidden, head, tokens)
    check_positive(temperature_rollout=temperature_rollout, temperature=temperature)
    check_positive(chunk=chunk, token_chunk=token_chunk)
    n, vocab, device = len(hidden), len(head.weight), hidden.device
    if keep_mib is None:
        keep_mib = KEEP_MIB.get(device.type, KEEP_MIB_ELSEWHERE)
    if not keep_mib >= 0:
        raise BadValueError(f"keep_mib is {keep_mib}; give 0 to keep no scores")
    dtypes = (x.dtype for x in (hidden_rollout, head_rollout.weight, hidden, head.weight))
    dtype = reduce(torch.promote_types, dtypes, torch.float32)
    chunk = chunk or CHUNK.get(device.type, CHUNK_ELSEWHERE)
    token_chunk = token_chunk or TOKEN_CHUNK.get(device.type, TOKEN_CHUNK_ELSEWHERE)
    route = fused.route(device, dtype, entries=n * vocab, compiled=compiled)
    sizes = [(h.round_to or dtype if route == "triton" else dtype).itemsize for h in (head_rollout, head)]
    kept_tokens = int(keep_mib * 2**20 / (vocab * sum(sizes)))
    keep = kept_tokens >= min(n, token_chunk, KEEP_AT_LEAST)
    token_chunk = max(1, min(token_chunk, kept_tokens)) if keep else token_chunk
    pieces = max(1, math.ceil(n / token_chunk))
    spans = [slice(start, min(start + chunk, vocab)) for start in range(0, vocab, chunk)]
    token_ids = torch.full((n,), -1, device=device) if tokens is None else tokens.long()
    rows = [x.tensor_split(pieces) for x in (hidden_rollout, hidden, token_ids)]

    def run(route: fused.Route) -> ExactDivergences:
        parts = []
        for of_mu, of_pi, drawn_here in zip(*rows, strict=True):
            mu = _Policy(head_rollout, of_mu, temperature_rollout, dtype, route)
            pi = _Policy(head, of_pi, temperature, dtype, route)
            if keep and route == "triton":
                parts.append(_whole_rows(mu, pi, drawn_here))
            else:
                parts.append(_fields(mu, pi, drawn_here, spans, keep=keep))
        fields = torch.cat(parts, dim=1).unbind()
        return ExactDivergences(*(fields if tokens is not None else fields[:-2]))

    if route == "triton":
        return run("triton")
    ways: dict[bool, fused.Route] = {True: "compiled", False: "plain"}
    return chunks.compiled_or_plain(lambda c: run(ways[c]), device, n * vocab, compiled)


class _Policy:
    """One policy on one chunk of tokens: its scores, and its normalizer as far as it is known."""

    def __init__(
        self, head: Head, states: Tensor, temperature: float | int, dtype: torch.dtype, route: fused.Route
    ) -> None:
        self.head, self.states, self.temperature = head, states, temperature
        self.dtype, self.route = dtype, route
        lowest = torch.finfo(dtype).min  # not -inf: -inf - -inf is NaN
        self.top = states.new_full((len(states),), lowest, dtype=dtype)
        self.total = states.new_zeros(len(states), dtype=torch.float64)
        self.drawn = states.new_full((len(states),), math.nan, dtype=dtype)
        # A tensor, so that one compiled kernel serves every temperature.
        self.divisor = torch.tensor(temperature, dtype=dtype, device=states.device)

    def block(self, span: slice) -> Tensor:
        """Scores; for the Triton kernels products, which they shape themselves."""
        if self.route == "triton":
            return self.head.products(self.states, span)
        return self.head.scores(self.states, span).to(self.dtype)

    def see(self, block: Tensor, tokens: Tensor, span: slice) -> None:
        """Take a block into the normalizer, and note the scores of the drawn tokens in it."""
        inside = (tokens >= span.start) & (tokens < span.stop)
        token_scores = block.gather(1, torch.where(inside, tokens - span.start, 0)[:, None]).squeeze(1)
        if self.route == "triton":
            token_scores = self.head.shaped(token_scores)
            normalizer = kernels.update_normalizer(self.top, self.total, block, self.temperature, self.head)
        else:
            rows = (block, self.top, self.total)
            normalizer = self.by_rows(update_normalizer, rows, self.divisor)
        self.top, self.total = normalizer
        self.drawn = torch.where(inside, token_scores.to(self.dtype), self.drawn)

    def by_rows(self, function: chunks.RowFunction, rows: tuple[Tensor, ...], *shared: Tensor) -> tuple[Tensor, ...]:
        return chunks.by_rows(function, rows, *shared, compiled=self.route == "compiled")

    def logp(self) -> Tensor:
        """Log-probabilities of the drawn tokens; NaN for tokens that the vocabulary does not have."""
        return log_prob(self.drawn, self.top, self.total, self.divisor)


def _fields(mu: _Policy, pi: _Policy, tokens: Tensor, spans: list[slice], *, keep: bool) -> Float[Tensor, "9 n"]:
    """The fields of `ExactDivergences`, from two sweeps over the vocabulary."""

    def blocks() -> Iterator[tuple[Tensor, Tensor]]:
        return ((mu.block(span), pi.block(span)) for span in spans)

    cache: list[tuple[Tensor, Tensor]] = []
    for span, both in zip(spans, blocks(), strict=True):
        mu.see(both[0], tokens, span)
        pi.see(both[1], tokens, span)
        if keep:
            cache.append(both)
    sums = mu.total.new_zeros(7, len(tokens))
    for both in cache or blocks():
        normalizers = ((mu.top, mu.total), (pi.top, pi.total))
        if mu.route == "triton":
            temperatures = (mu.temperature, pi.temperature)
            sums = kernels.accumulate(sums, both, normalizers, temperatures, (mu.head, pi.head))
        else:
            rows = (*both, *normalizers[0], *normalizers[1])
            sums = sums + torch.stack(mu.by_rows(accumulate, rows, mu.divisor, pi.divisor))
    sums[2].clamp_(max=1.0)  # TV
    # A state that is no number makes every field NaN, also where a soft cap would hide it.
    nan_or_0 = 0.0 * sums[2] + sum((0.0 * x.states).sum(-1) for x in (mu, pi))
    return (torch.cat([sums, torch.stack([mu.logp(), pi.logp()])]) + nan_or_0).to(mu.dtype)


def _whole_rows(mu: _Policy, pi: _Policy, tokens: Tensor) -> Float[Tensor, "9 n"]:
    """The fields of `ExactDivergences`, from all scores at once, which the Triton kernel reads twice."""
    everything = slice(0, len(mu.head.weight))
    scores_mu, scores_pi = (p.head.shaped(p.head.products(p.states, everything), upcast=False) for p in (mu, pi))
    if mu.temperature != 1:  # the kernel divides the current policy's alone
        scores_mu = scores_mu.float().div_(mu.temperature)
    fields, _ = kernels.with_normalizers(scores_mu, scores_pi, tokens, pi.temperature)
    # A soft cap would hide an infinite state.
    return torch.stack([x for x in fields if x is not None]) + sum((0.0 * x.states.float()).sum(-1) for x in (mu, pi))


def _check(hidden_rollout: Tensor, head_rollout: Head, hidden: Tensor, head: Head, tokens: Tensor | None) -> None:
    for name, states, of in (("hidden_rollout", hidden_rollout, head_rollout), ("hidden", hidden, head)):
        if states.ndim != 2 or states.shape[1] != of.weight.shape[1]:
            raise ShapeError(
                f"{name} has shape {tuple(states.shape)}, the weight of its head "
                f"{tuple(of.weight.shape)}; give [tokens, hidden size] with the hidden size of the head"
            )
    n = len(hidden)
    if len(hidden_rollout) != n or (tokens is not None and tokens.shape != (n,)):
        token_shape = "" if tokens is None else f", tokens {tuple(tokens.shape)}"
        raise ShapeError(
            f"hidden_rollout has shape {tuple(hidden_rollout.shape)}, hidden {tuple(hidden.shape)}"
            f"{token_shape}; they must describe the same tokens"
        )
    if len(head_rollout.weight) != len(head.weight):
        raise ShapeError(
            f"head_rollout has {len(head_rollout.weight)} tokens in its vocabulary, head has "
            f"{len(head.weight)}; cut the padding rows off the larger weight"
        )
