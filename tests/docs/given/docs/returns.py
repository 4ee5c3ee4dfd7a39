# before: rpc.rpc_sync("actor0", act
import telegrad
import telegrad.rpc as rpc

workers = telegrad.local(["actor0", "ledger"])
state, order = 1, 2


def act(state):
    return state


book = act
