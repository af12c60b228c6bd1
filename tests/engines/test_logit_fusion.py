"""Mixture of teacher and student: its numbers and edges."""

import math

import pytest
import torch

from offdrift.engines.logit_fusion import alpha_decay, fused_logits
from offdrift.errors import MethodError, ShapeError
from tests.oracles.fixtures import double


def test_the_teacher_fades():
    got = [alpha_decay(0.5, k, 100, 0.8) for k in (0, 25, 50, 100, 120)]  # lf.alpha
    assert got == pytest.approx([0.4, 0.3, 0.2, 0, 0])
    per_prompt = alpha_decay(0.5, 25, 100, double([0.8, 0.0]))
    torch.testing.assert_close(per_prompt, double([0.3, 0.0]))
    for initial, steps in ((1.5, 100), (0.5, 0)):
        with pytest.raises(MethodError):
            alpha_decay(initial, 0, steps)


def test_mixture_of_teacher_and_student():
    teacher, student = double([2.0, 0.0, -1.0]), double([0.0, 1.0, 0.0])
    got = fused_logits(teacher, student, 0.3).exp()
    torch.testing.assert_close(got, double([0.39813, 0.440002, 0.161868]), rtol=0, atol=1e-6)
    product = teacher.softmax(0) ** 0.3 * student.softmax(0) ** 0.7  # lf.gm
    torch.testing.assert_close(got, product / product.sum())
    ratio = student.softmax(0) / got  # lf.ratio
    torch.testing.assert_close(ratio, double([0.532342, 1.309351, 1.309351]), rtol=0, atol=1e-6)


def test_each_row_has_its_own_share_and_impossible_tokens_stay_so():
    teacher = double([[2.0, -math.inf, -1.0]] * 3)
    student = double([[0.0, 1.0, -math.inf]] * 3)
    got = fused_logits(teacher, student, double([0.0, 0.5, 1.0])).exp()
    expected = [student[0].softmax(0).tolist(), [1.0, 0.0, 0.0], teacher[0].softmax(0).tolist()]
    torch.testing.assert_close(got, double(expected))
    assert fused_logits(teacher.half(), student.half(), 0.5).dtype == torch.float32
    with pytest.raises(ShapeError, match="vocabulary"):
        fused_logits(teacher, student[:, :2], 0.5)
