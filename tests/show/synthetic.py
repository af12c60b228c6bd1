"""A run folder as training leaves it, with plausible numbers and no training.

Four arms drift apart as they do in practice: the uncorrected one diverges and loses its reward late,
masking keeps the worst token small at the price of rejected sequences, truncation bounds weights
but not divergences. Everything follows from the seed.
"""

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

import torch

from offdrift.records.batch import Logged
from offdrift.records.recorder import write_log


@dataclass(frozen=True)
class Shape:
    """How one synthetic arm behaves."""

    method: str
    description: str
    final: float
    growth: float
    """Factor by which the mean KL grows over the run."""
    rejects: float
    """Share of sequences that its gate rejects at the end."""
    collapse: float = 0.0
    """Reward lost in the last third."""


ARMS = {
    "none": Shape("none", "No correction", 0.62, 60.0, 0.0, collapse=0.2),
    "trm_max": Shape("trm_max", "Trust Region Masking, exact KL, δ = 0.05", 0.71, 6.0, 0.36),
    "token_tis": Shape("token_tis", "Truncated importance sampling, cap 2", 0.66, 18.0, 0.0),
    "trm_tis": Shape("trm_tis", "Masking and truncation", 0.70, 5.0, 0.22),
}

RESPONSE = "We add 17 and 25 . First 7 + 5 = 12 , carry 1 ; then 1 + 2 + 1 = 4 . So the answer is 42"
PROMPT = "Question: what is 17 + 25? Think step by step,\nthen give the number in <answer> tags."


def write_run(run_dir: Path, *, updates: int = 64, seed: int = 0) -> Path:
    """Write a finished run of four arms and return its folder."""
    run_dir.mkdir(parents=True, exist_ok=True)
    table = [_write_arm(run_dir / "arms" / name, name, s, updates, seed) for name, s in ARMS.items()]
    head = {
        "format": 1,
        "name": "tiny-qwen3 · two-digit sums under drift",
        "recipe": RECIPE,
        "started": "2026-05-04T09:30:00+00:00",
        "seconds": 331.4,
        "versions": {"offdrift": "0.1.0", "python": "3.11.9", "torch": "2.13.0", "transformers": "5.19.0"},
        "model": {"name": "Qwen3 (tiny)", "parameters": 3_412_096, "vocab_size": 512},
        "table": table,
    }
    (run_dir / "run.json").write_text(json.dumps(head), encoding="utf-8")
    return run_dir


RECIPE = {
    "task": "two_digit_sums",
    "seed": 0,
    "updates": 64,
    "rollout": {"engine": "transformers", "dtype": "bfloat16", "max_tokens": 48, "evidence": "full"},
    "optim": {"name": "adamw", "lr": 3e-4, "grad_clip": 1.0},
    "lag": {"max_version_lag": 4},
    "arms": {name: {"method": shape.method} for name, shape in ARMS.items()},
}


SCHEDULES = {"none": "sync", "trm_max": "one_step_off", "token_tis": "verl_partial", "trm_tis": "unbounded"}


def overlap(run_dir: Path, *, samples: int = 16, seed: int = 0) -> Path:
    """The same run, its responses drawn beside training: schedules in the recipe, `pipeline/` in the metrics, and a
    token log of the first two updates, in which a token's KL is 0.01 nat times its lag."""
    head = json.loads((run_dir / "run.json").read_text("utf-8"))
    head["recipe"]["pipeline"] = {"schedule": "sync", "rules": {}, "workers": 2}
    for name, schedule in SCHEDULES.items():
        head["recipe"]["arms"][name] |= {"schedule": schedule, "rules": {}}
    (run_dir / "run.json").write_text(json.dumps(head), "utf-8")
    for ahead, name in enumerate(SCHEDULES):
        file = run_dir / "arms" / name / "metrics.jsonl"
        noise = random.Random(f"{name}-{seed}")
        rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        for row in rows:
            counts = [0] * (ahead + 1)
            for _ in range(samples):
                counts[min(row["update"], noise.randint(0, ahead))] += 1
            row |= {
                "pipeline/worker_idle": 0.6 / (1 + ahead) + 0.1 * noise.random(),
                "pipeline/trainer_idle": 0.4 / (1 + ahead) + 0.1 * noise.random(),
                "pipeline/sync_seconds": 0.02,
                "pipeline/sync_bytes": 3.4e6,
                "pipeline/stale_frac": 1 - counts[0] / samples,
                "pipeline/mixed_frac": 0.1 * ahead,
                "pipeline/wasted_tokens": 10.0 * ahead,
                "pipeline/dropped_groups": 0.0,
                "pipeline/redrawn_groups": 0.0,
                "pipeline/restarted": 0.0,
                "pipeline/lost_workers": 0.0,
                "pipeline/stored_groups": 4.0 * ahead,
                "pipeline/queue_seconds": 0.1,
                "pipeline/generation_seconds": 0.4,
                "pipeline/lag_counts": counts,
                "throughput/seconds": 1.0,
            }
        write_lines(file, rows)
        for update in (0, 1):
            write_token_log(run_dir / "arms" / name, update, [min(update, i % (ahead + 1)) for i in range(12)])
    return run_dir


def write_token_log(arm: Path, update: int, lags: list[int], *, exact: bool = True) -> Path:
    """A log of two responses whose tokens have these lags; a log-ratio of 0.1 per update of lag."""
    lag = torch.tensor(lags)
    cuts = torch.tensor([0, len(lags) // 3, len(lags)])
    log = Logged(
        cu_seqlens=cuts,
        step=torch.full((2,), update + 1),
        row=torch.arange(1, 3),
        response_lengths=cuts.diff(),
        logp_rollout=torch.full((len(lags),), -1.0),
        logp=-1.0 + 0.1 * lag,
        rollout_version=update - lag,
        version=torch.full((2,), update),
        divergences={"kl_rollout_current": 0.01 * lag} if exact else {},
    )
    return write_log(log, arm / "log" / f"batch-{update:06d}.parquet")


def write_lines(path: Path, rows: list[dict]) -> None:
    """One JSON object a line, as the trainer writes them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _write_arm(folder: Path, name: str, shape: Shape, updates: int, seed: int) -> dict:
    noise = random.Random(f"{name}-{seed}")
    metrics = [_step(shape, u, updates, noise) for u in range(updates)]
    evals = [
        {"update": u, "reward": round(_reward(shape, u / updates), 3), "prompts": 256}
        for u in (*range(0, updates, 16), updates)
    ]
    write_lines(folder / "metrics.jsonl", metrics)
    write_lines(folder / "eval.jsonl", evals)
    write_lines(folder / "samples.jsonl", [_sample(shape, u, noise) for u in range(0, updates, 6)])
    summary = _summary(name, shape, metrics, evals)
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return summary


def _reward(shape: Shape, progress: float) -> float:
    lost = shape.collapse * max(0.0, progress - 0.66) / 0.34
    return 0.08 + (shape.final - 0.08) / (1 + math.exp(-9 * (progress - 0.38))) - lost


def _step(shape: Shape, update: int, updates: int, noise: random.Random) -> dict:
    progress = update / updates
    kl = 2e-4 * shape.growth**progress * noise.lognormvariate(0, 0.25)
    worst = min(60 * kl * noise.lognormvariate(0, 0.5), 6.0)
    spread = noise.lognormvariate(0, 0.35)
    return {
        "update": update,
        "batch": update // 4,
        "reward/mean": min(1.0, max(0.0, _reward(shape, progress) + noise.gauss(0, 0.05))),
        "response/length_mean": 21 + 9 * progress + noise.gauss(0, 0.8) + 30 * shape.collapse * progress**4,
        "response/length_max": 48,
        "divergence/grade": "exact",
        "divergence/kl_rollout_current_mean": kl,
        "divergence/kl_rollout_current_max": worst,
        "divergence/tv_mean": math.sqrt(kl / 2),
        "divergence/tv_max": min(1.0, math.sqrt(worst / 2)),
        "gate/acceptance_seq": max(0.0, 1 - shape.rejects * (0.35 + progress) * spread),
        "gate/drop_frac_token": 0.0,
        "full/ess_frac": 1 / (1 + 45 * kl * spread),
        "weight/cap_frac": min(1.0, 8 * kl),
        "full/log_ppl_gap": math.sqrt(kl) * 0.25 * noise.lognormvariate(0, 0.15),
        "version_lag/mean": min(update, 1.5 + (update % 4) * 0.5),
        "version_lag/max": min(update, 4),
        "certificate/kl_seq": 12 * kl,
        "certificate/gain_low": -0.05 - 6 * kl,
        "certificate/fresh": update % 2 == 1,
        "certificate/verdict": f"no certificate: sampling error 0.05, at update {update}",
        "certificate/falsified": int(worst > 0.05),
        "optim/grad_norm": noise.lognormvariate(-0.5, 0.3),
        "optim/loss": noise.gauss(0, 0.02),
        "throughput/tokens_per_s": 2400 + noise.gauss(0, 90),
    }


def _sample(shape: Shape, update: int, noise: random.Random) -> dict:
    scale = 2e-4 * shape.growth ** (update / 64)
    words = RESPONSE.split()
    tokens = [words[0], *(f" {w}" for w in words[1:-1]), "\n", words[-1]]
    kl = [scale * noise.lognormvariate(-1, 1.8) for _ in tokens]
    return {
        "update": update,
        "prompt": PROMPT,
        "reward": float(noise.random() < _reward(shape, update / 64)),
        "accepted": not shape.rejects or max(kl) < 0.05,
        "finish": "stop",
        "tokens": tokens,
        "kl": kl,
        "tv": [math.sqrt(v / 2) for v in kl],
        "logp_rollout": [-noise.expovariate(2.0) for _ in tokens],
        "weight": [noise.lognormvariate(0, 0.2) for _ in tokens],
    }


def _summary(name: str, shape: Shape, metrics: list[dict], evals: list[dict]) -> dict:
    def mean(key: str) -> float:
        return sum(row[key] for row in metrics) / len(metrics)

    return {
        "arm": name,
        "method": shape.method,
        "description": shape.description,
        "updates": len(metrics),
        "reward_before": evals[0]["reward"],
        "reward_after": evals[-1]["reward"],
        "reward_train_last": metrics[-1]["reward/mean"],
        "kl_mean": mean("divergence/kl_rollout_current_mean"),
        "kl_max": max(row["divergence/kl_rollout_current_max"] for row in metrics),
        "acceptance": mean("gate/acceptance_seq"),
        "ess_frac": mean("full/ess_frac"),
        "bound": mean("certificate/kl_seq"),
        "falsified_updates": sum(row["certificate/falsified"] for row in metrics),
        "log_ppl_gap": mean("full/log_ppl_gap"),
        "tokens_per_s": mean("throughput/tokens_per_s"),
        "seconds": 78.5,
        "grade": "exact",
        "notes": ["bound computed with constants = sharp"] if name == "trm_max" else [],
    }
