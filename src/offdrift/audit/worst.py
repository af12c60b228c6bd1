"""`Worst`: the sequences and tokens of a log that drifted most, with what is needed to look at them.

A sequence ranks by its sum of e^l - 1 - l, an estimate in nats of how far the two policies are apart on the whole of
it; a token by |l|. Ties go to the earlier place in the log, so that parts may be merged in any order.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from offdrift.numerics import at_least_float32, clamped
from offdrift.records.batch import Logged
from offdrift.stats.signature import PerSequence

SEQUENCES, TOKENS = 20, 50
WINDOW = 600
"""Tokens of a sequence that are shown, around its worst one."""
PROMPT_CHARACTERS, COMPLETION_CHARACTERS, CONTEXT_CHARACTERS = 2000, 6000, 160
"""How much text is kept."""

Entry = dict[str, Any]


@dataclass(frozen=True)
class Worst:
    """The worst sequences and tokens, worst first, as plain data."""

    sequences: tuple[Entry, ...] = ()
    tokens: tuple[Entry, ...] = ()

    @staticmethod
    def of(batch: Logged, on: str, per_sequence: PerSequence, *, file: str) -> Worst:
        """The worst of one batch of a file, by the ratio `on` ("mismatch" or "full") and its sums by sequence."""
        score = (per_sequence.excess - per_sequence.total).where(per_sequence.lengths > 0, -torch.inf)
        largest = _largest(score, SEQUENCES).tolist()
        sequences = (_sequence(batch, on, i, float(score[i]), file) for i in largest)
        return Worst(_best(sequences, "k3_sum", SEQUENCES), _worst_tokens(batch, on, per_sequence, file))

    def merge(self, other: Worst) -> Worst:
        """The worst of both."""
        return Worst(
            _best((*self.sequences, *other.sequences), "k3_sum", SEQUENCES),
            _best((*self.tokens, *other.tokens), "abs_log_ratio", TOKENS),
        )

    def as_dict(self) -> dict[str, list[Entry]]:
        """Both lists, as plain data."""
        return {"sequences": list(self.sequences), "tokens": list(self.tokens)}


def _best(entries: Iterable[Entry], score: str, keep: int) -> tuple[Entry, ...]:
    def place(e: Entry) -> tuple[Any, ...]:
        return (-e[score], e["file"], e["row"], e.get("position", 0))

    return tuple(heapq.nsmallest(keep, entries, key=place))


def _largest(x: Float[Tensor, " n"], keep: int) -> Int[Tensor, " k"]:
    """Places of the largest positive values: all that beat the last one, and its first equals."""
    if not len(x):
        return x.new_zeros(0, dtype=torch.int64)
    least = x.topk(min(keep, len(x))).values[-1].clamp(min=torch.finfo(x.dtype).tiny)
    places = (x >= least).nonzero().squeeze(-1)
    return places[torch.sort(x[places], descending=True, stable=True).indices[:keep]]


def _log_ratio(batch: Logged, on: str, at: slice | Tensor) -> Float[Tensor, " k"]:
    second = batch.logp_old if on == "mismatch" else batch.logp
    assert second is not None
    assert batch.logp_rollout is not None
    return at_least_float32(second[at]) - at_least_float32(batch.logp_rollout[at])


def _worst_tokens(batch: Logged, on: str, per_sequence: PerSequence, file: str) -> tuple[Entry, ...]:
    """The worst tokens: the k-th largest |l| is at least the k-th largest of the sequences' own maxima."""
    assert batch.logp_rollout is not None
    worst = per_sequence.worst
    least = worst.topk(min(TOKENS, len(worst))).values[-1]
    rows = batch.segments.rows((worst >= least).nonzero().squeeze(-1))
    log_ratios = _log_ratio(batch, on, rows)
    largest = _largest(log_ratios.abs(), TOKENS)
    rows, log_ratios = rows[largest], log_ratios[largest]
    sequences = torch.searchsorted(batch.cu_seqlens, rows, right=True) - 1
    entries = []
    for t, log_ratio, i in zip(rows.tolist(), log_ratios.tolist(), sequences.tolist()):
        start, end = batch.cu_seqlens[i : i + 2].tolist()
        position = t - start if batch.position is None else int(batch.position[t])
        share = (position + 0.5) / max(int(batch.response_lengths[i]), position + 1)
        if batch.length_unit != "token":
            share = (t - start + 0.5) / (end - start)
        entry = {
            **_place(batch, i, file),
            "position": position,
            "token": None if batch.tokens is None else int(batch.tokens[t]),
            "log_ratio": log_ratio,
            "abs_log_ratio": abs(log_ratio),
            "logp_rollout": float(batch.logp_rollout[t]),
            "context": _excerpt(batch.completions, i, share, CONTEXT_CHARACTERS),
            "context_is": "near",  # located by the token's share of the response: a log has no tokenizer
        }
        entries.append(entry)
    return _best(entries, "abs_log_ratio", TOKENS)


def _sequence(batch: Logged, on: str, i: int, score: float, file: str) -> Entry:
    start, end = batch.cu_seqlens[i : i + 2].tolist()
    l = _log_ratio(batch, on, slice(start, end))  # noqa: E741
    worst = int(l.abs().argmax())
    first = max(0, min(worst - WINDOW // 2, len(l) - WINDOW))
    shown = slice(start + first, min(start + first + WINDOW, end))
    assert batch.logp_rollout is not None
    kl = batch.divergences.get("kl_rollout_old" if on == "mismatch" else "kl_rollout_current")
    limited = clamped(l).double()
    share = (worst + 0.5) / len(l)
    return {
        **_place(batch, i, file),
        "reward": None if batch.rewards is None or not batch.rewards[i].isfinite() else float(batch.rewards[i]),
        "advantage": None if batch.advantages is None else float(batch.advantages[start:end].double().mean()),
        "length": int(batch.response_lengths[i]),
        "on": on,
        "max_abs_log_ratio": float(l[worst].abs()),
        "k3_mean": float((limited.expm1() - limited).mean()),
        "k3_sum": score,
        "prompt": _excerpt(batch.prompts, i, 1.0, PROMPT_CHARACTERS),
        "completion": _excerpt(batch.completions, i, share, COMPLETION_CHARACTERS),
        "tokens": None if batch.tokens is None else batch.tokens[shown].tolist(),
        "first": first,
        "log_ratio": l[first : first + WINDOW].tolist(),
        "logp_rollout": batch.logp_rollout[shown].tolist(),
        "kl": None if kl is None else kl[shown].tolist(),
    }


def _place(batch: Logged, i: int, file: str) -> Entry:
    return {"step": int(batch.step[i]), "file": file, "row": int(batch.row[i])}


def _excerpt(texts: tuple[str, ...] | None, i: int, share: float, width: int) -> str | None:
    """So many characters around a share of the text; an ellipsis where something was left out."""
    if texts is None:
        return None
    text = texts[i]
    first = max(0, min(int(share * len(text)) - width // 2, len(text) - width))
    left, right = "…" if first else "", "…" if first + width < len(text) else ""
    return f"{left}{text[first : first + width]}{right}"
