"""The threads of a worker: one reads the connections and runs short work, others run the rest."""
