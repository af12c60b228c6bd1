"""`LogProbs`: the log-probs of one batch under up to three policies; validates and packs user input.

Rollout policy mu, old policy pi_old, current policy pi; see `ratios` for what is computed between
them. `LogProbs.pack` packs padded input, drops masked tokens, refuses values that no policy can produce
(by field and sequence), and remembers the caller's shape. In what it returns every number is finite and
every token counts, so the rest of the library needs no masks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from offdrift.errors import BadValueError, EvidenceError, ShapeError
from offdrift.numerics import cached, check_tensor, concrete
from offdrift.segments import Segments

FLOORS = {"logp_rollout": -1e4, "logp_old": -2e4, "logp": -3e4, "logp_ref": -4e4}
"""What log 0 becomes when it is packed, in nats. The floors differ so that two policies that both call a sampled token
impossible never look as if they agreed: the log-ratio stays far outside every trust region."""

UNSCORED_BELOW = -1000.0
"""Nats. A rollout log-prob at or below this says that the engine did not score the token: no engine
draws a token of that probability, and -9999 and -inf are what engines write where they have none."""
LOG = logging.getLogger("offdrift.logprobs")
UNSCORED_WORDS = (
    "logp_rollout holds %g: tokens at %g nats or less are taken as not scored by the engine. They never train, stay in "
    "the normalizer, and are counted in batch/unscored_tokens; have the engine return a log-prob for every token"
)
_warned: set[str] = set()
"""What this process has warned of."""

POSITIVE_SLACK = 1e-3
"""Nats by which a log-prob may exceed 0 through rounding before it is refused."""
_SLACKS = {dtype: torch.tensor(POSITIVE_SLACK, dtype=dtype).item() for dtype in (torch.float32, torch.float64)}
"""The same as each dtype holds it: as a number of Python, float32's .001 is larger than .001."""


@dataclass(frozen=True)
class LogProbs:
    """Clean, packed log-probs of the sampled tokens: `n` trainable tokens in `b` sequences.

    Make one with `LogProbs.pack`; the constructor checks nothing.
    """

    logp_rollout: Float[Tensor, " n"]
    """log mu: what the engine says it sampled from. No gradient."""
    segments: Segments
    logp: Float[Tensor, " n"] | None = None
    """log pi: the policy being trained; the only one with gradient."""
    logp_old: Float[Tensor, " n"] | None = None
    """log pi_old: the training engine at the weights that sampled. No gradient."""
    logp_ref: Float[Tensor, " n"] | None = None
    """log pi_ref: the frozen model that a KL penalty pulls towards. No gradient."""
    kept: Int[Tensor, " n"] | None = None
    """Flat positions of these tokens in the caller's tensor; None means all of them."""
    shape: tuple[int, ...] | None = None
    """The shape the caller's token tensors had."""
    unscored: Bool[Tensor, " n"] | None = None
    """Tokens whose rollout log-prob is at most `UNSCORED_BELOW`; None where there is none.

    Such a token is drawn data without a ratio: every log-ratio of it is 0, it never trains, and no
    statistic, gate or weight looks at it. It stays in the loss's normalizer, and is counted."""
    unread: Mapping[str, Int[Tensor, ""]] | None = None
    """How many values of a field are no log-probs, counted on the device and not read yet (`with_current`); None where
    everything was read when it was packed."""

    @staticmethod
    def pack(
        logp_rollout: Float[Tensor, ...],
        logp: Float[Tensor, ...] | None = None,
        logp_old: Float[Tensor, ...] | None = None,
        *,
        logp_ref: Float[Tensor, ...] | None = None,
        mask: Shaped[Tensor, ...] | None = None,
        segments: Segments | None = None,
        group_ids: Int[Tensor, " b"] | None = None,
    ) -> LogProbs:
        """Take log-probs in, either padded `[b, time]` with `mask`, or packed `[n]` with `segments`.

        Args:
            logp_rollout: log mu of the sampled tokens, nats.
            logp: log pi; receives the gradient.
            logp_old: log pi_old.
            logp_ref: log pi_ref, for methods that penalize the KL to it.
            mask: nonzero where a token may train. Padded input needs it (all-ones is fine); packed
                input may have it. Masked positions may hold anything, NaN included.
            segments: where sequences begin and end, for packed input.
            group_ids: prompt group of each sequence, any integers; those of `segments` unless given.

        Fields of several dtypes become the widest of them, at least float32. Where no token may
        train, all masked or in responses without one, every loss is 0, with a graph to `logp`.

        Raises:
            ShapeError: fields of different shapes, padded and packed arguments mixed, or groups or
                cuts of another batch.
            BadValueError: NaN, +inf or a positive log-prob on a trainable token, NaN in the mask, no
                sequence at all (there is nothing to average over: the batch was cut wrongly), groups
                that contradict those of `segments`, or what is no tensor.
                -inf is legal. In `logp_rollout`, like anything down to it from `UNSCORED_BELOW`, it
                marks a token that the engine did not score (see `unscored`), which is logged as a
                warning once in a process; in the other fields it becomes a finite floor, and the
                ratio 0 or a violation.

        Example:
            >>> lp = LogProbs.pack(torch.tensor([[-1.0, -2.0, float("nan")]]), mask=torch.tensor([[1, 1, 0]]))
            >>> lp.logp_rollout, lp.unpack(torch.tensor([5.0, 6.0]))
            (tensor([-1., -2.]), tensor([[5., 6., 0.]]))
        """
        optional = {"logp": logp, "logp_old": logp_old, "logp_ref": logp_ref}
        fields = {"logp_rollout": logp_rollout}
        fields |= {name: x for name, x in optional.items() if x is not None}
        for name, x in fields.items():
            check_tensor(name, x)
        _check_shapes(fields, mask, segments)
        if segments is not None and segments.cu_seqlens.device != logp_rollout.device:  # lengths counted on the host
            segments = segments.to(logp_rollout.device)
        if mask is not None:
            kept = mask.reshape(-1).nonzero().squeeze(-1)
            fields = {name: x.reshape(-1).index_select(0, kept) for name, x in fields.items()}
            segments = _cut(mask, kept, segments)
        else:
            kept = None
        assert segments is not None
        if group_ids is not None:
            segments = segments.with_groups(group_ids)
        clean, unscored = _refuse_bad_values(fields, segments)
        packed = LogProbs(
            clean["logp_rollout"].detach(),
            segments,
            clean.get("logp"),
            None if logp_old is None else clean["logp_old"].detach(),
            None if logp_ref is None else clean["logp_ref"].detach(),
            kept,
            tuple(logp_rollout.shape),
            unscored,
        )
        if logp is None:
            for cut in (packed.segments, packed.scored.segments):
                cut.check()  # now, so that nothing has to wait for the cuts after `with_current`
        return packed

    def with_current(self, logp: Float[Tensor, ...]) -> LogProbs:
        """The batch under the policy being trained, without waiting for its forward pass.

        `pack` looks at every number before it returns, for which the host waits until an accelerator has computed it.
        A step that packs what is on record first, and adds `logp` as it comes, waits once, when the step's statistics
        are read: the host keeps ahead of the device.

            batches = [LogProbs.pack(rollout, logp_old=old, segments=s) for rollout, old, s in pieces]
            for batch in batches:
                out = policy_loss(batch.with_current(model_logp(...)), method, advantages)
                out.loss.backward()
                ...
            metrics = summarize(DriftStats.merge_all(stats))   # raises if a log-prob or advantage was none
            optimizer.step()

        What is no log-prob (NaN, or above 0) is counted on the device, and so are advantages (and other inputs of
        `policy_loss`) that are not finite; reading the statistics raises, so read them before the optimizer's step.
        -inf becomes the floor, as in `pack`.

        Args:
            logp: log pi, in the shape that `pack` was given; receives the gradient.

        Raises: `ShapeError`; `BadValueError` if it is no tensor or elsewhere.

        Example:
            >>> lp = LogProbs.pack(torch.tensor([-1.0, -2.0]), segments=Segments.from_lengths([2]))
            >>> lp.with_current(torch.tensor([-1.5, -2.5])).logp
            tensor([-1.5000, -2.5000])
        """
        logp = self.like_caller(logp)
        if logp.device != self.logp_rollout.device:
            raise BadValueError(f"logp is on {logp.device}, the batch on {self.logp_rollout.device}; move it there")
        widest = torch.promote_types(self.logp_rollout.dtype, logp.dtype)
        bad = (~(logp.detach() <= POSITIVE_SLACK)).count_nonzero()
        new = replace(
            self,
            logp_rollout=self.logp_rollout.to(widest),
            logp=logp.to(widest).clamp(min=FLOORS["logp"]),
            logp_old=None if self.logp_old is None else self.logp_old.to(widest),
            logp_ref=None if self.logp_ref is None else self.logp_ref.to(widest),
            unread={"logp": bad},
        )
        if self.unscored is not None:  # which rows they are was asked of the device before
            new.__dict__["scored_rows"], segments = self.scored_rows, self.scored.segments
            new.__dict__["_narrowed"] = replace(new.scored, segments=segments)
        return new

    @cached
    def scored_rows(self) -> Int[Tensor, " s"] | None:
        """Positions of the tokens that the engine scored; None where it scored all of them."""
        return None if self.unscored is None else (~self.unscored).nonzero().squeeze(-1)

    @property
    def scored(self) -> LogProbs:
        """The batch without tokens that the rollout engine did not score; the batch itself if all are scored.

        What gates, weights, objectives and statistics look at. Sequences keep their number and
        order; one without a scored token is empty. Gradient: to `logp`.

        Example:
            >>> lp = LogProbs.pack(torch.tensor([-1.0, -9999.0]), segments=Segments.from_lengths([2]))
            >>> lp.unscored, lp.scored.logp_rollout
            (tensor([False,  True]), tensor([-1.]))
        """
        # Itself is not kept: a batch that refers to itself keeps its tensors until Python looks for such circles.
        return self if self.unscored is None else self._narrowed

    @cached
    def _narrowed(self) -> LogProbs:
        """`scored` where there are unscored tokens."""
        rows = self.scored_rows
        logp, logp_old, logp_ref = (
            None if x is None else self.select_scored(x) for x in (self.logp, self.logp_old, self.logp_ref)
        )
        kept = rows if self.kept is None else self.select_scored(self.kept)
        rollout, segments = self.select_scored(self.logp_rollout), self.segments.narrowed(rows)
        return LogProbs(rollout, segments, logp, logp_old, logp_ref, kept, self.shape)

    @cached
    def detached_log_ratios(self) -> dict[str, Float[Tensor, " n"]]:
        """Log-ratios without gradient that were computed before (see `ratios.stopped_log_ratio`)."""
        return {}

    @cached
    def sweeps(self) -> dict[str, Any]:
        """Ratios with their sums that compiled passes gave before (see `ratios.swept`)."""
        return {}

    def select_scored(self, x: Shaped[Tensor, n * rest]) -> Shaped[Tensor, s * rest]:
        """A per-token tensor of this batch at the tokens that the engine scored."""
        rows = self.scored_rows
        return x if rows is None else x.index_select(0, rows)

    def scatter_to_all(self, x: Shaped[Tensor, " s"], *, fill: float = 0.0) -> Shaped[Tensor, " n"]:
        """Scatter values of the scored tokens back to all tokens; `fill` at tokens without a rollout log-prob.

        Gradient: to `x`.
        """
        rows = self.scored_rows
        return x if rows is None else x.new_full((len(self.logp_rollout),), fill).index_put((rows,), x)

    @property
    def current(self) -> Float[Tensor, " n"]:
        """`logp`, or `EvidenceError` if the batch has none."""
        return self._required("logp", "run the current policy's forward pass and give logp=")

    @property
    def old(self) -> Float[Tensor, " n"]:
        """`logp_old`, or `EvidenceError` if the batch has none."""
        return self._required(
            "logp_old",
            "score the tokens with the training engine before the first update, or choose a method "
            'on="full", which compares the current policy with the rollout policy directly',
        )

    @property
    def reference(self) -> Float[Tensor, " n"]:
        """`logp_ref`, or `EvidenceError` if the batch has none."""
        return self._required("logp_ref", "score the tokens with the frozen reference model and give logp_ref=")

    def like_caller(self, x: Shaped[Tensor, ...]) -> Shaped[Tensor, " n"]:
        """Any other per-token tensor of the caller (advantages, ...), packed the same way."""
        check_tensor("what is packed like the log-probs", x)
        if self.shape is not None and tuple(x.shape) != self.shape:
            raise ShapeError(f"expected the log-probs' shape {self.shape}, got {tuple(x.shape)}")
        flat = x.reshape(-1)
        return flat if self.kept is None else flat.index_select(0, self.kept)

    def unpack(self, x: Shaped[Tensor, " n"], *, fill: float = 0.0) -> Shaped[Tensor, ...]:
        """Give a per-token result the caller's shape back; `fill` where tokens were masked."""
        if self.kept is None or self.shape is None:
            return x
        flat = x.new_full((torch.Size(self.shape).numel(),), fill)
        return flat.index_put((self.kept,), x).reshape(self.shape)

    def _required(self, name: str, way_out: str) -> Tensor:
        value = getattr(self, name)
        if value is None:
            raise EvidenceError(f"this method needs {name}, which the batch does not have; {way_out}")
        return value


def _check_shapes(given: dict[str, Tensor], mask: Tensor | None, segments: Segments | None) -> None:
    shape = given["logp_rollout"].shape
    if mask is not None:
        check_tensor("mask", mask)
    for name, x in {**given, **({} if mask is None else {"mask": mask})}.items():
        if x.shape != shape:
            raise ShapeError(
                f"{name} has shape {tuple(x.shape)}, logp_rollout has {tuple(shape)}; "
                "all fields must describe the same tokens"
            )
    if (len(shape) == 2) == (segments is not None) or len(shape) not in (1, 2):
        raise ShapeError(
            f"logp_rollout has shape {tuple(shape)}: give padded [sequences, time] with mask=, or "
            "packed [tokens] with segments="
        )
    if len(shape) == 2 and mask is None:
        raise ShapeError("padded input needs mask= (nonzero where a token may train)")
    device = given["logp_rollout"].device
    for name, x in {**given, **({} if mask is None else {"mask": mask})}.items():
        if x.device != device:
            raise BadValueError(f"{name} is on {x.device}, logp_rollout on {device}; move them to one device")
    if mask is not None and mask.is_floating_point() and bool(mask.isnan().any()):
        raise BadValueError(f"mask is nan at {int(mask.isnan().sum())} positions; give 0 where a token may not train")
    if segments is None:
        sequences = shape[0]
    elif isinstance(segments, Segments):
        segments.check()
        sequences = len(segments)
        if segments.num_tokens != shape[0]:
            raise ShapeError(
                f"logp_rollout has {shape[0]} tokens, cu_seqlens ends at {segments.num_tokens}; "
                "both must come from the same packing"
            )
    else:
        raise BadValueError(
            f"segments is a {type(segments).__name__}; give `Segments.from_lengths(tokens of each sequence)`"
        )
    if not sequences:
        raise BadValueError("empty batch: 0 sequences; skip this batch, or check how it was cut")


def _cut(mask: Tensor, kept: Tensor, segments: Segments | None) -> Segments:
    """The segments of the tokens that the mask keeps, at the flat positions `kept`, ascending."""
    if segments is not None:
        return segments.narrowed(kept)
    starts = torch.arange(len(mask) + 1, device=kept.device) * mask.shape[1]
    return Segments(torch.searchsorted(kept, starts))


def _refuse_bad_values(
    given: dict[str, Tensor], segments: Segments
) -> tuple[dict[str, Tensor], Bool[Tensor, " n"] | None]:
    """The fields, finite, and which tokens the engine did not score."""
    widest = reduce(torch.promote_types, (x.dtype for x in given.values()), torch.float32)
    upcast = {name: x.to(widest) for name, x in given.items()}
    if given["logp_rollout"].numel() == 0:
        return upcast, None
    # One pass and one transfer for all fields; NaN spreads to both extremes and fails every `<=`.
    extremes = torch.stack([x for f in upcast.values() for x in concrete(f).aminmax()]).tolist()
    if not all(high <= _SLACKS[widest] for high in extremes[1::2]):
        bad = torch.stack([~(x.detach() <= POSITIVE_SLACK) for x in upcast.values()])
        _raise_bad_value(bad, upcast, segments)
    lowest = dict(zip(upcast, extremes[::2], strict=True))
    unscored = None
    if lowest["logp_rollout"] <= UNSCORED_BELOW:
        if not _warned:
            _warned.add("unscored")
            LOG.warning(UNSCORED_WORDS, lowest["logp_rollout"], UNSCORED_BELOW)
        unscored = upcast["logp_rollout"].detach() <= UNSCORED_BELOW
        # The floor, and not what stood there: packed or recorded again, the token is as unscored.
        upcast["logp_rollout"] = upcast["logp_rollout"].masked_fill(unscored, FLOORS["logp_rollout"])
    clean = {name: x if lowest[name] >= FLOORS[name] else x.clamp(min=FLOORS[name]) for name, x in upcast.items()}
    return clean, unscored


def _raise_bad_value(bad: Bool[Tensor, "fields n"], upcast: dict[str, Tensor], segments: Segments) -> None:
    if (whole := concrete(bad)).shape != bad.shape:
        name = next(n for n, x in zip(upcast, whole.movedim(-2, 0), strict=True) if x.any())
        raise BadValueError(f"{name} holds numbers that are not log-probs, in batches that torch.func maps over")
    row = int(bad.any(1).nonzero()[0])
    token = int(bad[row].nonzero()[0])
    sequence = int(segments.seq_ids[token])
    name = list(upcast)[row]
    start = int(segments.cu_seqlens[sequence])
    raise BadValueError(
        f"{name} of sequence {sequence} is {upcast[name][token].item()} at trainable token "
        f"{token - start} ({int(bad[row].sum())} bad values in this field); a log-prob is a number "
        "<= 0. Mask the token, drop the sequence, or find out why the engine returned it"
    )
