"""`[optim]` of a recipe: the optimizer, how a batch becomes steps, and what acts on gradients and learning rates."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from offdrift.advantages import AdvantageName
from offdrift.step_policy import EmptyStep, StepPolicy
from offdrift_lab.train.settings.sections import Natural, Positive, PositiveFloat, Section


class LengthGuardSettings(Section):
    """The learning rate falls when responses suddenly become longer, which precedes collapse by tens of updates; see
    `methods.lr_scale.LengthSurge` (arXiv:2602.01826)."""

    mode: Literal["survey", "period"] = "survey"
    """survey: halved at every surge; period: halved again and again from the first one on, as in the paper."""
    threshold: PositiveFloat | None = None
    """A surge is a mean length this many times that of `window` updates before (survey: 1.2), or of the mean over the
    run's first `window` updates (period: 3)."""
    window: Positive | None = None
    """Updates; absent: 100 (survey) or 50 (period)."""
    period: PositiveFloat = 1.8
    """period: updates between two falls, as a multiple of the update of the surge."""
    factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Of the learning rate at each fall."""
    floor: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Smallest share of the learning rate."""
    cooldown: Natural = 100
    """survey: updates after a surge without another."""
    switch_to: str | None = None
    """Method of every arm from the first batch after a surge on, with its published values, such as
    "bypass_pg_geo_rs". Absent: the method stays."""


class AlignSettings(Section):
    """GAC: what a gradient repeats of the last update's is removed from it, where they agree too well; see
    `methods.gradient_alignment.gac_projection` (arXiv:2603.01501)."""

    threshold: Annotated[float, Field(ge=-1, lt=1)] = 0.3
    """Cosine of the two gradients above which the parallel part is removed. On-policy it is near 0; -1 is always, but
    for opposite gradients."""
    strength: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the parallel part that is removed; 0 only measures the cosine."""
    skip_above: Annotated[float, Field(gt=-1, lt=1)] | None = None
    """No step is taken where the cosine is above this. Absent: every step is taken."""

    @model_validator(mode="after")
    def _ordered(self) -> AlignSettings:
        if self.skip_above is not None and self.strength > 0 and self.skip_above <= self.threshold:
            raise ValueError(
                f"optim.align.skip_above = {self.skip_above} is not above optim.align.threshold = {self.threshold}: "
                "every gradient that would be projected is skipped; raise it, or set optim.align.strength = 0"
            )
        return self


class PerturbSettings(Section):
    """ALP: the loss scores the policy with Gaussian noise in the input of every decoder layer, whose sizes are learned;
    see `train.features.perturb` (arXiv:2603.19470)."""

    sigma: PositiveFloat = 1e-6
    """Standard deviation of the noise at the start, in the unit of hidden states."""
    lr: PositiveFloat = 5e-4
    """Learning rate of the logarithms of the standard deviations (Adam)."""


class AcceptSettings(Section):
    """Every step is a candidate: a test accepts it, or it is undone bit for bit; see `train.features.accept`."""

    test: Literal["gap", "kl", "certificate"] = "gap"
    """gap: MIPU's proxy (arXiv:2606.29526, after descriptions) of what the engine loses against the trainer at the
    candidate's weights, on answers that it draws for that. kl: mean k3 of rollout policy and candidate on a part of the
    batch. certificate: their largest exact KL of a token there, the premise of a certificate."""
    limit: PositiveFloat | None = None
    """gap: tolerance of the first step (absent: 1e-3); accepted is a gap above minus it. kl, certificate: the largest
    value that is accepted, nats (absent: 0.05)."""
    final: Annotated[float, Field(ge=0)] | None = None
    """The limit from `steps` updates on, to which it moves linearly. Absent: 0 (gap), or the limit itself."""
    steps: Positive = 100
    """Updates over which the limit moves."""
    prompts: Positive = 2
    """gap: new training prompts that the engine answers after every step."""
    samples: Annotated[int, Field(ge=2)] = 8
    """gap: answers to each."""
    share: Annotated[float, Field(gt=0, le=1)] = 0.125
    """kl, certificate: share of the batch's responses that the candidate scores."""

    def limit_at(self, update: int) -> float:
        """The limit of an update, the first being 0.

        Example:
            >>> settings = AcceptSettings(limit=0.004, final=0.001, steps=3)
            >>> [round(settings.limit_at(i), 4) for i in (0, 1, 3, 9)]
            [0.004, 0.003, 0.001, 0.001]
        """
        gap = self.test == "gap"
        first = self.limit if self.limit is not None else 1e-3 if gap else 0.05
        last = self.final if self.final is not None else 0.0 if gap else first
        return first + (last - first) * min(1.0, update / self.steps)


class OptimSettings(Section):
    lr: PositiveFloat = 1e-4
    """AdamW learning rate, the largest of its schedule."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes on after the warm-up, to `final` of it at the end of the run."""
    warmup: Natural = 0
    """Updates over which the learning rate rises linearly to `lr`."""
    final: Annotated[float, Field(ge=0, le=1)] = 0.0
    """linear, cosine: the share of `lr` that the run ends at."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """AdamW's decay of its means of gradients and of their squares, per update."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's weight decay, per update and unit of learning rate."""
    length_guard: LengthGuardSettings | None = None
    """Absent: the learning rate does not look at lengths. `{}`: a guard with its defaults."""
    align: AlignSettings | None = None
    """Absent: gradients are used as they are. `{}`: what a gradient repeats of the last one is removed."""
    perturb: PerturbSettings | None = None
    """Absent: the loss scores the policy itself. `{}`: the policy with noise in every layer's input."""
    accept: AcceptSettings | None = None
    """Absent: every step counts. `{}`: a step that MIPU's test refuses is undone."""
    accumulate: Positive = 1
    """Draws of `rollout.prompts` prompts that make up a batch, one after the other: their gradients add up under one
    normalizer, as if all were one draw."""
    epochs: Positive = 1
    """Passes over each rollout batch."""
    minibatches: Positive = 1
    """Optimizer steps per pass."""
    max_grad_norm: PositiveFloat = 1.0
    """Global gradient norm is clipped to this."""
    skip_empty: bool | Literal["decay", "clear"] = False
    """Take no step where the whole gradient is 0, as when a gate rejects every sequence: AdamW would move the weights
    all the same, by its mean of earlier gradients and its decay (`optim/empty`). decay, clear: its mean of gradients
    also shrinks as at a gradient of 0, or becomes 0."""
    min_acceptance: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of sequences accepted by the gates below which the learning rate of a step shrinks in proportion; 0: it
    never does."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """What the trainer's forward passes multiply matrices in; weights, gradients and AdamW stay float32, and so does a
    critic. float16 scales the loss, and skips steps whose gradient overflows (`optim/skipped`). Absent: what
    `accelerate launch --mixed_precision` says, else float32."""
    token_budget: Positive = 16384
    """Padded tokens per forward pass; smaller is slower, uses less memory, and changes nothing else."""
    advantage: AdvantageName | Literal["method"] = "method"
    """Estimator of the advantage; "method": what the method was published with, else grpo."""
    zvp_alpha: PositiveFloat = 0.1
    """rl_zvp: what entropies are multiplied by in groups whose rewards are all equal, reward deviations per nat."""
    component_weights: dict[str, float] = Field(default_factory=dict)
    """gdpo: weight of each component of the reward, by name; 1 where none is given."""
    baseline_over: Literal["sampled", "kept"] = "sampled"
    """Whether siblings that a gate rejects count in their group's baseline ("sampled") or not."""

    gradient_norms: Literal["proxy", "exact"] = "proxy"
    """opob: what a response's gradient counts as in its group's baseline. proxy: the squared norm at the logits, from
    the forward pass; exact: the norm over all parameters, one more backward pass per response (`opob/...` says how
    far the proxy was off)."""

    @property
    def step_policy(self) -> StepPolicy:
        """Policy of the optimizer at steps without a gradient, and with few accepted sequences."""
        empty: dict[bool | str, EmptyStep] = {False: "step", True: "skip", "decay": "decay", "clear": "clear"}
        return StepPolicy(empty[self.skip_empty], self.min_acceptance)

    def learning_rate(self, update: int, updates: int) -> float:
        """The scheduled learning rate of an update, the first being 0, of so many.

            warm-up of w updates:   lr (update + 1) / w   while update < w
            then, with x = (update - w) / (updates - w):
            linear   lr (1 - (1 - final) x)
            cosine   lr (final + (1 - final) (1 + cos(pi x)) / 2)

        Example:
            >>> optim = OptimSettings(lr=1.0, schedule="linear", warmup=2, final=0.5)
            >>> [optim.learning_rate(i, 6) for i in (0, 1, 2, 4, 6)]
            [0.5, 1.0, 1.0, 0.75, 0.5]
        """
        if update < self.warmup:
            return self.lr * (update + 1) / self.warmup
        x = (update - self.warmup) / max(1, updates - self.warmup)
        falls = {"constant": 0.0, "linear": x, "cosine": (1 - math.cos(math.pi * x)) / 2}
        return self.lr * (1 - (1 - self.final) * falls[self.schedule])

    @model_validator(mode="after")
    def _falls(self) -> OptimSettings:
        if self.schedule == "constant" and self.final != 0:
            raise ValueError(
                f'optim.final = {self.final} does nothing with optim.schedule = "constant"; use "linear" or "cosine"'
            )
        return self
