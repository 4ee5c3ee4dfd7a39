"""The directory of a group decides who is in it, who owns a name, and who owns a value that exists once.

`protocol.py` is what each engine offers. Engines: `embedded` (a process that the group starts itself), `etcd`, `redis`.
`table.py` is the pure state of the embedded one. `sealing.py` authenticates values in engines that others can write to.
"""
