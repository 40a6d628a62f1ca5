"""What a node's relay is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raytrace_rl._env_otlp import Settings
    from raytrace_rl.relay.home import Home


@dataclass(frozen=True)
class Work:
    """The work of one relay.

    Attributes:
        node_dir: ``RUN_DIR/spool/<node>`` of its node.
        run_id: The run.
        settings: Where it sends what; None where nothing is sent.
        home: Where it brings the spools; None where the node shares the run directory.
        idle_s: Seconds without a live writer and with nothing unsent after which it ends by itself.
        bound_bytes: What the node's spools may take together; None where there is no bound.
        home_bytes: What they may take at home; None where home decides by the room it has.
        receives: It listens for OTLP on the node.
    """

    node_dir: str
    run_id: str
    settings: Settings | None = None
    home: Home | None = None
    idle_s: float = 30.0
    bound_bytes: int | None = None
    home_bytes: int | None = None
    receives: bool = False
