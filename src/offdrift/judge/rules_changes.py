"""Changes that a rules file makes to the built-in rules, as plain data."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from offdrift.judge.rules import Fix, Rule, Rules, load_rules, parse_rules


def changes_of(rules: Rules) -> dict[str, Any]:
    """Compare rules with the built-in ones.

    Returns: `thresholds` (name to `from`, `to` and `unit`), `rules` (name to `new`, `off`, or the list of keys that
        differ) and `fixes` (name to `new` or the list of keys). A text that names a threshold in braces differs with
        it and is left out.

    Example:
        >>> text = "thresholds.kl_large = 0.1\\nrules.idle_cap.enabled = false"
        >>> changed = changes_of(parse_rules(text, "mine.toml"))
        >>> changed["thresholds"], changed["rules"]
        ({'kl_large': {'from': 0.05, 'to': 0.1, 'unit': 'nat'}}, {'idle_cap': 'off'})
    """
    old, new = load_rules(), rules
    thresholds = {
        name: {"from": old.thresholds[name].value, "to": t.value, "unit": t.unit}
        for name, t in new.thresholds.items()
        if t.value != old.thresholds[name].value
    }
    # The built-in texts at the new thresholds: what differs from them, the file has changed.
    at_new = parse_rules("", "", limits=rules.limits)
    table: dict[str, Any] = {name: "off" for name in old.rules if name not in new.rules}
    table |= {name: "new" for name in new.rules if name not in old.rules}
    table |= _keys(at_new.rules, new.rules, Rule)
    fixes: dict[str, Any] = {name: "new" for name in new.fixes if name not in old.fixes}
    return {"thresholds": thresholds, "rules": table, "fixes": fixes | _keys(at_new.fixes, new.fixes, Fix)}


def _keys(old: Any, new: Any, kind: type) -> dict[str, list[str]]:
    """The fields in which rows of the same name differ."""
    differ = {
        name: [f.name for f in fields(kind) if getattr(old[name], f.name) != getattr(new[name], f.name)]
        for name in new
        if name in old
    }
    return {name: keys for name, keys in differ.items() if keys}
