"""Facts of a method, read off its parts (nothing is typed in by hand for any row); look-ups over methods and systems.

`facts` holds all of it, for the terminal, for JSON and for docs/methods.md: over what ratios are taken (`units`),
which are read (`ratios`), what has to be recorded (`evidence`), whether both signs of the advantage are treated alike
(`sign`), whether ratios are constants to the gradient, what the trained objective `certifies`, and which return it
`trained_return`.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterable
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from typing import Any, get_args

import torch

from offdrift.advantages import ADVANTAGES
from offdrift.methods import probe
from offdrift.methods.load import IN_CODE, code_source, load_method
from offdrift.methods.method import PLAIN, SINGLE, Method, part_units
from offdrift.methods.published import SHOWN_AT, STOP_GRADIENT, ShownAt, published_ranges
from offdrift.methods.situations import SITUATIONS, USED_BY
from offdrift.methods.table import FAMILIES, METHODS, SYSTEM_FAMILIES, SYSTEMS, System
from offdrift.ratios import RatioName

UNITS = {
    "token": "each token by itself",
    "prefix": "product of ratios over the tokens up to each one",
    "prefix_min": "each token's ratio, times the smallest one before it",
    "from_first": "each token, from the first of its response that is outside on",
    "future": "discounted product of ratios from each token to the end of the response",
    "turn": "geometric mean of ratios over an assistant turn",
    "turn_product": "product of ratios over an assistant turn",
    "turn_arithmetic": "mean of ratios over an assistant turn",
    "entropy_group": "geometric mean of ratios over tokens of similar entropy in a response",
    "geometric": "geometric mean of ratios over a response",
    "sequence": "product of ratios over a response",
    "seq_mean": "mean of a statistic over a response",
    "seq_sum": "sum of a statistic over a response",
    "worst": "the worst token of a response decides",
    "group": "all responses to a prompt",
    "batch": "all tokens of a step, over all ranks",
}
"""Units in the order they are shown. A gate's `seq_max` is called worst."""

EVIDENCE = {
    "none": "compares no policies",
    "sampled": "log-probs of the sampled tokens",
    "exact": "divergences of whole distributions, or of their top k tokens",
    "versions": "which weights drew each token",
}
SYMMETRIC, BY_SIGN, BY_OUTCOME = "symmetric", "by sign of the advantage", "by outcome of the answer"
SIGNS = {
    SYMMETRIC: "turning the sign of the advantage turns the push and changes nothing else",
    BY_SIGN: "positive and negative advantages are limited in different ways",
    BY_OUTCOME: "correct and incorrect answers, told apart by their reward, are limited in different ways",
}
STOPPED = {
    "yes": "every ratio is a constant; the gradient goes through log pi",
    "unit": "the unit's ratio is a value; its gradient goes through each token's own log-prob",
    "no": "the gradient goes through the ratio of the whole unit",
    "n/a": "contains no ratio",
}
CERTIFIES = {
    "any mismatch": "the summed objective less KL_seq is a lower bound of the gain of J, for A = R - b(prompt) and "
    "R, b in [0, 1]",
    "no mismatch": "where engine and trainer agree at equal weights, the summed objective less KL_seq is a lower bound "
    "of the gain of J, for A = R - b(prompt) and R, b in [0, 1]",
    "no baseline": "where engine and trainer agree at equal weights and the advantage is the reward itself, the summed "
    "objective less KL_seq is a lower bound of the gain of J",
    "region": "the masked surrogate of accepted answers bounds the return's gain without a premise: `offdrift certify`",
    "none known": "the objective looks at more than one token, or promises more than policies keep",
}
RETURNS = {
    "seq_mean_token_sum": "{}",
    "token_mean": "{} / E[|y|]",
    "fixed": "{} / horizon",
    "seq_mean_token_mean": "E[({} - b) / |y|]",
}
"""What each aggregate makes of the mean of a reward; E[|y|] is the mean length under the rollout policy."""
DEFAULT_ADVANTAGE = "grpo"
"""The estimator of methods that were published without one."""
SYMBOLS = {
    "|y|": "tokens of a response",
    "b": "the baseline, a number per prompt",
    "sigma": "standard deviation of the rewards of a prompt under the rollout policy",
    "p": "mean reward of a prompt under the rollout policy",
    "n": "answers to a prompt",
}
AGGREGATES = {
    "token_mean": "sum over all tokens, divided by the tokens",
    "seq_mean_token_mean": "mean over the tokens of each response, mean over responses",
    "seq_mean_token_sum": "sum over the tokens of each response, mean over responses",
    "fixed": "sum over all tokens, divided by responses times a fixed horizon",
}
BIASES = {
    "none": "the expected gradient is that of the true return",
    "none inside limits": "the expected gradient is that of the true return until a limit acts",
    "O(drift)": "grows in proportion to the drift",
    "O(drift^2)": "grows with the square of the drift",
    "O(1)": "does not vanish with the drift",
}
STATUS = {
    "stated": "in a primary source",
    "implementation": "from an official implementation",
    "secondary": "from a secondary description",
    "unverified": "experimental; no equation could be found, this is our best reading",
}
# -- axes -----------------------------------------------------------------------------------------


def units(row: Method) -> frozenset[str]:
    """Over what objective, weights and gates compare policies; "token" if they compare none.

    Example:
        >>> from offdrift.methods import method
        >>> sorted(units(method("trm_max")))
        ['token', 'worst']
    """
    return frozenset({unit for part in row.parts for unit in _units_of(part)} or {"token"})


def ratios(row: Method) -> frozenset[str]:
    """Ratios that are read, among full, mismatch and staleness; empty for none.

    Example:
        >>> from offdrift.methods import method
        >>> sorted(ratios(method("icepop")))
        ['mismatch', 'staleness']
    """
    deciding = (*row.correction.gates, *row.correction.weights, row.objective)
    read = (getattr(p, "of", p.on) for p in deciding if getattr(p, "statistic", None) != "version_lag")
    return frozenset(on for on in read if on is not None)


def evidence(row: Method) -> frozenset[str]:
    """Evidence that has to be recorded of the rollout: see `EVIDENCE`.

    Example:
        >>> from offdrift.methods import method
        >>> [sorted(evidence(method(n))) for n in ("none", "token_tis", "trm_max")]
        [['none'], ['sampled'], ['exact']]
    """
    versions = any(getattr(g, "statistic", None) == "version_lag" for g in row.correction.gates)
    kinds = {"versions"} if versions or "version_lag" in row.needs else set()
    if row.needs_divergences:
        kinds.add("exact")
    elif ratios(row):
        kinds.add("sampled")
    return frozenset(kinds or {"none"})


@cache
def sign(row: Method) -> str:
    """Say whether both signs of the advantage, and answers of either outcome, are treated alike.

    Symmetric means, on a small drifted batch: gates and weights are the same for A and -A, and the
    gradient g of the objective obeys g(A) - g(0) = g(0) - g(-A).

    Example:
        >>> from offdrift.methods import method
        >>> sign(method("token_tis")), sign(method("topr"))
        ('symmetric', 'by outcome of the answer')
    """
    deciding = (*row.correction.gates, *row.correction.weights)
    if any(getattr(part, "advantage", "any") != "any" for part in deciding):
        return BY_SIGN
    if any(getattr(part, "outcome", "any") != "any" for part in deciding):
        return BY_OUTCOME
    same = torch.equal(*(probe.corrected(row.correction, scale=s) for s in (1, -1)))
    up, flat, down = (probe.push(row.objective, scale=s) for s in (1, 0, -1))
    odd = torch.allclose(up - flat, flat - down, rtol=1e-9, atol=1e-12)
    return SYMMETRIC if same and odd else BY_SIGN


def stop_gradient(row: Method) -> str:
    """Say whether ratios are constants to the gradient: see `STOPPED`."""
    if any(getattr(weight, "reads_current", False) for weight in row.correction.weights):
        return "yes"
    if not ratios(row):
        return "n/a"
    default = "score" if row.objective.on is None else "unit"
    gradient = getattr(row.objective, "gradient", default)
    return {"score": "yes", "token": "unit", "unit": "no"}[gradient]


def trained_return(aggregate: str, advantage: str) -> dict[str, Any]:
    """The return that a step raises, in place of J = E[R]: what the trained objective is about.

    Aggregates and advantages weigh prompts and responses, and a weight changes the reward: the gradient at equal
    policies is that of the mean of (R - b) times the weight, and so is what the objective certifies
    (docs/certificates.md, "Aggregation and normalization").

    Args:
        aggregate: a key of `AGGREGATES`.
        advantage: a key of `ADVANTAGES`.

    Returns: `return`, the formula up to a baseline and a positive constant (None if none is known); `is_j`, whether
        it is J in other units, so that it cannot rise while J falls; `provided`, what that takes for granted;
        `for_j`, the settings of a recipe that would make it J; and `words`, all of it but the settings.

    Example:
        >>> trained_return("token_mean", "rloo")["words"]
        'J / E[|y|]: J in other units. |y|: tokens of a response'
        >>> trained_return("seq_mean_token_mean", "grpo")["return"]
        'E[(R / sigma - b) / |y|]'
    """
    estimator, by_length = ADVANTAGES[advantage], aggregate == "seq_mean_token_mean"
    reward = estimator.stands_for
    inside = reward if by_length else "J" if reward == "R" else f"E[{reward}]"
    unknown = not reward or (by_length and estimator.baseline == "token")
    formula = None if unknown else RETURNS[aggregate].format(inside)
    changes = ["override.aggregate=token_mean"] * by_length + ["optim.advantage=rloo"] * (reward != "R")
    if not reward:
        words = "none known: in groups without a spread tokens are pushed by the policy's entropy, not by a reward"
    elif formula is None:
        words = "none known: responses weigh by their length, and each token has a baseline of its own"
    elif changes:
        words = f"{formula}, not J = E[R]: it can rise while J falls"
    else:
        words = "J = E[R]" if formula == "J" else f"{formula}: J in other units"
    if estimator.provided:
        words += f". Provided: {estimator.provided}"
    used = [
        f"{symbol}: {meaning}" for symbol, meaning in SYMBOLS.items() if symbol in re.split(r"[^\w|]+", formula or "")
    ]
    return {
        "return": formula,
        "is_j": formula is not None and not changes,
        "advantage": advantage,
        "provided": estimator.provided,
        "for_j": changes,
        "words": ". ".join([words, *(["; ".join(used)] if used else [])]),
    }


def raised_by(row: Method, advantage: str) -> dict[str, Any]:
    """`trained_return` of a method with an advantage estimator; where none is read, what the objective says."""
    name: str | None = getattr(row.objective, "trained_return", None)
    if name is None:
        return trained_return(row.aggregate, advantage)
    words = f"{name}, not J = E[R]: it can rise while J falls"
    return {"return": name, "is_j": False, "advantage": advantage, "provided": "", "for_j": [], "words": words}


REWARDS, BASELINES = (0.0, 0.5, 1.0), (0.0, 0.25, 0.5, 0.75, 1.0)
MISMATCHES = (0.02, 0.4, 0.9, 1.1, 2.5, 50.0)


@cache
def certifies(row: Method) -> str:
    """For which baselines b and mismatches m the objective that is trained certifies itself: see `CERTIFIES`.

    Rewards R lie in [0, 1], advantages are A = R - b(prompt). With Phi what the method maximizes for a token
    (`probe.integrated_push`) and k3(w) = w - 1 - log w, it does if for every s = pi / pi_old

        Phi(A, m, s) <= A m (s - 1) + (1 - R) k3(m s)

    since then J(pi) - J(mu) >= E_mu[ sum_t (Phi_t + A (m_t - 1)) ] - KL_seq(mu || pi), if pi draws nothing mu
    cannot (docs/certificates.md, eq. 12). Checked on a grid. Rows that look at more than one token at a time, or at
    more of a policy than the drawn token, are "region" if gates on exact divergences alone decide what they accept,
    else "none known".

    Example:
        >>> from offdrift.methods import method
        >>> [certifies(method(n)) for n in ("token_is", "ppo_clip", "dual_clip", "trm_max", "gspo")]
        ['any mismatch', 'no mismatch', 'no baseline', 'region', 'none known']
    """
    if units(row) != {"token"} or row.needs_whole_step or "distributions" in row.needs:
        gates = row.correction.gates
        exact = gates and all(getattr(g, "exact", False) and getattr(g, "unit", "") == "seq_max" for g in gates)
        return "region" if exact else "none known"
    for baselines, mismatches, word in (
        (BASELINES, (1.0, *MISMATCHES), "any mismatch"),
        (BASELINES, (1.0,), "no mismatch"),
        ((0.0,), (1.0,), "no baseline"),
    ):
        cases = ((reward, b, m) for m in mismatches for reward in REWARDS for b in baselines if reward != b)
        if all(_stays_below(row, *case) for case in cases):
            return word
    return "none known"


def _stays_below(row: Method, reward: float, baseline: float, mismatch: float) -> bool:
    """Whether the inequality of `certifies` holds on the grid, up to what the integral may be off by.

    Where both sides are 0 at s = 1 (a right answer, or no mismatch), it holds beside it only if the slopes allow.
    """
    if reward == 1 or mismatch == 1:
        slope = (reward - baseline) * mismatch
        below, above = probe.token_push(
            row, reward - baseline, mismatch, correct=reward > 0, log_s=probe.BESIDE
        ).tolist()
        if above > slope + probe.NO_SLOPE or below < slope - probe.NO_SLOPE:
            return False
    advantage, w = reward - baseline, mismatch * probe.GRID.exp()
    limit = advantage * (w - mismatch) + (1 - reward) * (w - 1 - w.log())
    push = probe.token_push(row, advantage, mismatch, correct=reward > 0)
    phi = probe.integrated_push(row, advantage, mismatch, correct=reward > 0)
    return bool((phi <= limit + probe.integral_error(push, abs(advantage) * max(mismatch, 1.0))).all())


def is_treatment(row: Method) -> str:
    """Describe how importance sampling enters, in words.

    Example:
        >>> from offdrift.methods import method
        >>> is_treatment(method("icepop"))
        'token weight on mismatch, masked outside [0.5, 5]; token ratio on staleness in the objective'
    """
    words = [_weight_in_words(w) for w in row.correction.weights]
    if row.objective.on is not None:
        unit = _listed(_units_of(row.objective) - {"batch", "group"}, UNITS)
        words.append(f"{' and '.join(unit).replace('_', ' ')} ratio on {row.objective.on} in the objective")
    return "; ".join(words) or "none"


# -- together -------------------------------------------------------------------------------------


def command(name: str) -> str:
    """Command that trains with a method."""
    return shlex.join(["offdrift", "train", "recipes/tiny.toml", "--set", f"method={name}"])


def facts(name: str, row: Method) -> dict[str, Any]:
    """All that is known of a row, as plain data."""
    return {
        "name": name,
        "kind": "method",
        "family": next((title for title, rows in FAMILIES.items() if name in rows), IN_CODE),
        "summary": row.summary,
        "unit": _listed(units(row), UNITS),
        "ratio": _listed(ratios(row), get_args(RatioName)),
        "evidence": _listed(evidence(row), EVIDENCE),
        "sign": sign(row),
        "stop_gradient": stop_gradient(row),
        "survey_differs": dict(STOP_GRADIENT.get(name, {})),
        "shown_at": asdict(SHOWN_AT.get(name, ShownAt())),
        "certifies": certifies(row),
        "trained_return": raised_by(row, row.advantage or DEFAULT_ADVANTAGE),
        "aggregate": row.aggregate,
        "mechanism": row.mechanism,
        "is_treatment": is_treatment(row),
        "target": row.target,
        "fails": row.fails,
        "bias": row.bias,
        "reference": row.reference,
        "status": row.status,
        "experimental": row.status == "unverified",
        "used_by": list(USED_BY.get(name, ())),
        "needs": sorted(row.needs),
        "needs_old": row.needs_old,
        "needs_reference": row.needs_reference,
        "needs_divergences": row.needs_divergences,
        "divergences": sorted(row.divergences),
        "advantage": row.advantage,
        "formula": row.describe(),
        "parts": parts(row),
        "settings": settings(row),
        "ranges": {path: asdict(x) for path, x in published_ranges(row).items()},
        "command": command(name),
    }


def code_facts(name: str) -> dict[str, Any]:
    """Facts of a method in code, which is run, and its file, name and hash as `code`. Raises: `MethodError`."""
    return {**facts(name, load_method(name)), "code": code_source(name).as_dict()}


SYSTEM_FACTS = (
    "name kind family title summary unit ratio evidence sign stop_gradient certifies trained_return aggregate "
    "mechanism is_treatment target model_class shown_at fails bias reference status experimental where here watch "
    "related command"
)
"""What is said of a row, in this order; what a technique outside the loss does not have is None."""


def system_facts(name: str, row: System) -> dict[str, Any]:
    """All that is known of a row, as plain data, with the keys that `facts` has, too."""
    words = {k: list(x) if isinstance(x, tuple) else x for k, x in vars(row).items()}
    words |= {"name": name, "kind": "system", "aggregate": row.aggregation, "experimental": row.status == "unverified"}
    words |= {"family": next(title for title, rows in SYSTEM_FAMILIES.items() if name in rows)}
    words |= {"shown_at": asdict(SHOWN_AT.get(name, ShownAt()))}
    words |= {"unit": [], "ratio": [], "evidence": [], "command": f"offdrift train {row.run}" if row.run else None}
    return {key: words.get(key) for key in SYSTEM_FACTS.split()}


# -- parts ----------------------------------------------------------------------------------------


def _units_of(part: Any) -> set[str]:
    """The units of one part: those of `part_units`, and what it observes."""
    units = set(part_units(part))
    if hasattr(part, "observe") and getattr(part, "observes", True):
        batch = probe.batch()
        if observed := part.observe(batch.logprobs, batch.advantages, batch.batch_info):
            units.add("group" if "prompt" in observed else "batch")
    return units


def _weight_in_words(weight: Any) -> str:
    """A weight in a few words; of one that is no `Weight`, its unit, its ratio and its name."""
    unit = getattr(weight, "unit", "token").replace("_", " ")
    words = f"{unit} weight on {weight.on}"
    if not hasattr(weight, "outside"):
        kind = type(weight).__name__.removesuffix("Weight").lower()
        return f"{words} ({kind})" if weight.on is not None else f"{unit} weight ({kind}), no correction"
    cap, floor, mask = weight.cap, weight.floor, weight.outside == "mask"
    if cap is not None and floor:
        words += f", {'masked outside' if mask else 'clipped to'} [{floor:g}, {cap:g}]"
    elif cap is not None:
        words += f", {'masked above' if mask else 'truncated at'} {cap:g}"
    elif floor:
        words += f", {'masked below' if mask else 'at least'} {floor:g}"
    if weight.growth:
        words += f", limits growing with t^{weight.growth:g}"
    if weight.saturation is not None:
        words += f", saturating: w / (w + {weight.saturation:g})"
    if weight.gaussian is not None:
        words += f", Gaussian in the log-ratio, width {weight.gaussian:g}"
    if weight.normalize:
        words += ", divided by its mean"
    conditions = {"advantages": weight.advantage, "answers": weight.outcome}
    about = [f"{which} {noun}" for noun, which in conditions.items() if which != "any"]
    return words + (f" ({', '.join(about)})" if about else "")


def _listed(names: Iterable[str], order: Iterable[str]) -> list[str]:
    """The names in this order, then those that it does not have."""
    ordered = [x for x in order if x in names]
    return ordered + sorted(set(names) - set(ordered))


def by_path(row: Method) -> dict[str, Any]:
    """Every part by the path that `override` knows it by."""
    paths: dict[str, Any] = {"objective": row.objective}
    for role, several in (("gate", row.correction.gates), ("weight", row.correction.weights)):
        for i, part in enumerate(several):
            paths[role if len(several) == 1 else f"{role}.{i}"] = part
    return paths | {role: part for role in SINGLE if (part := getattr(row, role)) is not None}


def parts(row: Method) -> list[dict[str, Any]]:
    """Every part with its role, its path, its formula and its values."""
    return [
        {
            "role": path.partition(".")[0],
            "path": path,
            "type": type(part).__name__,
            "formula": part.formula,
            "values": plain(part),
        }
        for path, part in by_path(row).items()
    ]


def settings(row: Method) -> dict[str, Any]:
    """Every value that `override` can change, by path.

    Example:
        >>> from offdrift.methods import method
        >>> settings(method("trm_max"))["gate.high"]
        0.05
    """
    values = {name: getattr(row, name) for name in PLAIN}
    values |= {} if row.made_by is None else {name: plain(x) for name, x in row.made_by.settings.items()}
    for path, part in by_path(row).items():
        for field in fields(part):
            value = getattr(part, field.name)
            if field.init and not is_dataclass(value):
                values[f"{path}.{field.name}"] = plain(value)
    return values


def plain(x: Any) -> Any:
    """A part as nested dicts and lists of numbers and text, ready for JSON."""
    if is_dataclass(x) and not isinstance(x, type):
        return {f.name: plain(getattr(x, f.name)) for f in fields(x)}
    if isinstance(x, float) and not math.isfinite(x):
        return str(x)
    return [plain(v) for v in x] if isinstance(x, tuple) else x


Rows = dict[str, dict[str, Any]]

KINDS = ("method", "system", *FAMILIES, *SYSTEM_FAMILIES)
CHOICES: dict[str, tuple[str, ...]] = {
    "unit": tuple(UNITS),
    "ratio": (*get_args(RatioName), "none"),
    "evidence": tuple(EVIDENCE),
    "sign": tuple(SIGNS),
    "stop_gradient": tuple(STOPPED),
    "certifies": tuple(CERTIFIES),
    "bias": tuple(BIASES),
    "kind": KINDS,
    "situation": tuple(SITUATIONS),
}
"""What each filter of `offdrift methods` can be asked for; `reference` and `search` take any text."""
WORDS = {
    "unit": UNITS,
    "evidence": EVIDENCE,
    "sign": SIGNS,
    "stop_gradient": STOPPED,
    "certifies": CERTIFIES,
    "aggregate": AGGREGATES,
    "bias": BIASES,
    "status": STATUS,
}
"""What the words of each axis mean."""


def catalog() -> Rows:
    """Facts of every method and every system, by name.

    Example:
        >>> catalog()["trm_max"]["evidence"]
        ['exact']
    """
    methods = {name: facts(name, row) for name, row in METHODS.items()}
    return methods | {name: system_facts(name, row) for name, row in SYSTEMS.items()}


def catalog_text() -> str:
    """The catalog as JSON, a row a line: what `offdrift methods` reads, without waiting for torch."""
    rows = catalog()
    lines = ",\n".join(f"{json.dumps(n)}: {json.dumps(row, ensure_ascii=False)}" for n, row in rows.items())
    situations = {name: {**asdict(x), "methods": list(x.methods)} for name, x in SITUATIONS.items()}
    about = json.dumps({"choices": CHOICES, "words": WORDS, "situations": situations}, ensure_ascii=False)
    return f'{about[:-1]}, "rows": {{\n{lines}\n}}}}\n'
