"""The page in a real browser: what it draws of a run whose every time is known, and how it is moved through."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from pipesight.analysis.analyse import analyse
from pipesight.analysis.comparison import compare
from pipesight.runs.reading.run import open_run
from pipesight.view.comparison_text import part_rows, quantity_rows, settings_text
from pipesight.view.finding_sentences import finding_groups, nonfinite_in, remarks_in, warm_up_in
from pipesight.view.page import write_comparison, write_page
from support import browser
from support.analysed import analysed
from support.synthetic import START, Made

pytestmark = pytest.mark.skipif(not browser.is_there(), reason=browser.MISSING)

N, M, STEPS = 4, 4, 12
FORWARD, BACKWARD = 100, 200
WINDOW = (M + N - 1) * (FORWARD + BACKWARD)
PERIOD = WINDOW + 400
BUBBLE = (N - 1) / (M + N - 1)
BAD_STEP = 9
EVIL = "</script><img src=x onerror=window.hit=1>"
LAYERS = [["embed", "block0"], ["block1", "block2"], ["block3", EVIL], ["block4", "head"]]
NAMES = [name for layers in LAYERS for name in layers]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """GPipe without a gap: every forward takes 100, every backward 200; step 6 takes twice as long."""
    made = Made(tmp_path_factory.mktemp("page") / "<img src=x onerror=window.hit=1>", balance=[2] * N, chunks=M)
    sizes = {"class": "Linear", "parameter_bytes": 1000, "output_bytes": 100, "operators": 1}
    made.pipeline["layers"] = [{"name": name, "partition": j, **sizes} for j in range(N) for name in LAYERS[j]]
    made.pipeline["operator_seconds"] = [40e-6, 80e-6]  # what layers take mostly, however small a micro-batch is
    at = 0
    for step in range(STEPS):
        slow = 2 if step == 6 else 1
        end = made.gpipe(
            step,
            lambda phase, i, j, slow=slow: slow * {"forward": FORWARD, "backward": BACKWARD}[phase],
            at=at,
            layers=LAYERS.__getitem__,
        )
        made.span("compute", "step", begin=end + 50, dur=150)
        made.span("dataloader", "fetch", begin=end + 250, dur=100)
        made.transfer(step, partition=1, microbatch=0, begin=at + 95, dur=5)
        at = end + 400
        for k, layer in enumerate(NAMES):
            made.stat(layer, "activation", "mean", step, 0.1 * k - 0.3)
            made.stat(layer, "activation", "std", step, 10.0 ** -(step % 5))
        for i in range(M):
            made.log(_log(step, f"partition 2 micro-batch {i} forward", f"hello {i}"))
        made.log(_log(step, "", "the loss went down", level="WARNING"))
    bad = {"iteration": BAD_STEP, "layer": "block3", "tensor": "wgrad", "statistic": "mean"}
    bad |= {"partition": 2, "microbatch": 1, "phase": "backward"}
    made.stats[0].append({**bad, "value": None, "nonfinite": "nan", "nans": 17})
    made.stats[0].append({**bad, "iteration": BAD_STEP - 1, "value": 1.0})
    made.stats[0].append({**bad, "statistic": "std", "value": 0.5, "nans": 17})
    made.log(_log(3, "partition 0 micro-batch 0 forward", EVIL))
    folder = made.write()
    write_page(folder)
    return folder


def _log(step, where, message, level="INFO"):
    return f"2023-11-14T22:13:20.000000+00:00 {level} train [{f'step {step} {where}'.strip()}] {message}"


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    with browser.open_browser(tmp_path_factory.mktemp("profile") / "profile") as page:
        yield page


@pytest.fixture
def page(window, run):
    """The page, freshly opened, at a step without anything special."""
    window.resize(1280, 800)
    window.prefer("light")
    window.open(run / "report.html")
    window.complaints()
    go(window, 3)
    yield window
    assert window.complaints() == []


def go(page, place):
    """Move the slider."""
    page.run(
        "(e => { e.value = arguments[0]; e.dispatchEvent(new Event('input', { bubbles: true })) })"
        "(document.getElementById('step'))",
        place,
    )


def width(facts):
    return facts["view"]["to"] - facts["view"]["from"]


def type_into(page, selector, text):
    page.run(
        "(e => { e.value = arguments[1]; e.dispatchEvent(new Event('input', { bubbles: true })) })"
        "(document.querySelector(arguments[0]))",
        selector,
        text,
    )


# What is drawn.


def test_every_task_of_a_step_is_a_block(page):
    """A step shows a block for each partition, micro-batch and phase, and all of them are drawn."""
    facts = page.inspect()
    assert facts["blocks"] == facts["drawn"]["blocks"] == facts["drawn"]["shapes"] == N * M * 2
    assert [lane["blocks"] for lane in facts["lanes"]] == [M * 2] * N


def test_the_bubble_is_that_of_the_report(page, run):
    """The page, the analysis and arithmetic give one number."""
    with open_run(run) as opened:
        report = analyse(opened)
    assert report.overall.bubble == pytest.approx(BUBBLE)
    assert page.inspect()["bubble"] == pytest.approx(BUBBLE, abs=1e-6)
    assert f"{report.overall.bubble:.1%}" in page.text("#figures")
    assert f"bubble {BUBBLE:.1%}" in page.text("#step-facts")
    assert page.text("#verdict") == report.verdict.text.split(". ")[0].rstrip(".") + "."


def test_shares_say_of_what(page):
    """The bubble is a share of the window, the parts are of the step; a gain that is a limit says so."""
    assert "bubble of the window" in page.text("#figures")
    assert "shares of the step" in page.text("#time-facts")
    changes = page.text("#changes")
    assert re.search(r"saves at least \d+\.\d%\s.* · lower limit · ", changes)
    assert re.search(r"saves at most \d+\.\d%\s.* · upper limit · ", changes)


@pytest.mark.parametrize(("group", "facts"), [("#time", "#time-facts"), ("#log-scope", "#log-facts")])
def test_choices_are_pressed_and_keep_the_focus(page, group, facts):
    """Choosing what is shown changes it, presses that button alone, and leaves the focus on it."""
    before = page.text(facts)
    other = f"{group} [aria-pressed=false]"
    name = page.text(other)
    page.run("document.querySelector(arguments[0]).click()", other)
    assert page.text(facts) != before
    assert page.text(f"{group} [aria-pressed=true]") == name
    assert page.run("document.activeElement.textContent") == name


def test_gaps_have_their_share_of_the_window(page):
    """Idle time of a lane adds up to its bubble."""
    for lane in page.inspect()["lanes"]:
        assert sum(share for _, _, share in lane["idle"]) == pytest.approx(BUBBLE, abs=1e-6)
        assert lane["bubble"] == pytest.approx(BUBBLE, abs=1e-6)


def test_phases_differ_without_colour(page):
    """Blocks of two phases have different heights: the top of a forward's row is empty, that of a backward is not."""
    page.inspect()
    # Pixels near the top of the last lane, from end to end; no idle time is drawn where a block is.
    script = """((lane, times) => {
        const canvas = document.getElementById("timeline");
        const { rows, view } = window.pipesight.inspect();
        const ratio = canvas.width / canvas.clientWidth;
        const { top } = rows.find((row) => row.lane === lane);
        const { data } = canvas.getContext("2d").getImageData(0, (top + 3) * ratio, canvas.width, 1);
        const scale = canvas.width / (view.to - view.from);
        return times.map((time) => data[4 * Math.round((time - view.from) * scale) + 3]);
    })(arguments[0], arguments[1])"""
    forward = (N - 1) * FORWARD + FORWARD / 3
    backward = (M + N - 1) * FORWARD + BACKWARD / 3
    assert page.run(script, N - 1, [forward, backward]) == [0, 255]
    assert page.run("[...document.querySelectorAll('#legend .swatch')].map(e => e.innerText).join('')") == "FB"


def test_the_optimizer_and_data_loading_have_a_row(page):
    """What the program does beside the pipeline lies in a row of its own, after the window."""
    assert [row["kind"] for row in page.inspect()["rows"]] == ["program"] + ["lane"] * N
    assert "optimizer" in page.text("#legend")
    assert "data loading" in page.text("#legend")
    assert "transfer" in page.text("#legend")
    x, _ = page.place_of(0, WINDOW + 100)
    top = page.run("document.getElementById('timeline').getBoundingClientRect().top")
    page.point(x, top + 10)
    assert "Optimizer\n\n150 µs" in page.text("#tooltip")


def test_what_is_not_finite_is_marked(page):
    """A NaN in a gradient is a cross on the backward that computed it first, and on no other micro-batch's."""
    assert page.inspect()["drawn"]["crosses"] == 0
    go(page, BAD_STEP)
    assert page.inspect()["drawn"]["crosses"] == 1
    assert "✕" in page.text("#lane-labels")
    said = []
    for i in range(M):
        page.point(*page.place_of(2, (M + N - 1) * FORWARD + (1 + i + 0.5) * BACKWARD))
        said.append(page.text("#tooltip"))
    assert all(text.startswith("Backward of micro-batch") for text in said)
    bad = [text for text in said if "block3: wgrad has 17 NaN" in text]
    assert [text.split("\n")[0] for text in bad] == ["Backward of micro-batch 1"]


# Looking closer.


def test_hovering_says_where_how_long_and_which_layers(page):
    """The tooltip names phase, micro-batch, partition, time, share and layers."""
    page.point(*page.place_of(1, FORWARD + FORWARD / 2))
    text = page.text("#tooltip")
    assert "Forward of micro-batch 0" in text
    assert "partition 1" in text
    assert f"100 µs · {FORWARD / WINDOW:.1%} of the window" in text
    assert "block1\n50.0 µs" in text
    page.point(5, 5)
    page.frame()
    assert not page.seen("#tooltip")


def test_hovering_a_gap_says_how_long(page):
    """Idle time has a tooltip too."""
    page.point(*page.place_of(N - 1, FORWARD))
    assert "Idle" in page.text("#tooltip")
    assert f"300 µs · {3 * FORWARD / WINDOW:.1%} of the window" in page.text("#tooltip")


def test_a_click_opens_the_layers_of_a_block(page):
    """Clicking a block shows its layers, side by side; clicking it again closes them."""
    place = page.place_of(1, FORWARD * 1.5)
    page.click_at(*place)
    assert [layer["name"] for layer in page.inspect()["selected"]["layers"]] == LAYERS[1]
    assert "Forward of micro-batch 0 in partition 1" in page.text("#block")
    names = page.run("[...document.querySelectorAll('.layer-strip .layer-name')].map(e => e.innerText)")
    assert names == LAYERS[1]
    page.click_at(*place)
    assert page.inspect()["selected"] is None
    assert not page.seen("#block")


def test_the_wheel_zooms_where_the_mouse_is(page):
    """The time under the mouse stays under it."""
    before = page.inspect()
    time = WINDOW * 0.25
    x, y = page.place_of(1, time)
    page.wheel(x, y, by=-400)
    after = page.until(lambda facts: width(facts) < width(before) * 0.6)
    assert page.place_of(1, time)[0] == pytest.approx(x, abs=2)
    assert after["drawn"]["blocks"] < before["drawn"]["blocks"]


def test_a_page_that_cannot_zoom_out_scrolls(page):
    """The wheel does not hold a reader up who only wants to scroll past the timeline."""
    x, y = page.place_of(1, 500)
    page.wheel(x, y, by=300)
    page.wait("window.scrollY > 0")


def test_dragging_pans(page):
    """What was under the mouse when the button went down stays there, and a drag is no click."""
    x, y = page.place_of(1, WINDOW / 2)
    whole = width(page.inspect())
    page.wheel(x, y, by=-800)
    before = page.until(lambda facts: width(facts) < whole / 2)
    page.point(x, y)
    page.point(x, y, "mousePressed", button="left", clickCount=1)
    page.point(x - 100, y, "mouseMoved", button="left", buttons=1)
    page.point(x - 100, y, "mouseReleased", button="left", clickCount=1)
    after = page.inspect()
    canvas = page.run("document.getElementById('timeline').clientWidth")
    assert after["view"]["from"] - before["view"]["from"] == pytest.approx(100 / canvas * width(before), rel=0.02)
    assert after["selected"] is None


def test_two_fingers_zoom(page):
    """Fingers that move apart take what lies under them along."""
    page.resize(400, 800, touch=True)
    page.frame()
    page.run("document.getElementById('timeline').scrollIntoView({ block: 'center' })")
    before = page.inspect()
    x, y = page.place_of(1, WINDOW / 2)

    def touch(kind, *places):
        points = [{"x": place, "y": y, "id": number} for number, place in enumerate(places)]
        page.driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
        page.frame()

    touch("touchStart", x - 20)
    touch("touchStart", x - 20, x + 20)
    for apart in (30, 45, 60):
        touch("touchMove", x - apart, x + apart)
    touch("touchEnd")
    assert width(page.inspect()) == pytest.approx(width(before) / 3, rel=0.05)


def test_keys_go_from_block_to_block(page):
    """Arrows move the focus in a lane and between lanes, and a screen reader hears where it is."""
    page.focus("#timeline")
    page.keys("\ue014")  # right
    assert page.inspect()["focused"] == "3/0/0/0/0/0"
    page.keys("\ue014")
    assert page.inspect()["focused"] == "3/0/0/1/0/0"
    page.keys("\ue015")  # down: what runs there at the time
    assert page.inspect()["focused"].startswith("3/0/1/0/0")
    said = page.run("document.getElementById('announce').textContent")
    assert said.startswith("forward of micro-batch 0 in partition 1, 100 µs, 4.8% of the window")
    assert "layers block1, block2" in said
    assert "Forward of micro-batch 0" in page.text("#tooltip")
    page.keys("\ue007")  # enter
    assert page.inspect()["selected"]["key"].startswith("3/0/1/0/0")
    page.keys("\ue00c")  # escape
    assert page.inspect()["selected"] is None


def test_keys_zoom_and_pan(page):
    """Plus, minus, Shift with arrows and Home do what the mouse does."""
    page.focus("#timeline")
    whole = page.inspect()
    page.keys("+", "+")
    closer = page.inspect()
    assert width(closer) == pytest.approx(width(whole) / 1.5**2, rel=0.01)
    page.keys("d")
    assert page.inspect()["view"]["from"] > closer["view"]["from"]
    page.keys("-")
    assert width(page.inspect()) == pytest.approx(width(whole) / 1.5, rel=0.01)
    page.keys("\ue011")  # home
    assert page.inspect()["view"] == whole["view"]


def test_buttons_zoom(page):
    """So does who has no wheel and no keyboard."""
    whole = page.inspect()
    page.click("#zoom-in")
    assert width(page.inspect()) < width(whole)
    page.click("#zoom-whole")
    assert page.inspect()["view"] == whole["view"]


def test_layers_lie_in_their_block_where_there_is_room(page):
    """A double click fills the timeline with a block."""
    x, y = page.place_of(2, (M + N) * FORWARD + 1.5 * BACKWARD)
    page.click_at(x, y)
    page.click_at(x, y, times=2)
    facts = page.inspect()
    assert width(facts) == pytest.approx(1.5 * BACKWARD, rel=0.05)
    assert facts["selected"]["layers"][0]["name"] == "block3"


# Steps.


def test_the_slider_and_its_buttons_change_the_step(page):
    """Step, figures and blocks follow; the reader begins at the median step."""
    page.click("#step-next")
    assert page.inspect()["step"] == 4
    page.click("#step-previous")
    page.click("#step-previous")
    assert page.text("#step-title") == "Step 2"
    go(page, 6)
    facts = page.inspect()
    assert facts["view"]["end"] == 2 * WINDOW + 400
    assert facts["steps"] == list(range(STEPS))
    page.focus("#timeline")
    page.keys("\ue00f")  # page down
    assert page.inspect()["step"] == 7


def test_the_page_opens_at_the_step_that_matters(window, run, tmp_path):
    """That is the first in which a tensor is not finite; or the one that is asked for; or else a usual one."""
    window.open(run / "report.html")
    assert window.inspect()["step"] == BAD_STEP
    window.open(write_page(run, output=tmp_path / "seven.html", first=7))
    assert window.inspect()["step"] == 7
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("stats", "report.html"))
    window.open(write_page(tmp_path / "run"))
    assert not window.seen("#alarm")
    assert window.inspect()["view"]["end"] == PERIOD  # neither the slowest nor the last


def test_what_is_not_finite_comes_first(window, run):
    """The page begins with the terminal's sentence on it, and leads to the step, the layer and the block."""
    window.resize(1280, 800)
    window.open(run / "report.html")
    said = " ".join(window.text("#alarm").split())
    assert window.run("document.querySelector('.words').firstElementChild.id") == "alarm"
    with open_run(run) as opened:
        assert said.startswith(nonfinite_in(analyse(opened)).text)
    step, layer, block = (f"#alarm button:nth-of-type({k})" for k in (1, 2, 3))
    go(window, 2)
    window.click(step)
    assert window.inspect()["step"] == BAD_STEP
    go(window, 2)
    window.click(block)
    facts = window.inspect()
    assert facts["step"] == BAD_STEP
    assert facts["selected"]["key"].split("/")[:4] == [str(BAD_STEP), "0", "2", "1"]
    assert "Backward of micro-batch 1 in partition 2" in window.text("#block")
    window.click(layer)
    facts = window.inspect()["statistics"]
    assert facts["layer"] == "block3"
    assert facts["lineCrosses"] == 1
    assert window.complaints() == []


def test_the_page_says_what_the_terminal_says(window, tmp_path):
    """Stragglers, slow links and what was left out are on the page, in the terminal's words, with ways to the steps."""
    made = Made(tmp_path / "run", balance=[1, 1], chunks=2, left_out={"log_lines": 3})
    at = 0
    for step in range(10):
        slow = 8 if step == 0 else 1
        at = made.gpipe(step, lambda phase, i, j, k=slow, s=step: 1000 * k * (3 if (s, j) == (6, 1) else 1), at=at)
    folder = made.write()
    with open_run(folder) as opened:
        report = analyse(opened)
    window.open(write_page(folder))
    shown = " ".join(window.text("#findings").split())
    found = [finding for _, group in finding_groups(report) for finding in group]
    found += [*remarks_in(report), warm_up_in(report)]
    assert len(found) >= 3
    for finding in found:
        assert finding.text in shown
    window.run("[...document.querySelectorAll('#findings button')].find(b => b.textContent === '6').click()")
    assert window.inspect()["step"] == 6


def test_a_page_of_some_steps_is_of_these(window, run, tmp_path):
    """Steps, figures, statistics and log lines are those of the steps that were asked for, and the page says so."""
    window.open(write_page(run, output=tmp_path / "some.html", steps=range(2, 5)))
    facts = window.inspect()
    assert facts["steps"] == [2, 3, 4]
    assert window.text("#scope") == "steps 2 to 4"
    assert "mean of 3 training steps" in window.text("#time-facts")
    assert "3 steps" in window.text("#statistics-facts")
    window.run("[...document.querySelectorAll('#log-scope button')].find(b => b.textContent === 'all').click()")
    assert "step 3" in window.text("#log")
    assert "step 6" not in window.text("#log")
    assert "iteration 9" in window.text("#alarm")  # of the run, wherever it is
    assert "step 9" not in window.text("#alarm")


@pytest.mark.parametrize("share", [0.03, 0.3, 0.7, 0.999])
def test_a_page_that_is_cut_off_says_so(window, run, tmp_path, share):
    """Wherever the file ends too early, what is seen begins with that; a whole page does not have the sentence."""
    text = (run / "report.html").read_bytes()
    (tmp_path / "cut.html").write_bytes(text[: int(len(text) * share)])
    window.driver.get((tmp_path / "cut.html").as_uri())
    window.wait("(e => e && getComputedStyle(e).opacity === '1')(document.getElementById('incomplete'))")
    assert window.text("body").startswith("This page is incomplete: the end of the file is missing.")
    window.complaints()
    window.open(run / "report.html")
    assert not window.seen("#incomplete")


def test_a_comparison_has_a_page(window, tmp_path):
    """Headline, quantities, parts and layers are those of the terminal; the names of a run are text there, too."""
    reports = []
    for name, slow in (("a", 1), (EVIL.replace("/", ""), 2)):
        made = Made(tmp_path / name, balance=[2] * N, chunks=M)
        for step in range(3):
            made.gpipe(
                step,
                lambda phase, i, j, slow=slow: 100 * (slow if j == 2 else 1),
                at=step * 10_000,
                layers=LAYERS.__getitem__,
            )
        with open_run(made.write()) as opened:
            reports.append(analyse(opened))
    comparison = compare(*reports)
    path = write_comparison(comparison)
    assert path == Path(reports[1].path) / "comparison.html"
    window.driver.get(path.as_uri())
    window.wait("!document.getElementById('main').classList.contains('waiting')")
    assert f"{window.text('#headline')} {window.text('#headline-more')}".strip() == comparison.text
    assert window.text("#settings") == settings_text(comparison)
    for table, rows in (("quantities", quantity_rows(comparison)), ("parts", part_rows(comparison))):
        shown = window.run("[...document.querySelectorAll(arguments[0])].map(r => r.innerText)", f"#{table} tbody tr")
        assert [row.split("\t") for row in shown] == rows
    changed = [layer.name for layer in comparison.layers if layer.changed]
    assert sorted(changed) == sorted(["block3", EVIL])
    assert [name for name in changed if name in window.text("#layers")] == changed
    assert window.run("document.querySelectorAll('.stack-bar').length") == 2
    assert window.run("window.hit === undefined && document.images.length === 0")
    for size in ((1280, 800), (400, 800)):
        window.resize(*size)
        assert window.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert window.complaints() == []


def test_several_runs_have_a_page(window, tmp_path):
    """A page of three programs has a bar, a column and, in each chart, a line for each run."""
    runs = [Made(tmp_path / name, pipelines=[]) for name in "abc"]
    for k, made in enumerate(runs):
        for step in range(4):
            made.span("compute", "backward", begin=step * 1_000 * (k + 1), dur=500, module="Net", depth=0, step=step)
            made.span("compute", "step", begin=step * 1_000 * (k + 1) + 600, dur=100, step=step)
    reports = [analysed(made) for made in runs]
    pairs = [compare(reports[0], other) for other in reports[1:]]
    window.driver.get(write_comparison(*pairs).as_uri())
    window.wait("!document.getElementById('main').classList.contains('waiting')")
    shown = window.run("[...document.querySelectorAll('#parts tbody tr')].map(r => r.innerText)")
    assert [row.split("\t") for row in shown] == part_rows(*pairs)
    counts = {".stack-bar": 3, "#curves figure": 1, "#curves path": 3, "#runs > section": 3}
    for name, count in counts.items():
        assert window.run("document.querySelectorAll(arguments[0]).length", name) == count
    assert window.seen("#layers-section")
    assert window.complaints() == []


def test_the_step_as_a_table(page):
    """The same facts in a table, for who cannot see the timeline."""
    page.click("#step-table summary")
    page.wait("document.querySelector('#step-table-body tbody')")
    rows = page.run("document.querySelectorAll('#step-table-body tbody tr').length")
    assert rows == N + N * M * 2
    assert f"partition 3\t8\t1.20 ms\t{BUBBLE:.1%}" in page.text("#step-table-body")


def test_memory_lies_below_its_lane(window, tmp_path):
    """In a step where memory was counted, each lane has a row that says what its partition held at that very time."""
    made, at = Made(tmp_path / "run", balance=[2] * 2, chunks=2), 0
    megabyte = 1 << 20
    for step in range(2):
        end = made.gpipe(step, lambda *_: 100, at=at)
        made.span("compute", "step", begin=end + 50, dur=50)
        for j in range(2) if step else ():
            for moment, held in ((100, 3 + j), (200, 6 + j), (500, 2)):
                parts = dict.fromkeys(("gradients", "optimizer_state", "inputs"), 0)
                values = {**parts, "weights": megabyte, "activations": (held - 1) * megabyte}
                name, now = f"memory of partition {j}", START + at + moment + 100 * j
                event = {"id": 0, "name": name, "cat": "memory", "pid": 4000, "tid": 4000, "ts": now, "ph": "C"}
                made.events[0].append({**event, "args": values, "point": values})
        at = end + 400
    write_page(made.write())
    window.open(tmp_path / "run" / "report.html")
    go(window, 0)
    assert "memory" not in [row["kind"] for row in window.inspect()["rows"]]
    window.run("document.querySelector('#memory button').click()")
    rows = window.until(lambda facts: facts["step"] == 1)["rows"]
    assert [(row["kind"], row["lane"]) for row in rows if row["kind"] != "program"] == [
        (kind, lane) for lane in (0, 1) for kind in ("lane", "memory")
    ]
    assert "partition 1: 7.00 MiB" in window.text("#memory")
    below = [row["top"] + row["height"] / 2 - rows[0]["top"] for row in rows if row["kind"] == "memory"]
    lanes = [row["top"] + row["height"] * 0.7 - rows[0]["top"] for row in rows if row["kind"] == "lane"]
    for j, time, activations in ((0, 150, 2), (0, 450, 5), (0, 520, 1), (1, 250, 3), (1, 350, 6)):
        x, y = window.place_of(j, time)
        window.point(x, y + below[j] - lanes[j])
        assert f"activations {activations}.00 MiB" in window.text("#tooltip")
    assert window.complaints() == []


def test_a_trace_without_a_pipeline_has_a_page_too(window, tmp_path):
    """There is no timeline then; a table says where the time went."""
    made = Made(tmp_path / "run")
    made.span("compute", EVIL, begin=0, dur=70)
    window.complaints()
    window.driver.get(write_page(made.write()).as_uri())
    window.wait("window.pipesight?.inspect().revision === 0")
    assert not window.seen("#timeline")
    assert "no pipeline tasks" in window.text("#notice")
    assert f"compute\t{EVIL}\t1\t70.0 µs" in window.text("#names")
    assert window.complaints() == []


# Searching.


@pytest.mark.parametrize(
    ("query", "blocks", "layers"),
    [
        ("block3", 2 * M, 1),
        ("micro-batch 2", 2 * N, 0),
        ("backward", N * M, 0),
        ("partition 1 forward", M, 0),
        ("partition 1 micro-batch 0", 2, 0),
    ],
)
def test_searching_finds_blocks_and_layers(page, query, blocks, layers):
    """A word finds layers by name, and blocks by phase, micro-batch, partition, or the layers in them."""
    type_into(page, "#search", query)
    found = page.inspect()["found"]
    assert (found["blocks"], found["layers"]) == (blocks, layers)
    assert f"{blocks} blocks" in page.text("#search-found")


def test_searching_finds_log_lines(page):
    """Lines that hold the words are left, with the words marked; Escape brings the others back."""
    page.focus("#search")
    page.keys("loss down")
    assert page.inspect()["found"]["lines"] == STEPS
    assert page.run("[...document.querySelectorAll('#log mark')].map(e => e.innerText)") == ["loss", "down"]
    page.keys("\ue00c")
    assert page.inspect()["found"] is None


def test_enter_goes_to_the_next_block_found(page):
    """One after the other, in the order of time."""
    page.keys("/")
    page.keys("block3", "\ue007")
    assert page.inspect()["selected"]["key"] == "3/0/2/0/0/0"
    page.keys("\ue007")
    assert page.inspect()["selected"]["key"] == "3/0/2/1/0/0"


# Below the timeline.


def test_bars_say_where_the_time_went(page):
    """The parts are those of the mean step, to which one of twelve adds twice as much, and they are explained."""
    text = page.text("#time")
    assert re.search(rf"forward\s+{400 * 13 / 12:.0f} µs · {400 * 13 / (12 * PERIOD + WINDOW):.1%}", text)
    assert re.search(rf"fill and drain\s+{900 * 13 / 12:.0f} µs", text)
    assert re.search(r"optimizer\s+150 µs", text)
    assert "More micro-batches make it smaller" in text
    bars = page.run("[...document.querySelectorAll('#time .stack-name')].map(e => e.innerText)")
    assert bars == ["all", *(f"partition {j}" for j in range(N))]
    page.run("[...document.querySelectorAll('#time .choice button')].at(-1).click()")
    assert page.text("#time-facts").startswith("step 3, 2.50 ms")


def test_layers_sort_and_narrow(page):
    """A click on a title sorts by it, another the other way round; typing narrows the table."""

    def names():
        return page.run("[...document.querySelectorAll('#layers tbody th')].map(e => e.innerText)")

    assert names() == NAMES
    page.run("document.querySelector('#layers [data-key=name]').click()")
    assert names() == sorted(NAMES, key=lambda name: name.lower())
    page.run("document.querySelector('#layers [data-key=name]').click()")
    assert names()[-1] == sorted(NAMES)[0]
    assert page.run("document.querySelector('#layers th[aria-sort=descending]').innerText").startswith("layer")
    type_into(page, "#layers-search", "partition 3")
    assert sorted(names()) == ["block4", "head"]


def test_the_heat_map_has_a_cell_for_each_layer_and_step(page):
    """And another one for another statistic, which the reader chooses."""
    drawn = page.inspect()["statistics"]
    assert (drawn["cells"], drawn["crosses"]) == (2 * N * STEPS, 0)
    page.run(
        "(e => { e.value = 'wgrad'; e.dispatchEvent(new Event('change', { bubbles: true })) })"
        "(document.getElementById('tensor'))"
    )
    drawn = page.inspect()["statistics"]
    assert (drawn["cells"], drawn["crosses"], drawn["lineCrosses"], drawn["points"]) == (2, 1, 1, 1)
    assert "1 value not finite" in page.text("#statistics-facts")
    page.run(
        "(e => { e.value = 'std'; e.dispatchEvent(new Event('change', { bubbles: true })) })"
        "(document.getElementById('statistic'))"
    )
    drawn = page.inspect()["statistics"]  # of the elements that are finite, so the number is, too
    assert (drawn["cells"], drawn["crosses"], drawn["lineCrosses"], drawn["points"]) == (1, 1, 1, 0)
    labels = page.run("['.heatmap', '.line-chart'].map(e => document.querySelector(e).ariaLabel).join('; ')")
    assert "1 value not finite" in labels.split("; ")[0]
    assert labels.split("; ")[1].endswith("1 not finite")
    assert "0.5 without 17 NaN" in page.run("document.querySelector('.line-chart .cross').textContent")


def test_a_cell_chooses_layer_and_step(page):
    """The line chart shows the layer, the timeline the step."""
    box = page.run(
        "(e => { e.scrollIntoView({ block: 'center' }); const r = e.getBoundingClientRect();"
        " return [r.left, r.top, r.width, r.height] })(document.querySelector('.heatmap'))"
    )
    page.click_at(box[0] + box[2] * 5.5 / STEPS, box[1] + box[3] * 2.5 / (2 * N))
    facts = page.inspect()
    assert facts["step"] == 5
    assert facts["statistics"]["layer"] == "block1"
    assert facts["statistics"]["points"] == STEPS
    assert page.text("#statistics h3") == "block1 · activation mean"
    label = page.run("document.querySelector('.line-chart').getAttribute('aria-label')")
    assert label == f"block1, activation mean: {STEPS} values, from \u22120.1 to \u22120.1, 0 not finite"


def test_log_lines_of_the_step_and_of_the_block(page):
    """Lines of the step, then of the block that is opened, of all that the program wrote."""
    assert re.fullmatch(r"[67] of \d\d lines", page.text("#log-facts"))
    page.click_at(*page.place_of(2, 2.5 * FORWARD))
    page.frame()
    assert re.fullmatch(r"1 of \d\d lines", page.text("#log-facts"))
    assert "hello 0" in page.text("#log")


# The page itself.


def test_names_from_a_run_are_text(page):
    """A layer, a log line and a folder named like markup are shown as they are called, and do nothing."""
    go(page, 3)
    page.click_at(*page.place_of(2, 2.5 * FORWARD))
    page.point(*page.place_of(2, 2.5 * FORWARD))
    page.frame()
    assert EVIL in page.text("#block")
    assert EVIL in page.text("#layers")
    assert EVIL in page.text("#tooltip")
    assert page.text("#title") == "<img src=x onerror=window.hit=1>"
    page.run("document.querySelector('#log-scope button').click()")
    assert EVIL in page.text("#log")
    assert page.run("document.images.length") == 0
    assert page.run("window.hit === undefined")


def test_nothing_is_fetched(window, run):
    """The page asks nobody for anything, and its policy would not let it."""
    window.requests()
    window.open(run / "report.html")
    go(window, 2)
    window.frame()
    asked = [address for address in window.requests() if not address.startswith("data:")]
    assert asked == [(run / "report.html").resolve().as_uri()]
    text = (run / "report.html").read_text()
    assert "connect-src 'none'" in text
    assert "http" not in re.sub(
        r"https://ui\.perfetto\.dev|http://www\.w3\.org/2000/svg|https?:\"|http-equiv", "", text
    )


@pytest.mark.parametrize("size", [(1280, 800), (400, 800), (320, 640)])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_fits_every_width(page, size, theme):
    """No part sticks out, whatever is open; the timeline is seen on the first screen of a desktop."""
    page.prefer(theme)
    page.resize(*size)
    page.frame()
    go(page, BAD_STEP)
    page.focus("#timeline")
    page.keys("\ue014", "\ue007")
    page.frame()
    assert page.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    if size[0] == 1280:
        assert page.run("document.getElementById('timeline').getBoundingClientRect().bottom") < 800


@pytest.mark.parametrize("size", [(1280, 800), (400, 800)])
def test_nothing_moves_while_the_page_comes_up(window, run, size):
    """What is shown first stays where it is."""
    window.resize(*size)
    window.open(run / "report.html")
    window.frame()
    script = """const [done] = arguments, moved = [];
        const where = ({ node, previousRect, currentRect }) => [node?.id || node?.nodeName, previousRect, currentRect];
        new PerformanceObserver((list) => moved.push(...list.getEntries().map((entry) => entry.sources.map(where))))
            .observe({ type: "layout-shift", buffered: true });
        setTimeout(() => done(moved), 200);"""
    assert window.driver.execute_async_script(script) == []


def test_dark_and_light(page):
    """The page follows the system, until the reader says otherwise."""

    def paper():
        return page.run("getComputedStyle(document.body).backgroundColor")

    light = paper()
    page.prefer("dark")
    page.frame()
    dark = paper()
    assert sum(map(int, re.findall(r"\d+", dark))) < 150 < 600 < sum(map(int, re.findall(r"\d+", light)))
    page.click("#theme")
    assert paper() == light
    assert page.run("document.getElementById('theme').getAttribute('aria-label')") == "Dark theme"
    page.click("#theme")
    assert paper() == dark
    page.run("localStorage.clear()")


def test_everything_has_a_name(page):
    """What can be focused says what it is."""
    nameless = page.run("""
        [...document.querySelectorAll("button, input, select, canvas[tabindex], [role=region], summary, a")]
          .filter((e) => e.getClientRects().length)
          .filter((e) => !(e.getAttribute("aria-label") || e.innerText?.trim() || e.labels?.length))
          .map((e) => e.outerHTML)
    """)
    assert nameless == []
    assert page.run("document.getElementById('timeline').getAttribute('aria-label')").startswith(
        f"Timeline of step 3: {N * M * 2} blocks in {N} partitions"
    )
    assert page.run("document.documentElement.lang") == "en"


def test_perfetto_is_explained_in_a_file(page):
    """A page that is a file cannot read the trace beside it, so it says what to drop where."""
    page.click("#perfetto")
    text = page.text("#perfetto-help")
    assert "trace/rank-00000.pfw.gz" in text
    assert "pipesight view" in text
    page.click("#perfetto-help button")
    page.frame()
    assert not page.seen("#perfetto-help")


# Links and ranges.


def test_link(page, run):
    """The address names step, block and range, as the reader goes; opening it shows them, or says what is missing."""
    assert page.run("location.hash") == "#step=3"
    page.click_at(*page.place_of(2, 350))
    selected = page.inspect()["selected"]["key"]
    page.keys("[")  # nothing has the focus of the keyboard, so there is no range
    page.focus("#timeline")
    page.keys("\ue014", "[", "\ue014", "]")
    facts = page.inspect()
    address = page.run("location.href")
    assert "block=forward.1.2" in address
    assert facts["range"][0] < facts["range"][1] == facts["range"][0] + 2 * FORWARD
    page.driver.get("about:blank")
    page.open(address)
    again = page.inspect()
    assert (again["step"], again["selected"]["key"], again["range"]) == (3, selected, facts["range"])
    assert not page.seen("#link-notice")
    page.run("location.hash = '#step=77&block=forward.0.0'")
    assert page.until(lambda seen: seen["step"] == STEPS - 1)["selected"] is None
    assert "Step 77 of this link is not on the page; step 11 is the nearest" in page.text("#link-notice")
    page.run("location.hash = '#timeline'")  # the link to skip the header
    assert page.inspect()["step"] == STEPS - 1


def test_range(page):
    """Shift and drag selects a range, with totals that are those of the schedule; Escape takes it away."""
    whole = page.inspect()["view"]
    page.point(*page.place_of(0, 0))
    x, y = page.place_of(0, 100)
    page.point(x, y, "mousePressed", button="left", clickCount=1, modifiers=8)
    x, y = page.place_of(0, 400)
    page.point(x, y, "mouseMoved", button="left", modifiers=8)
    page.point(x, y, "mouseReleased", button="left", clickCount=1, modifiers=8)
    facts = page.inspect()
    assert facts["range"] == pytest.approx([100, 400], abs=3)
    assert facts["view"] == whole
    rows = [re.findall(r"([\d.]+)%", row) for row in page.text("#range tbody").splitlines()]
    # Partition j computes forwards from 100 j to 100 (j + 4): shares of the range for forwards, busy and idle.
    busy = [75, 100, 100, 66.7, 33.3]
    assert [float(row[1]) for row in rows] == pytest.approx(busy, abs=1)
    assert [float(row[2]) for row in rows] == pytest.approx([100 - share for share in busy], abs=1)
    page.focus("#timeline")
    page.keys("\ue00c")
    assert page.inspect()["range"] is None
    assert not page.seen("#range")


def test_critical_path(page):
    """A key draws the chain up to the next step: tasks fill the window, then come the optimizer and a batch to load."""
    assert page.inspect()["path"] is None
    page.focus("#timeline")
    page.keys("c")
    facts = page.inspect()
    tasks = {"forward": (M + N - 1) * FORWARD, "backward": (M + N - 1) * BACKWARD}
    assert dict(facts["path"]["totals"]) == {**tasks, "gap": 150, "optimizer": 150, "data loading": 100}
    assert facts["drawn"]["path"] == len(facts["path"]["lane"]) == 2 * (M + N - 1) + 5
    assert "Critical path of 2.50 ms" in page.text("#path")
    assert "forward\n700 µs · 28.0%" in page.text("#path")
    page.click("#path-toggle")
    assert page.inspect()["drawn"]["path"] == 0
    assert not page.seen("#path")
