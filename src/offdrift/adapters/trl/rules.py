"""What cannot work in TRL, refused before a run begins; and its weight sync on CPUs, mended."""

from __future__ import annotations

from typing import Any, Literal

from offdrift.errors import EvidenceError, MethodError
from offdrift.methods import Method

Mode = Literal["correct", "loss"]

IGNORED = {
    "off_policy_mask_threshold": None,
    "top_entropy_quantile": 1.0,
    "importance_sampling_level": "token",
    "delta": None,
}
"""Settings of TRL's policy term with their defaults; mode="loss" would silently drop any other."""


OF_TRLS_LOSS = ("clip_ratio/", "cispo_clip_ratio", "vespo/")
"""Metrics that describe a loss which mode="loss" does not use."""

SCORED_ELSEWHERE = (
    "this TRL scores tokens in another place than the versions this adapter knows, so nothing would "
    "be corrected; install a tested version (docs/integrations/trl.md)"
)


def refuse_method(method: Method, mode: Mode) -> None:
    """Raise if a method cannot mean what its user hopes in this mode.

    Example:
        >>> from offdrift.methods import method
        >>> refuse_method(method("token_tis"), "correct")
        Traceback (most recent call last):
        offdrift.errors.MethodError: weight token ratio(full), truncate above 2: every loss of TRL contains the staleness ratio, so a weight may only be on the mismatch; use settings={"weight.on": "mismatch"}, or mode="loss"
    """
    if method.needs_divergences:
        raise EvidenceError(
            "the method reads divergences of whole distributions, and TRL's forward pass gives "
            "log-probs of the sampled tokens alone; take a row that estimates them (trm_max_k2, "
            "trm_avg_k3, ln_trm)"
        )
    if mode == "loss":
        if method.penalty is not None:
            raise MethodError(
                f"the method's KL penalty [{method.penalty.formula}] would stand beside TRL's own; "
                "give replace(method, penalty=None), and beta (use_bias_correction_kl) to GRPOConfig"
            )
        if method.lr_scale is not None:
            raise MethodError(
                "the method scales the learning rate of each step, which belongs to TRL"
            )
        return
    if not (method.correction.gates or method.correction.weights):
        raise MethodError(
            f"the method ({method.describe()}) has neither gates nor weights, so nothing would be "
            'corrected; mode="loss" uses its objective'
        )
    if method.anchor is not None:
        raise MethodError(
            'the method replaces the old policy; TRL\'s loss would not: use mode="loss"'
        )
    for weight in method.correction.weights:
        if weight.on != "mismatch":
            raise MethodError(
                f"{weight.formula}: every loss of TRL contains the staleness ratio, so a weight may "
                'only be on the mismatch; use settings={"weight.on": "mismatch"}, or mode="loss"'
            )


def refuse_settings(trainer: Any, method: Method, mode: Mode) -> None:
    """Raise `MethodError` if a setting of TRL would be ignored, or a step could not be seen whole."""
    wanted = {name: getattr(trainer, name, getattr(trainer.args, name, default)) for name, default in IGNORED.items()}  # fmt: skip
    changed = {name: x for name, x in wanted.items() if x != IGNORED[name]}
    if mode == "loss" and changed:
        raise MethodError(
            f'{changed} belong to TRL\'s policy loss, which mode="loss" replaces; leave them at '
            'their defaults, or use mode="correct"'
        )
    whole = method.looks_ahead or (mode == "loss" and method.aggregate == "token_mean")
    steps, accumulated = trainer.args.steps_per_generation, trainer.args.gradient_accumulation_steps
    if whole and steps % accumulated:
        raise MethodError(
            f"steps_per_generation={steps} is no multiple of gradient_accumulation_steps="
            f"{accumulated}, so an optimizer step begins before its last micro-batch is drawn, and "
            f"this method must see it whole ({method.describe()}); make it a multiple, or choose an "
            "aggregate over sequences"
        )


def missing_engine(why: str, method: Method, mode: Mode) -> str | None:
    """What to do if there are no log-probs of the engine, because `why`; None if no part reads them."""
    used = (*method.correction.gates, *method.correction.weights)
    used += (method.objective,) if mode == "loss" else ()
    compared = "; ".join(part.formula for part in used if part.on in ("mismatch", "full"))
    if not compared:
        return None
    return (
        f"{why}, and [{compared}] compares the engine's with the trainer's: set use_vllm=True, or "
        "give a rollout_func that returns logprobs"
    )


def mend_sync(generation: Any) -> None:
    """Let TRL's colocated vLLM take weights on CPUs; elsewhere this does nothing.

    TRL writes into the model's parameters one by one. On CPUs vLLM has packed some of them, and lost
    the loaders that could repack: TRL's own way fails there.

    Args:
        generation: the trainer's `vllm_generation`, colocated.
    """
    from offdrift.engines.isolation import host_kept
    from offdrift.engines.vllm.engine import is_cpu, repacked

    if not is_cpu():
        return

    def sync_weights() -> None:
        llm, weights = generation.llm, generation._iter_named_params()
        with host_kept():
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            repacked(llm)
            llm.reset_prefix_cache()

    generation.sync_weights = sync_weights


def said(method: Method, mode: Mode, loss_type: str) -> str:
    """One line: what is used of the method, and what is not."""
    if mode == "loss":
        return f'mode="loss": {method.describe()}; TRL\'s loss_type={loss_type!r} only divides its own extra terms'  # fmt: skip
    parts = (*method.correction.gates, *method.correction.weights)
    used = "; ".join(part.formula for part in parts)
    return f'mode="correct": {used}, in TRL\'s loss {loss_type!r}; the method\'s own objective is not used'  # fmt: skip
