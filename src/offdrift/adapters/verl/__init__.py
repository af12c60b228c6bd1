"""verl: every method as a policy loss, estimators, the driver's correction, and records.

Entry point of group `verl.plugins`, which verl imports in every process. No module of verl is imported
here; what follows is arranged for the time when verl's own modules are imported:

    core_algos             policy losses `offdrift/<method>` and estimators `offdrift/<name>`,
                           `offdrift/<name>/kept` are registered; `offdrift//folder/mine.py:mine` is code
    rollout_corr_helper    bypass mode leaves `offdrift/<method>` as the loss; `install` is called if
                           OFFDRIFT_METHOD or OFFDRIFT_RECORD is set

verl hides errors of its plugins: success and failure are reported to the log "offdrift.verl".
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from offdrift.adapters.frameworks import Replacements, after_import, require
from offdrift.errors import FrameworkError

if TYPE_CHECKING:
    from offdrift.adapters.base import OnIdle
    from offdrift.adapters.selection import Choice
    from offdrift.adapters.verl.driver import Driver
    from offdrift.judge import Context
    from offdrift.methods import Method
    from offdrift.records.recorder import Recorder

LOG = logging.getLogger("offdrift.verl")
CORE = "verl.trainer.ppo.core_algos"
HELPER = "verl.trainer.ppo.rollout_corr_helper"
TRAINER = "verl.trainer.ppo.ray_trainer"
TRAINER_V1 = "verl.trainer.ppo.v1.trainer_base"
TAKEN_OVER = {
    HELPER: "compute_rollout_correction_and_add_to_batch",
    TRAINER: "compute_advantage",
    TRAINER_V1: "_compute_advantage",
}
"""What a driver replaces in each module; in the last, a method of `PPOTrainer`."""
RLLM = "rllm.trainer.verl.verl_backend"
FROM_BLOCK = "rollout_correction"
"""OFFDRIFT_METHOD that takes verl's own configuration block instead of a row."""

RECORDED_V1 = ["responses", "response_mask", "rollout_log_probs", "old_log_probs", "ref_log_prob"]
RECORDED_V1 += ["advantages", "rm_scores", "uid"]

_STATE: dict[str, Driver] = {}
"""The installed driver, or nothing."""
_REPLACED = Replacements()


def register(core: ModuleType) -> None:
    """Register policy losses and estimators with verl's `core_algos`. Twice is once.

    Rows that need what verl does not pass are registered, too, and say so when they are called.
    """
    from offdrift.adapters.verl.driver import advantage_named, estimator_names
    from offdrift.adapters.verl.losses import modes, policy_loss_named, with_code
    from offdrift.methods import METHODS

    for name in METHODS:
        if f"offdrift/{name}" not in core.POLICY_LOSS_REGISTRY:
            core.register_policy_loss(f"offdrift/{name}")(policy_loss_named(name))
    find = getattr(core, "get_policy_loss_fn", None)
    if find is not None and not hasattr(find, "__wrapped__"):
        Replacements().replace(core, "get_policy_loss_fn", with_code(find), everywhere=True)
    names = estimator_names()
    for name in names:
        if f"offdrift/{name}" not in core.ADV_ESTIMATOR_REGISTRY:
            core.register_adv_est(f"offdrift/{name}")(advantage_named(name))
    idle = sum(modes(row) == "none" for row in METHODS.values())
    LOG.info(
        "registered %d policy losses offdrift/<method> with verl (%d of them need what verl does not "
        "pass, and say so when called) and %d estimators offdrift/<name>",
        len(METHODS),
        idle,
        len(names),
    )


def install(
    method: str | Method | None = None,
    *,
    settings: Mapping[str, Any] = {},
    record: Recorder | str | Path | None = None,
    context: Context | None = None,
    rules: Path | None = None,
    on_idle: OnIdle = "error",
    metrics: Choice | None = None,
) -> None:
    """Put this library in the place of verl's driver-side correction, in this process.

    Call it in the process that runs the trainer (verl's TaskRunner, which is an actor of Ray): from
    your own main, or by setting OFFDRIFT_METHOD for that process. A second call replaces the first.

    Args:
        method: the row whose parts on the mismatch correct; its other parts are the policy loss
            `offdrift/<method>`. None: what `algorithm.rollout_correction` says.
        settings: single values of the row, as paths for `override`.
        record: folder (or `Recorder`) for tokens, log-probs, advantages, versions and groups.
        context, rules: for the diagnosis, see `Adapter`.
        on_idle: "warn" logs that a configured part cannot act, "error" ends the run.
        metrics: those that are logged, as `Adapter` takes them.

    Raises: `FrameworkError` if verl is missing or too old; `MethodError` for an unknown method, or
        one whose driver's share depends on advantages.
    """
    from offdrift.adapters.verl.driver import Driver

    require("verl")
    uninstall()
    _STATE["driver"] = driver = Driver(
        method, settings=settings, record=record, context=context, rules=rules, on_idle=on_idle, metrics=metrics
    )
    for home in TAKEN_OVER:
        after_import(home, _take_over)
    LOG.info("installed in verl's driver: %s", driver.describe())


def uninstall() -> None:
    """Give verl its own functions back and close the records. Without `install`, nothing."""
    _REPLACED.restore()
    driver = _STATE.pop("driver", None)
    if driver is not None:
        driver.close()


def _take_over(module: ModuleType) -> None:
    """Replace the function that one of verl's modules defines, once, if a driver is installed."""
    driver = _STATE.get("driver")
    if driver is None:
        return
    holder: Any = module.PPOTrainer if module.__name__ == TRAINER_V1 else module
    name = TAKEN_OVER[module.__name__]
    if (holder, name) in _REPLACED:
        return
    original = getattr(holder, name)

    def correct(batch: Any, rollout_corr_config: Any) -> Any:
        return driver.correct(batch, rollout_corr_config, theirs=original)

    def advantages(*positional: Any, **named: Any) -> Any:
        call = inspect.signature(original).bind(*positional, **named)
        call.apply_defaults()
        return driver.advantages(original, **call.arguments)

    def advantages_v1(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        """The v1 trainer's tokens are in its transfer queue, the versions in the tags of its keys."""
        batch = original(self, batch, metrics)
        if driver.records:
            real = [i for i, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
            fields = sys.modules[TRAINER_V1].tq.kv_batch_get(
                keys=[batch.keys[i] for i in real], partition_id=batch.partition_id, select_fields=RECORDED_V1
            )
            fields, uids = fields.to_padded_tensor(), fields["uid"].tolist()
            versions = [batch.tags[i].get("min_global_steps") for i in real]
            drawn_at = None if None in versions else torch.tensor(versions)
            step = self.global_steps
            driver.record(fields, uids, step=step, version=step - 1, rollout_version=drawn_at)
        return batch

    ours = {HELPER: correct, TRAINER: advantages, TRAINER_V1: advantages_v1}[module.__name__]
    _REPLACED.replace(holder, name, functools.wraps(original)(ours), everywhere=True)


def _plug_in(module: ModuleType) -> None:
    """Register with verl when its core module is loaded; elsewhere, keep our loss in verl's bypass mode."""
    if module.__name__ == CORE:
        try:
            require("verl")
            register(module)
        except FrameworkError as e:  # a verl that we do not know stays usable without us
            LOG.error("nothing registered with verl: %s", e)
        return
    original = getattr(module, "apply_bypass_mode", None)
    if original is not None:
        # verl's v0 trainer overwrites the loss in bypass mode; one of ours stays, installed or not.
        @functools.wraps(original)
        def apply(batch: Any, rollout_corr_config: Any = None, policy_loss_config: Any = None) -> None:
            chosen = policy_loss_config["loss_mode"]
            original(batch, rollout_corr_config, policy_loss_config)
            if str(chosen).startswith("offdrift/"):
                policy_loss_config["loss_mode"] = chosen

        Replacements().replace(module, "apply_bypass_mode", apply, everywhere=True)
    from offdrift.adapters.base import environ, environ_on_idle, environ_settings

    name, folder = environ("METHOD"), environ("RECORD")
    if "driver" not in _STATE and (name or folder):
        row, settings = None if name == FROM_BLOCK else name, environ_settings()
        install(row, settings=settings if row else {}, record=folder, on_idle=environ_on_idle())


def _watch_rllm(module: ModuleType) -> None:
    """Refuse before training what rLLM's unified trainer leaves out."""
    from offdrift.adapters.verl.rllm import watch

    watch(module)


if LOG.level == logging.NOTSET:  # verl shows warnings alone, and liveness must be seen
    LOG.setLevel(logging.INFO)
for _module in (CORE, HELPER):
    after_import(_module, _plug_in)
for _module in TAKEN_OVER:
    after_import(_module, _take_over)
after_import(RLLM, _watch_rllm)
