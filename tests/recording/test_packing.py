"""Tensors that travel as one: what is packed comes out again."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dualform.recording.packing import NumbersUnderWay, pack, unpack

DTYPES = [torch.float64, torch.float32, torch.float16, torch.int64, torch.uint8]


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), min_size=1, max_size=8))
def test_what_is_packed_comes_out_again(shapes: list[tuple[torch.dtype, list[int]]]) -> None:
    tensors = [torch.randn(shape).mul(50).abs().to(dtype) for dtype, shape in shapes]
    tensors[0] = tensors[0].T if tensors[0].dim() == 2 else tensors[0]
    for one, other in zip(unpack(pack(tensors), tensors), tensors, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_several_tensors_of_a_part_come_as_one() -> None:
    one, two, three = torch.arange(3.0), torch.ones(2, 2), torch.tensor(7.0, dtype=torch.float64)
    joined, alone, nothing, last = NumbersUnderWay([[one, two], three, [], two]).read()
    assert joined.tolist() == [0, 1, 2, 1, 1, 1, 1]
    assert torch.equal(alone, three)
    assert not len(nothing)
    assert torch.equal(last, two)
