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
from offdrift.judge.readings.view import Definition, Found, View


def k3(view: View, on: str | None = None) -> Found | None:
    """The level of k3: of the engine ratio, unless told."""
    return view.found(f"{on or view.on}/k3")


def _ratio_mean(view: View) -> Found | float | None:
    on = view.on
    if (found := view.found(f"{on}/ratio_mean")) is not None:
        return found
    k1, third = view.level(f"{on}/k1"), view.level(f"{on}/k3")
    return None if k1 is None or third is None else 1 + third - k1


def ratio_mean_z(view: View, on: str | None = None) -> Found | None:
    """Of the whole run, or of the last steps together; of the engine ratio, unless told."""
    metric = f"{on or view.on}/ratio_mean_z"
    if view.overall is not None:
        return view.found(metric)
    z = joined_z(view.recent(metric))
    return None if z is None else Found(z, metric)


def _asymmetry(view: View) -> float | None:
    up, down = view.level(f"{view.on}/positive_frac"), view.level(f"{view.on}/negative_frac")
    return None if up is None or down is None or up + down == 0 else (up - down) / (up + down)


def _filter_share(view: View) -> float | None:
    k1, third = view.level(f"{view.on}/k1"), view.level(f"{view.on}/k3")
    return None if k1 is None or third is None or k1 <= 0 else (k1 - third) / k1


def _slope_off(view: View) -> Found | None:
    metric = f"{view.on}/slope"
    slope = view.level(metric)
    return None if slope is None else Found(abs(slope - 1), metric)


def _shift_gain(view: View) -> Found | None:
    """How much better a neighbour matches than the token itself."""
    own = view.level(f"{view.on}/shift_corr")
    beside = [view.found(f"{view.on}/shift_corr_{where}") for where in ("before", "after")]
    there = [f for f in beside if f is not None]
    if own is None or not there:
        return None
    best = max(there, key=lambda f: f.value)
    return Found(best.value - own, best.metric)


def _tail_share(view: View) -> Found | None:
    return view.found(f"{view.on}/k3_top_share")


def _tail_ratio(view: View) -> float | None:
    most, mean = (view.level(f"{view.on}/abs_log_ratio_{x}") for x in ("max", "mean"))
    return None if most is None or not mean else most / mean


def _experts(view: View) -> float | None:
    known = view.context.mixture_of_experts
    if known is None:
        logged = (view.level(f"router/{name}") for name in ("delta_router", "flip_frac"))
        return 1.0 if any(x is not None for x in logged) else None
    return float(known)


def _temperature_off(view: View) -> float | None:
    t = view.context.temperature
    return None if t is None else abs(t - 1)


SIGNATURES = {
    "ratio_mean": Definition("1", "mean of e^l over tokens: `{on}/ratio_mean`, else 1 + k3 - k1; 1 in expectation whatever the drift", _ratio_mean),
    "ratio_mean_z": Definition("1", "its distance from 1 in standard errors clustered by sequence; of the last `window_trend` steps together, sum z / sqrt(n)", ratio_mean_z),
    "slope_off": Definition("1", "distance from 1 of the slope of the second policy's log-probs on the rollout's", _slope_off),
    "slope_r2": Definition("1", "share of variance that this regression explains", lambda v: v.found(f"{v.on}/slope_r2")),
    "shift_gain": Definition("1", "best correlation of the rollout's log-probs with the second policy's one token before or after, minus that at the same token", _shift_gain),
    "asymmetry": Definition("1", "(positive - negative) / (positive + negative) shares of tokens with |l| > 1e-3", _asymmetry),
    "filter_share": Definition("1", "(k1 - k3) / k1: 0 for drift, near 1 for a filter on the rollout's side; absent if k1 <= 0", _filter_share),
    "tail_share": Definition("1", "share of k3 that the 1 % of tokens with the largest k3 carry", _tail_share),
    "tail_ratio": Definition("1", "largest |l| over mean |l|", _tail_ratio),
    "experts": Definition("1", "1 if the model is a mixture of experts (the context says so, or routed flips are logged), 0 if the context says not", _experts),
    "delta_router": Definition("1", "share of a layer's experts whose membership differs between the engines, mean over tokens and layers: `router/delta_router` (`engines.routing.flip_rate`)", lambda v: v.found("router/delta_router")),
    "temperature_off": Definition("1", "distance from 1 of the sampling temperature in the context", _temperature_off),
}  # fmt: skip
