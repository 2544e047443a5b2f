"""The trainer's process: `python -m megatron_trace.launch trainer.py {step,check,compare}`.

step     fetches a rollout's records, makes one guided GRPO step and saves the new weights
check    recomputes a rollout's log-probabilities under guidance, with the weights it was made with
compare  recomputes them under every way to round
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

import megatron.core
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bridge.client.client import TraceClient
from examples.demo import rollout
from examples.demo.compare import compare
from examples.demo.policy import load_policy
from examples.demo.step import check, step


def arguments() -> argparse.Namespace:
    """What the demo passes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=["step", "check", "compare"])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rollout", type=Path, required=True)
    parser.add_argument("--bf16-rollout", type=Path)
    parser.add_argument("--bridge", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--result", type=Path, required=True)
    return parser.parse_args()


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The mode's result."""
    samples = rollout.load(args.rollout)
    model = load_policy(args.model, args.seed)
    with TraceClient(args.bridge) as client:
        if args.mode == "step":
            return step(model, samples, client, args.model, args.save)
        if args.mode == "check":
            return check(model, samples, client)
        return compare(model, samples, rollout.load(args.bf16_rollout), client)


def versions() -> dict[str, str]:
    """What this process imported."""
    return {
        "python": platform.python_version(),
        # A build from sources adds "+" and the commit of whatever checkout it was made in.
        "megatron-core": megatron.core.__version__.partition("+")[0],
        "torch": str(torch.__version__),
    }


def main() -> None:
    """Writes the mode's result, and the versions it was made with, as JSON."""
    args = arguments()
    torch.manual_seed(args.seed)
    result = {**run(args), "versions": versions()}
    args.result.write_text(json.dumps(result, indent=1))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
