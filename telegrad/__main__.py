"""Run a program that was written for `torch.distributed.rpc` on Telegrad.

python -m telegrad script.py [arguments]
python -m telegrad -m package.module [arguments]
"""

from __future__ import annotations

import os
import sys

from telegrad import compat
from telegrad.compat import program
from telegrad.version import VERSION


def main() -> None:
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        sys.exit(0 if arguments else 2)
    compat.install()
    print(f"telegrad {VERSION} serves torch.distributed.rpc", file=sys.stderr)
    if arguments[0] == "-m":
        if len(arguments) == 1:
            sys.exit("python -m telegrad -m: name the module to run")
        sys.argv = arguments[1:]
        program.run_module(arguments[1])
    else:
        sys.argv = arguments
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        program.run_script(arguments[0])


if __name__ == "__main__":
    main()
