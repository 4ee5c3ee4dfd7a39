"""Coverage-guided fuzzing with atheris of all input from others: frames, handshakes, records, store values, tensors.

python -m tests.strangers.fuzz [--seconds 60] [frames | handshake | records | store | decoders]

Findings are written to the folder given with --findings; `--again FILE frames` runs a single one, which does not need
atheris.
"""

import argparse
import importlib.util
import pathlib
import subprocess
import sys
import tempfile

INSTRUMENTED = [
    "telegrad._core.wire.messages",
    "telegrad._core.security.handshake",
    "telegrad._core.security.noise",
    "telegrad._core.stores.sealed_store",
    "telegrad._core.stores.raw_stores",
    "telegrad._core.wire.packing",
]
MEGABYTES = 512  # of memory: a target that needs more has failed
NAMES = ["frames", "handshake", "records", "store", "decoders"]


def installed() -> bool:
    return importlib.util.find_spec("atheris") is not None


def fuzz(target: str, seconds: int, findings: str) -> None:
    """Run the fuzzer, which ends the process: this function does not return."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        from tests.strangers import corpus

    with tempfile.TemporaryDirectory() as folder:
        corpus.write(target, pathlib.Path(folder))
        options = [f"-max_total_time={seconds}", f"-rss_limit_mb={MEGABYTES}", "-timeout=10", "-max_len=4096"]
        artifacts = f"-artifact_prefix={findings}/{target}-"
        atheris.Setup([sys.argv[0], *options, artifacts, "-print_final_stats=1", folder], corpus.TARGETS[target])
        atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.strangers.fuzz")
    parser.add_argument("target", nargs="?", choices=NAMES, help="all where none is given")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--findings", default=".", help="a folder for inputs that fail")
    parser.add_argument("--again", help="a file with an input to run alone")
    options = parser.parse_args()
    if options.again:
        from tests.strangers import corpus

        for target in [options.target] if options.target else NAMES:
            corpus.TARGETS[target](pathlib.Path(options.again).read_bytes())
        return 0
    if not installed():
        print("this needs atheris: pip install atheris", file=sys.stderr)
        return 2
    if options.target:
        fuzz(options.target, options.seconds, options.findings)
    arguments = ["--seconds", str(options.seconds), "--findings", options.findings]
    command = [sys.executable, "-m", "tests.strangers.fuzz", *arguments]
    return max(subprocess.run([*command, target]).returncode for target in NAMES)


if __name__ == "__main__":
    sys.exit(main())
