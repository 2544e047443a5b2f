"""Where a forward enters the model: its tokens and form are compared with the micro-batch's.

Forward pre-hooks of torch, which `enable_fp4` puts on the model, its embedding and its layers.

Shape legend: S sequence (this rank's part of it), B batch, H hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import nn

from bridge.layout import Site
from megatron_trace.context import current_scope, never_compiled
from megatron_trace.parallel import TensorParallel
from megatron_trace.records.input_check import FormMismatch

_WATCHES = "trace_watches"


@dataclass(frozen=True)
class LayerEntry:
    """A transformer layer, as marked by `enable_fp4`.

    tokens     the ranks that share the tokens of its input
    marked     sites that ask for records; `possible` are those that it could ask for
    """

    tokens: TensorParallel
    marked: frozenset[Site]
    possible: frozenset[Site]

    def enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the form of what the layer is given."""
        scope = current_scope()
        if scope.micro_batch is None or not scope.counting:
            return  # a recomputation gets what its forward got
        hidden_SBH = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        parts = self.tokens.size if self.tokens.splits_tokens else 1
        scope.micro_batch.check.check_form(hidden_SBH, kwargs.get("packed_seq_params"), parts)
        scope.micro_batch.coverage.layer(self.marked, self.possible)


def watch(module: nn.Module, entry: Callable[..., None]) -> None:
    """Call `entry(module, args, kwargs)` before every forward of a module."""
    handle = module.register_forward_pre_hook(never_compiled(entry), with_kwargs=True)
    module.__dict__.setdefault(_WATCHES, []).append(handle)


def unwatch(module: nn.Module) -> None:
    """Take back what `watch` put on a module."""
    for handle in module.__dict__.pop(_WATCHES, ()):
        handle.remove()


def watch_inputs(chunk: nn.Module) -> None:
    """Compare the tokens that a model, or a stage of one, is given."""
    for module in chunk.modules():
        if isinstance(module, LanguageModelEmbedding):
            watch(module, _enter_embedding)
        elif isinstance(module, GPTModel):
            watch(module, _model_entry(type(module)))


def watched(chunk: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that `watch` was called for."""
    return (module for module in chunk.modules() if _WATCHES in module.__dict__)


def _enter_embedding(embedding: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    micro_batch = current_scope().micro_batch
    if micro_batch is not None:
        micro_batch.check.check_tokens(kwargs["input_ids"] if "input_ids" in kwargs else args[0])


def _model_entry(kind: type[nn.Module]) -> Callable[..., None]:
    signature = inspect.signature(kind.forward)

    def enter(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        micro_batch = current_scope().micro_batch
        if micro_batch is None:
            return
        micro_batch.coverage.model()
        given = signature.bind_partial(model, *args, **kwargs).arguments
        if not model.pre_process:
            # Most trainers pass the tokens to every stage; what a stage gets can be compared.
            if given.get("input_ids") is not None:
                micro_batch.check.check_tokens(given["input_ids"])
        elif given.get("decoder_input") is not None:
            raise FormMismatch(
                "The model is given embeddings (decoder_input), whose tokens cannot be compared "
                "with the records: pass input_ids, or run without guide()."
            )

    return enter
