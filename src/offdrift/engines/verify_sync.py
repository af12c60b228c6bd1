"""Weight sync: verify that the engine holds the trainer's weights after `load_weights`.

Loading the same weights again proves nothing: a head or an expert layer that ignores every update still agrees with
weights that never changed. `verify_sync` therefore perturbs the trainer's weights, loads them, samples with the
engine and scores the tokens with the trainer. In float32 all weights move in one load, and any difference beyond the
noise is a finding. In half precision the tensors are spread over a few loads, each moved as far as rises above the
noise, and a difference that grew is a finding if old weights in the trainer explain it, there and again when they are
moved alone. What stayed behind is named by the gradient (`engines.sync_units`).

Where the engine can show its tensors (`engines.HoldsWeights`) and one look is to suffice (`again=False`), half
precision takes one load that moves them all: each is read back bit for bit, and engine and trainer agree as before.

A tensor is proved to have arrived if staying behind would have made a larger difference than there is. What cannot be
told alone is reported with the smallest union of tensors (layer, kind, group) that is proved, and else as unverified.

A difference is |log-prob of the engine - log-prob of the trainer| of a token that the engine sampled, in nats, without
top-k or top-p.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from offdrift.engines import Engine, HoldsWeights
from offdrift.engines.read_back import arrived
from offdrift.engines.score import score
from offdrift.engines.sync_units import (
    Units,
    effects_of,
    evidence_of,
    least_z,
    moved_by,
    perturb,
    put,
    put_back,
    restored,
    scales_of,
    spread_of,
    tied_ends,
    untied,
    weight_groups,
    with_gradients,
)
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
LIMIT_TO_NOISE = 5.0
"""The median difference after a perturbed load is at most this many times the noise. It grew up to 1.6 times under
perturbed weights, in bfloat16 with experts."""
LIMIT_TO_EFFECT = 0.15
"""In half precision it may also be this share of what the whole perturbation does: rounding grows with it."""
DRIFT_TO_NOISE = 10.0
"""Later synchronizations may differ by this many times the first noise, never above the cap."""

ALPHA = 1e-6
"""Probability at most that z alone names a union that is not stale."""
REACH, PROVED = 5.0, 3.0
"""In half precision a perturbation is to move log-probs by `REACH` times the noise; a tensor is proved where it moved
them by `PROVED` times the difference of engine and trainer: it alone would have made a larger one."""
MOST = 40.0
"""All perturbations of a load together, over the noise, which stays as it is then."""
SUSPECT = 1.6
"""Differences that grew by this factor in half precision are looked into: noise grew by less."""
SMALLEST, LARGEST = 0.02, 1.28
"""Sizes of a perturbation, in root-mean-squares of a tensor: far above the grid of bfloat16; as large as the tensor."""
GROWTH = 1.5
"""A perturbation that did not suffice becomes larger by this factor at least."""
LOADS = 8
"""Perturbed loads at most, each a sampling, and a forward and two backward passes of the trainer. Float32 takes one."""
CLIP = 4.0
"""Differences count up to this many times the typical one: another expert moves a token by nats."""
PROBE_TOKENS = 16
"""Tokens sampled per probe prompt at most."""
CONTEXT = 16
"""Last tokens of a prompt that perturbed loads are probed with: every pass is paid for each token, and a weight moves
log-probs whatever stands before."""
TOKENS = 128
"""Tokens sampled per load, at least."""

CLEAR, FEW = 100.0, 3
"""In float32 so many tokens that differ by so many times the noise are explained: by the weights of an expert, to which
few tokens go, or by a router that chose another one."""
EXPLAINED, EXPLAINED_EXACT = 0.7, 0.1
"""A union explains a difference if with its old weights the trainer leaves no more than this share of it: with noise,
and without. With noise it must do so again when it is perturbed alone."""
CLEARLY = 0.5
"""The same of one end of a tied tensor where the difference is suspicious, but within the limit."""
TRIED_EXACT, TRIED = 12, 4
"""Unions that are tried as an explanation, each a forward pass: without noise and with it, where most loads of a large
model look suspicious. What stayed behind had the fourth largest z at least, in 28 layers in bfloat16."""
GLANCE, PROMISING = 4, 0.9
"""With noise, a union is tried on every fourth sequence first, and on all only if it leaves less than this share of the
difference there. What stayed behind has to leave `EXPLAINED` of it at most."""

ONE_TOKEN = 1.0
"""Nats that a single token may contribute to the cheap check: a router that flips on one token in a
hundred moves it by ten nats and says nothing about weights, which move nearly every token."""

Told = Callable[[str], object]
"""Called with what is being done."""


@dataclass(frozen=True)
class Stale:
    """A union of weights that stayed behind."""

    name: str
    gap: float
    """Median difference of engine and trainer after the perturbed load, nats."""
    left: float
    """The same, once the trainer has the old weights of this union, too."""
    z: float

    def __str__(self) -> str:
        left = f"by {self.left:.3g} with its old weights in the trainer"
        return f"{self.name} (differ by {self.gap:.3g} nats per token, {left})"


@dataclass(frozen=True)
class ZeroUpdate:
    """Engine against trainer at the same weights, before anything was learned: is log mu = log pi_old?

    Reference: the TIM harness of VeXact, arXiv:2605.14220.
    """

    tokens: int
    equal: int
    """Tokens whose two log-probs have the same bits."""
    mean: float
    """Mean |log pi_old - log mu|, nat."""
    largest: float
    """Largest |log pi_old - log mu| of a token, nat."""
    kl: float
    """Mean of (log pi_old - log mu)^2 / 2, nat per token: KL(mu || pi_old) to second order."""
    cap: float
    """Largest mean that the precision of the two explains, nat; a run above it does not begin."""

    @staticmethod
    def of(logp_rollout: Float[Tensor, " n"], logp_old: Float[Tensor, " n"], cap: float) -> ZeroUpdate:
        """Compare the two log-probs of the same tokens.

        Example:
            >>> ZeroUpdate.of(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.5]), cap=0.25).kl
            0.0625
        """
        distance = (logp_old.double() - logp_rollout.double()).abs()
        equal = int((logp_old == logp_rollout).sum())
        kl = float(distance.square().mean() / 2)
        return ZeroUpdate(len(distance), equal, float(distance.mean()), float(distance.max()), kl, cap=cap)

    def __str__(self) -> str:
        if self.equal == self.tokens:
            return f"zero-update test: engine and trainer give all {self.tokens} tokens the same bits"
        return (
            f"zero-update test: engine and trainer differ by {self.mean:.2g} nat per token (precision explains up to "
            f"{self.cap:g}), {self.largest:.2g} at most, KL {self.kl:.2g}; {self.equal} of {self.tokens} tokens have "
            "the same bits"
        )


@dataclass(frozen=True)
class SyncReport:
    """Evidence that a synchronization reaches every weight."""

    engine: str
    tokens: int
    """Tokens compared per load."""
    noise: float
    """Mean difference between engine and trainer with the same weights, nats per token."""
    cap: float
    """Largest noise that the precision of the two explains, nats per token."""
    loads: int
    """Perturbed loads."""
    gap: float
    """Largest median difference after a perturbed load, nats."""
    limit: float
    """Where that gap starts to mean that something stayed behind."""
    parts: int
    """Tensors, and experts of tensors of experts."""
    zero_update: ZeroUpdate
    """Comparison before the first perturbation, with the trainer's weights as they are."""
    read_back: bool = False
    """Every part was moved, loaded, and found in the engine to the last bit; log-probs agreed as before."""
    stale: tuple[Stale, ...] = ()
    together: Mapping[str, str] = field(default_factory=dict)
    """Parts that noise hides alone, and the smallest union that is proved and has them."""
    unverified: tuple[str, ...] = ()
    """Parts of which nothing can be said: their effect never rose above the noise, or they have none."""

    @property
    def proved(self) -> int:
        """Parts that are proved alone."""
        return self.parts - len(self.together) - len(self.unverified)

    def __str__(self) -> str:
        if self.stale:
            return f"stale: {', '.join(map(str, self.stale))}"
        sentences = [f"{self.proved} of {self.parts} tensors arrived, each proved alone"]
        if self.read_back:
            return f"every one of {self.parts} tensors was moved, loaded, and read back from the engine bit for bit"
        if self.proved == self.parts:
            sentences = [f"every one of {self.parts} tensors arrived, each proved alone"]
        unions: dict[str, list[str]] = {}
        for part, union in self.together.items():
            unions.setdefault("a tensor whose other experts more tokens choose" if "[" in part else union, []).append(
                part
            )
        sentences += [f"{len(parts)} only as a part of {union}" for union, parts in list(unions.items())[:NAMED]]
        if len(unions) > NAMED:
            rest = sum(len(parts) for parts in list(unions.values())[NAMED:])
            sentences.append(f"{rest} only as parts of {len(unions) - NAMED} further unions")
        if self.unverified:
            more = f" and {len(self.unverified) - NAMED} more" if len(self.unverified) > NAMED else ""
            sentences.append(f"noise hides, or nothing reads, {', '.join(self.unverified[:NAMED])}{more}")
        return "; ".join(sentences)


NAMED = 4
"""Unions, and unverified parts, that a report names in its sentence."""


def verify_sync(
    engine: Engine,
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    seed: int,
    again: bool = True,
    told: Told = lambda text: None,
) -> SyncReport:
    """Prove on a few probe prompts that `engine.load_weights` takes all of the trainer's weights.

    Every weight w becomes w + f rms(w) N(0, 1), f at least `SMALLEST`; engine and trainer must agree then. The
    trainer's weights are restored bit for bit and the engine gets them again, whatever happens.

    Args:
        sampling: of the run; the probe drops its filters and stop tokens, and draws `PROBE_TOKENS` at most.
        seed: of the perturbations and the samples.
        again: perturb once more, and further, what one load did not prove; else it is reported as a part of a union. An
            engine that shows its tensors is only read, then, if its precision is half and nothing looks wrong.
        told: called before each step, with what it is.

    Raises: `SyncError` naming what stayed behind, with the differences in nats.
    """
    report = examine_sync(engine, model, prompts, sampling, seed=seed, again=again, told=told)
    if report.stale:
        raise SyncError(
            f"engine {engine.name!r} keeps old weights although load_weights returned: "
            f"{'; '.join(map(str, report.stale))}; noise with equal weights {report.noise:.3g}. Do not train on these "
            "rollouts: use another engine version, or construct the engine anew from a checkpoint at every update"
        )
    return report


def examine_sync(
    engine: Engine,
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    seed: int,
    again: bool = True,
    told: Told = lambda text: None,
) -> SyncReport:
    """Do what `verify_sync` does, but report what stayed behind instead of refusing it.

    Raises: `SyncError` if the two sides differ by more than their precision explains as soon as the
        weights are loaded: then no perturbation can say more.
    """
    probe = _Probe(engine, model, prompts, sampling=sampling, seed=seed, told=told)
    version = engine.version
    with _evaluating(model):
        try:
            told("loading the weights as they are")
            rollouts, before = probe.synchronized()
            cap = precision_cap(rollouts.provenance, model)
            zero_update = ZeroUpdate.of(rollouts.logp_rollout, before, cap)
            if not zero_update.mean <= cap:  # NaN is refused, too
                groups = weight_groups(model)
                suspects = " or ".join(name for name in ("attention", "mlp") if probe.agrees_without(groups, name, cap))
                where = (
                    f"without the {suspects} weights they agree, so those are not taken as they are"
                    if suspects
                    else "no single group explains it: another model, missing weights, or raw log-probs"
                )
                raise SyncError(
                    f"engine {engine.name!r} and trainer differ by {zero_update.mean:.3g} nats per token right after "
                    f"load_weights, the cap at this precision is {cap:.3g}; {where}. Do not train on "
                    "these rollouts: use another engine version, or construct the engine anew from a "
                    "checkpoint"
                )
            # With noise, the few tokens that choose one expert prove nothing of it.
            units = Units.of(model, experts=cap == FLOAT32_CAP)
            if any(len(prompt) > CONTEXT for prompt in prompts):
                probe = replace(probe, prompts=[prompt[-CONTEXT:] for prompt in prompts])
                rollouts, before = probe.compared()
            proof = _Proof(probe, units, zero_update, rollouts, before)
            if not again and not proof.exact and (report := proof.read_back()) is not None:
                return report
            return proof.run(again=again)
        finally:
            engine.load_weights(model.named_parameters(), version=version)


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


@dataclass(frozen=True)
class _Probe:
    """Samples tokens with the engine and scores them with the trainer."""

    engine: Engine
    model: nn.Module
    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    seed: int
    told: Told = lambda text: None

    def synchronized(self) -> tuple[Rollouts, Tensor]:
        """Load the trainer's weights into the engine, then compare."""
        self.engine.load_weights(self.model.named_parameters(), version=self.engine.version)
        return self.compared()

    def compared(self, least: int = 0) -> tuple[Rollouts, Tensor]:
        """Tokens that the engine samples now, at least so many, and the trainer's log-probs of them."""
        rollouts = self.sampled(least)
        return rollouts, self.scored(rollouts)

    def sampled(self, least: int = 0) -> Rollouts:
        """Tokens that the engine samples now, at least so many: prompts are repeated."""
        tokens = min(self.sampling.max_tokens, PROBE_TOKENS)
        plain = replace(self.sampling.unfiltered, max_tokens=tokens, stop_token_ids=())
        again = max(1, math.ceil(least / (tokens * len(self.prompts))))
        return self.engine.generate([p for p in self.prompts for _ in range(again)], plain, seed=self.seed)

    @torch.no_grad()
    def scored(self, rollouts: Rollouts) -> Float[Tensor, " n"]:
        """The trainer's log-probs of these tokens, at the sampling temperature."""
        return score(self.model, rollouts, temperature=self.sampling.temperature).logp.cpu()

    def agrees_without(self, groups: dict[str, list[nn.Parameter]], name: str, cap: float) -> bool:
        """Whether the two sides agree once this group is zero, which is the same in every layout.

        Only what adds to the residual stream can be taken out: without embeddings or norms any engines agree.
        """
        with restored(groups.get(name, [])) as originals, torch.no_grad():
            for weight in groups.get(name, []):
                weight.zero_()
            rollouts, logp = self.synchronized()
            return bool(originals) and float((rollouts.logp_rollout - logp).abs().mean()) <= cap


class _Proof:
    """The perturbed loads, and what they prove."""

    def __init__(
        self, probe: _Probe, units: Units, zero_update: ZeroUpdate, rollouts: Rollouts, logp: Float[Tensor, " n"]
    ) -> None:
        """Begin with rollouts of the probe, with equal weights; the trainer's `logp` of them beside."""
        self.probe, self.units, self.rollouts = probe, units, rollouts
        d = (rollouts.logp_rollout - logp).abs()
        self.typical = max(float(d.median()), float(d.mean()) * MEDIAN_TO_MEAN, LEAST_NOISE)
        self.report = SyncReport(
            probe.engine.name,
            tokens=zero_update.tokens,
            noise=zero_update.mean,
            cap=zero_update.cap,
            loads=0,
            gap=0.0,
            limit=LIMIT_TO_NOISE * self.typical,
            parts=len(units.parts),
            zero_update=zero_update,
        )
        self.exact = zero_update.cap == FLOAT32_CAP
        self.least_z = least_z(units, ALPHA / LOADS)
        self.tensor = units.tensor_of_part()
        self.proved = torch.zeros(len(units.unions), dtype=torch.bool)
        self.noise = LEAST_NOISE
        self.originals: list[Tensor] = []

    def read_back(self) -> SyncReport | None:
        """Load once with every weight moved, read all from the engine, and compare; None if that does not settle it."""
        probe = self.probe
        if not isinstance(probe.engine, HoldsWeights):
            return None
        probe.told("moving every tensor, and reading it back from the engine")
        with restored(self.units.weights) as originals:
            self.originals = originals
            self.loaded([SMALLEST] * len(originals))
            if not arrived(probe.engine, probe.model, self.units, originals):
                return None
            rollouts, logp = probe.compared(TOKENS)
        d = (rollouts.logp_rollout - logp).abs()
        gap = float(d.median())
        if not (gap <= self.report.limit and float(d.mean()) <= self.report.cap):
            return None
        return replace(self.report, tokens=len(d), loads=1, gap=gap, read_back=True)

    def run(self, *, again: bool) -> SyncReport:
        """Load perturbed weights until every part is proved, something is stale, or `LOADS` are spent; or once each."""
        with with_gradients(self.probe.model), restored(self.units.weights) as self.originals:
            nothing = torch.zeros(len(self.originals), dtype=torch.float64)
            plan, faint, effects = self.planned(self.rollouts), nothing, nothing
            while plan and self.report.loads < LOADS:
                fractions = plan.pop(0)
                left = f"{self.report.loads + 1} of {self.report.loads + 1 + len(plan)}"
                self.probe.told(f"perturbed load {left}: {sum(f > 0 for f in fractions)} tensors")
                stale, stronger, effect = self.load(fractions)
                if stale:
                    return replace(self.report, stale=stale)
                faint, effects = faint.maximum(stronger), effects.maximum(effect)
                if again and not plan and bool(faint.any()):
                    plan = self.spread_over(faint, effects, LOADS - self.report.loads)
                    faint = effects = nothing
        return replace(self.report, **self.left_over())

    def planned(self, rollouts: Rollouts) -> list[list[float]]:
        """Sizes of each tensor's perturbation in each load: the smallest that rise clearly above the noise, together
        no more than what leaves the noise as it is."""
        count = len(self.originals)
        if self.exact:
            return [[SMALLEST] * count]
        logp, spread = self.graph(rollouts)
        self.noise = typical_size((logp.detach().cpu() - rollouts.logp_rollout) / spread)
        scales = scales_of(self.originals)
        size = effects_of(self.units, logp, spread, lambda i: scales[i], seed=self.probe.seed)
        size = self.of_tensors(size)
        fractions = (REACH * self.noise / size.clamp(min=1e-300)).clamp(SMALLEST, LARGEST)
        return self.spread_over(fractions, fractions * size, LOADS - 1)

    def spread_over(self, fractions: Float[Tensor, " t"], effect: Float[Tensor, " t"], most: int) -> list[list[float]]:
        """Loads of neighboring tensors, whose effects together leave the noise as it is; at most so many."""
        squares = effect.square().cumsum(0)
        loads = 1 if self.exact else max(1, min(most, math.ceil(float(squares[-1]) / (MOST * self.noise) ** 2)))
        home = (squares / squares[-1].clamp(min=1e-300) * loads).ceil().long().clamp(1, loads) - 1
        return [[float(f) * (int(h) == i) for f, h in zip(fractions, home, strict=True)] for i in range(loads)]

    def of_tensors(self, x: Float[Tensor, " parts"]) -> Float[Tensor, " tensors"]:
        """Root of the sum of squares over the parts of each tensor."""
        return x.new_zeros(len(self.units.counts)).index_add_(0, self.tensor, x.square()).sqrt()

    def load(self, fractions: Sequence[float]) -> tuple[tuple[Stale, ...], Tensor, Tensor]:
        """Load perturbed weights and compare: what is stale; sizes for what is to be proved still, and effects."""
        rollouts = self.moved(fractions)
        logp, spread = self.graph(rollouts)
        d = logp.detach().cpu() - rollouts.logp_rollout
        effect = effects_of(
            self.units,
            logp,
            spread,
            lambda i: moved_by(self.units, self.originals, i),
            seed=self.probe.seed + 1,
            keep=True,
        )
        gap, size, limit = float(d.abs().median()), typical_size(d / spread), self.report.limit
        if not self.exact:
            limit = max(limit, LIMIT_TO_EFFECT * float(effect.norm()))
        self.report = replace(
            self.report,
            tokens=len(d),
            loads=self.report.loads + 1,
            gap=max(gap, self.report.gap),
            limit=max(limit, self.report.limit),
        )
        few = int((d.abs() > CLEAR * self.typical).sum()) >= FEW
        if not gap <= limit or (few if self.exact else not size <= SUSPECT * self.noise):
            z = evidence_of(self.units, self.originals, logp, clipped(d / spread), spread)
            if stale := self.explained(rollouts, d, z):
                return stale, effect, effect
            share = EXPLAINED_EXACT if self.exact else EXPLAINED if gap > limit else CLEARLY
            if (end := self.tied_apart(rollouts, d, gap, share)) is not None:
                return (end,), effect, effect
            if not gap <= limit:
                unknown = Stale("something that no tensor, layer or group explains", gap, gap, float(z.max()))
                return (unknown,), effect, effect
        self.proved |= self.shows(effect, size)
        return (), *self.stronger(fractions, effect, size)

    def moved(self, fractions: Sequence[float]) -> Rollouts:
        """Perturb, load, and sample."""
        self.loaded(fractions)
        return self.probe.sampled(TOKENS)

    def loaded(self, fractions: Sequence[float]) -> None:
        """Perturb, and load."""
        probe = self.probe
        perturb(self.units.weights, self.originals, fractions, seed=probe.seed + self.report.loads)
        probe.engine.load_weights(probe.model.named_parameters(), version=probe.engine.version)

    def graph(self, rollouts: Rollouts) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """The trainer's log-probs of these tokens with their graph, and their spread."""
        scored = score(self.probe.model, rollouts, temperature=self.probe.sampling.temperature)
        return scored.logp, spread_of(scored.logp, scored.sum_pi_squared)

    def explained(self, rollouts: Rollouts, d: Float[Tensor, " n"], z: Float[Tensor, " unions"]) -> tuple[Stale, ...]:
        """Unions that stayed behind, the one that explains most first; none if none is proved to."""
        clear = d.abs() > (CLEAR * self.typical if self.exact else 0.0)
        before, stale = float(d.abs()[clear].median()), []
        for _ in range(NAMED):
            best, left = self.best_explanation(rollouts, d, z, clear)
            largest = float(z.max())
            if not largest > self.least_z:
                enough = left <= (EXPLAINED_EXACT if self.exact else EXPLAINED) * before
                if stale or not enough or not (self.exact or self.alone(best)):
                    break
            stale.append(Stale(self.units.unions[best], before, left, float(z[best])))
            put_back(self.units, self.originals, best)
            logp, spread = self.graph(rollouts)
            d = logp.detach().cpu() - rollouts.logp_rollout
            z = evidence_of(self.units, self.originals, logp, clipped(d / spread), spread)
            before = left
        return tuple(stale)

    def best_explanation(
        self, rollouts: Rollouts, d: Float[Tensor, " n"], z: Float[Tensor, " unions"], clear: Bool[Tensor, " n"]
    ) -> tuple[int, float]:
        """Find the group of tensors whose old weights leave the smallest difference. Tries the groups with the largest
        z. Returns its index and that difference.
        """
        before = float(d.abs()[clear].median())
        best = (math.inf, int(z.argmax()))
        for union in z.argsort(descending=True)[: TRIED_EXACT if self.exact else TRIED].tolist():
            if not z[union] > 0:
                break
            moved = put_back(self.units, self.originals, union)
            left = self.left(rollouts, d, clear)
            best = min(best, (left, union))
            put(self.units, moved)
            if self.exact and left <= EXPLAINED_EXACT * before:
                break
        return best[1], best[0]

    def left(self, rollouts: Rollouts, d: Float[Tensor, " n"], clear: Bool[Tensor, " n"]) -> float:
        """Median of what the trainer's weights as they are now leave of the `clear` tokens' difference `d`, nats.

        With noise, all of it where that is no explanation in every `GLANCE`-th sequence.
        """
        if not self.exact:
            some = torch.arange(0, rollouts.num_sequences, GLANCE)
            rows, part = rollouts.segments.rows(some), rollouts.select(some)
            left = (self.probe.scored(part) - part.logp_rollout).abs()[clear[rows]].median()
            if not left < PROMISING * d[rows][clear[rows]].abs().median():
                return float(d[clear].abs().median())
        return float((self.probe.scored(rollouts) - rollouts.logp_rollout).abs()[clear].median())

    def tied_apart(self, rollouts: Rollouts, d: Float[Tensor, " n"], gap: float, share: float) -> Stale | None:
        """A tensor that is embedding and head at once, of which the engine's head, or its embedding, stayed behind:
        with its old weights at that end the trainer leaves no more than this share of the difference."""
        model = self.probe.model
        at, ends = tied_ends(model, self.units)
        for end in ends:
            with untied(end, self.originals[at]):
                left = self.left(rollouts, d, torch.ones_like(d, dtype=torch.bool))
            if left <= share * gap:
                name = next(name for name, weight in model.named_parameters() if weight is self.units.weights[at])
                return Stale(name, gap, left, math.nan)
        return None

    def alone(self, union: int) -> bool:
        """Whether a union still explains most of the difference when nothing else is perturbed."""
        moved = torch.zeros(len(self.originals), dtype=torch.bool)
        moved[self.tensor[self.units.parts_of(union)]] = True
        now = [torch.linalg.vector_norm(moved_by(self.units, self.originals, i)) for i in range(len(self.originals))]
        size = [float(x / o.float().norm().clamp(min=1e-300)) for x, o in zip(now, self.originals, strict=True)]
        rollouts = self.moved([min(LARGEST, f) * bool(m) for f, m in zip(size, moved, strict=True)])
        d = (self.probe.scored(rollouts) - rollouts.logp_rollout).abs()
        put_back(self.units, self.originals, union)
        left = (self.probe.scored(rollouts) - rollouts.logp_rollout).abs()
        before = float(d.median())
        return before > SUSPECT * self.typical and float(left.median()) <= EXPLAINED * before

    def open(self) -> Bool[Tensor, " parts"]:
        """Parts that are not proved alone."""
        return ~self.proved[: len(self.units.parts)]

    def shows(self, effect: Float[Tensor, " parts"], size: float) -> Bool[Tensor, " unions"]:
        """Unions that can't have stayed behind in this load: they alone would have made more than the difference."""
        wanted = torch.full((len(self.units.parts),), PROVED * size, dtype=torch.float64)
        # An expert moves the tokens that it is chosen for: at least `FEW` of them have to be there.
        whole = self.of_tensors(effect)[self.tensor]
        share = torch.where(whole > 0, (effect / whole).square(), 0.0) * self.report.tokens
        several = torch.tensor(self.units.counts)[self.tensor] > 1
        wanted[several] = CLEAR * self.typical
        wanted[several & (share < 2 * FEW)] = torch.inf
        unions = self.units.whole & (self.units.summed(effect.square()).sqrt() >= PROVED * size)
        unions[: len(effect)] = effect >= wanted
        # A union of which a part did not move is not shown by the others.
        return unions & (self.units.summed((effect == 0).double()) == 0)

    def stronger(
        self, fractions: Sequence[float], effect: Float[Tensor, " parts"], size: float
    ) -> tuple[Tensor, Tensor]:
        """Sizes for the tensors that moved and are not proved, and their effects; 0 for all others."""
        now = torch.tensor(fractions, dtype=torch.float64)
        faint = effect < (CLEAR * self.typical if self.exact else math.inf)  # else more of it shows no more
        left = (self.open() & (effect > 0) & faint).double()
        left = torch.zeros_like(now).index_add_(0, self.tensor, left).clamp(max=1) * (now < LARGEST)
        have = self.of_tensors(effect).double()
        growth = (REACH * size / have.clamp(min=1e-300)).clamp(min=GROWTH).minimum(LARGEST / now.clamp(min=1e-300))
        return now * growth * left, have * growth * left

    def left_over(self) -> dict[str, object]:
        """Parts that are not proved alone: with the smallest union that is, or unverified."""
        units, together, unverified = self.units, {}, []
        homes: dict[int, int] = {}
        for union in reversed(self.proved.nonzero().flatten().tolist()):  # unions go from small to large
            for part in units.parts_of(union).tolist():
                homes[part] = union
        for part in self.open().nonzero().flatten().tolist():
            if part in homes:
                together[units.parts[part]] = units.unions[homes[part]]
            else:
                unverified.append(units.parts[part])
        return {"together": together, "unverified": tuple(unverified)}


def typical_size(d: Float[Tensor, " n"]) -> float:
    """Standard deviation of a normal variable with the median of |d|, and a share of its mean at least."""
    d = d.abs().double()
    return max(float(d.median()) / 0.6745, float(d.mean()) * MEDIAN_TO_MEAN, LEAST_NOISE)


def clipped(d: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Numbers beyond `CLIP` times the typical one, at that."""
    most = CLIP * float(d.abs().median())
    return d.clamp(-most, most)


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
