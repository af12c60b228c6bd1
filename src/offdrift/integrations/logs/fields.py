"""The fields of the plain schema: what they are called, and what kind of value they hold."""

from __future__ import annotations

POLICIES = ("logp_rollout", "logp_old", "logp")
"""The policies that an audit compares."""
LOGPS = (*POLICIES, "logp_ref")
DIVERGENCES = tuple(
    f"{kind}_{pair}"
    for kind in ("kl", "tv")
    for pair in ("rollout_current", "rollout_old", "old_current")
)
FLOATS = (*LOGPS, "advantages", "entropy", *DIVERGENCES)
"""Per response token."""
INTEGERS = ("tokens", "rollout_version", "mask", "position")
"""Per response token."""
LISTS = (*(name for name in FLOATS if name != "advantages"), "tokens", "mask", "position")
"""Per response token, and nothing else: a column of single numbers is another thing of that name."""
EITHER = ("advantages", "rollout_version")
"""Per response token, or one number for the whole row."""
NUMBERS = ("step", "reward", "group_id", "version", "truncated", "response_length", *EITHER)
"""Per row. `group_id` may be a text."""
TEXTS = ("prompt", "completion")
FIELDS = tuple(dict.fromkeys((*FLOATS, *INTEGERS, *NUMBERS, *TEXTS)))

CUT_OFF = ("length", "truncated")
"""Reasons to finish that say `truncated`, where a log gives the reason."""
