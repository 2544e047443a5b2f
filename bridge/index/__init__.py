"""Where every row is and which rows a trajectory consists of; rebuilt by replaying the journal."""

from bridge.index.catalog import Catalog, Told
from bridge.index.engine import Engine
from bridge.index.tables.row_map import PLACE, RowMap
from bridge.index.tables.trajectory_map import TrajectoryMap

__all__ = ["PLACE", "Catalog", "Engine", "RowMap", "Told", "TrajectoryMap"]
