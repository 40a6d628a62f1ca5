"""Rules RT101 and RT102 for views of `traced` that take long ways: what cannot be followed is left alone."""

from __future__ import annotations

from tests.lint.lint_sources import family_of

ACTOR = """
@ray.remote
class A(TracedActor):
    @accepts_trace_context
    def f(self, x): return x
"""

FAILING = {
    "property plain": ACTOR
    + """
class H:
    def __init__(self): self._g = A.remote()
    @property
    def g(self): return self._g
    def c(self): return self.g.f.remote(1)  #! RT101
""",
    "actorpool plain": ACTOR
    + """
from ray.util import ActorPool
pool = ActorPool([A.remote()])
list(pool.map(lambda a, v: a.f.remote(v), [1]))  #! RT101
""",
    "thread plain": ACTOR
    + """
import threading
def run(a, x): a.f.remote(x)  #! RT101
threading.Thread(target=run, args=(A.remote(), 1)).start()
""",
}

PASSING = {
    "openrlhf": ACTOR
    + """
from openrlhf.trainer.ray.launcher import RayActorGroup
g = RayActorGroup(2)
g._actor_handlers = [traced(a) for a in g._actor_handlers]
ray.get(g.async_run_method('f', 1))
""",
    "skyrl": ACTOR
    + """
from skyrl import PPORayActorGroup, ActorInfo
g = PPORayActorGroup(2)
g.actor_infos = [ActorInfo(traced(i.handle), i.rank) for i in g.actor_infos]
g.async_run_ray_method('pass_through', 'f')
""",
    "own rayactorgroup": ACTOR
    + """
class RayActorGroup:
    def __init__(self): self._h = [A.remote() for _ in range(2)]
    def run(self, method_name, *a): return [getattr(x, method_name).remote(*a) for x in self._h]
g = RayActorGroup()
g._h = [traced(x) for x in g._h]
g.run('f', 1)
""",
    "property": ACTOR
    + """
class H:
    def __init__(self): self._g = traced(A.remote())
    @property
    def g(self): return self._g
    def c(self): return self.g.f.remote(1)
H().g.f.remote(2)
h = H()
h.g.f.remote(3)
def q(h): return h.g.f.remote(4)
""",
    "cached property": ACTOR
    + """
from functools import cached_property
class H:
    @cached_property
    def g(self): return traced(A.remote())
    def c(self): return self.g.f.remote(1)
""",
    "method": ACTOR
    + """
class H:
    def lease(self): return traced(self.h)
def q(p): return p.lease().f.remote(1)
""",
    "contextmanager": ACTOR
    + """
from contextlib import contextmanager
class H:
    @contextmanager
    def lease(self):
        yield traced(self.h)
    def q(self):
        with self.lease() as a: a.f.remote(1)
def q(p):
    with p.lease() as a: a.f.remote(1)
""",
    "generator": ACTOR
    + """
def views(ws):
    for w in ws: yield traced(w)
def q(ws):
    for a in views(ws): a.f.remote(1)
""",
    "dataclass": ACTOR
    + """
from dataclasses import dataclass
@dataclass
class H:
    n: int
    g: object
def q(h): return h.g.f.remote(1)
q(H(1, traced(a)))
q(H(1, g=traced(a)))
""",
    "namespace": ACTOR
    + """
from types import SimpleNamespace
h = SimpleNamespace(g=traced(A.remote()))
h.g.f.remote(1)
""",
    "actorpool": ACTOR
    + """
from ray.util import ActorPool
pool = ActorPool([traced(A.remote())])
list(pool.map(lambda a, v: a.f.remote(v), [1]))
pool.submit(lambda a, v: a.f.remote(v), 1)
def call(a, v): return a.f.remote(v)
pool.map_unordered(call, [1])
""",
    "actorpool push": ACTOR
    + """
from ray.util import ActorPool
pool = ActorPool([])
pool.push(traced(h))
list(pool.map(lambda a, v: a.f.remote(v), [1]))
""",
    "actorpool self": ACTOR
    + """
class D:
    def __init__(self): self.pool = ray.util.ActorPool([traced(A.remote())])
    def go(self): return list(self.pool.map(lambda a, v: a.f.remote(v), [1]))
""",
    "map": ACTOR
    + """
ws = [traced(w) for w in hs]
list(map(lambda w: w.f.remote(1), ws))
with Ex() as ex:
    ex.map(lambda w: w.f.remote(1), ws)
    ex.submit(lambda w: w.f.remote(1), ws[0])
""",
    "thread": ACTOR
    + """
import threading
def run(a, x): a.f.remote(x)
threading.Thread(target=run, args=(traced(h), 1)).start()
""",
    "submit fn": ACTOR
    + """
def run(a, x): return a.f.remote(x)
ex.submit(run, traced(h), 1)
""",
    "submit method": ACTOR
    + """
class D:
    def run(self, a, x): return a.f.remote(x)
    def go(self, ex): return ex.submit(self.run, traced(self.h), 1)
""",
    "super": ACTOR
    + """
class B:
    def __init__(self, a): self.a = a
    def go(self): self.a.f.remote(1)
class C(B):
    def __init__(self, a): super().__init__(traced(a))
""",
    "registry external": ACTOR
    + """
from lib import registry
registry.register('a', traced(A.remote()))
registry.lookup('a').f.remote(1)
""",
    "closure": ACTOR
    + """
def make(h):
    v = traced(h)
    def go(): return v.f.remote(1)
    return go
""",
    "ray.get_actor": ACTOR
    + """
def view(): return traced(ray.get_actor('x'))
view().f.remote(1)
""",
    "setdefault": ACTOR
    + """
cache = {}
def view(k): return cache.setdefault(k, traced(ray.get_actor(k)))
view(1).f.remote(1)
""",
    "attr of other": ACTOR
    + """
def f(d): d.view = traced(A.remote())
def g(d): d.view.f.remote(1)
""",
    "walrus": ACTOR + "if (v := traced(h)): v.f.remote(1)",
    "async for": ACTOR
    + """
async def views(hs):
    for h in hs: yield traced(h)
async def q(hs):
    async for v in views(hs): await v.f.remote(1)
    [await v.f.remote(1) async for v in views(hs)]
""",
    "match": ACTOR
    + """
match h:
    case {'a': a}: traced(a).f.remote(1)
""",
    "starred": ACTOR
    + """
first, *rest = [traced(h) for h in hs]
first.f.remote(1)
rest[0].f.remote(1)
""",
    "ternary": ACTOR
    + """
v = traced(h) if on else None
if v is not None: v.f.remote(1)
""",
    "default": ACTOR
    + """
def go(x, a=None):
    a = a or traced(h)
    return a.f.remote(x)
""",
}

test_finds, test_leaves_alone, _ = family_of(FAILING, PASSING, {})
