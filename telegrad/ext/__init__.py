"""The interface of extensions. Telegrad's own extensions import it, and yours may.

`calls`: make calls, run incoming calls, and track a call: the parts that `rpc_sync` and similar functions use.
`references`: references to values on other workers: the tables that count them, and references whose values are
restored.
`workers`: the worker of this process, the members of its group, and hooks that an extension adds to each worker.
`directories`: the protocol that a directory engine implements, and the functions for its clients.
`joining`: how processes find a group, without torch: keys, stores, directories, names.
`starting`: how a worker starts: stores of torch, joining, entering a group.
`values`: values, tensors and exceptions as bytes.
`graphs`: records of a forward pass, and parts of a backward pass that an extension runs itself.
`modules`: modules whose parts live on several workers: how to find, name and own the parts.
`files`: files that other users of the host can neither plant nor read.
`processes`: processes, threads, forks, signals and addresses of this host.
`arguments`: checks of arguments: each converter returns the value, or raises InvalidArgument.
`texts`: messages to users: long waits, hints, and sanitized texts of other processes.
`events`: events of a worker, for recorders.

docs/extensions.md shows how to write an extension. Names here keep their meaning within a minor version.
"""
