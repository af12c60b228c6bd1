"""What optimizers do on batches without a gradient, and what a policy for such steps changes.

    python benchmarks/empty_batches.py [--part drift|outcome|frameworks] [--seeds 8] [--updates 64] [--jobs 2] [--json PATH]

drift: a policy trains on-policy for 32 updates; then come 100 batches whose gradient is 0, then one of which one of 64
responses is accepted. Distances are in usual steps: the median norm of the change of the weights over updates 17 to 32.

outcome: reinforcement learning of a small autoregressive policy, three digits written backwards, to the end. Masks see
weights up to 15 updates old; groups without a spread of rewards come from batches of two prompts. Every combination of
cause, optimizer and policy (`offdrift.step_policy`) has the same seeds. The outcome is exact: the probability of the
right answer, over all 216 prompts.

frameworks: the optimizer steps of TRL's GRPOTrainer and verl's FSDP engine on tiny models.

Nothing here takes a GPU. Every cell is stored as soon as it is measured; the same command goes on where it ended.
"""

import argparse
import copy
import functools
import itertools
import json
import math
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offdrift import BatchInfo, Divergence, LogProbs, Segments, advantages, method, policy_loss
from offdrift.step_policy import StepGuard, StepPolicy, guard

RESULTS = Path(__file__).parent / "results" / "empty_batches.json"
DIGITS, LENGTH, WIDTH, GROUP = 6, 3, 32, 4
USUAL, EMPTY = slice(16, 32), 100
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW (.9, .95)": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0),
    "Muon": lambda p: torch.optim.Muon(p, lr=2e-2, weight_decay=0.0),
    "AdamW (.9, .999)": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.9, 0.999), weight_decay=0.0),
    "SGD, momentum .9": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
}
"""Rates are half of the one at which training without lag ends highest, on two pilot seeds that are not used again
(AdamW .004 to .04, SGD .01 to .1, Muon .01 to .08, factors of about two)."""
POLICIES = {
    "step": StepPolicy("step"),
    "skip": StepPolicy("skip"),
    "decay": StepPolicy("decay"),
    "clear": StepPolicy("clear"),
    "scaled": StepPolicy("skip", min_acceptance=0.5),
}
"""`step` is the baseline, what optimizers do by themselves."""


@dataclass(frozen=True)
class Cause:
    """What makes batches without a gradient, and the batch that it is seen in."""

    method: str
    sync_every: int
    prompts: int
    reward: str


CAUSES = {
    "max": Cause("trm_max", 16, 16, "share"),
    "avg": Cause("trm_avg", 16, 16, "share"),
    "geometric": Cause("bypass_pg_geo_rs", 16, 16, "share"),
    "zero advantage": Cause("token_is", 1, 2, "exact"),
}


class Writers(nn.Module):
    """Logits of the next digit, given the prompt's digits and those written so far: one network of matrices a seed.

    Their gradients have nothing to do with each other, and each has its own optimizer: all seeds take one pass.
    """

    def __init__(self, seeds: int) -> None:
        super().__init__()
        features = LENGTH * DIGITS + LENGTH * (DIGITS + 1)
        shapes = [(WIDTH, features), (WIDTH, WIDTH), (DIGITS, WIDTH)]
        self.of_seed = nn.ModuleList()
        for seed in range(seeds):
            torch.manual_seed(seed)
            matrices = (nn.Parameter((torch.rand(shape) * 2 - 1) / math.sqrt(shape[1])) for shape in shapes)
            self.of_seed.append(nn.ParameterList(matrices))

    def forward(self, x: Tensor) -> Tensor:
        """Logits [seeds, b, LENGTH, DIGITS] of inputs [seeds, b, LENGTH, features]."""
        first, second, head = (torch.stack(tuple(w)) for w in zip(*self.of_seed, strict=True))
        hidden = torch.tanh(torch.bmm(x.flatten(1, 2), first.mT))
        return torch.bmm(torch.tanh(torch.bmm(hidden, second.mT)), head.mT).unflatten(1, (-1, LENGTH))

    def weights(self) -> Tensor:
        """All weights, [seeds, n]."""
        return torch.stack([nn.utils.parameters_to_vector(list(w)) for w in self.of_seed]).detach().clone()


PROMPTS = torch.tensor(list(itertools.product(range(DIGITS), repeat=LENGTH)))
EYE, PLACE = torch.eye(DIGITS), torch.eye(LENGTH)


def inputs(prompts: Tensor, written: Tensor) -> Tensor:
    """Inputs at every place of answers, [seeds, b, LENGTH, features]: prompt, place, and the digit before it."""
    seen = EYE[prompts].flatten(2)[:, :, None].expand(-1, -1, LENGTH, -1)
    before = torch.zeros(*prompts.shape[:2], LENGTH, LENGTH * DIGITS)
    for t in range(1, LENGTH):
        before[:, :, t, t * DIGITS : (t + 1) * DIGITS] = EYE[written[:, :, t - 1]]
    return torch.cat([seen, PLACE.expand(*prompts.shape[:2], -1, -1), before], -1)


@torch.no_grad()
def draw(model: Writers, prompts: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Answers to the prompts, and the log-probs of the whole vocabulary at every place of them."""
    written = torch.zeros_like(prompts)
    for t in range(LENGTH):
        p = model(inputs(prompts, written))[:, :, t].softmax(-1)
        written[:, :, t] = torch.multinomial(p.flatten(0, 1), 1, generator=random).view(p.shape[:2])
    return written, model(inputs(prompts, written)).log_softmax(-1)


@torch.no_grad()
def right(model: Writers) -> Tensor:
    """Exact probability of the right answer, the mean over all prompts, [seeds]."""
    prompts = PROMPTS.expand(len(model.of_seed), -1, -1)
    answers = prompts.flip(2)
    logp = model(inputs(prompts, answers)).log_softmax(-1)
    return logp.gather(-1, answers[..., None]).sum((2, 3)).exp().mean(1)


@functools.cache
def started(seeds: int) -> Writers:
    """Policies that answer about a third of the prompts rightly, after supervised steps."""
    model = Writers(seeds)
    optimizers = [torch.optim.Adam(w, lr=1e-2) for w in model.of_seed]
    prompts = PROMPTS.expand(seeds, -1, -1)
    answers = prompts.flip(2)
    while (lacking := right(model) < 0.3).any():
        logp = model(inputs(prompts, answers)).log_softmax(-1)
        model.zero_grad()
        (-logp.gather(-1, answers[..., None]).mean((1, 2, 3)).sum()).backward()
        for optimizer, trains in zip(optimizers, lacking, strict=True):
            if trains:
                optimizer.step()
    return model


class Learners:
    """Policies in training, one a seed: one update at a time."""

    def __init__(self, cause: Cause, optimizer: str, policy: StepPolicy, seeds: int) -> None:
        self.cause, self.seeds, self.model = cause, seeds, copy.deepcopy(started(seeds))
        self.random = torch.Generator().manual_seed(1000)
        self.optimizers = [OPTIMIZERS[optimizer](w) for w in self.model.of_seed]
        self.engine, self.updates = copy.deepcopy(self.model), 0
        self.accepted = torch.ones(seeds)
        self.moves: list[Tensor] = []
        self.kl: list[Tensor] = []
        self.guards: list[StepGuard] = []
        self.guarded(policy)

    def guarded(self, policy: StepPolicy) -> None:
        """Give the optimizers a policy, in place of the one they have."""
        for steps in self.guards:
            steps.remove()
        self.guards = [
            guard(optimizer, policy, acceptance=lambda i=i: self.accepted[i].item())
            for i, optimizer in enumerate(self.optimizers)
        ]

    def update(self) -> None:
        """Draw with the engine's weights, which are replaced every `sync_every` updates, and take a step."""
        cause, n = self.cause, self.cause.prompts * GROUP
        if self.updates % cause.sync_every == 0:
            self.engine.load_state_dict(self.model.state_dict())
        rows = torch.randint(len(PROMPTS), (self.seeds, cause.prompts), generator=self.random)
        prompts = PROMPTS[rows.repeat_interleave(GROUP, 1)]
        written, rollout = draw(self.engine, prompts, self.random)
        correct = (written == prompts.flip(2)).double()
        rewards = (correct.mean(2) if cause.reward == "share" else correct.prod(2)).flatten()
        groups = torch.arange(self.seeds * cause.prompts).repeat_interleave(GROUP)
        segments = Segments.from_lengths([LENGTH] * len(rewards), group_ids=groups)
        logits = self.model(inputs(prompts, written)).log_softmax(-1)
        sampled = (x.gather(-1, written[..., None]).flatten() for x in (rollout, logits))
        lp = LogProbs.pack(*sampled, segments=segments)
        kl = (rollout.exp() * (rollout - logits.detach())).sum(-1)
        exact = Divergence.exact("kl_rollout_current", kl.flatten())
        info = BatchInfo(divergences={"kl_rollout_current": exact}, vocab=DIGITS)
        advantage = advantages(rewards, segments, how="grpo")
        result = policy_loss(lp, method(cause.method), advantage, info)
        # A response takes part where the gate keeps it and its group has a spread of rewards.
        part = (result.corrected.keep & (advantage != 0)).view(self.seeds, n, LENGTH).any(2)
        self.accepted = part.double().mean(1)
        self.kl.append(kl.mean((1, 2)))
        self.model.zero_grad()
        (self.seeds * result.loss).backward()  # each seed's mean over its own responses
        self.step()

    def step(self) -> None:
        """Step with the gradients that are there, and keep the lengths of the moves."""
        before = self.model.weights()
        for optimizer, weights in zip(self.optimizers, self.model.of_seed, strict=True):
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
        self.moves.append((self.model.weights() - before).norm(dim=1))
        self.updates += 1


def drift(optimizer: str, seeds: int) -> dict[str, dict[str, list[float]]]:
    """How far empty batches carry the weights, and what the first small step after them does, in usual steps."""
    cause = Cause("token_is", 1, 16, "share")
    trained = Learners(cause, optimizer, StepPolicy("step"), seeds)
    for _ in range(32):
        trained.update()
    usual = torch.stack(trained.moves[USUAL]).median(0).values
    found = {}
    for name, policy in POLICIES.items():
        learners = Learners(cause, optimizer, policy, seeds)
        learners.model.load_state_dict(trained.model.state_dict())
        for mine, theirs in zip(learners.optimizers, trained.optimizers, strict=True):
            mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
        found[name] = after_empty_batches(learners, usual)
    return found


def after_empty_batches(learners: Learners, usual: Tensor) -> dict[str, list[float]]:
    model, seeds = learners.model, learners.seeds
    start, before, probability = model.weights(), copy.deepcopy(model), right(model)
    for _ in range(EMPTY):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        learners.step()
    moved = model.weights() - start
    written, old = draw(before, PROMPTS.expand(seeds, -1, -1), learners.random)
    with torch.no_grad():
        new = model(inputs(PROMPTS.expand(seeds, -1, -1), written)).log_softmax(-1)
    path, after = torch.stack(learners.moves), right(model)
    # One response of 64 is accepted: its share of the gradient, then a step.
    rows = torch.randint(len(PROMPTS), (seeds, 1), generator=learners.random)
    written, _ = draw(model, PROMPTS[rows], learners.random)
    graph = model(inputs(PROMPTS[rows], written)).log_softmax(-1)
    learners.accepted = torch.full((seeds,), 1 / 64)
    model.zero_grad()
    (-graph.gather(-1, written[..., None]).sum() / (64 * LENGTH)).backward()
    learners.step()
    found = {
        "usual_step": usual,
        "moved": moved.norm(dim=1) / usual,
        "moved_first_10": path[:10].sum(0) / usual,
        "last_step": path[-1] / usual,
        "kl": (old.exp() * (old - new)).sum(-1).mean((1, 2)),
        "right_before": probability,
        "right_after": after,
        "next_step": learners.moves[-1] / usual,
    }
    return {name: x.tolist() for name, x in found.items()}


def outcome(cause: str, optimizer: str, policy: str, seeds: int, updates: int) -> dict[str, list[float]]:
    """Train to the end; how the policies did, and how many steps were empty."""
    learners = Learners(CAUSES[cause], optimizer, POLICIES[policy], seeds)
    start, course = right(learners.model), []
    for i in range(updates):
        learners.update()
        if i >= updates - 8:
            course.append(right(learners.model))
    found = {
        "start": start,
        "end": torch.stack(course[-8:]).mean(0),
        "kl_max": torch.stack(learners.kl).amax(0),
        "kl_mean": torch.stack(learners.kl).mean(0),
    }
    return {**{name: x.tolist() for name, x in found.items()}, "empty": [float(g.empty) for g in learners.guards]}


def sign_flip(differences: list[float]) -> float:
    """Exact two-sided p of a mean difference: the share of all sign patterns whose mean is at least as far from 0.

    Reference: Fisher, The Design of Experiments, 1935, section 21.
    """
    n, observed = len(differences), abs(math.fsum(differences))
    patterns = itertools.product((1, -1), repeat=n)
    beyond = sum(
        abs(math.fsum(s * d for s, d in zip(p, differences, strict=True))) >= observed - 1e-12 for p in patterns
    )
    return beyond / 2**n


T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
"""Student's quantile by number of pairs."""


def paired(ends: list[float], baseline: list[float]) -> dict[str, float]:
    """Mean difference of paired seeds, half of its 95 % interval, and the exact p of sign flips."""
    d = [a - b for a, b in zip(ends, baseline, strict=True)]
    half = T_975[len(d)] * statistics.stdev(d) / math.sqrt(len(d))
    return {"difference": statistics.fmean(d), "half_width": half, "p_sign_flip": sign_flip(d)}


def _one(job: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    function, *arguments = job
    return function(*arguments)


def measured(jobs: dict[str, tuple[Any, ...]], processes: int, keep: Callable[[str, Any], None]) -> None:
    """Run every job and keep what it found as soon as it has."""
    if processes == 1:
        for name, job in jobs.items():
            keep(name, _one(job))
        return
    with ProcessPoolExecutor(processes) as pool:
        futures = {pool.submit(_one, job): name for name, job in jobs.items()}
        for future in as_completed(futures):
            keep(futures[future], future.result())


def drift_table(cells: dict[str, Any]) -> dict[str, Any]:
    """Medians over seeds, with the smallest and the largest, by optimizer and policy."""
    return {
        optimizer: {
            policy: {name: [statistics.median(x), min(x), max(x)] for name, x in row.items()}
            for policy, row in cells[optimizer].items()
        }
        for optimizer in OPTIMIZERS
        if optimizer in cells
    }


def outcome_table(cells: dict[str, Any]) -> dict[str, Any]:
    """Means over seeds and paired differences to the optimizer's own steps, by cause, optimizer and policy."""
    found: dict[str, Any] = {}
    for cause, optimizer, policy in itertools.product(CAUSES, OPTIMIZERS, POLICIES):
        if (row := cells.get(f"{cause} | {optimizer} | {policy}")) is None:
            continue
        cell: dict[str, Any] = {name: statistics.fmean(x) for name, x in row.items()}
        cell["lost"] = sum(end < 0.7 * start for start, end in zip(row["start"], row["end"], strict=True))
        baseline = cells.get(f"{cause} | {optimizer} | step")
        if policy != "step" and baseline and len(row["end"]) > 1:
            cell |= paired(row["end"], baseline["end"])
        found.setdefault(cause, {}).setdefault(optimizer, {})[policy] = cell
    return found


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["drift", "outcome", "frameworks"], action="append")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--updates", type=int, default=64)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    parts = options.part or ["drift", "outcome", "frameworks"]
    document = json.loads(options.json.read_text("utf-8")) if options.json.exists() else {}
    settings = {"seeds": options.seeds, "updates": options.updates, "empty_batches": EMPTY}
    if document.get("settings") != settings:
        document = {"settings": settings, "frameworks": document.get("frameworks", {})}
    drifts = {o: (drift, o, options.seeds) for o in OPTIMIZERS}
    outcomes = {
        f"{cause} | {o} | {p}": (outcome, cause, o, p, options.seeds, options.updates)
        for o, cause, p in itertools.product(OPTIMIZERS, CAUSES, POLICIES)
    }
    for part, jobs, table in (("drift", drifts, drift_table), ("outcome", outcomes, outcome_table)):
        cells = document.setdefault(f"{part}_cells", {})

        def keep(name: str, found: Any, cells: dict[str, Any] = cells, part: str = part, table: Any = table) -> None:
            cells[name] = found
            document[part] = table(cells)
            options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

        left = {name: job for name, job in jobs.items() if name not in cells}
        measured(left if part in parts else {}, options.jobs, keep)
    if "frameworks" in parts:
        from empty_batches_frameworks import frameworks

        document["frameworks"] = frameworks()
    options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return document


if __name__ == "__main__":
    main()
