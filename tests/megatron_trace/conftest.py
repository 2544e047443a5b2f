"""One gloo rank with Megatron-core on the CPU, for all tests of this directory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

# Test modules and jobs share helper modules that lie beside them.
sys.path.insert(0, str(Path(__file__).parent))

from reference_rollout import HF_CONFIG, Weights, random_weights

from megatron_trace import TraceTrainerConfig
from megatron_trace.preflight import cpu_host

Build = Callable[..., Any]


@pytest.fixture(scope="package")
def one_rank() -> Iterator[None]:
    """A process group of one rank; what `cpu.prepare` replaces in torch is put back afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        for name in cpu_host.CUDA_STAND_INS:
            patch.setattr(torch.cuda, name, getattr(torch.cuda, name))
        cpu_host.prepare()
        from megatron.core import parallel_state, tensor_parallel

        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        yield
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="package")
def weights() -> Weights:
    return random_weights()


@pytest.fixture(scope="package")
def build(one_rank: None, weights: Weights) -> Build:
    """Build the tiny model with its weights; arguments are `TransformerConfig` fields."""
    from megatron_trace.hf import build_model, load_hf, transformer_config

    def make(**overrides: Any) -> Any:
        model = build_model(HF_CONFIG, transformer_config(HF_CONFIG, **overrides))
        load_hf(model, weights)
        return model

    return make


@pytest.fixture(scope="package")
def build_fp4(build: Build) -> Build:
    """Build the tiny model and compute it in FP4, with the rollout's float32 weights."""

    def make(**overrides: Any) -> Any:
        from megatron_trace import enable_fp4

        model = build(**overrides)
        enable_fp4(model, TraceTrainerConfig(weight_dtype=torch.float32))
        return model

    return make
