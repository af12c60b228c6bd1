"""`METHODS`: every named method; rows hold published values, `override` changes them for one run."""

from __future__ import annotations

import difflib

from offdrift.errors import MethodError
from offdrift.methods import clips, presets, recipes, sequences, trm, weighted
from offdrift.methods.method import Method

FAMILIES: dict[str, dict[str, Method]] = {
    "weights": weighted.ROWS,
    "token clips": clips.ROWS,
    "units and sequences": sequences.ROWS,
    "trust region masking": trm.ROWS,
    "recipes": recipes.ROWS,
    "presets": presets.ROWS,
}
"""The table in chapters, as it is printed."""

METHODS: dict[str, Method] = {n: row for rows in FAMILIES.values() for n, row in rows.items()}


def method(name: str) -> Method:
    """The row of that name.

    Raises: `MethodError` naming rows that are called alike.

    Example:
        >>> method("trm_max").describe()
        'L = -A ratio(full); keep if seq_max kl(full) <= 0.05; seq_mean_token_sum'
    """
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise MethodError(f"no method {name!r}; {hint}`offdrift methods` lists all {len(METHODS)}")
    return METHODS[name]
