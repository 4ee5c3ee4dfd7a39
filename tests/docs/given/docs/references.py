# before: ref = rpc.remote("worker1", torch.ones
import torch

import telegrad
import telegrad.rpc as rpc

workers = telegrad.local(["worker1", "worker2"], driver="worker0")


def use(ref):
    assert ref.to_here().sum() == 4


class Counter:
    value = 0

    def add(self, number):
        self.value += number
        return self.value
