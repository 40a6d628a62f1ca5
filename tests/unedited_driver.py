"""A Ray program that knows nothing of raytrace_rl: what ``raytrace-rl run`` is held against. Run as a script."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from abc import ABC, abstractmethod

import ray


class Base(ABC):
    """A class that actors inherit from."""

    def inherited(self, x):
        return x + 1

    @abstractmethod
    def plain(self, x): ...


@ray.remote(max_restarts=1)
class Worker(Base):
    """An actor with one method of each kind."""

    def __init__(self, peer=None, *, scale=2, lock=threading.Lock):
        self.peer = peer
        self.scale = scale

    def plain(self, x, y=threading.Lock):
        return self.helper(x) * self.scale

    def helper(self, x):
        return x

    def ask_peer(self, x):
        return ray.get(self.peer.plain.remote(x))

    def ask_peer_from_thread(self, x):
        found = []
        thread = threading.Thread(target=lambda: found.append(self.ask_peer(x)))
        thread.start()
        thread.join()
        return found[0]

    def stream(self, n):
        for i in range(n):  # Ray sends statistics into a generator, which range() cannot take
            yield i

    @ray.method(num_returns=2)
    def pair(self):
        return 1, 2

    made = 0

    @staticmethod
    def static(x, y=threading.Lock):
        return x

    @classmethod
    def of_class(cls, x):
        cls.made += cls.static(x)  # a local call
        return cls.__name__, cls.made

    def fail(self):
        raise LookupError("the user's own")

    def die(self):
        os._exit(1)


@ray.remote
class Loop:
    """An asynchronous actor."""

    async def one(self, x):
        await asyncio.sleep(0)
        return x

    async def stream(self, n):
        for i in range(n):
            yield i


@ray.remote
def double(x):
    """A remote function."""
    return 2 * x


@ray.remote
def stream(n):
    """A remote generator."""
    for i in range(n):  # as above
        yield i


def use_everything():
    """Makes each kind of call, and checks what comes back."""
    peer = Worker.remote()
    worker = Worker.options(name="worker", max_task_retries=1).remote(peer, scale=3)
    assert ray.get(worker.plain.remote(2)) == 6
    assert ray.get(worker.plain.options(name="renamed").remote(x=3)) == 9
    assert ray.get(worker.inherited.remote(2)) == 3
    assert ray.get(worker.ask_peer.remote(2)) == 4
    assert ray.get(worker.ask_peer_from_thread.remote(2)) == 4
    assert [ray.get(ref) for ref in worker.stream.remote(3)] == [0, 1, 2]
    assert ray.get(list(worker.pair.remote())) == [1, 2]
    assert ray.get(worker.static.remote(5)) == 5
    assert ray.get(ray.get_actor("worker").static.remote(x=5)) == 5
    assert ray.get(worker.of_class.remote(5)) == ("Worker", 5)
    raises(TypeError, lambda: worker.static.remote())
    raises(TypeError, lambda: worker.of_class.remote(1, 2))
    raises(LookupError, lambda: ray.get(worker.fail.remote()))
    raises(TypeError, lambda: worker.plain.remote(1, 2, 3))
    loop = Loop.remote()
    assert ray.get(loop.one.remote(1)) == 1
    assert [ray.get(ref) for ref in loop.stream.remote(3)] == [0, 1, 2]
    assert ray.get(double.remote(4)) == 8
    assert ray.get(double.options(name="renamed").remote(4)) == 8
    assert [ray.get(ref) for ref in stream.remote(3)] == [0, 1, 2]
    found = []
    thread = threading.Thread(target=lambda: found.append(ray.get(ray.get_actor("worker").plain.remote(5))))
    thread.start()
    thread.join()
    assert found == [15]
    raises(ray.exceptions.RayActorError, lambda: ray.get(worker.die.options(max_task_retries=0).remote()))
    assert ray.get(worker.plain.remote(2)) == 6  # in its second life


def raises(error, call):
    """Checks that ``call`` raises ``error``."""
    try:
        call()
    except error:
        return
    raise AssertionError(f"no {error.__name__}")


if __name__ == "__main__":
    how = sys.argv[1]
    options = {"include_dashboard": False, "logging_level": "ERROR", "log_to_driver": False}
    if how == "init":
        ray.init(num_cpus=6, runtime_env={"env_vars": {"THEIRS": "1"}}, **options)
    elif how == "auto":
        ray.init(address="auto", **options)
    elif how == "job_config":
        ray.init(num_cpus=6, job_config=ray.job_config.JobConfig(runtime_env={"env_vars": {"THEIRS": "1"}}), **options)
    use_everything()
    if how in ("init", "job_config"):
        assert ray.get(ray.remote(lambda: os.environ["THEIRS"]).remote()) == "1"
    if "shutdown" in sys.argv:
        ray.shutdown()
    if "fail" in sys.argv:
        raise RuntimeError("the loop broke")
    print("done")
    sys.exit(int(sys.argv[2]) if sys.argv[2:] and sys.argv[2].isdecimal() else 0)
