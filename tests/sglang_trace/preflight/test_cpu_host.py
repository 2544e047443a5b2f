import sys

import pytest
import torch

from sglang_trace.preflight import cpu_host

pytestmark = pytest.mark.skipif(
    not cpu_host.is_cpu_host(), reason="this machine has an accelerator"
)


def test_preparing_twice_is_harmless() -> None:
    cpu_host.prepare()
    before = sys.modules[cpu_host.KERNEL_PACKAGE]
    cpu_host.prepare()
    assert sys.modules[cpu_host.KERNEL_PACKAGE] is before


def test_a_missing_kernel_says_so_when_it_is_called() -> None:
    cpu_host.prepare()
    if not cpu_host.has_kernel_stand_in():
        pytest.skip("a real sgl_kernel is installed")
    import sgl_kernel

    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.fused_experts_cpu is a compiled"):
        sgl_kernel.fused_experts_cpu(torch.ones(1))


def test_torchvision_can_be_imported_beside_a_cpu_build_of_torch() -> None:
    cpu_host.prepare()
    import torchvision

    assert torchvision.__version__


def test_slots_are_written_at_each_requests_next_positions() -> None:
    table = torch.zeros(3, 6, dtype=torch.int32)
    cpu_host.assign_req_to_token_pool(
        torch.tensor([2, 0]),
        table,
        torch.tensor([1, 4]),
        torch.tensor([4, 5]),
        torch.tensor([11, 12, 13, 21]),
        6,
    )
    assert table.tolist() == [[0, 0, 0, 0, 21, 0], [0] * 6, [0, 11, 12, 13, 0, 0]]
