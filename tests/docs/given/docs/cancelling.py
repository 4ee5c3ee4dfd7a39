# before: def book(order)
workers = telegrad.local(["archive"])
ledger = []


def store(order):
    return order


# after: def book(order)
book("an order")
assert ledger == ["an order"]
workers.shutdown()

# at the end
assert options.pass_deadlines
