"""What optimizers do on batches without a gradient, and what a policy for such steps changes.

    python benchmarks/empty_batches.py [--part drift|outcome|frameworks] [--seeds 8] [--updates 96] [--jobs 2] [--json PATH]

drift: a policy trains on-policy for 32 updates; then come 200 batches whose gradient is 0, then one of which one of 64
responses is accepted. Distances are in usual steps: the median norm of the change of the weights over updates 17 to 32.

outcome: reinforcement learning of a small autoregressive policy, three digits written backwards, to the end. Masks see
weights up to 15 updates old; groups without a spread of rewards come from batches of two prompts. Every combination of
cause, optimizer and policy (`offdrift.step_policy`) has the same seeds. The outcome is exact: the probability of the
right answer, over all 216 prompts.

frameworks: the optimizer steps of TRL's GRPOTrainer and verl's FSDP engine on tiny models.

Nothing here takes a GPU. All results of all parts are in one JSON file; a part that runs again replaces its own.
"""

import argparse
import copy
import itertools
import json
import math
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offdrift import BatchInfo, Divergence, LogProbs, Segments, advantages, method, policy_loss
from offdrift.step_policy import StepPolicy, guard

RESULTS = Path(__file__).parent / "results" / "empty_batches.json"
DIGITS, LENGTH, WIDTH, GROUP = 6, 3, 32, 4
USUAL = slice(16, 32)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW (.9, .95)": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0),
    "AdamW (.9, .999)": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.9, 0.999), weight_decay=0.0),
    "SGD, momentum .9": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Muon": lambda p: torch.optim.Muon(p, lr=2e-2, weight_decay=0.0),
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


class Writer(nn.Module):
    """Logits of the next digit, given the prompt's digits and the digits written so far; matrices only."""

    def __init__(self) -> None:
        super().__init__()
        inputs = LENGTH * DIGITS + LENGTH * (DIGITS + 1)
        self.first = nn.Linear(inputs, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, DIGITS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


PROMPTS = torch.tensor(list(itertools.product(range(DIGITS), repeat=LENGTH)))
EYE, PLACE = torch.eye(DIGITS), torch.eye(LENGTH)


def inputs(prompts: Tensor, written: Tensor) -> Tensor:
    """Inputs at every place of answers, [b, LENGTH, features]: prompt, place, and the digit before it."""
    b = len(prompts)
    seen = EYE[prompts].reshape(b, 1, -1).expand(b, LENGTH, -1)
    before = torch.zeros(b, LENGTH, LENGTH * DIGITS)
    for t in range(1, LENGTH):
        before[:, t, t * DIGITS : (t + 1) * DIGITS] = EYE[written[:, t - 1]]
    return torch.cat([seen, PLACE.expand(b, -1, -1), before], -1)


@torch.no_grad()
def draw(model: Writer, prompts: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Answers to the prompts, and the log-probs of the whole vocabulary at every place of them."""
    written = torch.zeros(len(prompts), LENGTH, dtype=torch.long)
    for t in range(LENGTH):
        p = model(inputs(prompts, written)[:, t]).softmax(-1)
        written[:, t] = torch.multinomial(p, 1, generator=random)[:, 0]
    return written, model(inputs(prompts, written)).log_softmax(-1)


@torch.no_grad()
def right(model: Writer) -> float:
    """Exact probability of the right answer, the mean over all prompts."""
    answers = PROMPTS.flip(1)
    logp = model(inputs(PROMPTS, answers)).log_softmax(-1)
    return logp.gather(-1, answers[..., None]).sum((1, 2)).exp().mean().item()


def started(seed: int) -> Writer:
    """A policy that answers about a third of the prompts rightly, after supervised steps."""
    torch.manual_seed(seed)
    model = Writer()
    optimizer, answers = torch.optim.Adam(model.parameters(), lr=1e-2), PROMPTS.flip(1)
    while right(model) < 0.3:
        loss = nn.functional.cross_entropy(model(inputs(PROMPTS, answers)).flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


class Learner:
    """A policy in training: one update at a time."""

    def __init__(self, cause: Cause, optimizer: str, policy: StepPolicy, seed: int) -> None:
        self.cause, self.model = cause, started(seed)
        self.random = torch.Generator().manual_seed(1000 + seed)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.engine, self.updates, self.accepted = copy.deepcopy(self.model), 0, 1.0
        self.moves: list[float] = []
        self.kl: list[float] = []
        self.steps = guard(self.optimizer, policy, acceptance=lambda: self.accepted)

    def update(self) -> None:
        """Draw with the engine's weights, which are replaced every `sync_every` updates, and take a step."""
        cause = self.cause
        if self.updates % cause.sync_every == 0:
            self.engine.load_state_dict(self.model.state_dict())
        rows = torch.randint(len(PROMPTS), (cause.prompts,), generator=self.random).repeat_interleave(GROUP)
        prompts = PROMPTS[rows]
        written, rollout = draw(self.engine, prompts, self.random)
        correct = (written == prompts.flip(1)).double()
        rewards = correct.mean(1) if cause.reward == "share" else correct.prod(1)
        groups = torch.arange(cause.prompts).repeat_interleave(GROUP)
        segments = Segments.from_lengths([LENGTH] * len(rows), group_ids=groups)
        logits = self.model(inputs(prompts, written)).log_softmax(-1)
        sampled = (x.gather(-1, written[..., None]).flatten() for x in (rollout, logits))
        lp = LogProbs.pack(*sampled, segments=segments)
        kl = (rollout.exp() * (rollout - logits.detach())).sum(-1).flatten()
        info = BatchInfo(divergences={"kl_rollout_current": Divergence.exact("kl_rollout_current", kl)}, vocab=DIGITS)
        advantage = advantages(rewards, segments, how="grpo")
        result = policy_loss(lp, method(cause.method), advantage, info)
        # A response takes part where the gate keeps it and its group has a spread of rewards.
        part = (result.corrected.keep & (advantage != 0)).reshape(-1, LENGTH).any(1)
        self.accepted = part.double().mean().item()
        self.kl.append(kl.mean().item())
        self.step(result.loss)

    def step(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.apply()

    def apply(self) -> None:
        """Step with the gradients that are there, and keep the length of the move."""
        before = self.weights()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.moves.append((self.weights() - before).norm().item())
        self.updates += 1

    def weights(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()


def drift(optimizer: str, policy: str, seed: int) -> dict[str, float]:
    """How far empty batches carry the weights, and what the first small step after them does, in usual steps."""
    learner = Learner(Cause("token_is", 1, 16, "share"), optimizer, StepPolicy("step"), seed)
    for _ in range(32):
        learner.update()
    learner.steps.remove()
    learner.steps = guard(learner.optimizer, POLICIES[policy], acceptance=lambda: learner.accepted)
    usual, start = statistics.median(learner.moves[USUAL]), learner.weights()
    before, probability = copy.deepcopy(learner.model), right(learner.model)
    learner.moves.clear()
    for _ in range(200):
        for p in learner.model.parameters():
            p.grad = torch.zeros_like(p)
        learner.apply()
    moved = learner.weights() - start
    written, old = draw(before, PROMPTS, learner.random)
    with torch.no_grad():
        new = learner.model(inputs(PROMPTS, written)).log_softmax(-1)
    path = list(learner.moves)
    after = right(learner.model)
    # One response of 64 is accepted: its share of the gradient, then a step.
    rows = torch.randint(len(PROMPTS), (1,), generator=learner.random)
    written, logp = draw(learner.model, PROMPTS[rows], learner.random)
    graph = learner.model(inputs(PROMPTS[rows], written)).log_softmax(-1)
    learner.accepted = 1 / 64
    learner.step(-graph.gather(-1, written[..., None]).sum() / (64 * LENGTH))
    return {
        "usual_step": usual,
        "moved": moved.norm().item() / usual,
        "moved_first_10": sum(path[:10]) / usual,
        "moved_first_100": sum(path[:100]) / usual,
        "last_step": path[-1] / usual,
        "kl": (old.exp() * (old - new)).sum(-1).mean().item(),
        "right_before": probability,
        "right_after": after,
        "next_step": learner.moves[-1] / usual,
    }


def outcome(cause: str, optimizer: str, policy: str, seed: int, updates: int) -> dict[str, float]:
    """Train to the end; how the policy did, and how many steps were empty."""
    learner = Learner(CAUSES[cause], optimizer, POLICIES[policy], seed)
    start = right(learner.model)
    course = []
    for _ in range(updates):
        learner.update()
        course.append(right(learner.model))
    return {
        "start": start,
        "end": statistics.fmean(course[-8:]),
        "best": max(course),
        "empty": learner.steps.empty,
        "kl_max": max(learner.kl),
        "kl_mean": statistics.fmean(learner.kl),
    }


def sign_flip(differences: list[float]) -> float:
    """Exact two-sided p of a mean difference: the share of all sign patterns whose mean is at least as far from 0.

    Reference: Fisher, The Design of Experiments, 1935, section 21.
    """
    n, observed = len(differences), abs(math.fsum(differences))
    patterns = itertools.product((1, -1), repeat=n)
    beyond = sum(abs(math.fsum(s * d for s, d in zip(p, differences, strict=True))) >= observed - 1e-12 for p in patterns)
    return beyond / 2**n


T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
"""Student's quantile by number of pairs."""


def paired(ends: list[float], baseline: list[float]) -> dict[str, float]:
    """Mean difference of paired seeds, half of its 95 % interval, and the exact p of sign flips."""
    d = [a - b for a, b in zip(ends, baseline, strict=True)]
    half = T_975[len(d)] * statistics.stdev(d) / math.sqrt(len(d))
    return {"difference": statistics.fmean(d), "half_width": half, "p_sign_flip": sign_flip(d)}


def _one(job: tuple[Any, ...]) -> dict[str, float]:
    torch.set_num_threads(1)
    function, *arguments = job
    return function(*arguments)


def measured(jobs: list[tuple[Any, ...]], processes: int) -> list[dict[str, float]]:
    if processes == 1:
        return [_one(job) for job in jobs]
    with ProcessPoolExecutor(processes) as pool:
        return list(pool.map(_one, jobs, chunksize=4))


def drift_part(seeds: int, processes: int) -> dict[str, Any]:
    """Medians over seeds, with the smallest and the largest, by optimizer and policy."""
    cells = list(itertools.product(OPTIMIZERS, POLICIES))
    rows = measured([(drift, o, p, s) for o, p in cells for s in range(seeds)], processes)
    found: dict[str, Any] = {}
    for i, (optimizer, policy) in enumerate(cells):
        mine = rows[i * seeds : (i + 1) * seeds]
        of_cell = {key: [row[key] for row in mine] for key in mine[0]}
        found.setdefault(optimizer, {})[policy] = {
            key: [statistics.median(x), min(x), max(x)] for key, x in of_cell.items()
        }
    return found


def outcome_part(seeds: int, updates: int, processes: int) -> dict[str, Any]:
    """Means over seeds and paired differences to the optimizer's own steps, by cause, optimizer and policy."""
    cells = list(itertools.product(CAUSES, OPTIMIZERS, POLICIES))
    rows = measured([(outcome, *cell, s, updates) for cell in cells for s in range(seeds)], processes)
    found: dict[str, Any] = {}
    for i, (cause, optimizer, policy) in enumerate(cells):
        mine = rows[i * seeds : (i + 1) * seeds]
        cell = {key: statistics.fmean(row[key] for row in mine) for key in mine[0]}
        cell["ends"] = [row["end"] for row in mine]
        cell["lost"] = sum(row["end"] < 0.7 * row["start"] for row in mine)
        table = found.setdefault(cause, {}).setdefault(optimizer, {})
        if policy != "step" and seeds > 1:
            cell |= paired(cell["ends"], table["step"]["ends"])
        table[policy] = cell
    return found


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["drift", "outcome", "frameworks"], action="append")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--updates", type=int, default=96)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    parts = options.part or ["drift", "outcome", "frameworks"]
    document = json.loads(options.json.read_text("utf-8")) if options.json.exists() else {}
    if "drift" in parts:
        document["drift"] = drift_part(options.seeds, options.jobs)
    if "outcome" in parts:
        document["outcome"] = outcome_part(options.seeds, options.updates, options.jobs)
    if "frameworks" in parts:
        from empty_batches_frameworks import frameworks

        document["frameworks"] = frameworks()
    document["seeds"], document["updates"] = options.seeds, options.updates
    options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return document


if __name__ == "__main__":
    main()
