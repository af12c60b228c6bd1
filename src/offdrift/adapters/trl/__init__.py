"""TRL's GRPO trainer with a method of this library in it.

    trainer = OffdriftGRPOTrainer(model, reward, args=config, train_dataset=data,
                                  method="decoupled_token_is")

Two modes:

    mode="correct"   the method's gates and weights, in whichever loss `loss_type` names
    mode="loss"      the method's whole loss in place of TRL's; KL to the reference, entropy bonus and
                     router loss stay TRL's, and are added

A method without gates and weights (`method="disabled"`) with a record changes nothing: it measures and records.

TRL's own correction (`vllm_importance_sampling_correction`) is switched off where ours acts: together they would count
one ratio twice. Its metrics (`sampling/...`) stay. Metrics and findings are in TRL's logs under "offdrift/". Evaluation
is left alone.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from offdrift.adapters.base import Adapter, OnIdle
from offdrift.adapters.frameworks import require
from offdrift.adapters.selection import Choice
from offdrift.adapters.trl import batch as trl_batch
from offdrift.adapters.trl import proof
from offdrift.adapters.trl.batch import ENTROPY, MicroBatch
from offdrift.batch_info import LOGITS, Observed
from offdrift.errors import EvidenceError, FrameworkError, LivenessError, MethodError, check_choice
from offdrift.judge import Context
from offdrift.methods import Method, override
from offdrift.methods import method as row

if TYPE_CHECKING:
    from offdrift.adapters.trl.head import ReferenceDistance
    from offdrift.records.recorder import Recorder

    Base = Any  # a `GRPOTrainer`, which is looked up when it is needed
else:
    Base = object


Mode = Literal["correct", "loss"]


class OffdriftMixin(Base):
    """Put before a `GRPOTrainer` or a subclass of it: `class Mine(OffdriftMixin, GRPOTrainer)`.

    Args:
        positional: as the trainer's, and so are other keywords.
        method: name of a row of `METHODS`, or of code ("mine.py:mine"), or any composition.
        mode: what is taken of it, see the module.
        settings: single values of the method, as paths for `override`.
        record: where tokens are recorded: a folder, a `Recorder`, or True for `rollouts` beside
            TRL's completions; None records nothing.
        context: what else the diagnosis knows of the run.
        rules: a TOML file over the built-in rules.
        on_idle: whether a correction that cannot act is an error or a warning.
        metrics: those that TRL logs, as `Adapter` takes them.
        exact_reference: whether the exact KL to the reference policy is logged, `offdrift/reference/kl_exact`; costs a
            pass of the reference at every pass that trains. See `trl.head`.

    Raises: `FrameworkError` for a TRL that is missing or too old; `MethodError` for a method that cannot
        be used so, or a setting that would be ignored; `EvidenceError` if it needs whole distributions;
        `LivenessError` if TRL's generation gives no log-probs to correct with.
    """

    offdrift: Adapter
    """Metrics, findings (`trainer.offdrift.findings`) and records of the run."""
    _reference: ReferenceDistance | None = None

    def __init__(
        self,
        *positional: Any,
        method: str | Method,
        mode: Mode = "correct",
        settings: Mapping[str, Any] = {},
        record: Recorder | str | Path | bool | None = None,
        context: Context | None = None,
        rules: Path | None = None,
        on_idle: OnIdle = "error",
        metrics: Choice | None = None,
        exact_reference: bool = False,
        **named: Any,
    ) -> None:
        require("trl")
        proof.refuse_class(type(self), OffdriftMixin)
        check_choice("mode", mode, get_args(Mode))
        chosen = override(row(method) if isinstance(method, str) else method, settings)
        refuse_method(chosen, mode, records=bool(record))
        super().__init__(*positional, **named)
        folder = Path(str(self.args.output_dir)) / "rollouts" if record is True else record or None
        options = {"record": folder, "context": context, "rules": rules, "on_idle": on_idle, "metrics": metrics}
        adapter = Adapter(method, framework="trl", settings=settings, gather=self._everyone, **options)
        self._attach(adapter, mode, on_idle)
        if exact_reference:
            from offdrift.adapters.trl.head import ReferenceDistance

            self._reference = ReferenceDistance(self)
        if self.use_vllm and self.vllm_mode == "colocate":
            mend_sync(self.vllm_generation)

    def _attach(self, adapter: Adapter, mode: Mode, on_idle: OnIdle) -> None:
        self.offdrift, self._on_idle = adapter, on_idle
        self._mode: Mode = mode
        parts = adapter.method.correction
        self._acts = mode == "loss" or bool(parts.gates or parts.weights)
        self._corrects = self.vllm_importance_sampling_correction
        self.vllm_importance_sampling_correction = self._corrects and not self._acts
        self._rewards: Tensor | None = None
        self._scored: tuple[Tensor, Tensor, Tensor | None] | None = None
        self._generations = 0
        self._normalizer: float | None = None
        self._proved = False
        self._close()
        refuse_settings(self, adapter.method, mode)
        if not (self.use_vllm or self.rollout_func is not None):
            self._blind("TRL's own generation returns no log-probs")
        used = "; ".join(part.formula for part in (*parts.gates, *parts.weights))
        rest = f"in TRL's loss {self.loss_type!r}; the method's own objective is not used"
        if not self._acts:
            used, rest = "nothing", f"is changed in TRL's loss {self.loss_type!r}: it is measured and recorded"
        if mode == "loss":
            used = adapter.method.describe()
            rest = f"and TRL's loss_type={self.loss_type!r} only divides its own extra terms"
        adapter.log.info('mode="%s": %s, %s', mode, used, rest)

    def _calculate_rewards(self, *arguments: Any, **named: Any) -> Tensor:
        parts = super()._calculate_rewards(*arguments, **named)
        rewards = (parts * self.reward_weights.to(parts.device)).nansum(1)
        self._rewards = rewards.where(~parts.isnan().all(1), torch.nan)
        return parts

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        with self._own_correction():  # which also logs sampling/...
            output = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return output
        if "sampling_per_token_logps" not in output:
            self._blind("the generation returned no log-probs")
        output = trl_batch.marked(
            output,
            process=self.accelerator.process_index,
            earlier=self._generations * self.accelerator.num_processes,
            group=self.num_generations,
            version=self.state.global_step,
            rewards=self._rewards,
        )
        self._generations, self._rewards = self._generations + 1, None
        if "entropy" in self.offdrift.method.needs and "old_per_token_logps" in output:
            with torch.no_grad():
                size = self.args.per_device_train_batch_size
                output[ENTROPY] = self._score(self.model, output, batch_size=size)[1]
        return output

    @contextmanager
    def _own_correction(self) -> Iterator[None]:
        """TRL's own correction as its configuration has it, where ours does not act."""
        self.vllm_importance_sampling_correction = self._corrects
        try:
            yield
        finally:
            self.vllm_importance_sampling_correction = self._corrects and not self._acts

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> Any:
        """The forward pass; within TRL's loss, the one that was just made."""
        if self._scored is not None:
            scored, self._scored = self._scored, None
            return scored
        return super()._get_per_token_logps_and_entropies(*arguments, **named)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if not self.model.training:
            with self._own_correction():
                return super()._compute_loss(model, inputs)
        if not self._open:
            self._begin(model)
        logp, entropy, aux = self._score(model, inputs, compute_aux_loss=self.aux_loss_enabled)
        if self._acts and not self._proved:
            self._prove(model, inputs, logp, entropy, aux)
        piece = self._piece(inputs, logp, entropy)
        unscored = trl_batch.trainable(inputs).sum() - trl_batch.scored(inputs).sum()
        self._unscored = self._unscored.to(unscored.device) + unscored
        if self.offdrift.recorder is not None:
            decode = functools.partial(self._tokenizer.batch_decode, skip_special_tokens=True)
            how = {"version": self.state.global_step, "ends": self._ends, "decode": decode}
            self.offdrift.recorder.add(trl_batch.recorded(inputs, logp, entropy, **how))
        own, changed, live = self._decide(inputs, piece)
        self._scored = trl_batch.harmless(changed, logp, live) if self._acts else logp, entropy, aux
        loss = super()._compute_loss(model, changed)
        if self._scored is not None:
            raise FrameworkError(SCORED_ELSEWHERE)
        if self._mode == "correct":
            return loss
        for name in [n for n in self._metrics["train"] if n.startswith(OF_TRLS_LOSS)]:
            del self._metrics["train"][name]
        return loss if own is None else loss + own

    def training_step(self, *arguments: Any, **named: Any) -> Tensor:
        """As TRL's; metrics and findings are logged at the end of the optimizer's step.

        Raises: `FrameworkError` if a class before the mixin has a loss that never comes to it.
        """
        loss = super().training_step(*arguments, **named)
        if not self._open:
            raise proof.bypassed(type(self), OffdriftMixin)
        self._loss = self._loss + loss.detach().to(self._loss.device)
        if not self.accelerator.sync_gradients:
            return loss
        step = self.state.global_step + 1  # as TRL logs it: counted after the update
        own = torch.stack([self._loss, self._unscored.to(self._loss)]).tolist()
        losses, unscored = zip(*self._everyone(own), strict=True)
        also = {"optim/loss": sum(losses) / len(losses), "unscored_tokens": sum(unscored)}
        if self.use_vllm:  # TRL hands its engine the weights, draws, and scores with the same ones
            also["old/version_lag"] = 0.0
        exact = {} if self._reference is None else self._reference.row(self._everyone)
        told = self.offdrift.end_step(step, also=also | exact)
        for name, value in {**told, **{f"offdrift/{name}": value for name, value in exact.items()}}.items():
            self._metrics["train"][name].append(value)
        if self._mode == "loss" and self._observed is not None:
            self.offdrift.method = self.offdrift.method.next(self._observed)
        self._close()
        return loss

    def train(self, *arguments: Any, **named: Any) -> Any:
        """As TRL's; records are complete when it returns, also by an exception."""
        try:
            return super().train(*arguments, **named)
        finally:
            if self.offdrift.recorder is not None:
                self.offdrift.recorder.flush()

    def _begin(self, model: Any) -> None:
        """Before the first micro-batch of a step: its denominator and the method's statistics of all of it."""
        self._open, self._observed = True, None
        steps, at = self.args.steps_per_generation, self._step
        count, method = self.current_gradient_accumulation_steps, self.offdrift.method
        window = [self._buffered_inputs[(at + i) % steps] for i in range(count)]
        if self._mode == "loss":
            horizon = self.max_completion_length
            part = trl_batch.denominator(window, aggregate=method.aggregate, horizon=horizon)
            # Gradients are averaged over processes.
            everyone = self._everyone(part)
            self._normalizer = max(sum(everyone), 1.0) / len(everyone)
        if not (method.needs_whole_step and (count > 1 or self.accelerator.num_processes > 1)):
            return
        step_rows = []
        with torch.no_grad():
            for inputs in window:
                if (piece := self._piece(inputs, *self._score(model, inputs)[:2])) is not None:
                    lp, batch_info = piece.logprobs, piece.batch_info
                    anchored = lp if method.anchor is None else method.anchor(lp, batch_info)
                    step_rows.append(method.observe(anchored, piece.advantages, batch_info).cpu())
        parts = [part for process in self._everyone(step_rows) for part in process]
        if parts:
            self._observed = functools.reduce(Observed.merge, parts).to(self.accelerator.device)

    def _prove(self, model: Any, inputs: dict[str, Any], logp: Tensor, entropy: Tensor, aux: Tensor | None) -> None:
        """Once per run: TRL's loss takes corrections as they are handed over; see `proof`.

        Raises: `FrameworkError` naming the class and its options, in every process.
        """
        self._proved = True
        tried = copy.copy(self)  # what the loss writes down is thrown away with it
        tried._metrics = copy.deepcopy(self._metrics)

        def loss(given: dict[str, Any], leaf: Tensor) -> Tensor:
            tried._scored = leaf, entropy.detach(), None if aux is None else aux.detach()
            return super(OffdriftMixin, tried)._compute_loss(model, given)

        def piece_of(given: dict[str, Any], leaf: Tensor) -> MicroBatch | None:
            return self._piece(given, leaf, entropy)

        correct = self._mode == "correct"
        problem = proof.problem_of(loss, inputs, logp, piece_of, loss_type=self.loss_type, opened=correct)
        problems = [p for p in self._everyone(problem) if p]
        if problems:
            theirs = next(c for c in type(self).__mro__ if "_compute_loss" in vars(c) and c is not OffdriftMixin)
            raise FrameworkError(
                f"{theirs.__module__}.{theirs.__qualname__} with loss_type={self.loss_type!r} and "
                f"importance_sampling_level={self.importance_sampling_level!r} has a loss that this adapter does not "
                f"know: {problems[0]}. Choose another loss_type, or a tested version of TRL (docs/integrations/trl.md)"
            )

    def _decide(self, inputs: dict[str, Any], piece: MicroBatch | None) -> tuple[Tensor | None, dict[str, Any], Tensor]:
        """Our loss (mode="loss"), TRL's inputs, and where TRL's policy term may push."""
        nowhere = torch.zeros_like(trl_batch.trainable(inputs))
        if piece is None:
            self.offdrift.skip()
            return None, trl_batch.silenced(inputs) if self._acts else inputs, nowhere
        lp, advantages, batch_info = piece.logprobs, piece.advantages, piece.batch_info
        if self._mode == "correct":
            batch_info = replace(batch_info, observed=self._observed)
            decided = self.offdrift.correct(lp, advantages, batch_info)
            if not self._acts:
                return None, inputs, nowhere
            changed = trl_batch.corrected_inputs(inputs, piece, decided, loss_type=self.loss_type)
            return None, changed, lp.unpack(decided.keep)
        result = self.offdrift.loss(
            lp,
            advantages,
            # Looked ahead unless there is one piece.
            replace(batch_info, observed=self._observed or "this_batch"),
            normalizer=self._normalizer,
            horizon=self.max_completion_length,
        )
        self._observed = self._observed or result.observed
        return result.loss, trl_batch.silenced(inputs), nowhere

    def _close(self) -> None:
        self._open = False
        self._observed: Observed | None = None
        self._loss = self._unscored = torch.zeros(())

    def _score(self, model: Any, inputs: dict[str, Any], **options: Any) -> Any:
        """TRL's forward pass on what it trains on: log-probs, entropies, router loss."""
        forward = super()._get_per_token_logps_and_entropies
        names = inspect.signature(forward).parameters  # pixel values and the like have these names
        more = {name: inputs[name] for name in names if name in inputs}
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        present = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        width = inputs["completion_ids"].size(1)
        return forward(model, ids, present, width, compute_entropy=True, **more, **options)

    def _piece(self, inputs: dict[str, Any], logp: Tensor, entropy: Tensor) -> MicroBatch | None:
        """The micro-batch as the library sees it."""
        config = self.accelerator.unwrap_model(self.model).config.get_text_config()
        vocab, version = config.vocab_size, self.state.global_step
        return trl_batch.piece_of(inputs, logp, entropy, vocab=vocab, version=version)

    @property
    def _ends(self) -> list[int]:
        """Token ids that end a completion; before 1.14 TRL knows those of the tokenizer alone."""
        special_ids = (self._tokenizer.eos_token_id, self._tokenizer.pad_token_id)
        return getattr(self, "eos_token_ids", None) or [token for token in special_ids if token is not None]

    def _everyone(self, own: Any) -> list[Any]:
        """One object of every process, in every process."""
        objects = [own] * self.accelerator.num_processes
        if len(objects) > 1:
            torch.distributed.all_gather_object(objects, own)
        return objects

    def _blind(self, why: str) -> None:
        """Refuse to go on if a part compares the engine with the trainer and cannot, because `why`; else warn once."""
        correction = self.offdrift.method.correction
        used = (*correction.gates, *correction.weights)
        used += (self.offdrift.method.objective,) if self._mode == "loss" else ()
        compared = "; ".join(part.formula for part in used if part.on in ("mismatch", "full"))
        way_out = "set use_vllm=True, or give a rollout_func that returns logprobs"
        text = f"{why}, and [{compared}] compares the engine's with the trainer's" if compared else why
        if compared and self._on_idle == "error":
            raise LivenessError(f'{text}: {way_out}; on_idle="warn" takes the old policy for the engine')
        self.offdrift.without_engine(f"{text} ({way_out})")


if TYPE_CHECKING:

    class OffdriftGRPOTrainer(OffdriftMixin):
        """`GRPOTrainer` with a method in it; see `OffdriftMixin`."""


def __getattr__(name: str) -> Any:
    """`OffdriftGRPOTrainer`, made when it is first asked for: this module imports without TRL."""
    if name != "OffdriftGRPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    doc = "`GRPOTrainer` with a method in it; see `OffdriftMixin`."
    bases = (OffdriftMixin, require("trl").GRPOTrainer)
    trainer = type(name, bases, {"__module__": __name__, "__doc__": doc})
    return globals().setdefault(name, trainer)


# -- refused before a run begins; weight sync on CPUs ----------------------------------------------


IGNORED = {
    "off_policy_mask_threshold": None,
    "top_entropy_quantile": 1.0,
    "importance_sampling_level": "token",
    "delta": None,
}
"""Settings of TRL's policy term with their defaults; mode="loss" would silently drop any other."""

OF_TRLS_LOSS = ("clip_ratio/", "cispo_clip_ratio", "vespo/")
"""Metrics that describe a loss which mode="loss" does not use."""

SCORED_ELSEWHERE = (
    "this TRL scores tokens in another place than the versions this adapter knows, so nothing would "
    "be corrected; install a tested version (docs/integrations/trl.md)"
)


def refuse_method(method: Method, mode: Mode, *, records: bool = False) -> None:
    """Raise if a method cannot mean what its user hopes in this mode.

    Args:
        records: whether tokens are recorded, which is something to do without any gate or weight.

    Example:
        >>> from offdrift.methods import method
        >>> refuse_method(method("token_tis"), "correct")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        offdrift.errors.MethodError: weight token ratio(full), truncate above 2: every loss of TRL contains ...
    """
    if "distributions" in method.needs:
        raise EvidenceError(
            "the method projects whole distributions of the old and the current policy, and TRL's forward pass gives "
            f"log-probs of the sampled tokens alone: {LOGITS}"
        )
    if method.needs_divergences:
        raise EvidenceError(
            "the method reads divergences of whole distributions, and TRL's forward pass gives "
            "log-probs of the sampled tokens alone; take a row that estimates them (trm_max_k2, "
            "trm_avg_k3, ln_trm)"
        )
    if mode == "loss":
        if method.penalty is not None:
            raise MethodError(
                f"the method's KL penalty [{method.penalty.formula}] would stand beside TRL's own; "
                "give replace(method, penalty=None), and beta (use_bias_correction_kl) to GRPOConfig"
            )
        if method.lr_scale is not None:
            raise MethodError("the method scales the learning rate of each step, which belongs to TRL")
        return
    if not (method.correction.gates or method.correction.weights):
        if records:
            return
        raise MethodError(
            f"the method ({method.describe()}) has neither gates nor weights, so nothing would be "
            'corrected; mode="loss" uses its objective, record=True measures and records'
        )
    if method.anchor is not None:
        raise MethodError('the method replaces the old policy; TRL\'s loss would not: use mode="loss"')
    for weight in method.correction.weights:
        if weight.on != "mismatch":
            raise MethodError(
                f"{weight.formula}: every loss of TRL contains the staleness ratio, so a weight may "
                'only be on the mismatch; use settings={"weight.on": "mismatch"}, or mode="loss"'
            )


def refuse_settings(trainer: Any, method: Method, mode: Mode) -> None:
    """Raise `MethodError` if a setting of TRL would be ignored, or a step could not be seen whole."""
    values = {name: getattr(trainer, name, getattr(trainer.args, name, x)) for name, x in IGNORED.items()}
    changed = {name: value for name, value in values.items() if value != IGNORED[name]}
    if mode == "loss" and changed:
        raise MethodError(
            f'{changed} belong to TRL\'s policy loss, which mode="loss" replaces; leave them at '
            'their defaults, or use mode="correct"'
        )
    whole = method.needs_whole_step or (mode == "loss" and method.aggregate == "token_mean")
    steps, accumulated = trainer.args.steps_per_generation, trainer.args.gradient_accumulation_steps
    if whole and steps % accumulated:
        raise MethodError(
            f"steps_per_generation={steps} is no multiple of gradient_accumulation_steps="
            f"{accumulated}, so an optimizer step begins before its last micro-batch is drawn, and "
            f"this method must see it whole ({method.describe()}); make it a multiple, or choose an "
            "aggregate over sequences"
        )


def mend_sync(generation: Any) -> None:
    """Let TRL's colocated vLLM take weights on CPUs; elsewhere this does nothing.

    TRL writes into the model's parameters one by one. On CPUs vLLM has packed some of them, and lost
    the loaders that could repack. `generation` is the trainer's `vllm_generation`.
    """
    from offdrift.engines.isolation import preserve_host_state
    from offdrift.engines.vllm.engine import is_cpu, repacked

    if not is_cpu():
        return

    def sync_weights() -> None:
        llm, weights = generation.llm, generation._iter_named_params()
        with preserve_host_state():
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            repacked(llm)
            llm.reset_prefix_cache()

    generation.sync_weights = sync_weights
