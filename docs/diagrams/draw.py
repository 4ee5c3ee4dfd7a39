"""The pictures of the docs: `python docs/diagrams/draw.py` writes them beside this file; a test tells when to."""

from __future__ import annotations

import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))

from drawing import LINE, MARGIN, WIDTH, Message, Note, Phase, Picture, sequence  # noqa: E402


def parts() -> str:
    """Two workers side by side, with the layers of each."""
    picture = Picture("Two workers: what programs call, what lies below, and how bytes cross")
    gap, high = 60, 44
    wide = (WIDTH - 2 * MARGIN - gap) / 2
    layers = (
        ("your program", ""),
        ("rpc · nn · optim · weights · checkpoint", "what it calls"),
        ("references · autograd", "values in use; gradients on their way back"),
        ("agent · reactor", "calls, and the threads that serve them"),
        ("membership · directory", "which workers are there; how they meet and leave"),
        ("transport · memory · wire", "how values become bytes, and cross"),
    )
    top = MARGIN + 34
    for number, name in enumerate(("worker0", "worker1")):
        left = MARGIN + number * (wide + gap)
        picture.box(left, MARGIN, wide, 34 + len(layers) * (high + 6) + 6, "frame")
        picture.text(left + wide / 2, MARGIN + 22, name, bold=True)
        for row, (layer, about) in enumerate(layers):
            y = top + row * (high + 6)
            picture.box(left + 8, y, wide - 16, high)
            picture.text(left + wide / 2, y + (18 if about else 27), layer, bold=True)
            picture.text(left + wide / 2, y + 35, about, "soft")
    below = top + (len(layers) - 1) * (high + 6)
    near, far = MARGIN + wide - 6, MARGIN + wide + gap + 6
    picture.arrow(near, below + 14, far, below + 14)
    picture.arrow(far, below + 30, near, below + 30)
    end = below + high + 34
    picture.text(
        WIDTH / 2,
        end,
        "One connection for the calls of each direction: on one host a Unix socket, with shared memory\n"
        "for large tensors; between hosts TCP, with TLS where you want it. The group's store is needed\n"
        "only while workers meet, or come and go.",
        "soft",
    )
    return picture.svg(end + 2 * LINE + MARGIN)


def call() -> str:
    """`rpc_sync`, from the caller's thread to the function and back."""
    return sequence(
        "A call's way",
        [
            "caller\nthe thread that calls",
            "agent\nof the caller",
            "leader\nof the callee: it reads",
            "function\non the callee",
        ],
        [
            Note("caller", "arguments are pickled;\ntensors stay apart"),
            Message("caller", "agent", "rpc_sync"),
            Note("agent", "in flight; no connection yet?\nOne is made, the call waits"),
            Message("agent", "leader", "CALL: name, arguments;\nlarge tensors beside it"),
            Note("leader", "finds the function by its name,\nmakes the arguments"),
            Message("leader", "function", "runs it"),
            Note("function", "takes long? Another\nthread leads meanwhile"),
            Message("function", "leader", "result"),
            Message("leader", "caller", "ANSWER, over the same connection;\nthe thread that waits reads it by itself"),
        ],
    )


def reference() -> str:
    """From `remote` to the end of the value, with a third worker that was given the reference."""
    return sequence(
        "A reference's life",
        ["worker0\nmakes and passes it on", "worker1\nowns the value", "worker2\nis given it"],
        [
            Message("worker0", "worker1", "remote: make the value"),
            Note("worker1", "the value, and who\nholds it: worker0"),
            Message("worker1", "worker0", "the answer confirms it"),
            Phase("worker0 passes it on"),
            Message("worker0", "worker2", "a call with the reference in its arguments"),
            Note("worker0", "keeps its share until the owner\nknows of worker2"),
            Message("worker2", "worker1", "CONFIRM", letter=True),
            Message("worker1", "worker2", "CONFIRMED", letter=True),
            Message("worker2", "worker0", "SETTLED", letter=True),
            Phase("both let go of it"),
            Message("worker0", "worker1", "DROPPED", letter=True),
            Message("worker2", "worker1", "DROPPED", letter=True),
            Note("worker1", "nobody holds it:\nthe value is freed"),
        ],
    )


def backward() -> str:
    """A forward pass over three workers, and its way back."""
    return sequence(
        "A backward pass",
        ["worker0\nthe driver", "worker1", "worker2"],
        [
            Phase("forward, in a context"),
            Message("worker0", "worker1", "call with a tensor"),
            Message("worker1", "worker2", "call with what it made of it"),
            Message("worker2", "worker1", "result"),
            Message("worker1", "worker0", "result"),
            Note(
                "worker1",
                "of what leaves: where gradients will come in (Send);\nof what comes: where they must go (Recv)",
            ),
            Phase("backward, from the loss"),
            Note("worker0", "runs its part of the graph"),
            Message("worker0", "worker1", "gradients of the result"),
            Message("worker1", "worker2", "gradients"),
            Message("worker2", "worker1", "gradients"),
            Message("worker2", "worker0", "report: what it has done, what it has sent", letter=True),
            Message("worker1", "worker0", "gradients, with its report"),
            Note("worker0", "all that was sent is done:\nbackward returns"),
            Phase("the optimizer steps on each worker, with the gradients of the context"),
        ],
    )


def forming() -> str:
    """How a group of fixed size meets."""
    return sequence(
        "How a group forms",
        ["worker0\nserves the store", "store", "worker1"],
        [
            Message("worker0", "store", "claims its rank and its name"),
            Message("worker1", "store", "claims its rank and its name"),
            Note("store", "the last to come opens the first gate"),
            Message("store", "worker0", "who is there, and where"),
            Message("store", "worker1", "who is there, and where"),
            Note("store", "the last to have read opens the second"),
            Message("store", "worker0", "ready"),
            Message("store", "worker1", "ready"),
            Phase("nobody needs the store any more"),
            Message(
                "worker0", "worker1", "the first call makes a connection: both prove that they hold the group's key"
            ),
        ],
    )


def directory() -> str:
    """How a worker joins a dynamic group, and how its loss is decided."""
    return sequence(
        "A dynamic group and its directory",
        ["worker0\nserves the store", "directory\na process of its own", "worker1", "worker2"],
        [
            Message("worker0", "directory", "starts it,\nas the first"),
            Note("worker0", "the store holds\nthe directory's address"),
            Message("worker1", "worker0", "reads the address in the store"),
            Message("worker1", "directory", "claims a rank and\na name, under a lease"),
            Message("directory", "worker0", "worker1 has joined", letter=True),
            Message("directory", "worker2", "worker1 has joined", letter=True),
            Phase("each worker renews its lease; calls do not use the directory"),
            Note("worker1", "is killed"),
            Message("worker2", "directory", "worker1 is dead: nobody listens there"),
            Message("directory", "worker0", "worker1 is lost", letter=True),
            Phase("a worker that is stopped or out of reach is lost once its lease has ended"),
        ],
    )


PICTURES = {function.__name__: function for function in (parts, call, reference, backward, forming, directory)}


def main() -> None:
    for name, picture in PICTURES.items():
        (HERE / f"{name}.svg").write_text(picture())


if __name__ == "__main__":
    main()
