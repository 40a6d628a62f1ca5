"""Rules RT201 to RT208 and RT301 to RT304: a span's group, name, place and attributes."""

from __future__ import annotations

from tests.lint.lint_sources import family_of

FAILING = {
    # RT201, RT202, RT203
    "leaf in umbrella_span": "with umbrella_span(G.GENERATION, 'rl.grpo.generation'): ...  #! RT201",
    "leaf in a decorator": "@umbrella_trace_fn(G.REWARD, 'rl.grpo.reward')  #! RT201\ndef f(): ...",
    "leaf as a string": "with umbrella_span('generation', 'rl.grpo.generation'): ...  #! RT201",
    "leaf in a streaming umbrella": """
        from raytrace_rl.instrumentation import streaming_umbrella_span
        from raytrace_rl.span_groups import RLSpanGroup
        with streaming_umbrella_span(RLSpanGroup.GENERATION, "rl.vllm.stream"): ...  #! RT201
    """,
    "umbrella in managed_span": "with managed_span(G.U_STEP, 'rl.grpo.step'): ...  #! RT202",
    "umbrella in trace_fn": "@trace_fn(G.U_ROLLOUT, 'rl.grpo.rollout')  #! RT202\ndef f(): ...",
    "umbrella without U_": "with umbrella_span(G.STEP, 'rl.grpo.step'): ...  #! RT203",
    "both": "with managed_span(G.STEP, 'rl.grpo.step'): ...  #! RT202 RT203",
    "library's leaf": """
        register_span_groups("mine", ["mine_outer", "mine_inner"], umbrellas=["mine_outer"])
        with umbrella_span("mine_inner", "mine.inner"): ...  #! RT201
        with managed_span("mine_outer", "mine.outer"): ...  #! RT202
    """,
    # RT204
    "name of one word": "with managed_span(G.GENERATION, 'generate'): ...  #! RT204",
    "name of two": "with managed_span(G.GENERATION, 'rl.generate'): ...  #! RT204",
    "name in upper case": "with managed_span(G.GENERATION, 'rl.grpo.Generate'): ...  #! RT204",
    "name of another tree": "with span_cm('grpo.job'): ...  #! RT204",
    "name with a blank": "@trace_fn(G.REWARD, 'rl.grpo.the reward')  #! RT204\ndef f(): ...",
    "f-string": "with managed_span(G.GENERATION, f'generate-{i}'): ...  #! RT204",
    "f-string, upper case": "with managed_span(G.GENERATION, f'rl.{algo}.Generate'): ...  #! RT204",
    "constant": "NAME = 'generate'\nwith managed_span(G.GENERATION, NAME): ...  #! RT204",
    "either of two": "with managed_span(G.REWARD, 'rl.grpo.reward' if a else 'reward'): ...  #! RT204",
    "keyword": "from nemo_rl.telemetry.instrumentation import managed_span\nimport raytrace_rl\n"
    "with managed_span(group='x', name='reward'): ...  #! RT204",
    "decorator without a name": "@trace_fn(G.REWARD)  #! RT204\ndef f(): ...\n"
    "@umbrella_trace_fn(G.U_STEP, tracer=t)  #! RT204\ndef g(): ...",
    "label of a timer": """
        from raytrace_rl.timer import Timer
        timer = Timer(span_prefix="rl.grpo")
        with timer.time("Policy Training", group=G.POLICY_UPDATE): ...  #! RT204
        with timer.time("policy training", group=G.POLICY_UPDATE) as span: ...  #! RT204
        with timer.time(label="a//b", group=G.REWARD): ...  #! RT204
        with timer.time(f"{phase}-x", group=G.REWARD): ...  #! RT204
    """,
    "label of a timer kept by an object": """
        from raytrace_rl.timer import ThreadSafeTimer, Timer
        class Loop:
            def __init__(self, timer):
                self.timer = Timer({"rank": 0}, span_prefix="rl.grpo")
                self.given = timer
            def step(self):
                with self.timer.time("Step", group=G.POLICY_UPDATE): ...  #! RT204
                with self.given.time("Step", group=G.POLICY_UPDATE): ...  #! RT204
    """,
    "timer without a prefix": """
        from raytrace_rl.timer import Timer
        timer = Timer()
        with timer.time("reward", group=G.REWARD): ...  #! RT204
    """,
    "prefix of a timer": """
        from raytrace_rl.timer import Timer
        timer = Timer(span_prefix="grpo")  #! RT204
        other = Timer(span_prefix="rl.Grpo")  #! RT204
        with timer.time("reward", group=G.REWARD): ...
    """,
    "umbrella group in a timer": """
        from raytrace_rl.timer import Timer
        timer = Timer(span_prefix="rl.grpo")
        with timer.time("step", group=G.U_STEP): ...  #! RT202
        with timer.time("step", group=G.STEP): ...  #! RT202 RT203
        with timer.time("reward", group=G.REWARD, **{"rl.iteration": 3}): ...  #! RT301
    """,
    # RT205
    "no guard": """
        with managed_span(G.GENERATION, "rl.grpo.generation") as span:
            span.set_attribute("rl.num_tokens", 1)  #! RT205
    """,
    "no guard, umbrella": """
        with umbrella_span(G.U_STEP, "rl.grpo.step") as span:
            x = 1
            if x:
                span.add_event("x")  #! RT205
    """,
    "second of a with": """
        with open("x") as f, span_cm("rl.grpo.x") as span:
            f.write(span.name)  #! RT205
    """,
    "async with, context of a link": """
        async def f():
            async with managed_span(G.GENERATION, "rl.grpo.generation") as span:
                return span.get_span_context()  #! RT205
    """,
    "exit stack": """
        def f(stack):
            span = stack.enter_context(managed_span(G.REWARD, "rl.grpo.reward"))
            span.set_attribute("rl.num", 1)  #! RT205
    """,
    "guard in another branch": """
        with managed_span(G.REWARD, "rl.grpo.reward") as span:
            if span is not None:
                span.set_attribute("rl.num", 1)
            span.add_event("done")  #! RT205
    """,
    "ended by hand": """
        from raytrace_rl.instrumentation import start_efficiency_span
        def f():
            span = start_efficiency_span("idle/refit_bubble")
            span.end()  #! RT205
    """,
    # RT206
    "token loop": """
        for token in stream:
            with managed_span(G.GENERATION, "rl.grpo.decode"): ...  #! RT206
    """,
    "range of tokens": """
        for i in range(max_new_tokens):
            with managed_span(G.GENERATION, "rl.grpo.decode"): ...  #! RT206
    """,
    "enumerate": """
        for i, t in enumerate(output_tokens):
            with span_cm("rl.grpo.decode"): ...  #! RT206
    """,
    "while": """
        while len(tokens) < limit:
            with managed_span(G.GENERATION, "rl.grpo.decode"): ...  #! RT206
    """,
    "async for": """
        async def f(engine):
            async for token in engine.stream():
                with managed_span(G.GENERATION, "rl.vllm.token"): ...  #! RT206
    """,
    "sequence length": """
        for position in range(config.seq_len - 1):
            with managed_span(G.GENERATION, "rl.grpo.decode"): ...  #! RT206
    """,
    "function that opens one": """
        @trace_fn(G.GENERATION, "rl.grpo.decode")
        def decode(t): ...
        for token in stream:
            decode(token)  #! RT206
    """,
    "method that opens one": """
        class Model:
            def _step(self):
                with managed_span(G.GENERATION, "rl.grpo.decode"): ...
            def run(self, prompt_tokens):
                return [self._step() for t in prompt_tokens]  #! RT206
    """,
    # RT207
    "bucket on an umbrella": "with umbrella_span(G.U_STEP, 'rl.grpo.step', **{'rl.bucket': 'idle'}): ...  #! RT207",
    "bucket on an evaluate_span": "from raytrace_rl.instrumentation import evaluate_span\n"
    "with evaluate_span('grpo', **{'rl.bucket': 'idle'}): ...  #! RT207",
    "bucket on an umbrella, later": """
        with umbrella_span(G.U_STEP, "rl.grpo.step") as span:
            safe_set_span_attributes(span, {"rl.bucket": "idle"})  #! RT207
    """,
    "bucket constant": """
        from raytrace_rl import umbrella_span, RLSpanGroup
        from raytrace_rl.semconv import RL_BUCKET
        import raytrace_rl.semconv as s
        with umbrella_span(RLSpanGroup.U_STEP, "rl.grpo.step", **{RL_BUCKET: "idle"}): ...  #! RT207
        with umbrella_span(RLSpanGroup.U_STEP, "rl.grpo.step", **{s.RL_BUCKET: "idle"}): ...  #! RT207
    """,
    "bucket on an emitted umbrella": """
        from raytrace_rl.instrumentation import emit_span
        from raytrace_rl import RLSpanGroup
        emit_span(RLSpanGroup.U_ROLLOUT, "rl.grpo.rollout", a, b, attributes={"rl.bucket": "wasted"})  #! RT207
        attributes = {"rl.bucket": "wasted"}  #! RT207
        emit_span(RLSpanGroup.U_ROLLOUT, "rl.grpo.rollout", a, b, attributes=attributes)
    """,
    # RT208
    "tracer": "from opentelemetry import trace\ntracer = trace.get_tracer(__name__)  #! RT208",
    "tracer, imported": "from opentelemetry.trace import get_tracer as g\nt = g('x')  #! RT208",
    "tracer of the provider": "from opentelemetry import trace as o\no.get_tracer_provider().get_tracer('x')  #! RT208",
    # RT301
    "iteration": "with managed_span(G.REWARD, 'rl.grpo.reward', **{'rl.iteration': 3}): ...  #! RT301",
    "iteration in a variable": """
        def f(step):
            attributes = {"rl.x": 1}
            attributes["rl.iteration"] = step  #! RT301
            with managed_span(G.REWARD, "rl.grpo.reward", **attributes): ...
    """,
    "iteration, set later": """
        with managed_span(G.REWARD, "rl.grpo.reward") as span:
            if span is not None:
                span.set_attribute("rl.iteration", 1)  #! RT301
    """,
    "iteration, constant": "from raytrace_rl.semconv import RL_ITERATION\nfrom raytrace_rl import span_attributes\n"
    "from raytrace_rl.instrumentation import span_attributes\nwith span_attributes({RL_ITERATION: 1}): ...  #! RT301",
    # RT302
    "prompt": "with managed_span(G.REWARD, 'rl.grpo.reward', prompt=prompt): ...  #! RT302",
    "cut prompt": "with managed_span(G.REWARD, 'rl.grpo.reward', **{'rl.head': prompts[0][:80]}): ...  #! RT302",
    "string of messages": "with managed_span(G.REWARD, 'rl.grpo.reward', m=str(sample.messages)): ...  #! RT302",
    "item of a batch": "with managed_span(G.REWARD, 'rl.grpo.reward', x=batch['prompt']): ...  #! RT302",
    "f-string of a completion": "with span_cm('rl.grpo.x', x=f'got {completion}'): ...  #! RT302",
    "decoded": "with span_cm('rl.grpo.x', x=self.tokenizer.decode(ids)): ...  #! RT302",
    "key says it": "with span_cm('rl.grpo.x', **{'rl.response': out.text}): ...  #! RT302",
    "a response, whatever it is called": """
        with managed_span(G.REWARD, "rl.grpo.reward", response=out, **{"rl.prompt": x}): ...  #! RT302
        with managed_span(G.REWARD, "rl.grpo.reward") as span:
            if span is not None:
                span.set_attribute("rl.message", m)  #! RT302
    """,
    "dumped": "import json\nwith span_cm('rl.grpo.x', x=json.dumps(messages)): ...  #! RT302",
    # RT303
    "shape": "with span_cm('rl.grpo.x', x=tensor.shape): ...  #! RT303",
    "shape as a string": "with span_cm('rl.grpo.x', **{'rl.x': str(batch['ids'].shape)}): ...  #! RT303",
    "shape in an f-string": "with span_cm('rl.grpo.x', x=f'{t.shape}'): ...  #! RT303",
    "shape in a variable": "def f(t):\n    x = list(t.shape)\n    with span_cm('rl.grpo.x', x=x): ...  #! RT303",
    "size": "with span_cm('rl.grpo.x', x=t.size(), y=str(batch.logits.size())): ...  #! RT303",
    "size as a list": "with span_cm('rl.grpo.x', **{'rl.x': list(input_ids.size())}): ...  #! RT303",
    "size in an f-string": "with span_cm('rl.grpo.x', x=f'{mask.size()}'): ...  #! RT303",
    # RT304
    "literal": "init = {'nv.dl.rank': 0}  #! RT304",
    "f-string literal": "key = f'nv.dl.topology.size.{axis}'  #! RT304",
    "decode loops without a count of tokens": """
        def f(model, tokens):
            while True:
                with managed_span(G.GENERATION, 'rl.x.r'):  #! RT206
                    next_token = model(tokens)
            while not finished(tokens):
                token = model.step()
                with managed_span(G.GENERATION, 'rl.x.r'): ...  #! RT206
            while (tok := model.decode()) is not None:
                with managed_span(G.GENERATION, 'rl.x.r'): ...  #! RT206
            for i in range(100):
                with managed_span(G.GENERATION, 'rl.x.r'):  #! RT206
                    next_tokens = logits.argmax(-1)
    """,
    "a guard by another name": """
        def f(out, x):
            with managed_span(G.REWARD, 'rl.x.r') as span:
                out = g(x)
                if out: span.set_attribute('a', 1)  #! RT205
    """,
}

PASSING = {
    "right groups": """
        with umbrella_span(G.U_STEP, "rl.grpo.step"), managed_span(G.GENERATION, "rl.vllm.generate"): ...
        @umbrella_trace_fn(G.U_ROLLOUT, "rl.grpo.rollout")
        def f(): ...
        @trace_fn(G.REWARD, **how)
        def g(): ...
        @trace_fn(*how)
        def h(): ...
        with managed_span(group, name): ...
        with umbrella_span("of another library", "rl.other.x"): ...
    """,
    "library's groups": """
        class Mine:
            OUTER = "mine_outer"
            INNER = "mine_inner"
        register_span_groups("mine", Mine, umbrellas=(Mine.OUTER,))
        with umbrella_span(Mine.OUTER, "mine.outer"), managed_span(Mine.INNER, f"mine.inner.{kind}"): ...
    """,
    "names": """
        for name in names:
            with span_cm(name): ...
        with span_cm("rl.startup"), span_cm("rl.setup.ray_init"), span_cm("rl.data_plane.get.batch"): ...
        with span_cm(f"rl.{algo}.{phase}"), span_cm(f"rl.setup.{phase}"), span_cm(f"{prefix}.x"): ...
        with span_cm(f"rl.{path}"), span_cm("rl.%s.step" % algo), span_cm("rl.{}.step".format(algo)): ...
        with span_cm("rl." + algo + ".step"): ...
    """,
    "guards": """
        def f(ok):
            with managed_span(G.REWARD, "rl.grpo.reward") as span:
                safe_set_span_attributes(span, {"rl.n": 1})
                if span is not None and ok:
                    span.set_attribute("rl.n", 1)
                if span:
                    span.add_event("x")
                span and span.add_event("x")
                name = span.name if span is not None else ""
                if span is None:
                    return
                span.add_event("after")
            with span_cm("rl.grpo.x") as other:
                assert other is not None
                other.add_event("x")
            with span_cm("rl.grpo.x") as third:
                enabled = third is not None
                if enabled:
                    third.add_event("x")
            with span_cm("rl.grpo.x") as fourth:
                try:
                    fourth.add_event("x")
                except AttributeError: ...
    """,
    "spans of other libraries": """
        with tracer.start_as_current_span("x") as span:
            span.set_attribute("a", 1)
    """,
    "given another value": """
        with managed_span(G.REWARD, "rl.grpo.reward") as span:
            span = span or other
            span.add_event("x")
    """,
    "group asked for": """
        from raytrace_rl.instrumentation import is_span_group_enabled, managed_span
        with managed_span("reward", "rl.grpo.reward") as span:
            if is_span_group_enabled("reward"):
                span.add_event("x")
    """,
    "ended by hand": """
        from raytrace_rl.instrumentation import start_efficiency_span
        def f():
            span = start_efficiency_span("idle/refit_bubble")
            if span is not None:
                span.end()
    """,
    "other loops": """
        with managed_span(G.GENERATION, "rl.grpo.generation"):
            for token in stream: ...
        for step in range(steps):
            with managed_span(G.GENERATION, "rl.grpo.generation"): ...
        for start in range(0, num_tokens, chunk):
            with managed_span(G.GENERATION, "rl.grpo.generation"): ...
        while num_tokens < token_budget:
            with managed_span(G.GENERATION, "rl.grpo.generation"): ...
        for batch in token_batches:
            with managed_span(G.GENERATION, "rl.grpo.generation"): ...
        for tokenizer in tokenizers:
            with managed_span(G.GENERATION, "rl.grpo.generation"): ...
    """,
    "function defined in a token loop": """
        for token in stream:
            def later():
                with managed_span(G.GENERATION, "rl.grpo.generation"): ...
    """,
    "buckets": """
        with managed_span(G.EFFICIENCY, "rl.grpo.wait", **{"rl.bucket": "idle"}) as span:
            safe_set_span_attributes(span, {"rl.bucket": "idle"})
    """,
    "tracers": """
        from raytrace_rl import get_telemetry_handle, managed_span
        tracer = get_telemetry_handle().tracer
        mine = provider.get_tracer("x")
        with managed_span("reward", "rl.grpo.reward", tracer=mine): ...
    """,
    "measures of text": """
        with span_cm("rl.grpo.x", prompts=len(prompts), **{
            "rl.num_prompts": num_prompts, "rl.prompt_length": prompt.length, "rl.mean": np.mean(responses),
            "rl.prompt_id": prompt_id, "rl.has_prompt": prompt is not None, "rl.is": prompt in seen,
            "rl.num_generations_per_prompt": num_generations_per_prompt, "rl.status": response.status_code,
            "rl.hash": hash(prompt), "rl.n": prompts.shape[0], "rl.dtype": str(prompts.dtype), "rl.text": "fixed",
        }): ...
    """,
    "numbers under a text's name": """
        with span_cm("rl.grpo.x", prompt=i, response=response_id, **{
            "rl.prompt": num_prompts, "rl.message": 3, "rl.response": "fixed", "rl.completion": len(x),
            "rl.prompts": rows, "per_prompt": limit,
        }): ...
    """,
    "timers": """
        from raytrace_rl.timer import Timer
        from time import time
        timer = Timer(span_prefix=f"rl.{algorithm}")
        plain = Timer()
        with timer.time("policy_training", group=G.POLICY_UPDATE), timer.time("idle/x", group=G.EFFICIENCY): ...
        with plain.time("Anything That Is Only Logged"), plain.time("b", span=span_cm("rl.grpo.b")): ...
        with whatever.time(label, group=G.REWARD), Timer(**settings).time("x", group=group): ...
        register_span_groups("mine", ["mine_inner"])
        mine = Timer(span_prefix="mine")
        with mine.time("inner", group="mine_inner"): ...
    """,
    "emitted": """
        from raytrace_rl.instrumentation import emit_span
        emit_span("efficiency", "rl.wasted.x", a, b, attributes={"rl.bucket": "wasted"})
        emit_span(group, "rl.wasted.x", a, b, attributes={"rl.bucket": "wasted"})
    """,
    "sizes that are numbers": """
        with span_cm("rl.grpo.x", a=t.size(0), b=self.queue.size(), c=replay_buffer.size(), d=str(device_mesh.size()),
                     e=pool().size(), f=t.size(dim=1)): ...
    """,
    "log message": "import logging\nlogging.info('prompt %s', prompt)\nd = {'prompt': prompt, 'rl.iteration': 1}",
    "dimension": "with span_cm('rl.grpo.x', **{'rl.num_tokens': t.shape[1], 'rl.rows': int(t.shape[0])}): ...",
    "docstring": '"""nv.dl.rank is written by the library."""\nx = 1',
    "prefix": "ours = key.startswith('nv.dl.')",
    "loops over pages, turns and credentials": """
        def f(client, page_token, tokens):
            while page_token:
                with managed_span(G.REWARD, 'rl.x.r'):
                    page_token = client.list(page_token).next_page_token
            while True:
                auth_token = client.refresh()
                with managed_span(G.REWARD, 'rl.x.r'): ...
            while not env.done():
                with managed_span(G.REWARD, 'rl.x.r'):
                    response_tokens = client.generate()
            while turn < max_turns:
                with managed_span(G.REWARD, 'rl.x.r'):
                    tokens.extend(client.generate(tokens))
            while True:
                with managed_span(G.REWARD, 'rl.x.r'): ...
                for i in range(3): next_token = 1
    """,
    "guards among other names that calls gave": """
        from raytrace_rl.span_groups import is_span_group_enabled
        def f(out, x):
            with managed_span(G.REWARD, 'rl.x.r') as span:
                out = g(x)
                on = h(out)
                if on and out and span: span.set_attribute('a', 1)
                enabled = not (span is None)
                if enabled: span.set_attribute('a', 1)
                live = is_span_group_enabled('reward') and out
                if out and live: span.set_attribute('a', 1)
    """,
}

CROSS_FILE = {
    "groups registered elsewhere": {
        "groups.py": "class Mine:\n    OUTER = 'mine_out'\nregister_span_groups('mine', Mine, umbrellas=['mine_out'])",
        "main.py": "from groups import Mine\nwith managed_span(Mine.OUTER, 'mine.x'): ...  #! RT202",
    },
    "group class under another name": {
        "telemetry.py": "from raytrace_rl import RLSpanGroup as Groups",
        "main.py": "from telemetry import Groups\nwith umbrella_span(Groups.REWARD, 'rl.grpo.reward'): ...  #! RT201\n"
        "with umbrella_span(Groups.ROLLOUT, 'rl.grpo.rollout'): ...  #! RT203",
    },
    "names elsewhere": {
        "names.py": "GOOD = 'rl.grpo.step'\nBAD = 'step'\nclass Spans:\n    BAD = 'Step'",
        "main.py": "import names\nfrom names import BAD, Spans\nwith span_cm(names.GOOD): ...\n"
        "with span_cm(BAD): ...  #! RT204\nwith span_cm(Spans.BAD): ...  #! RT204",
    },
    "opener re-exported": {
        "obs.py": "from raytrace_rl import managed_span as span",
        "main.py": "# bare\nfrom obs import span\nwith span('reward', 'rl.grpo.reward') as s:\n    s.end()  #! RT205",
    },
    "function that opens one": {
        "model.py": "def decode(t):\n    with managed_span(G.GENERATION, 'rl.grpo.decode'): ...",
        "main.py": "import model\nfor token in stream:\n    model.decode(token)  #! RT206",
    },
    "group of a bucketed umbrella": {
        "groups.py": "OUTER = 'mine_outer'\nregister_span_groups('mine', [OUTER], umbrellas=[OUTER])",
        "main.py": "import groups\nwith umbrella_span(groups.OUTER, 'mine.x', **{'rl.bucket': 'idle'}): ...  #! RT207",
    },
    "tracer re-exported": {
        "compat.py": "from opentelemetry.trace import get_tracer",
        "main.py": "from compat import get_tracer\nt = get_tracer('x')  #! RT208",
    },
    "keys elsewhere": {
        "keys.py": "STEP = 'rl.iteration'\nHEAD = 'rl.head'",
        "main.py": """
            import keys
            with span_cm("rl.grpo.x", **{
                keys.STEP: 1,  #! RT301
                keys.HEAD: prompt,  #! RT302
                "rl.shape": t.shape,  #! RT303
            }): ...
        """,
    },
    "semconv of one's own": {"semconv.py": "RANK = 'nv.dl.rank'", "main.py": "RANK = 'nv.dl.rank'  #! RT304"},
}


test_finds, test_leaves_alone, test_across_files = family_of(FAILING, PASSING, CROSS_FILE)


def test_a_name_is_judged_by_its_fixed_parts():
    """Catches f-strings that are refused for what is known only at run time, or let pass whatever they begin with."""
    from raytrace_rl.lint.naming import is_span_name
    from raytrace_rl.lint.strings import HOLE

    right = ["rl.grpo.step", "rl.startup", f"rl.{HOLE}", f"{HOLE}", f"rl.{HOLE}.x", f"rl.grpo.{HOLE}_{HOLE}", "own.x"]
    wrong = ["", "rl", "rl.", "rl.grpo", "rl..x", "rl.grpo.", "Rl.grpo.x", f"x.{HOLE}", f"rl.G.{HOLE}", "other.x"]
    assert [name for name in right if not is_span_name(name, {"own"})] == []
    assert [name for name in wrong if is_span_name(name, {"own"})] == []
