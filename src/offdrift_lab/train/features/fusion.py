"""`[fusion]` of a recipe: a teacher decodes along with the policy, and responses are drawn from their mixed logits.

    pi_mix = softmax(alpha l_T + (1 - alpha) l_S),   alpha(x, k) = alpha * max(0, 1 - k / decay_updates) * difficulty(x)

Source: Zhang et al., "Logit Fusion", 2026.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from offdrift.engines.logit_fusion import alpha_decay
from offdrift.errors import RecipeError
from offdrift_lab.train.data.problems import Problem
from offdrift_lab.train.settings.rollout import RolloutSettings
from offdrift_lab.train.settings.sections import Positive, Section, WarmStartSettings


class MixtureSettings(Section):
    """The teacher's share in the logits that responses are drawn from."""

    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share at update 0, of the hardest prompts; 0: the policy draws alone."""
    decay_updates: Positive | None = None
    """Update by which the share has fallen to 0, linearly; for an engine that lags, that of its weights. Absent: the
    share stays."""
    difficulty: Literal["uniform", "probe", "given"] = "uniform"
    """Factor of a prompt's share, in [0, 1]. uniform: 1. probe: how far the mean reward of responses that the policy
    draws alone is from the upper end of `reward_range`. given: field "difficulty" of a file's problem."""
    probe_samples: Positive = 4
    """probe: responses per prompt that are drawn, rewarded and discarded for it, as long as the share is above 0."""

    def check(self, name: str, *, task: str, inherited: MixtureSettings) -> None:
        """Refuse settings that do nothing, and difficulties of a task that gives none.

        Args:
            name: of the arm.
            inherited: the recipe's, whose values the arm may leave without effect.

        Raises: `ValueError` naming the field, its value and the way out.
        """
        fields = MixtureSettings.model_fields.items()
        changed = [key for key, field in fields if key != "alpha" and getattr(self, key) != field.default]
        if self is not inherited:
            changed = [key for key in changed if getattr(self, key) != getattr(inherited, key)]
        if self.alpha == 0 and changed:
            raise ValueError(
                f"arms.{name}: fusion.{changed[0]} does nothing with fusion.alpha = 0, where the policy draws alone; "
                "leave it out, or raise fusion.alpha"
            )
        if self.difficulty != "probe" and "probe_samples" in changed:
            raise ValueError(
                f"arms.{name}: fusion.probe_samples = {self.probe_samples} does nothing with fusion.difficulty = "
                f'"{self.difficulty}"; set that to "probe", or leave it out'
            )
        if self.difficulty == "given" and not task.endswith(".jsonl"):
            raise ValueError(
                f'arms.{name}: fusion.difficulty = "given" reads field "difficulty" of a file\'s problems, and task = '
                f'"{task}" is no file; use "probe"'
            )

    def shares(self, update: int, difficulties: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
        """alpha(x, k) of prompts of these difficulties, drawn by the weights of this update. Gradient: none.

        Example:
            >>> MixtureSettings(alpha=0.5, decay_updates=100).shares(50, torch.tensor([1.0, 0.5]))
            tensor([0.2500, 0.1250])

        Source: Zhang et al., "Logit Fusion", 2026.
        """
        steps = self.decay_updates
        share = self.alpha if steps is None else alpha_decay(self.alpha, update, steps)
        return share * difficulties


class Fusion(MixtureSettings):
    """A teacher decodes along with the policy, in lock-step, and responses are drawn from their mixed logits
    (docs/fusion.md). Evaluations are the policy's alone."""

    teacher: str
    """What a recipe's `model` may be, over the same tokens. Its weights stay, in the engine, at `rollout.dtype`."""
    warm_start: WarmStartSettings = WarmStartSettings()
    """Supervised steps of the teacher, where it is to learn the task first."""

    def check_beside(self, rollout: RolloutSettings, *, pipeline: bool, episodes: bool, task: str) -> None:
        """Refuse a teacher that cannot decode along.

        Raises: `ValueError` naming the field, its value and the way out.
        """
        setting, engine = f'fusion.teacher = "{self.teacher}"', rollout.engine
        absent = {
            f'rollout.engine = "{engine}", which decodes one model; use "transformers"': engine != "transformers",
            "[pipeline], whose workers decode one model": pipeline,
            f'task = "{task}", whose episodes are drawn turn by turn': episodes,
            'rollout.evidence = "hidden", states of the policy that do not make the mixture; use "full", "sampled" or '
            "a number of top log-probs": rollout.evidence == "hidden",
        }
        if unfit := [reason for reason, is_so in absent.items() if is_so]:
            raise ValueError(f"{setting} has no place beside {unfit[0]}; or leave [fusion] out")


def given_difficulties(problems: Sequence[Problem]) -> Float[Tensor, " p"]:
    """Field "difficulty" of problems. Raises: `RecipeError` naming a problem where it is no number in [0, 1]."""
    values = [problem.metadata.get("difficulty") for problem in problems]
    for problem, value in zip(problems, values, strict=True):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise RecipeError(
                f'fusion.difficulty = "given": the problem {problem.prompt[:40]!r} has difficulty = {value!r:.40}; '
                'expected a number in [0, 1] on every line, or use fusion.difficulty = "probe"'
            )
    return torch.tensor(values, dtype=torch.float32)


def probed_difficulties(
    rewards: Float[Tensor, " b"], group_ids: Int[Tensor, " b"], reward_range: tuple[float, float]
) -> Float[Tensor, " p"]:
    """Difficulty of each prompt: how far the mean reward of its responses is below the largest possible one. Gradient:
    none.

        d = (high - mean reward) / (high - low), in [0, 1]

    Args:
        group_ids: number of each response's prompt: 0, 1, ..., all of them.

    Example:
        >>> probed_difficulties(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1]), (0.0, 1.0))
        tensor([0.5000, 0.0000])
    """
    low, high = reward_range
    totals = torch.bincount(group_ids, rewards.double())
    return ((high - totals / torch.bincount(group_ids)) / (high - low)).clamp(0, 1).float()


def check_same_tokens(teacher: str, vocabularies: tuple[Mapping[str, int], Mapping[str, int]]) -> None:
    """Refuse a teacher whose tokenizer numbers other tokens. Raises: `RecipeError`.

    Args:
        teacher: name of its model.
        vocabularies: id of each token, of the teacher and of the student.
    """
    of_teacher, of_student = (set(vocabulary.items()) for vocabulary in vocabularies)
    if different := of_teacher ^ of_student:
        raise RecipeError(
            f"fusion.teacher = {teacher!r} has another tokenizer than the model: {len(different)} entries are in one "
            f"alone, such as {min(different)!r}; logits are mixed token by token, so take a teacher of the "
            "model's own family"
        )
