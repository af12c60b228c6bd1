"""`READINGS`: what the rules look at, each one number, derived from the metrics of the last steps.

A level is the median over the last `window_level` steps, so that one odd batch neither raises nor
hides anything; for the whole run it is the number of the whole run, if the context holds it.
`{on}` is the engine ratio: `mismatch` where the log has the old policy, else `full`. l is the second
policy's log-prob minus the rollout's.
"""

from __future__ import annotations

from offdrift.judge.readings.history import LAG, TRENDS
from offdrift.judge.readings.levels import LEVELS
from offdrift.judge.readings.view import Definition

READINGS: dict[str, Definition] = {**LEVELS, **LAG, **TRENDS}
"""What rules compare with thresholds, by name (docs/rules.md): how each is read off a history of metrics."""
