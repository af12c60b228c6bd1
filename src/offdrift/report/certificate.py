"""A certificate as a person reads it: the sentence first, then every number that it rests on."""

from __future__ import annotations

import math

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from offdrift.certificate import Certificate

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
    )


def number(x: float | None) -> str:
    """Four digits; what nothing bounds is a dash."""
    return "–" if x is None or not math.isfinite(x) else f"{x:.4g}"


def _region(proof: Certificate) -> Text:
    limits = [f"T = {proof.region.horizon:,}", f"KL <= {proof.region.delta:g} nat"]
    limits += [f"TV <= {proof.region.eps:g}"] if proof.region.eps is not None else []
    limits += [f"|log ratio| <= {proof.region.tau:g}"] if proof.region.tau is not None else []
    return Text(
        f"trust region: {', '.join(limits)}.  {proof.sequences:,} sequences of {proof.prompts:,} "
        f"prompts, {1 - proof.alpha:.0%} confidence, {proof.constants} constants",
        style="bold",
    )


def _premises(proof: Certificate) -> Table:
    table = _table("what the batch says of the trust region")
    for name in ("premise", "status", "largest seen", "evidence"):
        table.add_column(name, no_wrap=True)
    seen = {"kl": proof.delta_seen, "tv": proof.eps_seen}
    for name, status in proof.premises.items():
        low, high = seen[name]
        ends = number(high) if low == high else f"{number(low)} to {number(high)}"
        if proof.grades[name] == "sampled":
            ends = "–"
        table.add_row(
            f"{name.upper()} at every context",
            Text(status, style=COLORS[status]),
            ends,
            proof.grades[name],
        )
    if proof.unseen is not None:
        table.add_row(
            "a fresh prompt leaves it", "at most", f"{proof.unseen:.2%}", "Clopper-Pearson"
        )
    for words in sorted(proof.assumes):
        table.add_row("taken for granted", Text(words, style="yellow"), "", "")
    return table


def _estimates(proof: Certificate) -> Table:
    table = _table("expectations, and where they surely lie")
    table.add_column("quantity", no_wrap=True)
    for name in ("mean", "low", "high", "normal interval*"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, e in proof.estimates.items():
        normal = proof.asymptotic.get(name)
        about = "" if normal is None else f"{number(normal.low)} to {number(normal.high)}"
        table.add_row(NAMES.get(name, name), number(e.mean), number(e.low), number(e.high), Text(about, style="dim"))  # fmt: skip
    table.caption = Text("* asymptotic, not a guarantee; no verdict uses it", style="dim")
    table.caption_justify = "left"
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
            Text(number(gain), style="bold green" if gain > 0 else ""),
            "; ".join(g.provided) or "nothing further",
        )
    if not proof.fresh:
        table.caption = Text("not fresh: the policy learned from these sequences, and none of this covers", style="yellow")  # fmt: skip
        table.caption_justify = "left"
    return table


def _table(title: str) -> Table:
    return Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)  # fmt: skip
