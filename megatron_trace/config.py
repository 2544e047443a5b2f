"""What FP4 covers in the trainer."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TraceTrainerConfig:
    """Which parts of the model are computed as the FP4 rollout computes them.

    experts        round the experts' weights and the inputs of fc1 and fc2, and weigh the experts'
                   outputs after fc2
    kv_cache       round K and V before attention
    weight_dtype   the dtype in which the rollout receives the weights before it quantizes them
    """

    experts: bool = True
    kv_cache: bool = True
    weight_dtype: torch.dtype = torch.bfloat16
