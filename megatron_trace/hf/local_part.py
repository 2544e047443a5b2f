"""Which part of the whole model a rank holds."""

from __future__ import annotations

from dataclasses import replace

from megatron.core.models.gpt.gpt_model import GPTModel
from torch.distributed import ProcessGroup

from megatron_trace.hf.mapping import Source, source_of


class LocalPart:
    """The layers, experts and groups of this rank's part of a Megatron model."""

    def __init__(self, model: GPTModel) -> None:
        layers = model.decoder.layers
        self._first_layer = layers[0].layer_number - 1 if len(layers) else 0
        self._first_expert = layers[0].mlp.local_expert_indices[0] if len(layers) else 0
        self.num_local_experts = layers[0].mlp.num_local_experts if len(layers) else 0
        self._groups = model.pg_collection
        self._tied = model.share_embeddings_and_output_weights

    def source(self, parameter: str) -> Source:
        """Return where a parameter's values come from."""
        source = source_of(parameter, self._first_layer, self._first_expert)
        if self._tied and parameter == "output_layer.weight":
            # The last pipeline stage holds its own copy of the tied embedding.
            return replace(source, names=("model.embed_tokens.weight",))
        return source

    def tensor_group(self, source: Source) -> ProcessGroup:
        """Return the ranks that share the matrix."""
        groups = self._groups
        group: ProcessGroup = groups.tp if source.expert is None else groups.expt_tp
        return group

    @property
    def expert_group(self) -> ProcessGroup:
        """The ranks that hold the other experts."""
        group: ProcessGroup = self._groups.ep
        return group
