"""The claim that two engines are equal: every log-prob, bit for bit, or the first that is not.

`digest` is what two machines compare: the same prompts, tokens and log-probs give the same 64 digits, anything else
others.

    SHA-256 of  "offdrift-equal-1\\n"
                for each sequence: count of prompt tokens, these, count of response tokens, these (int64)
                for each sequence: log-probs of the response tokens (float32, -0 as 0)

All numbers are little-endian; sequences stand in the order of the prompts.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from offdrift.check.bench import Bench, EngineSpec
from offdrift.check.measure import Measured, clustered_error
from offdrift.check.precision import divergence_of
from offdrift.check.rescore import LOGITS, PADDED
from offdrift.engines.hf_fixed_order import is_batch_invariant
from offdrift.engines.score import chunks, score
from offdrift.errors import BadValueError
from offdrift.records.rollouts import FullVocab, Rollouts

HEADER = b"offdrift-equal-1\n"


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

    def __str__(self) -> str:
        """One sentence.

        Example:
            >>> str(Claim(True, 8, 8, True, "ab" * 32, "ab" * 32, 0.0, 0.0, 0.0))[:40]
            'equal: 8 of 8 tokens, KL = 0, digest aba'
        """
        over = "over the whole vocabulary" if self.whole else "log-probs of the drawn tokens alone were shown"
        if self.equal:
            return (
                f"equal: {self.equal_tokens:,} of {self.tokens:,} tokens, KL = 0, digest {self.digest_rollout} ({over})"
            )
        first = self.first or {}
        return (
            f"not equal: {self.equal_tokens:,} of {self.tokens:,} tokens are ({over}); first difference at request "
            f"{first.get('request')}, token {first.get('token')}: log-prob {first.get('rollout')!r} in the rollout "
            f"engine, {first.get('train')!r} in the trainer; KL {self.kl:.3g} nat per token "
            f"({self.kl_low:.3g} to {self.kl_high:.3g})"
        )

    def as_dict(self) -> dict[str, Any]:
        """Entry of `check.json`."""
        return {**asdict(self), "text": str(self)}


def claimed_equal(bench: Bench, rollouts: Rollouts, baseline: Measured, train: EngineSpec) -> Claim:
    """Compare every log-prob of both engines, bit for bit."""
    log = baseline.logged
    assert log is not None
    assert log.logp_old is not None
    theirs, ours = rollouts.logp_rollout.float(), log.logp_old.float()
    same = theirs == ours
    whole = isinstance(rollouts.evidence, FullVocab)
    if whole:
        same &= same_distributions(bench, rollouts, train)
    equal = bool(same.all())
    d = divergence_of(log)
    mean, error = float(d.mean()), clustered_error(d, log.segments)
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
