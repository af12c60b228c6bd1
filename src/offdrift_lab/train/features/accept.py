"""`optim.accept`: a step is a candidate, which a test accepts or undoes, bit for bit.

What is undone: weights, the optimizer's means and counters, and the state of an adaptive method. The update counts all
the same, as one that is left out does: batches, seeds and the schedule of the learning rate go on.

Memory: another copy of weights and of the optimizer's state, on their devices.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.engines.score import chunks, divergences, score
from offdrift.errors import RecipeError
from offdrift.numerics import clamped
from offdrift.records.rollouts import Rollouts
from offdrift.segments import Segments
from offdrift_lab.train.data.episodes import rollout
from offdrift_lab.train.data.source import batch_seed
from offdrift_lab.train.features.base import Feature, Metrics
from offdrift_lab.train.settings.optim import AcceptSettings
from offdrift_lab.train.settings.recipe import Recipe

SMALLEST_STD = 1e-6


def inference_gap(
    logp_engine: Float[Tensor, " n"],
    logp_trainer: Float[Tensor, " n"],
    rewards: Float[Tensor, " b"],
    *,
    segments: Segments,
    samples: int,
) -> Float[Tensor, ""]:
    """Proxy of J(engine) - J(trainer) at the same weights, from responses that the engine drew, in units of advantages.

        T = - mean_i rho_i A_i,   rho_i = exp(mean_t (log pi_t - log mu_t)),  A_i = (R_i - mean R) / std R of the prompt

    It is 0 where both policies agree, and negative where the trainer finds good answers likelier than the engine does:
    what the update promises is then not delivered.

    Args:
        logp_engine, logp_trainer: log-probs of the tokens, nats; response after response.
        samples: responses to each prompt, which follow each other.

    Gradient: none.

    Example:
        >>> gap = lambda trainer: inference_gap(torch.zeros(2), torch.tensor(trainer), torch.tensor([1.0, 0.0]),
        ...                                     segments=Segments.from_lengths([1, 1]), samples=2)
        >>> float(gap([0.0, 0.0])) == 0, round(float(gap([0.1, 0.0])), 4)
        (True, -0.0526)

    Reference: MIPU, arXiv:2606.29526, step 2, after descriptions: the paper itself could not be read. Assumed: the
    advantage is GRPO's, with the standard deviation of the sample taken over all answers.
    """
    log_ratio = clamped((logp_trainer - logp_engine).detach().double())
    rho = segments.mean(log_ratio).exp()
    by_prompt = rewards.double().view(-1, samples)
    spread = by_prompt.std(1, correction=0, keepdim=True)
    advantage = (by_prompt - by_prompt.mean(1, keepdim=True)) / (spread + SMALLEST_STD)
    return -(rho * advantage.flatten().to(rho.device)).mean()


class Undo:
    """Weights and the optimizer's state as they are now, to be brought back bit for bit.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.AdamW([weight])
        >>> undo = Undo(optimizer)
        >>> weight.grad = torch.ones(2)
        >>> optimizer.step(); undo.restore()
        >>> weight.tolist(), len(optimizer.state)
        ([1.0, 1.0], 0)
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.weights: dict[Tensor, Tensor] = {}
        self.state: dict[Tensor, dict[str, Any]] = {}
        self.keep()

    @torch.no_grad()
    def keep(self) -> None:
        """Take what is there now in place of what was kept, in the same memory where it fits."""
        state = self.optimizer.state
        for p in self._parameters():
            _copy(self.weights, p, p)
            if p not in state:
                self.state.pop(p, None)
                continue
            saved = self.state.setdefault(p, {})
            for name, x in state[p].items():
                _copy(saved, name, x)

    @torch.no_grad()
    def restore(self) -> None:
        """Bring back what was kept."""
        state = self.optimizer.state
        for p in self._parameters():
            p.copy_(self.weights[p])
            if p not in self.state:
                state.pop(p, None)
                continue
            for name, x in self.state[p].items():
                if torch.is_tensor(x):
                    state[p][name].copy_(x)
                else:
                    state[p][name] = x

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def _copy(saved: dict[Any, Any], key: Any, x: Any) -> None:
    """Keep a copy of a tensor, or a number as it is."""
    if not torch.is_tensor(x):
        saved[key] = x
    elif key in saved:
        saved[key].copy_(x)
    else:
        saved[key] = x.detach().clone()


class Acceptance(Feature):
    """Tests every step after it was taken, and undoes it where the test fails."""

    def __init__(self, settings: AcceptSettings) -> None:
        self.settings = settings
        self.undo: Undo | None = None
        self.value = self.limit = 0.0
        self.accepted = True

    @classmethod
    def of(cls, recipe: Recipe, arm: str) -> Acceptance | None:
        return None if recipe.optim.accept is None else cls(recipe.optim.accept)

    def check(self, recipe: Recipe, model: Any) -> None:
        """Refuse what the test cannot act on. Raises: `RecipeError`."""
        test = self.settings.test
        if test == "gap" and recipe.pipeline is not None:
            raise RecipeError(
                'optim.accept.test = "gap" draws from the engine after every step, and with [pipeline] workers draw '
                'meanwhile; use "kl" or "certificate"'
            )
        if test == "gap" and recipe.lag.sync_every != 1:
            raise RecipeError(
                f'optim.accept.test = "gap" gives the engine every candidate, and lag.sync_every = '
                f'{recipe.lag.sync_every} keeps older weights there; use "kl" or "certificate", or sync_every = 1'
            )
        if test == "certificate" and recipe.rollout.evidence != "full":
            raise RecipeError(
                f'optim.accept.test = "certificate" needs whole distributions, and rollout.evidence = '
                f'"{recipe.rollout.evidence}"; set it to "full"'
            )

    def start(self, arm: Any) -> None:
        if arm.accelerator.num_processes > 1:
            raise RecipeError(f"optim.accept acts in one process, and there are {arm.accelerator.num_processes}")

    def stepping(self, arm: Any) -> None:
        if self.undo is None:
            self.undo = Undo(arm.optimizer)
        else:
            self.undo.keep()
        self.accepted = True
        self.value, self.limit = 0.0, self.settings.limit_at(arm.version)

    def accepts(self, arm: Any, batch: Any) -> bool:
        """Whether the candidate passes its test; one that does not is undone here."""
        training = arm.model.training
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            if self.settings.test == "gap":
                self.value = self.engine_gap(arm)
                self.accepted = self.value >= -self.limit
            else:
                self.value = self.divergence(arm, batch)
                self.accepted = self.value <= self.limit
        arm.model.train(training)
        if not self.accepted:
            assert self.undo is not None
            self.undo.restore()
        return self.accepted

    def stepped(self, arm: Any, update: Any) -> Metrics:
        row = {"undone": float(not self.accepted), "accept_test": self.value, "accept_limit": self.limit}
        return Metrics(maxima={f"optim/{name}": x for name, x in row.items()})

    def engine_gap(self, arm: Any) -> float:
        """Give the engine the candidate, draw answers to new training prompts, and compare both policies on them."""
        run, s = arm.run, self.settings
        with ExitStack() as published:
            for feature in arm.features:
                published.enter_context(feature.publishing(arm, arm.inner))
            run.engine.load_weights(arm.weights(), version=arm.version + 1)
        seed = batch_seed(run.recipe.seed + 1, arm.version)
        rollouts = rollout(
            run.engine,
            run.task.sample(s.prompts, seed=seed),
            run.task,
            run.tokenizer,
            run.sampling,
            samples=s.samples,
            seed=seed,
            max_turns=run.recipe.max_turns,
        )
        assert rollouts.rewards is not None
        logp, _ = _scored(arm, rollouts)
        gap = inference_gap(
            rollouts.logp_rollout, logp, rollouts.rewards, segments=rollouts.segments, samples=s.samples
        )
        return float(gap)

    def divergence(self, arm: Any, batch: Any) -> float:
        """Compare rollout policy and candidate on a share of the responses: mean k3, or the largest exact KL."""
        number = batch.rollouts.num_sequences
        count = max(1, round(self.settings.share * number))
        of_share = batch.select(torch.arange(count) * number // count).rollouts
        logp, largest = _scored(arm, of_share, exact=self.settings.test == "certificate")
        if self.settings.test == "certificate":
            return largest
        log_ratio = clamped((logp - of_share.logp_rollout).double())
        return float((log_ratio.expm1() - log_ratio).mean())


def _scored(arm: Any, rollouts: Rollouts, *, exact: bool = False) -> tuple[Float[Tensor, " n"], float]:
    """Log-probs of tokens under the arm's weights, on the host, and the largest KL(rollout || current) if asked for."""
    logp, largest = torch.empty(len(rollouts.tokens)), 0.0
    temperature = rollouts.provenance.sampling.temperature
    for sequences in chunks(rollouts, token_budget=arm.optim.token_budget):
        part = rollouts.select(sequences)
        scored = score(arm.model, part, temperature=temperature, half=arm.half)
        logp[rollouts.segments.rows(sequences)] = scored.logp.float().cpu()
        if exact:
            kl = divergences(part, scored.logits)["kl_rollout_current"].lo
            largest = max(largest, float(kl.max()))
    return logp, largest
