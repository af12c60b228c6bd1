"""`log_to`: drift of a loop of one's own in the experiment tracker that it has already."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from offdrift.adapters.report import Reported, StepReport
from offdrift.adapters.selection import Choice, parse_choice
from offdrift.errors import MethodError
from offdrift.judge import Context, Watcher, load_rules
from offdrift.loss import PolicyLoss
from offdrift.stats import DriftStats, summarize

Write = Callable[[dict[str, float], int], object]


class StepLog(Reported):
    """Logs steps to a tracker; `log_to` makes one."""

    def __init__(self, write: Write, report: StepReport) -> None:
        self._write, self._report = write, report

    def __call__(self, step: int, *pieces: PolicyLoss | DriftStats, also: Mapping[str, float] = {}) -> dict[str, float]:
        """Log one optimizer step.

        Args:
            step: its number.
            pieces: what `policy_loss` returned for each micro-batch, or their `DriftStats`; they are added up exactly.
            also: further numbers of the step for the diagnosis, such as "optim/grad_norm" and "reward/mean".

        Returns: what was logged, by name. Without a piece nothing is logged.
        """
        stats = [piece.stats if isinstance(piece, PolicyLoss) else piece for piece in pieces]
        if not stats:
            return {}
        chosen = self._report.judge(step, {**summarize(DriftStats.merge_all([s.cpu() for s in stats])), **also})
        self._write(chosen, step)
        return chosen


def log_to(
    tracker: Any,
    *,
    metrics: Choice = "main",
    context: Context | None = None,
    rules: Path | None = None,
) -> StepLog:
    """Return a function that logs the drift of each step to a tracker, and says what is wrong.

    Findings go to the logger `offdrift.loop`, each once. Metrics are named `offdrift/full/k3` and so on
    (docs/metrics.md).

    Args:
        tracker: anything that takes numbers by name: a run of W&B or trackio, or their modules (`log`), the module
            mlflow (`log_metrics`), a SummaryWriter of TensorBoard (`add_scalar`), an `Accelerator` or one of its
            trackers (`log`), or a function of a mapping and a step.
        metrics: "main", about twelve; "all"; or a list of names, in which * stands for anything.
        context: what the diagnosis may know of the run: its method, temperature, framework.
        rules: a TOML file over the built-in rules.

    Raises: `MethodError` for what is no tracker, or names no metric.

    Example:
        >>> import torch
        >>> import offdrift as od
        >>> lp = od.LogProbs.pack(torch.tensor([-1.0, -2.0]), torch.tensor([-1.1, -1.9]),
        ...                       segments=od.Segments.from_lengths([2]))
        >>> log = log_to(lambda numbers, step: print(step, sorted(numbers)[:2]), metrics=["full/*"])
        >>> numbers = log(1, od.policy_loss(lp, od.method("token_tis"), torch.ones(2)))
        1 ['offdrift/full/abs_log_ratio_max', 'offdrift/full/abs_log_ratio_mean']
    """
    watcher = Watcher(context=context or Context(), rules=load_rules(rules))
    report = StepReport(watcher, logging.getLogger("offdrift.loop"), parse_choice(metrics))
    return StepLog(writer_of(tracker), report)


def writer_of(tracker: Any) -> Write:
    """Return how to write numbers to a tracker. Raises: `MethodError` naming what it is instead."""
    if callable(getattr(tracker, "add_scalar", None)):

        def add_scalars(numbers: dict[str, float], step: int) -> None:
            for name, value in numbers.items():
                tracker.add_scalar(name, value, step)

        return add_scalars
    for name in ("log_metrics", "log"):
        method = getattr(tracker, name, None)
        if callable(method) and not isinstance(tracker, logging.Logger):
            return lambda numbers, step: method(numbers, step=step)
    if callable(tracker):
        return tracker
    raise MethodError(
        f"log_to: {type(tracker).__name__} is no tracker that is known; give one with add_scalar, log_metrics or log, "
        "or a function of a mapping of numbers and a step"
    )
