"""The lifecycle of a worker: assembly (`cluster`); joining, serving and leaving (`life`); elastic groups."""
