"""`OffdriftCallback`: drift and findings in the logs of any trainer of Hugging Face.

    callback = OffdriftCallback("token_tis")
    trainer = MyTrainer(..., callbacks=[callback])
    callback.attach(trainer)

In `compute_loss` take `callback.offdrift.loss(...)`, or `.correct(...)` beside a loss of your own: its metrics stand in
the trainer's logs and with every tracker of `report_to`. A trainer that does neither is judged by what it logs
itself; TRL's names are known (docs/metrics.md). For TRL's GRPO with its corrections, see `offdrift.adapters.trl`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from offdrift.adapters.base import Adapter, OnIdle
from offdrift.adapters.report import PREFIX, StepReport
from offdrift.adapters.selection import Choice
from offdrift.errors import check_choice
from offdrift.judge import Context, Finding, Watcher, load_rules
from offdrift.judge.findings import URGENCY
from offdrift.methods import Method

OnFinding = Callable[[Finding], object]


class OffdriftCallback(TrainerCallback):
    """A callback of `transformers.Trainer`, and of every trainer that is one.

    Args:
        method: a row of `METHODS`, or a method, for losses and corrections in `compute_loss`; "disabled" measures
            alone.
        settings, context, rules, on_idle, metrics: as for `Adapter`.
        stop_on: "stop", "act", "watch" or "info": ends training after a step with a finding this severe or worse.
        on_finding: called with each finding, once, in the main process.

    Raises: `MethodError` for an unknown method, setting, metric or severity.
    """

    offdrift: Adapter
    """Losses, corrections, metrics and findings of the run."""

    def __init__(
        self,
        method: str | Method = "disabled",
        *,
        settings: Mapping[str, Any] = {},
        context: Context | None = None,
        rules: Path | None = None,
        on_idle: OnIdle = "error",
        metrics: Choice | None = None,
        stop_on: str | None = None,
        on_finding: OnFinding | None = None,
    ) -> None:
        if stop_on is not None:
            check_choice("stop_on", stop_on, URGENCY)
        options: dict[str, Any] = {"context": context, "rules": rules, "on_idle": on_idle, "metrics": metrics}
        self.offdrift = Adapter(method, framework="transformers", settings=settings, gather=everyone, **options)
        self.stop_on, self.on_finding = stop_on, on_finding
        watcher = Watcher(context=context or Context(framework="trl"), rules=load_rules(rules))
        self._logged = StepReport(watcher, self.offdrift.log, "findings_stop,findings_act")
        self._steps: list[dict[str, float]] = []
        self._attached = self._warned = False
        # Whether steps are closed: a method that is never called is an error, a trainer that is only watched is none.
        self._measures = method != "disabled"

    def attach(self, trainer: Any) -> None:
        """Stand before the callbacks of trackers, so that these log what this one adds. Twice is once."""
        handler = trainer.callback_handler
        handler.callbacks = [self, *(callback for callback in handler.callbacks if callback is not self)]
        self._attached = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Close the step of `self.offdrift`.

        Raises: `LivenessError` if a part of the method never acts, unless `on_idle` is "warn".
        """
        measures = self._measures = self._measures or self.offdrift.called
        numbers = self.offdrift.end_step(state.global_step) if measures else {}
        if numbers:
            self._steps.append(numbers)
            self._react(self.offdrift.fired, state, control)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Add the means of the steps since the last log to what is logged; judge logs that have none."""
        if logs is None:
            return
        steps, self._steps = self._steps, []
        names = dict.fromkeys(name for numbers in steps for name in numbers)
        added = {name: _mean([numbers[name] for numbers in steps if name in numbers]) for name in names}
        if not steps and not any(name.startswith(PREFIX) for name in logs) and "loss" in logs:
            added = self._logged.judge(state.global_step, logs)
            self._react(self._logged.fired, state, control)
        logs |= added
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1] |= added
        if added and args.report_to and not (self._attached or self._warned):
            self._warned = True
            self.offdrift.log.warning(
                "%s had logged before this callback: call attach(trainer) after making the trainer",
                ", ".join(args.report_to),
            )

    @property
    def findings(self) -> list[Finding]:
        """All findings so far: by tokens where the loop measures them, else by what the trainer logs."""
        return self.offdrift.findings or self._logged.watcher.findings

    def _react(self, fired: Sequence[Finding], state: Any, control: Any) -> None:
        stops = () if self.stop_on is None else URGENCY[: [*URGENCY].index(self.stop_on) + 1]
        for finding in fired:
            if self.on_finding is not None and state.is_world_process_zero:
                self.on_finding(finding)
            if finding.severity in stops:
                control.should_training_stop = True


def everyone(own: Any) -> list[Any]:
    """One object of every process, in every process."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [own]
    objects = [own] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(objects, own)
    return objects


def _mean(values: Sequence[float]) -> float:
    """The mean of what is a number; NaN if nothing is."""
    numbers = [value for value in values if not math.isnan(value)]
    return sum(numbers) / len(numbers) if numbers else math.nan
