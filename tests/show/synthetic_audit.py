"""The contents of `audit.json` and `check.json` as offdrift writes them, without an audit.

Log-ratios are drawn with the shape that real ones have (a narrow middle, heavy tails, drift that
grows after a planted step) and every number follows from them by its formula; all from the seed.
"""

import math
from typing import Any

import numpy as np

from offdrift.methods import METHODS
from offdrift.show.json_access import Fields
from offdrift_lab.plan.compare import plan
from offdrift_lab.plan.drift import DriftFit, Fit
from offdrift_lab.plan.phases import Phases

PAIRS = ("mismatch", "staleness", "full")
LENGTHS = ((1, 63), (64, 255), (256, 1023), (1024, 4095), (4096, None))
WORDS = [
    "We",
    "need",
    "to",
    "find",
    "the",
    "sum",
    ".",
    "First",
    "17",
    "+",
    "25",
    "=",
    "42",
    ",",
    "so",
    "the",
    "answer",
    "is",
]
SNIPPETS = {
    "verl": "algorithm:\n  rollout_correction:\n    rollout_is: token\n    rollout_is_threshold: 2.0\n    rollout_rs: null\n",
    "trl": "GRPOConfig(\n    vllm_importance_sampling_correction=True,\n    vllm_importance_sampling_cap=2.0,\n)\n",
    "prime-rl": '[trainer.loss]\ntype = "default"\nratio_type = "token"\n',
    "slime": "--use-tis\n--tis-clip 2.0\n",
    "offdrift": '[arms.token_tis]\nmethod = "token_tis"\n',
}


def planned(text: str) -> dict[str, Any]:
    """A plan of a few schedules, its name and the source of its drift being a text."""
    phases = Phases(name=text, batch={"groups": 2, "samples": 2}, run={"updates": 4, "warmup": 1})
    law = DriftFit(Fit("full/k3", 0.01, 0.02, 1.0, 0.001, (0.0, 4.0)), None, text)
    return plan(phases, names=("sync", "areal", "unbounded"), bounds=(1, 2), drift=law)


def audit(*, steps: int = 160, pairs: tuple[str, ...] = PAIRS, seed: int = 0) -> dict[str, Any]:
    """An audit of a run whose engines disagree more and more after two thirds of it.

    Args:
        pairs: which ratios the log allows.
    """
    draw = np.random.default_rng(seed)
    by_step = [_step(s, steps, pairs, draw) for s in range(1, steps + 1)]
    overall = {
        k: float(np.mean([row[k] for row in by_step]))
        for k in by_step[0]
        if k not in ("step", "quantiles", "sequences", "tokens") and "max" not in k
    }
    overall |= {f"{p}/abs_log_ratio_max": max(r[f"{p}/abs_log_ratio_max"] for r in by_step) for p in pairs}
    return {
        "format": 2,
        "kind": "audit",
        "offdrift": "0.1.0",
        "created": "2026-05-04T09:30:00+00:00",
        "source": {
            "detected": "verl rollout dumps: 160 JSONL files with the keys input, output, score, rollout_log_probs, old_log_probs.",
            "format": "jsonl", "framework": "verl", "files": 160, "bytes": 9_241_332_014,
            "paths": ["/data/runs/qwen3-30b-a3b-math/rollouts"],
            "columns": {"logp_rollout": "rollout_log_probs", "logp_old": "old_log_probs", "reward": "score"},
        },
        "counts": {
            "rows": 512 * steps + 3, "sequences": 512 * steps, "tokens": 512 * steps * 1220, "steps": steps,
            "prompts": 64 * steps, "bad_rows": 3, "unscored": {"logp_rollout": 1024},
        },
        "bad_rows": [
            {"file": "/data/runs/qwen3-30b-a3b-math/rollouts/112.jsonl", "row": 498, "reason": "truncated: the line ends inside a string"},
            {"file": "/data/runs/qwen3-30b-a3b-math/rollouts/113.jsonl", "row": 17, "reason": "rollout_log_probs has 812 values for 813 tokens"},
            {"file": "/data/runs/qwen3-30b-a3b-math/rollouts/140.jsonl", "row": 3, "reason": "log-prob 0.731 at token 52 is above 0"},
        ],
        "has": ["logp_rollout", "logp_old", "logp", "reward", "advantages", "version"],
        "questions": [
            {"question": "Do the two engines agree on the tokens that were sampled?", "answered": True, "because": "rollout and old log-probs of every token are there", "log": ""},
            {"question": "How large is the divergence over the whole vocabulary?", "answered": False, "because": "the log holds the sampled token's log-prob alone", "log": "kl_rollout_current and tv_rollout_current per token, from offdrift.divergence, or the top-k log-probs of both engines"},
            {"question": "Is the drift due to experts that are routed differently?", "answered": False, "because": "no routing was logged", "log": "the experts that each token was routed to in both engines"},
        ],
        "overall": overall,
        "steps": by_step,
        "steps_per_point": 1,
        "histograms": {p: _histogram(p, draw) for p in pairs},
        "facets": _facets(pairs, draw),
        "worst": {"sequences": [_sequence(i, draw) for i in range(6)], "tokens": [_token(i, draw) for i in range(12)]},
        "methods": [_method(name, draw) for name in METHODS],
        "suggestion": {"method": "decoupled_token_icepop", "why": "filter before reweighting: it keeps 98.9 % of tokens, and no length is favored", "settings": {"weight.cap": 4.0}},
        "findings": [finding(), finding(rule="length_trap", cause="weight_variance", letter="D", severity="watch"), finding(rule="temperature", cause="raw_logprobs", letter="A", severity="stop")],
        "verdict": {"level": "act", "text": "The engines disagree from step 107 on: KL per token grew from 0.0011 to 0.061 nat. Fix the precision of the rollout engine first; until then, mask tokens outside [0.5, 5]."},
        "alphas": {"mismatch": {"which": "mismatch", "grade": "exact", "mean": 0.0123, "p95": 0.045, "low": 0.31, "high": 0.31}, "staleness": {"which": "staleness", "grade": "sampled", "mean": 0.0045, "p95": None, "low": 0.12, "high": None}, "basis": "mean", "invest": "mismatch", "missing": None, "sentence": "Where to invest: mismatch (make the engines agree) is the larger part of the bound."},
        "certificate": {"verdict": "no certificate: sampling error 0.031 is larger than the gain 0.004", "why_not": None, "certified": False, "gain_low": -0.041, "alpha": 0.05, "sequences": 81920, "prompts": 10240, "region": {"horizon": 4096, "delta": 0.05}, "premises": {"kl": "falsified"}, "grades": {"kl": "sampled"}},
    }  # fmt: skip


def little() -> dict[str, Any]:
    """An audit of a log with texts and rewards alone: no log-prob of any policy."""
    full = audit(steps=12, pairs=())
    keep = ("reward/mean", "response/length_mean", "response/length_max")
    rows = [{k: row[k] for k in ("step", "sequences", *keep)} | {"tokens": 0, "quantiles": {k: v for k, v in row["quantiles"].items() if "log_ratio" not in k}} for row in full["steps"]]  # fmt: skip
    return full | {
        "has": ["reward"],
        "overall": {k: float(np.mean([r[k] for r in rows])) for k in keep},
        "steps": rows,
        "histograms": {},
        "facets": {},
        "worst": {"sequences": [], "tokens": []},
        "methods": [{"name": n, "family": "weights", "on": None, "why_not": "the log holds no rollout log-probs"} for n in ("none", "token_tis")],
        "suggestion": {"method": None, "why": "nothing can be suggested without log-probs", "settings": {}},
        "findings": [],
        "verdict": {"level": "watch", "text": "This log cannot tell whether there is drift."},
        "certificate": None,
    }  # fmt: skip


def finding(**changed: Any) -> dict[str, Any]:
    """A finding as `Finding.as_dict` makes it."""
    return {
        "rule": "pearson_low", "cause": "precision", "letter": "A", "severity": "act", "confidence": "high",
        "symptom": "The probabilities of the two engines correlate by 0.931 at the same weights.",
        "evidence": [
            {"metric": "mismatch/pearson", "value": 0.931, "relation": "<", "threshold": 0.95, "unit": "1", "source": "survey, decision tree, step 1"},
            {"metric": "mismatch/k3", "value": 0.0611, "relation": ">", "threshold": 0.05, "unit": "nat", "source": "survey, decision tree, step 1"},
            {"metric": "divergence/kl_rollout_old_mean", "value": None, "relation": "missing", "threshold": None, "unit": "nat", "source": ""},
        ],
        "explanation": "Rollout and training engine compute the same weights in different precision; the gap is there at lag 0 and does not shrink with the learning rate.",
        "fix": "Run both engines in float16, or the lm_head in float32; until then weight tokens by a ratio truncated at 2.",
        "refuted_by": "`offdrift check` with both engines in float32 still shows a KL above 0.001 nat.",
        "snippets": SNIPPETS, "method": "token_tis", "source": "Qi et al., arXiv:2510.26788", "step": 107, "steps": 54,
    } | changed  # fmt: skip


def check(*, seed: int = 0) -> dict[str, Any]:
    """A check of two engines on the same weights."""
    draw = np.random.default_rng(seed)
    names = {
        "dtype": ("rollout", "float32 instead of bfloat16", 0.04), "batch composition": ("rollout", "the same prompt in a crowd of 32", 1.02),
        "prefix caching": ("rollout", "off instead of on", 1.0), "attention": ("train", "eager instead of sdpa", 0.98),
        "temperature": ("sampling", "0.7 with log-probs before it", 81.0), "top-p": ("sampling", "0.95 with log-probs before it", 4.4),
        "lm_head precision": ("train", "float32 instead of bfloat16", 0.61), "weight sync": ("sync", "weights perturbed by 1 %", 1.0),
        "KV cache dtype": ("rollout", "fp8 instead of auto", 9.1), "routing replay": ("routing", "", None),
    }  # fmt: skip
    base = 0.00112
    factors = []
    for name, (side, changed, ratio) in names.items():
        ran = ratio is not None
        kl = base * ratio * float(draw.lognormal(0, 0.05)) if ratio is not None else None
        factors.append({
            "factor": name, "what": f"What {name} alone changes.", "side": side, "changed": changed,
            "kl_mean": kl, "kl_max": None if kl is None else 40 * kl, "tv_max": None if kl is None else min(1.0, math.sqrt(20 * kl)),
            "abs_log_ratio_max": None if kl is None else 9 * math.sqrt(kl), "pearson": None if kl is None else 1 - 2 * kl,
            "baseline_kl_mean": base, "ratio": None if kl is None else kl / base,
            "status": "ran" if ran else "not offered", "why": "" if ran else "the model has no experts", "seconds": 3.2 if ran else None,
        })  # fmt: skip
    return {
        "format": 1, "offdrift": "0.1.0", "created": "2026-05-04T09:30:00+00:00", "model": "SmolLM2-135M",
        "rollout": {"engine": "vllm", "engine_version": "0.11.0", "dtype": "bfloat16", "options": {"enforce_eager": True}},
        "train": {"engine": "transformers", "engine_version": "5.1.0", "dtype": "float32", "options": {}},
        "sampling": {"temperature": 1.0, "top_p": 1.0, "max_tokens": 64, "seed": 0},
        "prompts": 16, "sequences": 64, "tokens": 4032, "seconds": 71.3,
        "baseline": {"mismatch/k3": base, "divergence/kl_rollout_old_mean": base, "divergence/kl_rollout_old_max": 0.061, "mismatch/pearson": 0.9984, "mismatch/ess_frac": 0.9971, "mismatch/abs_log_ratio_max": 0.31},
        "noise": {"repeat_kl_mean": 0.0, "repeat_kl_max": 0.0},
        "factors": factors,
        "thresholds": [
            {"metric": "mismatch/pearson", "value": 0.9984, "relation": ">=", "threshold": 0.99, "holds": True, "source": "survey, decision tree, step 1"},
            {"metric": "mismatch/abs_log_ratio_max", "value": 0.31, "relation": "<=", "threshold": 0.1, "holds": False, "source": "Trust Region Masking, section 4.3"},
        ],
        "findings": [finding(severity="watch")],
        "verdict": {"level": "watch", "text": "The engines agree up to bfloat16 rounding: KL 0.00112 nat a token."},
        "recommended": {"method": "trm_max", "settings": {"gate.high": 0.061}, "acceptance": 0.99, "why": "delta at the 99 % quantile of clean sequences", "snippets": SNIPPETS},
        "max_kl": 0.002, "passed": True,
    }  # fmt: skip


# -- the parts of an audit --------------------------------------------------------------------


def _drift(pair: str, progress: float) -> float:
    """Standard deviation of a token's log-ratio."""
    engines = 0.03 * (1 + 8 * max(0.0, progress - 0.66) / 0.34)
    return {"mismatch": engines, "staleness": 0.02 + 0.02 * progress, "full": engines + 0.015}.get(pair, 0.03)


def _log_ratios(scale: float, count: int, draw: np.random.Generator) -> np.ndarray:
    heavy = draw.random(count) < 0.02
    return np.clip(draw.normal(0, scale, count) * np.where(heavy, 8.0, 1.0) - scale**2, -8, 8)


def _numbers(pair: str, log_ratio: np.ndarray) -> dict[str, float]:
    """The metrics of one pair by their formulas, on tokens alone."""
    w = np.exp(log_ratio)
    return {
        f"{pair}/k1": float(-log_ratio.mean()),
        f"{pair}/k3": float((w - 1 - log_ratio).mean()),
        f"{pair}/chi2_token": float((w * w).mean() - 1),
        f"{pair}/ess_frac": float(w.sum() ** 2 / (len(w) * (w * w).sum())),
        f"{pair}/pearson": float(1 - 1.1 * log_ratio.var()),
        f"{pair}/abs_log_ratio_mean": float(np.abs(log_ratio).mean()),
        f"{pair}/abs_log_ratio_max": float(np.abs(log_ratio).max()),
        f"{pair}/log_ppl_gap": float(0.2 * log_ratio.std()),
        f"{pair}/ppl_ratio": float(1 + 0.1 * log_ratio.var()),
    }


def _step(step: int, steps: int, pairs: tuple[str, ...], draw: np.random.Generator) -> dict[str, Any]:
    progress = step / steps
    row: dict[str, Any] = {"step": step, "sequences": 512, "tokens": 512 * 1220}
    quantiles: dict[str, Any] = {}
    for pair in pairs:
        values = _log_ratios(_drift(pair, progress), 1500, draw)
        row |= _numbers(pair, values)
        quantiles[f"{pair}/log_ratio"] = _quantiles(values)
    lengths = draw.lognormal(6.6 + 0.5 * progress, 0.5, 400)
    rewards = 0.1 + 0.6 / (1 + math.exp(-8 * (progress - 0.4))) - 0.4 * max(0.0, progress - 0.85) + draw.normal(0, 0.03)
    quantiles |= {
        "response_length": _quantiles(lengths),
        "reward": {"p05": 0.0, "p50": round(rewards), "p95": 1.0, "p99": 1.0},
    }
    lag = {"version_lag/mean": 1 + 0.5 * (step % 4), "version_lag/max": 4.0, "staleness/clip_frac": 0.01 + 0.08 * progress} if pairs else {}  # fmt: skip
    return row | lag | {
        "reward/mean": rewards,
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "optim/grad_norm": float(draw.lognormal(-1, 0.3)),
        "quantiles": quantiles,
    }  # fmt: skip


def _quantiles(values: np.ndarray) -> dict[str, float]:
    return {
        name: float(np.quantile(values, q)) for name, q in (("p05", 0.05), ("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
    }


def _histogram(pair: str, draw: np.random.Generator) -> dict[str, Any]:
    half = np.logspace(-6, math.log10(20), 60)
    edges = np.concatenate([-half[::-1], [0.0], half])
    counts, _ = np.histogram(_log_ratios(_drift(pair, 0.8), 60_000, draw), bins=edges)
    return {"edges": edges.tolist(), "counts": (counts * 1000).tolist()}


def _facets(pairs: tuple[str, ...], draw: np.random.Generator) -> dict[str, Any]:
    def bucket(label: str, low: float | None, high: float | None, factor: float) -> dict[str, Any]:
        row: dict[str, Any] = {"label": label, "low": low, "high": high, "sequences": 4096, "tokens": 5_000_000}
        for pair in pairs:
            row |= _numbers(pair, _log_ratios(_drift(pair, 0.7) * factor, 3000, draw))
        return row

    def name(low: float, high: float | None) -> str:
        return f"{low:,}+" if high is None else f"{low:,}–{high:,}"

    return {
        "length": [bucket(name(*b), *b, 1 + 0.1 * i) for i, b in enumerate(LENGTHS)],
        "position": [bucket(name(*b), *b, 1.2 - 0.05 * i) for i, b in enumerate(LENGTHS)],
        "advantage": [bucket(n, None, None, f) for n, f in (("negative", 1.4), ("zero", 1.0), ("positive", 0.8))],
        "lag": [bucket(f"{i}", i, i, 1 + 0.3 * i) for i in range(5)],
        "worker": [bucket(f"worker-{i}", None, None, 4.0 if i == 2 else 1.0) for i in range(4)],
        "token_class": [bucket(n, None, None, f) for n, f in (("very likely (p > 0.9)", 0.4), ("likely (0.5 to 0.9)", 1.3), ("unlikely (0.1 to 0.5)", 2.2), ("rare (p < 0.1)", 3.5))],
    }  # fmt: skip


def _sequence(i: int, draw: np.random.Generator) -> dict[str, Any]:
    words = (WORDS * 9)[: 130 - i]
    log_ratio = _log_ratios(0.25, len(words), draw)
    return {
        "step": 150 - i, "file": f"/data/runs/qwen3-30b-a3b-math/rollouts/{150 - i}.jsonl", "row": 17 + i, "reward": float(i % 2),
        "advantage": (-1.0) ** i, "length": 1870, "max_abs_log_ratio": float(np.abs(log_ratio).max()), "k3_mean": 0.11, "on": "mismatch",
        "prompt": "What is 17 + 25? Think step by step.", "completion": " ".join(words),
        "tokens": draw.integers(0, 150_000, len(words)).tolist() if i % 2 else [f" {w}" for w in words],
        "first": 800, "log_ratio": log_ratio.tolist(), "logp_rollout": (-draw.exponential(0.4, len(words))).tolist(),
        "kl": None if i % 2 else (log_ratio**2 / 2).tolist(),
    }  # fmt: skip


def _token(i: int, draw: np.random.Generator) -> dict[str, Any]:
    return {
        "step": 150 - i, "file": f"/data/runs/qwen3-30b-a3b-math/rollouts/{150 - i}.jsonl", "row": 17 + i, "position": 801 + 3 * i,
        "token": int(draw.integers(0, 150_000)), "log_ratio": float((-1) ** i * (7 - 0.4 * i)), "logp_rollout": -0.01 * i,
        "context": "so the answer is",
    }  # fmt: skip


def _method(name: str, draw: np.random.Generator) -> dict[str, Any]:
    row = METHODS[name]
    on = sorted({part.on for part in (*row.correction.gates, *row.correction.weights) if part.on is not None})
    parts = row.describe().split("; ")
    kept, harsh = 1.0, 0.0
    if row.correction.gates:
        kept = float(draw.uniform(0.3, 0.995))
        harsh = float(draw.uniform(0.0, 1.2)) if "seq" in str(row.correction.gates) else 0.1
    fields: Fields = {
        "name": name, "family": row.mechanism, "on": ", ".join(on),
        "gates": "; ".join(p for p in parts if p.startswith("keep")), "weights": "; ".join(p for p in parts if p.startswith("weight")),
        "sampled_sequences": 8192,
    }  # fmt: skip
    if "kl" in {getattr(g, "statistic", "") for g in row.correction.gates}:
        return {**fields, "why_not": "needs exact divergences, which the log lacks"}
    weighted = bool(row.correction.weights)
    return {
        **fields,
        "kept_tokens": kept ** (1 + harsh), "kept_sequences": kept, "kept_length_ratio": 1 - 0.3 * harsh * (1 - kept),
        "weight_mean": 0.996 if weighted else 1.0, "weight_max": 2.0 if weighted else 1.0, "limited_frac": 0.011 if weighted else 0.0,
        "ess_frac": float(draw.uniform(0.6, 0.99)) if weighted else 1.0,
        "acceptance_by_length": [kept ** (1 + harsh * i) for i in range(len(LENGTHS))],
        "why_not": None,
    }  # fmt: skip
