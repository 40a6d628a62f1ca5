"""What stands around a method or function of a program that knows nothing of us: it takes a carrier and opens a span.

A wrapper travels to workers by value and names nothing of this package, so that it runs, untraced, where the package is
not. Where it is, the wrapper finds `entered`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any, Final

from raytrace_rl import _carrier, _decorators, _process, _state, _wrapping, context, semconv, setup
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl._primitives import umbrella_span
from raytrace_rl.span_groups import register_span_groups

GROUP: Final = "actor_call"
#: What a default value may be to stand in the signature that a wrapper shows: it travels with each class.
_PLAIN: Final = (type(None), bool, int, float, str, bytes)
_INIT: Final = ".__init__"

#: Parent of calls from where nothing is current, such as a thread of the program's: the job, or who made the actor.
root: dict[str, str] = {}

_registered = False


def register() -> None:
    """Registers the group, once: ``per_step`` has it where calls are traced, and nowhere else."""
    global _registered
    if not _registered:
        register_span_groups("auto_ray", {GROUP}, {"per_step": {GROUP}}, umbrellas={GROUP})
        _registered = True


def kind(fn: Any) -> str:
    """Returns which kind of function ``fn`` is, as Ray tells them apart."""
    if inspect.isasyncgenfunction(fn):
        return "asyncgen"
    if inspect.iscoroutinefunction(fn):
        return "coroutine"
    return "generator" if inspect.isgeneratorfunction(fn) else "plain"


def of_method(fn: Any, label: str, name: str) -> Any:
    """Returns a wrapper for Ray's copy of a class. It finds the user's method by its name, and holds nothing of it."""
    return _wrapper(fn, label, lambda args: getattr(type(args[0]).__ray_actor_class__, name))


def of_class_method(fn: Any, label: str, name: str) -> Any:
    """As `of_method`, of what stands inside a ``classmethod``."""
    return _wrapper(fn, label, lambda args: getattr(args[0].__ray_actor_class__, name).__func__)


def of_function(fn: Any, label: str) -> Any:
    """Returns a wrapper for a remote function, or for a static method."""
    return _wrapper(fn, label, lambda _args: fn)


def _wrapper(fn: Any, label: str, find: Callable[[Any], Any]) -> Any:
    """Returns a function of the same kind as ``fn``. What is defined in here is pickled by value: it names no global.

    Args:
        fn: A function of the user's, only to be looked at.
        label: Name of the span.
        find: Returns the function to call, from the arguments.
    """

    def entry(args: Any, carrier: Any) -> Any:
        target = find(args)
        if carrier is None:
            return target
        try:
            from raytrace_rl.integrations import _auto_entry  # noqa: PLW0406 - in a worker, by its name
        except ImportError:  # not in this worker's environment
            return target
        return _auto_entry.entered(target, label, carrier)

    def plain(*args: Any, _otel_carrier: Any = None, **kwargs: Any) -> Any:
        return entry(args, _otel_carrier)(*args, **kwargs)

    async def coroutine(*args: Any, _otel_carrier: Any = None, **kwargs: Any) -> Any:
        return await entry(args, _otel_carrier)(*args, **kwargs)

    def generator(*args: Any, _otel_carrier: Any = None, **kwargs: Any) -> Any:
        return (yield from entry(args, _otel_carrier)(*args, **kwargs))

    async def asyncgen(*args: Any, _otel_carrier: Any = None, **kwargs: Any) -> Any:
        steps = entry(args, _otel_carrier)(*args, **kwargs)
        try:
            async for item in steps:
                yield item
        finally:
            await steps.aclose()

    made = {"plain": plain, "coroutine": coroutine, "generator": generator, "asyncgen": asyncgen}[kind(fn)]
    functools.update_wrapper(made, fn, updated=())
    made.__annotations__ = {}
    marks = {**vars(inspect.unwrap(fn)), **vars(fn)}  # what `ray.method` has put on it
    vars(made).update(marks)
    vars(made).pop("__wrapped__", None)
    vars(made)["__signature__"] = _light(_wrapping.signature_with_carrier(fn))
    return made


def _light(signature: Signature) -> Signature:
    """Returns the signature without what may not pickle: annotations, and default values beyond the simplest."""
    return Signature([_light_parameter(parameter) for parameter in signature.parameters.values()])


def _light_parameter(parameter: Parameter) -> Parameter:
    default = parameter.default
    if default is not Parameter.empty and type(default) not in _PLAIN:
        default = None
    return parameter.replace(annotation=Parameter.empty, default=default)


def entered(fn: Any, label: str, carrier: Any) -> Any:
    """Returns what a wrapper calls in a worker: ``fn`` under the carrier and a span. Never raises."""
    global root
    try:
        from raytrace_rl.integrations import auto_ray

        register()
        auto_ray.install()
        if label.endswith(_INIT):
            setup.init_telemetry_worker()
            root = _carrier.without_scopes(carrier)
            process = _process.current
            if process is not None and process.resource.get(semconv.RAY_ACTOR_INCARNATION):
                carrier = root  # it was sent when the actor was first made: no delay of this incarnation's
        return functools.partial(_traced(fn, label), **{_carrier.KEYWORD: carrier})
    except Exception as error:
        if is_interrupt(error):
            raise
        _state.warn_once(f"auto-ray:{label}", "%s is not traced: %r", label, error)
        return fn


@functools.lru_cache(maxsize=1024)  # a program may make remote functions without end
def _traced(fn: Any, label: str) -> Any:
    spanned = _decorators.around(fn, GROUP, lambda: umbrella_span(GROUP, label))
    return _wrapping.accepting(spanned, context.receive)
