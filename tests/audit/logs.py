"""Logs to audit: drawn from known distributions, of known drift, or random with every field and heavy tails.

And what each metric is by its formula, one token at a time.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from offdrift.audit.partial import AuditPartial
from offdrift.records.batch import Logged

SCALES = (3e-4, 0.01, 0.1, 0.3, 0.8)
"""Nats by which the tokens of a sequence drift, from mu to old and from old to pi."""
LIMIT = 20.0
ALL = (
    "logp_old",
    "logp",
    "advantages",
    "rewards",
    "group_ids",
    "rollout_version",
    "version",
    "entropy",
    "divergences",
    "tokens",
    "old_status",
    "truncated",
    "workers",
    "drawn_by",
    "mix_alpha",
    "texts",
)


def log_of(lengths: Sequence[int] | Tensor, steps: Sequence[int] | Tensor | None = None, **fields: Any) -> Logged:
    """A log of sequences of these lengths (0 is legal); all at step 1 unless told."""
    size = torch.as_tensor(lengths)
    return Logged(
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), size.cumsum(0)]),
        step=torch.ones(len(size), dtype=torch.int64) if steps is None else torch.as_tensor(steps),
        row=torch.arange(1, len(size) + 1),
        **{"response_lengths": size, **fields},
    )


def drawn(*, sequences: int = 24, steps: int = 3, drift: float = 0.1, seed: int = 0, vocab: int = 12) -> Logged:
    """Tokens drawn from one policy, and what two others say of them.

    The rollout policy is a softmax of random logits at every token; the old policy adds noise of
    size `drift` to them, the current policy noise of twice the size. So every signature is genuine.
    """
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 40, (sequences,), generator=g)
    logits = 2 * torch.randn(int(lengths.sum()), vocab, generator=g)
    near = logits + drift * torch.randn(logits.shape, generator=g)
    far = logits + 2 * drift * torch.randn(logits.shape, generator=g)
    tokens = torch.multinomial(logits.softmax(-1), 1, generator=g)
    mu, old, new = (x.log_softmax(-1).gather(-1, tokens).squeeze(-1) for x in (logits, near, far))
    step = torch.arange(sequences) * steps // sequences
    return log_of(
        lengths,
        step,
        logp_rollout=mu,
        logp_old=old,
        logp=new,
        advantages=torch.randn(sequences, generator=g).repeat_interleave(lengths),
        rewards=torch.randint(0, 2, (sequences,), generator=g).float(),
        group_ids=torch.arange(sequences) // 4,
        rollout_version=(step - step % 2).repeat_interleave(lengths),
        version=step,
        tokens=tokens.squeeze(-1),
        prompts=tuple(f"prompt {i // 4}" for i in range(sequences)),
        completions=tuple(f"answer {i}" for i in range(sequences)),
    )


def asynchronous(
    seed: int = 0, *, sequences: int = 400, workers: int = 8, noise: float = 0.02, off: float = 0.0, apart: float = 0.0
) -> Logged:
    """Eight steps of a run whose workers draw while it trains: tokens of a response may have several versions.

    Args:
        noise: of the logits of the policy that is trained, about those that drew: arithmetic alone.
        off: nats that the last worker's recorded log-probs are too high by.
        apart: noise of the last worker's weights, added to the other.
    """
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 60, (sequences,), generator=g)
    worker = torch.randint(0, workers, (sequences,), generator=g)
    last = (worker == workers - 1).repeat_interleave(lengths)
    logits = 2.5 * torch.randn(int(lengths.sum()), 32, generator=g, dtype=torch.float64)
    moved = logits + (noise + apart * last)[:, None] * torch.randn(logits.shape, generator=g, dtype=torch.float64)
    tokens = torch.multinomial(logits.softmax(-1), 1, generator=g)
    mu, pi = (x.log_softmax(-1).gather(-1, tokens).squeeze(-1) for x in (logits, moved))
    step = 1 + torch.arange(sequences) * 8 // sequences
    # Each response begins at most two versions ago, and half of them are cut by an update.
    begun = (step + 1 - torch.randint(0, 3, (sequences,), generator=g)).repeat_interleave(lengths)
    cut = (torch.randint(0, 2, (sequences,), generator=g) * (lengths // 2 + 1)).repeat_interleave(lengths)
    place = torch.cat([torch.arange(int(n)) for n in lengths])
    version = step + 1
    drawn_by = torch.minimum(begun + ((place >= cut) & (cut > 0)), version.repeat_interleave(lengths))
    return log_of(
        lengths,
        step,
        logp_rollout=(mu + off * last).clamp(max=0),
        logp_old=pi,
        logp=pi,
        rewards=torch.rand(sequences, generator=g),
        group_ids=torch.arange(sequences) // 4,
        rollout_version=drawn_by,
        version=version,
        selected=torch.ones(sequences, dtype=torch.int64),
        workers=tuple(f"worker-{i}" for i in worker.tolist()),
        queue_seconds=torch.rand(sequences, generator=g),
        generation_seconds=lengths / 10,
    )


def logged(lengths: Sequence[int], *, steps: Any = None, group: int = 3, scales: Sequence[float] = SCALES) -> Logged:
    """Sequences of the given lengths, `group` of them per prompt, drift cycling through `scales`."""
    draw = torch.Generator().manual_seed(0)
    size, b = torch.tensor(lengths), len(lengths)
    n = int(size.sum())

    def normal(k: int) -> Tensor:
        return torch.randn(k, generator=draw, dtype=torch.float64)

    drift = torch.tensor(scales, dtype=torch.float64)[torch.arange(b) % len(scales)].repeat_interleave(size)
    mu = -4 - 2 * torch.rand(n, generator=draw, dtype=torch.float64)
    old = mu + drift * normal(n).clamp(-3, 3)
    current = old + drift * normal(n).clamp(-3, 3)
    names = [(f"{d}_rollout_{p}", x) for d in ("kl", "tv") for p, x in (("current", current), ("old", old))]
    return log_of(
        size,
        steps,
        response_lengths=torch.tensor([63, 64, 65, 1000, 70_000, 2])[torch.arange(b) % 6],
        logp_rollout=mu,
        logp_old=old,
        logp=current,
        advantages=(normal(b) + 0.1).repeat_interleave(size),
        rewards=torch.rand(b, generator=draw, dtype=torch.float64),
        group_ids=torch.arange(b) // group,
        rollout_version=(torch.arange(b) % 4).repeat_interleave(size),
        version=torch.full((b,), 4),
        entropy=torch.rand(n, generator=draw, dtype=torch.float64),
        divergences={name: (x - mu).square() / 2 for name, x in names},
    )


def make_log(
    seed: int = 0,
    *,
    lengths: list[int] | None = None,
    steps: list[int] | None = None,
    fields: tuple[str, ...] = ALL,
    drift: float = 0.05,
    dtype: torch.dtype = torch.float64,
) -> Logged:
    """A random log with heavy-tailed drift and short texts."""
    g = torch.Generator().manual_seed(seed)
    if lengths is None:
        lengths = torch.randint(0, 200, (24,), generator=g).tolist()
    b, n, size = len(lengths), sum(lengths), torch.tensor(lengths)

    def noise(scale: float) -> Tensor:
        x = torch.randn(n, generator=g, dtype=torch.float64)
        return scale * x * (1 + 20 * (torch.rand(n, generator=g) < 0.02))

    rollout = -6 * torch.rand(n, generator=g, dtype=torch.float64) ** 4
    old = (rollout + noise(drift)).clamp(max=0.0)
    new = (old + noise(2 * drift)).clamp(max=0.0)
    values: dict[str, Any] = {
        "logp_old": old.to(dtype),
        "logp": new.to(dtype),
        "advantages": torch.randint(-1, 2, (b,), generator=g).repeat_interleave(size).to(dtype),
        "rewards": torch.randint(0, 3, (b,), generator=g).to(dtype) / 2,
        "group_ids": torch.arange(b) // 4,
        "rollout_version": torch.randint(0, 45, (b,), generator=g).repeat_interleave(size),
        "version": torch.full((b,), 44),
        "entropy": torch.rand(n, generator=g, dtype=torch.float64).to(dtype),
        "divergences": {"kl_rollout_old": torch.rand(n, generator=g, dtype=torch.float64).to(dtype)},
        "tokens": torch.randint(0, 1000, (n,), generator=g),
        "truncated": torch.randint(0, 2, (b,), generator=g),
        "old_status": torch.randint(0, 4, (b,), generator=g),
        "workers": tuple(("node-1/0", "node-1/1", "", "node-2")[i % 4] for i in range(b)),
        "drawn_by": tuple(("vllm", "sglang")[i % 2] for i in range(b)),
        "mix_alpha": torch.rand(b, generator=g, dtype=torch.float64).to(dtype),
    }
    chosen = {name: x for name, x in values.items() if name in fields}
    if "texts" in fields:
        chosen["prompts"] = tuple(f"question {i}" for i in range(b))
        chosen["completions"] = tuple("word " * max(1, k) for k in lengths)
    steps = steps if steps is not None else [1 + 3 * i // b for i in range(b)]
    return log_of(size, steps, logp_rollout=rollout.to(dtype), **chosen)


def close(a: Any, b: Any, *, rel: float = 1e-9, near: float = 1e-12, where: str = "") -> int:
    """Compare nested data up to rounding; how many values were compared."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        return sum(close(a[k], b[k], rel=rel, near=near, where=f"{where}.{k}") for k in a)
    if isinstance(a, list | tuple):
        assert len(a) == len(b), where
        return sum(close(x, y, rel=rel, near=near, where=f"{where}[{i}]") for i, (x, y) in enumerate(zip(a, b)))
    assert a == (pytest.approx(b, rel=rel, abs=near, nan_ok=True) if isinstance(b, float) else b), where
    return 1


def stored(statistics: Any) -> Any:
    """A tally, a counterfactual or a proof after it was stored and read back."""
    name = type(statistics).__name__.lower()
    return getattr(AuditPartial.from_bytes(AuditPartial(**{name: statistics}).to_bytes()), name)


def log_ratios(log: Logged, on: str) -> list[list[float]]:
    """l of every token by sequence, as Python numbers."""
    second = log.logp_old if on == "mismatch" else log.logp
    flat, cuts = (second - log.logp_rollout).tolist(), log.cu_seqlens.tolist()
    return [flat[a:b] for a, b in itertools.pairwise(cuts)]


def token_metrics(ls: list[float]) -> dict[str, float]:
    """The metrics of a facet's row from its tokens' log-ratios."""
    n = len(ls)
    limited = [max(-LIMIT, min(LIMIT, x)) for x in ls]
    w = [math.exp(x) for x in limited]
    return {
        "k1": -sum(limited) / n,
        "k3": sum(math.expm1(x) - x for x in limited) / n,
        "abs_log_ratio_mean": sum(map(abs, ls)) / n,
        "abs_log_ratio_max": max(map(abs, ls)),
        "chi2_token": sum(x * x for x in w) / n - 1,
        "ess_frac": sum(w) ** 2 / (n * sum(x * x for x in w)),
        "tv_sampled": sum(abs(x - 1) for x in w) / n / 2,
        "ratio_mean": sum(w) / n,
    }


def by_bucket(
    log: Logged, on: str, place: Callable[[Logged, int, int], object]
) -> dict[object, list[tuple[int, float]]]:
    """(sequence, log-ratio) of the tokens of each bucket, by `place(log, sequence, token)`."""
    buckets: dict[object, list[tuple[int, float]]] = {}
    for i, ls in enumerate(log_ratios(log, on)):
        for t, x in enumerate(ls):
            buckets.setdefault(place(log, i, t), []).append((i, x))
    return buckets
