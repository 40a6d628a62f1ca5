"""Rules RT101, RT102 and RT103: a carrier at one end, the decorator at the other."""

from __future__ import annotations

import pytest

from tests.lint.lint_sources import agree, family_of, found, one, write

WORKER = """
@ray.remote
class Worker(TracedActor):
    @accepts_trace_context
    def generate(self, x): return x
    def report(self): return 1
"""

FAILING = {
    "bare": WORKER + "ref = Worker.remote().generate.remote(1)  #! RT101",
    "variable": WORKER + "w = Worker.remote()\nw.generate.remote(1)  #! RT101",
    "options": WORKER + "w = Worker.remote()\nw.generate.options(num_returns=2).remote(1)  #! RT101",
    "pool": WORKER + "ws = [Worker.remote() for _ in range(2)]\nrefs = [w.generate.remote(1) for w in ws]  #! RT101",
    "zip": WORKER
    + "ws = [Worker.remote()]\nfor i, (w, x) in enumerate(zip(ws, [1])):\n    w.generate.remote(x)  #! RT101",
    "unknown handle": WORKER + "def call(actor):\n    return actor.generate.remote(1)  #! RT101",
    "named actor": WORKER + "ray.get_actor('w').generate.remote(1)  #! RT101",
    "lambda of a pool": WORKER + "list(pool.map(lambda actor, x: actor.generate.remote(x), xs))  #! RT101",
    "reference to remote": WORKER + "from functools import partial\np = partial(w.generate.remote, 1)  #! RT101",
    "async": """
        @ray.remote
        class Buffer:
            @accepts_trace_context
            async def push(self, x): ...
        async def main(buffer):
            await buffer.push.remote(1)  #! RT101
    """,
    "attribute": WORKER
    + "class Driver:\n    def __init__(self):\n        self.w = Worker.remote()\n"
    + "    def run(self):\n        return self.w.generate.remote(1)  #! RT101",
    "group": """
        class Worker:
            @accepts_trace_context
            def train(self, x): ...
        def step(group):
            group.run_all_workers_single_data("train", x=1)  #! RT101
            group.run_all_workers_sharded_data(method_name="train", common_kwargs={"a": 1})  #! RT101
    """,
    "group constant": """
        TRAIN = "train"
        class Worker:
            @accepts_trace_context
            def train(self, x): ...
        def step(group):
            group.run_single_worker_single_data(TRAIN, 0)  #! RT101
    """,
    "remote function": """
        @ray.remote
        @accepts_trace_context
        def score(x): return x
        score.remote(1)  #! RT101
    """,
    "constructor with spans": """
        @ray.remote
        class Worker(TracedActor):
            def __init__(self):
                super().__init__()
                with umbrella_span(G.U_MODEL_INIT, "rl.setup.model"): ...
        Worker.options(num_gpus=1).remote()  #! RT101
    """,
    "constructor that keeps the context": """
        @ray.remote
        class Collector(TracedActor):
            def __init__(self):
                self._trace = TraceContext.capture()
        Collector.remote()  #! RT101
    """,
    "collector, whose threads hang from its constructor's caller": """
        from raytrace_rl.integrations.collector import TracedCollector
        @ray.remote
        class Collector(TracedCollector):
            def __init__(self):
                self.running = False
        Collector.remote()  #! RT101
        traced(Collector).remote()
    """,
    "constructor of a base": """
        class Base(TracedActor):
            def __init__(self):
                self._load()
            def _load(self):
                with umbrella_span(G.U_MODEL_INIT, "rl.setup.model"): ...
        @ray.remote
        class Worker(Base): ...
        Worker.remote()  #! RT101
    """,
    "model_init": """
        @ray.remote
        class Worker(TracedActor, model_init=True): ...
        Worker.remote()  #! RT101
    """,
    "one of two branches": WORKER
    + "w = Worker.remote()\ndispatch_with_trace_context(w.generate, 1)\nw.generate.remote(2)  #! RT101",
    "helper given a plain method": WORKER
    + "def send(method, x): return method.remote(x)\nsend(traced(a).generate, 1)\nsend(a.generate, 1)  #! RT101",
    "helper given a plain handle": WORKER
    + "def send(actor, x): return actor.generate.remote(x)\nsend(traced(a), 1)\nsend(a, 1)  #! RT101",
    "helper called without the carrier": WORKER
    + "def send(actor, **kw): return actor.generate.remote(1, **kw)\nsend(a, **trace_context_kwargs())\n"
    + "send(a)  #! RT101",
    "helper whose every caller forgets": WORKER
    + "def send(actor, **kw): return actor.generate.remote(1, **kw)  #! RT101\nsend(a)",
    "helper that takes the method's name": """
        class Worker:
            @accepts_trace_context
            def logprobs(self): ...
            @accepts_trace_context
            def train(self): ...
        class Policy:
            def _run(self, *, worker_method, kw):
                return self.group.run_all_workers_sharded_data(worker_method, common_kwargs={**kw})
            def step(self):
                self._run(worker_method="logprobs", kw={})  #! RT101
                self._run(worker_method="train", kw=trace_context_kwargs())
    """,
    "view of a data plane": WORKER
    + "from raytrace_rl.integrations.data_plane import traced_data_plane\n"
    + "traced_data_plane(a).generate.remote(1)\na.generate.remote(1)  #! RT101",
    "getattr": WORKER + "getattr(a, 'generate').remote(1)  #! RT101",
    "applied by hand": """
        class Worker:
            def generate(self): ...
            generate = accepts_trace_context(generate)
        def run(a): a.generate.remote()  #! RT101
    """,
    "view that travelled through Ray": WORKER
    + """
@ray.remote
class Collector:
    def __init__(self, worker):
        self._worker = worker
    def run(self):
        self._worker.generate.remote(1)  #! RT101
Collector.remote(traced(Worker.remote()))
""",
    "never": "class Worker:\n    @accepts_trace_context\n    def generate(self): ...  #! RT102",
    "never, only called here": """
        class Worker:
            @accepts_trace_context
            def generate(self): ...  #! RT102
            def run(self): self.generate()
    """,
    "never, another class's method is": """
        @ray.remote
        class One:
            @accepts_trace_context
            def start(self): ...
        @ray.remote
        class Two:
            @accepts_trace_context
            def start(self): ...  #! RT102
        traced(One.remote()).start.remote()
    """,
    "never, a remote function": "@ray.remote\n@accepts_trace_context\ndef score(): ...  #! RT102",
    "undecorated, dispatched": WORKER.replace("@accepts_trace_context", "")
    + "w = Worker.remote()\ndispatch_with_trace_context(w.generate, 1)  #! RT103",
    "undecorated, traced": WORKER
    + "w = Worker.remote()\ntraced(w).generate.remote(1)\ntraced(w).report.remote()  #! RT103",
    "undecorated, a kept view": WORKER
    + "view = traced(Worker.remote())\nview.generate.remote(1)\nview.report.remote()  #! RT103",
    "undecorated, by hand": WORKER
    + "def run(a):\n    traced(a).generate.remote(1)\n    a.report.remote(**trace_context_kwargs())  #! RT103",
    "undecorated, of a group": """
        @ray.remote
        class Worker:
            def train(self): ...
        def run(group): group.run_all_workers_single_data("train", **trace_context_kwargs())  #! RT103
    """,
    "undecorated function": "@ray.remote\ndef score(): ...\ndispatch_with_trace_context(score)  #! RT103",
    "undecorated constructor": """
        @ray.remote
        class Worker:
            def __init__(self):
                with umbrella_span(G.U_MODEL_INIT, "rl.setup.model"): ...
        traced(Worker).remote()  #! RT103
    """,
    "group's method by a name that runs through names, or kept": """
        @ray.remote
        class B(TracedActor):
            @accepts_trace_context
            def p(self): ...
            @accepts_trace_context
            def q(self): ...
        N = ('p', 'q')
        def go(wg):
            for m in N: wg.run_all_workers_single_data(m)  #! RT101
            for m, k in (('p', 1), ('q', 2)): wg.run_all_workers_single_data(m, k)  #! RT101
            [wg.run_all_workers_single_data(m) for m in ['p']]  #! RT101
            for m in {'p': 1}: wg.run_all_workers_single_data(m)  #! RT101
            for m, k in {'p': 1}.items(): wg.run_all_workers_single_data(m)  #! RT101
            for i, m in enumerate(N): wg.run_all_workers_single_data(m)  #! RT101
            list(map(lambda m: wg.run_all_workers_single_data(m), N))  #! RT101
            wg.run_all_workers_single_data({'a': 'p', 'b': 'q'}[x])  #! RT101
            getattr(wg, 'run_all_workers_single_data')('p')  #! RT101
            run = wg.run_all_workers_single_data
            run('p')  #! RT101
            ex.submit(wg.run_all_workers_single_data, 'q')  #! RT101
            wg.run_all_workers_single_data.remote('q')  #! RT101
    """,
    "constructor that goes on in a function and another class": """
        def build():
            with umbrella_span(G.U_MODEL_INIT, 'rl.setup.model'): ...
        class E:
            def __init__(self): build()
        @ray.remote
        class W(TracedActor):
            def __init__(self): self.e = E()
        W.remote()  #! RT101
    """,
    "constructor with an integration's span": """
        from raytrace_rl.integrations.vllm import load_model_span
        @ray.remote
        class W(TracedActor):
            def __init__(self):
                with load_model_span(): ...
        W.remote()  #! RT101
        w = W.options(num_gpus=1)
        w.remote()  #! RT101
        traced(w).remote()
    """,
}

PASSING = {
    "dispatch": WORKER + "w = Worker.remote()\ndispatch_with_trace_context(w.generate, 1)",
    "dispatch, options": WORKER + "dispatch_with_trace_context(Worker.remote().generate.options(num_returns=2), 1)",
    "traced": WORKER + "traced(Worker.remote()).generate.remote(1)",
    "traced, options": WORKER + "traced(Worker.remote()).generate.options(num_returns=2).remote(1)",
    "variable": WORKER + "w = traced(Worker.remote())\nw.generate.remote(1)",
    "rebound": WORKER + "w = Worker.remote()\nw = traced(w)\nw.generate.remote(1)",
    "rebound in a loop": WORKER + "for w in ws:\n    w = traced(w)\n    w.generate.remote(1)",
    "attribute": WORKER
    + "class Driver:\n    def __init__(self, actor):\n        self.actor = traced(actor)\n"
    + "    def run(self):\n        return self.actor.generate.remote(1)",
    "attribute of another object": WORKER
    + "class Pool:\n    def __init__(self, actor):\n        self.view = traced(actor)\n"
    + "def run(pool):\n    return pool.view.generate.remote(1)",
    "pool": WORKER + "ws = [traced(w) for w in handles]\nrefs = [w.generate.remote(x) for w, x in zip(ws, xs)]",
    "pool by append": WORKER + "ws = []\nfor h in handles:\n    ws.append(traced(h))\nws[0].generate.remote(1)",
    "dictionary": WORKER + "ws = {}\nws['a'] = traced(h)\nfor name, w in ws.items():\n    w.generate.remote(1)",
    "subscript": WORKER + "ws = [traced(w) for w in handles]\nws[3 % 2].generate.remote(1)",
    "next of a cycle": WORKER
    + "import itertools\nws = itertools.cycle([traced(w) for w in handles])\nnext(ws).generate.remote(1)",
    "reference": WORKER + "from functools import partial\np = partial(dispatch_with_trace_context, w.generate, 1)",
    "submit": WORKER + "pool.submit(dispatch_with_trace_context, w.generate, 1)",
    "lambda of a pool": WORKER + "pool.map(lambda a, x: dispatch_with_trace_context(a.generate, x), xs)",
    "keywords": WORKER + "w.generate.remote(1, **trace_context_kwargs())",
    "keywords in a variable": WORKER + "kw = {'a': 1, **trace_context_kwargs()}\nw.generate.remote(1, **kw)",
    "keywords updated": WORKER + "kw = {'a': 1}\nkw.update(trace_context_kwargs())\nw.generate.remote(1, **kw)",
    "carrier kept": WORKER
    + "from raytrace_rl.context import current_trace_carrier\nc = current_trace_carrier()\n"
    + "w.generate.remote(1, _otel_carrier=c)",
    "common_kwargs": """
        class Worker:
            @accepts_trace_context
            def train(self, x): ...
        def step(group, loss):
            group.run_all_workers_sharded_data("train", common_kwargs={"loss": loss, **trace_context_kwargs()})
            group.run_all_workers_single_data("train", loss=loss, **trace_context_kwargs())
            dispatch_with_trace_context(group.run_all_workers_multiple_data, "train", loss=loss)
            traced(group).run_all_workers_single_data("train")
    """,
    "helper of keywords": WORKER
    + "def keywords(): return {'a': 1, **trace_context_kwargs()}\nw.generate.remote(1, **keywords())",
    "helper of views": WORKER + "def view(actor): return traced(actor)\nview(w).generate.remote(1)",
    "helper for methods": WORKER
    + "def send(method, *a): return dispatch_with_trace_context(method, *a)\nsend(w.generate, 1)",
    "helper given a view": WORKER + "def send(actor): return actor.generate.remote(1)\nsend(traced(w))",
    "helper given keywords": WORKER
    + "def send(actor, **kw): return actor.generate.remote(**kw)\nsend(w, **trace_context_kwargs())",
    "helper given a dictionary": WORKER
    + "def send(actor, extra): return actor.generate.remote(**extra)\nsend(w, trace_context_kwargs())",
    "helper without known callers": WORKER + "def send(actor, **kw): return actor.generate.remote(**kw)",
    "helper that takes the method's name": """
        class Worker:
            @accepts_trace_context
            def logprobs(self): ...
        class Policy:
            def _run(self, worker_method, kw):
                self.group.run_all_workers_sharded_data(worker_method, common_kwargs={**kw, **trace_context_kwargs()})
            def step(self):
                self._run("logprobs", {})
    """,
    "group that brings its own": """
        class Worker:
            @accepts_trace_context
            def train(self): ...
        class Group:
            def run_all_workers_single_data(self, method_name, **kw):
                return [dispatch_with_trace_context(getattr(w, method_name), **kw) for w in self.workers]
        def step(group): group.run_all_workers_single_data("train")
    """,
    "group of the tree, through a view": """
        class Worker:
            @accepts_trace_context
            def train(self): ...
        class Group:
            def run_all_workers_single_data(self, method_name, **kw):
                return [getattr(w, method_name).remote(**kw) for w in self.workers]
        def step(group): traced(group).run_all_workers_single_data("train")
    """,
    "dispatched by computed name": """
        class Worker:
            @accepts_trace_context
            def train(self): ...
        def step(worker, table): dispatch_with_trace_context(getattr(worker, table["train"]))
    """,
    "handed to something unknown": WORKER + "library.call(w.generate, 1)",
    "compiled graph": WORKER + "dag = w.generate.bind(1)",
    "undecorated, bare": WORKER + "traced(w).generate.remote(1)\nw2 = Worker.remote()\nw2.report.remote()",
    "another class of the same method": WORKER
    + "@ray.remote\nclass Other:\n    def generate(self): ...\n"
    + "Other.remote().generate.remote()\ntraced(Worker.remote()).generate.remote(1)",
    "class outside the tree": WORKER
    + "from elsewhere import Other\nOther.remote().generate.remote()\ntraced(w).generate.remote(1)",
    "constructor without spans": WORKER + "w = Worker.remote()\ntraced(w).generate.remote(1)",
    "constructor, traced": """
        @ray.remote
        class Worker(TracedActor):
            def __init__(self):
                with umbrella_span(G.U_MODEL_INIT, "rl.setup.model"): ...
        a = traced(Worker).remote()
        b = dispatch_with_trace_context(Worker.options(num_gpus=1))
        C = traced(Worker)
        c = C.options(num_gpus=1).remote()
    """,
    "plain constructor, traced": "@ray.remote\nclass Worker:\n    def __init__(self): ...\ntraced(Worker).remote()",
    "external base": "from lib import Base\n@ray.remote\nclass W(Base): ...\ntraced(W.remote()).train.remote()",
    "unknown decorator": """
        from lib import wired
        @ray.remote
        class Worker:
            @wired
            def train(self): ...
        traced(Worker.remote()).train.remote()
    """,
    "own decorator": """
        def wired(fn): return accepts_trace_context(fn)
        @ray.remote
        class Worker:
            @wired
            def train(self): ...
        traced(Worker.remote()).train.remote()
    """,
    "names the carrier itself": """
        @ray.remote
        class Worker:
            def train(self, _otel_carrier=None): ...
        traced(Worker.remote()).train.remote()
    """,
    "inherited": """
        class Base:
            @accepts_trace_context
            def train(self): ...
        @ray.remote
        class Worker(Base): ...
        traced(Worker.remote()).train.remote()
    """,
    "flush of a view": WORKER + "v = traced(Worker.remote())\nv.generate.remote(1)\nv.flush_telemetry.remote()",
    "static method above": """
        @ray.remote
        class Worker:
            @staticmethod
            @accepts_trace_context
            def train(): ...
        dispatch_with_trace_context(Worker.remote().train)
    """,
    "ray.remote as a function": """
        class Worker:
            @accepts_trace_context
            def train(self): ...
        Remote = ray.remote(num_gpus=1)(Worker)
        w = Remote.options(name="w").remote()
        dispatch_with_trace_context(w.train)
    """,
    "remote function": """
        @ray.remote
        @accepts_trace_context
        def score(): ...
        dispatch_with_trace_context(score)
        traced(score).remote()
        score.options(num_cpus=1).remote(**trace_context_kwargs())
    """,
    "local function": "@accepts_trace_context\ndef score(): ...",
    "group's method by a name that runs through names, or kept": """
        @ray.remote
        class B(TracedActor):
            @accepts_trace_context
            def p(self): ...
            @accepts_trace_context
            def q(self): ...
        N = ('p', 'q')
        def go(wg):
            for m in N: wg.run_all_workers_single_data(m, **trace_context_kwargs())
            for m in N: traced(wg).run_all_workers_single_data(m)
            run = traced(wg).run_all_workers_single_data
            run('p')
            dispatch_with_trace_context(getattr(wg, 'run_all_workers_single_data'), 'p')
            run2 = wg.run_all_workers_single_data
            dispatch_with_trace_context(run2, 'p')
            ex.submit(dispatch_with_trace_context, wg.run_all_workers_single_data, 'q')
    """,
    "methods that subclasses name": """
        class Worker:
            @accepts_trace_context
            def train(self): ...
            @accepts_trace_context
            def score(self): ...
        class Base:
            method = "train"
            def run(self, group): group.run_all_workers_single_data(self.method, **trace_context_kwargs())
        class Scoring(Base):
            method = "score"
    """,
    "constructor that makes an actor with spans": """
        @ray.remote
        class Inner(TracedActor):
            def __init__(self):
                with umbrella_span(G.U_MODEL_INIT, "rl.setup.model"): ...
        @ray.remote
        class Outer(TracedActor):
            def __init__(self): self.inner = traced(Inner).remote()
        Outer.remote()
    """,
}

CROSS_FILE = {
    "bare": {
        "pkg/__init__.py": "",
        "pkg/worker.py": WORKER,
        "pkg/driver.py": "from pkg.worker import Worker\nw = Worker.remote()\nw.generate.remote(1)  #! RT101",
    },
    "relative import, kept as an attribute": {
        "pkg/__init__.py": "",
        "pkg/worker.py": WORKER,
        "pkg/driver.py": """
            from .worker import Worker
            class Driver:
                def __init__(self): self.workers = [Worker.remote() for _ in range(2)]
        """,
        "pkg/async_driver.py": """
            from .driver import Driver
            class AsyncDriver(Driver):
                def run(self): return [w.generate.remote(1) for w in self.workers]  #! RT101
        """,
    },
    "dispatched elsewhere": {
        "worker.py": WORKER,
        "driver.py": "import worker as w\ndispatch_with_trace_context(w.Worker.remote().generate, 1)",
    },
    "never": {
        "worker.py": WORKER.replace("def generate(self, x): return x", "def generate(self, x): return x  #! RT102"),
        "driver.py": "from worker import Worker\nWorker.remote().report.remote()",
    },
    "helper elsewhere": {
        "worker.py": WORKER,
        "helpers.py": "def send(actor, x): return actor.generate.remote(x)",
        "driver.py": "from helpers import send\nsend(traced(a), 1)\nsend(a, 1)  #! RT101",
    },
    "helper of keywords elsewhere": {
        "worker.py": WORKER,
        "helpers.py": "def keywords(**kw): return {**kw, **trace_context_kwargs()}",
        "driver.py": "import helpers\ng.run_all_workers_multiple_data('generate', common_kwargs=helpers.keywords(a=1))",
    },
    "undecorated elsewhere": {
        "worker.py": WORKER,
        "driver.py": "from worker import Worker\nw = traced(Worker.remote())\nw.generate.remote(1)\n"
        "w.report.remote()  #! RT103",
    },
    "base elsewhere": {
        "base.py": "class Base:\n    @accepts_trace_context\n    def train(self): ...",
        "worker.py": "from base import Base\n@ray.remote\nclass Worker(Base): ...",
        "driver.py": "from worker import Worker\nWorker.remote().train.remote()  #! RT101",
    },
    "constructor elsewhere": {
        "worker.py": """
            @ray.remote
            class Worker(TracedActor):
                def __init__(self):
                    with umbrella_span(G.U_MODEL_INIT, "rl.setup.model"): ...
        """,
        "driver.py": "from worker import Worker\nw = Worker.remote()  #! RT101",
    },
    "re-exported decorator and dispatch": {
        "obs.py": "from raytrace_rl import accepts_trace_context as accepts, dispatch_with_trace_context as send",
        "worker.py": "# bare\nfrom obs import accepts\nclass W:\n    @accepts\n    def train(self): ...",
        "driver.py": "# bare\nfrom obs import send\ndef run(w): send(w.train)\ndef fail(w): w.train.remote()  #! RT101",
    },
    "module constant": {
        "names.py": "TRAIN = 'train'",
        "worker.py": "class W:\n    @accepts_trace_context\n    def train(self): ...",
        "driver.py": "import names\ndef run(g): g.run_all_workers_single_data(names.TRAIN)  #! RT101",
    },
}

#: How the library may be imported; `{w}` is a worker.
SPELLINGS = {
    "as": "from raytrace_rl import accepts_trace_context as a, dispatch_with_trace_context as d|a|d({w}.m)",
    "module": "import raytrace_rl as rt|rt.accepts_trace_context|rt.traced({w}).m.remote()",
    "submodule": "import raytrace_rl.dispatch|raytrace_rl.dispatch.accepts_trace_context|"
    "raytrace_rl.dispatch.dispatch_with_trace_context({w}.m)",
    "from package": "from raytrace_rl import instrumentation as i|i.accepts_trace_context|i.traced({w}).m.remote()",
    "star": "from raytrace_rl.instrumentation import *|accepts_trace_context|traced({w}).m.remote()",
    "alias": "import raytrace_rl as r\nsend = r.dispatch_with_trace_context|r.accepts_trace_context|send({w}.m)",
    "nemo": "from nemo_rl.telemetry.instrumentation import accepts_trace_context, trace_context_kwargs|"
    "accepts_trace_context|{w}.m.remote(**trace_context_kwargs())",
    "fallback": "try:\n    from raytrace_rl import traced\nexcept ImportError:\n    traced = None\nimport raytrace_rl|"
    "raytrace_rl.accepts_trace_context|traced({w}).m.remote()",
}


test_finds, test_leaves_alone, test_across_files = family_of(FAILING, PASSING, CROSS_FILE)


@pytest.mark.parametrize("name", SPELLINGS)
def test_imports_are_followed(name, tmp_path):
    """Catches a way of importing that hides the decorator (then nothing is found) or the dispatch (then it is)."""
    imports, decorator, call = SPELLINGS[name].split("|")
    worker = f"{imports}\nclass W:\n    @{decorator}\n    def m(self): ...\n"
    agree(tmp_path, one(f"{worker}def run(w): {call.format(w='w')}\n"))
    agree(tmp_path, one(f"{worker}def run(w): w.m.remote()  #! RT101\n"))


def test_the_rest_of_the_package_is_read_besides(tmp_path):
    """Catches a decorated method called undispatched because the file with its dispatch was not on the command line."""
    write(tmp_path, {"pkg/__init__.py": "", "pkg/worker.py": WORKER, "pkg/driver.py": "def f(w): w.generate.remote(1)"})
    assert found(tmp_path, "pkg/worker.py") == set()
    assert found(tmp_path, "pkg/driver.py") == {("pkg/driver.py", 2, "RT101")}
