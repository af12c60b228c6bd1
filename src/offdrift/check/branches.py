"""What to pick for three kinds of stacks: asynchronous, quantized, and float16 in both engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offdrift.check.bench import EngineSpec, Pair
from offdrift.check.factors.base import Outcome

STALE_METHOD = "bypass_ppo_clip"
"""For rollouts of older weights: what did best under long lag here (docs/faq.md)."""
SURVEY = "survey of off-policy RL for LLMs, 2026"


def quantized(spec: EngineSpec) -> bool:
    """Whether an engine multiplies or keeps numbers on a coarser grid than its dtype.

    Example:
        >>> quantized(EngineSpec.parse("vllm:bfloat16,kv_cache_dtype=fp8"))
        True
    """
    cache = str(spec.options.get("kv_cache_dtype", "auto"))
    return spec.options.get("quantization") is not None or cache.startswith(("fp8", "int8"))


def branches(pair: Pair, outcomes: Sequence[Outcome] = ()) -> list[dict[str, Any]]:
    """Say what to pick by the kind of the stack: the `branches` entry of `check.json`.

    Args:
        outcomes: experiments of this check; those of the factors `float16` and `quantization` are quoted.

    Returns: rows with `name`; `here`, whether it is this pair's (None: a check of equal weights cannot see it);
        `method`, a row of `METHODS`; `pick` and `why` in words; `source`.
    """
    measured = {o.factor: o for o in outcomes if o.status == "ran"}

    def measurement(factor: str) -> str:
        outcome = measured.get(factor)
        return (
            "" if outcome is None else f" Here: KL {outcome.kl_mean:.2g} nat, {outcome.baseline_kl_mean:.2g} without."
        )

    return [
        {
            "name": "asynchronous",
            "here": None,
            "method": STALE_METHOD,
            "pick": f"bound the lag, then {STALE_METHOD} (docs/faq.md)",
            "why": "Old weights drift with lag, which a check at equal weights does not see. The survey picks "
            "decoupled_token_is; `offdrift audit` says what either would do with your log.",
            "source": f"measured: docs/training.md; {SURVEY}, cause B",
        },
        {
            "name": "quantized",
            "here": quantized(pair.rollout),
            "method": "decoupled_token_is",
            "pick": "decoupled_token_is from the first step on, or one precision on both sides",
            "why": "A quantized engine is another policy at equal weights, not a noisy copy."
            + measurement("quantization"),
            "source": f"{SURVEY}, quantized inference: FlashRL, FP8-RL (arXiv:2601.18150), Jet-RL (arXiv:2601.14243)",
        },
        {
            "name": "float16",
            "here": pair.rollout.dtype == pair.train.dtype == "float16",
            "method": "disabled",
            "pick": "float16 in both engines, with a scaled loss, before any correction",
            "why": "Its three further bits of mantissa take away most of bfloat16's mismatch." + measurement("float16"),
            "source": f"{SURVEY}, cause A: Qi et al., arXiv:2510.26788",
        },
    ]
