"""How far apart two policies are at each token, and how surely that is known."""

from offdrift.divergence.evidence import Divergence as Divergence
from offdrift.divergence.evidence import Grade as Grade
from offdrift.divergence.exact import kl_and_tv as kl_and_tv
from offdrift.divergence.fused import exact_divergences as exact_divergences
from offdrift.divergence.interval import topk_divergences as topk_divergences
from offdrift.divergence.sampled import abs_log_ratio as abs_log_ratio
from offdrift.divergence.sampled import k1 as k1
from offdrift.divergence.sampled import k2 as k2
from offdrift.divergence.sampled import k3 as k3
