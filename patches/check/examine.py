"""What `doctor` runs in a process of its own: it imports the upstream."""

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

from patches.check.contract import Use, faults
from patches.check.live import is_left_out, problem_of
from patches.check.sites import CallSite


def main() -> None:
    """Read the question as JSON from standard input and print the answer as JSON.

    ``calls`` are looked for in the package in the directory ``site``, which is release
    ``version``. ``contract`` is the module, below the directory ``home``, that lists in ``USES``
    what our code uses of it; empty if there is none.
    """
    asked = json.load(sys.stdin)
    calls = [CallSite(**each) for each in asked["calls"]]
    hooks = [
        asdict(call)
        | {"problem": problem_of(call, Path(asked["site"])), "left_out": is_left_out(call)}
        for call in calls
    ]
    uses: list[Use] = []
    if asked["contract"]:
        sys.path.append(asked["home"])
        every_use: tuple[Use, ...] = importlib.import_module(asked["contract"]).USES
        uses = [use for use in every_use if use.concerns(asked["version"])]
    answer = {"hooks": hooks, "uses": len(uses), "faults": list(faults(uses, asked["version"]))}
    # What an upstream prints while it is imported comes before this line.
    print("\n" + json.dumps(answer))


if __name__ == "__main__":
    main()
