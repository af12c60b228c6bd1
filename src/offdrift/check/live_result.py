"""Conclusions of a live check, and its `check.json`: held, not held, or cannot tell and what to measure."""

from __future__ import annotations

import time
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from offdrift.check.bench import EngineSpec
from offdrift.check.check import FORMAT, OWN_NUMBERS, PAGE, side
from offdrift.check.finding import act_finding
from offdrift.check.live import CheckpointFit, Heard, LiveCheck, Measurements
from offdrift.check.measure import measured
from offdrift.check.rescore import Scored
from offdrift.judge import Evidence, Finding
from offdrift.records.atomic import plain
from offdrift.show.anchors import on_page
from offdrift.show.numbers import short

State = Literal["held", "not held", "cannot tell"]
LEVELS = {"held": "ok", "not held": "act", "cannot tell": ""}


class Conclusion(NamedTuple):
    """The result, in words."""

    state: State
    text: str
    """One sentence."""
    why: str
    """The numbers behind it."""
    steps: tuple[str, ...] = ()
    """What to do next."""


SYNCHRONIZE = (
    "Let the framework synchronize once more and check again: a second miss is not a matter of timing.",
    "Look for an error, a timeout or a worker that was left out in the framework's log of that synchronization.",
)
UNLOCK = "Empty the prefix cache after every synchronization (vLLM: POST /reset_prefix_cache; SGLang: /flush_cache)."
PAUSE = "Pause the trainer, or check between two synchronizations."
SMALLER = "An update within the server's precision is not seen yet: give the step before with --earlier."
FEW = (
    "More tokens: --max-prompts 256 --max-tokens 256, or prompts of the run.",
    "Give the step before with --earlier: a part of it that explains the difference is named.",
)
GIVE_EARLIER = "Give the folders of earlier steps with --earlier: the check then says which one the server holds."


def concluded(found: Measurements, heard: Heard) -> Conclusion:
    """The result of what was measured."""
    folder = found.checkpoint.folder
    if found.moved:
        words = "Cannot tell: the server's weights changed, or it restarted, while it was asked."
        return Conclusion("cannot tell", words, "The same tokens got other log-probs at the end.", (PAUSE,))
    if found.part is not None and found.part_base is not None:
        return _mixed(found, found.part.name, found.part_base)
    if not found.checkpoint.fits:
        return _without_fit(found) if found.checkpoint.fits is None else _other_weights(found)
    half, near, z = found.limits["sync_half"], found.limits["sync_near"], found.limits["sync_z"]
    nearest = next((c for c in found.others if not c.position.below(half, z)), None)
    why = f"{_sizes(found)}{_resolved(found)}"
    if nearest is None and any(c.position.above(near, z) for c in found.others):
        words = "Cannot tell: the server lies between two checkpoints, and no part explains it."
        return Conclusion("cannot tell", words, why, _more_power(heard))
    if nearest is None and found.few_differ:
        words = "Cannot tell: a few tokens differ by far more than precision explains."
        return Conclusion(
            "cannot tell", words, f"{why} Routers that chose other experts do this, and old experts.", FEW
        )
    if nearest is None:
        steps = () if found.others else (SMALLER,)
        return Conclusion("held", f"The server holds {folder}.", why, steps)
    if nearest.position.above(half, z):
        return _stale(found, nearest)
    words = f"Cannot tell: {nearest.folder} fits the server as well as {folder}."
    return Conclusion("cannot tell", words, why, _more_power(heard))


def _without_fit(found: Measurements) -> Conclusion:
    """Conclude from earlier checkpoints alone, where transformers cannot stand beside the server."""
    why = f"What precision explains is not known: {found.precision[0].why}.{_resolved(found)}"
    half, z = found.limits["sync_half"], found.limits["sync_z"]
    if found.others and all(c.position.below(half, z) for c in found.others):
        text = f"The server holds {found.checkpoint.folder}, rather than an earlier checkpoint."
        return Conclusion("held", text, why)
    past = next((c for c in found.others if c.position.above(half, z)), None)
    if past is not None:
        return _stale(found, past)
    return Conclusion("cannot tell", "Cannot tell: its rounding cannot be repeated here.", why, (GIVE_EARLIER,))


def _other_weights(found: Measurements) -> Conclusion:
    """The checkpoint does not fit, by more than precision."""
    nearest = found.others[0] if found.others else None
    if nearest is not None and nearest.fits:
        return _stale(found, nearest)
    sampled, *read = found.precision
    if read and sampled.exceeded and not read[0].exceeded:
        text = "The server reads tokens as the checkpoint does, but draws them from something else."
        why = f"{_sizes(found)} Keys and values that were cached before the last synchronization do this."
        return Conclusion("not held", text, why, (UNLOCK,))
    text = f"The server does not hold {found.checkpoint.folder}"
    if nearest is None:
        return Conclusion("not held", f"{text}.", _sizes(found), (GIVE_EARLIER, *SYNCHRONIZE))
    ahead = found.checkpoint.misfit < nearest.misfit
    closest = found.checkpoint if ahead else nearest
    further = (
        "a later step, which the server may hold already" if ahead else "steps before these, the first model included"
    )
    return Conclusion(
        "not held",
        f"{text}, nor an earlier one that was given.",
        f"{_sizes(found)}{_resolved(found)} Nearest is {closest.folder}.",
        (
            f"Give with --earlier the folder of {further}.",
            "If none fits, compare the configuration: rope, eps, window, softcap, an adapter that was not merged.",
        ),
    )


def _stale(found: Measurements, held: CheckpointFit) -> Conclusion:
    text = f"The server holds {held.folder}, {_behind(found, held)}, not {found.checkpoint.folder}."
    return Conclusion("not held", text, f"{_sizes(found)}{_resolved(found)}", SYNCHRONIZE)


def _mixed(found: Measurements, name: str, base: CheckpointFit) -> Conclusion:
    """A part of the weights is of another checkpoint than the rest."""
    assert found.part is not None
    past = found.others[0]
    if base is found.checkpoint:
        text = f"{name} stayed behind in the server: it is that of {past.folder}, {_behind(found, past)}."
    else:
        text = f"Only {name} arrived in the server: the rest is that of {past.folder}, {_behind(found, past)}."
    left = f" With that part exchanged {short(found.part.left)} nat are left of {short(found.part.before)}."
    first = "Send that part in every synchronization; the usual ones are tied heads, experts, the last pipeline rank."
    return Conclusion("not held", text, f"{_sizes(found)}{_resolved(found)}{left}", (first, *SYNCHRONIZE[1:]))


def _behind(found: Measurements, held: CheckpointFit) -> str:
    steps = (found.checkpoint.step, held.step)
    if steps[0] is not None and steps[1] is not None and steps[0] != steps[1]:
        count = steps[0] - steps[1]
        return f"{abs(count)} step{'' if abs(count) == 1 else 's'} {'behind' if count > 0 else 'ahead'}"
    return f"number {1 + found.earlier.index(held)} of the earlier ones"


def _sizes(found: Measurements) -> str:
    """Measured differences beside what precision explains."""
    words = []
    for name, p in zip(("drawn", "read"), found.precision, strict=False):
        if not p.why:
            words.append(
                f"{name} tokens {short(p.measured)} nat, {short(p.ratio)} times what {p.dtype} explains "
                f"(limit {p.multiple:g})"
            )
    return f"Difference to the checkpoint: {'; '.join(words)}." if words else ""


def _resolved(found: Measurements) -> str:
    """Positions of the server on the way to the earlier checkpoints."""
    words = [f"{Path(c.folder).name} {c.position.place:.2f} ± {c.position.error:.2g}" for c in found.others]
    listed = ", ".join(words)
    return f" From the checkpoint (0) on the way to an earlier one (1) the server is at: {listed}." if words else ""


def _more_power(heard: Heard) -> tuple[str, ...]:
    """Steps that tell two near checkpoints apart."""
    exact = heard.drawn.provenance.dtype == "float32"
    wider = "" if exact else "Start the server with --dtype float32, or give an older step."
    return tuple(filter(None, ("More tokens: --max-prompts 256 --max-tokens 256, or prompts of the run.", wider)))


def live_result(live: LiveCheck, heard: Heard, found: Measurements) -> dict[str, Any]:
    """The content of `check.json`, which the page and the terminal show.

    `passed` is true for "held", false for "not held" and null for "cannot tell".
    """
    result = concluded(found, heard)
    rollouts = heard.drawn
    n, reading = len(rollouts.tokens), found.reading
    numbers = measured(rollouts, Scored(reading.logp[:n], reading.entropy[:n]))
    return plain(
        {
            "format": FORMAT,
            "kind": "check",
            "offdrift": version("offdrift"),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "interrupted": False,
            "model": found.checkpoint.folder,
            "rollout": side(live.rollout, rollouts.provenance.engine_version),
            "train": side(EngineSpec("transformers", "float32"), version("transformers")),
            "sampling": asdict(rollouts.provenance.sampling),
            "seed": live.seed,
            "evidence": "NoneType",
            "prompts": len(live.texts),
            "sequences": sum(b.num_sequences for b in heard.batches),
            "tokens": len(heard.served),
            "seconds": time.monotonic() - live.started,
            "baseline": {n: getattr(numbers, n) for n in OWN_NUMBERS} | dict(numbers.metrics),
            "precision": found.precision[0].as_dict(),
            "live": _entry(result, heard, found),
            "findings": on_page((f.as_dict() for f in _findings(result, found)), PAGE),
            "verdict": {"level": LEVELS[result.state], "text": result.text, "steps": result.steps},
            "recommended": {},
            **live.rules.as_record(),
            "max_kl": None,
            "passed": {"held": True, "not held": False}.get(result.state),
        }
    )


def _entry(result: Conclusion, heard: Heard, found: Measurements) -> dict[str, Any]:
    """The part of `check.json` that only a live check has."""
    part = found.part and {"name": found.part.name, "before": found.part.before, "left": found.part.left}
    base = found.part_base and found.part_base.folder
    return {
        "state": result.state,
        "text": result.text,
        "why": result.why,
        "checkpoint": found.checkpoint.as_dict(),
        "earlier": [c.as_dict() for c in found.earlier],
        "part": part and {**part, "rest_of": base},
        "greedy_agreement": found.greedy,
        "read": found.precision[1].as_dict() if len(found.precision) > 1 else {"why": heard.why},
        "weight_label": heard.label,
        "nearness": {"near": found.limits["sync_near"], "half": found.limits["sync_half"]},
    }


def _findings(result: Conclusion, found: Measurements) -> list[Finding]:
    if result.state != "not held":
        return []
    p = found.precision[0]
    evidence = () if p.why else (Evidence("measured / explained", p.ratio, ">", p.multiple, source="check"),)
    return [
        act_finding(
            "server_holds_other_weights",
            "weights_or_configuration",
            result.text,
            *evidence,
            explanation=result.why,
            fix=result.steps[0],
            refuted_by="It was given the weights only while it was asked: the check passes with the trainer paused.",
        )
    ]
