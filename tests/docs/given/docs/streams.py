# before: def squares(n)
import telegrad

workers = telegrad.local(["worker1"])
