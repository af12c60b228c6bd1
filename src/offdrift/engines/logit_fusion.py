"""A mixture of teacher and student that tokens are drawn from, and how it fades out."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.errors import MethodError, ShapeError
from offdrift.numerics import at_least_float32


def alpha_decay(
    initial: float, step: int, steps: int, difficulty: float | Float[Tensor, "*prompts"] = 1.0
) -> float | Float[Tensor, "*prompts"]:
    """The teacher's share in a mixture of logits, which falls linearly and is larger where it is hard.

        alpha(x, k) = initial * max(0, 1 - k / K) * difficulty(x)

    Args:
        initial: share at step 0 for the hardest prompts, [0, 1].
        step: k, from 0.
        steps: K, after which the student is alone.
        difficulty: score of each prompt, [0, 1].

    Raises: `MethodError` if `initial` or `steps` is out of range.

    Example:
        >>> [alpha_decay(0.5, k, 100, 0.8) for k in (0, 50, 100, 120)]
        [0.4, 0.2, 0.0, 0.0]

    Reference: Zhang et al., "Logit Fusion", 2026.
    """
    if not (0 <= initial <= 1 and steps > 0):
        raise MethodError(f"initial={initial} must lie in [0, 1], steps={steps} be above 0")
    return initial * max(0.0, 1 - step / steps) * difficulty


def fused_logits(
    teacher: Float[Tensor, "*s v"], student: Float[Tensor, "*s w"], alpha: float | Float[Tensor, "*s"]
) -> Float[Tensor, "*s v"]:
    """Log-probs of the mixture of a teacher and a student from which tokens are drawn.

        pi_mix = softmax(alpha l_T + (1 - alpha) l_S), proportional to pi_T^alpha pi_S^(1 - alpha)

    Record log mu under the mixture, not under the student. Logits may be -inf, as long as some token
    is possible under both.

    Args:
        teacher, student: logits or log-probs over the same vocabulary.
        alpha: the teacher's share, [0, 1]; see `alpha_decay`.

    Gradient: to both logits. Raises: `ShapeError` if the vocabularies differ in size.

    Example:
        >>> fused_logits(torch.tensor([2.0, 0.0, -1.0]), torch.tensor([0.0, 1.0, 0.0]), 0.3).exp()
        tensor([0.3981, 0.4400, 0.1619])

    Reference: Zhang et al., "Logit Fusion", 2026.
    """
    if teacher.shape != student.shape:
        raise ShapeError(
            f"teacher has shape {tuple(teacher.shape)}, student {tuple(student.shape)}; they must "
            "score the same positions over the same vocabulary"
        )
    student = at_least_float32(student)
    a = torch.as_tensor(alpha, dtype=student.dtype, device=student.device).unsqueeze(-1)
    # A share of 0 must not turn -inf into NaN.
    t = (a * at_least_float32(teacher)).where(a > 0, 0.0)
    s = ((1 - a) * student).where(a < 1, 0.0)
    return (t + s).log_softmax(-1)
