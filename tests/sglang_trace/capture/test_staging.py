import pytest
import torch

from bridge.fp4.bit_planes import pack_planes
from bridge.fp4.nvfp4 import quantize_nvfp4, token_scale
from bridge.layout import ModelShape, Part, RecordLayout, Site
from sglang_trace.capture.staging import Staging, StagingTooSmall

SHAPE = ModelShape(3, 32, 16, 300, 2, 2, 32, (0, 1, 2), (0, 1, 2))
LAYOUT = RecordLayout(SHAPE, (1, 2), (Site.FC1, Site.FC2, Site.ROUTES), bits=2)


@pytest.fixture
def staging() -> Staging:
    return Staging(LAYOUT, max_rows=8, device="cpu")


def quantized(*shape: int):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    return quantize_nvfp4(x, token_scale(x))


def test_each_site_lands_in_its_columns_of_the_first_rows(staging: Staging) -> None:
    fc1, fc2 = quantized(5, 32), quantized(5, 2, 16)
    routes = torch.tensor([[299, 0], [7, 256], [1, 2], [3, 4], [5, 6]])
    recorder = staging.recorder(2)
    recorder.fc1(fc1)
    recorder.fc2(fc2)
    recorder.routes(routes)
    rows = staging.head(5)
    for site, values in ((Site.FC1, fc1), (Site.FC2, fc2)):
        record = LAYOUT.site(rows, site, 2)
        assert torch.equal(record.planes_u8, pack_planes(values.codes_u8, 2))
        assert torch.equal(record.scales_u8, values.scales_u8)
        assert torch.equal(record.token_scale, values.global_scale)
    assert torch.equal(LAYOUT.routes(rows)[:, 2], routes)
    assert not staging.rows_MB[5:].any()


def test_a_layer_that_is_not_captured_still_records_its_routes(staging: Staging) -> None:
    recorder = staging.recorder(0)
    recorder.fc1(quantized(4, 32))
    recorder.routes(torch.full((4, 2), 255))
    columns = LAYOUT.columns(Site.ROUTES, 0)
    assert staging.rows_MB[:4, columns].any()
    staging.rows_MB[:4, columns] = 0
    assert not staging.rows_MB.any()


def test_staging_rows_keep_their_address(staging: Staging) -> None:
    before = staging.rows_MB.data_ptr()
    staging.recorder(1).fc1(quantized(8, 32))
    assert staging.head(8).data_ptr() == staging.rows_MB.data_ptr() == before
    assert LAYOUT.row_bytes(Part.FORWARD) == staging.rows_MB.shape[1]


def test_more_tokens_than_were_announced_are_refused(staging: Staging) -> None:
    with pytest.raises(StagingTooSmall, match="--chunked-prefill-size"):
        staging.recorder(1).fc1(quantized(9, 32))
