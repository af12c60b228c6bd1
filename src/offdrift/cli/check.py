"""`offdrift check`: how far apart two engines are that hold the same weights, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from offdrift.cli.app import BEFORE, RulesFile, Screen, app, interruptible
from offdrift.cli.exit_codes import ExitCode
from offdrift.model_names import check_model_name

if TYPE_CHECKING:
    from offdrift.check.result import Check


@app.command(
    rich_help_panel=BEFORE,
    verdict="the mean KL exceeds --max-kl, weights or configuration differ, the server does not hold --checkpoint, "
    "--claim equal fails, or the log-probs are not those of the distribution that was sampled",
)
def check(
    screen: Screen,
    model: Annotated[
        str | None,
        typer.Option(
            help="A checkpoint folder, a hub id, or a name as in recipes; default smollm2-135m where it is installed, "
            "else tiny-qwen3."
        ),
    ] = None,
    rollout: Annotated[
        str | None,
        typer.Option(
            metavar="ENGINE",
            help="Engine that draws the tokens: openai:URL for a running server, or KIND:DTYPE[,OPTION=VALUE ...]; "
            "default vLLM where it is installed, else transformers, in bfloat16, or in float32 where this processor "
            "emulates bfloat16.",
        ),
    ] = None,
    train: Annotated[
        str, typer.Option(metavar="ENGINE", help="Engine that rescores the tokens.")
    ] = "transformers:float32",
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Does the running server --rollout openai:URL, vllm-server:URL or sglang:URL hold the weights of this "
            "folder? Nothing else is measured then.",
        ),
    ] = None,
    earlier: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER",
            help="With --checkpoint: a folder of an earlier step, which the server may hold instead; may come again.",
        ),
    ] = None,
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
    compound: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Change 2 to 4 factors in every combination on the same tokens: each one's share, and interactions.",
        ),
    ] = None,
    claim: Annotated[
        Literal["equal"] | None,
        typer.Option(help="Prove that every log-prob has the same bits in both engines; exit status 3 if not."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="ENGINE",
            help="Another server or engine with the same weights, written as --rollout: led along the same tokens. "
            "--claim equal is then about these two.",
        ),
    ] = None,
    digest: Annotated[
        str | None,
        typer.Option(
            metavar="HEX|FILE",
            help="With --claim equal: the digest that another machine printed, or its check.json, by which the first "
            "difference is named; exit status 3 if not met.",
        ),
    ] = None,
    max_kl: Annotated[
        float | None, typer.Option(help="End with exit status 3 if the mean KL per token is larger, nat.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where the training engine runs; default cuda if there is one.")
    ] = None,
    rules: RulesFile = None,
    out: Annotated[Path, typer.Option(help="Folder for check.json and check.html.")] = Path("check"),
) -> None:
    """Do your rollout and training engines agree, and if not, why?

    Your own model, and the server that serves it:

    \b
    offdrift check --model ./checkpoint \\
        --rollout openai:http://127.0.0.1:8000/v1 --max-kl 0.005
    offdrift check --model ./checkpoint --rollout vllm:bfloat16,kv_cache_dtype=fp8

    Draws tokens with the rollout engine and scores them with the training engine at the same weights:
    the mismatch before anything is learned, and how much of it precision explains. Then changes one factor at a
    time and compares the numbers with published thresholds.

    Does the server that your framework runs hold the newest weights? The folder is of the step that it should hold:

    \b
    offdrift check --rollout openai:http://127.0.0.1:8000/v1 \\
        --checkpoint runs/step_40 --earlier runs/step_39

    Without a model or server of your own it works offline, with SmolLM2-135M (or a tiny model) and bundled prompts. On
    SmolLM2-135M and one core of a 2.1 GHz Xeon (AVX-512) a factor takes 2 to 25 s, or 20 to 40 s if it starts an
    engine, or 2 min if it compiles one (only with --thorough); a whole check five to six minutes; how long it may
    take here is said as it begins. Ctrl-C keeps what was measured; the check is then incomplete, neither passed nor
    failed.

    \b
    offdrift check
    offdrift check --model tiny-qwen3 --quick --factors none --bisect
    offdrift check --claim equal \\
        --rollout transformers:float16,batch_invariant=true \\
        --train transformers:float16,batch_invariant=true
    """
    alive = interruptible()
    with screen.watching(every=True) as watch:

        def progress(stage: str, done: int, total: int) -> None:
            alive()  # an interrupt that a library swallowed is one all the same
            watch(stage, done, total)

        if model is not None:
            check_model_name(model)  # before anything heavy is imported
        watch("loading", 0, 1)
        from offdrift.check.entry import check as measured

        try:
            result = measured(
                model,
                rollout=rollout,
                train=train,
                checkpoint=checkpoint,
                earlier=earlier or (),
                prompts=prompts,
                max_prompts=max_prompts,
                samples=samples,
                max_tokens=max_tokens,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
                chat=chat,
                factors=factors,
                quick=quick,
                thorough=thorough,
                bisect=bisect,
                compound=compound,
                claim=claim,
                against=against,
                digest=digest,
                max_kl=max_kl,
                device=device,
                rules=rules,
                out=out,
                progress=progress,
            )
        except KeyboardInterrupt:
            screen.warn("interrupted before anything was measured")
            raise typer.Exit(ExitCode.INTERRUPTED) from None
    live = checkpoint is not None or bool(earlier)
    _show(screen, result, out)
    if not live:
        what = "every factor, every threshold" if result.data["factors"] else "every threshold"
        screen.next(f"open {out / result.page}", f"{what}, and the calibrated limits of corrections")
    if result.verdict.level == "interrupted":
        raise typer.Exit(ExitCode.INTERRUPTED)
    if result.passed is not True:
        raise typer.Exit(ExitCode.ERROR if result.passed is None else ExitCode.VERDICT)


def _show(screen: Screen, result: Check, out: Path) -> None:
    """Show a result that was stored in a folder."""
    from offdrift.check.view import check_view

    if screen.as_json:
        screen.json_text(result.to_json(indent=1))
    else:
        screen.show(check_view(result.data, width=screen.width, folder=str(out)), "")
    screen.wrote(report=out / result.page, numbers=out / result.file)
