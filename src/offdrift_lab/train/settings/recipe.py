"""The recipe of a training run: one frozen, checked object with all its settings.

Read from TOML, overridable from the command line (`--set rollout.dtype=float16`), stored with the run. Unknown
keys, wrong types and values that contradict each other are refused before anything starts, with the key, the
file and what was expected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import Field, ValidationError, model_validator

from offdrift.advantages import ADVANTAGES
from offdrift.correction import Correction
from offdrift.engines.grids import GRIDS
from offdrift.errors import MethodError, RecipeError
from offdrift.methods import Method, method, override
from offdrift.methods.describe import DEFAULT_ADVANTAGE, raised_by
from offdrift.methods.load import UNLOADED, CodeSource, absolute, code_source, in_code, short_name, without_loading
from offdrift.methods.method import Interpolated, RolloutAsOld
from offdrift.records.atomic import plain
from offdrift.setting import parse_setting
from offdrift_lab.schedules import Schedule, schedule
from offdrift_lab.schedules import override as with_rules
from offdrift_lab.train.data.environments import ENVIRONMENTS, check_turns, is_environment
from offdrift_lab.train.features.fusion import Fusion, MixtureSettings
from offdrift_lab.train.features.quantization import QuantizedSettings
from offdrift_lab.train.settings.arm_tables import merged, refuse_unread, replaced
from offdrift_lab.train.settings.optim import OptimSettings
from offdrift_lab.train.settings.places import found_beside, read_settings, with_code_found
from offdrift_lab.train.settings.rollout import ReplaySettings, RolloutSettings
from offdrift_lab.train.settings.sections import (
    BufferSettings,
    CertificateSettings,
    CriticSettings,
    Diagnosis,
    DrawsSettings,
    FolderName,
    JudgeSettings,
    LagSettings,
    LogSettings,
    LoraSettings,
    OldPolicySettings,
    PenaltiesSettings,
    PipelineSettings,
    Positive,
    PositiveFloat,
    ReferenceSettings,
    Section,
    WarmStartSettings,
)

SUPPLIED = {"logp_old", "sum_pi_squared", "weight", "position", "greedy_rewards", "components", "values", "entropy"}
"""Inputs of advantage estimators that the trainer has, besides rewards and groups."""

DEFAULT_DELTA = 0.05
"""Limit on a token's KL, nat, of a recipe that states no trust region."""


class ArmSettings(Section):
    method: str
    """A row of the method table (`offdrift methods`), or a method of yours, "mine.py:mine" or "module:name", beside
    the recipe or in the working folder (docs/your-own-method.md)."""
    gates_of: str | None = None
    """Another row whose gates are added to this one's."""
    override: dict[str, Any] = Field(default_factory=dict)
    """Single values changed, by path: {"gate.high" = 0.1}, or nested: {gate = {high = 0.1}}."""
    old_policy: OldPolicySettings | None = None
    """This arm's old policy, where it differs from the recipe's: merged over it key by key."""
    replay: ReplaySettings | None = None
    """This arm's replay, where it differs from the recipe's: merged over it key by key."""
    fusion: MixtureSettings | None = None
    """This arm's share of the teacher, where it differs from the recipe's: merged over it key by key. A value that the
    recipe has and this arm shall not have is "absent", here and in the other tables."""
    quantized: QuantizedSettings | None = None
    """What this arm does about the grid of the rollouts, where it differs from the recipe's: merged over it."""
    schedule: str | None = None
    """This arm's schedule, where it differs from `pipeline.schedule`."""
    rules: dict[str, Any] = Field(default_factory=dict)
    """Rules of it that are changed, beside `pipeline.rules`."""

    def build(self) -> Method:
        """The method of this arm, before the recipe says which old policy it reads."""
        row = method(self.method)
        if row is UNLOADED:
            return row
        arguments = set() if row.made_by is None else self.override.keys() & row.made_by.settings.keys()
        row = override(row, {name: self.override[name] for name in arguments})
        if self.gates_of is not None:
            gates = Correction(method(self.gates_of).correction.gates)
            row = replace(row, correction=row.correction & gates)
        return override(row, {name: value for name, value in self.override.items() if name not in arguments})


class Recipe(Section):
    """A run. `method = NAME` (with `override`, if wanted) stands for one arm of that name."""

    name: FolderName
    """Names the run folder."""
    model: str
    """tiny-qwen3, tiny-qwen3-moe, smollm2-135m, or any path or hub id of a causal LM."""
    task: str = "arithmetic"
    """Task: arithmetic, backwards, chat-arithmetic, chat-sums, copies, reasoning_gym:NAME, or a file, NAME.jsonl:
    {"prompt": ..., "answer": ...} a line; or an environment of several turns: calculator, guess, adventure, or a
    class of yours, "game.py:Game" or "module:Class" (docs/tasks.md)."""
    reward: str | None = None
    """What a completion earns, not the task's own reward: "number", "exact", "math", "judge" (a language model, see
    `judge`), or a function of yours, "rewards.py:score" or "module:function". A file of problems needs one."""
    seed: int = 0
    """Decides prompts, samples and initial weights; every arm sees the same."""
    batches: Positive
    """Rollout batches to train on, per arm."""
    delta: PositiveFloat | None = None
    """Trust region of certificates: KL(rollout || current) of every token is at most this, nat. Absent: 0.05, or no
    limit on KL where `eps` limits TV."""
    eps: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] | None = None
    """Trust region of certificates: TV(rollout, current) of every token is at most this. With `delta` as well, a token
    outside either limit leaves the region. Absent: what `delta` implies, sqrt(delta / 2)."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """Smallest and largest possible reward: what certificates rescale; a reward outside is refused."""
    right_from: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Reward from which a response is right, for draws.leave_out_after and advantage rl_zvp. Absent: the upper end of
    `reward_range`."""
    batch_invariant: bool = False
    """Trainer and transformers engine compute every sequence in one order, whatever is in the batch with it: at equal
    weights their log-probs are equal bit for bit, and exact divergences 0 (docs/equal-engines.md). The run verifies
    that before it trains. Needs rollout.dtype = optim.dtype."""
    warm_start: WarmStartSettings = WarmStartSettings()
    rollout: RolloutSettings = RolloutSettings()
    fusion: Fusion | None = None
    """Absent: the policy draws alone. `{teacher = ...}`: from logits that a teacher's are mixed into."""
    draws: DrawsSettings = DrawsSettings()
    penalties: PenaltiesSettings = PenaltiesSettings()
    lag: LagSettings = LagSettings()
    pipeline: PipelineSettings | None = None
    """Absent: sampling and training alternate. `{}`: rollout workers draw while the trainer trains."""
    buffer: BufferSettings = BufferSettings()
    old_policy: OldPolicySettings = OldPolicySettings()
    replay: ReplaySettings = ReplaySettings()
    quantized: QuantizedSettings = QuantizedSettings()
    reference: ReferenceSettings = ReferenceSettings()
    optim: OptimSettings = OptimSettings()
    lora: LoraSettings | None = None
    """Absent: all weights train. `{}`: low-rank adapters do, and the model's own weights stay."""
    critic: CriticSettings = CriticSettings()
    judge: JudgeSettings = JudgeSettings()
    diagnosis: Diagnosis = Diagnosis()
    log: LogSettings = LogSettings()
    certificate: CertificateSettings = CertificateSettings()
    arms: dict[FolderName, ArmSettings] = Field(min_length=1)
    """Arms to compare: name -> method. They run one after the other on the same prompts and drift."""

    @model_validator(mode="before")
    @classmethod
    def _one_method(cls, content: Any) -> Any:
        """`method = NAME` replaces the arms by one; `override` belongs to it. Tables of arms are merged."""
        return merged(with_arms(content)) if isinstance(content, dict) else content

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        for name in self.arms:
            self._check_arm(name)
            self._check_replay(name)
            self.quantized_of(name).check(
                name, rollout=self.rollout, pipeline=self.pipeline is not None, adapters=self.lora is not None
            )
        check_turns(self.task, self.rollout.max_turns, reward=self.reward)
        self._check_rollout()
        self._check_fusion()
        self.buffer.check(
            self.rollout.prompts,
            lag=self.lag,
            accumulate=self.optim.accumulate,
            steps=self.optim.epochs * self.optim.minibatches,
            evidence=self.rollout.evidence,
        )
        self._check_draws()
        self._check_pipeline()
        self.judge.check(self.reward, self.reward_range)
        self.critic.check({self.estimator(self.row(name)) for name in self.arms})
        self._check_optim()
        self._check_switch()
        sources = {name: (self.row(name).scores_old, str(self.old_policy_of(name).source)) for name in self.arms}
        self.certificate.check(sources, evidence=self.rollout.evidence)
        return self

    def _check_arm(self, name: str) -> None:
        """Refuse a method that the run cannot feed."""
        arm = self.arms[name]
        try:
            row = self.row(name)
        except MethodError as e:
            raise ValueError(f"arms.{name}: {e}") from e
        self._check_old_policy(name)
        how = self.estimator(row)
        missing = sorted(set(ADVANTAGES[how].needs) - SUPPLIED)
        if missing:
            raise ValueError(
                f"arms.{name}: advantage {how!r} needs {', '.join(missing)}, which this trainer "
                "does not produce; set optim.advantage to another, or call offdrift.advantages from your own loop"
            )
        if "components" in ADVANTAGES[how].needs and ":" not in (self.reward or "") and not self.penalties.names:
            raise ValueError(
                f"arms.{name}: advantage {how!r} weighs the components of a reward, and reward = {self.reward!r} "
                'has none; set it to a function that returns numbers by name, "rewards.py:score" (docs/tasks.md)'
            )
        if row.whole_prompts and self.rollout.prompts < self.optim.minibatches:
            raise ValueError(
                f"arms.{name}: {arm.method} compares the answers to a prompt, which stay in one minibatch, and "
                f"optim.minibatches = {self.optim.minibatches} is more than rollout.prompts = "
                f"{self.rollout.prompts}; take fewer minibatches or more prompts"
            )
        if row.whole_prompts and self.rollout.samples < 2:
            raise ValueError(
                f"arms.{name}: {arm.method} compares the answers to a prompt; rollout.samples = 1 gives it nothing "
                "to compare, set it to 2 or more"
            )
        recorded = any("rollout" in name for name in row.divergences)
        if recorded and self.rollout.evidence == "sampled":
            raise ValueError(
                f'arms.{name}: {arm.gates_of or arm.method} gates on exact KL, but rollout.evidence = "sampled" '
                'records none; set rollout.evidence = "full" or "hidden" (or a number of top '
                "log-probs), or use trm_max_k2"
            )

    def _check_replay(self, name: str) -> None:
        """Refuse a replay that cannot act in an arm."""
        row, source = self.row(name), self.old_policy_of(name).source
        one_step = self.lag == LagSettings() and self.buffer.capacity is None and self.updates == self.batches
        exact = source in ("sampling", "second_model", "batch_start") and self.optim.perturb is None
        self.replay_of(name).check_routes(
            name,
            scores_old=row.scores_old,
            adapters=self.lora is not None,
            always_current=one_step and exact,
            whole=self._elsewhere | {'rollout.engine = "openai"': self.rollout.engine == "openai"},
        )

    @property
    def _elsewhere(self) -> dict[str, bool]:
        """Settings under which responses are not drawn in one pass of the run's own engine; True for those that the
        recipe has.
        """
        episodes = f'task = "{self.task}", whose episodes are read anew at each turn'
        return {"[pipeline]": self.pipeline is not None, episodes: is_environment(self.task)}

    def _check_rollout(self) -> None:
        """Refuse what the engine does not have."""
        rollout = self.rollout
        rollout.check()
        without = {f'rollout.engine = "{rollout.engine}"': rollout.engine != "transformers"} | self._elsewhere
        if rollout.kv is not None and (unfit := next((name for name, is_so in without.items() if is_so), None)):
            raise ValueError(
                f"rollout.kv.budget = {rollout.kv.budget}: caches are not compressed with {unfit}; leave one of the "
                "two out"
            )
        twice = {"optim.perturb": self.optim.perturb is not None, "critic.shared = true": self.critic.shared}
        for name in self.arms:
            self.replay_of(name).check_support(rollout)
            self.replay_of(name).check_kv(name, rollout, whole=twice)
        if rollout.speculative is not None:
            recording = next((name for name in self.arms if self.replay_of(name).records), None)
            beside = {
                f'arms.{recording}: replay.routes = "record" or "rollout"': recording is not None,
                "[fusion]": self.fusion is not None,
                "rollout.kv": rollout.kv is not None,
            }
            rollout.speculative.check(rollout, updates=self.updates, whole=self._elsewhere | beside)
        if self.batch_invariant:
            beside = {
                "rollout.kv": rollout.kv is not None,
                "rollout.speculative": rollout.speculative is not None,
                "[fusion]": self.fusion is not None,
            }
            rollout.check_batch_invariant(self.optim.dtype or "float32", beside=beside, adapters=self.lora is not None)

    def _check_fusion(self) -> None:
        """Refuse a teacher that cannot decode along, or that no arm listens to."""
        if self.fusion is None:
            for name, arm in self.arms.items():
                if arm.fusion is not None:
                    raise ValueError(f"arms.{name}: fusion does nothing without [fusion], which names the teacher")
            return
        self.fusion.check_beside(
            self.rollout, pipeline=self.pipeline is not None, episodes=is_environment(self.task), task=self.task
        )
        for name in self.arms:
            self.mixture_of(name).check(name, task=self.task, inherited=self.fusion)  # type: ignore[union-attr]
        if not any(self.mixture_of(name).alpha for name in self.arms):  # type: ignore[union-attr]
            raise ValueError(
                f'fusion.teacher = "{self.fusion.teacher}" does nothing: fusion.alpha is 0 in every arm; raise it, or '
                "leave [fusion] out"
            )

    def _check_optim(self) -> None:
        """Refuse settings of the optimizer that do nothing, or that contradict each other."""
        estimators = {self.estimator(self.row(name)) for name in self.arms}
        reads_norms = any("grad_norm_squared" in ADVANTAGES[x].reads for x in estimators)
        if self.optim.gradient_norms != "proxy" and not reads_norms:
            raise ValueError(
                f'optim.gradient_norms = "{self.optim.gradient_norms}" does nothing: no arm has an advantage that '
                'reads norms of gradients; leave it out, or set optim.advantage = "opob"'
            )
        if self.critic.shared and (self.lora is not None or self.optim.perturb is not None):
            other = "[lora]" if self.lora is not None else "optim.perturb"
            raise ValueError(
                f"critic.shared = true with {other}: the value would learn from the adapted or perturbed body; leave "
                "critic.shared out for a critic of its own"
            )
        if self.lora is not None and self.reference.offload:
            raise ValueError(
                "reference.offload does nothing with [lora]: the reference is the trained model without its adapters"
            )
        if self.optim.warmup >= self.updates:
            raise ValueError(
                f"optim.warmup = {self.optim.warmup} is not over before the run's {self.updates} updates are"
            )
        if (sequences := self.optim.accumulate * self.rollout.prompts * self.rollout.samples) < self.optim.minibatches:
            raise ValueError(
                f"optim.minibatches = {self.optim.minibatches} is more than the {sequences} sequences of a batch"
            )

    def _check_switch(self) -> None:
        """Refuse a method after a surge that could not train the arms, or would be the one that they have."""
        after = self.after_surge()
        if after is self:
            return
        setting = f'optim.length_guard.switch_to = "{next(iter(after.arms.values())).method}"'
        try:
            after._consistent()  # type: ignore[operator]
        except ValueError as e:
            raise ValueError(f"{setting}: {e}") from e
        for name in self.arms:
            if after.row(name) == self.row(name):
                raise ValueError(f"{setting} is what arms.{name} trains with from the start; name another, or leave it")
            sources = {str(r.old_policy_of(name).source) for r in (self, after) if r.row(name).scores_old}
            if len(sources) > 1:
                raise ValueError(
                    f"{setting} reads another old policy than arms.{name} keeps ({' and '.join(sorted(sources))}); set "
                    "old_policy.from, or name a method that reads none, such as bypass_pg_geo_rs"
                )

    def _check_pipeline(self) -> None:
        """Refuse schedules that an arm's method or the engine cannot follow, and what has no place beside them."""
        if self.pipeline is None:
            for name, arm in self.arms.items():
                if arm.schedule is not None or arm.rules:
                    raise ValueError(f"arms.{name}: schedule and rules do nothing without [pipeline]; add it")
            return
        absent = {
            "lag": self.lag != LagSettings(),
            "buffer": self.buffer != BufferSettings(),
            "draws": self.draws != DrawsSettings(),
            "rollout.max_turns": self.rollout.max_turns is not None,
            'rollout.engine = "openai"': self.rollout.engine == "openai",
            'rollout.kv_cache_dtype = "fp8"': self.rollout.kv_cache_dtype != "auto",
        }
        if unfit := [name for name, is_set in absent.items() if is_set]:
            way_out = "the schedule says how far rollouts lag; " if unfit[0] == "lag" else ""
            raise ValueError(f"{unfit[0]} has no place beside [pipeline]: {way_out}leave one of the two out")
        if self.pipeline.rewards == "workers" and self.reward == "judge":
            raise ValueError(
                'pipeline.rewards = "workers" with reward = "judge": workers have no judge; leave pipeline.rewards out'
            )
        for name in self.arms:
            method, optim = self.row(name), self.optim
            whole = {
                "critic.shared = true": self.critic.shared,
                "optim.perturb is set": optim.perturb is not None,
                'optim.gradient_norms = "exact"': optim.gradient_norms == "exact",
                f"optim.epochs x optim.minibatches = {self.updates // self.batches}": self.updates > self.batches,
            }
            self.pipeline.check(
                name,
                self.schedule_of(name),
                method,
                self.estimator(method),
                engine=self.rollout.engine,
                hidden=self.rollout.evidence == "hidden",
                whole=[reason for reason, is_so in whole.items() if is_so],
            )

    def _check_draws(self) -> None:
        """Refuse draws, penalties and settings of them that cannot act."""
        estimators, rollout = {name: self.estimator(self.row(name)) for name in self.arms}, self.rollout
        self.draws.check(samples=rollout.samples, task=self.task, estimators=estimators)
        user_code = ":" in (self.reward or "") or (is_environment(self.task) and self.task not in ENVIRONMENTS)
        self.penalties.check(longest=self.horizon, reward_range=self.reward_range, own_reward=user_code)
        shaped = "rl_zvp" in estimators.values()
        if self.optim.zvp_alpha != OptimSettings.model_fields["zvp_alpha"].default and not shaped:
            raise ValueError('optim.zvp_alpha is read by advantage "rl_zvp" alone; set optim.advantage = "rl_zvp"')
        if self.right_from is not None and not shaped and self.draws.leave_out_after is None:
            raise ValueError(
                'right_from does nothing: it is read by draws.leave_out_after and by optim.advantage = "rl_zvp"'
            )

    def _check_old_policy(self, name: str) -> None:
        """Refuse an old policy that leaves a part of the method without effect."""
        row, source = self.arms[name].build(), self.old_policy_of(name).source
        if self.old_policy_of(name).offload and source not in ("second_model", "ewma"):
            raise ValueError(
                f'arms.{name}: old_policy.offload = true, but old_policy.from = "{source}" keeps no weights on the '
                'device; leave it out, or use "second_model" or "ewma"'
            )
        parts = [*row.correction.gates, *row.correction.weights, row.objective]
        inert = [p.formula for p in parts if getattr(p, "on", None) == "mismatch"]
        if row.compares_old and source not in ("sampling", "second_model", "ewma"):
            compared = [*sorted(name for name in row.divergences if name.endswith("old_current")), "the method"]
            raise ValueError(
                f"arms.{name}: {compared[0]} compares whole distributions of the old and the current policy, "
                f'which old_policy.from = "{source}" does not keep; use "sampling", "second_model" or "ewma"'
            )
        if source == "rollout" and inert and row.anchor is None:
            raise ValueError(
                f'arms.{name}: {inert[0]} acts on the mismatch ratio, which old_policy.from = "rollout" '
                'makes 1 at every token; use "sampling", or a method on the full ratio'
            )
        asked = (self.arms[name].old_policy or self.old_policy).source
        if isinstance(row.anchor, Interpolated) and asked not in (None, "interpolated"):
            raise ValueError(
                f"arms.{name}: {self.arms[name].method} interpolates its old policy, old_policy.from = "
                f'"{asked}" asks for another; leave it out, or use decoupled_ppo'
            )

    def after_surge(self) -> Recipe:
        """The recipe once its length guard has seen a surge: its arms have the method `switch_to`, if there is one."""
        guard = self.optim.length_guard
        if guard is None or guard.switch_to is None:
            return self
        optim = self.optim.model_copy(update={"length_guard": guard.model_copy(update={"switch_to": None})})
        published = {"method": guard.switch_to, "override": {}, "gates_of": None}
        arms = {name: arm.model_copy(update=published) for name, arm in self.arms.items()}
        return self.model_copy(update={"optim": optim, "arms": arms})

    def schedule_of(self, name: str) -> Schedule:
        """The schedule of an arm, with the rules that the recipe changes. Raises: `ValueError` if there is none."""
        assert self.pipeline is not None
        try:
            row = with_rules(schedule(self.arms[name].schedule or self.pipeline.schedule), self.pipeline.rules)
            return with_rules(row, self.arms[name].rules)
        except RecipeError as e:
            raise ValueError(f"arms.{name}: {e}") from e

    def old_policy_of(self, name: str) -> OldPolicySettings:
        """The old policy of an arm: the recipe's with its changes, or what its method was published with."""
        settings = self.arms[name].old_policy or self.old_policy
        if settings.source is not None:
            return settings
        row = self.arms[name].build()
        published = "interpolated" if isinstance(row.anchor, Interpolated) else row.old_policy
        return settings.model_copy(update={"source": published})

    def reads_old(self, name: str) -> bool:
        """Whether the method of an arm reads an old policy, or stands something in for one."""
        rows = [recipe.arms[name].build() for recipe in (self, self.after_surge())]
        return any(row.scores_old or row.anchor is not None for row in rows)

    def replay_of(self, name: str) -> ReplaySettings:
        """The replay of an arm: the recipe's with its changes."""
        return self.arms[name].replay or self.replay

    def mixture_of(self, name: str) -> MixtureSettings | None:
        """The teacher's share in an arm: the recipe's with its changes; None where there is no teacher."""
        return self.arms[name].fusion or self.fusion

    def quantized_of(self, name: str) -> QuantizedSettings:
        """Settings of an arm for rollouts with quantized weights: its own, else the recipe's."""
        return self.arms[name].quantized or self.quantized

    @property
    def grid(self) -> str | None:
        """The grid of the rollouts, where the trainer has it, too."""
        return self.rollout.quantization if self.rollout.quantization in GRIDS else None

    def row(self, name: str) -> Method:
        """The method that an arm trains with, with its old policy.

        Raises: `MethodError` if the arm's method, gates or overrides are wrong.
        """
        row = self.arms[name].build()
        source = self.old_policy_of(name).source
        if source == "interpolated" and row.anchor is None and row.needs_old:
            return replace(row, anchor=Interpolated())
        if source == "rollout" and row.needs_old:
            return replace(row, anchor=RolloutAsOld())
        return row

    def estimator(self, row: Method) -> str:
        """The advantage estimator of a method: the recipe's, or what it was published with."""
        name = self.optim.advantage
        return (row.advantage or DEFAULT_ADVANTAGE) if name == "method" else name

    def inputs_of(self, name: str) -> set[str]:
        """Inputs that an arm's advantage estimators need, before and after a surge of lengths."""
        return {x for r in (self, self.after_surge()) for x in ADVANTAGES[r.estimator(r.row(name))].needs}

    def trained_return(self, name: str) -> dict[str, Any]:
        """The return that an arm's steps raise, in place of J: see `offdrift.methods.describe.trained_return`."""
        row = self.row(name)
        return raised_by(row, self.estimator(row))

    @property
    def code(self) -> dict[str, CodeSource]:
        """File, attribute and hash of every method in code, by its name."""
        rows = [recipe.arms[name] for recipe in (self, self.after_surge()) for name in self.arms]
        names = dict.fromkeys(x for row in rows for x in (row.method, row.gates_of) if x is not None and in_code(x))
        return {name: code_source(name) for name in names}

    @property
    def right(self) -> float:
        """The reward from which a response is right."""
        return self.reward_range[1] if self.right_from is None else self.right_from

    @property
    def max_turns(self) -> int:
        """Turns of the model in a sequence, at most."""
        return self.rollout.max_turns or 1

    @property
    def horizon(self) -> int:
        """Tokens of the model in a sequence, at most."""
        return self.max_turns * self.rollout.max_tokens

    @property
    def token_limits(self) -> tuple[float, float | None]:
        """Limits of the trust region on KL (nat; infinite: none) and TV (None: what KL's implies) of a token."""
        if self.delta is not None:
            return self.delta, self.eps
        return (DEFAULT_DELTA, None) if self.eps is None else (math.inf, self.eps)

    @property
    def updates(self) -> int:
        """Optimizer steps of a whole arm."""
        return self.batches * self.optim.epochs * self.optim.minibatches


def with_arms(content: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's plain values with `method = NAME`, if there, written as one arm. Raises: `ValueError` for `override`
    without `method`."""
    content = dict(content)
    name, changes = content.pop("method", None), content.pop("override", None)
    if name is not None:
        content["arms"] = {short_name(name): {"method": name, "override": changes or {}}}
    elif changes is not None:
        raise ValueError(
            "override changes the values of method = NAME, which is not given; for an arm of the "
            "recipe, write arms.NAME.override"
        )
    return content


def with_changes(content: Mapping[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """A recipe's plain values with "dotted.key=value" pairs in place of the file's.

    Raises: `RecipeError` naming what is not a pair, or stands below a value.
    """
    content = deepcopy(dict(content))
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or not key.strip():
            raise RecipeError(f"--set {change!r}: expected key=value, for instance lag.sync_every=4")
        *parents, last = key.strip().split(".")
        table = content
        for parent in parents:
            table = table.setdefault(parent, {})
            if not isinstance(table, dict):
                raise RecipeError(f"--set {change!r}: {parent!r} is a value, not a table")
        table[last] = parse_setting(text)
    return content


def with_files(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """A recipe's plain values, the files that they name looked for beside the recipe, too."""
    content, diagnosis = dict(content), content.get("diagnosis")
    for key in ("task", "reward"):
        if isinstance(content.get(key), str):
            content[key] = found_beside(path, content[key])
    if isinstance(diagnosis, dict) and isinstance(diagnosis.get("rules"), str):
        content["diagnosis"] = {**diagnosis, "rules": found_beside(path, diagnosis["rules"])}
    return content


def load_recipe(
    path: str | Path,
    *,
    changes: Sequence[str] = (),
    arm: str | None = None,
    arms: Sequence[str] | None = None,
    stored: Mapping[str, Any] | None = None,
) -> Recipe:
    """Read and check a recipe.

    Args:
        path: a TOML file.
        changes: "dotted.key=value" pairs that replace values of the file; values are TOML, or bare
            words taken as text.
        arm: keep this arm alone, or a method of this name (or in code) where the recipe has no such arm; the others
            are not checked.
        arms: those that are to be trained, if not all: one of them has to read what is changed.
        stored: settings of the run that the recipe is to go on with, {} if that is still to be found: values without
            effect are not refused, and where the run has the reading of an earlier version (`arm_tables.replaced`),
            that is the recipe's.

    Raises: `RecipeError` naming key, file and what was expected.

    Example:
        >>> load_recipe("recipes/tiny.toml", changes=["rollout.dtype=float16"]).rollout.dtype
        'float16'
    """
    path = Path(path)
    content = read_settings(path, "recipe")
    content = with_changes(_with_code_found(content, path, path.parent, Path.cwd()), changes)
    try:
        content = with_arms(content)
    except ValueError as e:
        raise RecipeError(f"{path}: {e}") from e
    content = _with_code_found(content, path, Path.cwd(), path.parent)
    every = content.get("arms", {})
    if arm is not None:
        content["arms"] = _one_arm(arm, every, path)
    content = {k: x for k, x in with_files(content, path).items() if x is not None}
    recipe = check_recipe(content, source=str(path))
    if stored is None:
        refuse_unread(
            {**content, "arms": every | content["arms"]} if arm is not None else content,
            str(path),
            changes=[change.partition("=")[0].strip() for change in changes],
            chosen=list({**every, **recipe.arms}) if arms is None else arms,
            without_old=[name for name in recipe.arms if not recipe.reads_old(name)],
        )
        return recipe
    only = {name: content["arms"][name] for name in recipe.arms if arms is None or name in arms}
    if stored and changed_settings(check_recipe({**content, "arms": only}, source=str(path)), stored):
        with suppress(RecipeError):
            earlier = check_recipe(replaced({**content, "arms": only}), source=str(path))
            return recipe if changed_settings(earlier, stored) else earlier
    return recipe


def _with_code_found(content: Mapping[str, Any], path: Path, *folders: Path) -> dict[str, Any]:
    try:
        return with_code_found(content, *folders)
    except MethodError as e:
        raise RecipeError(f"{path}: {e}") from e


def _one_arm(name: str, every: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The arm of that name, or one that trains with the method of that name, as a table of arms."""
    short = short_name(name)
    settings = every.get(short, {})
    if in_code(name) and "method" in settings:
        raise RecipeError(
            f"{path} has an arm {short!r}, which is another than {name}; write arms.NAME.method = {name!r} under "
            "another name"
        )
    if in_code(name):
        try:
            name = absolute(name, Path.cwd(), path.parent)
        except MethodError as e:
            raise RecipeError(f"{path}: {e}") from e
    return {short: {"method": name, **settings}}


def check_recipe(content: Mapping[str, Any], *, source: str) -> Recipe:
    """A recipe from plain values. Raises: `RecipeError` listing every problem."""
    try:
        return Recipe.model_validate(content)
    except ValidationError as e:
        raise RecipeError(f"{source}: {problems(e, Recipe, 'a recipe')}") from e


def changed_settings(recipe: Recipe, stored: Mapping[str, Any]) -> list[str]:
    """Settings that differ from a stored recipe's; one that the version which stored it did not have is its default.

    `diagnosis` is none of them: it changes no number of a run, whose record holds the rules that it was started with.
    """
    settings = plain(recipe.model_dump(mode="json", by_alias=True))
    # No recipe of this version: then as it stands. What a run stored names code, and runs none.
    with suppress(ValueError), without_loading():
        stored = plain(Recipe.model_validate(stored).model_dump(mode="json", by_alias=True))
    return sorted(key for key in settings if key != "diagnosis" and stored.get(key) != settings[key])


def problems(error: ValidationError, whole: type[Section], name: str) -> str:
    """Everything that is wrong with a file of settings, in words; `name` is what the file is."""
    return "; ".join(dict.fromkeys(_explain(problem, whole, name) for problem in error.errors()))


def _explain(problem: Mapping[str, Any], whole: type[Section], name: str) -> str:
    """A validation error in words; for an unknown key, with the keys that there are."""
    location = problem["loc"]
    key = ".".join(map(str, location))
    if problem["type"] == "missing":
        return f"{key} is missing"
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    if problem["type"] != "extra_forbidden":
        return f"{key} = {problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"
    part: Any = whole
    for step in location[:-1]:
        field = getattr(part, "model_fields", {}).get(step)
        kind = ArmSettings if field is None else field.annotation
        # OldPolicy | None: the part that the field holds, where it may be absent.
        part = next((x for x in get_args(kind) if hasattr(x, "model_fields")), kind)
    fields = getattr(part, "model_fields", {})
    names = ", ".join(field.alias or name for name, field in fields.items())
    where = ".".join(map(str, location[:-1])) + " has" if location[:-1] else f"{name} has"
    return f"unknown key {key!r}; {where} {names}"
