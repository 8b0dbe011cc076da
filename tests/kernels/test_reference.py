"""What the reference does only where its tensors lie on no CPU, as far as a CPU can show it."""

import pytest
import torch

from marlhf_kernels.reference._layout import scalar


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_coefficient_from_the_cpu_arrives_on_the_device(dtype):
    """With its value, in the dtype asked for, 0-d, and on that device (`cpu:0` is another device than `cpu`)."""
    number = torch.tensor(2.5, dtype=torch.float64)
    moved = scalar(number, dtype, torch.device("cpu", 0))
    assert (moved.item(), moved.dtype, moved.shape) == (2.5, dtype, torch.Size())
    assert scalar(number, dtype, torch.device("meta")).device.type == "meta"
