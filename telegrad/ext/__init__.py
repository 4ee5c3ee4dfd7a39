"""The interface of extensions: what Telegrad's own extensions import, and yours may.

`calls`: begin calls, run what others call, and follow a call that was made: what `rpc_sync` and its kin are made of.
`references`: references to values on other workers: the tables that count them, and references whose values come back.
`workers`: the worker of this process, the members of its group, and what an extension adds to each worker.
`directories`: what an engine of a directory implements, and what clients of one ask.
`joining`: how workers meet and join: stores, keys, addresses, and the start of a worker.
`values`: values and tensors as bytes, and exceptions on their way.
`graphs`: what workers record of a forward pass, and parts of a backward pass that an extension runs by itself.
`modules`: modules whose parts live on several workers: found, named, and held by their owners.
`files`: files that other users of the host can neither plant nor read.
`processes`: processes, threads, forks, signals and addresses of this host.
`arguments`: checks of arguments: each converter returns the value, or raises InvalidArgument.
`texts`: what is told to users: long waits, hints, and texts of other processes made safe.
`events`: what happens on a worker, for those who record it.

docs/extensions.md builds one. Names here keep their meaning within a minor version.
"""
