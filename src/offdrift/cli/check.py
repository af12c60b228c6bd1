"""`offdrift check`: how far apart two engines are that hold the same weights, and why."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from offdrift.cli.app import BEFORE, Screen, app
from offdrift.cli.exit_codes import ExitCode

QUICK_PROMPTS, QUICK_TOKENS = 8, 32
"""What --quick draws, and no more."""


@app.command(
    rich_help_panel=BEFORE,
    verdict="the mean KL exceeds --max-kl, or the log-probs are not those of the distribution that was sampled",
)
def check(
    screen: Screen,
    model: Annotated[
        str, typer.Option(help="A checkpoint folder, a hub id, or a name as in recipes.")
    ] = "smollm2-135m",
    rollout: Annotated[
        str | None,
        typer.Option(
            metavar="ENGINE",
            help="Engine that draws the tokens, KIND:DTYPE[,OPTION=VALUE ...]; default "
            "vllm:bfloat16, or transformers:bfloat16 without vLLM.",
        ),
    ] = None,
    train: Annotated[
        str, typer.Option(metavar="ENGINE", help="Engine that rescores the tokens.")
    ] = "transformers:float32",
    prompts: Annotated[
        Path | None,
        typer.Option(help='One prompt per line, or .jsonl with "prompt" (text or messages); default bundled.'),
    ] = None,
    max_prompts: Annotated[int, typer.Option(help="Prompts used, at most.", min=1)] = 32,
    samples: Annotated[int, typer.Option(help="Responses per prompt.", min=1)] = 1,
    max_tokens: Annotated[int, typer.Option(help="Longest response, tokens.", min=1)] = 64,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling: probability mass that is sampled from.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Sampling seed.")] = 0,
    chat: Annotated[bool, typer.Option(help="Put text prompts into the model's chat template, if it has one.")] = True,
    factors: Annotated[
        str,
        typer.Option(
            help="Factors to change one at a time: all (except those that compile an engine), "
            "none, or names with commas between."
        ),
    ] = "all",
    quick: Annotated[
        bool, typer.Option("--quick", help="8 prompts of 32 tokens, and no factor that starts an engine.")
    ] = False,
    thorough: Annotated[bool, typer.Option("--thorough", help="Also factors that compile an engine.")] = False,
    bisect: Annotated[
        bool, typer.Option("--bisect", help="Name the first layer in which the engines differ, and by how much.")
    ] = False,
    max_kl: Annotated[
        float | None, typer.Option(help="End with exit status 3 if the mean KL per token is larger, nat.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where the training engine runs; default cuda if there is one.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for check.json and check.html.")] = Path("check"),
) -> None:
    """Do your rollout and training engines agree, and if not, why?

    Draws tokens with the rollout engine and scores them with the training engine at the same weights:
    the mismatch before anything is learned. Then changes one factor at a time, compares the numbers
    with published thresholds, and calibrates a correction on them. Works offline, with SmolLM2-135M
    and bundled prompts.

    On SmolLM2-135M and one CPU core a factor takes 2 to 25 s, or 20 to 40 s if it starts an engine, or
    2 min if it compiles one (only with --thorough). A whole check takes five to six minutes.

    Ctrl-C keeps what was measured.

    \b
    offdrift check
    offdrift check --rollout vllm:bfloat16,kv_cache_dtype=fp8
    offdrift check --model tiny-qwen3 --quick --factors none --max-kl 0.001
    offdrift check --model tiny-qwen3 --quick --factors none --bisect
    """
    import torch

    from offdrift.check.bench import Bench, EngineSpec, checkpoint_of
    from offdrift.check.check import BUNDLED, FILE_NAME, check_max_kl, encoded, read_prompts
    from offdrift.check.check import check as measure_all
    from offdrift.check.factors import chosen, left_out
    from offdrift.check.page import write_check_page
    from offdrift.check.view import check_view
    from offdrift.records.atomic import write_json
    from offdrift.records.provenance import Sampling
    from offdrift.train.models import load_model, save_for_engine

    check_max_kl(max_kl)
    table = chosen(factors, quick=quick, thorough=thorough)
    later = left_out(factors, quick=quick, thorough=thorough)
    draws, scores = EngineSpec.parse(rollout or _default_engine(screen)), EngineSpec.parse(train)
    if quick:
        max_prompts, max_tokens = min(max_prompts, QUICK_PROMPTS), min(max_tokens, QUICK_TOKENS)
    texts = BUNDLED[:max_prompts] if prompts is None else read_prompts(prompts, limit=max_prompts)
    with screen.progress() as progress:
        task = progress.add_task("loading the model", total=None)
        policy, tokenizer = load_model(model, seed=seed)
        vocab_size = policy.config.get_text_config().vocab_size
        ids = encoded(texts, tokenizer, vocab_size=vocab_size, chat=chat)
        stop = getattr(tokenizer, "eos_token_id", None)
        sampling = Sampling(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, stop_token_ids=() if stop is None else (stop,)
        )

        def watch(stage: str, done: int, total: int) -> None:
            progress.update(task, description=escape(stage), completed=done, total=total)
            if not screen.err.is_terminal:  # in a log, a line per stage
                screen.note(f"{done}/{total} {stage}")

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
                options = {"factors": table, "left_out": later, "layers": bisect, "max_kl": max_kl, "watch": watch}
                result = measure_all(bench, draws, scores, **options)
            except KeyboardInterrupt:
                progress.stop()
                screen.warn("interrupted before anything was measured")
                raise typer.Exit(ExitCode.INTERRUPTED) from None
    write_json(out / FILE_NAME, result)
    page = write_check_page(result, out)
    if screen.as_json:
        screen.json(result)
    else:
        screen.show(check_view(result, width=screen.width), "")
        screen.wrote(report=page, numbers=out / FILE_NAME)
    screen.next(f"open {page}", "every factor, its threshold, and the calibrated correction")
    if result["interrupted"]:
        raise typer.Exit(ExitCode.INTERRUPTED)
    if not result["passed"]:
        raise typer.Exit(ExitCode.VERDICT)


def _default_engine(screen: Screen) -> str:
    """vLLM if it is installed, else transformers; prints which one was chosen."""
    installed = importlib.util.find_spec("vllm") is not None
    name = "vllm:bfloat16" if installed else "transformers:bfloat16"
    why = "" if installed else "; vLLM is not installed (`make install-vllm`)"
    screen.note(f"rollout engine: {name}{why}")
    return name
