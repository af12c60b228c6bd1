"""Checks before sampling, and packing into `Rollouts` after it, the same for every engine."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor

from offdrift.engines.output_head import check_states
from offdrift.errors import EngineError
from offdrift.ratios import turns_of
from offdrift.records.provenance import Provenance, Sampling
from offdrift.records.rollouts import (
    Evidence,
    EvidenceKind,
    HiddenStates,
    Retention,
    Rollouts,
    Routes,
    Speculation,
    Support,
    cumulative,
    joined_evidence,
    pack_sequences,
)
from offdrift.segments import Segments

MIN_TEMPERATURE = 0.01
"""Below it vLLM clamps in silence and float32 softmax overflows; greedy is `top_k=1`."""


Tokens = Sequence[Sequence[int]]
"""Token ids of several prompts, or of several responses."""


class Request(NamedTuple):
    """Responses that an engine is asked for: drawn from `seed`, or, if `forced`, those tokens followed."""

    prompts: Tokens
    sampling: Sampling
    evidence: EvidenceKind
    seed: int = 0
    forced: Tokens | None = None
    alphas: Sequence[float] | None = None
    """The teacher's share in the logits of each response; None: the policy draws alone."""

    def part(self, rows: slice) -> Request:
        """Return the request for some of the prompts."""
        forced, alphas = self.forced and self.forced[rows], self.alphas and self.alphas[rows]
        return self._replace(prompts=self.prompts[rows], forced=forced, alphas=alphas)


def request_seed(seed: int, index: int) -> int:
    """A 63-bit seed of one request; pairs that differ give unrelated streams."""
    mixed = np.random.SeedSequence([seed % 2**64, index]).generate_state(1, np.uint64)[0]
    return int(mixed >> np.uint64(1))


def entries(evidence: EvidenceKind, vocab_size: int) -> int:
    """Log-probs per token: that of the sampled one, then those of the likeliest that were asked for."""
    if isinstance(evidence, int):
        return 1 + evidence
    return 1 + vocab_size if evidence == "full" else 1


SAMPLING_RULES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "temperature",
        lambda t: math.isfinite(t) and t >= MIN_TEMPERATURE,
        f"must be at least {MIN_TEMPERATURE}; for greedy decoding use top_k=1, whose log-probs are those of what is "
        "drawn",
    ),
    ("top_p", lambda p: 0 < p <= 1, "must be in (0, 1]; 1 keeps all"),
    ("top_k", lambda k: k >= 0, "must be 0 (keeps all) or more"),
    ("min_p", lambda p: 0 <= p < 1, "must be in [0, 1); 0 keeps all"),
    ("max_tokens", lambda count: count >= 1, "must be at least 1"),
)
"""Sampling parameters, the values that each may have, and these in words."""


def check_sampling(sampling: Sampling) -> None:
    """Raise `EngineError` for a parameter that no engine can draw by, before one is made."""
    for name, allowed, rule in SAMPLING_RULES:
        if not allowed(value := getattr(sampling, name)):
            raise EngineError(f"sampling.{name} = {value}, {rule}")


@dataclass(frozen=True)
class Generation:
    """Responses of a few consecutive prompts, packed: `n` tokens in `b` sequences."""

    tokens: Int[Tensor, " n"]
    lengths: Int[Tensor, " b"]
    logp: Float[Tensor, " n"]
    evidence: Evidence | None
    support: Support | None = None
    experts: Integer[Tensor, "p layers k"] | None = None
    """Of `Routes`, where they are recorded."""
    mix_kl: Float[Tensor, " n"] | None = None
    """See `Rollouts`; where a teacher decodes along."""
    visible_until: Int[Tensor, "p layers heads"] | None = None
    """Of `Retention`, where the cache is compressed."""
    speculation: Speculation | None = None
    """Where a drafter proposed tokens."""


def check_request(
    prompts: Tokens,
    sampling: Sampling,
    evidence: EvidenceKind,
    *,
    vocab_size: int,
    state_bytes: int,
    limit_mib: int,
) -> None:
    """Refuse a request that no engine should answer, before anything is drawn.

    Full-vocabulary evidence takes `sequences * max_tokens * vocab_size` float32, top-k evidence
    `sequences * max_tokens * k` pairs of float32 and int32, hidden states `state_bytes` per token
    (and one copy of the output head, which the limit does not count); `limit_mib` is what it may take.

    Raises: `EngineError` naming the prompt or the sampling parameter, its value and the way out.
    """
    if not prompts:
        raise EngineError("prompts is empty; give at least one list of token ids")
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise EngineError(f"prompts[{i}] has no tokens; give at least a start token")
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            bad = next(t for t in prompt if not 0 <= t < vocab_size)
            raise EngineError(f"prompts[{i}] has token id {bad}, the vocabulary has {vocab_size}")
    check_sampling(sampling)
    for stop in sampling.stop_token_ids:
        if not 0 <= stop < vocab_size:
            raise EngineError(f"sampling.stop_token_ids has {stop}, the vocabulary has {vocab_size} tokens")
    if isinstance(evidence, str) and evidence not in ("full", "hidden", "sampled"):
        raise EngineError(f'evidence is "full", "hidden", "sampled" or a number of tokens, got {evidence!r}')
    if isinstance(evidence, int) and not 0 < evidence <= vocab_size:
        raise EngineError(
            f"evidence = {evidence} top log-probs, but the vocabulary has {vocab_size} tokens; "
            'ask for 1 to that many, or for "full"'
        )
    sizes = {"sampled": 0, "full": 4 * vocab_size, "hidden": state_bytes}
    per_token = 8 * evidence if isinstance(evidence, int) else sizes[evidence]
    need = len(prompts) * sampling.max_tokens * per_token / 2**20
    if need > limit_mib:
        raise EngineError(
            f"evidence = {evidence!r} could take {need:,.0f} MiB for {len(prompts)} sequences of up to "
            f"{sampling.max_tokens} tokens over a vocabulary of {vocab_size:,} (limit {limit_mib:,} "
            "MiB); record less (evidence = 20 keeps the top 20 log-probs), draw smaller batches, "
            "or raise evidence_limit_mib"
        )


def rollouts_from(
    draws: Sequence[Generation], prompts: Tokens, *, version: int | Int[Tensor, " n"], provenance: Provenance
) -> Rollouts:
    """One batch from the draws of consecutive chunks of `prompts`, of one trainer `version` or one per token.

    Equal prompts share a group. A response ended with "stop" if its last token is a stop token.

    Raises: `EngineError` if a sampled token has a log-prob that is not finite.
    """
    tokens = _joined([d.tokens for d in draws])
    lengths = torch.cat([d.lengths for d in draws])
    logp = _joined([d.logp for d in draws])
    cuts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    bad = (~logp.isfinite()).nonzero()
    if len(bad):
        token = int(bad[0])
        sequence = int(torch.searchsorted(cuts, token, right=True)) - 1
        raise EngineError(
            f"engine {provenance.engine!r} sampled a token with log-prob {float(logp[token])} "
            f"(sequence {sequence}); its weights or activations are not finite at this dtype: "
            "check the weights it was given, or use a wider dtype"
        )
    ended = torch.isin(tokens[cuts[1:] - 1], torch.tensor(provenance.sampling.stop_token_ids))
    evidence = [d.evidence for d in draws if d.evidence is not None]
    first_seen: dict[tuple[int, ...], int] = {}
    groups = [first_seen.setdefault(tuple(p), len(first_seen)) for p in prompts]
    prompt_tokens, prompt_cuts = pack_sequences(prompts)
    experts = [d.experts for d in draws if d.experts is not None]
    mix_kl = [d.mix_kl for d in draws if d.mix_kl is not None]
    until = [d.visible_until for d in draws if d.visible_until is not None]
    speculation = [d.speculation for d in draws if d.speculation is not None]
    computed = cuts + prompt_cuts - torch.arange(len(cuts))
    return Rollouts(
        tokens=tokens,
        logp_rollout=logp,
        cu_seqlens=cuts,
        rollout_version=torch.as_tensor(version).expand(len(tokens)).contiguous(),
        prompt_tokens=prompt_tokens,
        prompt_cu_seqlens=prompt_cuts,
        group_ids=torch.tensor(groups),
        finish=tuple("stop" if e else "length" for e in ended.tolist()),
        provenance=provenance,
        evidence=joined_evidence(evidence) if evidence else None,
        routes=Routes(_joined(experts), computed) if experts and len(experts) == len(draws) else None,
        retention=Retention(_joined(until), computed) if until else None,
        support=Support.joined([d.support for d in draws]),
        mix_kl=_joined(mix_kl) if mix_kl else None,
        speculation=Speculation.joined(speculation) if speculation else None,
    )


def prompts_of(rollouts: Rollouts) -> list[list[int]]:
    """Token ids of every prompt; of an episode, for each of its turns, all that stands before it."""
    cuts, turns = rollouts.prompt_cu_seqlens.diff().tolist(), rollouts.turns
    prompts = [p.tolist() for p in rollouts.prompt_tokens.split(cuts)]
    if turns is None:
        return prompts
    columns, context_columns = turns.columns(rollouts.cu_seqlens)
    starts, segments = cumulative(rollouts.lengths_with_context), rollouts.segments
    sequence_tokens = torch.empty(int(starts[-1]), dtype=torch.int64)
    sequence_tokens[starts[segments.seq_ids] + columns] = rollouts.tokens.long()
    sequence_tokens[starts[Segments(turns.context_cu_seqlens).seq_ids] + context_columns] = turns.context_tokens.long()
    first = turns_of(segments).cu_seqlens[:-1]
    before = zip(segments.seq_ids[first].tolist(), columns[first].tolist(), strict=True)
    return [prompts[i] + sequence_tokens[starts[i] : starts[i] + column].tolist() for i, column in before]


def responses_of(rollouts: Rollouts) -> list[list[int]]:
    """Token ids of every response; of an episode, of each of its turns."""
    return [r.tolist() for r in rollouts.tokens.split(turns_of(rollouts.segments).lengths.tolist())]


def _joined(parts: list[Tensor]) -> Tensor:
    # A lone part stays where it is: full-vocabulary rows are too large to copy for nothing.
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class Closing(Protocol):
    """A stream as its engine knows it."""

    @property
    def active(self) -> int:
        """Responses in progress."""
        ...

    def close(self) -> None: ...


class BaseEngine(ABC):
    """`generate`, `rescore` and `load_weights` of an engine, around what its backend does."""

    name: str
    version: int
    dtype: str
    quantization: str | None
    vocab_size: int
    evidence_limit_mib: int
    record_routes: bool = False
    """Whether rollouts carry the experts that tokens were sent to."""
    teacher_name: str | None = None
    """Of the model that decodes along where `generate` is given shares for it."""
    instructions: str | None = None
    """What the processor multiplies small numbers with, where an engine on quantized weights runs on one."""
    stream: Closing | None = None
    """The stream that is open on this engine."""
    _state_bytes: int  # of one hidden state

    def generate(
        self,
        prompts: Tokens,
        sampling: Sampling,
        *,
        seed: int,
        evidence: EvidenceKind = "sampled",
        alphas: Sequence[float] | None = None,
    ) -> Rollouts:
        """One response per prompt, in order; see `Engine.generate`.

        Args:
            alphas: share of the engine's teacher in the logits that each response is drawn from, [0, 1]; log-probs,
                evidence and support are then those of the mixture. None: the policy draws alone.

        Raises: `EngineError` if the request makes no sense, the engine is closed, the evidence outgrows the
            limit, if hidden states are asked of a model or a backend that does not show them, or if there is no
            teacher to mix in.
        """
        return self._rollouts(Request(prompts, sampling, evidence, seed, alphas=alphas))

    def rescore(
        self, rollouts: Rollouts, *, evidence: EvidenceKind = "full", sampling: Sampling | None = None
    ) -> Rollouts:
        """Score the same tokens as this engine would have recorded them; see `Rescores`.

        An engine with a teacher mixes it in by the shares of the rollouts; any other scores them by the policy alone.

        Raises: `EngineError` as `generate` does, if a filter excludes a token, or if it cannot follow tokens.
        """
        responses = responses_of(rollouts)
        sampling = replace(sampling or rollouts.provenance.sampling, max_tokens=max(map(len, responses)))
        alphas = None if rollouts.mix_alpha is None or self.teacher_name is None else rollouts.mix_alpha.tolist()
        rescored = self._rollouts(Request(prompts_of(rollouts), sampling, evidence, forced=responses, alphas=alphas))
        if not torch.equal(rescored.tokens, rollouts.tokens.long()):
            raise EngineError(
                f"engine {self.name!r} did not follow the tokens that it was given; "
                "this version of its backend is not supported"
            )
        return rollouts.with_(
            logp_rollout=rescored.logp_rollout,
            rollout_version=rescored.rollout_version,
            provenance=rescored.provenance,
            evidence=rescored.evidence,
            routes=rescored.routes,
            retention=rescored.retention,
            support=rescored.support,
            mix_alpha=rescored.mix_alpha,
            mix_kl=rescored.mix_kl,
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Take all of the trainer's `named_parameters`; see `Engine`.

        Raises: `EngineError` if they are not the weights of this model, or while responses are in progress, which
            only the stream's own `load_weights` treats right.
        """
        self.need_idle("load_weights", "use the stream's own load_weights")
        self.take_weights(weights, version=version)

    def need_idle(self, call: str, way_out: str = "") -> None:
        """Refuse `call` while responses are in progress. Raises: `EngineError` with the way out."""
        if self.stream is not None and self.stream.active:
            way_out = way_out or "step the stream until none is active, or cancel them first"
            raise EngineError(
                f"{call} is refused: engine {self.name!r} has {self.stream.active} responses in progress on a "
                f"stream; {way_out}"
            )

    @abstractmethod
    def take_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """`load_weights`, whatever is in progress."""

    @abstractmethod
    def _draws(self, request: Request) -> list[Generation]:
        """Draw, or follow forced responses; consecutive prompts in each part."""

    @property
    @abstractmethod
    def _source(self) -> tuple[str, str]:
        """The backend's version, and what the model is called."""

    def _rollouts(self, request: Request) -> Rollouts:
        self.check(request)
        draws = self._draws(request)
        provenance = self.provenance(request.sampling)
        if request.alphas is None:
            return rollouts_from(draws, request.prompts, version=self.version, provenance=provenance)
        provenance = replace(provenance, teacher=self.teacher_name)
        rollouts = rollouts_from(draws, request.prompts, version=self.version, provenance=provenance)
        return rollouts.with_(mix_alpha=torch.tensor(request.alphas, dtype=torch.float32))

    def provenance(self, sampling: Sampling) -> Provenance:
        """Provenance of this engine's draws, for a record."""
        source = (*self._source, self.dtype, self.quantization)
        return Provenance(self.name, *source, sampling, instructions=self.instructions)

    def check(self, request: Request) -> None:
        """Refuse a request that this engine should not answer; see `check_request`."""
        check_request(
            *request[:3],
            vocab_size=self.vocab_size,
            state_bytes=self._state_bytes,
            limit_mib=self.evidence_limit_mib,
        )
        if request.alphas is not None:
            self._check_alphas(request)

    def _check_alphas(self, request: Request) -> None:
        alphas = request.alphas
        assert alphas is not None
        if self.teacher_name is None:
            raise EngineError(
                f"engine {self.name!r} has no teacher to mix in; construct a transformers engine with teacher=MODEL, "
                "or leave alphas out"
            )
        if len(alphas) != len(request.prompts) or not all(0 <= a <= 1 for a in alphas):
            raise EngineError(
                f"alphas must be {len(request.prompts)} numbers in [0, 1], one per prompt, got {len(alphas)} from "
                f"{min(alphas, default=math.nan)} to {max(alphas, default=math.nan)}"
            )
        if request.evidence == "hidden":
            raise EngineError(
                "evidence = \"hidden\" gives the policy's states, which do not make the mixture's log-probs; ask for "
                '"full", "sampled" or a number of top log-probs'
            )

    def checked(self, draws: Generation, sampling: Sampling) -> Generation:
        """Return the draws, once their hidden states have reproduced the log-probs beside them."""
        assert isinstance(draws.evidence, HiddenStates)
        temperature = sampling.temperature
        check_states(
            draws.evidence, draws.tokens, draws.logp, temperature=temperature, engine=self.name, support=draws.support
        )
        return draws


def pieces(count: int, size: int) -> list[slice]:
    """Consecutive pieces of at most `size`, which together are `count`."""
    return [slice(i, min(i + size, count)) for i in range(0, count, size)]
