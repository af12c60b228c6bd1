"""The training loop: the steps of an update, in their order.

    offdrift train recipes/tiny.toml

`train` runs one arm after the other; `train_arm` is the update. `arm` has the state of an arm, `context` what all
arms share.

Sampling and training alternate in one process (`accelerate launch` runs several such processes side by side), or, with
`[pipeline]` in the recipe, workers sample while it trains (`train.pipeline`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from jaxtyping import Int
from torch import Tensor

from offdrift.engines import make_engine
from offdrift.judge import Rules
from offdrift.methods.load import displayed
from offdrift.methods.method import flattened
from offdrift.methods.published import outside_ranges
from offdrift.models import resident, save_for_engine
from offdrift_lab.train.data.episodes import rollout
from offdrift_lab.train.data.source import Source, batch_seed
from offdrift_lab.train.features.lora_adapters import engine_weights
from offdrift_lab.train.loop.arm import Arm, diagnosed, start_arm
from offdrift_lab.train.loop.batch import Batch, StreamedBatch, next_batch
from offdrift_lab.train.loop.context import Event as Event
from offdrift_lab.train.loop.context import RunContext, Watch, begin, model_facts, rules_of_run, set_up
from offdrift_lab.train.loop.record import TokenLog, record_update, summarize_arm
from offdrift_lab.train.loop.run_folder import RunFolder
from offdrift_lab.train.loop.sharded import make_accelerator, whole_weights
from offdrift_lab.train.loop.step import train_step
from offdrift_lab.train.loop.trackers import close_trackers
from offdrift_lab.train.report.diagnosis import facts_of
from offdrift_lab.train.settings.recipe import Recipe


def train(
    recipe: Recipe,
    path: Path,
    *,
    resume: bool = False,
    rules: Rules | None = None,
    watch: Watch = lambda event: None,
) -> list[dict[str, Any]]:
    """Train every arm of a recipe; everything the run produces is in its folder.

    Args:
        path: the run's folder; created, or continued with `resume`.
        resume: finished arms are kept, the interrupted one continues from its newest checkpoint with
            the same random streams, the rest follow.
        rules: by which the run is judged, stored in its record; default: those of the recipe (`diagnosis.rules`), else
            the built-in ones. A run that is resumed keeps those it was started with.
        watch: called with every event, such as each update.

    Returns: the final table, one summary per arm.

    Raises: `SyncError` if the engine does not take the trainer's weights; `RecordError` if the
        folder cannot be written; `CheckpointError` if there is nothing, or something else, to resume.
    """
    folder, started = RunFolder(path), time.perf_counter()
    head = begin(recipe, folder, resume, rules)
    run = set_up(recipe, folder, watch, rules_of_run(recipe, head, rules, str(path / "run.json")))
    head |= {
        "model": model_facts(recipe, run.model),
        "zero_update": asdict(run.synced.zero_update),
        "trained_return": {name: recipe.trained_return(name) for name in recipe.arms},
        "contexts": {name: facts_of(diagnosed(run, name)) for name in recipe.arms},
    }
    if run.accelerator.is_main_process:
        folder.create(head)
    table = []
    try:
        for name in recipe.arms:
            table.append(train_arm(run, name, resume=resume))
            seconds = head.get("seconds_before", 0.0) + time.perf_counter() - started
            if run.accelerator.is_main_process:
                folder.create({**head, "seconds": seconds, "table": table})
    finally:
        run.engine.close()
    return table


def train_arm(run: RunContext, name: str, *, resume: bool) -> dict[str, Any]:
    """Train one arm from the shared start, or from its newest checkpoint; returns its summary."""
    summary = run.folder.arm(name).summary()
    if resume and summary is not None:
        run.watch(Event("arm_done", name, text="already finished", metrics=summary))
        return summary
    try:
        arm, source = start_arm(run, name, resume=resume)
        try:
            return train_batches(arm, source)
        finally:
            source.close()
    finally:
        close_trackers(run.accelerator)
        run.accelerator.free_memory()


def train_batches(arm: Arm, source: Source) -> dict[str, Any]:
    """Train an arm on the batches that are left; returns its summary."""
    recipe, log = arm.run.recipe, arm.run.recipe.log
    checkpointed = source.start
    if source.start % log.eval_every == 0:
        evaluate(arm)
    for index in range(source.start, recipe.batches):
        # Draw: responses and rewards, from engine weights that may lag behind the trainer's.
        # Advantages: from rewards, and from what old policy, trainer and reference say of the batch.
        arm.announce(f"drawing batch {index + 1}")
        for feature in arm.features:
            feature.drawing(arm)
        batch = next_batch(arm, source)
        arm.announce(f"training on batch {index + 1}")
        take_steps(arm, batch, source, index)
        arm.trim(source)
        # Publish: engines take new weights as often as the lag, or the schedule, says. A checkpoint is taken only
        # then, so that the newest weights of the engines are the trainer's and need not be stored.
        done = index + 1
        due = done < recipe.batches and source.due(arm.version)
        checkpoint = due and done - checkpointed >= log.checkpoint_every
        if due:
            arm.announce("giving the engine new weights")
            arm.publish(source)
        source.trained(checkpoint=checkpoint)
        if checkpoint:
            arm.save_checkpoint(done, source)
            checkpointed = done
        if done % log.eval_every == 0 or done == recipe.batches:
            evaluate(arm)
    return finish(arm)


def take_steps(arm: Arm, batch: Batch | StreamedBatch, source: Source, index: int) -> None:
    """Take the steps on a batch and record each: metrics, certificate, findings, samples; all tokens, for audits."""
    run, log = arm.run, arm.run.recipe.log
    first_version, token_log = arm.version, TokenLog(of_old=arm.logs_old_divergences)
    units = batch.units(whole_prompts=arm.method.whole_prompts)
    for epoch, sequences in minibatches(run.recipe, index, units):
        version, learning_rate = arm.version, arm.learning_rate
        sampled, logged = version % log.samples_every == 0, log.tokens and epoch == 0
        last = log.tokens and 0 < epoch == run.recipe.optim.epochs - 1
        # Dropout, if a model has any, must be the same in a resumed run.
        torch.manual_seed(batch_seed(run.recipe.seed, version, run.shard.rank))
        update = train_step(arm, batch.minibatch(sequences), view=sampled or logged or last)
        if isinstance(batch, StreamedBatch):
            batch = update.batch
        stats = update.stats.plus(run.sums(source.sums(batch.picked, version)))
        update = replace(update, stats=stats.plus(run.sums(batch.sums)) if batch.sums else stats)
        arm.advance(update.method)
        token_log.add(sequences, update, version, logged=logged, last=last)
        metrics = record_update(
            arm,
            update,
            batch=index,
            updates_before=version - first_version,
            epoch=epoch,
            independent=batch.picked.independent,
            learning_rate=learning_rate,
            sampled=sampled,
            more=source.metrics(batch.rollouts, first_version) if version == first_version else {},
        )
        arm.learn(metrics)
        source.learn(metrics)
    if log.tokens and isinstance(batch, Batch):
        replayed = arm.replay.replayed(batch.rollouts)
        token_log.write(batch, arm.files.path / "log" / run.shard.file_name(index), replayed=replayed)


def minibatches(
    recipe: Recipe, index: int, units: Int[Tensor, " b"] | None
) -> Iterator[tuple[int, Int[Tensor, " k"] | None]]:
    """The sequences of every optimizer step on a batch, None for all, with the epoch that the step is of.

    Args:
        units: a number per sequence; sequences of one number are in one step. None: the batch is never cut.
    """
    optim = recipe.optim
    if units is None or optim.epochs == optim.minibatches == 1:
        yield 0, None
        return
    _, unit = units.unique(return_inverse=True)
    counts = unit.bincount()
    for epoch in range(optim.epochs):
        g = torch.Generator().manual_seed(batch_seed(recipe.seed, index, epoch))
        drawn = torch.randperm(len(counts), generator=g)
        order = drawn.argsort()[unit].argsort(stable=True)
        for part in order.split([int(counts[x].sum()) for x in drawn.tensor_split(optim.minibatches)]):
            yield epoch, part


def evaluate(arm: Arm) -> None:
    """Mean reward of the current policy on held-out prompts, drawn at float32 by transformers: avg@k with k samples."""
    run, log = arm.run, arm.run.recipe.log
    prompts, samples = log.eval_prompts, log.eval_samples
    arm.announce(f"evaluating on {prompts} held-out prompts")
    changed = {"temperature": log.eval_temperature, "top_p": log.eval_top_p}
    sampling = replace(run.sampling, **{name: x for name, x in changed.items() if x is not None})
    problems = run.task.sample(prompts, seed=run.recipe.seed, split="eval")
    with resident(run.model, run.accelerator.device) as start:
        # What is trained on the rollouts' grid is a policy there.
        grid = run.recipe.grid if arm.quantized.forward else None
        engine = make_engine("transformers", start, dtype="float32", quantization=grid, batch_size=256)
    engine.load_weights(whole_weights(arm.inner), version=arm.version)
    responses = rollout(
        engine,
        problems[run.shard.rank :: run.shard.world],
        run.task,
        run.tokenizer,
        sampling,
        samples=samples,
        seed=batch_seed(run.recipe.seed, 0, run.shard.rank),
        max_turns=run.recipe.max_turns,
    )
    assert responses.rewards is not None
    total = float(run.sum(responses.rewards.double().sum()))
    reward = total / (samples * len(problems))
    row = {"update": arm.version, "reward": reward, "prompts": len(problems), "samples": samples}
    if run.accelerator.is_main_process:
        arm.files.append("eval", row)
    arm.diagnosis.held_out = reward
    run.accelerator.log({"eval/reward": row["reward"]}, step=arm.version)
    arm.report("eval", metrics=row)
    arm.last_time = time.perf_counter()


def finish(arm: Arm) -> dict[str, Any]:
    """Store the model and the arm's row of the table."""
    run = arm.run
    run.accelerator.wait_for_everyone()
    metrics = arm.files.rows("metrics")
    summary = summarize_arm(
        arm.name,
        arm.method,
        displayed(arm.recipe.arms[arm.name].method),
        metrics,
        arm.files.rows("eval"),
        seconds=sum(m["throughput/seconds"] for m in metrics),
        findings=arm.diagnosis.summary(),
        old_policy=arm.old_settings.source,
    )
    changes = dict(flattened(arm.recipe.arms[arm.name].override))
    summary["notes"] += outside_ranges(arm.recipe.row(arm.name), changes)
    if arm.switched:
        first = next(m["update"] for m in metrics if m["optim/method_switched"])
        was, now = (displayed(r.arms[arm.name].method) for r in (run.recipe, arm.recipe))
        summary["notes"].append(f"responses had become longer: {was} until then, {now} from update {first} on")
    weights = {}
    for name, weight in engine_weights(arm.inner, on="cpu"):
        if run.accelerator.is_main_process:
            weights[name] = weight
    if run.accelerator.is_main_process:
        with arm.files.storing("model") as path:
            save_for_engine(run.model, run.tokenizer, path, weights=weights)
        for feature in arm.features:
            feature.finished(arm)
        arm.files.finish(summary)
    arm.report("arm_done", metrics=summary)
    return summary


def agree(choice: Path | None) -> Path:
    """The main process's choice, in every process of the run."""
    if make_accelerator().num_processes > 1:
        (choice,) = broadcast_object_list([choice])
    assert choice is not None
    return choice
