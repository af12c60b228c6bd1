"""`offdrift certify`: what stored rollouts prove about a policy."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.text import Text

from offdrift.cli.app import AFTER, Cluster, Look, Of, Prompts, RulesFile, Screen, app
from offdrift.cli.exit_codes import ExitCode
from offdrift.texts import read_json

if TYPE_CHECKING:
    from offdrift.certificate.guarantees import Certificate
    from offdrift.certificate.plan import Plan
    from offdrift.certificate.prompts import PromptDesign
    from offdrift.judge.rules_record import Chosen
    from offdrift.prove.certify import JudgedBatches


@app.command(rich_help_panel=AFTER)
def certify(
    screen: Screen,
    rollouts: Annotated[
        list[Path], typer.Argument(help="Rollouts: .parquet files, folders of them, or an arm of a run.")
    ],
    model: Annotated[
        str | None,
        typer.Option(help="The policy to judge: a checkpoint folder, or a name as in recipes; an arm's own if absent."),
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(
            help="Trust region, chosen before the rollouts are seen: limit on a token's KL(rollout || current), nat; "
            "default `trust_region` of the rules, 0.05; `inf`: none, for a region of TV alone by --eps."
        ),
    ] = None,
    eps: Annotated[float | None, typer.Option(help="Limit on a token's TV, if any.")] = None,
    tau: Annotated[float | None, typer.Option(help="Limit on |log ratio| of accepted tokens, if any.")] = None,
    horizon: Annotated[
        int | None, typer.Option("--T", help="Longest response, tokens; default as it was sampled.")
    ] = None,
    reward_range: Annotated[tuple[float, float], typer.Option(help="Smallest and largest possible reward.")] = (
        0.0,
        1.0,
    ),
    alpha: Annotated[
        float | None,
        typer.Option(
            help="Largest probability that any statement is wrong: for one policy and one look, unless you say "
            "otherwise by --of, --look or --anytime; default `certificate_error` of the rules, 0.05."
        ),
    ] = None,
    of: Of = 1,
    look: Look = None,
    anytime: Annotated[
        bool,
        typer.Option(
            "--anytime",
            help="For one policy that you judge again and again while its rollouts arrive, to stop when it is "
            "certified: holds at every moment. Prompts count in order of arrival (files as they are named, a "
            "folder's by name), so a later look begins with the same files in the same order; answers to a prompt "
            "of an earlier file are left out. Intervals are a fifth wider.",
        ),
    ] = False,
    constants: Annotated[Literal["sharp", "paper"], typer.Option(help="Constants of the bounds.")] = "sharp",
    tail_log_ratio_cap: Annotated[
        float | None, typer.Option(help="Assume that |log ratio| stays below this outside a recorded top k.")
    ] = None,
    trained_on: Annotated[
        bool, typer.Option("--trained-on", help="The policy has learned from these rollouts, or from their prompts.")
    ] = False,
    old: Annotated[
        str | None,
        typer.Option(
            help="The trainer at the weights that drew the rollouts, a checkpoint or a name: splits the drift into "
            "mismatch of the engines and staleness of the data, and says which is larger."
        ),
    ] = None,
    power: Annotated[
        bool,
        typer.Option(
            "--power",
            help="Estimate how many prompts would certify the gain that was seen, by rollouts like these, without and "
            "with control variates, and by fresh answers of both policies, and say which to use.",
        ),
    ] = False,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh",
            help="Compare two policies by fresh answers of both to the same prompts: `certify A B --fresh` bounds "
            "J(B) - J(A). Only prompts and rewards are read, from rollouts or rows with prompt and reward (.jsonl, "
            ".parquet); no log-probs, no --model. Better than ratios where responses are long or policies far apart.",
        ),
    ] = False,
    prompts: Prompts = None,
    cluster: Cluster = None,
    rules: RulesFile = None,
    token_budget: Annotated[int, typer.Option(help="Padded tokens per forward pass.")] = 4096,
) -> None:
    """Is this policy better than the one that drew the rollouts, and how surely?

    Scores every recorded token with the policy and compares the distributions as far as the rollouts
    recorded them. Prints a lower bound on J(policy) - J(rollout policy) that holds with probability
    1 - alpha, and the preconditions that have to be taken for granted.

    The probability is for one policy and one look: 128 of them about policies that gained nothing include a
    false one with probability .9. Say so if there are more: --of for policies judged by the same rollouts,
    --look for looks at new ones, --anytime for one policy looked at while rollouts arrive.

    A policy that learned from these rollouts can not be certified by them, for instance the model of an
    arm by the rollouts of that arm. Prompts that come more than once have two readings: --prompts says which. Prompts
    that share a source are no independent draws: --cluster names it.

    J is the mean reward of a response. Aggregation by response length and normalization by a group's deviation make
    training raise another return, which stands beside it for the model of an arm (`offdrift methods NAME`:
    trained_return).

    The exit status does not tell whether there is a certificate; "certified" in the JSON does.

    Where ratios say little (long responses, policies far apart), let both policies answer the same prompts and
    compare the rewards: --fresh. --power says which takes fewest prompts.

    \b
    offdrift certify runs/tiny/arms/trm_max
    offdrift certify fresh/ --model checkpoints/step-200 --delta 0.05
    offdrift certify fresh/ --model checkpoints/best --of 8
    offdrift certify fresh/ --model checkpoints/200 --old checkpoints/190
    offdrift certify fresh/ --model checkpoints/200 --cluster document
    offdrift certify before.jsonl after.jsonl --fresh
    offdrift certify fresh/*.parquet --model checkpoints/200 --tau 0.05 --json
    """
    from offdrift.certificate import Looks, TrustRegion
    from offdrift.certificate.certify import certify as certificate_of
    from offdrift.certificate.plan import plan as plan_of
    from offdrift.judge.rules_record import choose_rules, record_above
    from offdrift.prove.certify import longest_response

    refuse_together(anytime=anytime, look=look, power=power, cluster=cluster, prompts=prompts)
    looks = Looks(at=look, of=of, anytime=anytime)
    if fresh:
        unread = {"--model": model, "--anytime": anytime, "--power": power, "--old": old, "--trained-on": trained_on}
        settings = {"reward_range": reward_range, "looks": looks, "prompts": prompts, "alpha": alpha}
        compare_fresh(screen, rollouts, unread, cluster=cluster, rules=rules, settings=settings)
        return
    files, version, skipped = files_of_one_policy(rollouts, cluster=cluster, prompts=prompts)
    model = model or model_of(rollouts)
    design = prompts if cluster is None else "clustered"
    trained_on = trained_on or _learned_from(model, files)
    chosen_rules = choose_rules(rules, *record_above(files[0]))
    delta = chosen_rules.rules.limits["trust_region"] if delta is None else delta
    alpha = chosen_rules.rules.limits["certificate_error"] if alpha is None else alpha
    longest = longest_response(files) if horizon is None else horizon
    region = TrustRegion(horizon=longest, delta=delta, eps=eps, tau=tau)
    design_of = {"reward_range": reward_range, "alpha": alpha, "looks": looks}
    prove = partial(certificate_of, **design_of, constants=constants, fresh=not trained_on, prompts=design)
    batches = judged_files(
        screen,
        files,
        model,
        prove,
        region=region,
        token_budget=token_budget,
        tail_log_ratio_cap=tail_log_ratio_cap,
        arriving=anytime,
        old=old,
        prompts=design or "listed",
        cluster=cluster or "",
    )
    judged = JudgedPolicy(
        batches,
        prove(batches.evidence),
        chosen_rules,
        model,
        old=old,
        version=version,
        skipped=skipped,
        trained_on=trained_on,
        planned=(plan_of(batches.evidence, **design_of),) if power else (),
    )
    judged.report(screen)
    if screen.interrupted:
        screen.warn(f"interrupted after {batches.files} of {len(files)} files; the numbers are of those")
        raise typer.Exit(ExitCode.INTERRUPTED)
    screen.next(*judged.next_step())


TOGETHER = {
    ("anytime", "look"): "what holds at every moment is one look; give one of the two",
    ("anytime", "power"): "a plan is for a size fixed beforehand; leave out --anytime",
    ("cluster", "prompts"): "a cluster is one draw, whatever its prompts; give one of the two",
}
"""Options that exclude each other, and why."""


def refuse_together(**options: object) -> None:
    """Refuse options that exclude each other; one that is not given is None or False."""
    for (one, other), why in TOGETHER.items():
        if all(options[name] not in (None, False) for name in (one, other)):
            raise typer.BadParameter(f"--{one} and --{other}: {why}")


def files_of_one_policy(
    rollouts: list[Path], *, cluster: str | None, prompts: PromptDesign | None
) -> tuple[list[Path], int | None, int]:
    """Return the files that the newest weights drew, the version of these, and the number of files left out."""
    from offdrift.prove.certify import check_clusters, check_design, newest_policy, rollout_files

    files = rollout_files(rollouts)
    version, chosen = newest_policy(files)
    if cluster is not None:
        check_clusters(chosen, cluster)
    elif prompts is None:
        check_design(chosen)
    return chosen, version, len(files) - len(chosen)


def model_of(rollouts: list[Path]) -> str:
    """Return the model that an arm holds beside its rollouts."""
    models = [p / "model" for p in rollouts if (p / "rollouts").is_dir() and (p / "model").is_dir()]
    if len(models) != 1:
        raise typer.BadParameter("--model is missing: name the checkpoint that is to be judged")
    return str(models[0])


def judged_files(
    screen: Screen,
    files: list[Path],
    model: str,
    prove: Callable[..., Certificate],
    *,
    old: str | None,
    **settings: Any,
) -> JudgedBatches:
    """Judge files one after another with a bar, to the end or to an interrupt."""
    from offdrift.models import load_model
    from offdrift.prove.certify import judge

    screen.doing(f"loading {model}")
    policy, _ = load_model(model, seed=0)
    before = None if old is None else load_model(old, seed=0)[0]
    judged: JudgedBatches | None = None
    with screen.until_interrupted("files") as progress:
        task = progress.add_task("reading", total=len(files))

        def watch(file: Path, so_far: JudgedBatches) -> None:
            nonlocal judged
            if judged is None:  # a number that cannot be is named now, not when all files are read
                prove(so_far.evidence)
            judged = so_far
            progress.update(task, description=escape(file.name), advance=1)

        judge(files, policy, old=before, watch=watch, **settings)
    if judged is None:
        raise typer.Exit(ExitCode.INTERRUPTED)
    return judged


@dataclass(frozen=True)
class JudgedPolicy:
    """A certificate, and of what it is one."""

    batches: JudgedBatches
    proof: Certificate
    rules: Chosen
    model: str
    old: str | None
    version: int | None
    """Of the weights that drew the rollouts, optimizer steps; None where files name none."""
    skipped: int
    """Files of other versions, left out."""
    trained_on: bool
    planned: tuple[Plan | None, ...]
    """The plan that --power asks for; empty without."""

    def as_dict(self) -> dict[str, Any]:
        """The content of `--json`."""
        document = {
            "files": self.batches.files,
            "skipped": self.skipped,
            "rollout_version": self.version,
            "tokens": self.batches.tokens,
            "repeated": self.batches.repeated,
            "model": self.model,
            "trained_objective": _raised_by(self.model),
            "old": self.old,
            "alphas": self.batches.alphas.as_dict(),
            **self.rules.rules.as_record(self.rules.words),
        }
        for planned in self.planned:
            curve = {} if planned is None else planned.curves["direct"]
            document["power"] = [{"prompts": n, "probability": p} for n, p in curve.items()]
            document["plan"] = None if planned is None else planned.as_dict()
        return {**document, **self.proof.as_dict()}

    def report(self, screen: Screen) -> None:
        """Print the document of `--json`, or certificate, sources, plan and the return that training raised."""
        from offdrift.certificate.guarantees import ABOUT
        from offdrift.prove.certify import certificate_view

        if screen.as_json:
            screen.json(self.as_dict())
            return
        batches = self.batches
        screen.show(certificate_view(self.proof, width=screen.width, alphas=batches.alphas))
        count = "1 file" if batches.files == 1 else f"{batches.files} files"
        about = f"{count}, {batches.tokens:,} tokens, judged: {self.model}"
        if self.skipped:
            about += (
                f"; drawn by the weights of version {self.version}, the newest. {self.skipped} files of other "
                "versions are another policy's, and were left out: name them to judge against it"
            )
        if batches.repeated:
            about += f"; {batches.repeated:,} sequences answer prompts of an earlier file, and were left out"
        screen.out.print(Text(f"{about}. {self.rules.words}", style="dim"), soft_wrap=True)
        for planned in self.planned:
            show_plan(screen, planned)
            if self.trained_on:
                screen.warn("the policy has learned from these prompts: the gain seen here is too large")
            if self.proof.record_refuted:
                screen.warn("the record is refuted: the gain seen here is another policy's")
        if (raised := _raised_by(self.model)) is not None:
            words = f"The certificate is about {ABOUT}. What the arm's steps raise ({raised['advantage']}): "
            screen.out.print(Text(f"{words}{raised['words']}.", style="dim" if raised["is_j"] else "yellow"))

    def next_step(self) -> tuple[str, str]:
        """The command that the verdict leads to, and what it is for."""
        policy = f"--model {shlex.quote(self.model)}"
        if self.trained_on:
            return f"offdrift certify NEW_ROLLOUTS {policy}", "by rollouts of prompts that it has not learned from"
        if self.proof.record_refuted:
            return "offdrift docs rules", "what tells one engine bug from another, to repair the record"
        if self.proof.certified or self.proof.best is None:
            return "offdrift docs certificates-in-short", "what a certificate needs, and what it promises"
        if self.planned or self.proof.looks.anytime:
            return f"offdrift certify MORE_ROLLOUTS {policy}", "by more prompts"
        return shlex.join(["offdrift", *sys.argv[1:], "--power"]), "how many prompts would certify the gain seen here"


def show_plan(screen: Screen, planned: Plan | None) -> None:
    """Chances of every route by number of prompts, and which to use."""
    if planned is None:
        screen.show("No rewards are recorded, so that no gain can be planned for.")
        return
    titles = {
        "direct": "Rollouts like these, by ratios alone,",
        "control": "Rollouts like these, with control variates,",
        "fresh": "Fresh answers of both policies (--fresh)",
    }
    for route, curve in planned.curves.items():
        chances = ", ".join(f"{n:,} prompts {p:.0%}" for n, p in curve.items())
        screen.show(f"{titles[route]} would certify the gain seen here, if these prompts stand for all: {chances}.")
    screen.show(planned.words)


def compare_fresh(
    screen: Screen,
    paths: list[Path],
    unread: Mapping[str, Any],
    *,
    cluster: str | None,
    rules: Path | None,
    settings: dict[str, Any],
) -> None:
    """`certify A B --fresh`; `unread` are options that it does not read, by name."""
    from offdrift.certificate.paired import certify_fresh
    from offdrift.judge.rules_record import choose_rules, record_above
    from offdrift.prove.fresh import paired_view, read_answers

    if wrong := [name for name, value in unread.items() if value]:
        raise typer.BadParameter(f"--fresh and {wrong[0]}: fresh answers are compared by their rewards, at one look")
    if len(paths) != 2:
        raise typer.BadParameter(f"--fresh compares two policies, A and B: give two paths, not {len(paths)}")
    if paths[0].resolve() == paths[1].resolve():
        raise typer.BadParameter(f"{paths[0]} is named twice: A and B are two policies' answers")
    chosen = choose_rules(rules, *record_above(paths[0]))
    alpha = settings["alpha"]
    limit = chosen.rules.limits["certificate_error"] if alpha is None else alpha
    screen.doing("reading answers")
    a, b = (read_answers(path, cluster=cluster) for path in paths)
    design = settings["prompts"] if cluster is None else "clustered"
    proof = certify_fresh(a, b, **{**settings, "alpha": limit, "prompts": design})
    names = [str(path) for path in paths]
    if screen.as_json:
        screen.json({"a": names[0], "b": names[1], **chosen.rules.as_record(chosen.words), **proof.as_dict()})
        return
    screen.show(paired_view(proof, names, width=screen.width))
    screen.out.print(Text(chosen.words, style="dim"), soft_wrap=True)


def _raised_by(model: str) -> dict[str, Any] | None:
    """The return that training raised, for a model in the arm of a run that stored it (`run.json`); else None."""
    for path in (Path(model).expanduser(), Path(model).expanduser().resolve()):
        for arm in path.parents:
            if arm.parent.name == "arms":
                with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                    head = read_json(arm.parent.parent / "run.json")
                    return dict((head.get("trained_return") or head["raises"])[arm.name])  # until 0.1: "raises"
    return None


def _learned_from(model: str, files: list[Path]) -> bool:
    """Whether the model is that of an arm of the run whose rollouts are among the files.

    All arms of a run see the same prompts and the same first batches, so any arm's will do.
    """
    path = Path(model).expanduser()
    arms = {place.parent.parent for place in (path, path.resolve())}
    drawn = {folder.resolve() for arm in arms for folder in arm.glob("*/rollouts")}
    read = {folder for f in files for folder in (f.parent.resolve(), f.resolve().parent)}
    return not drawn.isdisjoint(read)
