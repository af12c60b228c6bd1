"""Experiment trackers (`log.trackers`): every arm is a run of its own in each of them.

Project is the recipe's name, group the run's folder, name the arm; settings and tags go along where a tracker has a
place for them. TensorBoard's files are in the run: trackers/ARM.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, TensorBoardTracker

from offdrift_lab.train.settings.recipe import Recipe


class Labels(NamedTuple):
    """Names of an arm in an experiment tracker."""

    group: str
    """The run's folder."""
    arm: str
    method: str
    step: int
    """Updates that it had taken when it went on."""

    @property
    def tags(self) -> list[str]:
        return ["offdrift", self.arm, self.method]


OPTIONS: dict[str, Callable[[Labels], dict[str, Any]]] = {
    # Rows behind a checkpoint are written again: older ones of these steps are not shown.
    "tensorboard": lambda x: {"purge_step": x.step + 1} if x.step else {},
    "wandb": lambda x: {"group": x.group, "name": x.arm, "tags": x.tags},
    "trackio": lambda x: {"group": x.group, "name": f"{x.group}/{x.arm}"},
    "mlflow": lambda x: {
        "run_name": f"{x.group}/{x.arm}",
        "tags": {"group": x.group, "arm": x.arm, "method": x.method},
    },
    "clearml": lambda x: {"task_name": f"{x.group}/{x.arm}", "tags": x.tags, "reuse_last_task_id": False},
    "swanlab": lambda x: {"experiment_name": f"{x.group}/{x.arm}", "tags": x.tags},
}
"""What accelerate's trackers are opened with, beside the project."""


def open_trackers(accelerator: Accelerator, recipe: Recipe, labels: Labels) -> None:
    """Open the arm's own tracker of every kind that accelerate was asked for; nothing is left of another arm's."""
    close_trackers(accelerator)
    settings = settings_of(recipe, labels.arm)
    for kind in accelerator.log_with:
        if isinstance(kind, GeneralTracker):  # opened by whoever made it
            accelerator.trackers.append(kind)
            continue
        made: Any = LOGGER_TYPE_TO_CLASS[str(kind)]
        options = OPTIONS.get(str(kind), lambda x: {})(labels)
        if issubclass(made, TensorBoardTracker):  # its run is a folder
            tracker = made(labels.arm, accelerator.logging_dir, **options)
        elif made.requires_logging_directory:
            tracker = made(recipe.name, accelerator.logging_dir, **options)
        else:
            tracker = made(recipe.name, **options)
        tracker.start()
        if not isinstance(tracker, TensorBoardTracker):
            tracker.store_init_configuration(settings)
        elif accelerator.is_main_process:  # as text: as hyperparameters they would be further files
            tracker.writer.add_text("settings", f"```json\n{json.dumps(settings, indent=2)}\n```", labels.step)
        accelerator.trackers.append(tracker)


def close_trackers(accelerator: Accelerator) -> None:
    """Close and forget the trackers that are open. Idempotent."""
    while accelerator.trackers:
        accelerator.trackers.pop().finish()


def settings_of(recipe: Recipe, arm: str) -> dict[str, Any]:
    """Settings of an arm by dotted key: the recipe's, and the arm's under `arm`.

    Example:
        >>> content = {"name": "x", "model": "tiny-qwen3", "batches": 2, "method": "gspo"}
        >>> settings = settings_of(Recipe.model_validate(content), "gspo")
        >>> settings["arm.method"], settings["lag.sync_every"]
        ('gspo', 1)
    """
    content = recipe.model_dump(mode="json", by_alias=True)
    content["arm"] = {"name": arm, **content.pop("arms")[arm]}
    return dict(_flat(content, ""))


def _flat(values: Mapping[str, Any], path: str) -> Any:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value if isinstance(value, (bool, int, float, str)) else json.dumps(value)
