"""A certificate as a person reads it: the sentence first, then every number that it rests on."""

from __future__ import annotations

import math

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from offdrift.certificate import Certificate
from offdrift.certificate.verdict import ONE_LOOK

NAMES = {
    "gain": "J(pi) - J(mu), ratios' product cut at 2",
    "surrogate": "surrogate L'",
    "surrogate_masked": "surrogate of accepted L'_masked",
    "rejected_reward": "reward of rejected sequences",
    "acceptance": "accepted sequences",
    "prefix_kl": "KL of accepted prefixes, nat",
    "kl_seq": "KL of sequences, nat",
    "shift": "adaptive sum of mean TV",
}
"""What each estimate is called where a person reads it."""


NOTHING = "–"
"""Shown where nothing bounds a number, or nothing stands behind it."""

NOT_FRESH = "not fresh: the policy learned from these prompts, and none of this covers"

COLORS = {"falsified": "red", "unknown": "yellow", "not falsified": "", "known": "green"}


def certificate_view(proof: Certificate, *, width: int = 100) -> RenderableType:
    """The verdict, the preconditions, the intervals and the guarantees."""
    color = "green" if proof.certified else "yellow"
    return Group(
        Panel(Text(proof.verdict), title="certificate", border_style=color, width=min(width, 110)),
        _region(proof),
        _premises(proof),
        _estimates(proof),
        *([_guarantees(proof)] if proof.guarantees else []),
        *([] if proof.fresh else [Text(NOT_FRESH, style="yellow")]),
        *([] if proof.advice is None else [Text(proof.advice, style="yellow")]),
    )


def number(x: float | None) -> str:
    """Four digits; what nothing bounds is a dash."""
    return NOTHING if x is None or not math.isfinite(x) else f"{x:.4g}"


def _region(proof: Certificate) -> Text:
    limits = [f"T = {proof.region.horizon:,}", f"KL <= {proof.region.delta:g} nat"]
    limits += [f"TV <= {proof.region.eps:g}"] if proof.region.eps is not None else []
    limits += [f"|log ratio| <= {proof.region.tau:g}"] if proof.region.tau is not None else []
    return Text(
        f"trust region: {', '.join(limits)}.  {proof.sequences:,} sequences of {proof.prompts:,} "
        f"prompts, probability of error {proof.alpha:g} ({ONE_LOOK}), {proof.constants} constants",
        style="bold",
    )


def _premises(proof: Certificate) -> Table:
    table = _table("what the batch says of the trust region")
    for name in ("premise", "status", "largest seen", "evidence"):
        table.add_column(name)
    seen = {"kl": proof.delta_seen, "tv": proof.eps_seen}
    for name, status in proof.premises.items():
        low, high = seen[name]
        ends = number(high) if low == high else f"{number(low)} to {number(high)}"
        if proof.grades[name] == "sampled":
            ends = NOTHING
        table.add_row(
            f"{name.upper()} at every context",
            Text(status, style=COLORS[status]),
            ends,
            proof.grades[name],
        )
    if proof.unseen is not None:
        table.add_row(
            "a fresh prompt leaves it",
            "at most",
            f"{number(100 * proof.unseen)}%",
            "Clopper-Pearson",
        )
    if proof.assumes:
        words = f"taken for granted: {'; '.join(sorted(proof.assumes))}"
        words += f"; {proof.refuted:,} sequences contradict it" if proof.refuted else ""
        _below(table, Text(words, style="yellow"))
    return table


def _estimates(proof: Certificate) -> Table:
    table = _table("expectations, and where they surely lie")
    table.add_column("quantity")
    for name in ("mean", "low", "high"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("normal interval*", justify="right")
    absent = proof.unfounded
    for name, e in proof.estimates.items():
        normal = proof.asymptotic.get(name)
        about = "" if normal is None else f"{number(normal.low)} to {number(normal.high)}"
        ends = (None, None, None) if name in absent else (e.mean, e.low, e.high)
        table.add_row(Text(NAMES.get(name, name)), *map(number, ends), Text(about, style="dim"))
    _below(table, Text("* asymptotic, not a guarantee; no verdict uses it", style="dim"))
    return table


def _guarantees(proof: Certificate) -> Table:
    table = _table("guarantees on J(pi) - J(mu): start - error - price")
    table.add_column("guarantee", no_wrap=True)
    for name in ("start", "error", "price", "at least"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("provided")
    best = proof.best
    for g in proof.guarantees:
        gain = proof.gain_of(g)
        cells = [number(proof.estimates[g.surrogate].low), number(g.error), number(g.price)]
        table.add_row(
            g.name + (" ◂" if g is best else ""),
            *cells,
            Text(number(gain), style="bold green" if gain > 0 and proof.fresh else ""),
            Text("; ".join(g.provided) or "nothing further"),
        )
    return table


def _below(table: Table, words: Text) -> None:
    table.caption, table.caption_justify = words, "left"


def _table(title: str) -> Table:
    return Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)  # fmt: skip
