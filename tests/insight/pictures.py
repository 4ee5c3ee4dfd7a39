"""Draw pictures of the dashboard for the docs: `python -m tests.insight.pictures docs/insight`."""

import argparse
import io
import pathlib

from PIL import Image
from playwright.sync_api import sync_playwright

from telegrad.insight.web import Dashboard
from tests.insight.browsers import BROWSER, OPTIONS
from tests.insight.group import Group

WHY = "trainer waits for 2 calls, the oldest for 1 s:\n  torch.add on stage1: train.py line 41, loss = model(batch)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path, help="where to leave them")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--name", default="dashboard")
    folder, width, name = (arguments := parser.parse_args()).folder, arguments.width, arguments.name
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=OPTIONS)
        for theme in ("light", "dark"):
            dashboard = Dashboard(Group(), lambda sight: WHY)
            for _ in range(20):
                dashboard._next = 0.0
                dashboard.data(15)
            page = browser.new_page(color_scheme=theme, viewport={"width": width, "height": 900})
            page.goto(dashboard.url)
            page.get_by_role("button", name="Why does it wait?").click()
            page.get_by_text("the oldest for").wait_for()
            found = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
            small(found).save(folder / f"{name}-{theme}.png", optimize=True)
            dashboard.close()
        browser.close()


def small(picture: Image.Image) -> Image.Image:
    common = sorted(picture.getcolors(1 << 24) or [], reverse=True)[:256]
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for _, colour in common for part in colour])  # type: ignore[attr-defined]
    return picture.quantize(palette=palette, dither=Image.Dither.NONE)


if __name__ == "__main__":
    main()
