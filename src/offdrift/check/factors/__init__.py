"""Causes of drift between two engines, the experiment that isolates each, and the choice of experiments."""

from __future__ import annotations

from collections.abc import Sequence

from offdrift.check.factors import rollout, train
from offdrift.check.factors.base import Cost
from offdrift.check.factors.base import Factor as Factor
from offdrift.errors import BadValueError

FACTORS: tuple[Factor, ...] = (
    # With the rollout engine as it is,
    rollout.repeats,
    rollout.batch,
    rollout.prefix_caching,
    train.temperature,
    train.top_p,
    train.raw_logprobs,
    train.off_by_one,
    train.tokenization,
    train.pad_id,
    rollout.routing,
    train.weight_sync,
    # with another training engine,
    train.train_dtype,
    train.train_lm_head,
    train.train_attention,
    train.train_batch,
    train.tensor_parallel,
    train.gradient_checkpointing,
    # with another rollout engine each: seconds, or minutes where it compiles.
    rollout.chunked_prefill,
    rollout.rollout_dtype,
    rollout.float16,
    rollout.quantization,
    rollout.rollout_lm_head,
    rollout.kv_cache_dtype,
    rollout.rollout_attention,
    rollout.compiled,
)
"""Every factor, in an order that starts each engine once."""

SECONDS: dict[Cost, str] = {"cheap": "2 to 25 s", "engine": "20 to 40 s", "compile": "2 min"}
"""Time of one factor on SmolLM2-135M and one CPU core."""


def chosen(names: str, *, quick: bool = False, thorough: bool = False) -> list[Factor]:
    """The factors that a user names: "all", "none", or names separated by commas.

    Of "all", `quick` leaves out those that start another engine, and only `thorough` runs those that compile one.

    Raises: `BadValueError` for a name that no factor has, with those there are; if `quick` and
        `thorough` are both asked for.
    """
    if quick and thorough:
        raise BadValueError("quick leaves factors out that thorough asks for; give one of the two")
    table = {factor.name: factor for factor in FACTORS}
    if names == "all":
        return [f for f in FACTORS if _how_to_run(f, quick, thorough) is None]
    wanted = [] if names == "none" else [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in table:
            raise BadValueError(f"no factor is called {name!r}; there are {', '.join(table)}")
    return [table[name] for name in dict.fromkeys(wanted)]


def left_out(names: str, *, quick: bool = False, thorough: bool = False) -> Sequence[tuple[Factor, str]]:
    """Factors that "all" leaves out because they are slow, and how to run each; none for other names."""
    if names != "all":
        return []
    options = ((f, _how_to_run(f, quick, thorough)) for f in FACTORS)
    return [(factor, option) for factor, option in options if option is not None]


def _how_to_run(factor: Factor, quick: bool, thorough: bool) -> str | None:
    """The option that runs a slow factor; None for a factor that "all" runs."""
    took = SECONDS[factor.cost]
    if factor.cost == "compile" and not thorough:
        return f"compiles an engine ({took}); add --thorough, or --factors {factor.name}"
    if factor.cost == "engine" and quick:
        return f"starts another engine ({took}); leave out --quick, or --factors {factor.name}"
    return None
