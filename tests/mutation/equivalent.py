"""Mutations that no test can notice, each with the reason.

They are counted as survivors all the same. A reason belongs to the changed line, not to its number.
"""

from __future__ import annotations

from tests.mutation.mutants import Mutant

_COUNTED = "Both lists were compared in length before."
_NAME_OF_ENCODING = "Python takes both spellings of the encoding."

_MEMORY = "It takes more memory and gives the same numbers."
_ONE_MATCH = "With 3 bits a record fits one magnitude, and the search for the nearest finds it."

# path -> changed line -> why nothing computes otherwise
REASONS: dict[str, dict[str, str]] = {
    "bridge/client/merge.py": {
        'names = np.array([*records.engine_ids, "XXXX"])': "It stands where both have no engine.",
    },
    "bridge/transport/bridge_sharding.py": {
        'return xxh3_64_intdigest(trajectory.encode("UTF-8", "surrogatepass")) % bridges': (
            _NAME_OF_ENCODING
        ),
    },
    "bridge/fp4/nvfp4.py": {
        "rounding(torch.mul(a, 0.5, out=None), out=piece).add_(4)": _MEMORY,
        "rounding(torch.mul(a, 0.5, ), out=piece).add_(4)": _MEMORY,
        "keep = torch.where(effective_scale > 0, -1, 0).to(None)": _MEMORY,
    },
    "bridge/fp4/guided_rounding.py": {
        "x_hat /= (x - x) + 1  # 1, and NaN where x is not finite": "The factor is 1 or NaN.",
        "if bits > 3:": _ONE_MATCH,
        "if bits >= 4:": _ONE_MATCH,
        "up = steps_down >= period / 2": "A period is 2 or 4.",
    },
    "bridge/fp4/bit_planes.py": {
        "for bit in range(bits):": "Bit 0 is already there, and is added to itself by or.",
    },
    "bridge/store/checksums.py": {
        "row_bytes = row_bytes or rows.nbytes or 2": "The step of a range over no bytes.",
    },
    "megatron_trace/records/aligned_rows.py": {
        "for record, places_P in zip(records, placement.sequences, strict=None):": _COUNTED,
        "for record, places_P in zip(records, placement.sequences, strict=False):": _COUNTED,
        "for record, places_P in zip(records, placement.sequences, ):": _COUNTED,
        "accepted = accepts[record.weight_version_index.to(None)]": (
            "Our release of torch takes int32 indices too; older ones need int64."
        ),
    },
    "megatron_trace/records/token_placement.py": {
        "for start, length in zip(starts[:-1], lengths, strict=None)": _COUNTED,
        "for start, length in zip(starts[:-1], lengths, strict=False)": _COUNTED,
        "for start, length in zip(starts[:-1], lengths, )": _COUNTED,
    },
}


def reason(path: str, mutant: Mutant) -> str:
    """Return why a mutation changes nothing, or an empty text if nobody has said so."""
    return REASONS.get(path, {}).get(mutant.after, "")
