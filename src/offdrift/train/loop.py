"""The training run, told from top to bottom.

    offdrift train recipes/tiny.toml

For each arm: draw a batch (source) -> advantages -> minibatch steps (step) -> metrics, certificate,
records -> weights to the engine when the lag says so -> evaluation -> checkpoint.

Simplified on purpose: one learning rate, no critic; sampling and training alternate in one process
(`accelerate launch` runs several such processes side by side).
"""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from offdrift.methods import override
from offdrift.train import checkpoint
from offdrift.train.arm import Learner
from offdrift.train.context import Event as Event
from offdrift.train.context import Watch, Workshop, begin, model_facts, set_up
from offdrift.train.recipe import Recipe
from offdrift.train.run_folder import ArmFolder, RunFolder


def train(
    recipe: Recipe, path: Path, *, resume: bool = False, watch: Watch = lambda event: None
) -> list[dict[str, Any]]:
    """Train every arm of a recipe; everything the run produces is in its folder.

    Args:
        path: the run's folder; created, or continued with `resume`.
        resume: finished arms are kept, the interrupted one continues from its newest checkpoint with
            the same random streams, the rest follow.
        watch: told about every step.

    Returns: the final table, one summary per arm.

    Raises: `SyncError` if the engine does not take the trainer's weights; `RecordError` if the
        folder cannot be written; `CheckpointError` if there is nothing, or something else, to resume.
    """
    folder, started = RunFolder(path), time.perf_counter()
    head = begin(recipe, folder, resume)
    shop = set_up(recipe, folder, watch)
    head |= {"model": model_facts(recipe, shop.model)}
    if shop.accelerator.is_main_process:
        folder.create(head)
    table = []
    try:
        for name in recipe.arms:
            table.append(run_arm(shop, name, resume=resume))
            seconds = head.get("seconds_before", 0.0) + time.perf_counter() - started
            if shop.accelerator.is_main_process:
                folder.create({**head, "seconds": seconds, "table": table})
    finally:
        shop.engine.close()
    return table


def run_arm(shop: Workshop, name: str, *, resume: bool) -> dict[str, Any]:
    """Train one arm from the shared start, or from its newest checkpoint."""
    recipe, accelerator, files = shop.recipe, shop.accelerator, shop.folder.arm(name)
    done = files.summary()
    if resume and done is not None:
        shop.watch(Event("arm_done", name, text="already finished", metrics=done))
        return done
    row = recipe.row(name)
    model = copy.deepcopy(shop.model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.optim.lr, betas=(0.9, 0.95), weight_decay=0.0
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    at = _restore(shop, files, name, resume)
    accelerator.init_trackers(name, config=None)
    learner = Learner(shop, name, override(row, at.method), files, model, optimizer, at.version)
    shop.watch(Event("stage", name, text="giving the engine the arm's weights"))
    learner.publish()
    shop.watch(Event("arm", name, at.version, recipe.updates, text=row.describe()))
    source = learner.source(at)
    learner.resume(at, source)
    checkpointed = at.batch
    for index in range(at.batch, recipe.batches):
        if source.due(learner.version):
            shop.watch(Event("stage", name, text="giving the engine new weights"))
            learner.publish()
            if index - checkpointed >= recipe.log.checkpoint_every:
                learner.checkpoint(index, source, since=row)
                checkpointed = index
        if index % recipe.log.eval_every == 0:
            learner.evaluate()
        shop.watch(Event("stage", name, text=f"drawing batch {index + 1}"))
        rollouts = source.next(learner.version)
        after = learner.version + recipe.updates // recipe.batches
        learner.learn(index, rollouts, in_flight=source.in_flight(after))
    learner.evaluate()
    return learner.finish()


def agree(choice: Path | None) -> Path:
    """The main process's choice, in every process of the run."""
    if Accelerator().num_processes > 1:
        (choice,) = broadcast_object_list([choice])
    assert choice is not None
    return choice


def _restore(shop: Workshop, files: ArmFolder, name: str, resume: bool) -> checkpoint.Position:
    at = checkpoint.load(shop.accelerator, files.checkpoints) if resume else None
    if at is None:
        if shop.accelerator.is_main_process:
            files.clear()
        shop.accelerator.wait_for_everyone()
        return checkpoint.Position(0, 0)
    if shop.accelerator.is_main_process:
        files.cut_back(at.version, batch=at.batch)
    shop.accelerator.wait_for_everyone()
    shop.watch(
        Event("resume", name, at.version, shop.recipe.updates, text=f"from batch {at.batch}")
    )
    return at
