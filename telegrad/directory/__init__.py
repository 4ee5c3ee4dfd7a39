"""The directory of a group decides who is in it, who owns a name, and who owns a value that exists once.

`protocol.py` is what each engine offers. The embedded engine, from the bottom: `table.py` is its state, `watches.py`
and `service.py` its behaviour, `messages.py` and `channel.py` what crosses a connection, all of these pure; `store.py`
its file, `server.py` the process that serves it, `keeper.py` what starts that process, `client.py` its clients.
"""
