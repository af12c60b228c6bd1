"""Projection of a gradient: numbers of the methods table and edges."""

import pytest
import torch

from offdrift.errors import ShapeError
from offdrift.methods.gradient_alignment import gac_coefficient, gac_projection
from tests.oracles.fixtures import double


def test_projection_of_an_aligned_gradient():
    g, p = double([0.8, 0.6, 0.0]), double([1.0, 0.0, 0.0])
    got = gac_projection(g, p)  # c.gac
    assert got.cosine.item() == pytest.approx(0.8)
    torch.testing.assert_close(got.grad, double([0.0, 0.6, 0.0]))


@pytest.mark.parametrize("strength", [1.0, 0.5])
def test_projection_removes_the_named_share_of_the_parallel_part(strength):
    g = torch.Generator().manual_seed(0)
    last = torch.randn(50, generator=g, dtype=torch.float64)
    grad = 2 * last + torch.randn(50, generator=g, dtype=torch.float64)
    got = gac_projection(grad, last, strength=strength)
    along = lambda x: (x @ last / (last @ last)).item()  # noqa: E731
    assert along(got.grad) == pytest.approx((1 - strength) * along(grad), abs=1e-12)
    torch.testing.assert_close(got.grad - along(got.grad) * last, grad - along(grad) * last)


@pytest.mark.parametrize(
    ("grad", "previous"),
    [
        ([-0.8, 0.6], [1.0, 0.0]),
        ([0.3, 1.0], [1.0, 0.0]),
        ([0.0, 0.0], [1.0, 0.0]),
        ([1.0, 0.0], [0.0, 0.0]),
        ([1.0, 0.0], None),
    ],
    ids=["opposed", "below the threshold", "zero", "zero before", "first step"],
)
def test_other_gradients_stay_as_they_are(grad, previous):
    got = gac_projection(double(grad), None if previous is None else double(previous))
    assert got.grad.tolist() == grad
    assert got.cosine.isfinite()


def test_gradients_in_parts_are_projected_as_one():
    g, p = double([0.8, 0.6, 0.1, 0.4]), double([1.0, 0.1, -0.2, 0.0])
    whole = gac_projection(g, p)
    halves = list(zip(g.split(2), p.split(2), strict=True))
    sums = [
        sum((f(a, b) for a, b in halves), double(0))
        for f in (lambda a, b: a @ b, lambda a, b: a @ a, lambda a, b: b @ b)
    ]
    coefficient, cosine = gac_coefficient(*sums)
    torch.testing.assert_close(cosine, whole.cosine)
    torch.testing.assert_close(torch.cat([a - coefficient * b for a, b in halves]), whole.grad)
    with pytest.raises(ShapeError):
        gac_projection(g, p[:2])
