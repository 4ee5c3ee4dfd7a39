"""The threads of a worker: a leader reads the connections and runs short work, other threads run the rest."""
