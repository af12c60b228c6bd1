"""Checks recorded evidence: can these log-probs be those of one distribution?

Evidence comes from outside (a server, an engine, a file), and what is made of it counts as exact. Divergences
normalize what they are given, so that probabilities that sum to 4 would give a KL of 0. It is checked at the door:

    whole vocabulary   |sum p - 1| <= slack
    top k              sum p <= 1 + slack, with the drawn token where it is not among them; ids differ; likeliest first
    drawn token        its entry is its log-prob, and no token of the top k that is left out is likelier

The slack is what rounding makes of a distribution whose log-softmax was taken in float32, over v tokens. A log-prob l
is off by u |l|, u = 2^-24, and the normalizer, a sum in eight lanes or more, by u v / 8:

    slack = u (sum p |l| + max(1024, v / 8))

A row whose every number is a bfloat16 (u = 2^-8) or a float16 (u = 2^-11) was rounded once more, by u |l|.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from offdrift.numerics import at_least_float32
from offdrift.records.rollouts import Evidence, FullVocab, TopK

UNIT = 2.0**-24
"""Largest relative error of a number that is rounded to float32."""
LANES, FEWEST = 8, 1024
"""Sums that a normalizer is added up in, at least; and what its error is taken for at least, in units."""
VOCABULARY = 2**18
"""Tokens that a vocabulary is taken to have where only the likeliest are known."""
BLOCK = 1 << 24
"""Numbers that are looked at together."""
HALVES = (torch.bfloat16, torch.float16)


def implausible(
    evidence: Evidence | None, tokens: Int[Tensor, " n"], logp: Float[Tensor, " n"]
) -> tuple[int, str] | None:
    """The first token whose evidence is no distribution, or not that of its log-prob, and why; None if there is none.

    Args:
        evidence: a whole vocabulary or the k likeliest per token; hidden states are normalized when they are used.
        tokens: what was drawn.
        logp: its log-probs; NaN and -inf, which are not scored, are not compared.

    Example:
        >>> half = torch.tensor([[0.5, 0.5]]).log()
        >>> implausible(FullVocab(half), torch.tensor([0]), half[:, 0]) is None
        True
        >>> implausible(FullVocab(half + 0.7), torch.tensor([0]), half[:, 0] + 0.7)
        (0, 'its 2 probabilities sum to 2.01375, not to 1 (by 6e-05, the rounding of float32)')
    """
    if not isinstance(evidence, FullVocab | TopK):
        return None
    rows = max(1, BLOCK // max(evidence.logp.shape[1], 1))
    for first in range(0, len(tokens), rows):
        part = slice(first, first + rows)
        ids = evidence.ids[part] if isinstance(evidence, TopK) else None
        found = _first(evidence.logp[part], ids, tokens[part].long(), logp[part])
        if found is not None:
            return first + found[0], found[1]
    return None


def _first(
    listed: Float[Tensor, "n k"], ids: Int[Tensor, "n k"] | None, tokens: Int[Tensor, " n"], logp: Float[Tensor, " n"]
) -> tuple[int, str] | None:
    """As `implausible`, of a block."""
    listed, k = at_least_float32(listed), listed.shape[1]
    p = listed.exp()
    total = p.sum(-1, dtype=torch.float64)
    slack, dtype = _slack(listed, p, VOCABULARY if ids is not None else k)
    if ids is None:
        own, there = listed.gather(1, tokens[:, None])[:, 0], torch.ones_like(tokens, dtype=torch.bool)
    else:
        among = ids.long() == tokens[:, None]
        there = among.any(1)
        own = listed.where(among, -torch.inf).amax(1)
        total = total + logp.double().exp().where(~there & logp.isfinite(), 0.0)
    checks = [(there & logp.isfinite() & ~((own - logp).abs() <= slack * (1 + logp.abs())), "drawn")]
    if ids is None:
        checks.insert(0, (~((total - 1).abs() <= slack), "sum"))
    else:
        ordered = ids.sort(1).values
        checks[:0] = [(~(total <= 1 + slack), "sum"), ((ordered[:, 1:] == ordered[:, :-1]).any(1), "twice")]
        checks.append(((listed[:, 1:] > listed[:, :-1] + slack[:, None]).any(1), "order"))
        checks.append((~there & logp.isfinite() & (logp > listed[:, -1] + slack * (1 + logp.abs())), "left out"))
    wrong = torch.stack([rows for rows, _ in checks])
    if not bool(wrong.any()):
        return None
    i = int(wrong.any(0).nonzero()[0])
    kind = checks[int(wrong[:, i].nonzero()[0])][1]
    by = f"(by {float(slack[i]):.1g}, the rounding of {dtype[i]})"
    return i, {
        "sum": f"its {k} probabilities sum to {float(total[i]):.6g}, {'not to 1' if ids is None else 'above 1'} {by}",
        "twice": f"a token is twice among the {k} likeliest",
        "drawn": f"the drawn token {int(tokens[i])} has two log-probs, {float(logp[i]):.6g} and {float(own[i]):.6g}",
        "order": f"its {k} likeliest tokens are not in order",
        "left out": f"the drawn token {int(tokens[i])}, at {float(logp[i]):.6g}, is likelier than the last of the {k} "
        f"likeliest, at {float(listed[i, -1]):.6g}, and not among them",
    }[kind]


def _slack(listed: Float[Tensor, "n k"], p: Float[Tensor, "n k"], vocabulary: int) -> tuple[Tensor, list[str]]:
    """By how much the probabilities of each token may be off, and the name of the dtype that explains it."""
    spread = (p * listed.clamp(min=-1e4).abs()).nan_to_num(0.0).sum(-1, dtype=torch.float64)
    slack = UNIT * (spread + max(FEWEST, vocabulary / LANES))
    names = ["float32"] * len(listed)
    for dtype in HALVES:
        rounded = (listed.to(dtype).to(listed.dtype) == listed).all(1)
        slack = torch.maximum(slack, (torch.finfo(dtype).eps / 2 * spread).where(rounded, 0.0))
        for i in rounded.nonzero()[:, 0].tolist() if bool(rounded.any()) else ():
            names[i] = str(dtype).removeprefix("torch.") if names[i] == "float32" else names[i]
    return slack, names
