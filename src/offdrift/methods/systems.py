"""`SYSTEMS`: techniques that act in an engine, a kernel, a scheduler or an optimizer, not in a loss.

They shrink the drift that methods correct, or bound it. Nothing here runs: a row says what the technique does, who
would have to do it, what this library has for it, and which numbers show that it works. What is left of the drift is
a method's business: see `related`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from offdrift.methods.method import Status


@dataclass(frozen=True, kw_only=True)
class System:
    """A technique that no loss can contain.

    Example:
        >>> from offdrift.methods.systems import SYSTEMS
        >>> SYSTEMS["tbik"].target
        'engines with different tensor-parallel sizes'
    """

    title: str
    summary: str
    aggregation: str = "n/a"
    """At what level it works, where it works at one."""
    mechanism: str
    is_treatment: str = "none"
    target: str
    model_class: Literal["dense", "MoE", "both"] = "both"
    fails: str
    where: str
    """Who would have to implement it, and what part of it is here."""
    here: tuple[str, ...] = ()
    """Functions of this library that compute a part of it."""
    watch: tuple[str, ...] = ()
    """Metrics that show whether it works."""
    related: tuple[str, ...] = ()
    """Methods that correct what it leaves."""
    reference: str
    status: Status = "stated"


WATCH = ("mismatch/k3", "mismatch/abs_log_ratio_max")
engine, scheduler = partial(System, watch=WATCH), partial(System, watch=("version_lag/max", "staleness/k3"))
"""Rows that act in an engine (what is replayed, which kernels, which precision), and around the loss (asynchrony,
buffers, the optimizer, the model), with the numbers that most of them are watched by."""

ENGINE_ROWS: dict[str, System] = {
    # -- routers, masks, caches: what the rollout did is replayed in training
    "r3": engine(
        title="R3, rollout routing replay",
        summary="the experts each token took in the rollout are taken again in every training pass",
        aggregation="token and layer, in the router",
        mechanism="replays the rollout's routing",
        target="routing flips between engines",
        model_class="MoE",
        fails="the surrogate becomes one for that routing: the router's drift is hidden, not made smaller",
        where=(
            "the engine's router must record expert indices (of the prompt, too), the trainer's forward pass "
            "must take them; not part of a loss: nothing here pretends to do it"
        ),
        related=("icepop", "gspo", "ring_1t"),
        reference="arXiv:2510.11370",
    ),
    "r2": engine(
        title="R2, vanilla routing replay",
        summary="the experts of the pass that scored the old policy are taken again in later updates",
        aggregation="token and layer, in the router",
        mechanism="replays the old policy's routing",
        target="routing that changes with the weights",
        model_class="MoE",
        fails="leaves routing flips between the engines as they are",
        where="the trainer's router, between two of its own passes; not part of a loss",
        watch=("staleness/k3",),
        related=("mini_rl", "gspo"),
        reference="arXiv:2512.01374; From Two Policies to Three, 2025",
    ),
    "keep_routing": engine(
        title="Keep Routing",
        summary="DeepSeek-V3.2's routing replay: the inference engine's expert paths are enforced in training",
        aggregation="token, in the router",
        mechanism="enforces the expert paths of sampling time",
        target="routing flips in production",
        model_class="MoE",
        fails="as R3; how gates are computed beyond the reused path is not published",
        where="the engine's router and the trainer's forward pass; deepseek_v32 is the rest of that recipe and says so",
        related=("deepseek_v32", "icepop"),
        reference="DeepSeek-V3.2, arXiv:2512.02556, section 3.1",
    ),
    "frozen_router_bias": engine(
        title="Frozen router bias",
        summary="the router's load-balancing bias stays fixed during RL, so that routing drifts less",
        aggregation="token, in the router",
        mechanism="a frozen parameter",
        target="routing that changes between versions",
        model_class="MoE",
        fails="the router no longer rebalances its experts' load",
        where="the model's own training code",
        watch=("staleness/k3",),
        related=("ring_1t", "icepop"),
        reference="Ring-1T, arXiv:2510.18855",
        status="secondary",
    ),
    "keep_sampling_mask": engine(
        title="Keep Sampling Mask",
        summary="the tokens that top-p and top-k left over are the only ones in the trainer's softmax",
        aggregation="token",
        mechanism="replays the sampler's truncation mask",
        target="policies over different sets of tokens",
        fails="half of it is worse than none: without the trainer's mask all ratios are too small on average",
        where=(
            "the sampler must record the kept tokens, the trainer must mask its logits; the log-probs given "
            "here must already be those"
        ),
        related=("deepseek_v32", "opsm"),
        reference="DeepSeek-V3.2, arXiv:2512.02556, section 3.1",
    ),
    "shadow_mask": engine(
        title="Shadow Mask Distillation",
        summary="a rollout with a compressed KV cache records what each token could see; training sees no more",
        aggregation="token",
        mechanism="replays the cache's retention mask, and distills into the dense model",
        target="sampling under a sparse context, learning under a dense one",
        fails="masks that differ by head and layer can only be approximated",
        where="the engine's cache and the trainer's attention; the distillation term needs two forward passes",
        related=("token_tis", "trm_max"),
        reference="arXiv:2605.06850",
    ),
    "respec": engine(
        title="ReSpec",
        summary="the drafter of speculative decoding is kept close to the policy that it drafts for",
        aggregation="speculation window",
        mechanism="drafter updated with the policy",
        target="stale drafters",
        fails="exact speculative sampling needs no correction: a drift of its log-probs is a bug",
        where="the serving engine",
        related=("token_tis",),
        reference="arXiv:2510.26475",
    ),
    "old_logits": engine(
        title="Missing Old Logits",
        summary="the old policy's log-probs at the version that sampled: snapshots, a scoring service, or interruption",
        aggregation="token",
        mechanism="recovers the old policy exactly",
        is_treatment="makes mismatch and staleness separable",
        target="asynchronous rollouts whose old log-probs were never saved",
        fails="a response written by several versions has no single old policy: here each token is scored at its own",
        where=(
            'the trainer: old_policy.from="sampling" (snapshots by version) or "second_model"; "ewma", '
            '"interpolated" and "rollout" stand in; without logp_old, methods on mismatch or staleness refuse'
            " the batch"
        ),
        watch=("old/exact_frac", "old/version_lag", "version_lag/max", "staleness/k3"),
        related=("decoupled_ppo", "a3po", "ppo_ewma", "bypass_ppo_clip"),
        reference="arXiv:2605.12070",
    ),
    # -- precision and kernels: both engines compute the same
    "fp16_alignment": engine(
        title="FP16 alignment",
        summary="both engines compute in float16, whose mantissa is 8 times finer than bfloat16's",
        mechanism="one precision on both sides",
        target="rounding differences of bfloat16",
        fails="the narrow range overflows without loss scaling",
        where=(
            "engine and trainer: --set rollout.dtype=float16 is the engine's half; the trainer's half belongs"
            " to the framework that trains (the trainer here computes in float32 or bfloat16 and refuses "
            "fp16)"
        ),
        related=("token_tis", "geo_mask"),
        reference="arXiv:2510.26788",
    ),
    "tbik": engine(
        title="TBIK, tree-based invariant kernels",
        summary="partial sums are added in one fixed tree, however many GPUs share a matrix",
        mechanism="reductions that do not depend on tensor parallelism",
        target="engines with different tensor-parallel sizes",
        fails="removes this one cause; costs a few percent of throughput",
        where="the kernels of both engines",
        related=("token_tis",),
        reference="arXiv:2511.17826",
    ),
    "bitwise": engine(
        title="Bitwise consistency",
        summary="every kernel of rollout and training engine gives the same bits",
        mechanism="audited kernels on both sides",
        target="all mismatch of the engines",
        fails="slow, and binds batch sizes, parallelism and fused kernels",
        where="the kernels of both engines; when it works, mismatch is 0, not small",
        related=("ppo_clip", "grpo"),
        reference="Wasti et al., vLLM and TorchTitan, 2025",
    ),
    "batch_invariant": engine(
        title="Batch-invariant inference",
        summary="a prompt's log-probs do not depend on what else is in the batch",
        mechanism="fixed order of reductions",
        target="nondeterminism from batch composition",
        fails="makes one engine repeat itself, not two engines agree",
        where="the engine's kernels",
        related=("token_tis",),
        reference="He et al., Thinking Machines Lab, 2025",
    ),
    "sglang_deterministic": engine(
        title="Deterministic inference in SGLang",
        summary="the same tokens under chunked prefill, CUDA graphs, radix cache and sampling with a seed",
        mechanism="deterministic kernels and sampler",
        target="rollouts that cannot be reproduced",
        fails="makes one engine repeat itself, not two engines agree",
        where=(
            "the SGLang server, started with --enable-deterministic-inference: the engine openai draws from "
            "it, and `offdrift check` measures whether it repeats itself"
        ),
        related=("token_tis",),
        reference="SGLang Team, 2025",
    ),
    "tim_harness": engine(
        title="TIM harness (VeXact)",
        summary="same weights, same prompts, no update: what is left between the engines is their mismatch",
        aggregation="token",
        mechanism="a test before training, not a correction",
        target="mismatch taken for staleness",
        fails="says how large the mismatch is, not which layer causes it",
        where=(
            "mismatch/* compares the engines at equal weights in every run whose batches carry logp_old; "
            "engines.score gives it"
        ),
        here=("offdrift.engines.score.score",),
        watch=("mismatch/k3", "mismatch/prob_diff_max", "mismatch/pearson"),
        related=("disabled", "token_tis"),
        reference="VeXact, arXiv:2605.14220",
    ),
    # -- quantization
    "jet_rl": engine(
        title="Jet-RL",
        summary="one FP8 flow for the rollout and for training's forward pass: nothing is left to correct",
        aggregation="token",
        mechanism="the same precision in both engines",
        target="mixed precision between the two sides",
        model_class="dense",
        fails="training itself is then in low precision",
        where="the GEMMs of both engines",
        related=("fp8_rl", "flashrl"),
        reference="arXiv:2601.14243",
    ),
    "fp8_calibration": engine(
        title="FP8 KV calibration (of FP8-RL)",
        summary="scales of the FP8 KV cache are measured again after every weight synchronization",
        aggregation="token",
        mechanism="fresh scales",
        target="a cache quantized with old scales",
        fails="the rest of the quantization error stays: correct it",
        where="the engine: vLLM's own calibration; fp8_rl is the loss side",
        related=("fp8_rl",),
        reference="FP8-RL, arXiv:2601.18150",
    ),
    "qarl": engine(
        title="QaRL's forward pass",
        summary="training's forward pass uses the rollout's low-bit kernels, with a straight-through gradient",
        aggregation="the whole forward pass",
        mechanism="quantization-aware training pass",
        target="quantized rollouts, error tokens in long answers",
        model_class="MoE",
        fails="a straight-through gradient is that of another function",
        where="the trainer's layers; tbpo is the loss that goes with it",
        related=("tbpo",),
        reference="arXiv:2604.07853",
        status="secondary",
    ),
    "uaq": engine(
        title="Invariant scaling (of QuRL)",
        summary="weights divided and activations multiplied by one factor: the same function on a finer grid",
        mechanism="an update-aware quantization grid",
        target="updates that vanish in the quantizer",
        model_class="dense",
        fails="the quantization error stays: qurl corrects it",
        where="the engine's quantizer",
        related=("qurl",),
        reference="QuRL, arXiv:2602.13953",
        status="secondary",
    ),
    "qerl": engine(
        title="QeRL",
        summary="4-bit rollouts with LoRA; quantization noise is wanted, as exploration, and annealed",
        aggregation="token",
        mechanism="noise with a schedule",
        target="too little exploration",
        model_class="dense",
        fails="the noisy policy is the rollout policy: ratios to the clean one are wrong",
        where="the engine's weights; record the noisy policy's log-probs and correct as always",
        watch=(*WATCH, "current/entropy"),
        related=("token_tis", "qurl"),
        reference="arXiv:2510.11696",
    ),
}

SCHEDULER_ROWS: dict[str, System] = {
    # -- how stale a rollout may be
    "one_step_off": scheduler(
        title="One-step off-policy",
        summary="a batch is drawn while the one before it is trained on: every token is one update old",
        aggregation="batch",
        mechanism="a lag of exactly one",
        target="engines that wait for each other",
        fails="a lag of one is mild, and still a lag",
        where="the scheduler; the lag itself can be had with --set lag.queue=1",
        related=("bypass_ppo_clip", "bypass_pg_geo_rs"),
        reference="verl, one-step off-policy",
        status="implementation",
    ),
    "verl_async": scheduler(
        title="Fully asynchronous verl",
        summary="rollout and trainer run on their own clocks; a share of stale samples is the limit",
        aggregation="batch",
        mechanism="bounded share of stale samples, partial rollouts",
        is_treatment="that of the method it runs with",
        target="idle engines",
        fails="the share of stale samples is no version gap: the oldest may be very old",
        where="the scheduler; see --set lag.sync_every and lag.queue for its drift without its speed",
        related=("decoupled_token_is", "bypass_ppo_clip"),
        reference="verl, fully asynchronous policy",
        status="implementation",
    ),
    "areal_admission": scheduler(
        title="AReaL's staleness control",
        summary="no more rollouts are started than will be trained on before they are too old",
        aggregation="batch",
        mechanism="bounded staleness by admission",
        is_treatment="that of areal",
        target="rollouts too old to use",
        fails="long answers are still the oldest",
        where="the scheduler; areal is the loss side",
        related=("areal", "decoupled_ppo", "a3po"),
        reference="AReaL, arXiv:2505.24298",
    ),
    "echo2_provisioning": scheduler(
        title="ECHO-2's provisioning",
        summary="how much rollout throughput and broadcast delay a chosen staleness allows",
        aggregation="token",
        mechanism="bounded staleness as the user's knob",
        is_treatment="that of echo2",
        target="staleness nobody chose",
        fails="the published rule could not be read, so none is here",
        where="the cluster's scheduler; echo2 rejects what is older than the bound",
        related=("echo2",),
        reference="ECHO-2, arXiv:2602.02192",
        status="unverified",
    ),
    "roll_flash_scheduler": scheduler(
        title="ROLL Flash's asynchronous ratio",
        summary="a sample whose policy is too many versions old is aborted and drawn again",
        aggregation="sample",
        mechanism="bounded version gap per sample",
        is_treatment="that of roll_flash",
        target="staleness of single samples",
        fails="aborts long answers more often than short ones",
        where="the scheduler; roll_flash rejects in the loss what would have been aborted",
        related=("roll_flash",),
        reference="ROLL Flash, arXiv:2510.11345",
    ),
    "periodic_async": scheduler(
        title="Periodic Asynchrony",
        summary="rollout and training overlap inside a batch, and weights are synchronized after each one",
        aggregation="batch",
        mechanism="none needed: a synchronization after each batch",
        target="idle engines, without staleness",
        fails="the longest answer of a batch still delays the synchronization",
        where="the scheduler; when it works, the version lag is 0 everywhere",
        related=("ppo_clip", "grpo"),
        reference="arXiv:2511.18871",
    ),
    "seer": scheduler(
        title="Seer",
        summary="synchronous rollouts made fast: answers divided, scheduled by context, drafted in groups",
        aggregation="batch",
        mechanism="none needed: synchronous",
        target="the long tail of synchronous rollouts",
        fails="speeds up, corrects nothing",
        where="the engine's scheduler",
        watch=("response/length_max", "version_lag/max"),
        related=("ppo_clip", "grpo"),
        reference="arXiv:2511.14617",
    ),
    "dora": scheduler(
        title="DORA",
        summary="several versions roll out at once, each answer by one version alone, none dropped for its length",
        aggregation="trajectory",
        mechanism="one version per trajectory, bounded staleness",
        is_treatment="bounded staleness",
        target="idle time of asynchrony, answers written by several versions",
        fails="several versions have to stay in memory",
        where="the engine's scheduler; the version that drew each token is recorded with the rollouts here",
        related=("echo2", "roll_flash", "old_logits"),
        reference="arXiv:2604.26256",
    ),
    "async_topologies": scheduler(
        title="LlamaRL, AsyncFlow, DistFlow, Laminar",
        summary="who sends weights and samples to whom: fewer waits, hence less lag",
        mechanism="topology",
        target="idle engines",
        fails="contains no correction: the lag that is left needs one",
        where="the cluster's scheduler",
        related=("token_tis", "echo2"),
        reference="arXiv:2505.24034, 2507.01663, 2507.13833, 2510.12633",
    ),
    "async_rlhf": scheduler(
        title="Asynchronous RLHF",
        summary="how much lag is tolerable depends on the objective; online DPO tolerates most",
        mechanism="choice of the objective",
        target="asynchronous RLHF",
        fails="a finding, not a technique",
        where="the choice of the objective; preference losses are not in this table",
        related=("oapl", "vespo"),
        reference="arXiv:2410.18252",
    ),
    # -- what is drawn again
    "freshper": scheduler(
        title="Freshness-aware prioritized replay",
        summary="old rollouts are trained on again, with a priority that decays with their age",
        aggregation="sequence",
        mechanism="priority exp(-age / tau)",
        is_treatment="inverse of the sampling priority",
        target="priorities that go stale",
        fails="a replayed answer is as stale as it is old",
        where=(
            "the replay buffer, which this trainer does not have; train on its batches with a method on the full ratio"
        ),
        related=("seq_tis", "token_tis", "oapl"),
        reference="arXiv:2604.16918",
    ),
    "replay_buffer": scheduler(
        title="Experience replay",
        summary="rollouts are kept and used several times: staleness is traded for the cost of generation",
        aggregation="sequence",
        mechanism="limited age and number of uses",
        is_treatment="that of the method it runs with",
        target="the cost of generation",
        fails="diversity falls and variance grows with every use",
        where="the replay buffer, which this trainer does not have; --set optim.epochs=2 uses each batch twice",
        related=("token_tis", "oapl", "vespo"),
        reference="arXiv:2604.08706",
    ),
    "logit_fusion_rollouts": scheduler(
        title="Logit fusion of teacher and student",
        summary="tokens are drawn from mixed logits of teacher and student, and the mixture fades out",
        aggregation="token",
        mechanism="a mixture that decays to 0",
        is_treatment="that of logit_fusion",
        target="prompts on which the student never succeeds",
        fails="two models decode in lockstep, which fast engines do not do",
        where="the sampler; record the mixture's log-probs as the rollout policy",
        here=("offdrift.methods.schedules.fused_logits", "offdrift.methods.schedules.alpha_decay"),
        watch=("full/k3", "full/ess_frac"),
        related=("logit_fusion", "shaped_is"),
        reference="Logit Fusion, 2026",
    ),
    # -- the optimizer and the model
    "lr_surge": scheduler(
        title="Learning-rate scheduling on length surges",
        summary="when answers suddenly become longer, the learning rate is halved, again and again",
        mechanism="a learning rate that falls after a surge of length",
        target="mismatch amplified by the optimizer",
        fails="reacts to one symptom; the mismatch stays",
        where=(
            "the optimizer: the scale can be computed here, the trainer does not apply it; vcpo is a method "
            "that scales by the effective sample size"
        ),
        here=("offdrift.methods.schedules.LengthSurge",),
        watch=("response/length_mean", "optim/grad_norm"),
        related=("vcpo",),
        reference="arXiv:2602.01826",
        status="secondary",
    ),
    "gac": scheduler(
        title="GAC, gradient alignment control",
        summary="the part of a gradient that points along the previous one is taken out",
        aggregation="step",
        mechanism="projection of the gradient",
        target="stale gradients that align, unseen by KL, chi-squared and ESS",
        fails="costs a copy of the gradient; the threshold is not published",
        where="the optimizer: the projection can be computed here, the trainer does not apply it",
        here=("offdrift.methods.schedules.gac_projection",),
        watch=("optim/grad_norm",),
        related=("m2po",),
        reference="arXiv:2603.01501",
        status="unverified",
    ),
    "alp": scheduler(
        title="ALP, adaptive layerwise perturbation",
        summary="the updated policy is scored with learnable noise in each layer's input, which flattens ratios",
        aggregation="that of the loss it goes with",
        mechanism="a perturbed forward pass",
        is_treatment="ratio of the perturbed policy to the rollout policy",
        target="heavy tails of the ratio",
        fails="noise must be drawn alike when activations are recomputed, and be off in the rollout",
        where=(
            "the model's layers; give the perturbed pass's log-probs as logp, and any method on the full "
            "ratio works as it is"
        ),
        watch=("full/chi2_token", "full/ess_frac"),
        related=("token_is", "bypass_ppo_clip", "bypass_pg_is"),
        reference="arXiv:2603.19470",
        status="implementation",
    ),
    "compassmax": scheduler(
        title="CompassMax's stack",
        summary="routing replay, ESPO, removal of prompts without variance, a generative judge and FP8 rollouts",
        aggregation="that of espo",
        mechanism="layers of several techniques",
        is_treatment="that of espo",
        target="mixtures of experts in production",
        model_class="MoE",
        fails="no layer suffices alone",
        where="routing and FP8 in the engine, prompts and judge in the data; espo is the loss side",
        watch=("mismatch/k3", "reward/mean"),
        related=("espo", "fp8_rl"),
        reference="CompassMax-V3-Thinking, arXiv:2512.07710",
    ),
}

FAMILIES: dict[str, dict[str, System]] = {"in the engine": ENGINE_ROWS, "around the loss": SCHEDULER_ROWS}

SYSTEMS: dict[str, System] = {n: row for rows in FAMILIES.values() for n, row in rows.items()}


FACTS = (
    "name kind family title summary unit ratio evidence sign stop_gradient certifies raises aggregate mechanism "
    "is_treatment target model_class fails bias reference status experimental where here watch related"
)
"""What is said of a row, in this order; what a technique outside the loss does not have is None."""


def facts(name: str, row: System) -> dict[str, Any]:
    """All that is known of a row, as plain data, with the keys that `axes.facts` has, too."""
    words = {k: list(x) if isinstance(x, tuple) else x for k, x in vars(row).items()}
    words |= {"name": name, "kind": "system", "aggregate": row.aggregation, "experimental": row.status == "unverified"}
    words |= {"family": next(title for title, rows in FAMILIES.items() if name in rows)}
    words |= {"unit": [], "ratio": [], "evidence": []}
    return {key: words.get(key) for key in FACTS.split()}
