"""8 bits a value: reading and storing again changes nothing, and no second moment is lost."""

import pytest
import torch
from torch import Tensor

from leyden.services.trainer.model import memory_8bit
from leyden.services.trainer.model.memory_8bit import BLOCK, code_values, dequantize, quantize

HUGE = 3e38


def values(shape: tuple[int, ...], scale: float, dtype: torch.dtype, *, signed: bool) -> Tensor:
    """Values of many decades; a row of zeros, and one with a huge value."""
    random = torch.Generator().manual_seed(0)
    found = scale * torch.randn(shape, generator=random, dtype=dtype)
    found = (found * torch.randn(shape, generator=random, dtype=dtype).mul(4).exp()).clamp(-HUGE, HUGE)
    found[1] = 0.0
    found[2].view(-1)[5] = HUGE
    return found if signed else found.abs()


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 1e-8, 1e-20, 1e-38, 1e-44, 1e37])
@pytest.mark.parametrize("shape", [(64, 64), (5, 1000), (7, 3, 200)])
def test_what_was_stored_is_stored_as_the_same_codes_again(
    shape: tuple[int, ...], scale: float, dtype: torch.dtype, signed: bool
) -> None:
    original = values(shape, scale, dtype, signed=signed)
    codes, scales = quantize(original, signed=signed)
    stored = dequantize(codes, scales, dtype, signed=signed)
    again_codes, again_scales = quantize(stored, signed=signed)
    assert torch.equal(codes, again_codes)
    assert torch.equal(scales, again_scales)
    assert (codes.dtype, codes.shape) == (torch.uint8, original.shape)
    assert scales.shape == (shape[0], -(-original[0].numel() // BLOCK))
    if not signed:
        assert torch.equal(stored == 0, original == 0)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 5, 7])
def test_a_tensor_that_is_converted_in_parts_has_the_same_codes(
    rows: int, signed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = values((7, 3, 200), 1.0, torch.float32, signed=signed)[:rows]
    codes, scales = quantize(original, signed=signed)
    stored = dequantize(codes, scales, torch.float32, signed=signed)
    monkeypatch.setattr(memory_8bit, "PART_VALUES", 1300)
    assert all(map(torch.equal, quantize(original, signed=signed), (codes, scales)))
    assert torch.equal(dequantize(codes, scales, torch.float32, signed=signed), stored)


@pytest.mark.parametrize(("signed", "most"), [(True, 0.0107), (False, 0.0036)])
def test_a_value_is_within_half_a_gap_of_codes(signed: bool, most: float) -> None:
    original = torch.linspace(-1 if signed else 0, 1, 4096).reshape(4, 1024)
    restored = dequantize(*quantize(original, signed=signed), torch.float32, signed=signed)
    scales = original.unflatten(1, (-1, BLOCK)).abs().amax(2).repeat_interleave(BLOCK, dim=1)
    assert float(((restored - original).abs() / scales).max()) <= most


def test_codes_are_those_of_bitsandbytes_but_for_the_largest_with_a_sign() -> None:
    # Copied from bitsandbytes 0.50.2, `create_dynamic_map`: its largest signed codes are 0.97890627, 0.99296874, 1.0.
    signed, unsigned = code_values(True), code_values(False)
    assert (len(signed), len(unsigned)) == (255, 256)
    assert torch.equal(signed, -signed.flip(0))
    assert torch.allclose(signed[-4:], torch.tensor([0.95078123, 0.96484375, 0.97890627, 1.0]))
    assert torch.allclose(signed[127:131], torch.tensor([0.0, 5.5e-7, 3.25e-6, 7.75e-6]))
    assert torch.allclose(unsigned[-4:], torch.tensor([0.98242188, 0.98945308, 0.9964844, 1.0]))
    assert torch.allclose(unsigned[:4], torch.tensor([0.0, 3.25e-7, 7.75e-7, 2.125e-6]))
