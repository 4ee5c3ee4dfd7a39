"""Check that tests notice changes of the pure files: `python -m tests.mutants [FILE ...]`; fail if they notice too few.

mutmut makes the changes (mutants), one expression at a time, and runs those tests of `tests.covering` that call the
changed function. A night takes two files, others on each day. Simulations have only SEEDS seeds here.

Lines with a text of several words are not changed, as most tests should not compare texts for people; nor is `strict=`,
without which a `zip` of equal lengths does the same. All other mutants count, also those that change no behaviour.
"""

import datetime
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from tests import covering
from tests.test_imports import PURE, ROOT, dotted

LEAST = 90.0  # percent of a file's mutants
FLOORS = {  # of files whose tests notice fewer: raise them, add none
    "_core/transport/silence.py": 86.6,
    "_core/reactor/scheduler.py": 85.0,
    "weights/transfer.py": 84.3,
    "insight/phrases.py": 83.7,
}
NIGHTS = len(PURE) // 2  # for all files
SEEDS = 40
# Tests that need more seeds, or start workers.
WITHOUT = ["wrong_code", "simulation_finds", "on_all_workers", "of_another_type", "in_a_dynamic_group", "workers_join"]
OTHERS = " and ".join(f"not {each}" for each in WITHOUT)
NOTICED = {"killed", "timeout", "segfault"}
TEXT = r'^(?:[^"]*"[^"]*")*[^"]*"[^" ]* [^"]*"'  # a line with a string in which there is a space
SETTINGS = {
    "source_paths": ["telegrad"],
    "also_copy": ["docs"],  # which tests read
    # The last one is a bug of mutmut: it makes of -1 in a pattern +1, which is no pattern.
    "do_not_mutate_patterns": [TEXT, "strict=True", "case .*-[0-9]"],
    "pytest_add_cli_args": ["-m", "not nightly and not cuda", "-k", OTHERS, "-p", "no:cacheprovider"],
    "timeout_constant": 5.0,  # so that a busy machine does not end tests that pass
    "timeout_multiplier": 6.0,
}


def main() -> int:
    files = sys.argv[1:] or PURE[datetime.date.today().toordinal() % NIGHTS :: NIGHTS]
    print("python -m tests.mutants", *files, flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        prepare(folder, files)
        mutmut(folder, "run", "--max-children", "2")
        results = re.findall(r"^ +(\S+): (.+)$", mutmut(folder, "results", "--all", "true"), re.M)
        return max([report(folder, file, results) for file in files])


def prepare(folder: pathlib.Path, files: list[str]) -> None:
    """Write the settings, and links to what mutmut copies, into a folder."""
    for part in ("telegrad", "tests", "docs"):
        (folder / part).symlink_to(ROOT.parent / part)
    tests = [os.path.relpath(test, ROOT.parent) for test in covering.tests()]
    chosen = {"only_mutate": [f"telegrad/{file}" for file in files], "pytest_add_cli_args_test_selection": tests}
    table = "".join(f"{key} = {json.dumps(value)}\n" for key, value in {**SETTINGS, **chosen}.items())
    (folder / "pyproject.toml").write_text(f"{(ROOT.parent / 'pyproject.toml').read_text()}\n[tool.mutmut]\n{table}")


def mutmut(folder: pathlib.Path, *words: str) -> str:
    """Run it in that folder, and return what it has printed; end with that if it fails."""
    environment = {**os.environ, "TELEGRAD_SEEDS": str(SEEDS), "CI": "1"}  # for Hypothesis: the same examples each time
    command = [str(pathlib.Path(sys.executable).with_name("mutmut")), *words]
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    return done.stdout if done.returncode == 0 else sys.exit(done.stdout)


def report(folder: pathlib.Path, file: str, results: list[tuple[str, str]]) -> int:
    """Print the mutants that no test noticed, and the share of the others; return 1 if that is too low."""
    module = dotted(ROOT / file)
    own = {mutant: verdict for mutant, verdict in results if mutant.rpartition(".")[0] == module}
    alive = [mutant for mutant, verdict in own.items() if verdict not in NOTICED]
    for mutant in alive:
        print(mutmut(folder, "show", mutant))
    percent = 100 * (1 - len(alive) / max(len(own), 1))
    least, late = FLOORS.get(file, LEAST), list(own.values()).count("timeout")
    print(f"{percent:.1f}, {least:g} should be, of {len(own)} ({late} ran too long) {file}", flush=True)
    return int(percent < least or not own)


if __name__ == "__main__":
    sys.exit(main())
