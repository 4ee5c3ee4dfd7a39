# before: class Counter
import telegrad
import telegrad.rpc as rpc

workers = telegrad.local(["worker1"])

# after: class Counter
assert [future.wait() for future in futures] == list(range(1, 101))
