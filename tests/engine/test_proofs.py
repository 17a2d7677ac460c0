"""Marks of parameters tell one bit apart, and say how far apart two parameters are."""

import pytest
import torch
from torch import Tensor

from dualform.engine.proofs import ParameterMark, ParameterMarker, unpack_mark


def mark(tensor: Tensor) -> ParameterMark:
    return unpack_mark(ParameterMarker().measure({"w": tensor})["w"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6, 5), (7,), (2, 3, 4), ()])
def test_one_bit_of_one_element_is_told_apart(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(shape).to(dtype)
    other = tensor.clone()
    flat = other.view(-1) if shape else other.reshape(1)
    flat[-1] = torch.nextafter(flat[-1].float(), torch.tensor(torch.inf)).to(dtype) if dtype != torch.bfloat16 else 9.0
    if not shape:
        other = flat.reshape(())
    assert mark(tensor) == mark(tensor.clone())
    assert mark(tensor).checksum != mark(other).checksum


def test_the_distance_is_about_the_true_one() -> None:
    torch.manual_seed(0)
    tensor, more = torch.randn(40, 30), 1e-3 * torch.randn(40, 30)
    distance, true = mark(tensor).distance(mark(tensor + more)), float(more.norm())
    assert true / 5 < distance < 5 * true


def test_marking_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    mark(torch.ones(3, 3))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_parameter_without_elements_has_a_mark() -> None:
    assert mark(torch.empty(0, 3)).projections == (0.0,) * 4
