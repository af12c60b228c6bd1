"""rLLM's unified trainer over verl: its losses are verl's, its driver is its own.

It looks policy losses up in verl's registry, so that `rllm.algorithm.loss_fn=offdrift/METHOD` is trained with. Weights
of the mismatch it takes from verl's function by itself, and no correction, record or gate of the driver's side is
called: what asks for one of these is refused before training.

Reference: rLLM 0.3.0 (9beb6e0f6), `trainer/verl/verl_backend.py`: `CustomPPOLoss`, `VerlBackend.validate_config`,
`VerlBackend._update_actor_with_loss_routing`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from offdrift.adapters.base import environ
from offdrift.adapters.frameworks import Replacements
from offdrift.adapters.verl.losses import configured, driver_share
from offdrift.errors import MethodError
from offdrift.methods import METHODS

PREFIX = "offdrift/"


def refuse_unserved(losses: Iterable[str]) -> None:
    """Refuse what rLLM's unified trainer would leave out without a word.

    Args:
        losses: names of policy losses that a run may use; those of others than this library are left alone.

    Raises: `MethodError` for OFFDRIFT_METHOD and OFFDRIFT_RECORD, which only a driver of verl reads; for a method whose
        gates or weights are on the mismatch; for a name that verl's registry does not have, in whose place rLLM takes
        verl's own loss.
    """
    for name in ("METHOD", "RECORD"):
        if environ(name):
            raise MethodError(
                f"OFFDRIFT_{name} is set and has no effect in rLLM's unified trainer, which calls neither verl's "
                f"correction nor its advantages: unset it, choose the loss by rllm.algorithm.loss_fn={PREFIX}METHOD, "
                "and record with offdrift.record"
            )
    for loss in losses:
        if not str(loss).startswith(PREFIX):
            continue
        method = str(loss).removeprefix(PREFIX)
        if method not in METHODS:
            raise MethodError(f"{loss} is not in verl's registry: `offdrift methods` lists what is; rLLM takes no code")
        share = driver_share(configured(method))
        if share.gates or share.weights:
            parts = "; ".join(part.formula for part in (*share.gates, *share.weights))
            raise MethodError(
                f"{loss} leaves [{parts}] to verl's driver, and rLLM's has weights of its own "
                "(rllm.algorithm.rollout_correction.tis_mode): choose a method on the full ratio, with "
                "rllm.algorithm.rollout_correction.bypass_mode=true"
            )


def watch(module: ModuleType) -> None:
    """Have rLLM's backend ask `refuse_unserved` before training, and before each update for the losses of its roles."""
    backend: Any = module.VerlBackend
    if hasattr(backend.validate_config, "__wrapped__"):
        return
    validate, update = backend.validate_config, backend._update_actor_with_loss_routing

    @functools.wraps(validate)
    def validate_config(self: Any) -> None:
        refuse_unserved([self.config.actor_rollout_ref.actor.policy_loss.loss_mode])
        validate(self)

    @functools.wraps(update)
    def update_actor(self: Any, *positional: Any, **named: Any) -> None:
        refuse_unserved(getattr(self.algorithm_config, "loss_fn_map", {}).values())
        update(self, *positional, **named)

    Replacements().replace(backend, "validate_config", validate_config)
    Replacements().replace(backend, "_update_actor_with_loss_routing", update_actor)
