"""Worker processes: spawn, handshake, run a plan, death, restart."""

from homeserve.fleet.fleet import Fleet
from homeserve.fleet.spec import ActSizes, FleetListener, FleetSpec, Loss, RankStatus

__all__ = ["ActSizes", "Fleet", "FleetListener", "FleetSpec", "Loss", "RankStatus"]
