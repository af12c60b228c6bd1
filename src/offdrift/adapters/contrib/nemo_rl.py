"""NeMo-RL: any method that decides by token or sequence, as its loss function.

In a launcher, before NeMo-RL's own:

    from offdrift.adapters.contrib import nemo_rl
    nemo_rl.install("dppo_tv", horizon=8192)

`setup` of `nemo_rl.algorithms.grpo` (or `ppo`, or of its second trainer, `single_controller`) then builds this loss
instead of `ClippedPGLossFn`; it travels to the workers as a value. NeMo-RL's counts of valid tokens and sequences are
the denominators. With `reads="logit"` the loss sees the whole distribution of the current policy: if the data carries
what the engine sampled from (all of it, or its top k), KL and TV between the two are exact, or an interval that
contains them, at every token.

Reference: NeMo-RL 0.7.0 (81aa43dd) and its main branch (7ea279abf), `algorithms/loss/interfaces.py`:
`LossFunction`; `algorithms/loss/utils.py`: `prepare_loss_input`; `algorithms/loss/loss_functions.py`:
`ClippedPGLossConfig`; `algorithms/grpo.py`: `setup`.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.distributed.tensor import DTensor

from offdrift.adapters import proof
from offdrift.adapters.arguments import refuse_unknown
from offdrift.adapters.frameworks import Replacements, after_import, require
from offdrift.adapters.hooks import (
    DROPPED,
    METRIC_SUMS,
    HookConfig,
    LossHook,
    check_served,
    hook_of,
    metric_parts,
    require_logprobs,
    zero_loss,
)
from offdrift.batch_info import NO_INFO, BatchInfo
from offdrift.divergence.evidence import Divergence
from offdrift.divergence.fused import exact_divergences
from offdrift.divergence.interval import topk_divergences
from offdrift.errors import EvidenceError, MethodError, ShapeError, check_choice
from offdrift.logprobs import LogProbs

FULL = "generation_logits"
"""Data field `[batch, time, vocab]`: scores of the policy that drew each token, logits or log-probs,
aligned as `generation_logprobs` (index t is about token t; index 0 is padding)."""
TOP_IDS, TOP_LOGP = "generation_topk_ids", "generation_topk_logprobs"
"""Data fields `[batch, time, k]`: ids and log-probs of its k likeliest tokens, aligned likewise."""


WAYS_OUT = {
    "generation_logprobs": "have the engine return the log-prob of every sampled token",
    "prev_logprobs": "force_on_policy_ratio skips them: turn it off, or let the policy at this update "
    'stand for the old one with old="current"',
    "reference_policy_logprobs": "set grpo.skip_reference_policy_logprobs_calculation=false",
}
HINTS = {
    "divergences": f'give reads="logit", and {FULL} (or {TOP_IDS} and {TOP_LOGP}) in the data',
    "entropy": 'give reads="logit" and old="current"',
    "vocab": 'give reads="logit" and vocab=',
}

OWN_TERMS = {
    "positive_example_nll_weight": 0.0,
    "disable_ppo_ratio": False,
    "sequence_level_importance_ratios": False,
    "use_cispo": False,
    "ratio_clip_c": None,
    "truncated_importance_sampling_type": None,
    "use_on_policy_kl_approximation": False,
}
"""Of NeMo-RL's loss, what adds a term or chooses another loss, and the value without it."""

STOOD_IN_FOR = (
    "token_level_loss",
    "ratio_clip_min",
    "ratio_clip_max",
    "reference_policy_kl_penalty",
    "reference_policy_kl_type",
    "kl_input_clamp_value",
    "kl_output_clamp_value",
    "use_importance_sampling_correction",
    "truncated_importance_sampling_ratio",
    "truncated_importance_sampling_ratio_min",
)
"""Numbers of NeMo-RL's loss that every configuration has, and that the method's own stand in for."""

FOLLOWED = ("force_on_policy_ratio", "use_kl_in_reward")
"""Settings that hold under this loss, too: the first here, the second in NeMo-RL's rewards."""

BUILDERS = (
    "nemo_rl.algorithms.grpo",
    "nemo_rl.algorithms.ppo",
    "nemo_rl.algorithms.single_controller_utils.setup",
)
"""Modules that build a policy loss by name: each has a `setup` of its own."""

Reads = Literal["logprob", "logit"]
Old = Literal["recorded", "current"]


def score_rows(logits: Tensor, mask: Bool[Tensor, "b s"], vocab: int | None) -> Float[Tensor, "n v"]:
    """The scores from which each trainable token was drawn. Gradient: to `logits`."""
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    if vocab is not None and logits.shape[-1] < vocab:
        raise ShapeError(
            f"logits have {logits.shape[-1]} columns for a vocabulary of {vocab}: tensor parallelism "
            'has sharded it; set tensor_model_parallel_size=1, or reads="logprob"'
        )
    return logits[:, : mask.shape[1]][mask]


@dataclass(frozen=True)
class OffdriftLoss:
    """NeMo-RL's `LossFunction`; made by `loss`, called by the policy workers. No live state."""

    config: HookConfig
    reads: Reads = "logprob"
    old: Old = "recorded"
    vocab: int | None = None
    use_fused_linear_logprobs: bool = False
    """NeMo-RL reads this to know in which form it has log-probs."""
    requires_survivor_normalization: ClassVar[bool] = False
    """NeMo-RL's workers ask whether sequences are dropped inside of the loss: those that gates reject stay counted."""

    @property
    def loss_type(self) -> Any:
        """NeMo-RL's name for what the loss is divided by."""
        by_token = self.config.row.aggregate == "token_mean"
        kinds = _interfaces().LossType
        return kinds.TOKEN_LEVEL if by_token else kinds.SEQUENCE_LEVEL

    @property
    def input_type(self) -> Any:
        """Input that NeMo-RL must pass to this loss: logits or log-probs."""
        kinds = _interfaces().LossInputType
        return kinds.LOGIT if self.reads == "logit" else kinds.LOGPROB

    @property
    def metric_normalizations(self) -> dict[str, Any]:
        """Denominator of each returned metric, as NeMo-RL's `MetricNormalizer`: tokens, sequences or none."""
        by = _interfaces().MetricNormalizer
        named = {f"offdrift/{name}": by.TOKENS for name in (*METRIC_SUMS, DROPPED)}
        whole = by.TOKENS if self.loss_type.name == "TOKEN_LEVEL" else by.SEQUENCES
        return {**named, "loss": whole, "num_valid_samples": by.NONE}

    def __call__(
        self,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        *,
        next_token_logprobs: Float[Tensor, "b s"] | None = None,
        logits: Tensor | None = None,
    ) -> tuple[Float[Tensor, ""], dict[str, float]]:
        """This micro-batch's part of the loss and of the metrics; NeMo-RL adds them up.

        Args:
            data: `[batch, time]` fields (`sample_mask` `[batch]`); index 0 is padding.
            global_valid_seqs: valid sequences of the step, over all micro-batches and ranks.
            global_valid_toks: its valid tokens.
            next_token_logprobs: log pi of tokens 1, 2, ...; receives the gradient.
            logits: scores of the current policy `[batch, time, vocab]`, after its temperature; position t is about
                token t + 1. Receives the gradient.

        Raises: `EvidenceError`: a log-prob field that the method needs is missing or a placeholder.
            `BadValueError`: NaN or a positive log-prob on a trainable token.
            `ShapeError`: the vocabulary is sharded.
            `FrameworkError`: once, where NeMo-RL's own plain loss is not ours.
        """
        hook = hook_of(self.config)
        mask = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]) != 0
        ids, count = data["input_ids"][:, 1:][mask], float(data["sample_mask"].sum())
        scores = None if logits is None else score_rows(logits, mask, self.vocab)
        if scores is None and next_token_logprobs is None:
            raise EvidenceError(f'NeMo-RL gave no log-probs to a loss that reads="{self.reads}"')
        if not bool(mask.any()):
            graph = next_token_logprobs if scores is None else scores
            return zero_loss(graph), {"loss": 0.0, "num_valid_samples": count}  # type: ignore[arg-type]
        logp: Any = next_token_logprobs
        if scores is not None:  # log pi(token) = z(token) - log sum exp z
            z = scores.float()
            sampled = z.gather(1, ids[:, None].long()).squeeze(1) - z.logsumexp(1)
            logp = z.new_zeros(mask.shape).masked_scatter(mask, sampled)

        def field(name: str) -> Tensor:
            x = data[name][:, 1:] if name in data else None
            return require_logprobs(x, mask, name, WAYS_OUT[name], beside=logp)

        old = field("prev_logprobs") if self.old == "recorded" else logp.detach()
        ref = field("reference_policy_logprobs") if hook.method.needs_reference else None
        logprobs = LogProbs.pack(field("generation_logprobs"), logp, old, logp_ref=ref, mask=mask)
        batch_info = NO_INFO if scores is None else self._batch_info(scores.detach(), data, mask, logprobs)
        result = hook.loss(
            logprobs,
            data["advantages"][:, 1:],
            tokens=global_valid_toks,
            sequences=global_valid_seqs,
            also={"tokens": ids},
            batch_info=batch_info,
        )
        if not hook.proved:
            rollout, advantages = field("generation_logprobs"), data["advantages"][:, 1:]
            sample = proof.sample_of(logp, old, rollout, advantages=advantages, mask=mask)
            _prove(hook, data, sample, seqs=global_valid_seqs, toks=global_valid_toks)
        parts = metric_parts(result, global_valid_toks)
        metrics = {f"offdrift/{name}": x for name, x in parts.items()}
        metrics |= {"loss": float(result.loss.detach()), "num_valid_samples": count}
        return result.loss, metrics

    def _batch_info(
        self, scores: Float[Tensor, "n v"], data: Mapping[str, Any], mask: Bool[Tensor, "b s"], logprobs: LogProbs
    ) -> BatchInfo:
        """KL(mu || pi) and TV(mu, pi) at every token, exact or intervals, and entropies, where they are needed."""
        method, divergences, entropy = self.config.row, {}, None
        at_tokens = {x: data[x][:, 1:][mask] for x in (FULL, TOP_IDS, TOP_LOGP, "input_ids") if x in data}
        if FULL in at_tokens:
            exact = exact_divergences(at_tokens[FULL], scores)
            values = {"kl_rollout_current": exact.kl_rollout_current, "tv_rollout_current": exact.tv}
            divergences = {name: Divergence.exact(name, x) for name, x in values.items()}
        elif TOP_IDS in at_tokens and TOP_LOGP in at_tokens:
            ids, top_ids = (at_tokens[x].long() for x in ("input_ids", TOP_IDS))
            pair = topk_divergences(top_ids, at_tokens[TOP_LOGP], ids, logprobs.logp_rollout, scores)
            divergences = {d.name: d for d in pair}
        elif method.needs_divergences:
            raise EvidenceError(f"this method needs divergences of whole distributions: {HINTS['divergences']}")
        if "entropy" in method.needs:
            log_pi = scores.float().log_softmax(-1)
            entropy = -(log_pi.exp() * log_pi.clamp(min=-1e4)).sum(-1)
        return BatchInfo(divergences=divergences, entropy=entropy, vocab=self.vocab)


LOSSES = "nemo_rl.algorithms.loss.loss_functions"
"""Where NeMo-RL has its own loss."""


def _prove(hook: LossHook, data: Mapping[str, Any], s: proof.Sample, *, seqs: Tensor, toks: Tensor) -> None:
    """Once: NeMo-RL's own loss of the micro-batch, with its clips alone, is ours over the step's counts."""
    theirs, by_token = sys.modules.get(LOSSES), hook.method.aggregate == "token_mean"
    mask = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]) != 0
    columns = {"prev_logprobs": s.old, "generation_logprobs": s.rollout, "advantages": s.advantages}
    padded = {name: torch.cat([torch.zeros_like(x[:, :1]), x], 1) for name, x in columns.items()}
    batch_fields = {**data, **padded}
    # PPO's clip and nothing else, for NeMo-RL's own model of its settings or the dictionary of 0.6.0.
    settings = {**dict.fromkeys((*STOOD_IN_FOR, *FOLLOWED)), **OWN_TERMS, "reference_policy_kl_type": "k3"}
    settings |= {"token_level_loss": by_token, "ratio_clip_min": 0.2, "ratio_clip_max": 0.2}
    settings |= dict.fromkeys((*FOLLOWED, "use_importance_sampling_correction"), False)
    settings |= {"reference_policy_kl_penalty": 0.0}

    def native(leaf: Tensor) -> Tensor:
        made = theirs.ClippedPGLossFn(theirs.ClippedPGLossConfig(**settings))  # type: ignore[union-attr]
        return made(next_token_logprobs=leaf, data=batch_fields, global_valid_seqs=seqs, global_valid_toks=toks)[0]

    def ours(leaf: Tensor) -> Tensor:
        packed = LogProbs.pack(s.rollout, leaf, s.old, mask=mask)
        plain = proof.clipped(0.2, aggregate="token_mean" if by_token else "seq_mean_token_mean")
        return hook.plain(plain, packed, s.advantages, tokens=toks, sequences=seqs).loss

    here = hasattr(theirs, "ClippedPGLossFn")
    hook.prove(f"{LOSSES}.ClippedPGLossFn", native=native if here else None, ours=ours, at=s.logp)


def loss(
    method: str | None = None,
    *,
    reads: Reads = "logprob",
    old: Old = "recorded",
    vocab: int | None = None,
    use_fused_linear_logprobs: bool = False,
    **options: Any,
) -> OffdriftLoss:
    """A method as NeMo-RL's `LossFunction`, to be given to `grpo_train`.

    Args: as `HookConfig.of`, and
        reads: "logprob", or "logit" for whole distributions, which needs the logits of a micro-batch
            once more in float32, and no tensor parallelism over the vocabulary.
        old: "current" lets the policy at this update stand for the old one, as NeMo-RL's
            `force_on_policy_ratio` does.
        vocab: tokens of the tokenizer, with reads="logit": a smaller logit row is a shard of one.
        use_fused_linear_logprobs: NeMo-RL computes log-probs without logits.

    Raises: `EvidenceError`, `MethodError`: NeMo-RL's hook cannot serve the method.
    """
    check_choice("reads", reads, ("logprob", "logit"))
    check_choice("old", old, ("recorded", "current"))
    require("nemo-rl")
    if reads == "logit" and (vocab is None or use_fused_linear_logprobs):
        raise MethodError(
            'reads="logit" needs vocab= (len(tokenizer)), and use_fused_linear_logprobs off, which '
            "computes log-probs without logits"
        )
    config = HookConfig.of("nemo-rl", method, **options)
    has = {"logp_old", "logp_ref"} | ({"divergences"} if reads == "logit" else set())
    has |= {"entropy", "vocab"} if reads == "logit" and old == "current" else set()
    check_served(config, has=has, hints=HINTS)
    return OffdriftLoss(config, reads, old, vocab, use_fused_linear_logprobs)


def install(method: str | None = None, **options: Any) -> None:
    """Have NeMo-RL's `setup` build this loss; call it before, in the process that calls `setup`.

    That of `grpo`, `ppo` and the second trainer (`single_controller`), now or once it is imported.

    Args: as `loss`. `force_on_policy_ratio` and the fused log-probs of NeMo-RL's configuration are
        followed.

    Raises: as `loss`; later, in `setup`: `MethodError` if its configuration asks NeMo-RL's loss for a
        term that the method has not (a KL penalty, the likelihood of positive examples, ...).
    """
    require("nemo-rl")
    loss(method, **options)  # wrong arguments are an error here, not after minutes of set-up
    uninstall()
    _INSTALLED.append(functools.partial(_instead, method, options))
    for module in BUILDERS:
        after_import(module, _rebind)


def uninstall() -> None:
    """Have every `setup` build NeMo-RL's own loss again."""
    _INSTALLED.clear()
    _REPLACED.restore()


_INSTALLED: list[Any] = []
"""What builds the loss in this process, one or none."""
_REPLACED = Replacements()


def _rebind(module: Any) -> None:
    for ours in _INSTALLED:
        _REPLACED.replace(module, "ClippedPGLossFn", ours)


def _instead(
    method: str | None,
    options: Mapping[str, Any],
    cfg: Any,
    use_fused_linear_logprobs: bool = False,
    opd_full: Any = None,
    *,
    seq_logprob_error_threshold: float | None = None,
    **unknown: Any,
) -> OffdriftLoss:
    """Build the loss that `setup` uses in place of `ClippedPGLossFn(loss_config, use_fused_linear_logprobs=...)`.

    The threshold is read by `loss_fn.seq_logprob_error_in_loss` alone, a setting that is refused; without it NeMo-RL
    masks those sequences before the loss. Distillation over the whole vocabulary (`opd_full`) is another loss.

    NeMo-RL's settings are fields of a model with defaults; in 0.6.0, a dictionary without.

    Raises: `MethodError` if they ask for a term that the method has not.
    """
    refuse_unknown("nemo-rl", "ClippedPGLossFn", unknown, known=())
    if getattr(opd_full, "enabled", opd_full):
        raise MethodError("opd_full: NeMo-RL's distillation over the vocabulary is another loss, which is replaced")
    absent = {**dict.fromkeys((*STOOD_IN_FOR, *FOLLOWED)), **OWN_TERMS}
    if isinstance(cfg, Mapping):
        values, defaults = dict(cfg), absent
    else:
        values, model = dict(cfg), type(cfg).model_fields
        defaults = {**{name: field.default for name, field in model.items()}, **OWN_TERMS}
    kept = {*STOOD_IN_FOR, *FOLLOWED}
    dropped = {name: x for name, x in values.items() if name not in kept and x != defaults.get(name)}
    if dropped:
        named = ", ".join(f"loss_fn.{name}={value}" for name, value in dropped.items())
        raise MethodError(
            f"{named}: part of NeMo-RL's own loss, which is replaced, and would be dropped: leave it at "
            "its default, and choose a method that has it (`offdrift methods` lists all rows)"
        )
    theirs = {**absent, **values}
    if theirs["force_on_policy_ratio"]:
        options = {**options, "old": "current"}
    made = loss(method, **{"use_fused_linear_logprobs": use_fused_linear_logprobs, **options})
    penalty = 0 if theirs["use_kl_in_reward"] else theirs["reference_policy_kl_penalty"]
    if penalty and made.config.row.penalty is None:
        raise MethodError(
            f"loss_fn.reference_policy_kl_penalty={penalty} belongs to NeMo-RL's loss and would be "
            f"dropped: set it to 0, or give {made.config.method} a penalty"
        )
    numbers = ", ".join(f"{name}={theirs[name]}" for name in STOOD_IN_FOR)
    log = logging.getLogger("offdrift.nemo-rl")
    log.info("%s stands in for NeMo-RL's loss with %s", made.config.row.describe(), numbers)
    return made


def _interfaces() -> Any:
    # NeMo-RL has loaded this module by now; nobody else needs it to import ours.
    from nemo_rl.algorithms.loss import interfaces

    return interfaces
