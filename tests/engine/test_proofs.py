"""Marks of parameters tell one bit apart, and say how far apart two parameters are."""

import pytest
import torch
from torch import Tensor

from dualform.engine import proofs
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


def test_parameters_that_are_marked_together_get_the_marks_of_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (5, 7), "b": (7,), "c": (5, 7), "d": (7,), "e": (5, 7), "f": (0, 3), "g": (2, 3, 4)}
    parameters = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    # The CPU stands for a GPU: its checksums are sums there, and parameters of one shape are marked by one kernel.
    monkeypatch.setattr(proofs, "checksum", lambda matrix: proofs.sum_checksums(matrix[None])[0])
    alone = ParameterMarker().measure(parameters)
    found: dict[str, Tensor] = {}
    marker = ParameterMarker()
    for some in (["a", "c", "e"], ["b", "d"]):
        found |= marker._measured({name: parameters[name] for name in some})
    for name, mark in found.items():
        assert unpack_mark(mark).checksum == unpack_mark(alone[name]).checksum
        torch.testing.assert_close(mark[1:], alone[name][1:], rtol=1e-5, atol=1e-5)
    parameters["c"][2, 3] = torch.nextafter(parameters["c"][2, 3], torch.tensor(9.0))
    again = marker._measured({name: parameters[name] for name in ("a", "c", "e")})
    assert [unpack_mark(again[n]).checksum == unpack_mark(found[n]).checksum for n in "ace"] == [True, False, True]
