# before: insight.trace("trace.json")
import telegrad
import telegrad.insight
import telegrad.rpc as rpc

workers = telegrad.local(["worker1", "worker2", "worker3"], driver="worker0")
trace = telegrad.insight.trace
telegrad.insight.trace = lambda path, seconds=None, **how: trace(path, seconds and 0.1, **how)


def train():
    for worker in workers:
        rpc.rpc_sync(worker, pow, (2, 3))
