"""Runs with a planted cause, drawn exactly from explicit token distributions.

Every token has a context of its own: a random distribution mu over a small vocabulary. A plant says
what the training policy thinks there, what each side records, and how that goes over the steps.
Tokens are drawn from mu itself (or from what the plant's engine samples from), so that the
signatures are those of real sampling: E_mu[pi/mu] = 1 wherever both log-probs are honest, and not
where one is filtered, tempered or misplaced.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offdrift.records.batch import Logged
from offdrift.segments import Segments

VOCAB = 32
SPREAD = 2.5
"""Standard deviation of the logits: entropies of about 1 nat, as of a model that knows its task."""
ROUNDING = 1e-6
"""What float32 on both sides leaves."""
NOISE = 0.02
"""What bfloat16 leaves on the logits of a healthy engine: KL of about 1e-4 nat."""


@dataclass(frozen=True)
class Draw:
    """What is known of the tokens of one step; `current` is the policy before the update."""

    tokens: Tensor
    rollout: Tensor
    current: Tensor
    old: Tensor | None = None
    lag: Tensor | None = None
    """Updates since the weights that drew each token; None where no versions are recorded."""


@dataclass(frozen=True)
class Stage:
    """Where a plant acts: one step of a run."""

    g: torch.Generator
    step: int
    steps: int
    segments: Segments

    @property
    def n(self) -> int:
        return int(self.segments.cu_seqlens[-1])

    @property
    def progress(self) -> float:
        """From 0 at the first step to 1 at the last."""
        return (self.step - 1) / max(1, self.steps - 1)

    def contexts(self) -> Tensor:
        """Log-probs of the model at temperature 1 at every token, [n, V]."""
        return (SPREAD * torch.randn(self.n, VOCAB, generator=self.g, dtype=torch.float64)).log_softmax(1)  # fmt: skip

    def moved(self, logits: Tensor, size: float | Tensor) -> Tensor:
        """The policy with Gaussian noise of that size on its logits."""
        scale = torch.as_tensor(size, dtype=torch.float64).expand(self.n)[:, None]
        noise = torch.randn(logits.shape, generator=self.g, dtype=torch.float64)
        return (logits + scale * noise).log_softmax(1)

    def draw(self, log_mu: Tensor) -> Tensor:
        return torch.multinomial(log_mu.exp(), 1, generator=self.g).squeeze(1)

    def at_lag(self, lag: int) -> Tensor:
        return torch.full((self.n,), lag)

    def honest(self, log_mu: Tensor, log_pi: Tensor, *, lag: int | None = 0) -> Draw:
        """Both sides record the log-probs of their own distributions."""
        tokens = self.draw(log_mu)
        current = picked(log_pi, tokens)
        return Draw(tokens, picked(log_mu, tokens), current, current, None if lag is None else self.at_lag(lag))  # fmt: skip


def picked(logp: Tensor, tokens: Tensor) -> Tensor:
    return logp.gather(1, tokens[:, None]).squeeze(1)


Plant = Callable[[Stage], Draw]


def noise(size: float) -> Plant:
    """Arithmetic that differs: symmetric noise on the logits, the same at every step."""

    def plant(s: Stage) -> Draw:
        mu = s.contexts()
        return s.honest(mu, s.moved(mu, size))

    return plant


def raw_logprobs(temperature: float, *, side: str = "rollout") -> Plant:
    """Tokens are drawn at a temperature; one side records log-probs before it."""

    def plant(s: Stage) -> Draw:
        z = s.contexts()
        mu = (z / temperature).log_softmax(1)
        tokens = s.draw(mu)
        raw = picked(s.moved(z, NOISE), tokens)
        tempered = picked(s.moved(mu, NOISE), tokens)
        rollout, current = (raw, tempered) if side == "rollout" else (tempered, raw)
        return Draw(tokens, rollout, current, current, s.at_lag(0))

    return plant


def one_sided_filter(top_p: float) -> Plant:
    """The engine draws from the renormalized nucleus; the trainer scores the whole distribution."""

    def plant(s: Stage) -> Draw:
        z = s.contexts()
        ordered, order = z.exp().sort(1, descending=True)
        inside = ordered.cumsum(1) - ordered < top_p
        kept = torch.zeros_like(inside).scatter(1, order, inside)
        mu = z.where(kept, -math.inf).log_softmax(1)
        return s.honest(mu, s.moved(z, NOISE))

    return plant


def misaligned(s: Stage) -> Draw:
    """The rollout's log-probs stand one token too late; the first of a response is repeated."""
    mu = s.contexts()
    draw = s.honest(mu, s.moved(mu, NOISE))
    first = s.segments.cu_seqlens[:-1]
    late = draw.rollout.roll(1)
    late[first] = draw.rollout[first]
    return replace(draw, rollout=late)


def router_flips(share: float) -> Plant:
    """A few tokens take other experts and see an unrelated distribution."""

    def plant(s: Stage) -> Draw:
        mu = s.contexts()
        flipped = torch.rand(s.n, generator=s.g) < share
        pi = s.contexts().where(flipped[:, None], s.moved(mu, NOISE))
        return s.honest(mu, pi)

    return plant


def wrong_weights(last: float) -> Plant:
    """The engine keeps its first weights while its version advances: drift grows at lag 0."""

    def plant(s: Stage) -> Draw:
        mu = s.contexts()
        return s.honest(mu, s.moved(mu, NOISE + last * s.progress))

    return plant


def stale_engine(per_update: float, sync_every: int = 8) -> Plant:
    """The engine takes new weights every few updates; versions are recorded."""

    def plant(s: Stage) -> Draw:
        mu, lag = s.contexts(), (s.step - 1) % sync_every
        return s.honest(mu, s.moved(mu, NOISE + per_update * lag), lag=lag)

    return plant


def rising_tokens(share: float, before: float, after: float) -> Plant:
    """The policy took to a rare token at some contexts: E_mu[(pi/mu)^2] is large, KL is not."""

    def plant(s: Stage) -> Draw:
        rest = s.contexts().exp()
        rare = torch.nn.functional.one_hot(rest.argmin(1), VOCAB)
        rises = (torch.rand(s.n, generator=s.g) < share)[:, None]

        def mixed(p: float) -> Tensor:
            return ((1 - p) * rest + p * rare).where(rises, rest).log()

        draw = s.honest(mixed(before), s.moved(mixed(before), NOISE), lag=None)
        return replace(draw, current=picked(s.moved(mixed(after), NOISE), draw.tokens))

    return plant


def clip_saturation(last: float) -> Plant:
    """Reuse of a batch: the current policy leaves the old one further at every step of the run."""

    def plant(s: Stage) -> Draw:
        mu = s.contexts()
        old = s.moved(mu, NOISE)
        draw = s.honest(mu, old)
        current = picked(s.moved(old, 0.02 + last * s.progress), draw.tokens)
        return replace(draw, current=current)

    return plant


def amplification(size: float) -> Plant:
    """A learning rate too high: every update moves the policy further, and responses grow."""

    def plant(s: Stage) -> Draw:
        mu = s.contexts()
        old = s.moved(mu, NOISE)
        draw = s.honest(mu, old)
        moved = s.moved(old, 0.03 + size * s.progress)
        return replace(draw, current=picked(moved, draw.tokens))

    return plant


@dataclass(frozen=True)
class Case:
    """One planted run: its cause, None for a clean one, and how it is made."""

    name: str
    cause: str | None
    plant: Plant
    steps: int = 30
    growth: float = 0.0
    """How much longer responses are at the end of the run, as a share of their length."""
    mixture_of_experts: bool = False


CASES = (
    Case("float32", None, noise(ROUNDING)),
    Case("bfloat16", None, noise(NOISE)),
    Case("bfloat16, growing 10 %", None, noise(NOISE), steps=40, growth=0.1),
    Case("experts without flips", None, noise(NOISE), mixture_of_experts=True),
    Case("lag without drift", None, stale_engine(0.002)),
    Case("noise 0.35", "precision", noise(0.35)),
    Case("noise 0.5", "unexplained", noise(0.5)),
    Case("noise 0.7", "unexplained", noise(0.7)),
    Case("temperature 0.7, engine raw", "raw_logprobs", raw_logprobs(0.7)),
    Case("temperature 0.7, trainer raw", "raw_logprobs", raw_logprobs(0.7, side="trainer")),
    Case("temperature 1.3, engine raw", "raw_logprobs", raw_logprobs(1.3)),
    Case("top-p 0.9", "one_sided_filter", one_sided_filter(0.9)),
    Case("top-p 0.7", "one_sided_filter", one_sided_filter(0.7)),
    Case("off by one", "misaligned", misaligned),
    Case("flips at 0.3 %", "router_flips", router_flips(0.003), mixture_of_experts=True),
    Case("flips at 1 %", "router_flips", router_flips(0.01), mixture_of_experts=True),
    Case("stuck weights, slow", "wrong_weights", wrong_weights(0.5)),
    Case("stuck weights, fast", "wrong_weights", wrong_weights(1.0)),
    Case("8 updates behind, slow", "stale_engine", stale_engine(0.05)),
    Case("8 updates behind, fast", "stale_engine", stale_engine(0.1)),
    Case("rare tokens rise", "token_drift", rising_tokens(0.5, 0.01, 0.115)),
    Case("rare tokens rise far", "weight_variance", rising_tokens(0.4, 0.004, 0.12)),
    Case("reuse of batches", "clip_saturation", clip_saturation(0.5)),
    Case("learning rate", "optimizer_amplification", amplification(0.22), steps=40, growth=0.4),
    Case("learning rate, clip saturated", "optimizer_amplification", amplification(0.4), steps=40, growth=0.4),
)  # fmt: skip


def run(case: Case, *, seed: int, sequences: int = 48, length: int = 40) -> Iterator[Logged]:
    """The batches of a planted run, one per step."""
    g = torch.Generator().manual_seed(seed)
    for step in range(1, case.steps + 1):
        grown = 1 + case.growth * (step - 1) / max(1, case.steps - 1)
        lengths = (grown * length * (0.5 + torch.rand(sequences, generator=g))).round().long()
        cuts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        groups = torch.arange(sequences) // 8
        segments = Segments(cuts, group_ids=groups)
        draw = case.plant(Stage(g, step, case.steps, segments))
        yield _logged(draw, segments, step, torch.randint(2, (sequences,), generator=g).float())


def _logged(draw: Draw, segments: Segments, step: int, rewards: Tensor) -> Logged:
    b = len(rewards)
    baseline = segments.groups.spread(segments.groups.mean(rewards))
    return Logged(
        cu_seqlens=segments.cu_seqlens,
        step=torch.full((b,), step),
        row=torch.arange(1, b + 1),
        response_lengths=segments.lengths,
        logp_rollout=draw.rollout.float(),
        logp_old=None if draw.old is None else draw.old.float(),
        logp=draw.current.float(),
        advantages=segments.spread(rewards - baseline),
        rewards=rewards,
        group_ids=segments.group_ids,
        rollout_version=None if draw.lag is None else step - 1 - draw.lag,
        version=None if draw.lag is None else torch.full((b,), step - 1),
        tokens=draw.tokens,
    )
