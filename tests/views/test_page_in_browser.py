"""The page in a real browser: zoomed, moved, filtered, sorted, by mouse and by keyboard, in light and dark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from arachnec.data.clip import VideoClip
from arachnec.ir.nodes import Phase
from arachnec.lowering.programs import lower
from arachnec.views.colours import contrast, luminance
from arachnec.views.executable_page import executable_page
from tests.passes.plans import cluster, equal_clips, module_of, timed
from tests.views.browser import MISSING, Browser, browser
from tests.views.page_plans import large, slower, small

pytestmark = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")

PLANNED, MEASURED = "#charts figure:nth-of-type(1) canvas", "#charts figure:nth-of-type(2) canvas"
WINDOW = re.compile(r"([\d.]+) (m?s) to ([\d.]+) (m?s) of ([\d.]+) (m?s), ranks (\d+) to (\d+) of (\d+)")
DRAWN = "return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))"
ESCAPE, ENTER, LEFT, RIGHT = "\ue00c", "\ue007", "\ue012", "\ue014"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with ExitStack() as stack:
        try:
            opened = stack.enter_context(browser())
        except RuntimeError as error:
            pytest.skip(f"Chromium does not start here: {error}")
        opened.size(1200, 1000)
        yield opened


@pytest.fixture
def opened(chromium: Browser, tmp_path: Path) -> Browser:
    """The page of a small plan and a run of it."""
    captions = [VideoClip(i, 17, 480, 832, 40, caption=f"caption {i}", path=Path(f"{i}.mp4")) for i in range(3)]
    return show(chromium, tmp_path, executable_page(small(), slower(small()), clips=captions))


def show(chromium: Browser, folder: Path, text: str) -> Browser:
    (folder / "page.html").write_text(text, encoding="utf-8")
    chromium.open(folder / "page.html")
    chromium.run(DRAWN)
    return chromium


def window(page: Browser) -> tuple[float, float, float]:
    """Start and end of what is seen, and the end of all, in ms."""
    page.run(DRAWN)
    match = WINDOW.match(page.text("#window"))
    assert match is not None, page.text("#window")
    return tuple(float(match[i]) * (1e3 if match[i + 1] == "s" else 1) for i in (1, 3, 5))  # type: ignore[return-value]


def ranks(page: Browser) -> tuple[int, int, int]:
    """First and last rank seen, and how many there are."""
    page.run(DRAWN)
    match = WINDOW.match(page.text("#window"))
    assert match is not None
    return int(match[7]), int(match[8]), int(match[9])


def spot(page: Browser, ms: float, rank: float) -> tuple[float, float]:
    """Where in a timeline of the small plan, shown whole, a moment of a rank is, as fractions of the canvas."""
    width, height = page.run(f"const c = document.querySelector('{PLANNED}'); return [c.clientWidth, c.clientHeight]")
    end = window(page)[2]
    rows = height - 24
    return (72 + ms / end * (width - 72 - 16)) / width, (rank + 0.5) / 4 * rows / height


def pixels(page: Browser, selector: str) -> list[int]:
    """How often each of the canvas's colours occurs, as a checksum: equal for equal pictures."""
    script = (
        "const c = document.querySelector(arguments[0]);"
        "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        "let a = 0, b = 0; for (const v of d) { a = (a + v) % 65521; b = (b + a) % 65521 } return [a, b]"
    )
    page.run(DRAWN)
    return list(page.run(script, selector))


def test_the_page_opens_without_errors_and_asks_for_nothing(opened: Browser) -> None:
    assert opened.messages() == []
    assert opened.run("return performance.getEntriesByType('resource').length") == 0


def test_the_pages_own_policy_forbids_it_to_load_anything(opened: Browser) -> None:
    opened.run("document.body.append(Object.assign(new Image(), { src: 'https://localhost/picture.png' }))")
    assert any("Content Security Policy" in message for message in opened.messages())


def test_the_header_has_the_figures(opened: Browser) -> None:
    tiles = dict(zip(opened.texts("#tiles dt"), opened.texts("#tiles dd"), strict=True))
    assert tiles["makespan"] == "100 ms"
    assert tiles["to the bound"] == "1.000x"
    assert tiles["GPUs"] == "4 (4 x h100-80g)"
    assert tiles["clips"] == "3"
    assert "iteration, measured, step 3" in tiles


def test_planned_and_measured_are_above_each_other_on_one_axis(opened: Browser) -> None:
    assert opened.run("return document.querySelectorAll('#charts canvas').length") == 2
    end = window(opened)[2]
    for canvas, ms in ((PLANNED, 50.0), (MEASURED, 75.0)):
        opened.move(canvas, *spot(opened, ms - end / 50, 2))
        assert opened.text("#tip strong") == "%t1"
        opened.move(canvas, *spot(opened, ms + end / 50, 2))
        assert opened.text("#tip strong") == "%t2"


def test_the_tooltip_says_what_a_cascade_is_and_took(opened: Browser) -> None:
    opened.move(PLANNED, *spot(opened, 70, 1))
    said = dict(zip(opened.texts("#tip dt"), opened.texts("#tip dd"), strict=True))
    assert opened.text("#tip strong") == "%t0"
    assert said["stage"] == "@dit"
    assert said["phase"].startswith("train")
    assert said["clips"] == "a"
    assert said["tokens"] == "1 x 1000"
    assert said["degree"] == "2"
    assert said["ranks"] == "0-1"
    assert said["planned"] == "60 ms (20 ms to 80 ms)"
    assert said["measured, step 3"] == "90 ms (30 ms to 120 ms)"
    assert said["caption"] == "caption 0"
    opened.move("#title", 0.5, 0.5)
    assert opened.run("return document.getElementById('tip').hidden")


def test_buttons_zoom_in_and_out_and_fit(opened: Browser) -> None:
    start, end, whole = window(opened)
    assert (start, end) == (0, whole)
    before = pixels(opened, PLANNED)
    opened.click("#zoom-in")
    start, end, _ = window(opened)
    assert end - start == pytest.approx(whole / 2, rel=0.01)
    assert pixels(opened, PLANNED) != before
    opened.click("#zoom-in")
    opened.click("#zoom-out")
    assert window(opened)[1] - window(opened)[0] == pytest.approx(whole / 2, rel=0.01)
    opened.click("#fit")
    assert window(opened)[:2] == (0, whole)
    assert pixels(opened, PLANNED) == before


def test_control_and_wheel_zoom_around_the_pointer_and_dragging_moves(opened: Browser) -> None:
    whole = window(opened)[2]
    x, y = spot(opened, whole / 4, 1)
    opened.wheel(PLANNED, x, y, -700, control=True)
    start, end, _ = window(opened)
    assert end - start < whole / 2
    assert start + (end - start) / 4 == pytest.approx(whole / 4, rel=0.05)
    opened.drag(MEASURED, (0.7, 0.3), (0.5, 0.3))
    moved, moved_end, _ = window(opened)
    assert moved > start + (end - start) / 10
    assert moved_end - moved == pytest.approx(end - start, rel=0.01)


def test_a_click_picks_a_cascade_and_the_table_and_the_details_say_so(opened: Browser) -> None:
    before = pixels(opened, PLANNED)
    opened.click_at(PLANNED, *spot(opened, 30, 2))
    opened.run(DRAWN)
    assert opened.text("#details strong") == "%t1"
    assert opened.texts("#cascades tr.picked td:first-child") == ["%t1"]
    assert pixels(opened, PLANNED) != before
    opened.click_at(PLANNED, *spot(opened, 90, 0))
    opened.run(DRAWN)
    assert opened.run("return document.querySelector('#details').childElementCount") == 0


def test_the_critical_path_is_named_marked_and_leads_there(opened: Browser) -> None:
    opened.run("const s = document.getElementById('critical-of'); s.value = 0; s.dispatchEvent(new Event('change'))")
    assert opened.texts("#critical b") == ["%t1", "%t2", "@dit"]
    assert "ranks 2-3" in opened.texts("#critical li")[1]
    with_path = pixels(opened, PLANNED)
    opened.click("#show-critical")
    assert pixels(opened, PLANNED) != with_path
    opened.click("#show-critical")
    assert pixels(opened, PLANNED) == with_path
    opened.click("#critical li:nth-child(2) button")
    start, end, whole = window(opened)
    assert start <= 50
    assert 100 <= end < whole
    assert opened.text("#details strong") == "%t2"
    opened.run("const s = document.getElementById('critical-of'); s.value = 1; s.dispatchEvent(new Event('change'))")
    assert "150 ms" in opened.texts("#critical li")[1]


def test_the_filter_takes_words_and_comparisons_and_fades_the_rest(opened: Browser) -> None:
    names = "#cascades tbody td:first-child"
    before = pixels(opened, PLANNED)
    for text, shown in (
        ("vae", ["%e0"]),
        ("degree>=2", ["%t0", "%t2"]),
        ("degree>=2 tokens>1000", ["%t2"]),
        ("rank=0", ["%e0", "%t0"]),
        ("clip=1", ["%t1"]),
        ("clip=b", ["%t1"]),
        ("critical", ["%t1", "%t2"]),
        ("measured>=75 train", ["%t0", "%t1", "%t2"]),
        ("nothing-like-it", []),
    ):
        opened.run("document.getElementById('filter').value = ''")
        opened.keys("#filter", text)
        assert opened.texts(names) == shown, text
        assert opened.text("#count").startswith(f"{len(shown)} of 4")
    assert pixels(opened, PLANNED) != before
    opened.run("const f = document.getElementById('filter'); f.value = ''; f.dispatchEvent(new Event('input'))")
    assert len(opened.texts(names)) == 4
    assert pixels(opened, PLANNED) == before


def test_a_click_on_a_head_sorts_and_another_turns_round(opened: Browser) -> None:
    heads = [head.rstrip(" ▴▾") for head in opened.texts("#cascades th")]
    column = heads.index("end") + 1
    opened.click(f"#cascades th:nth-child({column}) button")
    assert opened.texts("#cascades tbody td:first-child") == ["%e0", "%t1", "%t0", "%t2"]
    sorted_as = f"#cascades th:nth-child({column})"
    assert opened.run("return document.querySelector(arguments[0]).ariaSort", sorted_as) == "ascending"
    opened.click(f"#cascades th:nth-child({column}) button")
    assert opened.texts("#cascades tbody td:first-child") == ["%t2", "%t0", "%t1", "%e0"]
    opened.click("#cascades tbody tr:first-child")
    assert window(opened)[0] > 0


def test_everything_can_be_done_with_the_keyboard(opened: Browser) -> None:
    whole = window(opened)[2]
    opened.run(f"document.querySelector('{PLANNED}').focus()")
    for key, picked in (("n", "%e0"), ("n", "%t1"), ("p", "%e0"), ("p", "%t2")):
        opened.press(key)
        opened.run(DRAWN)
        assert opened.text("#details strong") == picked
    opened.press(ENTER)
    start = window(opened)[0]
    assert 0 < start <= 50
    opened.press(ESCAPE)
    opened.run(DRAWN)
    assert opened.run("return document.querySelector('#details').childElementCount") == 0
    opened.press("0")
    assert window(opened)[:2] == (0, whole)
    opened.press("+")
    opened.press(LEFT)
    left = window(opened)[0]
    opened.press(RIGHT)
    assert window(opened)[0] > left
    reachable = opened.run(
        "return [...document.querySelectorAll('button, input, select, canvas, tbody tr')]"
        ".filter((e) => e.tabIndex < 0 && e.id !== 'memory' && !e.ariaHidden).length"
    )
    assert reachable == 0
    opened.run("document.querySelector('#cascades tbody tr:nth-child(3)').focus()")
    opened.press(ENTER)
    opened.run(DRAWN)
    assert opened.text("#details strong") == "%t1"


def test_memory_of_another_rank_can_be_asked_for_and_moves_with_the_timeline(opened: Browser) -> None:
    assert opened.text("#memory-says").startswith("rank 0 holds at most")
    before = pixels(opened, "#memory")
    opened.run(
        "const r = document.getElementById('memory-rank'); r.value = 3; r.dispatchEvent(new Event('change'))",
    )
    opened.run(DRAWN)
    assert opened.text("#memory-says").startswith("rank 3 holds at most 33.3 of 80 GiB")  # communicators among it
    other = pixels(opened, "#memory")
    assert other != before
    opened.click("#zoom-in")
    assert pixels(opened, "#memory") != other
    opened.move("#memory", 0.5, 0.5)
    assert "GiB" in opened.text("#tip")


def test_dark_pages_are_dark(opened: Browser) -> None:
    grounds, pictures = list[float](), []
    for dark in (False, True):
        opened.dark(dark)
        pictures.append(pixels(opened, PLANNED))
        ground = opened.run("return getComputedStyle(document.documentElement).getPropertyValue('--ground')")
        grounds.append(luminance(ground))
    opened.dark(False)
    assert grounds[0] > 0.9
    assert grounds[1] < 0.05
    assert pictures[0] != pictures[1]


TEXTS = """
const parts = (colour) => colour.match(/[0-9.]+/g).map(Number);
const behind = (element) => {
  for (let each = element; each; each = each.parentElement) {
    const found = parts(getComputedStyle(each).backgroundColor);
    if (found.length < 4 || found[3] > 0) return found;
  }
  return [];
};
const all = [...document.querySelectorAll("body *")];
const shown = all.filter((e) => e.tagName !== "SCRIPT" && e.getClientRects().length);
const own = shown.filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()));
const filter = document.getElementById("filter");
return [...own.map((e) => [e.textContent.trim().slice(0, 40), parts(getComputedStyle(e).color), behind(e)]),
  ["placeholder", parts(getComputedStyle(filter, "::placeholder").color), behind(filter)]];
"""


def test_every_text_of_the_page_stands_out_from_what_is_behind_it(opened: Browser) -> None:
    for dark in (False, True):
        opened.dark(dark)
        opened.click("#cascades tbody tr:nth-child(2)")
        opened.run(DRAWN)
        texts = opened.run(TEXTS)
        assert len(texts) > 60
        for text, colour, behind in texts:
            assert contrast(hexadecimal(colour), hexadecimal(behind)) >= 4.5, (dark, text)
    opened.dark(False)


def hexadecimal(parts: list[float]) -> str:
    return "#" + "".join(f"{round(part):02x}" for part in parts[:3])


def test_colours_are_by_clip_length_or_by_stage_and_the_legend_says_which(opened: Browser) -> None:
    assert opened.texts("#colours span") == ["tokens of a clip:", "1,000", "2,000", "3,000"]
    assert opened.texts("#marks span") == ["encode", "forward", "backward, reduce", "step", "critical path"]
    by_length = pixels(opened, PLANNED)
    choose = (
        "const s = document.getElementById('colour-by'); s.value = arguments[0]; s.dispatchEvent(new Event('change'))"
    )
    opened.run(choose, "stage")
    assert pixels(opened, PLANNED) != by_length
    assert opened.texts("#colours span") == ["stage:", "vae", "dit"]
    opened.run(choose, "length")
    assert pixels(opened, PLANNED) == by_length


def test_forward_and_backward_differ_without_colour(opened: Browser) -> None:
    """Of a plan whose cascades all have one colour, a forward is not of one colour alone, and a backward is."""
    colours = (
        "const c = document.querySelector(arguments[0]), g = c.getContext('2d'), k = c.width / c.clientWidth;"
        "const [x, y] = [arguments[1] * c.clientWidth * k, arguments[2] * c.clientHeight * k];"
        "const d = g.getImageData(x, y - 3 * k, 12 * k, 3 * k).data, s = new Set();"
        "for (let i = 0; i < d.length; i += 4) s.add(`${d[i]},${d[i + 1]},${d[i + 2]}`); return s.size"
    )
    opened.click("#show-critical")
    opened.run(DRAWN)
    assert opened.run(colours, PLANNED, *spot(opened, 26, 1.3)) > 1
    assert opened.run(colours, PLANNED, *spot(opened, 70, 1.35)) == 1


def test_the_path_of_the_measured_step_is_listed_where_there_is_one(opened: Browser) -> None:
    assert opened.run("const s = document.getElementById('critical-of'); return s.selectedOptions[0].text") == (
        "measured, step 3"
    )
    assert "75 ms to 150 ms" in opened.texts("#critical li")[1]


def test_nodes_are_separated_by_lines(chromium: Browser, tmp_path: Path) -> None:
    page = show(chromium, tmp_path, executable_page(large(16, 16)))
    assert "lines between rows separate 2 nodes" in page.text("#window")
    assert "next node" in page.texts("#marks span")


def test_a_run_that_took_another_time_than_planned_is_noted_above(chromium: Browser, tmp_path: Path) -> None:
    page = show(chromium, tmp_path, executable_page(small(), slower(small(), 4.0)))
    notes = page.texts("#notes p")
    assert notes[0].startswith("Measured, step 3:") and "4 times the planned" in notes[0]
    assert any(note.startswith("Backward of @dit:") for note in notes)
    assert "far" in page.run("return document.querySelector('#cascades tbody tr:nth-child(3)').innerHTML")
    page = show(chromium, tmp_path, executable_page(small(), slower(small(), 1.5)))
    assert page.texts("#notes p") == []


def test_measured_memory_stands_beside_what_was_planned(chromium: Browser, tmp_path: Path) -> None:
    run = replace(slower(small()), peak_gib={0: 40.0, 1: 41.0, 2: 42.5, 3: 30.0})
    page = show(chromium, tmp_path, executable_page(small(), run))
    tiles = dict(zip(page.texts("#tiles dt"), page.texts("#tiles dd"), strict=True))
    assert tiles["memory, measured"] == "42.5 GiB"
    assert page.text("#memory-says").startswith("rank 0 holds at most")
    assert "measured 40 GiB" in page.text("#memory-says")


def test_nothing_is_wider_than_the_window_of_a_phone(chromium: Browser, tmp_path: Path) -> None:
    chromium.size(500, 900)  # narrower ones are not to be had with a head
    page = show(chromium, tmp_path, executable_page(large(64, 200), slower(large(64, 200))))
    assert page.run("return document.documentElement.scrollWidth <= window.innerWidth")
    chromium.size(1200, 1000)


def test_markup_in_names_and_captions_is_shown_as_text_and_never_runs(chromium: Browser, tmp_path: Path) -> None:
    odd = "</script><img src=x onerror=\"document.title='run'\"><b>"
    clips = [VideoClip(i, 17, 480, 832, 40, caption=odd, path=Path(odd)) for i in range(3)]
    page = show(chromium, tmp_path, executable_page(small((odd, odd, odd)), clips=clips))
    page.click("#cascades tbody tr:nth-child(2)")
    page.run(DRAWN)
    said = dict(zip(page.texts("#details dt"), page.texts("#details dd"), strict=True))
    assert said["caption"] == odd
    assert said["clips"] == odd
    title = page.run("return document.title")
    assert title.startswith("step, 3 clips on ") and title.endswith(" - arachnec")
    assert page.run("return document.querySelectorAll('img, #cascades b').length") == 0
    assert page.messages() == []


def test_a_plan_of_1024_ranks_and_4096_cascades_opens_scrolls_zooms_and_filters(
    chromium: Browser, tmp_path: Path
) -> None:
    page = show(chromium, tmp_path, executable_page(large(1024, 4096), slower(large(1024, 4096))))
    assert ranks(page) == (0, 1023, 1024)
    page.click("#taller")
    page.click("#taller")
    page.click("#taller")
    first, last, _ = ranks(page)
    assert last - first < 512
    page.wheel(PLANNED, 0.5, 0.5, 4000)
    assert ranks(page)[0] > first
    page.click("#zoom-in")
    page.keys("#filter", "degree=4 tokens<1100")
    assert page.text("#count").startswith("100 of 4096")
    page.click("#next")
    assert "51 to 100 shown" in page.text("#count")
    page.click("#cascades tbody tr:first-child")
    page.run(DRAWN)
    assert page.text("#details strong") == "%t50"
    first, last, _ = ranks(page)
    assert first <= 200 <= last
    page.run("const r = document.getElementById('memory-rank'); r.value = 1023; r.dispatchEvent(new Event('change'))")
    page.run(DRAWN)
    assert page.text("#memory-says").startswith("rank 1023 holds")
    assert page.messages() == []


def test_one_rank_and_one_cascade_are_a_page_too(chromium: Browser, tmp_path: Path) -> None:
    alone = timed("t0", Phase.TRAIN, 0, 1000, (), (0.0, 30.0), (0,))
    module = lower(module_of(cluster(gpus=1), equal_clips(), [alone]))
    page = show(chromium, tmp_path, executable_page(module))
    assert page.texts("#critical b")[0] == "%t0"
    assert page.run("return document.getElementById('critical-choice').hidden")
    page.click("#zoom-in")
    assert page.messages() == []
