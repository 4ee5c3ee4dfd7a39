"""The life of a worker: put together (`cluster`), it joins, serves and leaves (`life`); elastic groups."""
