"""Sees to it that a process's node has a relay: asks Ray for one, or runs it in a thread where there is no Ray.

Called by the heartbeat and, at the ends of a run, by `setup`. The node's lock tells whether there is a relay; looking
costs one system call or two, and everything else happens in a thread of its own. What only asking needs is imported
there: each worker imports this module before its first span.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from raytrace_rl import _state
from raytrace_rl._deadline import run_until
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl.relay.lock import NodeLock

if TYPE_CHECKING:
    from raytrace_rl._env_otlp import Settings
    from raytrace_rl.relay.home import Home
    from raytrace_rl.relay.published import Published
    from raytrace_rl.relay.work import Work

#: Seconds between two looks whether the node has a relay.
_LOOK_S: Final = 5.0
#: The same where nobody has anything to send or to bring, as far as is known.
_LONGEST_LOOK_S: Final = 60.0
#: Seconds that a process without Ray waits for a ``ray.init`` before it runs the relay itself.
_GRACE_S: Final = 3.0
#: Seconds that a driver waits, its cluster gone, for the relay to go too: ``ray.shutdown()`` kills it a little later.
_GONE_S: Final = 2.0
#: Share of a deadline within which relays in other processes answer; the rest is for sending what they have not.
_THEIRS: Final = 0.6


class Asker:
    """What one process does about its node's relay.

    Args:
        node_dir: ``RUN_DIR/spool/<node>``.
        run_id: The run.
        idle_s: Seconds after which a relay without work ends.
        bound_bytes: What the node's spools may take together.
        home_bytes: What they may take at home, where that has been said; else home decides by the room it has.
        sends: Whether spans are sent at all (``exporter="otlp"``). Without that there is a relay only where the node
            does not share the driver's run directory, to bring its spools there, or where somebody is to listen.
        receives: The relay listens for OTLP on the node.
        of_worker: One of Ray's workers has started this process, which is no part of the cluster itself.
    """

    def __init__(
        self,
        node_dir: str | os.PathLike[str],
        run_id: str,
        *,
        idle_s: float,
        bound_bytes: int,
        home_bytes: int | None = None,
        sends: bool,
        receives: bool = False,
        of_worker: bool = False,
    ) -> None:
        self._node_dir = Path(node_dir)
        self._run_dir = self._node_dir.parent.parent
        self._run_id = run_id
        self._idle_s = idle_s
        self._bound_bytes = bound_bytes
        self._home_bytes = home_bytes
        self._receives = receives
        self._of_worker = of_worker
        self._lock = NodeLock(node_dir)
        self._settings = _settings() if sends else None
        self._relay: Any = None
        self._thread: threading.Thread | None = None
        self._born = monotonic()
        self._look_at = self._born
        self._look_s = _LOOK_S
        #: What the driver has left for the run; None as long as that is not known.
        self._published: Published | None = None
        self._attached = False
        self._over = False
        self._done = False

    # -- while the run goes on ------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Looks now and then whether the node has a relay, and asks for one if not. Never blocks."""
        now = monotonic()
        if now < self._look_at or self._over or (self._thread is not None and self._thread.is_alive()):
            return
        self._look_at = now + self._look_s
        with_ray = _cluster() is not None
        if not with_ray and self._of_worker:
            return  # it has not been told what the node's relay is told: headers do not travel by environment
        if not with_ray and self._settings is None and not self._receives:
            return
        if not with_ray and now - self._born < _GRACE_S:
            self._look_at = self._born + _GRACE_S
            return
        if self._relay is not None and self._relay.stopped:
            self._relay = None
        if self._lock.is_held() and not (with_ray and self._relay is not None):
            return
        self._start_thread(self._ask)

    def attach(self) -> None:
        """On the driver, after ``ray.init``: leaves the settings for other nodes, and asks at once. Does not wait."""
        self._start_thread(self._attach)

    def _start_thread(self, run: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=self._guarded, args=(run,), name="raytrace_rl-relay-ask", daemon=True)
        self._thread.start()

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except ImportError as error:
            self._look_at = monotonic() + 60
            self._note(f"{error}: pip install 'raytrace-rl[otlp]' where workers run")
            _state.warn_once(
                "relay-grpc",
                "Nothing is sent from here (%s): pip install 'raytrace-rl[otlp]' where workers run. Everything is "
                "kept in the spool; 'raytrace-rl push' sends it.",
                error,
            )
        except Exception as error:
            if is_interrupt(error):
                raise
            self._note(repr(error))
            _state.warn_once("relay-ask", "The node's relay could not be asked for: %r", error)

    def _note(self, failure: str) -> None:
        """Leaves for a report why the node has no relay, if it has none."""
        from raytrace_rl.relay import refusal

        if not self._lock.is_held():
            refusal.note(self._node_dir, failure)

    def _attach(self) -> None:
        if _cluster() is None:
            return
        from raytrace_rl.relay import published

        published.publish(self._run_id, self._settings, self._node_dir)
        self._attached = True
        self._ask()

    def _ask(self) -> None:
        if _cluster() is not None:
            self._ask_ray()
        elif self._relay is None and (self._settings is not None or self._receives):
            relay = self._new_relay(receives=self._receives)
            if not self._over and relay.acquire():
                self._relay = relay
                relay.start()

    def _ask_ray(self) -> None:
        from raytrace_rl.relay import published

        if self._published is None:
            self._published = published.published(self._run_id)
        found = self._published
        shared = found is None or found.is_shared(self._run_dir)
        if self._settings is None and shared and not self._receives:
            # Nothing to send, nothing to bring; a driver that attaches late is found a little later.
            self._look_s = math.inf if found is not None else min(self._look_s * 2, _LONGEST_LOOK_S)
            self._look_at = monotonic() + self._look_s
            return
        from raytrace_rl.relay import actor, home_actor

        settings = self._settings
        if settings is not None and found is not None and found.settings is not None:
            settings = found.settings  # with the headers, which only the driver has
        if settings is not None:
            _need_grpc(settings)
        home = None
        if found is not None and not shared:
            home = home_actor.RemoteHome(self._run_id, found.run_dir, found.node_id, self._idle_s)
        if self._relay is not None:  # Ray has come after a thread was begun
            self._relay.stop()
            self._relay = None
        actor.ask(self._work(settings, home, receives=self._receives))

    def _work(self, settings: Settings | None, home: Home | None, *, receives: bool) -> Work:
        from raytrace_rl.relay.work import Work

        return Work(
            str(self._node_dir),
            self._run_id,
            settings,
            home,
            self._idle_s,
            self._bound_bytes,
            self._home_bytes,
            receives=receives,
        )

    def _new_relay(self, *, receives: bool = False) -> Any:
        from raytrace_rl.relay.relay import relay_for

        return relay_for(self._work(self._settings, None, receives=receives))

    # -- at the end -----------------------------------------------------------------------------------------------

    def finish(self, deadline: float, *, driver: bool) -> None:
        """Sends what is left, when this process's spool is closed.

        On the driver that is what the relays of all nodes have, and what this node has if its relay is gone. A worker
        of a cluster leaves it to them: its spool stays whatever becomes of it.

        Args:
            deadline: `time.monotonic` moment to be done by.
            driver: This process is the run's driver.
        """
        self._over = True
        cluster = _cluster()
        if ((cluster is not None or self._of_worker) and not driver) or (
            self._settings is None and not self._attached and self._relay is None
        ):
            return
        self._done = False
        work = partial(self._guarded, partial(self._finish, deadline, driver))
        run_until(deadline, work, "raytrace_rl-relay-finish")
        if self._done:
            return
        if self._settings is not None:
            _state.logger.warning(
                "Not everything was sent by the end of this process; 'raytrace-rl push %s' sends the rest.",
                self._run_dir,
            )
        else:
            _state.logger.warning("Not everything that other nodes have was brought to %s in time.", self._run_dir)

    def _finish(self, deadline: float, driver: bool) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, deadline - monotonic()))
        done = True
        if self._relay is not None:
            done = self._relay.drain(deadline - monotonic())
            self._relay.stop()
        else:
            if driver and _cluster() is not None:
                done = self._drain_relays((deadline - monotonic()) * _THEIRS)
            left_cluster = driver and self._attached and _cluster() is None
            if self._settings is None:
                pass
            elif left_cluster or not self._lock.is_held():
                relay = self._new_relay()
                if relay.acquire(min(_GONE_S, deadline - monotonic()) if left_cluster else 0.0):
                    done = relay.finish(deadline, gives_up=True) and done
                    relay.stop()
        self._done = done

    def _drain_relays(self, timeout_s: float) -> bool:
        from raytrace_rl.relay import actor, published

        done = actor.drain(actor.relays(self._run_id), timeout_s)
        if self._attached and done:
            published.withdraw(self._run_id)
        return done

    def forget(self) -> None:
        """In a forked child: the parent's relay is the parent's."""
        self._relay = None
        self._thread = None
        self._over = True


def _cluster() -> Any:
    """Returns Ray, if this process is part of a cluster; None in a client of one, whose node has no relay."""
    ray = sys.modules.get("ray")
    if ray is None or not getattr(ray, "is_initialized", bool)():
        return None
    client = sys.modules.get("ray.util.client")
    if client is not None and client.ray.is_connected():
        return None
    return ray


def _settings() -> Settings:
    from raytrace_rl import _env_otlp

    return _env_otlp.settings()


def _need_grpc(settings: Settings) -> None:
    speaks_grpc = any(one is not None and one.protocol == "grpc" for one in settings.endpoints.values())
    if speaks_grpc and importlib.util.find_spec("grpc") is None:
        raise ImportError("No module named 'grpc'")
