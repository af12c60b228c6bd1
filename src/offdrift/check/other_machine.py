"""The claim of another machine beside this one's: the same digest, or the first request and token that differ.

A digest says whether. Where the other machine's `check.json` is given in its place, prompts, tokens and log-probs are
held against each other in the order of the requests, and the first that is not the same is named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offdrift.errors import BadValueError
from offdrift.texts import LARGEST_DATA, read_text


def other_claim(given: str) -> dict[str, Any]:
    """Another machine's claim, of which at least `digest_rollout` is known.

    Args:
        given: 64 hexadecimal digits, or the path of a check.json that holds a claim.

    Raises: `BadValueError` for anything else.
    """
    if re.fullmatch(r"[0-9a-fA-F]{64}", given):
        return {"digest_rollout": given.lower()}
    path = Path(given)
    if not path.is_file():
        raise BadValueError(f"digest = {given[:80]!r} is not 64 hexadecimal digits, as a claim prints them, nor a file")
    try:
        stored = json.loads(read_text(path, limit=LARGEST_DATA))
    except (OSError, ValueError, RecursionError) as error:
        raise BadValueError(f"digest: {path} cannot be read: {str(error)[:200]}") from error
    claim = stored.get("claim") if isinstance(stored, dict) else None
    digest = claim.get("digest_rollout") if isinstance(claim, dict) else None
    if not (isinstance(claim, dict) and isinstance(digest, str) and re.fullmatch(r"[0-9a-f]{64}", digest)):
        raise BadValueError(f"digest: {path} holds no claim; it is the check.json of offdrift check --claim equal")
    return claim


def with_digest(entry: dict[str, Any], expected: str | None) -> dict[str, Any]:
    """A claim's entry with the comparison with another machine's, and the first difference where both kept numbers.

    Raises: `BadValueError` for what `other_claim` cannot read.
    """
    if expected is None:
        return entry
    other = other_claim(expected)
    digest = other["digest_rollout"]
    same = entry["digest_rollout"] == digest
    words = "the same as the other machine's" if same else f"not the other machine's, {digest}"
    comparison = {"expected_digest": digest, "same_digest": same}
    if not same and (first := first_difference(entry.get("numbers"), other.get("numbers"))) is not None:
        comparison["first_of_machines"] = first
        words += f", {first['text']}"
    return {**entry, **comparison, "text": f"{entry['text']}; the digest is {words}"}


def first_difference(here: Any, there: Any) -> dict[str, Any] | None:
    """The first request and token that two machines do not share; None if either kept no numbers, or all are the same.

    Example:
        >>> one = {"prompts": [[1]], "tokens": [[4, 5]], "logp": [[-0.5, -1.0]]}
        >>> first_difference(one, one | {"logp": [[-0.5, -1.25]]})["text"]
        'first at request 0, token 1: log-prob -1.0 here, -1.25 there'
    """
    if not isinstance(here, Mapping) or not isinstance(there, Mapping):
        return None
    parts = ("prompts", "tokens", "logp")
    if not all(isinstance(side.get(part), list) for side in (here, there) for part in parts):
        return None
    if len(here["prompts"]) != len(there["prompts"]):
        return {"text": f"which has {len(there['prompts'])} requests where there are {len(here['prompts'])} here"}
    for request in range(len(here["prompts"])):
        if here["prompts"][request] != there["prompts"][request]:
            return {"request": request, "text": f"first at request {request}: it has another prompt"}
        ours, theirs = (
            list(zip(side["tokens"][request], side["logp"][request], strict=False)) for side in (here, there)
        )
        at = next((i for i, (x, y) in enumerate(zip(ours, theirs, strict=False)) if x != y), None)
        if at is None and len(ours) != len(theirs):
            at = min(len(ours), len(theirs))
        if at is not None:
            return {"request": request, "token": at} | _at(ours[at : at + 1], theirs[at : at + 1], request, at)
    return None


def _at(ours: list[tuple[Any, Any]], theirs: list[tuple[Any, Any]], request: int, at: int) -> dict[str, Any]:
    """The difference at one place, as values and in words."""
    where = f"first at request {request}, token {at}"
    if not ours or not theirs:
        return {"text": f"{where}: the response ends there {'here' if not ours else 'on the other machine'}"}
    ((token, logp),), ((other, log_other),) = ours, theirs
    if token != other:
        return {"here": token, "there": other, "text": f"{where}: token {token} here, {other} there"}
    return {"here": logp, "there": log_other, "text": f"{where}: log-prob {logp!r} here, {log_other!r} there"}
