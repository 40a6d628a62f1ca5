"""What a sharded call on a worker group returns: one future a worker, and whose results count."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from typing import Any


@dataclass
class MultiWorkerFuture:
    """The futures of one call on many workers.

    Attributes:
        futures: One a worker called: an ``ObjectRef``, or for a generator method an ``ObjectRefGenerator``.
        return_from_workers: The workers whose results count; None for all. Where outputs are replicated, or a call was
            only a dummy, the others' are left out.
        called_workers: The worker of each future; None if these are the workers in order.
    """

    futures: list[Any]
    return_from_workers: list[int] | None = None
    called_workers: list[int] | None = None

    def get_results(
        self,
        worker_group: Any = None,  # noqa: ARG002 - NeMo-RL's signature; what is needed stands in the future itself
        return_generators_as_proxies: bool = False,
        *,
        timeout: float | None = None,
    ) -> list[Any]:
        """Waits for the results that count.

        Args:
            worker_group: The group that was called; not needed.
            return_generators_as_proxies: Return the ``ObjectRefGenerator`` of each worker, for whoever wants to read
                streams while they are written; nothing is waited for then. Otherwise streams are read to their ends,
                one worker's items after the other's.
            timeout: Seconds for all of it; by default without end.

        Returns:
            One result a worker, or all items of all streams.

        Raises:
            ray.exceptions.GetTimeoutError: The time is over.
        """
        import ray

        chosen = self._chosen()
        if return_generators_as_proxies:
            return chosen
        deadline = None if timeout is None else monotonic() + timeout
        if not any(isinstance(future, ray.ObjectRefGenerator) for future in chosen):
            results: list[Any] = ray.get(chosen, timeout=timeout)
            return results
        items: list[Any] = []
        for future in chosen:
            if isinstance(future, ray.ObjectRefGenerator):
                items.extend(_read_stream(future, deadline))
            else:
                items.append(ray.get(future, timeout=_left(deadline)))
        return items

    def _chosen(self) -> list[Any]:
        if self.return_from_workers is None:
            return list(self.futures)
        called = range(len(self.futures)) if self.called_workers is None else self.called_workers
        by_worker = dict(zip(called, self.futures, strict=True))
        return [by_worker[worker] for worker in self.return_from_workers if worker in by_worker]


def _read_stream(stream: Any, deadline: float | None) -> list[Any]:
    import ray

    items = []
    while True:
        if deadline is not None:
            ready, _ = ray.wait([stream], timeout=_left(deadline))
            if not ready:
                raise ray.exceptions.GetTimeoutError("a worker's stream did not end in time")
        try:
            items.append(ray.get(next(stream), timeout=_left(deadline)))
        except StopIteration:
            return items


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - monotonic())
