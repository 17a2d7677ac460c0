"""The one-sided family: Muon multiplies a gradient by a matrix per step, from one side.

With gradient g, numbers α, β, κ, γ and ν (Nesterov), one step on a matrix W is

    m' = α m + β g                   (a lerp: α = 1 − β)
    u  = (1 − ν) g + ν m'            (another lerp; ν = 1 without Nesterov)
    W' = κ W − γ · orthogonalise(u)

The orthogonalisation normalises u, and then several times X ← a X + b (X Xᵀ) X + c (X Xᵀ)² X. Each multiplies X from
the left by a polynomial in X Xᵀ, so all of them together do too:

    orthogonalise(u) = L u,    L a polynomial in u uᵀ, (rows, rows)

*Given* L, which depends on the whole gradient, the step is linear: a share of W follows the same three lines with L in
place of the orthogonalisation. A tall matrix (rows > cols) is orthogonalised as its transpose, so that its polynomial
is one in uᵀ u, (cols, cols), and stands on the right.

torch computes the polynomials in bfloat16, whatever the parameter's dtype. What that leaves, orthogonalise(u) − L u, is
no pattern's: `dualform.engine.fold` follows it as a third term, rounding. Nothing here hides it in a share.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dualform.identity.families.optimizer_kind import (
    AskedOutputs,
    AskedRecursion,
    BackwardRecursion,
    Move,
    Multiplier,
    OptimizerKind,
    ReplayedStep,
    Setting,
    Settings,
    State,
    StepMap,
    register_optimizer,
)
from dualform.identity.families.rounding import machine, near
from dualform.identity.parameter_maps import ParameterMap

UNIT = 2.0**-9  # half an ulp of 1 in bfloat16


@dataclass(frozen=True, slots=True)
class OneSidedStep(StepMap):
    """One step of Muon, as the numbers of the three lines above and the matrix L."""

    alpha: float
    beta: float
    kappa: float
    gamma: float
    ahead: float  # ν
    side: Tensor  # L
    tall: bool
    noise: float

    def step(self, share: Tensor, average: Tensor, gradient: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return a share of W' and of m'."""
        average = self.alpha * average
        if gradient is not None:
            average = average + self.beta * gradient
        update = self.ahead * average
        if gradient is not None and self.ahead != 1.0:
            update = update + (1 - self.ahead) * gradient
        turned = update @ self.side if self.tall else self.side @ update
        return self.kappa * share - self.gamma * turned, average

    moves_average = True

    @classmethod
    def follow_all(cls, moves: Sequence[Move["OneSidedStep"]]) -> None:
        """Move shares and averages in place, one share after the other."""
        for move in moves:
            step = move.linear
            for share, average, gradient in zip(move.shares, move.averages, move.gradients, strict=True):
                if not move.averages_moved:
                    average.mul_(step.alpha)
                    if gradient is not None:
                        average.add_(gradient, alpha=step.beta)
                update = step.ahead * average
                if gradient is not None and step.ahead != 1.0:
                    update.add_(gradient, alpha=1 - step.ahead)
                turned = update @ step.side if step.tall else step.side @ update
                share.mul_(step.kappa).add_(turned, alpha=-step.gamma)


@dataclass(frozen=True, slots=True)
class OneSidedMultiplier(Multiplier):
    """A matrix K_s that multiplies the gradient from the left, or for a tall parameter from the right."""

    matrix: Tensor
    shape: tuple[int, ...]  # the parameter's

    def to(self, like: Tensor) -> "OneSidedMultiplier":
        """Return it on the device and in the dtype of a tensor."""
        return OneSidedMultiplier(self.matrix.to(like), self.shape)

    def contribute(
        self, parameter_map: ParameterMap, queries: Tensor, keys: Tensor, values: Tensor, units: Tensor
    ) -> Tensor:
        """Return (K_s e)_o (x · q), or e_o (x · K_s q), for a linear layer."""
        return parameter_map.unit_contributions(queries, keys, values, units, self.matrix, self.shape)


class OneSidedBackward(BackwardRecursion[OneSidedStep]):
    """The way back of this family.

    With the number v on W' and the matrix U on m', where `W' = κ W − γ L u`, `u = (1 − ν) g + ν m'`, `m' = α m + β g`:

        A = U − v γ ν L        K_s = β A − v γ (1 − ν) L
        U ← α A                v ← κ v
    """

    def __init__(self, shape: Sequence[int], rows: int | None = None) -> None:
        """Begin at the end of the steps.

        Args:
            shape: the parameter's.
            rows: how many rows the matrices of the steps have, where they are products with L; by default L's own.
        """
        self._shape = tuple(shape)
        self._on_weight = 1.0
        self._on_average = torch.zeros(min(shape) if rows is None else rows, min(shape), dtype=torch.float64)

    def step(self, linear: OneSidedStep) -> OneSidedMultiplier:
        """Go back over one step, and return its K_s."""
        taken = self._on_weight * linear.gamma
        average = self._on_average - taken * linear.ahead * linear.side
        found = linear.beta * average - taken * (1 - linear.ahead) * linear.side
        self._on_average = linear.alpha * average
        self._on_weight *= linear.kappa
        return OneSidedMultiplier(found, self._shape)


@dataclass(frozen=True, slots=True)
class TurnedMultiplier(Multiplier):
    """What K_s makes of the outputs that are asked about, each of which is ⟨W, l rᵀ⟩: ⟨K_s G, l rᵀ⟩ = ⟨G, (K_s l) rᵀ⟩.

    Attributes:
        left: K_s l, or l where K_s stands on the right, (Q, rows)
        right: r, or K_s r, (Q, cols)
    """

    left: Tensor
    right: Tensor

    def to(self, like: Tensor) -> "TurnedMultiplier":
        """Return it on the device and in the dtype of a tensor."""
        return TurnedMultiplier(self.left.to(like), self.right.to(like))

    def contribute(
        self, parameter_map: ParameterMap, queries: Tensor, keys: Tensor, values: Tensor, units: Tensor
    ) -> Tensor:
        """Return (K_s l · e) (r · x), or (l · e) (K_s r · x), for a linear layer."""
        return parameter_map.rank_one_contributions(self.left, self.right, keys, values)


class AskedSides(AskedRecursion[OneSidedStep]):
    """The way back of this family for some outputs ⟨W, l rᵀ⟩: of each step L l is kept, or L r for a tall matrix.

    L is symmetric, and so are all sums of such matrices.
    """

    def __init__(self, asked: AskedOutputs) -> None:
        found = asked.parameter_map.rank_one(asked.queries, asked.units, asked.d_out, asked.shape)
        self._left, self._right = found
        self._tall = asked.shape[0] > asked.shape[1]
        self._turned = self._right if self._tall else self._left  # (Q, n)
        self._backward = OneSidedBackward(asked.shape, len(self._turned))
        self.bytes_per_step = self._turned.nbytes

    def keep(self, linear: OneSidedStep) -> OneSidedStep:
        """Return a step with what L makes of the asked outputs in place of L."""
        return dataclasses.replace(linear, side=self._turned @ linear.side.to(self._turned))

    def step(self, kept: OneSidedStep) -> TurnedMultiplier:
        """Go back over one step, and return what its K_s makes of the asked outputs."""
        turned = self._backward.step(kept).matrix
        return TurnedMultiplier(self._left, turned) if self._tall else TurnedMultiplier(turned, self._right)


def polynomial(update: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Return L, the polynomial in u uᵀ with `orthogonalise(u) = L u`, for a matrix u that is not tall, in float64.

    It has the eigenvectors of u uᵀ, and each of its eigenvalues follows from the one there.

    >>> u = torch.diag(torch.tensor([3.0, 4.0], dtype=torch.float64))
    >>> turned = polynomial(u, (2.0, 0.0, 0.0), 1, 1e-7) @ u  # 2 u / ‖u‖
    >>> [round(number, 6) for number in turned.diagonal().tolist()]
    [1.2, 1.6]
    """
    a, b, c = coefficients
    norm = max(float(update.norm()), eps)
    if not math.isfinite(norm):  # training diverged, and so does everything that is made of it
        return torch.full((len(update), len(update)), torch.nan, dtype=torch.float64, device=update.device)
    squares, vectors = torch.linalg.eigh(update @ update.T / norm**2)
    found = torch.full_like(squares, 1 / norm)
    for _ in range(steps):
        factor = a + b * squares + c * squares.square()
        found, squares = found * factor, squares * factor.square()
    side: Tensor = (vectors * found) @ vectors.T
    return side


def iterated_polynomial(update: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Return the same L as `polynomial`, by products of matrices in the dtype and on the device of u.

    With A = X Xᵀ, each iteration multiplies X by F = a + b A + c A²; all of these matrices commute, so that L is the
    product of the factors and the next A is F² A.
    """
    a, b, c = coefficients
    norm = update.norm().clamp(min=eps)
    square = update @ update.T / norm.square()
    identity = torch.eye(len(update), dtype=update.dtype, device=update.device)
    side: Tensor = identity / norm
    for left in range(steps, 0, -1):
        factor = a * identity + square @ (b * identity + c * square)
        side = factor @ side
        if left > 1:
            square = factor @ square @ factor
    return side


def adjusted(lr: float, how: str, shape: Sequence[int]) -> float:
    """Return the learning rate as Muon adjusts it to a matrix's shape."""
    rows, cols = shape
    return lr * (math.sqrt(max(1, rows / cols)) if how == "original" else 0.2 * math.sqrt(max(rows, cols)))


_MUON_NUMBERS = ("lr", "weight_decay", "momentum", "eps")
_POLYNOMIAL = ("ns_a", "ns_b", "ns_c")


class MuonKind(OptimizerKind[OneSidedStep]):
    """torch.optim.Muon in every setting."""

    family = "one-sided: one matrix per step, from the left or the right; bfloat16 rounding is a third, reported term"
    needs_whole_matrix = True
    rounds = True
    options: ClassVar[Mapping[str, Any]] = {}

    def encode(self, group: Mapping[str, Any], state: State) -> dict[str, Setting]:
        """Return the settings, and the machine, since no two round alike in bfloat16."""
        return {
            **{name: float(group[name]) for name in _MUON_NUMBERS},
            **dict(zip(_POLYNOMIAL, map(float, group["ns_coefficients"]), strict=True)),
            "ns_steps": int(group["ns_steps"]),
            "nesterov": bool(group["nesterov"]),
            "adjust_lr_fn": group["adjust_lr_fn"] or "original",
            "machine": machine(group["params"][0].device),
        }

    def decode(self, row: Mapping[str, Any]) -> Settings:
        """Return the settings."""
        return {
            **{name: row[name] for name in _MUON_NUMBERS},
            "ns_coefficients": tuple(row[name] for name in _POLYNOMIAL),
            "ns_steps": int(row["ns_steps"]),
            "nesterov": bool(row["nesterov"]),
            "adjust_lr_fn": row["adjust_lr_fn"],
        }

    def read(self, taken: ReplayedStep) -> OneSidedStep:
        """Return a step, with its numbers as the step itself rounded them."""
        settings, buffer = taken.settings, taken.after["momentum_buffer"]
        momentum, lr = settings["momentum"], settings["lr"]
        rounded = near(buffer.dtype)
        update = (taken.gradient.lerp(buffer, momentum) if settings["nesterov"] else buffer).double()
        rows, cols = update.shape
        tall = rows > cols
        chosen = (settings["ns_coefficients"], settings["ns_steps"], settings["eps"])
        # Products are faster than eigenvectors where training waits for them. They too need float64: an error in a
        # small eigenvalue of u uᵀ grows by 3.4² with each iteration.
        find = polynomial if taken.precision == torch.float64 else iterated_polynomial
        side = find(update.T if tall else update, *chosen)
        beta = rounded(1 - momentum)
        rate = rounded(adjusted(lr, settings["adjust_lr_fn"], (rows, cols)))
        # Entries of u that are off by UNIT of themselves at random, multiplied by L.
        noise = rate * UNIT * float(side.norm() * update.norm()) / math.sqrt(len(side))
        return OneSidedStep(
            alpha=1 - beta,
            beta=beta,
            kappa=rounded(1 - lr * settings["weight_decay"]),
            gamma=rate,
            ahead=rounded(momentum) if settings["nesterov"] else 1.0,
            side=side.to(taken.precision),
            tall=tall,
            noise=noise,
        )

    def backward(self, shape: Sequence[int]) -> OneSidedBackward:
        """Return where the way back starts."""
        return OneSidedBackward(shape)

    def backward_of(self, asked: AskedOutputs) -> AskedSides:
        """Return where the way back starts for some outputs alone."""
        return AskedSides(asked)


register_optimizer(MuonKind(torch.optim.Muon, average="momentum_buffer"))
