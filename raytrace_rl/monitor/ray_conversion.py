"""Conversion by Ray tasks: on the nodes that see the same files, beside whatever else the cluster does.

A task asks for no CPU, so that it never waits for those that training holds, and each has a limit of time. It converts
nothing before it has proven that it sees the same source and the same cache. Where this process is not connected, a
child of it is: a driver dies with its cluster, and this one is not to. What fails is left for the caller to convert.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from raytrace_rl import _state
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl.monitor import sight
from raytrace_rl.monitor.converting import is_connected

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from raytrace_rl.monitor.converting import Order
    from raytrace_rl.spool.reader import Damage

#: Seconds that a task has, its worker's start included, and bytes a second that it has more for.
LIMIT_S: float = 90
_BYTES_A_SECOND: Final = 2 << 20
#: Seconds until a child is connected, or given up.
CONNECT_S: float = 40
#: Tasks at a time on one node at most.
_AT_ONCE: Final = 8
_TICK_S: Final = 0.5
#: Seconds between two looks whether the cluster is there, and until one that does not answer is not.
_LOOK_S: Final = 2
_KNOCK_S: Final = 3
#: Seconds that a child has to take leave of the cluster.
_GRACE_S: Final = 5

Answer = tuple[int, "list[Damage]"]


class _Running(NamedTuple):
    """A task: the number of its order, its node, and when its time is over (monotonic, s)."""

    number: int
    node: str
    until_s: float


def converted(orders: Mapping[int, Order], token: str) -> Iterator[Answer]:
    """Yields the number of each order that was carried out, with what could not be read of its source.

    Never raises for Ray's sake: one warning, and the others are left. Where no node but this one's sees the files, that
    is no failure, and nothing is said.
    """
    orders = dict(orders)
    try:
        if is_connected():
            yield from _Tasks(orders, token, _warn).converted()
        else:
            yield from _by_a_child(orders, token, os.environ["RAY_ADDRESS"])
    except Exception as error:
        if is_interrupt(error):
            raise
        _warn(_told(error))


def _warn(reason: str) -> None:
    _state.warn_once("ray-conversion", "Ray tasks did not convert all of the run, so this machine does: %s", reason)


def _limit_s(size: int) -> float:
    return LIMIT_S + size / _BYTES_A_SECOND


def _carried_out(order: Order, seen: sight.Seen, token: str, version: str) -> tuple[bool, list[Damage]]:
    """The task: whether it sees the same files with the same code and has converted them; what could not be read."""
    if version != sight.version() or seen != sight.seen(order.source) or not sight.same(order.scratch, token):
        return False, []
    return True, order.carry_out()


class _Tasks:
    """Tasks on the cluster that this process is connected to."""

    def __init__(self, orders: Mapping[int, Order], token: str, warn: Callable[[str], None]) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._ray: Any = ray
        self._on = NodeAffinitySchedulingStrategy
        self._orders = orders
        self._token = token
        self._warn = warn
        self._address = self._gcs_address()
        self._looked_s = time.monotonic()
        self._task = ray.remote(num_cpus=0, max_retries=0)(_carried_out)
        self._waiting = deque(orders)
        self._running: dict[Any, _Running] = {}
        #: Tasks that a node may still be given.
        self._free = {
            node["NodeID"]: max(1, min(_AT_ONCE, int(node["Resources"].get("CPU", 1))))
            for node in self._ray.nodes()
            if node["Alive"]
        }

    def converted(self) -> Iterator[Answer]:
        """Yields what was converted until all is, or no node is left that can."""
        try:
            while self._waiting or self._running:
                self._submit()
                if not self._running:
                    return
                self._look_after_cluster()
                done, _ = self._ray.wait(list(self._running), timeout=_TICK_S)
                for ref in done:
                    answer = self._settled(ref)
                    if answer is not None:
                        yield answer
                self._give_up_late_ones()
        finally:
            for ref in self._running:
                self._cancel(ref)

    def _gcs_address(self) -> str:
        try:
            return str(self._ray.get_runtime_context().gcs_address)
        except Exception:  # behind a proxy (``ray://``) there is none to be asked
            return ""

    def _look_after_cluster(self) -> None:
        """Raises where the cluster is gone: calls would wait a minute for it to come back, or start another one."""
        if not self._ray.is_initialized():
            raise ConnectionError("disconnected from Ray")
        if self._address and time.monotonic() - self._looked_s > _LOOK_S:
            _knock(self._address)
            self._looked_s = time.monotonic()

    def _submit(self) -> None:
        while self._waiting and self._free:
            node, free = max(self._free.items(), key=lambda item: item[1])
            if not free:
                return
            self._look_after_cluster()
            number = self._waiting.popleft()
            order = self._orders[number]
            there = self._on(node_id=node, soft=False)
            task = self._task.options(scheduling_strategy=there, name="raytrace_rl.convert")
            ref = task.remote(order, sight.seen(order.source), self._token, sight.version())
            self._running[ref] = _Running(number, node, time.monotonic() + _limit_s(order.size))
            self._free[node] -= 1

    def _settled(self, ref: Any) -> Answer | None:
        number, node, _ = self._running.pop(ref)
        try:
            same, damage = self._ray.get(ref, timeout=_TICK_S)
        except Exception as error:
            if is_interrupt(error):
                raise
            self._lose(node, f"{type(error).__name__} on node {node[:8]}")
            return None
        if not same:  # the node does not see the files: another one may
            self._free.pop(node, None)
            self._waiting.append(number)
            return None
        if node in self._free:
            self._free[node] += 1
        return number, damage

    def _give_up_late_ones(self) -> None:
        now = time.monotonic()
        for ref in [ref for ref, task in self._running.items() if task.until_s < now]:
            task = self._running.pop(ref)
            self._cancel(ref)
            self._lose(task.node, f"no answer from node {task.node[:8]} in time")

    def _lose(self, node: str, reason: str) -> None:
        self._free.pop(node, None)
        self._warn(reason)

    def _cancel(self, ref: Any) -> None:
        with contextlib.suppress(Exception):
            if self._ray.is_initialized():
                self._ray.cancel(ref, force=True)


def _knock(address: str) -> None:
    """Raises OSError where nobody listens at ``<host>:<port>``; any other form of address is Ray's to understand."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _KNOCK_S).close()


# -- a child that is connected


def _by_a_child(orders: Mapping[int, Order], token: str, address: str) -> Iterator[Answer]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_connected, args=(theirs, address, orders, token), daemon=True)
    child.start()
    theirs.close()
    patience_s = CONNECT_S
    try:
        while True:
            if not ours.poll(patience_s):
                _warn(f"no answer from {address} in time")
                return
            try:
                said = ours.recv()
            except (EOFError, OSError):
                _warn(f"the connection to {address} broke")
                return
            if said is None:
                child.join(_GRACE_S)
                return
            if isinstance(said, str):
                if said:
                    _warn(said)
                patience_s = _limit_s(max(order.size for order in orders.values())) + CONNECT_S
            else:
                yield said
    finally:
        child.kill()
        child.join()
        ours.close()


def _connected(out: Connection, address: str, orders: Mapping[int, Order], token: str) -> None:
    """The child: sends empty text once it is connected, text for a failure, each answer, and None when all is well."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (1, 2):  # Ray's native code writes there too, when it dies
        os.dup2(null, fd)
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    try:
        _knock(address)
        import ray

        ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
        out.send("")
        for answer in _Tasks(orders, token, out.send).converted():
            out.send(answer)
    except Exception as error:
        out.send(_told(error))
        os._exit(1)  # to disconnect from a cluster that is gone takes a minute
    out.send(None)
    ray.shutdown()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
