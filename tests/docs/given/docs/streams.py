# after: async def first_above(limit)
import asyncio

assert asyncio.run(first_above(50)) == 64

# before: def running_sums(batches)
import torch

import telegrad.errors

# after: def running_sums(batches)
batches = [torch.ones(2), torch.ones(3)]
assert [float(each) for each in rpc.rpc_stream("worker1", running_sums, (batches,))] == [2, 5]


def sums_that_are_not_cloned(batches):
    total = torch.zeros(())
    for batch in batches:
        total += batch.sum()
        yield total


assert [float(each) for each in rpc.rpc_stream("worker1", sums_that_are_not_cloned, (batches,))] == [2, 5]

# at the end
assert item == 121
assert [*stream] == []
