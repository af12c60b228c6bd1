"""`READINGS`: what the rules look at, each one number, derived from the metrics of the last steps.

A level is the median over the last `window_level` steps, so that one odd batch neither raises nor
hides anything; for the whole run it is the number of the whole run, if the context holds it.
`{on}` is the engine ratio: `mismatch` where the log has the old policy, else `full`. l is the second
policy's log-prob minus the rollout's.

`WORDINGS`: what a reading is called, and how its number is written, where it is evidence of a finding. One that is the
level of one metric is called by the metric's name; one that is derived from it (a distance, a growth, a fall, a yes or
no) has words of its own, so that no name stands for two numbers.
"""

from __future__ import annotations

from typing import NamedTuple

from offdrift.judge.findings import Scale
from offdrift.judge.readings.health import HEALTH
from offdrift.judge.readings.history import LAG, TRENDS
from offdrift.judge.readings.levels import LEVELS
from offdrift.judge.readings.shapes import SHAPES
from offdrift.judge.readings.view import Definition

READINGS: dict[str, Definition] = {**LEVELS, **LAG, **TRENDS, **SHAPES, **HEALTH}
"""What rules compare with thresholds, by name (docs/rules.md): how each is read off a history of metrics."""


class Wording(NamedTuple):
    """One reading in words."""

    words: str
    """`{metric}` stands for the metric that it was read from."""
    scale: Scale = "number"


PLAIN = Wording("{metric}")
OVER_MEDIAN = "{metric}, over that of the median worker"
LATELY = "mean of {metric} over the last steps"
IDLE = "steps of the run in which {metric} stayed 0"

WORDINGS: dict[str, Wording] = {
    # distances
    "ppl_off": Wording("distance of {metric} from 1"),
    "slope_off": Wording("distance of {metric} from 1"),
    "spread_off": Wording("{metric} over the root of its r2 (spread of one side over the other's), distance from 1"),
    "entropy_gap": Wording("size of {metric}, less what drift explains at most"),
    "len_times": Wording("{metric} now, over that of the first steps", "times"),
    "entropy_z": Wording("logged entropies less what log-probs let expect, in standard errors ({metric})"),
    "base_off": Wording("distance of {metric} from that of another base of logarithms, a share of it"),
    "ratio_tokens_z": Wording("mean ratio less 1, over its error as the mean of so many tokens"),
    "temperature_off": Wording("distance of the sampling temperature from 1"),
    "worker_ratio_off": Wording("distance of {metric} from 1"),
    "worker_ratio_z": Wording("size of {metric}"),
    "worker_z": Wording("{metric} less that of the median worker, in standard errors"),
    "worker_lag": Wording("{metric}, less that of the median worker"),
    "lag_before_batch": Wording("{metric}, less the updates on the batch itself"),
    "lag_at_arrival": Wording("{metric}, less that of the old policy and the updates on the batch itself"),
    "lag_spread": Wording("largest version lag less the smallest mean of a step"),
    "kl_per_update": Wording("{metric} that one update adds"),
    "shift_gain": Wording("correlation with a neighbor's log-prob, less that with the same token's ({metric})"),
    "shift_z": Wording(
        "correlation with a neighbor's log-prob less that with the same token's, in standard errors ({metric})"
    ),
    "same_token_corr": Wording("correlation of both policies' log-probs of the same token ({metric})"),
    "ratio_mean_z": Wording("{metric}, standard errors from 1"),
    # multiples
    "worker_growth": Wording(OVER_MEDIAN, "times"),
    "worker_ratio_growth": Wording("distance of {metric} from 1, over that of the median worker", "times"),
    "kl_over_same": Wording("{metric}", "times"),
    "offset_uneven": Wording("{metric} of sure, likely, unsure and rare tokens: farthest from that of all", "share"),
    "old_over_full": Wording("{metric}, old against rollout, over that of current against rollout", "times"),
    "kl_same_growth": Wording("{metric}", "times"),
    "kl_same_jump": Wording("{metric}", "times"),
    "lag_growth": Wording("{metric}", "times"),
    "len_ratio": Wording("{metric} now, over that before", "times"),
    "grad_spike": Wording("{metric} over its usual value", "times"),
    "clip_widened": Wording("{metric} over its smallest", "times"),
    "averaged_max": Wording("root mean square over the logged maximum ({metric})", "times"),
    "tail_ratio": Wording("largest |log-ratio| over the mean one", "times"),
    # shares
    "tail_share": Wording("share of the divergence in the worst 1 % of tokens ({metric})", "share"),
    "ess": Wording("{metric}", "share"),
    "unit_too_coarse": Wording("share of the divergence in the worst 1 % of tokens ({metric})", "share"),
    "ess_after_rs": Wording("{metric} of what rejection leaves", "share"),
    "ess_left": Wording("{metric} over its usual value", "share"),
    "advantage_corr_high": Wording("{metric}, at most"),
    "engine_still": Wording("steps since {metric} rose, over the longest wait before", "times"),
    "engine_never": Wording("steps at which {metric} is the same"),
    "drift_rising": Wording("{metric} rises", "yes"),
    "reward_step_at": Wording("step from which on {metric} is lower"),
    "reward_step": Wording("{metric} after one step, over that before it", "share"),
    "entropy_left": Wording("{metric} over that of the first of these steps", "share"),
    "truncated_now": Wording("{metric}, which rose", "share"),
    "critic_level": Wording("{metric} lately", "share"),
    "critic_loss_times": Wording("{metric} over that of the first of these steps", "times"),
    "gap_jump": Wording("{metric} after one step, over that before it", "times"),
    "flat_groups": Wording("{metric}: groups, or steps, in which all earn the same", "share"),
    "reward_drop": Wording("fall of {metric} from its best", "share"),
    "lr_ratio": Wording("{metric} over its largest so far", "share"),
    "acceptance_of_long": Wording("{metric}: of the longest responses over that of the shortest", "share"),
    "rs_masked": Wording("{metric}", "share"),
    "acceptance": Wording("{metric}", "share"),
    "stepped_without_gradient": Wording(
        "share of the last steps in which {metric} was 0 and a step was taken", "share"
    ),
    "icepop_oob": Wording("{metric}: tokens that the band masks", "share"),
    "band_masked": Wording(LATELY, "share"),
    "truncated": Wording(LATELY, "share"),
    "critic_explains": Wording(LATELY, "share"),
    "clip_frac": Wording("{metric}", "share"),
    "worker_idle": Wording("{metric}", "share"),
    "ever_unscored": Wording("{metric}", "share"),
    "side_field_lacking": Wording("{metric}", "share"),
    "flat_rewards": Wording("share of steps at which {metric} is 0", "share"),
    "flat_advantages": Wording("share of steps at which {metric} is 0", "share"),
    "advantages_misplaced": Wording("{metric}", "share"),
    "again": Wording("{metric}", "share"),
    "filter_share": Wording("(k1 - k3) / k1: 0 for drift, near 1 for a filter"),
    "asymmetry": Wording("share of positive log-ratios less that of negative ones"),
    # over the last steps
    "weight_mean": Wording(LATELY),
    "weight_spread": Wording(LATELY),
    "chi2_seq_usual": Wording("median of {metric} over the last steps"),
    "workers_lost": Wording("{metric}, sum over the last steps"),
    "prob_diff_max": Wording("{metric}: largest of the last steps"),
    "idle_gate": Wording(IDLE),
    "idle_cap": Wording(IDLE),
    # yes and no
    "weighted": Wording("importance weights differ ({metric} is above 0)", "yes"),
    "broken": Wording("{metric} is NaN or infinite", "yes"),
    "shifted_frac": Wording("responses that are shifted by one token ({metric})", "share"),
    "old_is_current": Wording("old log-probs are the current ones, to the bit ({metric} is 0)", "yes"),
    "columns_equal": Wording("both columns are equal to the bit ({metric} is 0)", "yes"),
    "old_copied": Wording("old log-probs are the rollout's, to the bit ({metric} is 0)", "yes"),
    "probabilities": Wording("a column of log-probs holds probabilities ({metric})", "yes"),
    "negated": Wording("a column of log-probs holds their negatives ({metric})", "yes"),
    "not_per_token": Wording("a column holds no log-prob for each token ({metric})", "yes"),
    "filter_unreplayed": Wording("rollouts are filtered, and the trainer scores whole vocabularies", "yes"),
    "cache_unreplayed": Wording("the engine's cache is compressed, and the trainer's attention is not", "yes"),
    "raw_stated": Wording("log-probs were taken before the temperature or filters, as the log states", "yes"),
    "sequence_weights": Wording("the method weights by products over whole sequences", "yes"),
    "inert_weights": Wording("policies differ, and all importance weights are equal ({metric} is 0)", "yes"),
    "experts": Wording("the model is a mixture of experts", "yes"),
    "same_ckpt": Wording("the whole log was taken at the same weights", "yes"),
    "same_logged": Wording("every step states that its tokens were drawn by the weights that score them", "yes"),
    "clip_rising": Wording("{metric} rises", "yes"),
    "proxy3_rising": Wording("{metric} rises", "yes"),
}
"""By the name of the reading; one that is not here is called by its metric."""

UNMEASURED = {
    "kl": "KL of rollout and trainer",
    "kl_full": "KL of rollout and current policy",
    "kl_since_old": "KL of old and current policy",
    "kl_same_ckpt": "KL at the same weights",
    "pearson_same_ckpt": "correlation of probabilities at the same weights",
    "pearson": "correlation of probabilities",
    "mean_gap": "mean |log-ratio|",
    "ratio_mean": "mean ratio",
}
"""What a reading is called that could not be made, and so has no metric."""


def worded(reading: str, metric: str) -> Wording:
    """Name the number of a reading, given the metric that it was read from.

    Example:
        >>> worded("slope_off", "mismatch/slope")
        Wording(words='distance of mismatch/slope from 1', scale='number')
        >>> worded("asymmetry", "asymmetry").words
        'share of positive log-ratios less that of negative ones'
    """
    words, scale = WORDINGS.get(reading, PLAIN)
    if metric == reading:  # read from several metrics, or from the context: it has no name but its own
        words = words.replace(" ({metric})", "").replace("{metric}", UNMEASURED.get(reading, reading))
    return Wording(words.replace("{metric}", metric), scale)
