"""Rules RT401 to RT403: a metric's name and labels."""

from __future__ import annotations

from tests.lint.lint_sources import family_of

TEED = "from raytrace_rl.vocabulary import TeedMetric, register_teed_metrics\n"
METER = "from raytrace_rl import get_telemetry_handle\nmeter = get_telemetry_handle().meter\n"

FAILING = {
    "under dl": TEED + "TeedMetric('loss', 'dl.train.loss')  #! RT401",
    "two parts": TEED + "TeedMetric('loss', 'rl.loss')  #! RT401",
    "keyword": TEED + "TeedMetric(logger_key='loss', name='train/loss')  #! RT401",
    "constant": TEED + "NAME = 'rl.Loss.mean'\nTeedMetric('loss', NAME)  #! RT401",
    "rows": TEED
    + "ROWS = (\n    TeedMetric('a', 'rl.a.b'),\n    TeedMetric('b', 'b'),  #! RT401\n)\nregister_teed_metrics(ROWS)",
    "of NeMo-RL": "from nemo_rl.telemetry.vocabulary import TeedMetric\nTeedMetric('a', 'dl.a.b')  #! RT401",
    "a meter's": METER
    + "c = meter.create_counter('requests')  #! RT401\nh = meter.create_histogram(name='dl.x.y')  #! RT401",
    "a spec's": "from raytrace_rl.metrics import MetricSpec\nMetricSpec('a', 'theirs.a.b')  #! RT401",
    "label of a step": METER + "c = meter.create_counter('rl.a.b')\nc.add(1, {'step': step})  #! RT402",
    "label of a request": METER
    + "c = meter.create_gauge('rl.a.b')\nc.set(1, attributes={'rl.request_id': r.id})  #! RT402",
    "label with a step in it": METER
    + "c = meter.create_histogram('rl.a.b')\nc.record(1, {'window': f'from-{global_step}'})  #! RT402",
    "label of a new id": METER
    + "import uuid\nc = meter.create_counter('rl.a.b')\nc.add(1, {'who': str(uuid.uuid4())})  #! RT402",
    "label in a variable": METER
    + "c = meter.create_counter('rl.a.b')\ndef f(iteration):\n    labels = {'phase': 'x'}\n"
    + "    labels['rl.iteration'] = iteration  #! RT402\n    c.add(1, labels)",
    "instrument kept by an object": """
        from raytrace_rl import get_telemetry_handle
        class Engine:
            def __init__(self, meter):
                self._done = meter.create_counter("rl.vllm.done")
            def finish(self, request):
                self._done.add(1, {"prompt_id": request.prompt_id})  #! RT402
    """,
    "record_metrics": "from raytrace_rl.metrics import record_metrics\n"
    "record_metrics(meter, 'rl', {'a': 1}, {'iteration': i})  #! RT402\n"
    "record_metrics(meter, 'rl', {'a': 1}, attributes={'sample_id': i})  #! RT402",
    "observation": "import raytrace_rl\nfrom opentelemetry.metrics import Observation\n"
    "def observe(options): yield Observation(1, {'step': step})  #! RT402",
    "step in the name": TEED + "TeedMetric('loss', f'rl.loss.step_{step}')  #! RT403",
    "request in the name": METER + "meter.create_gauge('rl.latency.%s' % request_id)  #! RT403",
    "added to the name": METER + "meter.create_gauge('rl.latency.' + str(self.iteration))  #! RT403",
    "formatted into the name": METER + "meter.create_gauge('rl.latency.{}'.format(prompt_id))  #! RT403",
    "growing, by way of names and helpers": """
        def f(m, step):
            suffix = str(step)
            m.create_counter(f'rl.x.{suffix}')  #! RT403
            name = 'rl.x.' + suffix
            m.create_counter(name)  #! RT403
        def make(m, name): return m.create_counter(name)
        def g(m, step): make(m, f'rl.x.{step}')  #! RT403
        def h(m, step, c_counter):
            tag = f'{step}'
            c_counter.add(1, {'tag': tag})  #! RT402
    """,
}

PASSING = {
    "names": TEED
    + "TeedMetric('a', 'rl.reward.mean')\nTeedMetric('b', 'rl.grad_norm')\nTeedMetric('c', 'rl.learning_rate')\n"
    + "TeedMetric('d', 'rl.entropy')\nTeedMetric('e', 'rl.sft_v2.loader.latency.max')\n"
    + "TeedMetric('f', name)\nTeedMetric('g', f'rl.{x}')",
    "an owner's own": "from raytrace_rl.metrics import MetricSpec, register_metric_group\n"
    "register_metric_group('gym', [MetricSpec('a', 'gym.env.steps')])",
    "a meter of another program": "# bare\nmeter.create_counter('http.requests')",
    "a meter of another program, with a label": "# bare\nfrom opentelemetry import metrics\n"
    "metrics.get_meter('x').create_counter('http.requests')",
    "labels": METER
    + "c = meter.create_counter('rl.a.b')\nc.add(1)\nc.add(1, {'rl.worker_group': group, 'phase': 'step'})\n"
    + "c.add(1, {'stage': 'warmup' if step < 10 else 'steady', 'env': f'env-{env}'})",
    "other things called add and set": "seen.add((1, {'step': step}))\ncache.set('key', {'step': step})\n"
    "row.record(1, {'step': step})",
    "bounded parts of a name": TEED + "TeedMetric('a', f'rl.reward.{environment}')",
    "names of few values": """
        def f(m, names, step):
            for name in names: m.create_counter(f'rl.x.{name}')
            for step in ('read', 'filter'): m.create_counter(f'rl.data.{step}')
            phase = f'p{step}'
            m.create_counter(f'rl.x.{phase}')
            kind = 'a' if step else 'b'
            m.create_counter(f'rl.x.{kind}')
            m.create_counter(f'rl.x.{step % 2}')
    """,
}

CROSS_FILE = {
    "name elsewhere": {
        "names.py": "LOSS = 'dl.loss.mean'",
        "main.py": TEED + "import names\nTeedMetric('loss', names.LOSS)  #! RT401",
    },
    "owner elsewhere": {
        "owner.py": "from raytrace_rl.metrics import register_metric_group\nregister_metric_group('gym', SPECS)",
        "main.py": "from raytrace_rl.metrics import MetricSpec\nMetricSpec('a', 'gym.env.steps')\n"
        "MetricSpec('b', 'x.y.z')  #! RT401",
    },
    "instrument elsewhere": {
        "instruments.py": METER + "finished = meter.create_counter('rl.vllm.finished')",
        "main.py": "import instruments\nfrom instruments import finished\n"
        "finished.add(1, {'request_id': r})  #! RT402\ninstruments.finished.add(1, {'request_id': r})  #! RT402",
    },
    "class elsewhere": {
        "rows.py": "from raytrace_rl.vocabulary import TeedMetric as Row",
        "main.py": "# bare\nfrom rows import Row\nRow('loss', f'rl.loss.{step}')  #! RT403",
    },
}


test_finds, test_leaves_alone, test_across_files = family_of(FAILING, PASSING, CROSS_FILE)
