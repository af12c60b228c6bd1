"""The training loop: the steps of an update, in their order.

    offdrift train recipes/tiny.toml

`train` runs one arm after the other; `train_arm` is the update. `arm` has the state of an arm, `context` what all
arms share.

Sampling and training alternate in one process (`accelerate launch` runs several such processes side by side), or, with
`[pipeline]` in the recipe, workers sample while it trains (`train.pipeline`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from jaxtyping import Int
from torch import Tensor

from offdrift.engines import make_engine
from offdrift.train.arm import Arm, start_arm
from offdrift.train.batch import Batch, Parts, make_batch
from offdrift.train.context import Event as Event
from offdrift.train.context import RunContext, Watch, begin, model_facts, set_up
from offdrift.train.critic import critic_step
from offdrift.train.lora import merged_weights, save_adapter
from offdrift.train.models import resident, save_for_engine
from offdrift.train.recipe import Recipe
from offdrift.train.record import TokenLog, record_update, summarize_arm
from offdrift.train.run_folder import RunFolder
from offdrift.train.sharded import make_accelerator, whole_weights
from offdrift.train.source import Source, batch_seed, rollout
from offdrift.train.step import TokenView, Update, train_step


def train(
    recipe: Recipe, path: Path, *, resume: bool = False, watch: Watch = lambda event: None
) -> list[dict[str, Any]]:
    """Train every arm of a recipe; everything the run produces is in its folder.

    Args:
        path: the run's folder; created, or continued with `resume`.
        resume: finished arms are kept, the interrupted one continues from its newest checkpoint with
            the same random streams, the rest follow.
        watch: called with every event, such as each update.

    Returns: the final table, one summary per arm.

    Raises: `SyncError` if the engine does not take the trainer's weights; `RecordError` if the
        folder cannot be written; `CheckpointError` if there is nothing, or something else, to resume.
    """
    folder, started = RunFolder(path), time.perf_counter()
    head = begin(recipe, folder, resume)
    run = set_up(recipe, folder, watch)
    head |= {"model": model_facts(recipe, run.model), "raises": {name: recipe.raises(name) for name in recipe.arms}}
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
    arm, source = start_arm(run, name, resume=resume)
    try:
        return train_batches(arm, source)
    finally:
        source.close()


def train_batches(arm: Arm, source: Source) -> dict[str, Any]:
    """Train an arm on the batches that are left; returns its summary."""
    run, recipe, log = arm.run, arm.run.recipe, arm.run.recipe.log
    checkpointed = source.start
    if source.start % log.eval_every == 0:
        evaluate(arm)
    for index in range(source.start, recipe.batches):
        # Draw: responses and rewards, from engine weights that may lag behind the trainer's.
        # Advantages: from rewards, and from what old policy, trainer and reference say of the batch.
        arm.announce(f"drawing batch {index + 1}")
        arm.switch()
        first_version = arm.version
        steps: Iterable[tuple[int, Tensor | None]] = [(0, None)]
        if source.streams:  # groups come while the only step takes their gradient
            batch: Batch | Parts = Parts(arm, source.parts())
            arm.keep_old_weights(None, source)
        else:
            batch = make_batch(arm, source.next(arm.version))
            batch = replace(batch, sums={**batch.sums, **arm.teach_drafter(batch.rollouts, source)})
            arm.keep_old_weights(batch.rollouts, source)
            steps = minibatches(recipe, index, batch.units(whole_prompts=arm.method.whole_prompts))
        # Optimizer steps.
        views: list[tuple[Tensor, TokenView, int]] = []
        again: list[tuple[Tensor, TokenView]] = []  # the last of several epochs
        for epoch, sequences in steps:
            minibatch = batch if isinstance(batch, Parts) or sequences is None else batch.select(sequences)
            version, learning_rate = arm.version, arm.learning_rate
            sampled, logged = version % log.samples_every == 0, log.tokens and epoch == 0
            last = log.tokens and 0 < epoch == recipe.optim.epochs - 1
            before = arm.survival()
            update = take_step(arm, minibatch, learning_rate=learning_rate, view=sampled or logged or last)
            if before is not None:
                update = replace(update, stats=update.stats.plus(before.sums(arm.weights())))
            if arm.published_sigma is not None:
                update = replace(update, stats=update.stats.plus({}, {"grid/noise_sigma": arm.published_sigma}))
            if isinstance(batch, Parts):
                batch = batch.joined()
            if isinstance(minibatch, Parts):
                minibatch, sequences = batch, torch.arange(batch.rollouts.num_sequences)
            assert sequences is not None
            if arm.critic is not None and not recipe.critic.shared:
                update = replace(update, stats=update.stats.plus(*learn_values(arm, minibatch)))
            update = replace(update, stats=update.stats.plus(run.sums(source.sums(batch.picked, version))))
            if batch.sums:
                update = replace(update, stats=update.stats.plus(run.sums(batch.sums)))
            arm.advance(update.method)
            # Record: metrics, certificate, findings, samples; for the audit, every token.
            if logged and update.tokens is not None:
                views.append((sequences, update.tokens, version))
            if last and update.tokens is not None:
                again.append((sequences, update.tokens))
            metrics = record_update(
                arm,
                minibatch.rollouts,
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
            if source.buffer is not None:
                source.buffer.learn(metrics)
        if log.tokens:
            assert isinstance(batch, Batch)
            replayed = arm.replay.replayed(batch.rollouts)
            token_log = TokenLog(batch, arm.logs_old_divergences, replayed, views, again)
            token_log.write(arm.files.path / "log" / run.shard.file_name(index))
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


def take_step(arm: Arm, batch: Batch | Parts, *, learning_rate: float, view: bool) -> Update:
    """An optimizer step of the arm on a batch, or on one whose parts are still to come."""
    run, recipe = arm.run, arm.run.recipe
    # Dropout, if a model has any, must be the same in a resumed run.
    torch.manual_seed(batch_seed(recipe.seed, arm.version, run.shard.rank))
    return train_step(
        run.accelerator,
        arm.model,
        arm.optimizer,
        batch,
        arm.method,
        token_budget=recipe.optim.token_budget,
        max_grad_norm=recipe.optim.max_grad_norm,
        learning_rate=learning_rate,
        version=arm.version,
        view=view,
        region=arm.region,
        half=run.half,
        loss_scale=arm.loss_scale.value if run.half is torch.float16 else None,
        critic=arm.critic if recipe.critic.shared else None,
        align=arm.align,
        perturb=arm.perturb,
        skip_empty=recipe.optim.skip_empty,
    )


def minibatches(recipe: Recipe, index: int, units: Int[Tensor, " b"]) -> Iterator[tuple[int, Tensor]]:
    """The sequences of every optimizer step on a batch, with the epoch that the step is of.

    Args:
        units: a number per sequence; sequences of one number are in one step.
    """
    optim = recipe.optim
    if optim.epochs == optim.minibatches == 1:
        yield 0, torch.arange(len(units))
        return
    _, unit = units.unique(return_inverse=True)
    counts = unit.bincount()
    for epoch in range(optim.epochs):
        g = torch.Generator().manual_seed(batch_seed(recipe.seed, index, epoch))
        drawn = torch.randperm(len(counts), generator=g)
        order = drawn.argsort()[unit].argsort(stable=True)
        for part in order.split([int(counts[x].sum()) for x in drawn.tensor_split(optim.minibatches)]):
            yield epoch, part


def learn_values(arm: Arm, minibatch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The critic's step on a minibatch; its sums and maxima."""
    optim, critic = arm.run.recipe.optim, arm.critic
    assert critic is not None
    assert minibatch.values is not None
    assert minibatch.returns is not None
    return critic_step(
        arm.run.accelerator,
        critic,
        minibatch.rollouts,
        minibatch.values,
        minibatch.returns,
        token_budget=optim.token_budget,
        max_grad_norm=optim.max_grad_norm,
    )


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
    engine.load_weights(whole_weights(run.accelerator.unwrap_model(arm.model)), version=arm.version)
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
        arm.recipe.arms[arm.name].method,
        metrics,
        arm.files.rows("eval"),
        seconds=sum(m["throughput/seconds"] for m in metrics),
        findings=arm.diagnosis.summary(),
        old_policy=arm.old_settings.source,
    )
    if arm.switched:
        first = next(m["update"] for m in metrics if m["optim/method_switched"])
        was, now = (r.arms[arm.name].method for r in (run.recipe, arm.recipe))
        summary["notes"].append(f"responses had become longer: {was} until then, {now} from update {first} on")
    model, weights = run.accelerator.unwrap_model(arm.model), {}
    adapted = run.recipe.lora is not None
    for name, weight in merged_weights(model) if adapted else whole_weights(model, on="cpu"):
        if run.accelerator.is_main_process:
            weights[name] = weight.cpu()
    if run.accelerator.is_main_process:
        with arm.files.storing("model") as path:
            save_for_engine(run.model, run.tokenizer, path, weights=weights)
        if arm.drafter is not None:
            with arm.files.storing("drafter") as path:
                save_for_engine(arm.drafter.model, run.tokenizer, path)
        if adapted:
            with arm.files.storing("adapter") as path:
                save_adapter(model, path)
        arm.files.finish(summary)
    for tracker in run.accelerator.trackers:
        tracker.finish()
    run.accelerator.free_memory()
    arm.report("arm_done", metrics=summary)
    return summary


def agree(choice: Path | None) -> Path:
    """The main process's choice, in every process of the run."""
    if make_accelerator().num_processes > 1:
        (choice,) = broadcast_object_list([choice])
    assert choice is not None
    return choice
