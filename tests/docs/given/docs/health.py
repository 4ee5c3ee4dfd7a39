# before: rpc.on_lost
import telegrad
import telegrad.rpc as rpc

workers = telegrad.local(2)
