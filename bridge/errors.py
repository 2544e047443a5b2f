"""The errors that more than one room raises or catches.

Every message is one sentence that names the fix; command lines print it as `error: <sentence>`
to stderr and exit with status 1.
"""


class TraceError(Exception):
    """Base of every error of this project; `str(error)` is one sentence that names the fix."""


class SchemaMismatch(TraceError):
    """The two sides do not speak the same schema: version, message type or record layout."""


class CorruptMessage(TraceError):
    """A message is truncated, oversized or fails its checksum."""


class ShmUnreachable(TraceError):
    """The daemon cannot read a peer's shared memory: the rows must be sent through the socket."""


class LayoutError(TraceError):
    """A model or a choice of layers, sites and bits cannot be recorded."""


class UnknownEngine(TraceError):
    """An engine sent records without a hello that this daemon remembers."""


class TokenMismatch(TraceError):
    """The bridge's trajectory has other tokens than the trainer's: its records must not guide."""


class UnknownTrajectory(TraceError):
    """No record exists under the trajectory name that was asked for."""


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
    """A client asks on and on without reading the answers."""


class StoreFailing(StoreFull):
    """The store cannot be written to; what it holds is read, and a later try may succeed."""


class BridgeUnreachable(TraceError):
    """No bridge daemon answers at the endpoint."""


class NonFiniteActivation(TraceError):
    """An activation is NaN or infinite, so it has no FP4 code."""
