"""Actors whose telemetry starts with them and is flushed before they are killed.

`TracedActor` is the mixin for the actor's class; `flush_actors` and `flush_and_kill` are for whoever holds its handle.
What a span recorded is in the spool when it ends and needs no flush. A flush is for what is not a span yet: threads
that still run, metrics and logs of the last interval, and a clean close, so that a reader need not wait for a proof of
death.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

from raytrace_rl import _carrier, _env_carrier, _state, _wrapping, context, instrumentation, setup
from raytrace_rl._flush import (
    FlushReport,
    flush_actors,
    flush_and_kill,
    flush_group,
    flush_process,
    registered_actors,
)
from raytrace_rl._interrupts import is_interrupt

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

__all__ = ["FlushReport", "TracedActor", "flush_actors", "flush_and_kill", "flush_group", "registered_actors"]

_MODEL_INIT_GROUP: Final = "model_init"
_MODEL_INIT_SPAN: Final = "rl.setup.model_init"


class TracedActor:
    """Mixin: telemetry starts on the first line of the actor's life, whatever its constructor does.

    It is started before ``__init__`` runs, in an actor's process alone, so that a class that forgets
    ``super().__init__()`` and a dataclass's, attrs' or pydantic's constructor are covered. The constructor's signature
    stays the user's own; Ray's copy of the class takes the carrier besides, so that
    ``dispatch_with_trace_context(Actor, ...)`` parents what happens in ``__init__``.

    Class keyword ``model_init=True`` puts the whole constructor under a ``model_init`` umbrella span.

    Args:
        *args, **kwargs: Go to the next ``__init__`` in line.
        rank: Rank within the worker group, from 0; by default ``RANK``.
        world_size: Ranks in the group; by default ``WORLD_SIZE``.
        worker_group: Name of the group; by default ``RAYTRACE_RL_WORKER_GROUP``, then ``NRL_WORKER_GROUP``. Without
            any, reports name the process by its actor's class.
        resource_attributes: Further attributes of the process.

    An argument of these names that the next ``__init__`` takes as well reaches it too.
    """

    __slots__ = ()

    _raytrace_model_init: ClassVar[bool] = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Starts telemetry if this is an actor's process, then makes the object as the next in line would."""
        if _is_actor_process() and not _is_rays_own(cls):
            setup.init_telemetry_worker()
        make = super().__new__
        return make(cls) if make is object.__new__ else make(cls, *args, **kwargs)

    def __init__(
        self,
        *args: Any,
        rank: int | None = None,
        world_size: int | None = None,
        worker_group: str | None = None,
        resource_attributes: Mapping[str, AttributeValue] | None = None,
        **kwargs: Any,
    ) -> None:
        identity = {
            "rank": rank,
            "world_size": world_size,
            "worker_group": worker_group,
            "resource_attributes": resource_attributes,
        }
        given = {name: value for name, value in identity.items() if value is not None}
        if given or setup.get_telemetry_handle() is None:
            setup.init_telemetry_worker(**given)  # type: ignore[arg-type]
        shared = given.keys() & _parameters_after(type(self), super().__init__) if given else ()
        super().__init__(*args, **kwargs, **{name: given[name] for name in shared})

    def __init_subclass__(cls, *, model_init: bool | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        try:
            if model_init is not None:
                cls._raytrace_model_init = model_init
            _adapt(cls)
        except Exception as error:
            if is_interrupt(error):
                raise
            _state.warn_once(f"actor:{cls.__qualname__}", "%s is traced only in part: %r", cls.__qualname__, error)

    def flush_telemetry(
        self, timeout_s: float = 5.0, *, quiesce_timeout_s: float | None = None, final: bool = True
    ) -> bool:
        """Waits for this process's traced threads, then brings telemetry to a clean end. Never raises.

        A coroutine on an async actor, so that its event loop goes on meanwhile.

        Args:
            timeout_s: Seconds for all of it.
            quiesce_timeout_s: Seconds of these for threads and pool tasks; by default half.
            final: Shut telemetry down: what is still open then is marked truncated, and a carrier that arrives later
                does not start it again.

        Returns:
            True if no traced thread was left running.
        """
        return flush_process(timeout_s, quiesce_timeout_s, final=final)


async def _flush_telemetry_async(
    self: TracedActor,  # noqa: ARG001 - a method of async actors
    timeout_s: float = 5.0,
    *,
    quiesce_timeout_s: float | None = None,
    final: bool = True,
) -> bool:
    """Waits for this process's traced threads, then brings telemetry to a clean end; see `TracedActor`."""
    return await asyncio.to_thread(functools.partial(flush_process, timeout_s, quiesce_timeout_s, final=final))


def _is_actor_process() -> bool:
    """True in the process of a Ray actor: on the driver, Ray calls ``__new__`` for the actor class as well."""
    ray = sys.modules.get("ray")
    try:
        worker = ray._private.worker.global_worker  # type: ignore[union-attr]
        return bool(worker.mode == ray.WORKER_MODE and not worker.actor_id.is_nil())  # type: ignore[union-attr]
    except AttributeError:  # no Ray, or one that keeps this elsewhere: then __init__ does it
        return False


def _is_rays_own(cls: type) -> bool:
    """True for the class that Ray derives to stand for an actor class, in an actor that creates others too."""
    actor_class = getattr(sys.modules.get("ray.actor"), "ActorClass", None)
    return actor_class is not None and issubclass(cls, actor_class)


def _parameters_after(cls: type, init: Callable[..., None]) -> set[str]:
    """Returns the keywords that the ``__init__`` after `TracedActor`'s takes by name."""
    names = {
        parameter.name
        for parameter in inspect.signature(init).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    return names | set(getattr(cls, "__pydantic_fields__", ()))


def _adapt(cls: type[TracedActor]) -> None:
    """Fits a subclass to what it is: async or not, Ray's copy or the user's."""
    if _is_rays_own(cls):
        return
    for name, method in list(vars(cls).items()):
        if _wrapping.promises_too_much(method):
            setattr(cls, name, _wrapping.accepting(method, context.receive))
    if cls.flush_telemetry is TracedActor.flush_telemetry and _has_async_methods(cls):
        # Only there: one coroutine among its methods makes an actor an async one to Ray.
        cls.flush_telemetry = _flush_telemetry_async  # type: ignore[assignment,method-assign]
    if "__ray_actor_class__" in vars(cls):
        # Ray's copy, with every decorator of the class applied and the user's own class left as it was.
        cls.__init__ = _wrapping.accepting(_constructor(cls.__init__), context.receive)  # type: ignore[method-assign]


def _has_async_methods(cls: type) -> bool:
    seen: set[str] = set()
    for base in cls.__mro__:
        for name, value in vars(base).items():
            if name not in seen:
                seen.add(name)
                method = getattr(value, "__func__", value)
                if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
                    return True
    return False


def _constructor(init: Callable[..., None]) -> Callable[..., None]:
    """Returns ``init`` under what the environment says this process was born under, and the umbrella asked for.

    A carrier that came with the call has won by then. The environment's is for whoever makes actors without one: the
    worker groups of frameworks.
    """

    @functools.wraps(init)
    def construct(self: TracedActor, /, *args: Any, **kwargs: Any) -> None:
        inherited = {} if "traceparent" in _carrier.current() else _env_carrier.inherited()
        with context.remote_trace_context(inherited):
            if type(self)._raytrace_model_init:
                with instrumentation.umbrella_span(_MODEL_INIT_GROUP, _MODEL_INIT_SPAN):
                    init(self, *args, **kwargs)
            else:
                init(self, *args, **kwargs)

    return construct
