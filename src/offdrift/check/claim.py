"""The claim that two engines are equal: every log-prob, bit for bit, or the first that is not.

`digest` is what two machines compare: the same prompts, tokens and log-probs give the same 64 digits, anything else
others.

    SHA-256 of  "offdrift-equal-1\\n"
                for each sequence: count of prompt tokens, these, count of response tokens, these (int64)
                for each sequence: log-probs of the response tokens (float32, -0 as 0)

All numbers are little-endian; sequences stand in the order of the prompts.

A claim is about the numbers that these tokens need. A bit of a weight that none of them multiplies (the embedding of a
token that does not occur, an expert that no token is sent to), or whose change every sum rounds away, changes no number
and is not seen; hold checksums of the files against each other for those.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from offdrift.check.bench import Bench, EngineSpec
from offdrift.check.measure import Measured, clustered_error
from offdrift.check.paired import alike, along, beside
from offdrift.check.precision import divergence_of
from offdrift.check.rescore import LOGITS, PADDED
from offdrift.engines.hf_fixed_order import is_batch_invariant
from offdrift.engines.score import chunks, score
from offdrift.errors import BadValueError
from offdrift.records.rollouts import FullVocab, Rollouts
from offdrift.segments import Segments

HEADER = b"offdrift-equal-1\n"
MOST_NUMBERS = 8192
"""Tokens of which a claim keeps the log-probs, at most."""


@dataclass(frozen=True)
class Claim:
    """Result of comparing two engines bit by bit on the same tokens, with the first difference."""

    equal: bool
    tokens: int
    equal_tokens: int
    """Tokens whose log-probs are the same on both sides: of the whole vocabulary where it was recorded."""
    whole: bool
    """Whether log-probs of the whole vocabulary were compared, not those of the drawn tokens alone."""
    digest_rollout: str
    digest_train: str
    kl: float
    """Mean KL per token, nat: 0 if equal; of the drawn tokens' log-ratios where distributions were not recorded."""
    kl_low: float
    kl_high: float
    """Interval of that mean over fresh prompts, 95 %, clustered by sequence; [0, 0] if equal."""
    first: dict[str, Any] | None = None
    """First difference: request, token, its id, and both log-probs."""
    other: str = ""
    """The engine that the rollout engine was compared with; "": the trainer."""
    computed: str = ""
    """How that other engine's log-probs came about: decoded, or read at once."""
    numbers: dict[str, Any] | None = None
    """Tokens and the rollout engine's log-probs of each request, by which another machine finds the first that differs;
    None of more than `MOST_NUMBERS` tokens."""

    def __str__(self) -> str:
        """One sentence.

        Example:
            >>> str(Claim(True, 8, 8, True, "ab" * 32, "ab" * 32, 0.0, 0.0, 0.0))[:40]
            'equal: 8 of 8 tokens, KL = 0, digest aba'
        """
        over = "over the whole vocabulary" if self.whole else "log-probs of the drawn tokens alone were shown"
        over = f"{over}; {self.other} {self.computed}" if self.other else over
        if self.equal:
            return (
                f"equal: {self.equal_tokens:,} of {self.tokens:,} tokens, KL = 0, digest {self.digest_rollout} ({over})"
            )
        first, where = self.first or {}, "other one" if self.other else "trainer"
        return (
            f"not equal: {self.equal_tokens:,} of {self.tokens:,} tokens are ({over}); first difference at request "
            f"{first.get('request')}, token {first.get('token')}: log-prob {first.get('rollout')!r} in the rollout "
            f"engine, {first.get('train')!r} in the {where}; KL {self.kl:.3g} nat per token "
            f"({self.kl_low:.3g} to {self.kl_high:.3g})"
        )

    def as_dict(self) -> dict[str, Any]:
        """Entry of `check.json`."""
        return {**asdict(self), "text": str(self)}


def claimed_equal(bench: Bench, rollouts: Rollouts, baseline: Measured, train: EngineSpec) -> Claim:
    """Compare every log-prob of rollout engine and trainer, bit for bit."""
    log = baseline.logged
    assert log is not None
    assert log.logp_old is not None
    theirs, ours = rollouts.logp_rollout.float(), log.logp_old.float()
    same = theirs == ours
    whole = isinstance(rollouts.evidence, FullVocab)
    if whole:
        same &= same_distributions(bench, rollouts, train)
    return _claim(rollouts, theirs, ours, same=same, divergence=divergence_of(log), whole=whole)


def claimed_equal_to(bench: Bench, rollouts: Rollouts, rollout: EngineSpec, against: EngineSpec) -> Claim:
    """Compare every log-prob of the rollout engine and of another one that is led along the same tokens, bit for bit.

    Where the other one is a server that can only read tokens, both read them, and the claim says so.

    Raises: `NotOfferedError` if the other engine can neither be led along tokens nor read them; `BadValueError` for
        tokens that were drawn at another temperature than 1, or with filters.
    """
    sampling = rollouts.provenance.sampling
    if sampling.filtered or sampling.temperature != 1:
        raise BadValueError("a claim about two engines needs tokens drawn at temperature 1 without filters")
    other, computed = along(bench, against, rollouts)
    own = beside(bench, rollout, rollouts, computed)
    theirs, ours = own.logp_rollout.float(), other.logp_rollout.float()
    whole = isinstance(own.evidence, FullVocab) and isinstance(other.evidence, FullVocab)
    found = _claim(
        rollouts,
        theirs,
        ours,
        same=alike(own, other),
        divergence=(theirs.double() - ours.double()).square() / 2,
        whole=whole,
    )
    return replace(found, other=str(against), computed=computed)


def _claim(
    rollouts: Rollouts,
    theirs: Float[Tensor, " n"],
    ours: Float[Tensor, " n"],
    *,
    same: Bool[Tensor, " n"],
    divergence: Float[Tensor, " n"],
    whole: bool,
) -> Claim:
    """The claim about two engines' log-probs of the same tokens; `divergence` is that of every token, nat."""
    equal = bool(same.all())
    mean, error = float(divergence.mean()), clustered_error(divergence, Segments(rollouts.cu_seqlens))
    reach = 0.0 if equal else 1.96 * error
    first = None
    if not equal:
        at = int((~same).nonzero()[0])
        request = int(torch.searchsorted(rollouts.cu_seqlens, at, right=True)) - 1
        first = {
            "request": request,
            "token": at - int(rollouts.cu_seqlens[request]),
            "token_id": int(rollouts.tokens[at]),
            "rollout": float(theirs[at]),
            "train": float(ours[at]),
            "drawn_token": bool(theirs[at] != ours[at]),
        }
    return Claim(
        equal,
        tokens=len(same),
        equal_tokens=int(same.sum()),
        whole=whole,
        digest_rollout=digest(rollouts, theirs),
        digest_train=digest(rollouts, ours),
        kl=0.0 if equal else mean,
        kl_low=0.0 if equal else max(0.0, mean - reach),
        kl_high=0.0 if equal else mean + reach,
        first=first,
        numbers=numbers_of(rollouts, theirs) if len(same) <= MOST_NUMBERS else None,
    )


@torch.no_grad()
def same_distributions(bench: Bench, rollouts: Rollouts, train: EngineSpec) -> Bool[Tensor, " n"]:
    """Tokens whose recorded log-probs over the whole vocabulary have the trainer's bits."""
    model, evidence = bench.train_model(train), rollouts.evidence
    assert isinstance(evidence, FullVocab)
    temperature = rollouts.provenance.sampling.temperature
    same = torch.zeros(len(rollouts.tokens), dtype=torch.bool)
    cuts = rollouts.cu_seqlens
    for piece in chunks(rollouts, token_budget=min(PADDED, max(1, LOGITS // evidence.logp.shape[1]))):
        part = rollouts.select(piece).with_(support=None)
        rows = torch.cat([torch.arange(int(cuts[i]), int(cuts[i + 1])) for i in piece.tolist()])
        ours = score(model, part, temperature=temperature).logits.float()
        ours = (ours if is_batch_invariant(model) else ours.log_softmax(-1)).cpu()  # log-probs already
        same[rows] = (evidence.logp[rows].float() == ours).all(-1)
    return same


def digest(rollouts: Rollouts, logp: Float[Tensor, " n"]) -> str:
    """SHA-256 of prompts, tokens and log-probs as the module says, 64 hexadecimal digits.

    Raises: `BadValueError` for a log-prob that is not a number.
    """
    values = logp.detach().cpu().float().numpy().astype("<f4")
    if not np.isfinite(values).all():
        at = int(np.flatnonzero(~np.isfinite(values))[0])
        raise BadValueError(f"the log-prob of token {at} is {values[at]}; a digest is of finite numbers")
    values = np.where(values == 0, np.float32(0), values).astype("<f4")
    whole = hashlib.sha256(HEADER)
    prompts = zip(rollouts.prompt_cu_seqlens.tolist(), rollouts.prompt_cu_seqlens.tolist()[1:])
    responses = zip(rollouts.cu_seqlens.tolist(), rollouts.cu_seqlens.tolist()[1:])
    for (a, b), (c, d) in zip(prompts, responses, strict=True):
        for tokens in (rollouts.prompt_tokens[a:b], rollouts.tokens[c:d]):
            whole.update(np.array([len(tokens)], dtype="<i8").tobytes())
            whole.update(tokens.cpu().numpy().astype("<i8").tobytes())
    whole.update(values.tobytes())
    return whole.hexdigest()


def numbers_of(rollouts: Rollouts, logp: Float[Tensor, " n"]) -> dict[str, Any]:
    """Prompts, tokens and log-probs of every request: a float32 is the same again after JSON."""
    prompts = rollouts.prompt_tokens.split(rollouts.prompt_cu_seqlens.diff().tolist())
    lengths = rollouts.lengths.tolist()
    return {
        "prompts": [x.tolist() for x in prompts],
        "tokens": [x.tolist() for x in rollouts.tokens.split(lengths)],
        "logp": [x.tolist() for x in logp.detach().cpu().split(lengths)],
    }


def with_module(claim: Claim, bisected: dict[str, Any]) -> dict[str, Any]:
    """A claim's entry with the first module that differs, where the engine shows its layers."""
    entry = claim.as_dict()
    first = bisected.get("first")
    if claim.first is not None and isinstance(first, dict):
        entry["first"] = {**claim.first, "module": first["module"], "within": first["within"]}
        module = first["module"]
        entry["text"] += (
            f"; first in module {module}"
            if first["within"] == module
            else (f"; first in {first['within'] or 'the model'}, before its module {module}")
        )
    elif claim.first is not None and (why := bisected.get("why")):
        entry["text"] += f"; the module is not known: {why}"
    return entry
