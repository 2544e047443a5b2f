"""The index: row locations and the rows of each trajectory, rebuilt by replaying the journal."""

from bridge.index.catalog import Catalog, IngestedRecord
from bridge.index.engine import Engine
from bridge.index.tables.row_map import LOCATION, RowMap
from bridge.index.tables.trajectory_map import TrajectoryMap

__all__ = ["LOCATION", "Catalog", "Engine", "IngestedRecord", "RowMap", "TrajectoryMap"]
