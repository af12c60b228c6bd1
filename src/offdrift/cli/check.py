"""`offdrift check`: how far apart two engines are that hold the same weights, and why."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from offdrift.cli.app import app, console

INTERRUPTED = 130
FAILED = 1

QUICK_PROMPTS, QUICK_TOKENS = 8, 32
"""What --quick draws, and no more."""


@app.command()
def check(
    model: Annotated[
        str, typer.Option(help="A checkpoint folder, a hub id, or a name as in recipes.")
    ] = "smollm2-135m",
    rollout: Annotated[
        str | None,
        typer.Option(
            metavar="ENGINE",
            help="Draws the tokens: KIND:DTYPE[,OPTION=VALUE ...]; default vllm:bfloat16, or transformers:bfloat16 without vLLM.",
        ),
    ] = None,
    train: Annotated[
        str, typer.Option(metavar="ENGINE", help="Scores them again.")
    ] = "transformers:float32",
    prompts: Annotated[
        Path | None,
        typer.Option(
            help='One prompt per line, or .jsonl with "prompt" (text or messages); default bundled.'
        ),
    ] = None,
    max_prompts: Annotated[int, typer.Option(help="Prompts used, at most.", min=1)] = 32,
    samples: Annotated[int, typer.Option(help="Responses per prompt.", min=1)] = 1,
    max_tokens: Annotated[int, typer.Option(help="Longest response, tokens.", min=1)] = 64,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Sample from this much mass.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of every draw.")] = 0,
    chat: Annotated[
        bool, typer.Option(help="Put text prompts into the model's chat template, if it has one.")
    ] = True,
    factors: Annotated[
        str,
        typer.Option(
            help="Factors to isolate: all (but what compiles an engine), none, or names with commas between."
        ),
    ] = "all",
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="8 prompts of 32 tokens, and no factor that starts an engine."
        ),
    ] = False,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Also factors that compile an engine.")
    ] = False,
    max_kl: Annotated[
        float | None,
        typer.Option(help="Exit with status 1 if the mean KL per token is larger, nat."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Where the training engine runs; default cuda if there is one."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for check.json and check.html.")] = Path(
        "check"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print check.json.")] = False,
) -> None:
    """Same weights, same tokens, two engines: how far apart are they, and why?

    Draws with the rollout engine and scores with the training engine: the mismatch that is there
    before anything is learned. Then changes one factor at a time, holds the numbers against published
    thresholds, and calibrates a correction on them. Works offline: SmolLM2-135M and bundled prompts.

    A factor takes, on SmolLM2-135M and one CPU core, by what it needs: cheap: 2 to 25 s; engine:
    20 to 40 s; compile: 2 min, which is for --thorough. All but that: five to six minutes.

    Exit status 0; 1 if the mean KL exceeds --max-kl, or the log-probs are not those of what was
    sampled, with or without --max-kl. Ctrl-C keeps what was measured.

    \b
    offdrift check
    offdrift check --model checkpoints/base --rollout vllm:bfloat16,kv_cache_dtype=fp8 --prompts prompts.txt
    offdrift check --model tiny-qwen3 --quick --factors none --max-kl 0.001
    """  # fmt: skip
    import torch

    from offdrift.check.bench import Bench, EngineSpec, checkpoint_of
    from offdrift.check.check import FILE_NAME, check_max_kl
    from offdrift.check.check import check as measure_all
    from offdrift.check.factors import chosen, left_out
    from offdrift.check.page import write_check_page
    from offdrift.check.prompts import BUNDLED, encoded, read_prompts
    from offdrift.check.view import check_view
    from offdrift.records.atomic import write_json
    from offdrift.records.rollouts import Sampling
    from offdrift.train.models import load_model, save_for_engine

    err = Console(stderr=True)
    check_max_kl(max_kl)
    table = chosen(factors, quick=quick, thorough=thorough)
    later = left_out(factors, quick=quick, thorough=thorough)
    draws, scores = EngineSpec.parse(rollout or _default_engine(err)), EngineSpec.parse(train)
    if quick:
        max_prompts, max_tokens = min(max_prompts, QUICK_PROMPTS), min(max_tokens, QUICK_TOKENS)
    asked = BUNDLED[:max_prompts] if prompts is None else read_prompts(prompts, limit=max_prompts)
    with Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn(), console=err, transient=True) as progress:  # fmt: skip
        task = progress.add_task("loading the model", total=None)
        policy, tokenizer = load_model(model, seed=seed)
        ids = encoded(asked, tokenizer, vocab_size=policy.config.get_text_config().vocab_size, chat=chat)  # fmt: skip
        stop = getattr(tokenizer, "eos_token_id", None)
        sampling = Sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p, stop_token_ids=() if stop is None else (stop,))  # fmt: skip

        def watch(stage: str, done: int, total: int) -> None:
            progress.update(task, description=escape(stage), completed=done, total=total)
            if not err.is_terminal:  # in a log, a line per stage
                err.print(f"{done}/{total} {stage}", highlight=False, markup=False)

        with Bench(
            policy,
            tokenizer,
            [p for p in ids for _ in range(samples)],
            sampling=sampling,
            seed=seed,
            name=model,
            folder=checkpoint_of(policy),
            save=lambda folder: save_for_engine(policy, tokenizer, folder),
            device=device or ("cuda" if torch.cuda.is_available() else None),
        ) as bench:
            try:
                found = measure_all(bench, draws, scores, factors=table, left_out=later, max_kl=max_kl, watch=watch)  # fmt: skip
            except KeyboardInterrupt:
                progress.stop()
                err.print("interrupted before anything was measured", style="yellow")
                raise typer.Exit(INTERRUPTED) from None
    write_json(out / FILE_NAME, found)
    write_check_page(found, out)
    if as_json:
        typer.echo(json.dumps(found, indent=1, allow_nan=False))
    else:
        console.print(check_view(found, width=console.width))
        console.print(f"\n{escape(str(out / 'check.html'))}", style="dim", soft_wrap=True)
    if found["interrupted"]:
        raise typer.Exit(INTERRUPTED)
    if not found["passed"]:
        raise typer.Exit(FAILED)


def _default_engine(err: Console) -> str:
    """vLLM if it is there: the engine that people train with; and which was chosen."""
    there = importlib.util.find_spec("vllm") is not None
    name = "vllm:bfloat16" if there else "transformers:bfloat16"
    why = "" if there else "; vLLM is not installed (`make install-vllm`)"
    err.print(f"rollout engine: {name}{why}", style="dim", highlight=False, markup=False)
    return name
