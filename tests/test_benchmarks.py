"""The figures of a benchmark are shown rightly, and a failing peer affects only its own figures."""

import pathlib
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks import compare, schedules, timeline, turns
from benchmarks.command import RESULTS, choose, machine
from benchmarks.floods import WAYS, Found
from benchmarks.groups import Group
from benchmarks.limits import LIMITS
from benchmarks.measuring import PIPELINING, TELEGRAD, TORCH
from benchmarks.peers.report import Line, beside
from benchmarks.peers.rows import ROWS as SHARED_ROWS
from benchmarks.peers.side import why_not_installed
from benchmarks.pipelines import CountingStage, SleepingStage, Training, most_kept
from benchmarks.plot import draw, needed, told
from benchmarks.processes import Child, Failed, answer_all, children_killed
from benchmarks.programs.__main__ import ROWS as PROGRAMS
from benchmarks.programs.__main__ import STEP, WHOLE, measure
from benchmarks.programs.report import DROP_IN, NATIVE, name_of
from benchmarks.programs.report import table as programs_table
from benchmarks.programs.side import FOLDER, ProgramSide
from benchmarks.report import number, spread, table, verdict
from benchmarks.results import Result, Run
from benchmarks.rows import ROWS
from benchmarks.targets import Absolute, Computed, OfLimit, OfPeer, OfPipelining, OfRow
from benchmarks.turns import closed, take_all, take_turns
from telegrad.autograd.gradients import Gradients
from telegrad.pipeline.stage import Backward, StageInput

TIME = Result("call", "host", "µs", False, [10.0, 30.0, 20.0], [100.0, 80.0, 90.0], (OfPeer(0.3),))
RATE = Result("rate", "tcp", "GB/s", True, [1.0, 3.0, 2.0], [4.0, 4.0, 4.0], (OfPeer(1), OfLimit(0.5, "copy")))
ALONE = Result("grown", "host", "µs", False, [50.0], [], (OfRow(1.5, "call"), OfPeer(0.3)), "", "hung")
BESIDE = TIME._replace(name="step", targets=(OfPipelining(1),), pipelining=[25.0, 16.0, 16.0])
RUN = Run("a machine", [TIME, RATE, ALONE], {"copy": [3.0, 5.0, 4.0]})


def test_verdicts() -> None:
    assert verdict(TIME, TIME.theirs) == "0.22 (4.5 times better)"
    assert verdict(RATE, RATE.theirs) == "0.50 (2.0 times worse)"
    assert verdict(ALONE, ALONE.theirs) == ""
    assert verdict(BESIDE, BESIDE.pipelining) == "1.25 (1.2 times worse)"


def test_numbers() -> None:
    assert [number(x) for x in (1234.5, 12.34, 1.234)] == ["1,234", "12.3", "1.23"]
    assert spread(TIME.ours) == "20.0 (10.0 to 30.0)"
    assert spread([], "hung") == "not measured: hung"
    assert not spread([])
    assert spread([2.0], "crashed: SIGSEGV") == "2.00 (2.00 to 2.00), then crashed: SIGSEGV"


def test_targets_are_compared_in_their_direction() -> None:
    thresholds = [[(each.threshold, each.met) for each in RUN.checked(result)] for result in RUN.results]
    assert thresholds == [[(27.0, True)], [(4.0, False), (2.0, True)], [(30.0, False), (None, None)]]
    assert RUN.checked(TIME._replace(targets=(Absolute(19),)))[0].met is False
    assert RUN.checked(TIME._replace(ours=[]))[0].met is None
    assert RUN.checked(BESIDE)[0] == (OfPipelining(1), 16.0, False)
    assert RUN.checked(TIME._replace(targets=(Computed(lambda: 21.0, "worked out"),)))[0].met is True
    rows = RUN.as_json()["rows"]
    assert rows[1]["targets"][1] == {"reason": "50% of the copy", "threshold": 2.0, "met": True}


def test_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIMITS, "copy", LIMITS["warm memory copy, 1 MB"])
    text = table(RUN)
    assert "| call | host | µs | 20.0 (10.0 to 30.0) | 90.0 (80.0 to 100) | 0.22 (4.5 times better) |" in text
    assert "| ≤ 27.0 (0.3 of the peer's) | yes |" in text
    assert "| ≥ 4.00 (1 times the peer's); ≥ 2.00 (50% of the copy) | **no**, yes |" in text
    assert "| not measured: hung |  | ≤ 30.0 (1.5 times call); 0.3 of the peer's | **no**, unknown |" in text
    assert "2 of 5 targets met." in text
    assert "| copy | GB/s | 4.00 (3.00 to 5.00) |\n" in text
    assert "\n| rate | tcp | 2.00 (1.00 to 3.00) GB/s | ≥ 4.00 (1 times the peer's) | encryption, and copies" in text
    assert "pipelining" not in text
    text = table(Run("a machine", [TIME, BESIDE], {}))
    assert "| ≤ 16.0 (1 times torch.distributed.pipelining's) | **no** |" in text
    assert "| step | µs | 20.0 (10.0 to 30.0) | 16.0 (16.0 to 25.0) | 1.25 (1.2 times worse) |" in text
    assert "| call | µs |" not in text


def test_the_largest_cost_of_each_missed_target_is_named() -> None:
    text = (RESULTS / "latest.md").read_text()
    assert "| largest cost |" in text
    assert "| not known |" not in text


def test_the_plot_shows_the_strictest_target(tmp_path: pathlib.Path) -> None:
    assert needed(RUN, TIME) == pytest.approx(1 / 0.3)
    assert needed(RUN, RATE) == 1
    draw(RUN, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert told(TIME) == "20.0 beside 90.0 µs"
    assert told(ALONE) == "50.0 µs; the peer has no figure"
    assert told(BESIDE) == "20.0 beside 90.0 µs; 16.0 by torch.distributed.pipelining"


def test_rows_can_be_sent_and_their_targets_exist() -> None:
    names = [(row.name, way) for row in ROWS for way in row.ways]
    assert len(names) == len(set(names))
    for row in ROWS:
        pickle.dumps(row.measure)
        for target in row.targets:
            assert not isinstance(target, OfLimit) or target.limit in LIMITS
            assert not isinstance(target, OfRow) or all((target.row, way) in names for way in row.ways)
    assert len(SHARED_ROWS) == 12


@pytest.mark.nightly
def test_rows_do_not_import_telegrad() -> None:
    """The processes of rows are forked from one that has imported the rows, and the import is timed."""
    program = "import sys, benchmarks.rows; sys.exit('telegrad.rpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_rows_are_chosen_by_words() -> None:
    chosen = choose("benchmarks", "", ROWS, ["all to all", "--quick"])
    assert len(chosen.rows) == 3
    assert chosen.folder is None
    assert choose("benchmarks", "", ROWS, []).folder == RESULTS
    with pytest.raises(SystemExit):
        choose("benchmarks", "", ROWS, ["no such row"])


def test_the_rows_of_training_have_a_number_of_threads() -> None:
    usual = choose("benchmarks", "", ROWS, [])
    assert {row.threads for row in usual.rows if "backward" in row.name or "pipeline" in row.name} == {1}
    assert {row.threads for row in usual.rows if "rpc" in row.name or "start" in row.name} == {None}
    assert "(1 in each process of the rows of training)" in machine(usual.rows)
    other = choose("benchmarks", "", ROWS, ["--threads", "3"])
    assert {row.threads for row in other.rows} == {None, 3}
    assert other.folder is None
    assert "rows of training" not in machine(choose("benchmarks", "", ROWS, ["empty"]).rows)
    with pytest.raises(SystemExit):
        choose("benchmarks", "", ROWS, ["--threads", "0"])


class FakeSide:
    def __init__(self, *answers: object) -> None:
        self._answers = list(answers)
        self.ended: list[str] = []

    def measure(self, row: object) -> Any:
        answer = self._answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        self.ended.append("closed")

    def kill(self) -> None:
        self.ended.append("killed")


def test_a_failing_side_loses_only_its_own_figures() -> None:
    good, bad = FakeSide(1.0, 2.0, 3.0), FakeSide(1.0, Failed("hung"))
    assert take_turns(ROWS[0], [good, bad], 3) == ([[1.0, 2.0, 3.0], [1.0]], ["", "hung"])


def test_each_row_is_measured_with_the_libraries_that_support_it(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Any] = {TELEGRAD: 1.0, TORCH: 2.0, PIPELINING: Failed("hung")}
    made: list[tuple[object, ...]] = []

    def side(library: str, *which: object) -> FakeSide:
        made.append(which)
        return FakeSide(*[answers[library]] * 2)

    monkeypatch.setattr(turns, "Workers", side)
    plain, trained = ROWS[0]._replace(rounds=1), ROWS[0]._replace(rounds=1, threads=1, libraries=(TELEGRAD, PIPELINING))
    ways = ("host",)
    first, second = take_all([plain._replace(ways=ways), trained._replace(ways=ways)], 1, {})
    assert made == [("host", 3, None)] * 3 + [("host", 3, 1)] * 3
    assert (first.ours, first.theirs, first.pipelining) == ([1.0], [2.0], [])
    assert (second.ours, second.theirs, second.theirs_failed) == ([1.0], [], "")
    assert (second.pipelining, second.pipelining_failed) == ([], "hung")


def threads_here(_: object) -> float:
    return torch.get_num_threads()


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_a_process_has_the_given_number_of_threads() -> None:
    group = Group(TELEGRAD, "host", 1, threads=1)
    try:
        assert group.measure(threads_here, 30) == 1
    finally:
        group.kill()


@pytest.mark.nightly
@pytest.mark.timeout(200)
@pytest.mark.parametrize("library", [TELEGRAD, PIPELINING])
def test_a_pipeline_is_trained_by_each_library(library: str) -> None:
    group = Group(library, "host", 3)
    try:
        training = Training("1f1b", CountingStage, width=8, samples=2)
        assert group.measure(partial(most_kept, training=training), 60) == max(training.timeline().kept) == 3
    finally:
        group.kill()


def test_a_stage_sleeps_for_inputs_and_weights_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    stage, sums, entry = SleepingStage(4, 0.5), Gradients(), StageInput([torch.ones(2, 4)])
    output = stage(*entry.tensors)
    assert slept == [0.5]
    backward = Backward(sums, [output], entry, lambda _: None)
    (gradient,) = backward.run([torch.ones(2, 4)], in_steps=True)
    assert gradient is not None
    assert slept == [0.5] * 2
    backward.run_weights()
    assert slept == [0.5] * 3


@pytest.mark.nightly
def test_an_earlier_revision_is_compared_with_its_own_package(tmp_path: pathlib.Path) -> None:
    (tmp_path / "telegrad").mkdir()
    (tmp_path / "telegrad" / "__init__.py").write_text("raise ImportError('the earlier package')")
    row = next(row for row in ROWS if row.name == "empty rpc_sync, p50")
    with pytest.raises(Failed, match="the earlier package"):
        compare.Earlier(str(tmp_path), "host", 2, threads=1).measure(row)  # in new interpreters
    assert str(tmp_path) not in sys.path


def test_a_row_is_slower_if_it_is_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS[0]._replace(higher_is_better=False)
    assert compare.times_slower(row, [2, 3], [1, 2]) == [2, 1.5]
    assert compare.times_slower(row._replace(higher_is_better=True), [2, 3], [1, 2]) == [0.5, 2 / 3]
    for before, slower in [((1.0, 1.0), True), ((1.0, 2.0), False)]:
        sides: Any = FakeSide(2.0, 2.0), FakeSide(*before)
        assert compare.compare(row, "host", sides, 2) is slower
    failing: Any = FakeSide(Failed("hung")), FakeSide(1.0)
    assert compare.compare(row, "host", failing, 1)


def test_an_interrupt_kills_all_sides() -> None:
    sides = [FakeSide(KeyboardInterrupt()), FakeSide()]
    with pytest.raises(KeyboardInterrupt), closed(sides):
        take_turns(ROWS[0], sides, 1)
    assert [side.ended for side in sides] == [["killed"], ["killed"]]


@pytest.mark.parametrize(
    ("run", "asked", "story"),
    [
        (signal.raise_signal, signal.SIGKILL, "crashed: SIGKILL"),
        (signal.raise_signal, signal.SIGSTOP, "hung: no answer within 0.5 s"),
        (time.strptime, "no time", "ValueError: time data 'no time'"),
    ],
)
def test_a_failing_child_has_a_reason_and_is_killed(run: Callable[[Any], object], asked: object, story: str) -> None:
    with children_killed() as children:
        child = Child(answer_all, run, fresh=True)
        children.append(child)
        child.tell(asked)
        with pytest.raises(Failed, match=story):
            child.wait_answer(0.5 if "hung" in story else 30)
    assert child.ended


def test_a_dead_child_is_noticed_while_waiting_for_another() -> None:
    with children_killed() as children:
        children += (Child(answer_all, time.sleep, fresh=True) for _ in range(2))
        children[0].tell(60)
        children[1].signal(signal.SIGKILL)
        with pytest.raises(Failed, match="crashed: SIGKILL"):
            children[0].wait_answer(30, children)


def test_texts_of_the_figures_of_peers(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(ROWS[0], [[10.0], [50.0], []], ["", "", "not run: no module"])
    assert beside(line, 1) == "50.0 (50.0 to 50.0), 5.0 times"
    assert beside(line, 2) == "not run: no module"
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    (tmp_path / "nowhere.log").write_text("Collecting\nERROR: No matching distribution found for nowhere\n")
    assert why_not_installed("nowhere") == " (pip: ERROR: No matching distribution found for nowhere)"
    assert why_not_installed("elsewhere") == ""


def test_a_timeline_shows_the_most_frequent_course(capsys: pytest.CaptureFixture[str]) -> None:
    usual, odd = ("begins", "ends"), ("begins", "stumbles", "ends")
    assert timeline.show({usual: [[0, 10], [0, 30], [0, 20]], odd: [[0, 500, 900]]}) == 20
    assert "3 of 4 steps" in (said := capsys.readouterr().out)
    assert "stumbles" not in said


@pytest.mark.nightly
@pytest.mark.timeout(200)  # the test starts three programs, whose processes import torch
def test_a_program_is_timed_on_each_side() -> None:
    row = next(row for row in PROGRAMS if row.name == "actors")
    results = measure(row, 1, 1)
    assert [(each.name, each.ours_failed, each.theirs_failed) for each in results] == [
        (name_of("actors", side, what), "", "") for side in (NATIVE, DROP_IN) for what in (WHOLE, STEP)
    ]
    assert all(0 < step.ours[0] / 1e3 < whole.ours[0] for whole, step in (results[:2], results[2:]))
    text = programs_table(Run("a machine", results, {}), ["actors"], ["1 thread"], [WHOLE, STEP])
    assert "| actors | 1 thread | start to exit, s |" in text
    assert "Telegrad: from start to exit, the median of the ratios is" in text


def test_every_program_is_listed_and_names_no_library() -> None:
    assert {row.name for row in PROGRAMS} | {"__init__", "__main__", "common", "library", "report", "side"} == {
        path.stem for path in FOLDER.glob("*.py")
    }
    for row in PROGRAMS:
        source = (FOLDER / f"{row.name}.py").read_text()
        assert "from library import" in source
        assert "telegrad" not in source
        assert "distributed.rpc" not in source


@pytest.mark.parametrize(
    ("program", "story"),
    [
        ("import threading; threading.Event().wait(60)", "hung: no end within 2 s"),
        ("raise SystemExit(3)", "ended with status 3"),
        ("print('nothing')", "said nothing of its steps: 'nothing"),
    ],
)
def test_a_failing_program_has_a_reason(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, program: str, story: str
) -> None:
    monkeypatch.setattr("benchmarks.programs.side.FOLDER", tmp_path)
    (tmp_path / "actors.py").write_text(program)
    with pytest.raises(Failed, match=story):
        ProgramSide("telegrad", 1).measure(PROGRAMS[-1]._replace(patience=2.0 if "hung" in story else 30.0))


@pytest.mark.nightly
def test_the_documented_table_of_schedules_is_that_of_the_simulation(tmp_path: pathlib.Path) -> None:
    docs = pathlib.Path(__file__).parent.parent / "docs" / "pipelines.md"
    assert schedules.table() in docs.read_text()
    schedules.draw(str(tmp_path / "schedules.png"))
    assert (tmp_path / "schedules.png").stat().st_size > 10_000


def test_floods_are_judged_by_the_documented_limits() -> None:
    for way in WAYS.values():
        good = Found(1.0, 1.0, 2.9, way.memory, way.descriptors, 1e4)
        assert not good.faults(way)
        assert len(good._replace(flooded=3.1).faults(way)) == 1
        assert not good._replace(flooded=3.1).faults(way, ratio=4)
        assert len(good._replace(memory=way.memory + 1, descriptors=way.descriptors + 1).faults(way)) == 2
    for name in ("descriptors", "unread"):
        assert "no such flood" in good._replace(memory=0, descriptors=1).faults(WAYS[name])[0]


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="descriptors and memory are read from /proc")
def test_floods_cost_other_workers_and_the_callee_little() -> None:
    """The limit of time suits a busy machine; those of memory and descriptors are the documented ones."""
    arguments = ["--seconds", "3", "--rounds", "1", "--ratio", "200", "--check"]
    command = [sys.executable, "-m", "benchmarks.floods", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for name in WAYS:
        assert f"\n{name} " in ended.stdout
