"""`offdrift lab length-bias`: which gates punish length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from offdrift.cli.app import console, lab
from offdrift.errors import BadValueError

LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@lab.command("length-bias")
def length_bias(
    violation: Annotated[
        float, typer.Option(help="Probability that a drawn token violates the trust region.")
    ] = 1e-3,
    sequences: Annotated[int, typer.Option(help="Drawn sequences.")] = 1000,
    same_at: Annotated[
        int, typer.Option(help="Length at which thresholds are set to accept 90 % alike, tokens.")
    ] = 128,
    recording: Annotated[
        list[Path] | None,
        typer.Option(help="A recorded stream (.npz of benchmarks/record_drift.py). Repeatable."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the drawn stream.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="STEM", help="Also write STEM.png and STEM.html.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Acceptance against length, for gates on the worst token, on means and on products.

    Once with independent violations and once per recording; without --recording the two that come
    with the package are used: SmolLM2-135M drawn in bfloat16 and with int8 weights, scored in
    float32.

    \b
    offdrift lab length-bias
    offdrift lab length-bias --violation 1e-4 --out length-bias
    """
    from offdrift.lab.length_bias import curves, independent_stream
    from offdrift.lab.recording import packaged, read_recording
    from offdrift.report.figure import write_figure
    from offdrift.report.length_bias import (
        length_bias_panels,
        length_bias_rows,
        length_bias_table,
    )

    if not 1 <= same_at <= LENGTHS[-1]:
        raise BadValueError(
            f"--same-at {same_at}: the drawn sequences have 1 to {LENGTHS[-1]} tokens"
        )
    paths = recording or packaged()
    streams = [
        independent_stream(
            sequences=sequences, horizon=LENGTHS[-1], violation=violation, seed=seed
        ),
        *(read_recording(p) for p in paths),
    ]
    results = []
    for stream in streams:
        longest = stream.kl.shape[1]
        lengths = [n for n in LENGTHS if n <= longest]
        for at, how in ((None, "published thresholds"), (min(same_at, longest), "same at T = {}")):
            title = f"{stream.name}; {how.format(at)}"
            results.append((title, curves(stream, lengths=lengths, same_at=at)))
    if as_json:
        typer.echo(json.dumps(length_bias_rows(results), indent=1, allow_nan=False))
    else:
        for title, found in results:
            console.print(length_bias_table(title, found, width=console.width))
        console.print(
            "acceptance = exp(-c T^γ): γ = 1 falls exponentially, γ = 0 does not depend on length.",
            style="dim",
        )
    if out is not None:
        files = write_figure(
            out,
            length_bias_panels(results),
            title="Which gates punish length?",
            caption="Share of sequences accepted, 95 % intervals. TRM paper, Appendix F, Table 2.",
        )
        for path in files:
            console.print(f"wrote {escape(str(path))}")
