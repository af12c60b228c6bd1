"""The fields of the plain schema: what they are called, and what kind of value they hold."""

from __future__ import annotations

from offdrift.records.rollouts import OLD_STATUS

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
NUMBERS = (
    "step",
    "reward",
    "group_id",
    "version",
    "old_status",
    "truncated",
    "response_length",
    *EITHER,
)
"""Per row. `group_id` may be a text."""
TEXTS = ("prompt", "completion")
FIELDS = tuple(dict.fromkeys((*FLOATS, *INTEGERS, *NUMBERS, *TEXTS)))

WORDS = {
    "truncated": {"length": 1, "truncated": 1},
    "old_status": {name: code for code, name in enumerate(OLD_STATUS)},
}
"""Numbers per row that a log may give as words: the reason to finish, how old log-probs were come by.
Any other word is 0, respectively -1, which no status is."""
OTHER = {"truncated": 0, "old_status": -1}
