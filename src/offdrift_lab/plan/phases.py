"""Inputs of a plan: how long each phase of a run takes on a cluster, and how long responses are.

Read from TOML (`read_phases`). All times are seconds of one machine's wall clock.
"""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, Literal

import numpy as np
from jaxtyping import Int
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from offdrift import texts
from offdrift.errors import RecipeError

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Part(BaseModel):
    """Base of all parts: unknown keys are errors, values cannot change."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Rollout(Part):
    workers: Count = 8
    """Replicas of the rollout engine."""
    devices: Count = 1
    """Devices of one replica."""
    slots: Count = 32
    """Responses that one replica draws at once."""
    t0: Seconds = 0.01
    """Seconds of a decoding step, whatever the number of running responses: reading the weights."""
    t1: Seconds = 4e-4
    """Further seconds of a decoding step per running response: a step of c responses takes t0 + t1 c."""
    prefill: Seconds = 5e-5
    """Seconds per token of a prompt, and of a prefix whose cache is computed again; the replica's responses wait."""
    steps: Count | None = None
    """Tokens that a replica draws of every response between two looks at its orders: only then are ends seen, and new
    responses and weights taken. Absent: at any time."""
    crashes_per_hour: Seconds = 0.0
    """Crashes of one replica, per hour."""
    restart: Seconds = 60.0
    """Seconds until a lost replica is back, before it loads weights."""
    proposals: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Speculative decoding: proposals that a step judges per response, on average; each costs t1 again."""
    tokens_per_pass: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    """Speculative decoding: tokens that a step adds to a response, on average (`speculative/tokens_per_pass` of a run).
    A token then takes (t0 + (1 + proposals) t1 c) / tokens_per_pass."""
    overhead: Seconds = 0.0
    """Seconds of t0 in which the engine does not compute, but waits for orders: they count as idle."""

    def token_seconds(self, responses: int, versions: int = 1) -> float:
        """Seconds per token of each of so many responses that run together.

        (t0 n + (1 + proposals) t1 c) / tokens_per_pass
        """
        step = self.t0 * versions + (1 + self.proposals) * self.t1 * responses
        return step / self.tokens_per_pass

    @model_validator(mode="after")
    def _takes_time(self) -> Rollout:
        if self.t0 + self.t1 <= 0:
            raise ValueError("rollout.t0 = rollout.t1 = 0: a decoding step takes time; give at least one of them")
        if self.tokens_per_pass > 1 + self.proposals:
            raise ValueError(
                f"rollout.tokens_per_pass = {self.tokens_per_pass:g} with rollout.proposals = {self.proposals:g}: a "
                "step adds one token and the proposals that it accepts; raise rollout.proposals"
            )
        if self.overhead > self.t0:
            raise ValueError(
                f"rollout.overhead = {self.overhead:g} is above rollout.t0 = {self.t0:g}, of which it is a part; lower "
                "it, or raise t0 by as much"
            )
        return self


class Lengths(Part):
    kind: Literal["lognormal", "constant", "histogram"] = "lognormal"
    """Distribution of the tokens of a response."""
    mean: Annotated[float, Field(ge=1)] = 1500.0
    """lognormal: mean after the cap; constant: the length."""
    sigma: Annotated[float, Field(ge=0, le=4)] = 0.6
    """lognormal: standard deviation of the logarithm, before the cap."""
    cap: Count = 4096
    """lognormal, constant: longest response, tokens."""
    correlation: Annotated[float, Field(ge=0, le=1)] = 0.0
    """lognormal, histogram: correlation of lengths within a group, on the scale of a normal variable: hard prompts have
    long responses."""
    values: tuple[Count, ...] = ()
    """histogram: lengths."""
    weights: tuple[Annotated[float, Field(ge=0)], ...] = ()
    """histogram: how often each of `values` occurs; absent: all alike."""
    prompt: Annotated[int, Field(ge=0)] = 500
    """Tokens of a prompt."""

    @model_validator(mode="after")
    def _possible(self) -> Lengths:
        if self.kind == "histogram" and not self.values:
            raise ValueError('lengths.kind = "histogram" needs lengths.values, the lengths that occur')
        if self.kind != "histogram" and (self.values or self.weights):
            raise ValueError(
                f'lengths.values and lengths.weights belong to kind = "histogram", not to "{self.kind}"; '
                'leave them out, or set lengths.kind = "histogram"'
            )
        for key in UNREAD[self.kind]:
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(
                    f'lengths.{key} = {getattr(self, key):g} says nothing of kind = "{self.kind}"; leave it out, or '
                    'set lengths.kind = "lognormal"'
                )
        if self.weights and (len(self.weights) != len(self.values) or not sum(self.weights)):
            raise ValueError(
                f"lengths.weights has {len(self.weights)} numbers for {len(self.values)} lengths.values; give one "
                "each, not all 0, or leave weights out"
            )
        if self.kind != "histogram" and self.mean > self.cap:
            raise ValueError(f"lengths.mean = {self.mean:g} is above lengths.cap = {self.cap}; raise the cap")
        return self

    @property
    def average(self) -> float:
        """Mean tokens of a response."""
        if self.kind == "histogram":
            return float(np.average(self.values, weights=self.weights or None))
        return self.mean

    def draw(self, rng: np.random.Generator, groups: int, samples: int) -> Int[np.ndarray, "groups samples"]:
        """Lengths of the responses of so many groups, tokens."""
        if self.kind == "constant":
            return np.full((groups, samples), round(self.mean))
        z = math.sqrt(self.correlation) * rng.standard_normal((groups, 1))
        z = z + math.sqrt(1 - self.correlation) * rng.standard_normal((groups, samples))
        if self.kind == "histogram":
            values, weights = np.asarray(self.values), np.asarray(self.weights or np.ones(len(self.values)), float)
            order = values.argsort()
            shares = (weights[order].cumsum() / weights.sum())[:-1].clip(0, 1)
            return values[order][np.searchsorted(_quantiles(tuple(shares.tolist())), z)]
        lengths = np.exp(log_median(self.mean, self.sigma, float(self.cap)) + self.sigma * z)
        return np.clip(np.rint(lengths), 1, self.cap).astype(np.int64)


UNREAD = {
    "lognormal": ("values", "weights"),
    "constant": ("sigma", "correlation", "values", "weights"),
    "histogram": ("mean", "sigma", "cap"),
}
"""Fields of `Lengths` that a kind does not read; they keep their defaults."""


@lru_cache(maxsize=8)
def _quantiles(shares: tuple[float, ...]) -> np.ndarray:
    """Values that a standard normal variable does not exceed with these probabilities."""
    normal = NormalDist()
    return np.array([normal.inv_cdf(p) if 0 < p < 1 else math.copysign(math.inf, p - 0.5) for p in shares])


def log_median(mean: float, sigma: float, cap: float) -> float:
    """m for which exp(m + sigma Z), cut off at a cap, has a mean; Z is a standard normal variable.

        E[min(X, cap)] = e^(m + sigma^2 / 2) Phi(k - sigma) + cap (1 - Phi(k)),   k = (log cap - m) / sigma

    Example:
        >>> round(log_median(100.0, 0.5, 1e9) + 0.125, 6) == round(math.log(100.0), 6)
        True
    """
    if sigma == 0:
        return math.log(min(mean, cap))

    def capped_mean(m: float) -> float:
        k = (math.log(cap) - m) / sigma
        phi, beyond = (0.5 * math.erfc(-x / math.sqrt(2)) for x in (k - sigma, -k))
        return math.exp(m + sigma**2 / 2) * phi + cap * beyond

    low, high = math.log(mean) - sigma**2 / 2 - 1, math.log(cap) + 40 * sigma
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if capped_mean(middle) < mean else (low, middle)
    return low


class Trainer(Part):
    devices: Count = 8
    """Devices of the trainer."""
    group: Seconds = 1.0
    """Seconds per group of an update, on `devices`."""
    update: Seconds = 3.0
    """Further seconds per update: the optimizer's step and what else does not grow with the batch."""
    scaling: Annotated[float, Field(ge=0, le=1)] = 1.0
    """On n devices a group takes `group * (devices / n) ** scaling`: 1 is perfect scaling, 0 none."""


class Sync(Part):
    push: Seconds = 2.0
    """Seconds for which workers and trainer wait when weights are pushed."""
    load: Seconds = 2.0
    """Seconds for which one worker waits when it takes weights by itself."""


class BatchShape(Part):
    groups: Count = 32
    """Groups per update."""
    samples: Count = 8
    """Responses per group."""
    store: Count | None = None
    """Groups that may be outstanding; absent: 16 times `groups`."""

    @model_validator(mode="after")
    def _holds_a_batch(self) -> BatchShape:
        if self.store is not None and self.store < self.groups:
            raise ValueError(
                f"batch.store = {self.store} is below batch.groups = {self.groups}: no update would ever have its "
                f"groups; set store >= {self.groups}, or leave it out"
            )
        return self


class Colocated(Part):
    """The baseline: one pool of devices that generates, then trains."""

    switch: Seconds = 2.0
    """Seconds per update to change between generating and training."""
    group: Seconds | None = None
    """Seconds per group of an update on all devices; absent: scaled from `trainer.group`."""
    update: Seconds | None = None
    """Further seconds per update; absent: `trainer.update`."""


class Horizon(Part):
    updates: Count = 30
    """Updates that are measured."""
    warmup: Annotated[int, Field(ge=0)] = 20
    """Updates before them, until the pipeline is full."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of the lengths and crashes."""


class Phases(Part):
    """A cluster, a task and a trainer as a simulation sees them."""

    name: str = "example: a 7B model on 16 devices"
    """Title of the plan; absent: the file's name."""
    rollout: Rollout = Rollout()
    lengths: Lengths = Lengths()
    trainer: Trainer = Trainer()
    sync: Sync = Sync()
    batch: BatchShape = BatchShape()
    colocated: Colocated = Colocated()
    run: Horizon = Horizon()

    @property
    def devices(self) -> int:
        """Devices of both sides."""
        return self.rollout.workers * self.rollout.devices + self.trainer.devices

    def split(self, workers: int) -> Phases:
        """Split the same devices by another number of rollout workers; the trainer has the rest.

        Raises: `RecipeError` if none is left for the trainer.
        """
        rest = self.devices - workers * self.rollout.devices
        if workers < 1 or rest < 1:
            raise RecipeError(
                f"rollout.workers = {workers} of {self.rollout.devices} devices each leave {rest} of {self.devices} "
                f"devices to the trainer; 1 to {(self.devices - 1) // self.rollout.devices} workers are possible"
            )
        trainer = self.trainer.model_copy(update={"devices": rest, "group": self.group_seconds(rest)})
        return self.model_copy(
            update={"rollout": self.rollout.model_copy(update={"workers": workers}), "trainer": trainer}
        )

    def group_seconds(self, devices: int) -> float:
        """Training seconds per group on another number of devices."""
        return self.trainer.group * (self.trainer.devices / devices) ** self.trainer.scaling

    @property
    def as_colocated(self) -> Phases:
        """One pool of all devices: its simulation under `sync` is the colocated baseline."""
        colocated, everything = self.colocated, self.devices
        trainer = self.trainer.model_copy(
            update={
                "devices": everything,
                "group": self.group_seconds(everything) if colocated.group is None else colocated.group,
                "update": self.trainer.update if colocated.update is None else colocated.update,
            }
        )
        workers = max(1, everything // self.rollout.devices)
        return self.model_copy(
            update={
                "rollout": self.rollout.model_copy(update={"workers": workers}),
                "trainer": trainer,
                "sync": Sync(push=colocated.switch, load=self.sync.load),
            }
        )


EXAMPLE = Phases()
"""What `offdrift plan` shows without a file."""


def read_phases(path: Path) -> Phases:
    """The phases that a TOML file states; what it leaves out is as in the example.

    Raises: `RecipeError` naming the file, the key and what was expected.
    """
    return phases_of({"name": path.stem, **read_toml(path)}, where=str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises: `RecipeError` if it is not one."""
    try:
        text = texts.read_text(path)
    except (OSError, UnicodeDecodeError) as e:
        raise RecipeError(f"cannot read {path}: {e}; give a TOML file with the phases of a run") from e
    try:
        return texts.parse_toml(text)
    except ValueError as e:
        raise RecipeError(f"{path} is no TOML: {e}") from e


def phases_of(values: dict[str, Any], *, where: str) -> Phases:
    """Phases from plain values. Raises: `RecipeError` naming every key that is wrong and what was expected."""
    try:
        return Phases(**values)
    except ValidationError as e:
        problems = dict.fromkeys(map(_explain, e.errors()))
        raise RecipeError(f"{where}: {'; '.join(problems)}; docs/plan.md has every field") from e


def _explain(problem: Any) -> str:
    """A validation error in words; for an unknown key, with the keys that there are."""
    key, part = ".".join(map(str, problem["loc"])), problem["loc"][0] if problem["loc"] else ""
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    if problem["type"] == "extra_forbidden":
        owner = getattr(EXAMPLE, part) if len(problem["loc"]) > 1 else EXAMPLE
        names = ", ".join(type(owner).model_fields)
        return f"unknown key {key!r}; {part if len(problem['loc']) > 1 else 'a plan'} has {names}"
    if problem["type"] == "model_type":
        return f"{key} = {problem['input']!r}: a table such as [{key}] was expected"
    return f"{key} = {problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"
