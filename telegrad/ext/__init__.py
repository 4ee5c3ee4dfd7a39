"""The interface of extensions. Telegrad's own extensions import it, and yours may.

`calls`: make calls, run incoming calls, and track a call: the parts that `rpc_sync` and similar functions use.
`workers`: the worker of this process, how it starts, the members of its group, and hooks that an extension adds to each
worker.
`joining`: how processes find a group, without torch: keys, stores, names, and the protocol of directory engines.
`values`: values, tensors and exceptions as bytes, and references to values on other workers.
`graphs`: records of a forward pass, and parts of a backward pass that an extension runs itself.
`modules`: modules whose parts live on several workers: how to find, name and own the parts.
`host`: files, processes, threads, forks, signals and addresses of this host.
`feedback`: messages for users: errors for invalid arguments, notes of long waits, hints, sanitized texts.
`events`: events of a worker, for recorders.

docs/extensions.md shows how to write an extension. Names here keep their meaning within a minor version.
"""
