"""Rules RT101 and RT102 for methods that a worker group binds from its workers, as verl's groups do."""

from __future__ import annotations

from tests.lint.lint_sources import family_of

WORKER = """
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import register, Dispatch
from verl.single_controller.ray import RayWorkerGroup, RayClassWithInitArgs
class W(TracedActor, Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    @accepts_trace_context
    def compute(self, data): return data
"""

FAILING = {
    "verl execute bare": WORKER
    + """
def g(wg, x):
    wg.execute_all('compute', x)  #! RT101
    wg.execute_rank_zero_sync('compute', x)  #! RT101
""",
    "verl made bare": WORKER
    + """
class T:
    def init(self, pool):
        self.actor = RayWorkerGroup(pool)
    def fit(self, b): return self.actor.compute(b)  #! RT101
""",
    "verl spawned bare": WORKER
    + """
class T:
    def init(self, pool):
        all_wg = {}
        g = RayWorkerGroup(pool)
        all_wg.update(g.spawn({'a'}))
        self.actor = all_wg['a']
    def fit(self, b): return self.actor.compute(b)  #! RT101
""",
    "verl submit bare": WORKER + "def f(ex, wg, b): ex.submit(wg.compute, b)  #! RT101",
    "verl helper": WORKER
    + """
def step(wg, b): return wg.compute(b)
def main(g, b):
    step(traced(g), b)
    step(g, b)  #! RT101
""",
}

PASSING = {
    "verl trainer subclass": WORKER
    + """
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
class T(RayPPOTrainer):
    def init_workers(self):
        super().init_workers()
        self.actor_rollout_wg = traced(self.actor_rollout_wg)
""",
    "verl trainer patched": WORKER
    + """
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
tr = RayPPOTrainer()
tr.init_workers()
tr.actor_wg = traced(tr.actor_wg)
tr.fit()
""",
    "verl trainer setattr": WORKER
    + """
def f(tr):
    for n in ('actor_wg', 'critic_wg'):
        setattr(tr, n, traced(getattr(tr, n)))
""",
    "verl given": WORKER
    + """
from x import fit
def f(wg): fit(actor_wg=traced(wg))
""",
    "verl local": WORKER
    + """
w = W()
w.compute(1)
def g(wg, x): return traced(wg).compute(x)
""",
    "verl local wg name": WORKER
    + """
class Local:
    def compute(self, x): ...
wg = Local()
wg.compute(1)
def g(wg, x): return traced(wg).compute(x)
""",
    "verl self": WORKER
    + """
class W2(W):
    def go(self): return self.compute(1) + super().compute(2)
def g(wg, x): return traced(wg).compute(x)
""",
    "verl critic undecorated": WORKER
    + """
class C(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute(self, data): return data
def g(critic_wg, x): return critic_wg.compute(x)
def h(wg, x): return traced(wg).compute(x)
""",
    "verl execute": WORKER
    + """
def g(wg, x):
    traced(wg).execute_all('compute', x)
    dispatch_with_trace_context(wg.execute_all, 'compute', x)
""",
    "verl submit": WORKER + "def f(ex, wg, b): ex.submit(traced(wg).compute, b)",
    "verl kept var": WORKER
    + """
def f(wg, b):
    wg = traced(wg)
    fn = wg.compute
    return fn(b)
""",
    "verl getattr": WORKER
    + """
def f(wg, b):
    wg = traced(wg)
    return getattr(wg, 'compute')(b)
""",
    "verl fused": WORKER
    + """
def f(wgs, b):
    role = traced(wgs['fused']).actor
    return role.compute(b)
""",
    "verl dict of views": WORKER
    + """
def f(wgs, b):
    views = {k: traced(w) for k, w in wgs.items()}
    return views['a'].compute(b)
""",
}

test_finds, test_leaves_alone, _ = family_of(FAILING, PASSING, {})
