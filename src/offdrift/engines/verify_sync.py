"""Weight sync: verify that the engine holds the trainer's weights after `load_weights`.

Loading the same weights again proves nothing: a head or an expert layer that ignores every update
still agrees with weights that never changed. `verify_sync` therefore perturbs the trainer's weights,
one group after another, loads them, samples with the engine and scores the tokens with the trainer.
A group that stayed behind shows as a difference far above the noise between the two engines.

A difference is |log-prob of the engine - log-prob of the trainer| of a token that the engine sampled,
in nats, without top-k or top-p. Groups are judged by the median over tokens: stale weights move nearly
every token, rounding moves a few by whole nats, where a router chooses another expert. So an honest
engine of which no more than a quarter of the tokens exceed the limit is refused with a probability of
at most (3/4)^(N/2), 1e-6 at N = 96 independent tokens (Chernoff's bound for half of N). A stale tensor
that touches fewer than half of the tokens, or whose effect is below `GroupSync.limit`, cannot be seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from offdrift.engines import Engine
from offdrift.engines.score import score
from offdrift.errors import SyncError
from offdrift.records.provenance import Provenance, Sampling
from offdrift.records.rollouts import Rollouts

FLOAT32_CAP = 1e-3
HALF_CAP = 0.25
QUANTIZED_CAP = 0.5
"""Largest mean difference with the weights just loaded, by the coarser side's precision, nats per token.
Measured on tiny models with a sharp distribution: up to 1e-6, 0.02 and 0.18."""

LEAST_NOISE = 1e-6
"""Nats that float32 log-probs of tokens that are all but certain cannot tell apart."""
MEDIAN_TO_MEAN = 0.03
"""Where most tokens are all but certain, the median of the noise is theirs alone, and grows a hundredfold as soon as
perturbed weights are less certain: it counts as at least this share of the mean."""
EFFECT_TO_NOISE = 15.0
"""A perturbation must move the trainer's own log-probs by this many times the noise."""
LIMIT_TO_NOISE = 5.0
LIMIT_TO_EFFECT = 0.15
"""A group is stale if the difference exceeds both: this many times the noise (which grew up to 1.6 times
under perturbed weights, in bfloat16 with experts), and this share of what a stale group would show."""
DRIFT_TO_NOISE = 10.0
"""Later synchronizations may differ by this many times the first noise, never above the cap."""
FRACTIONS = (0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)
"""Sizes of the perturbation tried, in root-mean-squares of each tensor."""
PROBE_TOKENS = 16
"""Tokens sampled per probe prompt at most."""

ONE_TOKEN = 1.0
"""Nats that a single token may contribute to the cheap check: a router that flips on one token in a
hundred moves it by ten nats and says nothing about weights, which move nearly every token."""

GROUPS = ("embeddings", "attention", "mlp", "norms")


@dataclass(frozen=True)
class GroupSync:
    """Result for one group of weights that was perturbed and loaded; medians in nats."""

    name: str
    fraction: float
    """Size of the perturbation, in root-mean-squares of each tensor."""
    effect: float
    """How far it moved the trainer's own log-probs: about what a stale group would show."""
    gap: float
    """How far engine and trainer are apart after loading it."""
    limit: float
    """Where a gap starts to mean that something stayed behind."""
    conclusive: bool
    """Whether the perturbation rose far enough above the noise to tell."""

    @property
    def stale(self) -> bool:
        return not self.gap <= self.limit  # NaN is stale, too


@dataclass(frozen=True)
class SyncReport:
    """Evidence that a synchronization reaches every group of weights."""

    engine: str
    tokens: int
    """Tokens compared per measurement."""
    noise: float
    """Mean difference between engine and trainer with the same weights, nats per token."""
    cap: float
    """Largest noise that the precision of the two explains, nats per token."""
    groups: tuple[GroupSync, ...]

    @property
    def stale(self) -> tuple[str, ...]:
        """Groups that stayed behind."""
        return tuple(g.name for g in self.groups if g.stale)

    @property
    def unverified(self) -> tuple[str, ...]:
        """Groups of which nothing can be said: their effect never rose above the noise."""
        return tuple(g.name for g in self.groups if not g.conclusive)


def verify_sync(
    engine: Engine, model: nn.Module, prompts: Sequence[Sequence[int]], sampling: Sampling, *, seed: int
) -> SyncReport:
    """Prove on a few probe prompts that `engine.load_weights` takes all of the trainer's weights.

    Each group of weights w becomes w + f rms(w) N(0, 1), f growing until the trainer's log-probs
    move by `EFFECT_TO_NOISE` times the noise; engine and trainer must still agree then. The
    trainer's weights are restored bit for bit and the engine gets them again, whatever happens.

    Args:
        sampling: of the run; the probe drops its filters and stop tokens, and draws `PROBE_TOKENS` at most.
        seed: of the perturbations and the samples.

    Raises: `SyncError` naming the groups that stayed behind, with the differences in nats.
    """
    report = examine_sync(engine, model, prompts, sampling, seed=seed)
    if report.stale:
        groups = "; ".join(
            f"{g.name}: differ by {g.gap:.3g} nats per token after a change worth {g.effect:.3g} (limit {g.limit:.3g})"
            for g in report.groups
            if g.stale
        )
        raise SyncError(
            f"engine {engine.name!r} keeps old weights although load_weights returned: {groups}; noise "
            f"with equal weights {report.noise:.3g}. Do not train on these rollouts: use another engine "
            "version, or construct the engine anew from a checkpoint at every update"
        )
    return report


def examine_sync(
    engine: Engine, model: nn.Module, prompts: Sequence[Sequence[int]], sampling: Sampling, *, seed: int
) -> SyncReport:
    """What `verify_sync` does, reporting groups that stayed behind instead of refusing them.

    Raises: `SyncError` if the two sides differ by more than their precision explains as soon as the
        weights are loaded: then no perturbation can say more.
    """
    probe = _Probe(engine, model, prompts, sampling, seed)
    version = engine.version
    with _evaluating(model):
        try:
            rollouts, before = probe.synchronized()
            differences = (rollouts.logp_rollout - before).abs()
            noise, cap = float(differences.mean()), precision_cap(rollouts.provenance, model)
            groups = {name: weights for name, weights in weight_groups(model).items() if weights}
            if not noise <= cap:  # NaN is refused, too
                suspects = " or ".join(name for name in ("attention", "mlp") if probe.agrees_without(groups, name, cap))
                where = (
                    f"without the {suspects} weights they agree, so those are not taken as they are"
                    if suspects
                    else "no single group explains it: another model, missing weights, or raw log-probs"
                )
                raise SyncError(
                    f"engine {engine.name!r} and trainer differ by {noise:.3g} nats per token right after "
                    f"load_weights, the cap at this precision is {cap:.3g}; {where}. Do not train on "
                    "these rollouts: use another engine version, or construct the engine anew from a "
                    "checkpoint"
                )
            typical = max(float(differences.median()), noise * MEDIAN_TO_MEAN, LEAST_NOISE)
            results = tuple(probe.perturb(name, groups[name], rollouts, before, typical) for name in groups)
        finally:
            engine.load_weights(model.named_parameters(), version=version)
    return SyncReport(engine.name, len(rollouts.tokens), noise, cap, results)


def check_sync(
    engine: Engine,
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    seed: int,
    baseline: SyncReport,
) -> float:
    """The cheap check after a later synchronization: sample, score, compare with `verify_sync`'s first report.

    Returns: the mean difference in nats per token, single tokens counted up to `ONE_TOKEN`; at most
        min(cap, max(`DRIFT_TO_NOISE` noise, cap/10)).

    Raises: `SyncError` if it is larger.
    """
    limit = min(baseline.cap, max(DRIFT_TO_NOISE * baseline.noise, baseline.cap / 10))
    with _evaluating(model):
        rollouts, logp = _Probe(engine, model, prompts, sampling, seed).compared()
    gap = float((rollouts.logp_rollout - logp).abs().clamp(max=ONE_TOKEN).mean())
    if not gap <= limit:
        raise SyncError(
            f"engine {engine.name!r} and trainer differ by {gap:.3g} nats per token after a "
            f"synchronization at version {engine.version}; the limit is {limit:.3g}, the first "
            f"difference was {baseline.noise:.3g}. Either the engine did not take these weights, "
            "or its precision no longer suffices for them: run verify_sync to tell which"
        )
    return gap


def precision_cap(provenance: Provenance, model: nn.Module) -> float:
    """The cap that fits the coarser of engine and trainer, nats per token."""
    if provenance.quantization is not None:
        return QUANTIZED_CAP
    trainer = next(model.parameters()).dtype
    exact = provenance.dtype == "float32" and trainer in (torch.float32, torch.float64)
    return FLOAT32_CAP if exact else HALF_CAP


def weight_groups(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The model's weights by what they do: `GROUPS`, each perhaps empty; shared ones once."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) or m is head]
    embedding = {id(p) for m in tables for p in m.parameters(recurse=False)}
    groups: dict[str, list[nn.Parameter]] = {name: [] for name in GROUPS}
    for name, weight in model.named_parameters():
        if id(weight) in embedding:
            group = "embeddings"
        elif "norm" in name or "ln_" in name:
            group = "norms"
        else:
            group = "attention" if "attn" in name or "attention" in name else "mlp"
        groups[group].append(weight)
    return groups


@dataclass(frozen=True)
class _Probe:
    """Samples tokens with the engine and scores them with the trainer."""

    engine: Engine
    model: nn.Module
    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    seed: int

    def synchronized(self) -> tuple[Rollouts, Tensor]:
        """Load the trainer's weights into the engine, then compare."""
        self.engine.load_weights(self.model.named_parameters(), version=self.engine.version)
        return self.compared()

    def compared(self) -> tuple[Rollouts, Tensor]:
        """What the engine samples now, and the trainer's log-probs of it."""
        tokens = min(self.sampling.max_tokens, PROBE_TOKENS)
        plain = replace(self.sampling.unfiltered, max_tokens=tokens, stop_token_ids=())
        rollouts = self.engine.generate(self.prompts, plain, seed=self.seed)
        return rollouts, self.scored(rollouts)

    @torch.no_grad()
    def scored(self, rollouts: Rollouts) -> Float[Tensor, " n"]:
        """The trainer's log-probs of these tokens, at the sampling temperature."""
        return score(self.model, rollouts, temperature=self.sampling.temperature).logp.cpu()

    def perturb(
        self, name: str, weights: list[nn.Parameter], rollouts: Rollouts, before: Float[Tensor, " n"], noise: float
    ) -> GroupSync:
        """Load one group perturbed, and compare: `before` and the median `noise` are of the weights as they are."""
        fraction, effect, wanted = FRACTIONS[0], math.nan, EFFECT_TO_NOISE * noise
        with _restored(weights) as originals:
            while True:
                _perturb(weights, originals, fraction=fraction, seed=self.seed)
                effect = float((self.scored(rollouts) - before).abs().median())
                if effect >= wanted or fraction == FRACTIONS[-1]:
                    break
                fraction = next_fraction(fraction, effect, wanted)
            sampled, logp = self.synchronized()
        gap = float((sampled.logp_rollout - logp).abs().median())
        # Held against the effect on the very tokens compared: where perturbed weights are less certain of
        # their tokens, noise and effect are larger alike.
        moved = float((self.scored(sampled) - logp).abs().median())
        limit = max(LIMIT_TO_NOISE * noise, LIMIT_TO_EFFECT * max(effect, moved))
        return GroupSync(name, fraction, effect, gap, limit, effect >= wanted)

    def agrees_without(self, groups: dict[str, list[nn.Parameter]], name: str, cap: float) -> bool:
        """Whether the two sides agree once this group is zero, which is the same in every layout.

        Only what adds to the residual stream can be taken out: without embeddings or norms any engines agree.
        """
        with _restored(groups.get(name, [])) as originals, torch.no_grad():
            for weight in groups.get(name, []):
                weight.zero_()
            rollouts, logp = self.synchronized()
            return bool(originals) and float((rollouts.logp_rollout - logp).abs().mean()) <= cap


def next_fraction(fraction: float, effect: float, wanted: float) -> float:
    """The next size to try: where an effect in proportion to it suffices, the largest if none does.

    A skipped size would have fallen short, unless the effect grows faster than in proportion.
    """
    enough = (f for f in FRACTIONS if f > fraction and f * effect >= fraction * wanted)
    return next(enough, FRACTIONS[-1])


@torch.no_grad()
def _perturb(weights: list[nn.Parameter], originals: list[Tensor], *, fraction: float, seed: int) -> None:
    """w <- w0 + fraction rms(w0) N(0, 1); a tensor of zeros takes the largest rms of the group."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [float(w.float().square().mean().sqrt()) for w in originals]
    for weight, original, size in zip(weights, originals, sizes, strict=True):
        noise = torch.randn(original.shape, generator=generator).to(original)
        weight.copy_(original + fraction * (size or max(sizes)) * noise)


@contextmanager
def _restored(weights: list[nn.Parameter]) -> Iterator[list[Tensor]]:
    """Copies of the weights, which are put back bit for bit afterwards."""
    originals = [w.detach().clone() for w in weights]
    try:
        yield originals
    finally:
        with torch.no_grad():
            for weight, original in zip(weights, originals, strict=True):
                weight.copy_(original)


@contextmanager
def perturbed(model: nn.Module, *, fraction: float, seed: int) -> Iterator[None]:
    """The model with every weight w at w + fraction rms(w) N(0, 1), and afterwards as it was."""
    groups = [weights for weights in weight_groups(model).values() if weights]
    with ExitStack() as stack:
        for i, weights in enumerate(groups):
            originals = stack.enter_context(_restored(weights))
            _perturb(weights, originals, fraction=fraction, seed=seed + i)
        yield


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode, and back to the mode each was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
