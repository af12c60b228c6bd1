"""`by_stack`: what the survey begins with for the kind of stack that a run is, beside what its own log asks for.

Four kinds, of which a run may be several: synchronous and dense; asynchronous; a mixture of experts; quantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offdrift.judge.findings import Context, Row, number
from offdrift.methods.situations import SITUATIONS

SOURCE = "survey of off-policy RL for LLMs, 2026, a heuristic for picking a row"
ROUTED = ("router/delta_router", "router/flip_frac")
REPAIR = "repair first what a correction would hide"
BELOW = "do nothing, the drift is too small for a correction to show"
OPEN = "no correction yet, as the numbers do not tell which one helps"
MEASURED = "keep to what was measured here, as a kind of stack is a guess"


def stacks(context: Context, overall: Row) -> dict[str, str]:
    """Name the kinds of stack that a run is, each with the fact that says so.

        async       tokens are older than the updates on their own batch
        moe         the context says experts, or routers are logged
        quantized   the context says that the engine's numbers are coarser than its dtype
        dense       none of these, and lag and quantization are known

    Args:
        context: what is known about the run besides its numbers.
        overall: its metrics.

    Returns: empty where neither lag nor engine nor model is known.

    Example:
        >>> stacks(Context(quantized=True), {"version_lag/mean": 3.5})
        {'async': 'tokens are 3.5 updates old on average', 'quantized': 'the engine is quantized'}
        >>> stacks(Context(quantized=False, same_weights=True), {})
        {'dense': 'no lag, no quantized engine'}
    """
    lag, inside = number(overall, "version_lag/mean"), number(overall, "batch/updates_before") or 0.0
    lag = 0.0 if lag is None and context.same_weights else lag
    experts = context.mixture_of_experts or any(number(overall, name) is not None for name in ROUTED)
    kinds = {}
    if lag is not None and lag > inside:
        kinds["async"] = f"tokens are {lag:.3g} updates old on average"
    if experts:
        kinds["moe"] = "a mixture of experts"
    if context.quantized:
        kinds["quantized"] = "the engine is quantized"
    if not kinds and lag is not None and context.quantized is False:
        kinds["dense"] = "no lag, no quantized engine"
    return kinds


def by_stack(context: Context, overall: Row, decided: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compare the survey's pick by stack with what was decided on a log or a check.

    Args:
        decided: of `judge.decide`: `method`, `rung` and `rule` are read.

    Returns: a row for each kind of stack: `stack`; `known_by`; `survey`, names of methods and systems; `survey_why`;
        `agrees`, whether the decision is one of them; `differs`, why it is not, "" where it is; `source`; and `find`,
        the command that lists methods for it.

    Example:
        >>> found = by_stack(Context(mixture_of_experts=True), {}, {"method": "icepop", "rung": "token TIS"})
        >>> [(row["stack"], row["survey"], row["agrees"]) for row in found]
        [('moe', ['icepop', 'keep_routing'], True)]

    Reference: survey of off-policy RL for LLMs, 2026, below its comparison map.
    """
    rows = []
    for name, fact in stacks(context, overall).items():
        situation = SITUATIONS[name]
        agrees = decided.get("method") in situation.survey
        reason = reason_of(decided)
        besides = "" if reason == BELOW else situation.differs
        rows.append(
            {
                "stack": name,
                "known_by": fact,
                "survey": list(situation.survey),
                "survey_why": situation.survey_why,
                "agrees": agrees,
                "differs": "" if agrees else "; ".join(filter(None, [reason, besides])),
                "source": SOURCE,
                "find": f"offdrift methods --for {name}",
            }
        )
    return rows


def reason_of(decided: Mapping[str, Any]) -> str:
    """Say why the log's own decision stands before the kind of stack."""
    if decided.get("rung") == "systems fix":
        return REPAIR
    if decided.get("rung") == "none":
        return BELOW
    return OPEN if decided.get("method") is None else MEASURED
