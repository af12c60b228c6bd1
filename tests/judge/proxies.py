"""The proxies of the gradient's noise, of a whole batch at once."""

from torch import Tensor

from offdrift.segments import Segments
from offdrift.stats import DriftStats
from offdrift.stats.metrics import PROXIES, gradient_power


def variance_proxies(
    sum_pi_squared: Tensor, logp: Tensor, advantages: Tensor, segments: Segments, *, grad_norm: float, **options
) -> dict[str, float]:
    """By their names in METRICS; options as in `gradient_power`."""
    none = sum_pi_squared.new_zeros(0).double()
    sums = gradient_power(sum_pi_squared, logp, advantages, segments, **options)
    numbers = DriftStats((), none, (), none, (), none, {}).plus(sums, {"optim/grad_norm": grad_norm}).to_host()
    return {row.name: row.value(numbers) for row in PROXIES}
