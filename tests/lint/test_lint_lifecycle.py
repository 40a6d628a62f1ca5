"""Rules RT104, RT105 and RT501: how an actor's telemetry starts and ends, and what code may import."""

from __future__ import annotations

from tests.lint.lint_sources import family_of

ACTOR = "@ray.remote\nclass Worker(TracedActor):\n    def work(self): ...\n"

FAILING = {
    "kill": ACTOR + "w = Worker.remote()\nray.kill(w)  #! RT104",
    "kill of a pool": ACTOR
    + "class Driver:\n    def __init__(self):\n        self.ws = [Worker.remote()]\n    def end(self):\n"
    + "        for w in self.ws:\n            ray.kill(w, no_restart=True)  #! RT104",
    "kill, flushed too late": ACTOR
    + "from raytrace_rl import flush_actors\ndef f():\n    w = Worker.remote()\n"
    + "    ray.kill(w)  #! RT104\n    flush_actors([w])",
    "kill of what is only decorated": """
        @ray.remote
        class Worker:
            @accepts_trace_context
            def work(self): ...
        w = Worker.remote()
        traced(w).work.remote()
        ray.kill(w)  #! RT104
    """,
    "in a method": """
        @ray.remote
        class Worker:
            def generate(self):
                init_telemetry_worker()  #! RT105
    """,
    "at import": "init_telemetry_worker(rank=0)  #! RT105",
    "in a helper of a method": """
        def start(): init_telemetry_worker()  #! RT105
        class Worker:
            def __init__(self): start()
            def generate(self): start()
    """,
    "in a lambda": "start = lambda: init_telemetry_worker()  #! RT105",
    "of NeMo-RL": "import nemo_rl.telemetry.setup as s\ndef post_init(self): s.init_telemetry_worker()  #! RT105",
    "private module": "from raytrace_rl._state import enabled  #! RT501",
    "private module of the package": "from raytrace_rl import _state, managed_span  #! RT501",
    "private name": "from raytrace_rl.setup import _lock  #! RT501",
    "import of a private module": "import raytrace_rl._span as span  #! RT501",
    "inside a function": "def f():\n    from nemo_rl.telemetry._fallbacks import managed_span  #! RT501",
    "reaching by attribute, by name and by import_module": """
        import raytrace_rl as rt, importlib
        rt._state.enabled  #! RT501
        from raytrace_rl import config
        config._x()  #! RT501
        importlib.import_module('raytrace_rl._span')  #! RT501
        getattr(rt, '_state')  #! RT501
    """,
}

PASSING = {
    "flush before": ACTOR + "from raytrace_rl import flush_actors\ndef f(w=None):\n    w = Worker.remote()\n"
    "    flush_actors([w])\n    ray.kill(w)",
    "flush by hand": ACTOR + "w = Worker.remote()\nray.get(w.flush_telemetry.remote())\nray.kill(w)",
    "kill of others": "@ray.remote\nclass Plain: ...\nw = Plain.remote()\nray.kill(w)\nray.kill(unknown)",
    "constructors": """
        from dataclasses import dataclass
        class Worker:
            def __init__(self):
                init_telemetry_worker(worker_group="x")
        @dataclass
        class Other:
            def __post_init__(self): init_telemetry_worker()
    """,
    "hook": """
        def hook(): init_telemetry_worker()
        ray.init(runtime_env={"worker_process_setup_hook": hook})
    """,
    "hook by path": """
        def hook(): init_telemetry_worker()
        env = {}
        env["worker_process_setup_hook"] = "main.hook"
    """,
    "main": """
        def main():
            init_telemetry_worker()
        def other():
            init_telemetry_worker()
        if __name__ == "__main__":
            init_telemetry_worker()
            main()
            other()
    """,
    "helper of constructors": """
        def start(): init_telemetry_worker()
        class Worker:
            def __init__(self): start()
    """,
    "public imports": "from raytrace_rl import managed_span, __version__\n"
    "from raytrace_rl.setup import shutdown_telemetry\nfrom other._private import x\nimport raytrace_rl.setup",
    "public attributes, and private ones of others": """
        import raytrace_rl
        raytrace_rl.__version__
        raytrace_rl.config.TelemetryConfig
        class X:
            _state = 1
        X._state
    """,
}

CROSS_FILE = {
    "kill elsewhere": {
        "worker.py": ACTOR,
        "driver.py": "from worker import Worker\nclass D:\n    def __init__(self): self.w = Worker.remote()",
        "end.py": "from driver import D\nclass E(D):\n    def end(self): ray.kill(self.w)  #! RT104",
    },
    "helper elsewhere": {
        "start.py": "def start(): init_telemetry_worker()\ndef late(): init_telemetry_worker()  #! RT105",
        "worker.py": "from start import *\nclass W:\n    def __init__(self): start()\n    def run(self): late()",
    },
    "hook elsewhere": {
        "hooks.py": "def hook(): init_telemetry_worker()",
        "main.py": "import hooks\nray.init(runtime_env=dict(worker_process_setup_hook=hooks.hook))",
    },
    "tests may": {"test_x.py": "from raytrace_rl import _state", "main.py": "from raytrace_rl import _state  #! RT501"},
}


test_finds, test_leaves_alone, test_across_files = family_of(FAILING, PASSING, CROSS_FILE)
