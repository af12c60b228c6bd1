r"""What tells one cause of engine disagreement from another: signatures of the log-ratio.

Write s for the distribution that drew the tokens, m for the one whose log-probs were recorded, p
for the second policy, and l = log p - log m. If the record is honest (m = s) and p gives no mass to
tokens that s cannot draw, then, *whatever the drift*,

    E[e^l] = sum_a s(a) p(a) / s(a) = 1                                              (1)

and E[-l] = KL(s || p) >= 0. The table turns this into tests that no amount of learning can fool.
With k1 = mean(-l) and k3 = mean(e^l - 1 - l), both of which every framework logs,

    mean e^l = 1 + k3 - k1                                                           (2)

so (1) can be tested on logs that never recorded it.

- **Raw log-probs** (recorded before the temperature, drawn after it; the trainer is right, p = s):
  E[e^l] = sum s^2 / m = 1 + chi2(s || m) > 1, and k1 = -KL(s || m) < 0, for every temperature. A KL
  that comes out negative is the same fact. A heavy tail that the sample missed errs the other way:
  it makes the mean too small.
- **Untempered trainer** (the record is honest, p forgot the temperature T): (1) holds, and
  log p = T log s + a number of the context, so the regression of log p on log m has a slope between
  T and 1 at high r2 (a spread of those numbers pulls it towards 1).
- **One-sided filter** (top-p or top-k renormalized the rollout's side alone: m = p / Z inside a
  nucleus of mass Z): l = log Z <= 0 on every token, E[e^l] = E[Z] < 1, and since l is small but
  one-sided, k1 = E[-log Z] is first order in 1 - Z while k3 is second order: the share
  (k1 - k3) / k1 is near 1. Drift of weights or precision has E[e^l] = 1, hence k1 = k3 and share 0.
  Filtered on the other side alone, signs turn over: l >= 0 wherever it is finite.
- **Off by one**: the second policy's log-probs match the rollout's neighbours better than its own.
- **Router flips** are rare and large, precision is everywhere and small: compare the share of k3
  that 1 % of the tokens carry. For Gaussian l it is 0.08; measured on SmolLM2, bfloat16 and int8
  engines give 0.16 and 0.19.
- **Wrong weights**: at claimed lag 0 the divergence grows as training goes on, for precision has no
  reason to grow, and the weights of an engine that is not updated fall behind.
"""

from __future__ import annotations

from offdrift.judge.kl_choice import joined_z
from offdrift.judge.readings.view import Measured, Table, View

SIGNATURES = Table()
SIGNATURES.levels({
    "slope_r2": ("{on}/slope_r2", "Share of variance that this regression explains"),
    "tail_share": ("{on}/k3_top_share", "Share of k3 that the 1 % of tokens with the largest k3 carry"),
    "delta_router": (
        "router/delta_router",
        "Share of a layer's experts whose membership differs between the engines, mean over tokens and layers: "
        "`router/delta_router` (`engines.routing.flip_rate`)",
    ),
})  # fmt: skip


@SIGNATURES.reading()
def ratio_mean(view: View) -> Measured | float | None:
    """Mean of e^l over tokens: `{on}/ratio_mean`, else 1 + k3 - k1; 1 in expectation whatever the drift."""
    if (logged := view.first("{on}/ratio_mean")) is not None:
        return logged
    k1, k3 = view.level("{on}/k1"), view.level("{on}/k3")
    return None if k1 is None or k3 is None else 1 + k3 - k1


@SIGNATURES.reading()
def ratio_mean_z(view: View, on: str | None = None) -> Measured | None:
    """Its distance from 1 in standard errors clustered by sequence; of the last `window_trend` steps together,
    sum z / sqrt(n)."""
    metric = f"{on or view.on}/ratio_mean_z"
    if view.overall is not None:
        return view.first(metric)
    z = joined_z(view.recent(metric))
    return None if z is None else Measured(z, metric)


@SIGNATURES.reading()
def slope_off(view: View) -> Measured | None:
    """Distance from 1 of the slope of the second policy's log-probs on the rollout's."""
    slope = view.first("{on}/slope")
    return None if slope is None else Measured(abs(slope.value - 1), slope.metric)


@SIGNATURES.reading()
def shift_gain(view: View) -> Measured | None:
    """Best correlation of the rollout's log-probs with the second policy's one token before or after, minus that
    at the same token."""
    own = view.level("{on}/shift_corr")
    best = view.largest("{on}/shift_corr_before", "{on}/shift_corr_after")
    return None if own is None or best is None else Measured(best.value - own, best.metric)


@SIGNATURES.reading()
def asymmetry(view: View) -> float | None:
    """(positive - negative) / (positive + negative) shares of tokens with |l| > 1e-3."""
    up, down = view.level("{on}/positive_frac"), view.level("{on}/negative_frac")
    return None if up is None or down is None or up + down == 0 else (up - down) / (up + down)


@SIGNATURES.reading()
def filter_share(view: View) -> float | None:
    """(k1 - k3) / k1: 0 for drift, near 1 for a filter on the rollout's side; absent if k1 <= 0."""
    k1, k3 = view.level("{on}/k1"), view.level("{on}/k3")
    return None if k1 is None or k3 is None or k1 <= 0 else (k1 - k3) / k1


@SIGNATURES.reading()
def tail_ratio(view: View) -> float | None:
    """Largest |l| over mean |l|."""
    most, mean = view.level("{on}/abs_log_ratio_max"), view.level("{on}/abs_log_ratio_mean")
    return None if most is None or not mean else most / mean


@SIGNATURES.reading()
def experts(view: View) -> float | None:
    """1 if the model is a mixture of experts (the context says so, or routed flips are logged), 0 if the context
    says not."""
    if view.context.mixture_of_experts is not None:
        return float(view.context.mixture_of_experts)
    return 1.0 if view.levels("router/delta_router", "router/flip_frac") else None


@SIGNATURES.reading()
def temperature_off(view: View) -> float | None:
    """Distance from 1 of the sampling temperature in the context."""
    return None if view.context.temperature is None else abs(view.context.temperature - 1)
