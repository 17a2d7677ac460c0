"""The filter of effects, as pure functions of a layer's second moments; float64 throughout.

Training without a pattern would not only miss its update: every later step would answer to the change. For a layer
whose loss has the curvature G ⊗ A, what is left of an update in the end is, in the eigenvectors of both, the fraction

    F_ji = (1 - exp(-X_ji)) / X_ji        X_ji = T b_j a_i + decay

averaged over when it was made. Nothing here knows where the moments come from.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

FILTER_TOLERANCE = 1e-4  # of the weighted filter, that its low-rank form may be off by


@dataclass(frozen=True, slots=True, eq=False)
class Filter:
    """A layer's filter.

    Attributes:
        keys: U_A, (d_in, d_in), a column per eigenvector of the keys' moment.
        values: U_G, (d_out, d_out), likewise of the values'.
        whole: F, (d_out, d_in).
        left: (r, d_out), and
        right: (r, d_in), whose outer products sum to F, nearly.
    """

    keys: Tensor
    values: Tensor
    whole: Tensor
    left: Tensor
    right: Tensor

    def to(self, device: torch.device) -> "Filter":
        """Return it on a device."""
        return Filter(*(part.to(device) for part in (self.keys, self.values, self.whole, self.left, self.right)))

    def apply(self, matrix: Tensor) -> Tensor:
        """Return U_G (F ∘ (U_Gᵀ M U_A)) U_Aᵀ for matrices (..., d_out, d_in): what training left of an update."""
        return self.values @ (self.whole * (self.values.T @ matrix @ self.keys)) @ self.keys.T

    def turn(self, gradients: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return P_r g, (r, Q, d_out), and R_r q, (r, Q, d_in), such that `apply(g qᵀ)` is sum_r (P_r g)(R_r q)ᵀ."""
        values = (self.left[:, None] * (gradients @ self.values)) @ self.values.T
        keys = (self.right[:, None] * (queries @ self.keys)) @ self.keys.T
        return values, keys


def make_filter(
    key_moment: Tensor, value_moment: Tensor, time: float, decay: float, *, tolerance: float = FILTER_TOLERANCE
) -> Filter:
    """Make the filter of a layer.

    Args:
        key_moment: A, (d_in, d_in).
        value_moment: G, (d_out, d_out).
        time: T, the sum of the rates.
        decay: what weight decay adds to the exponent, the sum over steps.
        tolerance: how far the low-rank form may be off, as a share of the weighted filter; 0 for all ranks.
    """
    a, keys = torch.linalg.eigh(key_moment.double())
    b, values = torch.linalg.eigh(value_moment.double())
    a, b = a.clamp(min=0), b.clamp(min=0)
    whole = remaining(time * b[:, None] * a + decay)
    left, right = factorise(whole, b, a, tolerance=tolerance)
    return Filter(keys, values, whole, left, right)


def no_filter(d_in: int, d_out: int) -> Filter:
    """Return the filter that leaves everything as it is."""
    ones = torch.ones(d_out, d_in, dtype=torch.float64)
    keys, values = (torch.eye(size, dtype=torch.float64) for size in (d_in, d_out))
    return Filter(keys, values, ones, ones[None, :, 0], ones[None, 0])


def remaining(exponent: Tensor) -> Tensor:
    """Return (1 - exp(-X)) / X, which is 1 at 0.

    >>> remaining(torch.tensor([0.0, 1.0], dtype=torch.float64))
    tensor([1.0000, 0.6321], dtype=torch.float64)
    """
    safe = exponent.clamp(min=1e-300)
    return torch.where(exponent > 1e-12, -torch.expm1(-safe) / safe, 1 - exponent / 2)


def factorise(whole: Tensor, b: Tensor, a: Tensor, *, tolerance: float) -> tuple[Tensor, Tensor]:
    """Return left (r, d_out) and right (r, d_in) with sum_r left_r right_rᵀ close to F, (d_out, d_in).

    Close where it matters: the error is weighted by the root of the moments b and a, that is, by how large keys and
    values are in each direction. As few terms are kept as the tolerance allows.
    """
    on_values, on_keys = (_root(moment) for moment in (b, a))
    u, s, vt = torch.linalg.svd(on_values[:, None] * whole * on_keys, full_matrices=False)
    tail = s.square().flip(0).cumsum(0).flip(0)  # what is lost by keeping only the terms before each
    rank = max(1, int((tail > tolerance**2 * tail[0]).sum()))
    return (u[:, :rank] * s[:rank] / on_values[:, None]).T.contiguous(), vt[:rank] / on_keys


def _root(moment: Tensor) -> Tensor:
    """Return the root of eigenvalues, held above zero: a direction that no pattern has weighs nearly nothing."""
    return moment.clamp(min=1e-12 * float(moment.max()) + 1e-300).sqrt()
