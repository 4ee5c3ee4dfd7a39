"""Who is in a group, who owns a name, who owns a value that exists once: decided in one place, by an engine made for it.

`protocol.py` is what each engine offers. Engines: `embedded` (a process that the group starts itself), `etcd`, `redis`.
`table.py` is the pure state of the embedded one. `sealing.py` authenticates values in engines that others can write to.
"""
