# before: rpc.init_rpc()
import os
import socket

import telegrad.rpc as rpc

with socket.create_server(("127.0.0.1", 0)) as listener:
    port = listener.getsockname()[1]
os.environ.update(TELEGRAD_NAME="learner0", TELEGRAD_ROLE="learner", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))

# at the end
assert rpc.get_worker_info().name == "learner0"
rpc.shutdown()
