"""verl: every method as a policy loss, estimators, the driver's correction, and records.

Entry point of group `verl.plugins`. verl imports this module in every process, driver and workers,
and importing it arranges the following, for the time when verl's own modules are imported:

    core_algos             policy losses `offdrift/<method>` and estimators `offdrift/<name>`,
                           `offdrift/<name>/kept` are registered
    rollout_corr_helper    bypass mode leaves `offdrift/<method>` as the loss; `install` is called if
                           OFFDRIFT_METHOD or OFFDRIFT_RECORD is set

No module of verl is imported here. verl hides errors of its plugins, so this one reports its own
success, and its failure, to the log "offdrift.verl".
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from offdrift.adapters import environment
from offdrift.adapters.frameworks import after_import, require
from offdrift.errors import FrameworkError

if TYPE_CHECKING:
    from offdrift.adapters.base import OnIdle
    from offdrift.adapters.verl.driver import Driver
    from offdrift.judge import Context
    from offdrift.methods import Method
    from offdrift.records.recorder import Recorder

LOG = logging.getLogger("offdrift.verl")
CORE = "verl.trainer.ppo.core_algos"
HELPER = "verl.trainer.ppo.rollout_corr_helper"
TRAINER = "verl.trainer.ppo.ray_trainer"
TRAINER_V1 = "verl.trainer.ppo.v1.trainer_base"
HOMES = (HELPER, TRAINER, TRAINER_V1)
"""Modules that hold what `install` replaces."""

FROM_BLOCK = "rollout_correction"
"""OFFDRIFT_METHOD that takes verl's own configuration block instead of a row."""

RECORDED_V1 = [
    "responses",
    "response_mask",
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_prob",
    "advantages",
    "rm_scores",
    "uid",
]


def register(core: ModuleType) -> None:
    """Register policy losses and estimators with verl's `core_algos`. Twice is once.

    Rows that need what verl does not pass are registered, too, and say so when they are called.
    """
    from offdrift.adapters.verl.advantages import advantage_named, estimator_names
    from offdrift.adapters.verl.losses import modes, policy_loss_named
    from offdrift.methods import METHODS

    for name in METHODS:
        if f"offdrift/{name}" not in core.POLICY_LOSS_REGISTRY:
            core.register_policy_loss(f"offdrift/{name}")(policy_loss_named(name))
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

    Raises: `FrameworkError` if verl is missing or too old; `MethodError` for an unknown method, or
        one whose driver's share depends on advantages.
    """
    from offdrift.adapters.verl.driver import Driver

    require("verl")
    uninstall()
    _STATE["driver"] = driver = Driver(
        method, settings=settings, record=record, context=context, rules=rules, on_idle=on_idle
    )
    for home in HOMES:
        after_import(home, _take_over)
    LOG.info("installed in verl's driver: %s", driver.describe())


def uninstall() -> None:
    """Give verl its own functions back and close the records. Without `install`, nothing."""
    driver = _STATE.pop("driver", None)
    for owner, name, original in _STATE.pop("replaced", []):
        ours = getattr(owner, name)
        setattr(owner, name, original)
        _rebind(name, ours, original)
    if driver is not None:
        driver.close()


_STATE: dict[str, Any] = {}


def _take_over(module: ModuleType) -> None:
    """Replace what the module holds, once, if something is installed."""
    if "driver" not in _STATE:
        return
    taken = {(id(owner), name) for owner, name, _ in _STATE.get("replaced", [])}
    for owner, name, make in _replacements(module):
        if (id(owner), name) in taken:
            continue
        original = getattr(owner, name)
        ours = functools.wraps(original)(make(_STATE["driver"], original))
        _STATE.setdefault("replaced", []).append((owner, name, original))
        setattr(owner, name, ours)
        _rebind(name, original, ours)


def _replacements(module: ModuleType) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Owner, name and maker of each function that a module of verl defines and we replace."""

    def corrector(driver: Driver, _original: Any) -> Callable[..., Any]:
        return lambda batch, rollout_corr_config: driver.correct(batch, rollout_corr_config)

    return {
        HELPER: [(module, "compute_rollout_correction_and_add_to_batch", corrector)],
        TRAINER: [(module, "compute_advantage", _estimator)],
        TRAINER_V1: [(getattr(module, "PPOTrainer", None), "_compute_advantage", _recorder_v1)],
    }[module.__name__]


def _rebind(name: str, old: Any, new: Any) -> None:
    """Change what other modules imported by name: verl's v1 trainer, recipes, a trainer of yours."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)


def _keep_our_loss(helper: ModuleType) -> None:
    """verl's v0 trainer overwrites the loss in bypass mode; one of ours is not, installed or not."""
    name = "apply_bypass_mode"
    original = getattr(helper, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def apply(batch: Any, rollout_corr_config: Any = None, policy_loss_config: Any = None) -> None:
        chosen = policy_loss_config["loss_mode"]
        original(batch, rollout_corr_config, policy_loss_config)
        if str(chosen).startswith("offdrift/"):
            policy_loss_config["loss_mode"] = chosen

    setattr(helper, name, apply)
    _rebind(name, original, apply)


def _estimator(driver: Driver, original: Any) -> Callable[..., Any]:
    def compute(
        data: Any,
        adv_estimator: Any,
        gamma: float = 1.0,
        lam: float = 1.0,
        num_repeat: int = 1,
        norm_adv_by_std_in_grpo: bool = True,
        config: Any = None,
    ) -> Any:
        options = {"lam": lam, "num_repeat": num_repeat, "config": config}
        options["norm_adv_by_std_in_grpo"] = norm_adv_by_std_in_grpo
        return driver.advantages(original, data, adv_estimator, gamma, **options)

    return compute


def _recorder_v1(driver: Driver, original: Any) -> Callable[..., Any]:
    """The v1 trainer's tokens are in its transfer queue, the versions in the tags of its keys."""

    def compute(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = original(self, batch, metrics)
        if driver.records:
            real = [i for i, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
            fields = sys.modules[TRAINER_V1].tq.kv_batch_get(
                keys=[batch.keys[i] for i in real], partition_id=batch.partition_id, select_fields=RECORDED_V1
            )
            fields = fields.to_padded_tensor()
            versions = [batch.tags[i].get("min_global_steps") for i in real]
            driver.record(
                fields,
                fields["uid"].tolist(),
                step=self.global_steps,
                version=self.global_steps - 1,
                rollout_version=None if None in versions else torch.tensor(versions),
            )
        return batch

    return compute


def _from_environment(_module: ModuleType) -> None:
    """`install` as OFFDRIFT_METHOD and OFFDRIFT_RECORD ask; see `environment`."""
    name, record = environment.method(), environment.record()
    if "driver" in _STATE or not (name or record):
        return
    chosen = None if name in (None, "", FROM_BLOCK) else name
    options = environment.options()
    install(chosen, **(options if chosen else options | {"settings": {}}))


def _register_or_say_why(core: ModuleType) -> None:
    """A verl that we do not know stays usable without us."""
    try:
        require("verl")
        register(core)
    except FrameworkError as e:
        LOG.error("nothing registered with verl: %s", e)


def _plug_in() -> None:
    if LOG.level == logging.NOTSET:  # verl shows warnings alone, and liveness must be seen
        LOG.setLevel(logging.INFO)
    after_import(CORE, _register_or_say_why)
    after_import(HELPER, _keep_our_loss)
    after_import(HELPER, _from_environment)
    for home in HOMES:
        after_import(home, _take_over)


_plug_in()
