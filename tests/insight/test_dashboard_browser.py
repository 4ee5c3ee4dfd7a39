"""The dashboard in a real browser, with a made-up group."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from telegrad.insight.history import GroupSnapshot
from telegrad.insight.web import Dashboard
from telegrad.reporting import CallOut
from tests.insight.accounts import account
from tests.insight.browsers import AXE, BROWSER
from tests.insight.group import WORKERS, Group

api = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium")

Open = Callable[..., Any]


def why(sight: GroupSnapshot) -> str:
    return "trainer waits for stage1 <b>since</b> 3 s"


@pytest.fixture
def group() -> Group:
    return Group()


@pytest.fixture
def dashboard(group: Group) -> Iterator[Dashboard]:
    with Dashboard(group, why) as dashboard:
        yield dashboard


@pytest.fixture
def open_page(browser: Any, dashboard: Dashboard) -> Iterator[Open]:
    """Yield a function that opens a page and waits for the group; check at the end for errors and foreign requests."""
    contexts, wrong, elsewhere = [], [], []

    def open_page(**options: Any) -> Any:
        contexts.append(context := browser.new_context(**options))
        page = context.new_page()
        page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        origin = f"http://127.0.0.1:{dashboard.port}/"
        page.on("request", lambda asked: None if asked.url.startswith(origin) else elsewhere.append(asked.url))
        page.goto(dashboard.url)
        page.get_by_text("Live", exact=True).wait_for()
        page.wrong = wrong
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert (wrong, elsewhere) == ([], [])


def rows(page: Any, table: str) -> list[str]:
    return page.locator(f"#{table} tbody th").all_text_contents()


def test_all_views_show_the_group(open_page: Open) -> None:
    page = open_page()
    assert "token" not in page.url
    assert rows(page, "workers-table") == WORKERS
    assert set(rows(page, "functions-table")) == {"Pipeline.batch", "torch.add"}
    assert rows(page, "spent-table") == rows(page, "memory-table") == rows(page, "references-table") == WORKERS
    assert "trainer → stage1" in rows(page, "flows-table")
    assert len(rows(page, "longest-table")) == 20
    assert len(rows(page, "gantt-table")) == page.locator("#gantt rect").count() == 48  # 4 stages, 6 micro-batches
    page.locator("#matrix .flow").nth(6).wait_for(state="attached")  # rates need two looks
    titles = page.locator("#matrix .flow title").all_text_contents()
    assert sorted(title.partition(":")[0] for title in titles)[-2:] == ["trainer → stage1", "trainer → stage2"]
    assert page.locator("#timeline path").count() == 5  # one for each colour
    assert "trainer called torch.add on stage1: for 1 s now" in page.locator("#longest-table").text_content()
    assert page.locator("#memory-chart polyline").count() == page.locator("#history-chart polyline").count() == 4
    assert rows(page, "history-table") == WORKERS
    page.get_by_label("Figure").select_option("processor")
    page.get_by_role("img", name="Processor now: stage1 150%, stage2 250%, stage3 350%, trainer 50%.").wait_for()
    assert page.locator("#functions-table svg").count() == 2
    assert "steps/s" in page.locator("#steps").inner_text()
    assert "4 of 4 workers answer" in page.locator("#group").inner_text()


@pytest.mark.nightly
def test_updates_arrive_automatically_and_keep_rows_in_place(open_page: Open, group: Group) -> None:
    page = open_page()
    page.evaluate("document.querySelector('#workers-table tbody tr').id = 'same'")
    before = page.locator("#same").inner_text()
    page.wait_for_function("text => document.querySelector('#same').innerText !== text", arg=before)
    group.silent = {"stage3": "stuck in C"}
    page.get_by_text("Live; no answer from stage3").wait_for()
    assert "no answer: stuck in C" in page.locator("#workers-table").inner_text()
    assert page.locator("#matrix .silent").count() == 2  # its row and its column


@pytest.mark.nightly
def test_one_worker(open_page: Open, group: Group) -> None:
    page = open_page()
    assert page.locator("#tables table").count() == 0
    page.get_by_label("Calls, threads, references and log of").select_option("trainer")
    page.get_by_text("trainer rank 0 on node, pid 100").wait_for()
    assert "torch.add" in page.locator("#tables table").first.inner_text()
    assert page.locator("#tables caption").all_text_contents() == [
        "Calls out: 2", "Calls in: 0", "Threads: 0", "Bytes: 2", "Passes: 0", "References: 0", "Log: 0"
    ]  # fmt: skip
    group.silent = {"trainer": "stuck in C"}
    page.get_by_text("! trainer does not report its state: stuck in C").wait_for()
    assert "torch.add" in page.locator("#tables table").first.inner_text()  # its last report
    page.get_by_label("Calls, threads, references and log of").select_option("no worker")
    page.locator("#tables table").first.wait_for(state="detached")


@pytest.mark.nightly
def test_a_worker_has_an_address(open_page: Open, dashboard: Dashboard) -> None:
    page = open_page()
    page.locator("#workers-table tbody tr[data-key=stage1] th").click()
    page.get_by_text("stage1 rank 1 on node, pid 101").wait_for()
    assert page.url.endswith("/#worker=stage1")
    assert page.title() == "stage1 · Telegrad"
    page.get_by_text("processor 150% of a core, memory").wait_for()
    assert ", cuda:0 1.0G;" in page.locator("#about").inner_text()
    kinds, log = page.locator("#tables table").nth(5), page.locator("#tables table").nth(6)
    assert kinds.locator("tbody tr").all_inner_texts() == ["1\t3\t90s\ttorch.Tensor\ttrain.py:9 in load"]
    assert [text.split("\t")[-1] for text in log.locator("tbody tr").all_inner_texts()] == ["<b>second</b>", "first"]
    page.get_by_label("Calls, threads, references and log of").select_option("stage2")
    page.get_by_text("stage2 rank 2 on node").wait_for()
    page.locator("nav").get_by_text("Traffic").click()
    assert page.url.endswith("/#traffic")
    page.go_back()
    page.go_back()
    page.get_by_text("stage1 rank 1 on node").wait_for()
    page.go_forward()
    page.get_by_text("stage2 rank 2 on node").wait_for()
    page.reload()
    page.get_by_text("stage2 rank 2 on node").wait_for()
    page.goto(f"{dashboard.url}#worker=%zz")
    page.get_by_text("no worker '%zz' was found here").wait_for()


@pytest.mark.nightly
def test_the_page_recovers_after_the_server_was_gone(open_page: Open, dashboard: Dashboard, group: Group) -> None:
    page = open_page()
    dashboard.close()
    page.get_by_text("does not answer").wait_for()
    assert "The data shown is from" in page.locator("#state").inner_text()
    assert rows(page, "workers-table") == WORKERS
    page.wrong.clear()  # the browser logs the failed requests
    with Dashboard(group, why, port=dashboard.port, token=dashboard.token):
        page.get_by_text("Live", exact=True).wait_for()
        page.wrong.clear()


@pytest.mark.nightly
def test_the_page_shows_that_the_group_is_gone_and_recovers(open_page: Open, group: Group) -> None:
    page = open_page()
    group.failure = ConnectionError("nobody is there")
    page.get_by_text("The group cannot be queried: ConnectionError: nobody is there.").wait_for()
    assert rows(page, "workers-table") == WORKERS
    group.failure = None
    page.get_by_text("Live", exact=True).wait_for()


def test_why(open_page: Open) -> None:
    page = open_page()
    page.get_by_role("button", name="Why does it wait?").click()
    page.get_by_text("trainer waits for stage1 <b>since</b> 3 s").wait_for()  # as text, not as HTML


@pytest.mark.nightly
def test_the_sick_ones_of_512_workers_come_first_and_others_are_found(open_page: Open, group: Group) -> None:
    names = [f"{role}{at}" for role, count in (("ps", 32), ("trainer", 480)) for at in range(count)]
    hosts = {name: f"node{at // 8:02}" for at, name in enumerate(names)}
    slow = CallOut(to="ps1", number=1, function="f", age=300.0, timeout=0.0, thread=None)
    states = [
        account(
            name, members=hosts, host=hosts[name], calls_out=[slow] * (name == "trainer9"), busy=16 * (name == "ps1")
        )
        for name in names
        if name != "trainer300"
    ]
    group.look = lambda: GroupSnapshot(states, group.silent)
    page = open_page(viewport={"width": 400, "height": 900}, bypass_csp=True)
    group.silent = {"trainer300": "stopped"}
    page.get_by_text("Live; no answer from trainer300").wait_for()
    assert rows(page, "workers-table")[:4] == ["trainer300", "ps1", "trainer9", "ps0"]
    assert "member for 60 s, a call for 5 min" in page.locator("#workers-table").inner_text()
    groups = rows(page, "groups-table")
    assert (len(groups), groups[:2]) == (66, ["role trainer", "host node41"])
    page.get_by_label("Find").fill("node05 trainer9")
    assert rows(page, "workers-table") == rows(page, "memory-table") == rows(page, "references-table") == ["trainer9"]
    page.locator("#workers-table tbody th").click()
    page.get_by_text("trainer9 rank 0 on node05").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    if AXE.exists():
        assert faults(page) == []


@pytest.mark.nightly
def test_pause_and_the_selected_time_span(open_page: Open) -> None:
    page = open_page()
    page.get_by_role("combobox", name="Last").select_option("60")
    page.get_by_text("Calls of the last 60 s,").wait_for()
    page.get_by_role("button", name="Pause").click()
    page.get_by_text("Paused.").wait_for()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.rpartition("/")[2]))
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # causes an update unless paused
    page.get_by_role("button", name="Why does it wait?").click()
    page.get_by_text("trainer waits for").wait_for()
    assert asked == ["why"]
    page.get_by_role("button", name="Pause").click()
    page.get_by_text("Live", exact=True).wait_for()


@pytest.mark.nightly
def test_hovering_shows_details(open_page: Open) -> None:
    page = open_page()
    box = page.locator("#timeline").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 10)
    page.wait_for_function("document.querySelector('#hovered').innerText.startsWith('trainer called')")


def faults(page: Any) -> Any:
    page.evaluate(AXE.read_text())
    return page.evaluate("async () => (await axe.run()).violations.map((each) => [each.id, each.help])")


def background(page: Any) -> str:
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


@pytest.mark.nightly
def test_dark_and_light(open_page: Open) -> None:
    light, dark = open_page(color_scheme="light"), open_page(color_scheme="dark")
    assert (background(light), background(dark)) == ("rgb(243, 245, 247)", "rgb(20, 23, 26)")
    light.get_by_label("Theme").select_option("dark")
    dark.get_by_label("Theme").select_option("light")
    assert (background(light), background(dark)) == ("rgb(20, 23, 26)", "rgb(243, 245, 247)")
    dark.reload()
    dark.get_by_text("Live", exact=True).wait_for()
    assert background(dark) == "rgb(243, 245, 247)"


@pytest.mark.nightly
def test_the_keyboard_reaches_all_controls(open_page: Open) -> None:
    page = open_page()
    wanted = page.evaluate(
        """() => {
            const all = [...document.querySelectorAll('a, button, select, input, summary, [tabindex="0"]')];
            const seen = all.filter((each) => each.checkVisibility());
            seen.forEach((each, index) => (each.dataset.index = index));
            return seen.length;
        }"""
    )
    order, outlined = [], []
    for _ in range(wanted):
        page.keyboard.press("Tab")
        order.append(page.evaluate("Number(document.activeElement.dataset.index)"))
        outlined.append(page.evaluate("getComputedStyle(document.activeElement).outlineStyle"))
    assert (order, set(outlined)) == ([*range(wanted)], {"solid"})
    page.keyboard.press("Shift+Tab")
    page.locator("#pause").focus()
    page.keyboard.press("Space")
    assert page.locator("#pause").get_attribute("aria-pressed") == "true"
    page.locator("#traffic summary").focus()
    page.keyboard.press("Enter")
    assert page.locator("#flows-table").is_visible()


def test_all_regions_have_names_for_screen_readers(open_page: Open) -> None:
    page = open_page()
    nameless = page.evaluate(
        """() => [...document.querySelectorAll(`svg[role=img]:not([aria-label]), table:not(:has(caption)),
            section:not([aria-label]), [role=region]:not([aria-label], [aria-labelledby]), th:not([scope])`)]
            .map((each) => each.outerHTML)"""
    )
    assert nameless == []
    assert page.locator("h1").count() == page.locator("main").count() == page.get_by_role("banner").count() == 1
    assert page.get_by_role("status").get_attribute("id") == "state"
    assert page.get_by_role("img", name="calls of 4 workers").count() == 1
    for name in ("Workers", "One worker", "Traffic", "Calls", "Functions", "Training", "Memory", "References"):
        assert page.get_by_role("region", name=name, exact=True).count() >= 1


@pytest.mark.nightly
def test_the_page_fits_narrow_windows(open_page: Open) -> None:
    page = open_page()
    page.locator("summary").evaluate_all("all => all.forEach((each) => each.click())")
    for width in (1280, 768, 360, 320):
        page.set_viewport_size({"width": width, "height": 800})
        page.wait_for_function(f"document.documentElement.scrollWidth <= {width}", timeout=2000)


@pytest.mark.nightly
@pytest.mark.skipif(not AXE.exists(), reason="needs axe-core: npm install --prefix build axe-core@4")
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 768, 360])
def test_axe_finds_no_faults(open_page: Open, group: Group, theme: str, width: int) -> None:
    page = open_page(color_scheme=theme, viewport={"width": width, "height": 900}, bypass_csp=True)
    page.locator("summary").evaluate_all("all => all.forEach((each) => each.click())")
    page.get_by_label("Calls, threads, references and log of").select_option("trainer")
    page.get_by_text("trainer rank 0 on node, pid 100").wait_for()
    group.silent = {"stage3": "stuck in C"}
    page.get_by_text("Live; no answer from stage3").wait_for()
    assert faults(page) == []


def test_the_page_needs_the_token(browser: Any, dashboard: Dashboard) -> None:
    page = browser.new_page()
    assert page.goto(f"http://127.0.0.1:{dashboard.port}/").status == 403
    assert "trainer" not in page.content()
    page.close()
