import argparse

import pytest

from bridge.layout import ModelShape, Site
from bridge.producer.producer import Overflow
from sglang_trace.config import ENVIRONMENT, TraceConfig, add_arguments, parse_sites

SHAPE = ModelShape(5, 64, 32, 8, 2, 2, 32, (0, 1, 2, 3, 4), (0, 1, 2, 3, 4))


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def test_the_defaults_are_those_of_the_paper() -> None:
    options = parsed("--trace-capture")
    layout = TraceConfig("tcp://x", options.trace_sites, options.trace_layers).layout(SHAPE)
    assert layout.layers == (2, 3, 4)
    assert layout.bits == options.trace_bits == 1
    assert layout.scale_bits == options.trace_scale_bits == 8
    assert set(layout.sites) == {Site.FC1, Site.K, Site.V, Site.ROUTES}


def test_scales_are_kept_whole_or_by_two_bits(capsys: pytest.CaptureFixture[str]) -> None:
    options = parsed("--trace-capture", "--trace-scale-bits", "2")
    config = TraceConfig("tcp://x", scale_bits=options.trace_scale_bits)
    assert config.layout(SHAPE).scale_bits == 2
    with pytest.raises(SystemExit):
        parsed("--trace-capture", "--trace-scale-bits", "4")
    assert "choose from 8, 2" in capsys.readouterr().err


def test_sites_are_read_in_any_order_and_stored_in_one() -> None:
    assert parse_sites("routes, fc2,fc1") == (Site.FC1, Site.FC2, Site.ROUTES)


@pytest.mark.parametrize("text", ["", "fc3", "fc1,q"])
def test_an_unknown_site_is_refused_with_the_choices(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="choose from fc1, fc2, k, v, routes"):
        parse_sites(text)


def test_the_configuration_survives_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TraceConfig(
        "tcp://127.0.0.1:1",
        (Site.K, Site.V),
        "0,2",
        bits=3,
        scale_bits=2,
        on_overflow=Overflow.DROP,
        failure_file="/nowhere/failure",
        bridge_keys="k.keys",
    )
    monkeypatch.setenv(ENVIRONMENT, config.to_environment()[ENVIRONMENT])
    assert TraceConfig.from_environment() == config


def test_every_configuration_names_a_run_of_its_own() -> None:
    first, second = TraceConfig("tcp://127.0.0.1:1"), TraceConfig("tcp://127.0.0.1:1")
    assert first.run
    assert first.run != second.run


def test_without_the_variable_nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert TraceConfig.from_environment() is None


def test_the_first_failure_is_the_one_that_is_told(tmp_path) -> None:
    config = TraceConfig("tcp://x", failure_file=str(tmp_path / "failure"))
    config.report_failure("the cause")
    config.report_failure("what followed from it")
    assert (tmp_path / "failure").read_text() == "the cause"
