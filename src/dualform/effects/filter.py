"""The filter of effects, as pure functions of a layer's second moments; float64 throughout.

Training without a pattern would not only miss its update: every later step would answer to the change. For a layer
whose loss has the curvature G ⊗ A, what is left of an update in the end is, in the eigenvectors of both, the fraction

    F_ji = (1 - exp(-X_ji)) / X_ji        X_ji = kappa T b_j a_i + decay

averaged over when it was made. kappa says how much faster than by the layer alone the change is answered, since all
layers learn at once. Nothing here knows where the moments come from.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

FILTER_TOLERANCE = 1e-4  # of the weighted filter, that its low-rank form may be off by


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """The second moment of a layer's keys, or of its values, by its eigenvectors.

    Attributes:
        basis: (d, k) eigenvectors, a column each: all d, or of a wide layer those with the largest eigenvalues.
        moment: (k,) their eigenvalues; where k < d one more, the mean of all others, which are not told apart.
    """

    basis: Tensor
    moment: Tensor

    @property
    def has_rest(self) -> bool:
        """Whether some directions are not told apart."""
        return len(self.moment) > self.basis.shape[1]

    def mass(self) -> Tensor:
        """Return how much of the moment's trace is in each eigenvector, and in all others together, like `moment`."""
        if not self.has_rest:
            return self.moment
        d, k = self.basis.shape
        return torch.cat([self.moment[:k], (d - k) * self.moment[k:]])

    def to(self, device: torch.device) -> "Side":
        """Return it on a device."""
        return Side(self.basis.to(device), self.moment.to(device))

    def scale(self, factors: Tensor, rows: Tensor) -> Tensor:
        """Return rows (n, d) whose coordinates are multiplied by factors (r, k or k + 1), (r, n, d)."""
        inside = rows @ self.basis
        count = self.basis.shape[1]
        scaled = (factors[:, None, :count] * inside) @ self.basis.T
        if self.has_rest:
            scaled += factors[:, None, count:] * (rows - inside @ self.basis.T)
        return scaled


def whole_side(moment: Tensor) -> Side:
    """Return all eigenvectors of a moment, (d, d)."""
    eigenvalues, basis = torch.linalg.eigh(moment.double())
    return Side(basis, eigenvalues.clamp(min=0))


@dataclass(frozen=True, slots=True, eq=False)
class Filter:
    """A layer's filter.

    Attributes:
        keys: the moment A of the keys.
        values: the moment G of the values.
        time: T, the sum of the rates, times kappa where layers answer together; 0 where nothing is filtered.
        decay: what weight decay adds to the exponent, the sum over steps.
        left: (r, d_out), or as many as the values' moment has eigenvalues, and
        right: (r, d_in), likewise, whose outer products sum to F, nearly.
    """

    keys: Side
    values: Side
    time: float
    decay: float
    left: Tensor
    right: Tensor

    def to(self, device: torch.device) -> "Filter":
        """Return it on a device."""
        moved = (part.to(device) for part in (self.left, self.right))
        return Filter(self.keys.to(device), self.values.to(device), self.time, self.decay, *moved)

    def whole(self, strength: float = 1.0) -> Tensor:
        """Return F, (d_out, d_in), had later steps answered so much more strongly."""
        return remaining(strength * self.time * self.values.moment[:, None] * self.keys.moment + self.decay)

    def stronger(self, strength: float, *, tolerance: float = FILTER_TOLERANCE) -> "Filter":
        """Return the filter had later steps answered so much more strongly."""
        left, right = factorise(self.whole(strength), self.values.mass(), self.keys.mass(), tolerance=tolerance)
        return Filter(self.keys, self.values, strength * self.time, self.decay, left, right)

    def apply(self, matrix: Tensor, *, strength: float = 1.0) -> Tensor:
        """Return U_G (F ∘ (U_Gᵀ M U_A)) U_Aᵀ for matrices (..., d_out, d_in): what training left of an update."""
        factors, basis = self.whole(strength), self.keys.basis
        count = basis.shape[1]
        inside = matrix @ basis
        left = self._filter_values(inside, factors[:, :count]) @ basis.T
        if self.keys.has_rest:
            left += self._filter_values(matrix - inside @ basis.T, factors[:, count:])
        return left

    def _filter_values(self, columns: Tensor, factors: Tensor) -> Tensor:
        """Multiply columns (..., d_out, n) by factors (d_out, n) or (d_out, 1), in the values' coordinates."""
        basis = self.values.basis
        count = basis.shape[1]
        inside = basis.T @ columns
        left = basis @ (factors[:count] * inside)
        return left + factors[count:] * (columns - basis @ inside) if self.values.has_rest else left

    def turn(self, gradients: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return P_r g, (r, Q, d_out), and R_r q, (r, Q, d_in), such that `apply(g qᵀ)` is sum_r (P_r g)(R_r q)ᵀ."""
        return self.values.scale(self.left, gradients), self.keys.scale(self.right, queries)


def make_filter(keys: Side, values: Side, time: float, decay: float, *, tolerance: float = FILTER_TOLERANCE) -> Filter:
    """Make the filter of a layer.

    Args:
        keys: A, (d_in, d_in), by its eigenvectors.
        values: G, (d_out, d_out), likewise.
        time: T, the sum of the rates, times kappa.
        decay: what weight decay adds to the exponent, the sum over steps.
        tolerance: how far the low-rank form may be off, as a share of the weighted filter; 0 for all ranks.
    """
    none = torch.empty(0)
    return Filter(keys, values, time, decay, none, none).stronger(1.0, tolerance=tolerance)


def no_filter(d_in: int, d_out: int) -> Filter:
    """Return the filter that leaves everything as it is."""
    ones = torch.ones(max(d_out, d_in), dtype=torch.float64)
    keys, values = (Side(torch.eye(size, dtype=torch.float64), ones[:size]) for size in (d_in, d_out))
    return Filter(keys, values, 0.0, 0.0, ones[None, :d_out], ones[None, :d_in])


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
