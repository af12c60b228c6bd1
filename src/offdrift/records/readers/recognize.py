"""`recognize`: one answer to what there is at a path, for every command that reads what a run wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from offdrift.errors import RecordError
from offdrift.records.readers.detect import NOTHING, UnnamedColumnsError, detect
from offdrift.records.readers.files import LIMIT, Detected

if TYPE_CHECKING:
    from offdrift.records.readers.metrics import MetricLog


def recognize(
    paths: Sequence[str], *, columns: Mapping[str, str] = NOTHING, limit: int = LIMIT
) -> Detected | MetricLog:
    """The logs of tokens or responses at some paths; where there are none, the metrics of a run.

    Args:
        paths, columns, limit: as of `detect`. With columns, which are of a log of tokens, no metrics are looked for.

    Raises: `RecordError` if there is neither, naming the file and the way out.
    """
    try:
        return detect(paths, columns=columns, limit=limit)
    except RecordError as e:
        if columns:
            raise
        from offdrift.records.readers.metrics import find_metrics

        # A log of tokens may have a reward in each row, and is no table of metrics for that.
        metrics = find_metrics(paths, without=e.files if isinstance(e, UnnamedColumnsError) else frozenset())
        if metrics is None:
            raise
        return metrics
