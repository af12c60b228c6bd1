"""Parts of a recipe about how tokens are drawn, and what the trainer repeats of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from offdrift.engines.grids import GRIDS
from offdrift.records.provenance import Eviction, Sampling
from offdrift.records.rollouts import Rollouts
from offdrift_lab.train.settings.sections import Natural, Positive, PositiveFloat, Section


class KVSettings(Section):
    """A compressed KV cache of the engine, which keeps a fixed number of keys in every layer and key-value head."""

    budget: Annotated[int, Field(ge=2)]
    """Keys kept, that of the token being read among them. Prompts are read whole, and cut to the budget behind that."""
    policy: Literal["window", "attention"] = "window"
    """Which key goes. "window": the oldest one (StreamingLLM); "attention": the one that has received the least
    attention so far (H2O), in each layer and head by itself."""
    sinks: Natural | None = None
    """window: first tokens of the sequence that always stay. Absent: 4, or half of the budget if that is less."""
    recent: Positive | None = None
    """attention: latest tokens that always stay. Absent: half of the budget, as H2O."""

    @property
    def eviction(self) -> Eviction:
        """Eviction rule that the engine is asked for."""
        half = self.budget // 2
        if self.policy == "window":
            return Eviction("window", self.budget, min(4, half) if self.sinks is None else self.sinks)
        return Eviction("attention", self.budget, self.recent or half)

    @model_validator(mode="after")
    def _consistent(self) -> KVSettings:
        other, its = ("recent", self.recent) if self.policy == "window" else ("sinks", self.sinks)
        own, value = ("sinks", self.sinks) if self.policy == "window" else ("recent", self.recent)
        if its is not None:
            raise ValueError(
                f'rollout.kv.{other} = {its} does nothing with rollout.kv.policy = "{self.policy}"; set {own}, or '
                "leave it out"
            )
        if value is not None and value >= self.budget:
            raise ValueError(
                f"rollout.kv.{own} = {value} leaves no key of rollout.kv.budget = {self.budget} that may go; use a "
                "smaller one"
            )
        return self


SIBLINGS = "siblings"
"""Name of the drafter that has no model."""


class SpeculativeSettings(Section):
    """A drafter that proposes tokens to the engine (docs/speculative.md). What is drawn has the law of the policy,
    whatever the drafter proposes; a better one saves forward passes of the policy."""

    model: str
    """The drafter: what a recipe's `model` may be, or "tiny-qwen3-draft"; of the policy's vocabulary, and smaller.
    "siblings": no model, but what the other responses to the same prompt have written so far."""
    tokens: Positive = 4
    """Proposals that one pass of the policy judges, at most."""
    warm_start: Natural = 0
    """Supervised steps of the drafter on the task's demonstrations before RL, with the batch size and the learning rate
    of the recipe's own warm start; 0 for a drafter that is trained."""
    every: Positive | None = None
    """Updates of the trainer between two updates of the drafter, which is distilled on the batch at hand. Absent: it
    stays as it is."""
    steps: Positive = 1
    """every: steps of AdamW in an update of the drafter."""
    lr: PositiveFloat = 1e-3
    """every: learning rate of the drafter."""
    weighting: Literal["reward", "none"] = "reward"
    """every: "reward": responses count by their rewards, as shares of `reward_range` (ReSpec); "none": all alike."""

    def check(self, rollout: RolloutSettings, *, updates: int, whole: Mapping[str, bool]) -> None:
        """Refuse a drafter that cannot act, and settings of what is not done.

        Args:
            updates: of a whole arm.
            whole: what has no place beside it, by name, and whether the recipe has it.

        Raises: `ValueError` naming the field, its value and the way out.
        """
        if rollout.engine != "transformers":
            raise ValueError(
                f'rollout.speculative: rollout.engine = "{rollout.engine}" takes no drafter of this trainer; use '
                '"transformers", or leave it out'
            )
        if unfit := [name for name, is_set in whole.items() if is_set]:
            raise ValueError(f"rollout.speculative: no tokens are proposed with {unfit[0]}; leave one of the two out")
        if self.model == SIBLINGS:
            self._check_siblings(rollout)
        if rollout.max_tokens < 2:
            raise ValueError(
                "rollout.speculative does nothing with rollout.max_tokens = 1: a pass draws one token by itself; leave "
                "it out"
            )
        if self.every is None:
            for name in ("steps", "lr", "weighting"):
                if getattr(self, name) != SpeculativeSettings.model_fields[name].default:
                    raise ValueError(
                        f"rollout.speculative.{name} does nothing without rollout.speculative.every; set it, for "
                        "instance to 1, or leave both out"
                    )
        elif self.every > updates:
            raise ValueError(
                f"rollout.speculative.every = {self.every} is more than the {updates} updates of an arm, so that the "
                "drafter never learns; lower it, or leave it out"
            )

    def _check_siblings(self, rollout: RolloutSettings) -> None:
        """Refuse siblings that are not there, and lessons for a drafter without weights."""
        if rollout.samples < 2:
            raise ValueError(
                f'rollout.speculative.model = "{SIBLINGS}" with rollout.samples = {rollout.samples}: a response has no '
                "siblings; set rollout.samples, or name a model"
            )
        for name in ("warm_start", "every"):
            if getattr(self, name) != SpeculativeSettings.model_fields[name].default:
                raise ValueError(
                    f'rollout.speculative.{name} does nothing with rollout.speculative.model = "{SIBLINGS}", which has '
                    "no weights; leave it out"
                )


class RolloutSettings(Section):
    engine: Literal["transformers", "vllm", "openai"] = "transformers"
    """Which engine draws the tokens; "openai": a server that is running at `url`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """The engine's precision; the trainer's is `optim.dtype`."""
    quantization: Annotated[str | None, BeforeValidator(lambda x: None if x == "none" else x)] = None
    """A grid that the engine's matrices are rounded to, anew at each synchronization (docs/quantized.md). transformers
    emulates "int8" (weights alone), "w8a8", "fp8_per_channel" and "nvfp4"; vllm computes "w8a8", "fp8_per_channel" and
    what else it has by its own names. "none": full weights, as if it were absent."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """vllm: "fp8" keeps keys and values in FP8, with scales measured anew after each synchronization; on CPUs, those
    with AVX-512 or AMX can. "auto": in `dtype`."""
    prompts: Positive = 32
    """Prompts per rollout batch, over all processes."""
    samples: Positive = 8
    """Responses per prompt: the group whose mean is the baseline."""
    max_tokens: Positive = 14
    """Longest response, tokens; with an environment, of one turn. The horizon T of the bounds is this, or
    `max_turns` times this."""
    max_turns: Positive | None = None
    """With an environment: turns of the model until an episode is cut off. Other tasks have one, and it is absent."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the trainer tempers its own distribution alike."""
    top_k: Natural = 0
    """Draw from the k likeliest tokens; 0: from all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the smallest set of tokens with at least this mass; 1: from all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Draw from the tokens with at least this share of the likeliest one's probability; 0: from all."""
    kv: KVSettings | None = None
    """transformers: a compressed KV cache (docs/kv-cache.md). Absent: it keeps every key."""
    evidence: Literal["full", "hidden", "sampled"] | Positive = "full"
    """Evidence recorded of the rollout policy: "full" vocabulary, the "hidden" states that its head turned
    into logits (as exact, far smaller for large vocabularies), the top k (a number), or "sampled"."""
    tail_log_ratio_cap: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """For top-k evidence: assume |log mu - log pi| at most this outside the top k, nats. Upper ends of
    divergences then rest on it, and every guarantee from them states it. Absent: nothing is assumed."""
    evidence_limit_mib: Positive = 1024
    """Refuse to record more evidence than this per batch, or per round and stage of `draws`, MiB; with an environment
    each turn may take an equal part."""
    url: str | None = None
    """openai: address of a vLLM or SGLang server, http://HOST:PORT/v1; it is given weights."""
    insecure: bool = False
    """openai: allow http:// to another machine, where everyone on the way can read and change what is sent."""
    served_model: str | None = None
    """openai: name of the model there; absent: the only one that is served."""
    sync_folder: str | None = None
    """openai: folder through which the server gets weights, if it is on another machine."""
    speculative: SpeculativeSettings | None = None
    """transformers: a drafter that proposes tokens. Absent: the policy draws each by itself."""

    @property
    def filtered(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def sampling(self, *, max_tokens: int, stop_token_ids: tuple[int, ...]) -> Sampling:
        """Sampling parameters that the engine is asked for."""
        return Sampling(
            max_tokens, self.temperature, self.top_k, top_p=self.top_p, min_p=self.min_p, stop_token_ids=stop_token_ids
        )

    def check(self) -> None:
        """Refuse what the engine does not have.

        Raises: `ValueError` naming the field, its value and the way out.
        """
        evidence, cap = self.evidence, self.tail_log_ratio_cap
        if (self.engine == "openai") != (self.url is not None):
            raise ValueError(
                f'rollout.engine = "{self.engine}", rollout.url = {self.url!r}: the "openai" engine, and no '
                "other, needs the address of a server"
            )
        grid = self.quantization
        if self.engine == "vllm" and grid in ("int8", "nvfp4"):
            raise ValueError(
                f'rollout.quantization = "{grid}" is the transformers engine\'s; vLLM has "w8a8", "fp8_per_channel" '
                'and other names of its own, and "none" draws with full weights: add '
                "--set rollout.quantization=none --set rollout.dtype=bfloat16"
            )
        if self.engine == "vllm" and grid == "fp8_per_channel" and self.dtype == "float32":
            raise ValueError(
                'rollout.quantization = "fp8_per_channel" with rollout.dtype = "float32": vLLM multiplies FP8 numbers '
                'for activations in half precision alone; set rollout.dtype = "bfloat16"'
            )
        if self.engine == "transformers" and grid is not None and grid not in GRIDS:
            raise ValueError(
                f"rollout.quantization = {grid!r}: the transformers engine emulates "
                f'{", ".join(sorted(GRIDS))}; use one of them, or rollout.engine = "vllm" for what vLLM has by names '
                "of its own"
            )
        if self.engine != "vllm" and self.kv_cache_dtype != "auto":
            raise ValueError(
                f'rollout.kv_cache_dtype = "{self.kv_cache_dtype}" is vLLM\'s; set rollout.engine = "vllm", or '
                "leave it out"
            )
        if self.url is not None and evidence == "hidden":
            raise ValueError('rollout.evidence = "hidden": a server gives none; use "full" or 20')
        if cap is not None and not isinstance(evidence, int):
            raise ValueError(
                f"rollout.tail_log_ratio_cap = {cap} is about the tail of top-k evidence, but rollout.evidence = "
                f'"{evidence}" has none; set rollout.evidence = 20 (or another k), or leave the cap out'
            )

    def check_batch_invariant(self, trainer: str, *, beside: Mapping[str, bool], adapters: bool) -> None:
        """Refuse engines that cannot be equal to the trainer bit for bit.

        Args:
            trainer: its precision.
            beside: what has no place beside it, by name, and whether the recipe has it.
            adapters: whether adapters are all that trains.

        Raises: `ValueError` naming the field, its value and the way out.
        """
        if self.engine != "transformers":
            raise ValueError(
                f"batch_invariant = true changes the kernels of the transformers engine, and rollout.engine = "
                f'"{self.engine}" has its own; set rollout.engine = "transformers", or leave it out'
            )
        if self.quantization is not None:
            raise ValueError(
                f'batch_invariant = true with rollout.quantization = "{self.quantization}": rounded weights are '
                "not the trainer's; leave one of the two out"
            )
        if self.dtype != trainer:
            raise ValueError(
                f'batch_invariant = true needs one precision on both sides, and rollout.dtype = "{self.dtype}" is '
                f'not the trainer\'s "{trainer}"; set rollout.dtype = "{trainer}", or optim.dtype = "{self.dtype}"'
            )
        if unfit := [name for name, is_set in beside.items() if is_set]:
            raise ValueError(f"batch_invariant = true has no place beside {unfit[0]}; leave one of the two out")
        if adapters:
            raise ValueError(
                "batch_invariant = true with [lora]: the engine multiplies by merged weights, the trainer by each "
                "factor; leave one of the two out"
            )


class ReplaySettings(Section):
    """Recorded choices of the rollout engine, or of the old policy's pass, that the trainer's forward passes repeat."""

    support: bool = True
    """Where the rollouts are filtered (`rollout.top_k`, `top_p`, `min_p`): the policies of the trainer live on the
    tokens that the filters left over at each place, as recorded by the sampler. false: on the whole vocabulary, and
    the mass that the filters removed counts as drift."""
    kv: bool = True
    """Where the engine's cache is compressed (`rollout.kv`): attention of the trainer's policies, current, old and
    reference, sees at each token the keys that the cache still had. false: all earlier tokens, and what the cache had
    let go counts as drift."""
    distill: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """kv: weight of a second forward pass, which sees everything, being pulled towards the one that sees what the cache
    had (Shadow Mask Distillation, whose authors use 0.1). 0: no such pass."""
    distill_by: Literal["exact", "k3"] = "exact"
    """distill: by the KL over the whole vocabulary, or by its estimate from sampled tokens, as the authors' code."""
    routes: Literal["none", "record", "rollout", "old"] = "none"
    """Experts of the trainer's forward passes: "none": its own; "record": its own, and those of the engine are recorded
    and compared (`router/...`); "rollout": the engine's, in passes of old and current policy (R3); "old": those of the
    old policy's pass, in every later pass on the batch (R2). Weights of the experts are always the trainer's own."""
    freeze_gates: bool = False
    """old: also keep the weights that the old policy's routers gave the experts; routers then get no gradient."""
    freeze_router_bias: bool = False
    """Routers' biases do not train (Ring-1T)."""

    @property
    def records(self) -> bool:
        """Whether the engine has to record routes."""
        return self.routes in ("record", "rollout")

    def replayed(self, rollouts: Rollouts) -> tuple[str, ...]:
        """Names of these rollouts' recorded choices that all of the trainer's policies repeat: see
        `Provenance.replayed`.
        """
        repeated = {
            "support": self.support and rollouts.support is not None,
            "routes": self.routes == "rollout",
            "retention": self.kv and rollouts.retention is not None,
        }
        return tuple(name for name, does in repeated.items() if does)

    def check_routes(
        self, arm: str, *, scores_old: bool, adapters: bool, always_current: bool, whole: Mapping[str, bool]
    ) -> None:
        """Refuse a replay that cannot act.

        Args:
            arm: its name.
            scores_old: whether the arm's method reads log-probs of an old policy, from a pass of its own.
            adapters: whether adapters are all that trains.
            always_current: whether every batch takes one step, by the weights that drew it.
            whole: what has no place beside it, by name, and whether the recipe has it.

        Raises: `ValueError` naming the field, its value and the way out.
        """
        if self.freeze_gates and self.routes != "old":
            raise ValueError(
                f"arms.{arm}: replay.freeze_gates = true keeps what the old policy's pass gave, and replay.routes = "
                f'"{self.routes}" has none; set replay.routes = "old", or leave it out'
            )
        if self.freeze_router_bias and adapters:
            raise ValueError(
                f"arms.{arm}: replay.freeze_router_bias = true does nothing with [lora], whose adapters are all that "
                "trains; leave it out"
            )
        if self.routes == "none":
            return
        setting = f'arms.{arm}: replay.routes = "{self.routes}"'
        if unfit := [name for name, is_set in whole.items() if is_set]:
            raise ValueError(f"{setting}: routes are not recorded with {unfit[0]}; leave one of the two out")
        if self.routes == "old" and not scores_old:
            raise ValueError(
                f"{setting} repeats the experts of the old policy's forward pass, and this arm makes none; use a "
                'method that reads logp_old with old_policy.from = "sampling", or replay.routes = "rollout"'
            )
        if self.routes == "old" and always_current:
            raise ValueError(
                f"{setting} does nothing: every batch takes one step, by the weights that drew it, and that step's "
                'pass is the old policy\'s; set optim.minibatches or optim.epochs, or replay.routes = "rollout"'
            )

    def check_kv(self, arm: str, rollout: RolloutSettings, *, whole: Mapping[str, bool]) -> None:
        """Refuse a compressed cache where there is none or it is not recorded, and settings that change nothing.

        Args:
            arm: its name.
            whole: what has no place beside a distillation, by name, and whether the recipe has it.

        Raises: `ValueError` naming the setting, its value and the way out.
        """
        asked = {"replay.kv = false": not self.kv, f"replay.distill = {self.distill}": self.distill > 0}
        if self.distill_by != "exact" and not self.distill:
            raise ValueError(
                f'arms.{arm}: replay.distill_by = "{self.distill_by}" does nothing without replay.distill; set it to '
                "0.1"
            )
        if rollout.kv is None:
            if inert := next((name for name, is_set in asked.items() if is_set), None):
                raise ValueError(
                    f"arms.{arm}: {inert} does nothing: the engine's cache keeps every key; leave it out, or set "
                    "rollout.kv.budget"
                )
            return
        if self.distill and not self.kv:
            raise ValueError(
                f"arms.{arm}: replay.distill = {self.distill} pulls the policy that sees everything towards the one "
                "that sees what the cache had, and replay.kv = false has no such policy; leave one of the two out"
            )
        if self.distill and (unfit := next((name for name, is_set in whole.items() if is_set), None)):
            raise ValueError(
                f"arms.{arm}: replay.distill = {self.distill} with {unfit}: the step takes its gradient from one "
                "forward pass; leave one of the two out"
            )

    def check_support(self, rollout: RolloutSettings) -> None:
        """Refuse a replay of what is not recorded, and settings that change nothing.

        Raises: `ValueError` naming the setting, its value and the way out.
        """
        if not rollout.filtered:
            if not self.support:
                raise ValueError(
                    "replay.support = false does nothing: the rollouts are not filtered; leave it out, or set "
                    "rollout.top_p, rollout.top_k or rollout.min_p"
                )
            return
        if self.support and rollout.engine == "openai":
            raise ValueError(
                'replay.support = true needs the tokens that the filters left over, which rollout.engine = "openai" '
                'does not give; use "vllm" or "transformers", sample without filters, or set replay.support = false '
                "and let a method correct for the mass that they removed"
            )
        if not self.support and rollout.evidence == "hidden":
            raise ValueError(
                'replay.support = false: rollout.evidence = "hidden" describes a filtered policy together with its '
                'support alone; use "full" or a number of top log-probs, or leave replay.support out'
            )
