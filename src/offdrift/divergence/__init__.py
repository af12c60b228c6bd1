"""Divergences of two policies at each token, and the grade of evidence of each."""

from offdrift.divergence.evidence import Divergence as Divergence
from offdrift.divergence.evidence import Grade as Grade
from offdrift.divergence.exact import ExactDivergences as ExactDivergences
from offdrift.divergence.fused import exact_divergences as exact_divergences
from offdrift.divergence.fused import route as route
from offdrift.divergence.head import Head as Head
from offdrift.divergence.hidden import hidden_divergences as hidden_divergences
from offdrift.divergence.interval import tail_log_ratio as tail_log_ratio
from offdrift.divergence.interval import topk_divergences as topk_divergences
from offdrift.divergence.losses import entropy as entropy
from offdrift.divergence.losses import kl_current_rollout as kl_current_rollout
from offdrift.divergence.losses import kl_rollout_current as kl_rollout_current
from offdrift.divergence.sampled import abs_log_ratio as abs_log_ratio
from offdrift.divergence.sampled import k1 as k1
from offdrift.divergence.sampled import k2 as k2
from offdrift.divergence.sampled import k3 as k3
