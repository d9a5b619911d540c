"""The report: its numbers, and in a browser its errors, slider and table."""

import dataclasses
import json
import re
import shutil

import h5py
import numpy as np
import pytest
from launch import run_here
from plotly.offline import get_plotlyjs
from tiny_result import draw, tiny

from dpfl_mpi import prepare
from dpfl_mpi.data.own import arrays_of
from dpfl_mpi.figures import report
from dpfl_mpi.figures.frames import of_results
from dpfl_mpi.results import Result

CHROMIUM = list(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
FLAGS = "headless no-sandbox disable-gpu no-first-run disable-sync disable-background-networking"
FLAGS += " disable-component-update window-size=1280,2400"


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    """Return the path of a report on two runs, one with a graph and one without."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(draw("report", [tiny(path.parent, m, m) for m in ("dpfl", "local")]).html)
    return path


def stored(page, name):
    return json.loads(re.search(rf"const {name} = (.*);</script>", page)[1])


def test_the_page_holds_everything_itself_and_these_numbers(html):
    text = html.read_text()
    outside_scripts = re.sub(r"<script>.*?</script>", "", text, flags=re.S)
    assert "{{" not in outside_scripts  # every placeholder is filled
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"(?!data:)", text)
    runs = stored(html.read_text(), "RUNS")
    assert [r["name"] for r in runs] == ["DPFL (B_c = 3), seed 42", "Local, seed 42"]
    assert runs[0]["edges"] == [[0, 1, 0, 2, 1, 0, 2, 0, 2, 3], [0, 2, 2, 0], [0, 1, 0, 2, 2, 0]]
    assert runs[0]["sparsity"] == [43.75, 62.5, 56.25] and runs[0]["order"] == [0, 2, 1, 3]
    assert runs[0]["summary"]["test accuracy, %"] == 70
    assert runs[0]["curves"]["test accuracy, %"] == [50, 60, 70]
    assert runs[0]["summary"]["models received per client"] == 3.8  # (10 + 2 + 3) / 4, rounded
    assert runs[1]["edges"] == [] and runs[1]["positions"] == []


def test_the_page_knows_until_when_omega_is_the_recorded_one(tmp_path):
    """Searched anew in round 2, of rounds 0 to 2; never without a period."""
    periods = {"inf": 3, 2: 2, 5: 3}
    lines = of_results([tiny(tmp_path, p, omega_period=p) for p in periods]).files.itertuples()
    assert [report.describe(line)["omega_until"] for line in lines] == list(periods.values())


def test_where_nobody_is_scored_the_page_has_no_number(tmp_path):
    none = tiny(tmp_path, "none", flipped=np.ones(4, bool), flip_share=0.9)
    page = draw("report", [none, tiny(tmp_path, "local", "local")]).html
    assert "NaN" not in page[page.index("const RUNS = ") :]
    runs, groups = stored(page, "RUNS"), stored(page, "GROUPS")
    assert [r["summary"]["test accuracy, %"] for r in runs] == [None, 65.0]
    assert runs[0]["low"] == runs[0]["high"] == [None] * 3
    assert runs[0]["summary"]["edges at the end"] == 3
    assert [g["name"] for g in groups] == ["Local", "DPFL (B_c = 3)"]
    assert [g["summary"]["test accuracy, %"] for g in groups] == [65.0, None]
    # A browser's JSON has no infinity, which the seconds of a damaged file may have.
    with h5py.File(tiny(tmp_path).path, "r+") as file:
        file["seconds/train"][1] = np.inf
    (run,) = stored(draw("report", [Result(tmp_path / "a.h5")]).html, "RUNS")
    assert run["summary"]["seconds"] is None and run["seconds"]["train"] == [1.0, None, 1.0]


NAMES = (
    "<img src=x onerror=\"document.title='it ran'\">",
    "<!--<script>",
    "</script><script>document.title='it ran'</script>",
    "<b>&lt;\u2028</b>",
    "{{GROUPS}}",
    "<a href='https://example.org'>x</a>",
)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """Return the path of a report on two runs whose names look like parts of a page."""
    folder, i = tmp_path_factory.mktemp("hostile"), np.arange(240) % len(NAMES)
    x = np.random.default_rng(0).integers(0, 60, (240, 4, 4)) + 30 * i[:, None, None]
    results, fields = [], {"dataset": "arrays", "partition": "natural", "clients": 3}
    fields |= {"method": "random_graph", "budget": 2}
    client = np.array(NAMES[3:])[np.arange(240) // len(NAMES) % 3]
    for name in ("{{DATA}}", "{{GROUPS}}"):
        arrays = arrays_of(x.astype(np.uint8) + len(results), i, client, group=client)
        data = folder / f"{name}.h5"
        prepare.write(dataclasses.replace(arrays, class_names=NAMES), "arrays", data, own=True)
        more = {"data": str(data), "rounds": 1, "tau_train": 1}
        results.append(Result(run_here(folder / f"{len(results)}.h5", fields | more)))
    (page := folder / "report.html").write_text(draw("report", results).html)
    return page


def test_names_are_texts_whatever_they_look_like(hostile):
    page = hostile.read_text()
    assert [run["classes"] for run in stored(page, "RUNS")] == [list(NAMES)] * 2
    settings = [group["setting"] for group in stored(page, "GROUPS")]
    assert settings == ["{{DATA}} natural", "{{GROUPS}} natural"]
    assert page.count("{{DATA}} natural, {{GROUPS}} natural</") == 2  # title and heading
    own = page.replace(get_plotlyjs(), "")
    assert own.count("<script") == own.count("</script") == 4 and "<!--" not in own


def test_seeds_are_averaged_and_the_best_comes_first(tmp_path):
    """DPFL has 70 and 75 %, Local 65 % twice; accuracies of the rounds are .1 apart."""
    pairs = [(m, s) for s in (52, 42) for m in ("local", "dpfl")]
    page = draw("report", [tiny(tmp_path, f"{m}{s}", m, s) for m, s in pairs]).html
    groups, runs = stored(page, "GROUPS"), stored(page, "RUNS")
    assert [g["name"] for g in groups] == ["DPFL (B_c = 3)", "Local"]
    assert groups[0]["summary"]["seeds"] == 2 and groups[0]["summary"]["test accuracy, %"] == 72.5
    assert [g["summary"]["\u00b1 over seeds"] for g in groups] == [3.54, 0]
    assert groups[0]["mean"] == [52.5, 62.5, 72.5] and groups[0]["spread"] == [3.536] * 3
    assert groups[0]["colour"] != groups[1]["colour"]
    rows = ("Local", "DPFL (B_c = 3)")
    assert [r["name"] for r in runs] == [f"{row}, seed {seed}" for seed in (52, 42) for row in rows]


def test_the_force_layout_puts_friends_together():
    weights = np.zeros((6, 6))
    weights[:3, :3] = weights[3:, 3:] = 1 - np.eye(3)
    order = [0, 3, 1, 4, 2, 5]  # interleaved
    xy = report.layout(weights[np.ix_(order, order)])
    assert xy.min() == 0 and xy.max() == 1
    mine, theirs = xy[[0, 2, 4]], xy[[1, 3, 5]]
    spread = max(np.linalg.norm(g - g.mean(0), axis=1).max() for g in (mine, theirs))
    assert np.linalg.norm(mine.mean(0) - theirs.mean(0)) > 2 * spread


@pytest.fixture(scope="module")
def browser(html, tmp_path_factory):
    if not CHROMIUM or not shutil.which("chromedriver"):
        pytest.skip("Chromium and its chromedriver are not installed")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM[0]
    for flag in (*FLAGS.split(), f"user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    with webdriver.Chrome(options=options, service=service) as driver:
        driver.get(html.as_uri())
        yield driver


def run(browser, script):
    by_name = "const byName = id => document.getElementById(id)"
    return browser.execute_script(f"{by_name}; return {script}")


def of_all(browser, selector, value):
    """Return a value of each element `e` that a selector finds."""
    return run(browser, f"[...document.querySelectorAll({selector!r})].map(e => {value})")


def change(browser, name, value, event="input"):
    script = f"arguments[0].value = {value}; arguments[0].dispatchEvent(new Event('{event}'))"
    browser.execute_script(script, browser.find_element("id", name))


@pytest.mark.browser
def test_it_loads_without_errors_and_without_network(browser):
    assert browser.title == "Local and DPFL (B_c = 3) on Digits Patho(3)"
    assert browser.get_log("browser") == []
    asked = "performance.getEntriesByType('resource').map(e => e.name)"
    asked += ".filter(name => !name.startsWith('data:'))"
    assert run(browser, asked) == []
    assert len(of_all(browser, ".js-plotly-plot", "1")) == 7
    buttons = of_all(browser, ".modebar-btn", "e.dataset.title")
    # nothing on the page uploads a run
    assert buttons and not [b for b in buttons if "hare" in b or "loud" in b]


@pytest.mark.browser
def test_the_slider_changes_the_graph(browser):
    # receiver 0 first in the order 0, 2, 1, 3: itself, took 2, took 1
    both = "[byName('round').textContent, byName('matrix').data[0].z[0]]"
    assert run(browser, both) == ["round 2 of 2", [3, 2, 2, 0]]
    change(browser, "slider", 1)
    assert run(browser, both) == ["round 1 of 2", [3, 2, 1, 0]]
    assert run(browser, "byName('matrix').layout.title.text") == "round 1: 2 edges, sparsity 62.5 %"
    assert run(browser, "byName('force').data[0].x.length") == 6  # two edges of from, to, gap
    text = "client 0<br>0 6<br>averages with: 2<br>test 80 %"
    assert run(browser, "byName('force').data[2].text[0]") == text
    change(browser, "slider", 2)


def column(browser, number):
    return of_all(browser, "#clients tbody tr", f"e.cells[{number}].textContent")


@pytest.mark.browser
def test_the_table_sorts_and_a_click_follows_a_client(browser):
    heads = browser.find_elements("css selector", "#clients th")
    assert column(browser, 0) == ["0", "1", "2", "3"]
    (head,) = (head for head in heads if head.text == "best test %")
    browser.execute_script("arguments[0].click()", head)
    assert column(browser, 2) == ["40", "60", "80", "100"]
    assert column(browser, 0) == ["3", "1", "0", "2"]
    again = browser.find_elements("css selector", "#clients th")[2]
    assert again.get_attribute("aria-sort") == "ascending"
    browser.execute_script("arguments[0].click()", again)
    assert column(browser, 0) == ["2", "0", "1", "3"]
    browser.find_element("css selector", "#clients tbody tr").click()
    assert run(browser, "byName('accuracy').data.at(-1).name") == "client 2, test"


@pytest.mark.browser
def test_runs_are_compared_and_chosen(browser):
    assert run(browser, "byName('comparison').hidden") is False
    rows = "#compare tbody tr", "[e.cells[0].textContent, e.cells[3].textContent]"
    best_first = [["DPFL (B_c = 3)", "70"], ["Local", "65"]]
    assert of_all(browser, *rows) == best_first
    browser.execute_script("document.querySelectorAll('#compare th')[3].click()")
    assert of_all(browser, *rows) == best_first[::-1]
    for i, hidden in ((1, True), (0, False)):  # Local has no graph
        change(browser, "run", i, "change")
        assert run(browser, "byName('graphs').hidden") is hidden
    assert browser.get_log("browser") == []


@pytest.mark.browser
def test_it_fits_a_phone(browser, html):
    """At 420 px the page does not move sideways; its first curves have most of the width."""
    wide = {"width": 420, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", wide)
    browser.get(html.as_uri())
    assert run(browser, "document.documentElement.scrollWidth") <= 420
    assert run(browser, "byName('compare-curves')._fullLayout._size.w") > 280
    assert of_all(browser, ".modebar-btn", "1") == []  # it would cover the titles
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.browser
def test_no_name_runs_or_is_taken_for_html(browser, html, hostile):
    browser.get(hostile.as_uri())
    assert browser.title.endswith(" on {{DATA}} natural, {{GROUPS}} natural")
    assert browser.get_log("browser") == []
    assert len(of_all(browser, ".js-plotly-plot", "1")) == 7
    ticks = of_all(browser, "#matrix .xtick text", "e.textContent")
    names = {" ".join(name.split()) for name in NAMES}
    assert ticks and {" ".join(tick.split()) for tick in ticks} <= names
    for of_clients in (column(browser, 1), column(browser, 2)):  # names and groups
        assert set(of_clients) == set(NAMES[3:])
    run(browser, "Plotly.Fx.hover(byName('matrix'), {xval: 0, yval: 1})")
    shown = " ".join(of_all(browser, "#matrix .hovertext text", "e.textContent"))
    assert any(name.split()[0] in shown for name in NAMES)
    html_or_bold = "img, .js-plotly-plot text a, .js-plotly-plot tspan[style*=bold]"
    assert of_all(browser, html_or_bold, "1") == []
    browser.get(html.as_uri())


@pytest.mark.browser
def test_in_omega_is_left_out_once_it_is_searched_anew(browser, tmp_path):
    """The last test here: the browser stays on this page."""
    page = tmp_path / "anew.html"
    page.write_text(draw("report", [tiny(tmp_path, omega_period=2)]).html)
    browser.get(page.as_uri())
    assert column(browser, 9) == ["-"] * 4  # the page opens at round 2
    assert run(browser, "byName('matrix').data[0].z[0]") == [3, 2, 2, 0]
    assert "is not recorded" in run(browser, "byName('oneway').textContent")
    change(browser, "slider", 1)
    assert sorted(column(browser, 9)) == ["0", "1", "2", "2"]
    assert run(browser, "byName('matrix').data[0].z[0]") == [3, 2, 1, 0]
