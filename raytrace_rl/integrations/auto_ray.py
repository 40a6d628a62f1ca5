"""Traces the actors and tasks of a program that was not written for it: the one place that touches Ray's own classes.

`install`, which ``raytrace-rl run`` calls, puts something of ours around six functions of Ray's (`_TARGETS`):

- on a driver, connecting starts telemetry unless the program has, opens the job's span and adds our variables to the
  job's ``runtime_env``; ``ray.shutdown`` lets actors close their spools first; connecting as a Ray Client warns that
  nothing is traced;
- creating an actor, and the first call of a remote function, puts wrappers (`_auto_entry`) around the methods of *Ray's
  copy* of the class (around the function). The user's class stays as it is. Calls then send a carrier, as `dispatch`
  does, and arrive under a span ``ray.call.<Class>.<method>`` of the group ``actor_call``.

The first traced call that arrives in a worker installs the same there: what actors call is traced too. What is not
recognised is left alone, with one warning.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable
from inspect import Parameter
from time import time_ns
from types import FunctionType
from typing import Any, Final

from raytrace_rl import _carrier, _handles, _state, _wrapping, setup
from raytrace_rl._interrupts import is_interrupt
from raytrace_rl.integrations import _auto_driver, _auto_entry

#: ``1``: ``raytrace-rl run`` has asked for `install`. ``force``: also with a version of Ray that nobody has tried.
VARIABLE: Final = "RAYTRACE_RL_AUTO_RAY"
#: Versions of Ray with which an unedited program was seen traced. Those between are taken to be like them.
TRIED: Final = ("2.48", "2.52", "2.56", "2.60")

#: Ray's module whose wrappers stand around every method of an actor, whether its tracing is on or off.
_TRACING: Final = "ray.util.tracing.tracing_helper"
#: Attribute of a class or function of which we have made wrappers.
_MARK: Final = "__raytrace_auto__"

_installed: bool | None = None
_began_ns = time_ns()


def install(began_ns: int | None = None) -> bool:
    """Traces Ray in this process from now on. Never raises; once per process.

    Args:
        began_ns: Start of the job's span on a driver, ns since the epoch; by default the import of this module.

    Returns:
        False if nothing was changed: this version of Ray is none of those it was tried on, or does not look like one.
    """
    global _installed, _began_ns
    _began_ns = _began_ns if began_ns is None else began_ns
    if _installed is None:
        try:
            _installed = _install()
        except Exception as error:
            if is_interrupt(error):
                raise
            _installed = False
            _leave_alone("Ray", repr(error))
    return _installed


def is_tried(version: str) -> bool:
    """True for a version of Ray no older than the oldest tried, and no newer than the newest."""
    numbers = [[int(part) for part in re.findall(r"\d+", text)[:2]] for text in (TRIED[0], version, TRIED[-1])]
    return len(numbers[1]) == len(numbers[0]) and numbers[0] <= numbers[1] <= numbers[2]


def _install() -> bool:
    import ray

    version = str(getattr(ray, "__version__", "unknown"))
    if not is_tried(version) and os.environ.get(VARIABLE) != "force":
        tried = f"it was tried with {TRIED[0]} to {TRIED[-1]}; {VARIABLE}=force tries this version all the same"
        _leave_alone(f"Ray {version}", tried)
        return False
    changes = []
    for module, owner, name, parameters, ours in _TARGETS:
        place: Any = sys.modules[module]
        place = getattr(place, owner) if owner else place
        original = getattr(place, name)
        if not parameters <= inspect.signature(original).parameters.keys():
            _leave_alone("Ray", f"{name} of {module} is not what it was in the versions tried")
            return False
        changes.append((place, name, functools.wraps(original)(_with(ours, original))))
    _auto_entry.register()
    for place, name, changed in changes:
        setattr(place, name, changed)
    return True


def _with(ours: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: ours(original, *args, **kwargs)


def _leave_alone(what: str, why: str) -> None:
    _state.warn_once(f"auto-ray:{what}", "Calls of %s are not traced: %s", what, why)


# ------------------------------------------------------------------------------------------------------------ driver


def _connect(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    job_config: Any = given.get("job_config")
    drives = given.get("mode") == sys.modules["ray"].SCRIPT_MODE and not _auto_driver.is_rays_own_program()
    drives = drives and job_config is not None and not job_config._client_job
    if drives:
        try:
            _auto_driver.begin(_began_ns)
            if setup.get_telemetry_handle() is not None:
                job_config.set_runtime_env(setup.telemetry_runtime_env(job_config.runtime_env))
        except Exception as error:
            if is_interrupt(error):
                raise
            _leave_alone("this driver", repr(error))
    result = original(*args, **kwargs)
    if drives:
        setup.attach_to_cluster()
    return result


def _connect_client(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    _leave_client_alone()
    return original(*args, **kwargs)


def _leave_client_alone() -> None:
    _leave_alone(
        "a Ray Client (ray://)",
        "its driver is a process of the server's. Run the program on the cluster: "
        "ray job submit -- raytrace-rl run -- python ...",
    )


def _shutdown(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    _auto_driver.close_actors()
    return original(*args, **kwargs)


# ------------------------------------------------------------------------------------------------------ whoever calls


def _create(original: Any, actor_class: Any, /, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
    _connected()
    handle = original(actor_class, args, _prepared(_creation, actor_class, kwargs), **options)
    _handles.register(handle)
    return handle


def _call_method(
    original: Any, method: Any, /, args: Any = None, kwargs: Any = None, *more: Any, **options: Any
) -> Any:
    return original(method, args, _prepared(_method_call, method, kwargs), *more, **options)


def _call_function(
    original: Any, function: Any, /, args: Any = None, kwargs: Any = None, *more: Any, **options: Any
) -> Any:
    _connected()
    return original(function, args, _prepared(_function_call, function, kwargs), *more, **options)


def _connected() -> None:
    """Connects to a cluster as Ray itself does at a program's first call, which is to be traced already."""
    if not sys.modules["ray"].is_initialized():
        from ray._private.auto_init_hook import auto_init_ray

        auto_init_ray()  # type: ignore[no-untyped-call]


def _prepared(prepare: Callable[[Any, Any], Any], target: Any, kwargs: Any) -> Any:
    """Returns the keywords to call with; the user's own where we fail, or have nothing to say."""
    if not _state.tracing or (kwargs is not None and _carrier.KEYWORD in kwargs):
        return kwargs
    try:
        if _auto_driver.is_client():
            _leave_client_alone()
            return kwargs
        if not _names_carrier(prepare(target, sys.modules["ray"]._private.worker.global_worker)):
            return kwargs
        carrier = _carrier.sent()
        if "traceparent" not in carrier and _auto_entry.root:
            sent = {"raytrace": f"|{time_ns()},{_carrier.NODE}"}
            carrier = {**_auto_entry.root, **sent, **carrier}
        return {**(kwargs or {}), _carrier.KEYWORD: carrier} if carrier else kwargs
    except Exception as error:
        if is_interrupt(error):
            raise
        _leave_alone(repr(target), repr(error))
        return kwargs


def _names_carrier(parameters: Iterable[Parameter] | None) -> bool:
    return parameters is not None and any(parameter.name == _carrier.KEYWORD for parameter in parameters)


def _method_call(method: Any, _worker: Any) -> Any:
    return method._actor._ray_method_signatures.get(method._method_name)


def _creation(actor_class: Any, worker: Any) -> Any:
    meta = actor_class.__ray_metadata__
    signatures = meta.method_meta.signatures
    cls, base = meta.modified_class, getattr(meta.modified_class, "__ray_actor_class__", None)
    exported = meta.last_export_cluster_and_job == worker.current_cluster_and_job
    if base is None or _MARK in vars(cls) or exported or not _may_wrap(base, worker):
        return signatures.get("__init__")
    setattr(cls, _MARK, True)
    for name, _ in inspect.getmembers(cls, lambda member: inspect.isfunction(member) or inspect.ismethod(member)):
        if name == "__init__" or (not name.startswith("__") and _is_users(vars(cls).get(name))):
            _wrap_method(cls, name, f"ray.call.{base.__name__}.{name}", signatures)
    return signatures.get("__init__")


def _wrap_method(cls: Any, name: str, label: str, signatures: dict[str, Any]) -> None:
    """Puts a wrapper into Ray's copy of a class, and its parameters, as Ray checks calls against them."""
    member = inspect.getattr_static(cls, name)
    fn = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
    if not isinstance(fn, FunctionType) or not _may_wrap_function(fn):
        return
    parameters = list(_wrapping.signature_with_carrier(fn).parameters.values())
    if isinstance(member, staticmethod):
        setattr(cls, name, staticmethod(_auto_entry.of_function(fn, label)))
        signatures[name] = parameters
        return
    if isinstance(member, classmethod):
        setattr(cls, name, classmethod(_auto_entry.of_class_method(fn, label, name)))
    else:
        setattr(cls, name, _auto_entry.of_method(fn, label, name))
    signatures[name] = parameters[1:]


def _is_users(attribute: Any) -> bool:
    """False for what somebody has added to Ray's copy of a class; Ray's tracing, off, stands around every method."""
    return attribute is None or getattr(attribute, "__globals__", {}).get("__name__") == _TRACING


def _function_call(function: Any, worker: Any) -> Any:
    inner = function._function
    exported = function._last_export_cluster_and_job == worker.current_cluster_and_job
    known = hasattr(inner, _MARK) or exported or function._is_cross_language
    if not known and isinstance(inner, FunctionType) and _may_wrap(inner, worker) and _may_wrap_function(inner):
        inner = _auto_entry.of_function(inner, f"ray.call.{inner.__name__}")
        setattr(inner, _MARK, True)
        function._function, function._function_signature = inner, None
    return function._function_signature or inspect.signature(inner).parameters.values()


def _may_wrap(thing: Any, worker: Any) -> bool:
    """False where workers would not get our copy, or two libraries would wrap the same; and for Ray's and our own."""
    helper = sys.modules.get(_TRACING)
    if helper is not None and helper._is_tracing_enabled():
        _leave_alone("Ray", "its own tracing is on")
        return False
    if worker.load_code_from_local:
        _leave_alone("Ray", "workers load their code themselves (code_search_path)")
        return False
    return str(thing.__module__).partition(".")[0] not in ("ray", "raytrace_rl")


def _may_wrap_function(fn: Any) -> bool:
    """False for ours, for one that takes carriers already, and for one that is another kind than what it hides."""
    hidden = inspect.unwrap(fn)
    ours = str(fn.__module__).partition(".")[0] == "raytrace_rl"
    return not ours and not _wrapping.names_carrier(fn) and _auto_entry.kind(hidden) == _auto_entry.kind(fn)


#: Module, class (or none), function, the parameters that it must have for us to know it, and what goes around it.
_TARGETS: Final[tuple[tuple[str, str, str, set[str], Callable[..., Any]], ...]] = (
    ("ray._private.worker", "", "connect", {"mode", "job_config"}, _connect),
    ("ray.util.client_connect", "", "connect", {"conn_str"}, _connect_client),
    ("ray", "", "shutdown", set(), _shutdown),
    ("ray.actor", "ActorClass", "_remote", {"args", "kwargs"}, _create),
    ("ray.actor", "ActorMethod", "_remote", {"args", "kwargs"}, _call_method),
    ("ray.remote_function", "RemoteFunction", "_remote", {"args", "kwargs"}, _call_function),
)
