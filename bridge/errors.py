"""The errors that more than one folder raises or catches.

Every error message says what is wrong and names the fix. Command lines print it as
`error: <message>` to stderr and exit with status 1.
"""


class TraceError(Exception):
    """Base of every error of this project; `str(error)` names the fix."""


class SchemaMismatch(TraceError):
    """The two sides do not speak the same schema: version, message type or record layout."""


class CorruptMessage(TraceError):
    """A message is truncated, oversized or fails its checksum."""


class ShmUnreachable(TraceError):
    """The daemon cannot read a peer's shared memory: the rows must be sent through the socket."""


class LayoutError(TraceError):
    """A model or a choice of layers, sites and bits cannot be recorded."""


class UnknownEngine(TraceError):
    """An engine sent records, but this daemon does not know its registration."""


class TokenMismatch(TraceError):
    """The bridge's trajectory has other tokens than the trainer's, so its records do not apply."""


class UnknownTrajectory(TraceError):
    """No record exists under the requested trajectory name."""


class WeightVersionMismatch(TraceError):
    """The records were made with other weights than the trainer holds."""


class MixedWeights(TraceError):
    """One label of a trajectory's weights stands for two different weights."""


class EngineIdTaken(TraceError):
    """Another process sends, or has sent, records under the engine id."""


class RowTaken(TraceError):
    """An engine sent other bytes for a row that is held."""


class StoreFull(TraceError):
    """The store has reached its limit; nothing already acknowledged is lost."""


class TooManyRequests(TraceError):
    """A client sends more requests without reading the replies."""


class StoreFailing(StoreFull):
    """The store cannot be written to; reads continue, and a later write may succeed."""


class BridgeUnreachable(TraceError):
    """No bridge daemon answers at the endpoint."""


class NonFiniteActivation(TraceError):
    """An activation is NaN or infinite, so it has no FP4 code."""
