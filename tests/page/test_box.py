"""The box view against real servers: its figures are those of the routes, and it outlives what befalls a server."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from box import Box, Run
from box_view import COUNTER, OTHER, ROUTE, SIZES, TWO, View, count, mib, shown, signed, told

pytestmark = pytest.mark.timeout(300)
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1440, "height": 900}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Two ranks that flip on request."""
    yield from served(Box(tmp_path_factory.mktemp("two")), *TWO)


def served(box: Box, *flags: str) -> Iterator[Run]:
    try:
        run = box.up(str(COUNTER), *flags)
        yield run
        stopped(run)
    finally:
        box.close()


def stopped(run: Run) -> None:
    run.send(signal.SIGTERM)
    assert run.wait() == 0, run.err
    assert run.left_behind() == []


@pytest.fixture
def look(browser: Any, wait_until: Callable[..., Any]) -> Iterator[Callable[..., View]]:
    """`look(url, size)`: a view in a browser context of its own; at the end it must not have failed."""
    views = []

    def open_view(url: str, size: dict[str, int] = DESK, **more: Any) -> View:
        page = browser.new_context(viewport=size, **more).new_page()
        page.set_default_timeout(60_000)
        views.append(View(page, url, wait_until))
        return views[-1]

    yield open_view
    for view in views:
        view.check()
        view.page.context.close()


@contextmanager
def load(run: Run, streams: int = 2) -> Iterator[None]:
    """Requests, one after the other in each of some threads, until the block is left."""
    ended = threading.Event()

    def ask(lane: int) -> None:
        while not ended.is_set():
            count(run, 17 + lane, 200)

    threads = [threading.Thread(target=ask, args=(lane,)) for lane in range(streams)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def flip_button(view: View) -> Any:
    return view.page.locator(".panel.flips button")


# --------------------------------------------------------------------------------------------------- figures of routes


def test_bars_and_table_have_the_figures_of_the_budget(two: Run, look: Callable[..., View]) -> None:
    view = look(two.url).open()
    budget = view.budgets[-1]
    layout, host = told(two, f"{ROUTE}/status")["layout"], budget["devices"][-1]["index"]
    rows = {row["line"]: row for row in budget["measured"]}
    assert len(rows) > 15 and rows["flip transit"]["measured_mib"] is None, "a line that is unknown"

    shown_rows = view.memory(host)
    for line, row in rows.items():
        planned, measured = row["predicted_mib"], row["measured_mib"]
        difference = None if planned is None or measured is None else measured - planned
        wanted = [line, "not planned" if planned is None else mib(planned), mib(measured), signed(difference)]
        assert shown_rows[line][:4] == wanted
    ledger = budget["plan"]["ledger"]
    assert set(shown_rows) == {each["line"] for each in ledger} | set(rows) | {"sum"}
    elsewhere = [each for each in ledger if each["line"] == "kv, rank 0" and layout not in each["held"]]
    assert shown_rows["kv, rank 0"][4] == f"{mib(elsewhere[0]['mib'])} at {', '.join(elsewhere[0]['held'])}"

    cache = "model file (page cache)"
    for key, column in (("predicted", "predicted_mib"), ("measured", "measured_mib")):
        wanted_parts = {line: row[column] for line, row in rows.items() if row[column] and line != cache}
        assert dict(view.bar(host, key)) == wanted_parts
        assert shown_rows["sum"][1 if key == "predicted" else 2] == mib(sum(wanted_parts.values()))
    known = [row for row in rows.values() if None not in (row["predicted_mib"], row["measured_mib"])]
    assert shown_rows["sum"][3] == signed(sum(row["measured_mib"] - row["predicted_mib"] for row in known))
    peak = sum(value for _, value in view.bar(host, "peak"))
    assert peak == pytest.approx(budget["plan"]["peak_mib"][host], abs=0.1)
    assert budget["plan"]["binds"]["line"] in view.text(".binds")


def test_the_whole_device_is_held_by_this_server_and_others_or_free(two: Run, look: Callable[..., View]) -> None:
    view = look(two.url).open()
    budget, corridor = view.budgets[-1], told(two, f"{ROUTE}/corridor")["devices"][0]
    parts = dict(view.bar(corridor["index"], "whole"))
    assert parts["*held"] == budget["measured_total"]["smaps_mib"]
    assert parts["*floor"] == corridor["floor_mib"]
    assert sum(parts.values()) == pytest.approx(budget["host"]["limit_mib"], abs=0.1)
    free = [sample[1] for sample in corridor["samples"][-80:]]
    assert min(free) - 200 < parts["*free"] + parts["*floor"] < max(free) + 200


def test_the_head_and_the_ranks_are_those_of_the_status(two: Run, look: Callable[..., View]) -> None:
    view = look(two.url).open()
    status = told(two, f"{ROUTE}/status")
    assert view.text(".who .name") == "counter" and status["model"]["quant"] in view.text(".who .facts")
    assert (view.chip("state"), view.chip("layout"), view.chip("epoch"), view.chip("ranks")) == (
        "ready",
        status["layout"],
        str(status["epoch"]),
        "2",
    )
    rows = view.rows("ranks")
    for rank in status["ranks"]:
        cells = rows[f"rank {rank['rank']}"]
        assert cells[1] == rank["device"] and rank["isa"] in cells[2] and cells[9] == str(rank["pid"])
        first, end = rank["layers"]
        assert cells[3] == f"layers {first} to {end - 1}" and cells[8] == "0"
    assert view.text(".panel.events .quiet-line") == "Nothing has happened."


def test_the_corridor_has_its_floor_as_a_line_and_its_least_value(two: Run, look: Callable[..., View]) -> None:
    view = look(two.url).open()
    device = told(two, f"{ROUTE}/corridor")["devices"][0]
    name = f".panel.corridor [data-device='{device['index']}']"
    view.page.locator(f"{name} .across.floor").wait_for(state="attached")
    assert view.text(f"{name} .across-name") == f"floor {shown(device['floor_mib'])}"
    view.wait_until("the least value", lambda: least_told(two) in view.text(f"{name} .sums"))
    assert "kept all the time" in view.text(f"{name} .sums")


def least_told(run: Run) -> str:
    return f"Least free since the start: {mib(told(run, f'{ROUTE}/corridor')['devices'][0]['min_free_mib'])} MiB"


def test_speeds_and_load_are_counters_of_the_status_over_time(two: Run, look: Callable[..., View]) -> None:
    view = look(two.url).open()
    with load(two):
        tile = ".tile[data-tile='generated'] .value"
        view.wait_until("a speed", lambda: view.text(tile) not in ("unknown tok/s", "0 tok/s"))
        view.wait_until("running requests", lambda: view.text(".tile[data-tile='requests'] .value") != "0 running")
        view.wait_until("KV in use", lambda: view.text(".tile[data-tile='kv'] .value") != shown(0) + " %")
    idle = f"{shown(told(two, f'{ROUTE}/status')['tokens']['generated'])} since the load"
    view.wait_until("the count", lambda: view.text(".tile[data-tile='generated'] .more") == idle)
    path = view.page.locator("[data-chart='generated'] .picture path.line").first.get_attribute("d")
    assert path and "V" in path, "a line that moves"
    assert "most" in str(view.page.locator("[data-chart='generated'] svg.picture").get_attribute("aria-label"))


# ------------------------------------------------------------------------------------------------------------- flips


def test_the_button_flips_and_the_flip_is_told_in_strip_and_table(two: Run, look: Callable[..., View]) -> None:
    view = look(two.url).open()
    before = told(two, f"{ROUTE}/status")["layout"]
    button = flip_button(view)
    assert button.text_content() == f"Flip to {OTHER[before]} now"
    button.click()
    view.wait_until("the other layout", lambda: view.chip("layout") == OTHER[before])
    record = told(two, f"{ROUTE}/flip")["last"][-1]
    key = f"flip {record['id']}"
    assert record["state"] == "committed" and record["cause"] == "request"
    view.wait_until("the flip", lambda: view.rows("flips").get(key, [""] * 5)[4] == "committed")
    cells = view.rows("flips")[key]
    assert cells[2] == f"{before} → {OTHER[before]}" and cells[3] == "request"
    took = record["ms"]["total"]
    assert cells[5] == f"{shown(took, 2 if took < 10 else 1 if took < 100 else 0)} ms"
    assert cells[9] == shown(record["live"]["requests"]) and cells[10] == shown(record["live"]["rows"])
    assert key in view.stops()
    layouts = view.page.locator("[data-layout]").evaluate_all("(all) => all.map((each) => each.dataset.layout)")
    assert layouts[-1] == OTHER[before] and before in layouts
    view.wait_until("the way back", lambda: flip_button(view).text_content() == f"Flip to {before} now")
    if before == "pipeline":
        view.wait_until("shares", lambda: view.rows("ranks")["rank 0"][3] == "50 % of every layer")


def test_flips_under_load_from_elsewhere_are_told_and_read_by_keyboard(two: Run, look: Callable[..., View]) -> None:
    view = look(two.url).open()
    known = len(told(two, f"{ROUTE}/flip")["last"])
    with load(two):
        for _ in range(2):
            to = OTHER[told(two, f"{ROUTE}/status")["layout"]]
            begun = told(two, f"{ROUTE}/flip", "POST", {"to": to})
            view.wait_until("its end", lambda url=begun["url"]: told(two, url)["state"] == "committed")
    records = told(two, f"{ROUTE}/flip")["last"]
    assert len(records) == known + 2
    last = f"flip {records[-1]['id']}"
    view.wait_until("both flips", lambda: last in view.rows("flips"))
    assert view.rows("flips")[last][9] == shown(records[-1]["live"]["requests"])
    cursor = view.page.get_by_role("slider", name="Layouts, flips and events over time")
    cursor.focus()
    view.page.keyboard.press("End")
    assert last in str(cursor.get_attribute("aria-valuetext")) and "committed in" in view.text(
        "[data-chart='layouts'] .readout"
    )
    view.page.keyboard.press("ArrowLeft")
    assert f"flip {records[-2]['id']}" in str(cursor.get_attribute("aria-valuetext"))


def test_a_refused_flip_is_told_with_its_arithmetic(two: Run, look: Callable[..., View]) -> None:
    view = look(two.url)
    error = {
        "message": "it does not fit",
        "code": "does_not_fit",
        "needed_mib": 812.5,
        "available_mib": 600.0,
        "device": "cpu",
    }

    def refuse(route: Any) -> None:
        if route.request.method == "POST":
            route.fulfill(status=409, json={"error": error})
        else:
            route.continue_()

    view.page.route(f"**{ROUTE}/flip*", refuse)
    view.open()
    flip_button(view).click()
    answer = view.page.locator(".panel.flips .answer.bad")
    answer.wait_for()
    wanted = "Not begun: it does not fit (needed 812.5 MiB on cpu, 600.0 MiB there: 212.5 MiB lack)"
    assert answer.text_content() == wanted and answer.get_attribute("role") == "status"


def test_a_server_of_several_ranks_without_flips_refuses_and_says_why(box: Box, look: Callable[..., View]) -> None:
    run = box.up(str(COUNTER), "--devices", "cpu:2", "--layout", "pipeline", "--flip", "off", *SIZES)
    view = look(run.url).open()
    reason = told(run, f"{ROUTE}/status")["flip"]["hold_reason"]
    assert reason in view.text(".policy")
    flip_button(view).click()
    view.page.locator(".panel.flips .answer.bad").wait_for()
    assert view.text(".answer").startswith("Not begun: ")
    stopped(run)


def test_one_rank_has_no_flips_and_says_why(box: Box, look: Callable[..., View]) -> None:
    run = box.up(str(COUNTER), *SIZES)
    view = look(run.url).open()
    assert not flip_button(view).is_visible()
    assert view.text(".policy") == f"No flips: {told(run, f'{ROUTE}/status')['flip']['hold_reason']}."
    assert view.rows("ranks")["rank 0"][3].startswith("layers 0 to")
    stopped(run)


# ------------------------------------------------------------------------------------- what befalls a server and a page


def test_a_worker_that_dies_is_an_event_and_a_restart(box: Box, look: Callable[..., View]) -> None:
    run = box.up(str(COUNTER), *TWO)
    view = look(run.url).open()
    count(run, 17, 50)
    os.kill(told(run, f"{ROUTE}/status")["ranks"][1]["pid"], signal.SIGKILL)
    view.wait_until("the restart", lambda: view.rows("ranks")["rank 1"][8] == "1")
    view.wait_until("ready", lambda: view.chip("state") == "ready")
    events = view.page.locator(".panel.events tbody tr")
    view.wait_until("the events", lambda: events.count() >= 2)
    kinds = [row.get_attribute("data-key") for row in events.all()]
    assert kinds.index("recovered") < kinds.index("worker_lost"), "newest first"
    assert any(stop.startswith("worker_lost") for stop in view.stops())
    count(run, 17, 50)
    status = told(run, f"{ROUTE}/status")
    view.wait_until(
        "counts go on",
        lambda: view.text(".tile[data-tile='generated'] .more").startswith(shown(status["tokens"]["generated"])),
    )
    stopped(run)


def test_a_page_left_open_over_a_restart_finds_the_new_server(box: Box, look: Callable[..., View]) -> None:
    port = str(free_port())
    run = box.up(str(COUNTER), "--port", port, *TWO)
    view = look(run.url).open()
    flip_button(view).click()
    view.wait_until("a flip", lambda: view.chip("epoch") == "1")
    stopped(run)
    view.page.locator(".box-root .notice", has_text="The server is not reached").wait_for()
    assert view.chip("state") == "away" and view.memory(0), "what was known stays, and is called old"
    assert flip_button(view).is_disabled()
    again = box.up(str(COUNTER), "--port", port, *TWO)
    view.page.get_by_role("button", name="Try now").click(force=True)
    view.wait_until("the new server", lambda: view.chip("state") == "ready")
    view.wait_until("an epoch of its own", lambda: view.chip("epoch") == "0")
    assert view.text(".panel.flips .quiet-line") == "No flip yet." and not view.stops()[0].startswith("flip")
    notes = [
        cells[3]
        for cells in view.page.locator(".panel.events tbody tr").evaluate_all(
            "(all) => all.map((row) => [...row.cells].map((cell) => cell.textContent))"
        )
    ]
    assert notes == ["another server answers here: counts begin anew", "the server is not reached"]
    pids = [str(rank["pid"]) for rank in told(again, f"{ROUTE}/status")["ranks"]]
    view.wait_until("its ranks", lambda: [cells[9] for cells in view.rows("ranks").values()] == pids)
    stopped(again)


def test_while_a_model_loads_the_view_tells_how_far_it_is(box: Box, look: Callable[..., View]) -> None:
    port = free_port()
    fault = {"HOMESERVE_TESTING": "1", "HOMESERVE_FAULT": "rank=0,step=load,nth=1,action=delay:5000"}
    run = box.start("up", str(COUNTER), "--port", str(port), *SIZES, **fault)
    view = look(f"http://127.0.0.1:{port}")
    view.wait_until("the port", lambda: is_open(port))
    view.open(ready=False)
    notice = view.page.locator(".box-root .notice", has_text="Loading: ")
    notice.wait_for()
    assert notice.locator("progress").is_visible()
    assert "still being loaded" in view.text(".panel.memory .quiet-line") and view.chip("state") == "loading"
    view.page.locator(".panel.memory .device").wait_for()
    assert not notice.is_visible()
    run.wait_ready()
    stopped(run)


def is_open(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1):
            return True
    except OSError:
        return False


def test_a_server_with_a_key_is_shown_once_the_key_is_given(
    box: Box, look: Callable[..., View], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-this-test\n")
    run = box.up(str(COUNTER), *SIZES, "--api-key-file", str(keys))
    view = look(run.url).open(ready=False)
    view.page.locator(".box-root .notice", has_text="asks for an API key").wait_for()
    view.page.get_by_role("button", name="Enter the key").click()
    view.page.keyboard.type("a-key-of-this-test")
    view.page.keyboard.press("Enter")
    view.page.locator(".panel.memory .device").wait_for()
    assert view.chip("state") == "ready" and not view.page.locator(".box-root .notice").is_visible()
    stopped(run)


def test_of_several_models_one_is_chosen_and_one_that_is_out_says_so(box: Box, look: Callable[..., View]) -> None:
    config = box.folder / "config" / "homeserve"
    config.mkdir(parents=True)
    entry = '[[models]]\nid = "{}"\npath = "{}"\nkv_tokens = 2048\ncontext = {}\n'
    toml = entry.format("short", COUNTER, 512) + entry.format("long", COUNTER, 1024)
    (config / "homeserve.toml").write_text(toml)
    run = box.up(XDG_CONFIG_HOME=str(config.parent))
    view = look(run.url).open()
    chooser = view.page.locator(".box-root .choose select")
    first = view.text(".who .name")
    other = {"short": "long", "long": "short"}[first]
    view.wait_until("both models", lambda: chooser.locator("option").count() == 3)
    chooser.select_option(other)
    view.page.locator(".box-root .notice", has_text=f"{other} is not in memory").wait_for()
    assert view.text(".who .name") == other and not view.memory(0)
    view.page.get_by_role("button", name="Load", exact=True).click()
    view.wait_until("its memory", lambda: view.memory(0))
    status = told(run, f"{ROUTE}/status?model={other}")
    assert shown(status["model"]["context"]) in view.text(".who .facts") and view.text(".who .name") == other
    assert "All 2 models that are in" in view.text(".panel.memory .sums")
    chooser.select_option(first)
    view.wait_until("the first again", lambda: view.text(".who .name") == first and view.memory(0))
    view.page.get_by_role("button", name="Unload", exact=True).click()
    view.page.locator(".box-root .notice", has_text=f"{first} is not in memory").wait_for()
    stopped(run)


# -------------------------------------------------------------------------------------------------------------- asking


def test_a_hidden_tab_asks_nothing_and_a_shown_one_at_once(two: Run, look: Callable[..., View]) -> None:
    view = look(two.url)
    view.page.clock.install()
    view.open()
    view.hide(True)
    view.page.clock.run_for(2000)  # a round that had begun
    view.asked.clear()
    view.page.clock.run_for(3 * 60_000)
    assert [path for path in view.asked if path.startswith(ROUTE)] == []
    with view.page.expect_request(f"**{ROUTE}/status*"):
        view.hide(False)


def test_never_two_questions_at_once(two: Run, look: Callable[..., View]) -> None:
    view = look(two.url)
    view.page.clock.install()
    view.open()
    held: list[Any] = []
    view.page.route(f"**{ROUTE}/status*", lambda route: held.append(route))
    view.wait_until("a question", lambda: step(view, 1000) or held)
    view.asked.clear()
    for _ in range(20):
        step(view, 400)
    assert len(held) == 1 and [path for path in view.asked if path.startswith(ROUTE)] == []
    view.page.unroute(f"**{ROUTE}/status*")
    held.pop().continue_()
    view.wait_until("the next", lambda: step(view, 1000) or any(path.startswith(ROUTE) for path in view.asked))


def step(view: View, ms: int) -> bool:
    """Let time pass in the page. False, so that one waits on."""
    view.page.clock.run_for(ms)
    return False


def test_a_server_that_is_away_is_asked_less_and_less(two: Run, look: Callable[..., View]) -> None:
    view = look(two.url)
    view.page.clock.install()
    view.open()
    away: list[Any] = []

    def refuse(route: Any) -> None:
        away.append(route)
        route.abort()

    view.page.route(f"**{ROUTE}/**", refuse)
    view.wait_until("the first failure", lambda: step(view, 1000) or away)
    for _ in range(300):
        step(view, 1000)
    assert 300 // 15 <= len(away) <= 300 // 15 + 8, f"{len(away)} times in five minutes"
    view.page.unroute(f"**{ROUTE}/**")
    view.page.get_by_role("button", name="Try now").click(force=True)
    view.wait_until("the server", lambda: step(view, 500) or view.chip("state") == "ready")


def test_a_question_costs_little_and_the_dear_one_is_rare(two: Run, look: Callable[..., View]) -> None:
    view = look(two.url)
    view.page.clock.install()
    view.open()
    view.asked.clear()
    for _ in range(120):
        step(view, 500)
        view.page.evaluate("1")
    times = {
        name: sum(path.startswith(f"{ROUTE}/{name}") for path in view.asked)
        for name in ("status", "budget", "corridor", "flip")
    }
    assert times["status"] <= 62 and all("plans=0" in path for path in view.asked if path.startswith(f"{ROUTE}/status"))
    count(two, 17, 50)
    assert (
        told(two, f"{ROUTE}/status?plans=0")["plans"] == [] and len(told(two, f"{ROUTE}/status?plans=3")["plans"]) == 3
    )
    assert len(told(two, f"{ROUTE}/status")["plans"]) > 3
    assert times["budget"] <= 7 and times["corridor"] <= 13 and times["flip"] <= 5, times


def test_another_view_asks_nothing_of_the_box(two: Run, look: Callable[..., View]) -> None:
    view = look(two.url)
    view.page.clock.install()
    view.open()
    view.page.evaluate("location.hash = '#chat'")
    view.page.locator("#chat-view").wait_for()
    step(view, 2000)  # a round that had begun
    view.asked.clear()
    view.page.clock.run_for(30_000)
    assert [path for path in view.asked if path.startswith(ROUTE)] == []
    view.page.evaluate("location.hash = '#box'")
    view.page.locator(".panel.memory .device").wait_for()


# ------------------------------------------------------------------------------------------------------- for everybody


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_but_tables_scrolls_sideways(two: Run, look: Callable[..., View], scheme: str) -> None:
    view = look(two.url, PHONE, color_scheme=scheme).open()
    for each in ("html", "#box-view"):
        assert view.page.locator(each).evaluate("(each) => each.scrollWidth") == PHONE["width"]
    wide = """(all) => all.filter((each) => !each.closest(".scroll, .unseen"))
        .filter((each) => each.getBoundingClientRect().right > innerWidth + 0.5)
        .map((each) => each.outerHTML.slice(0, 90))"""
    assert view.page.locator("#box-view *").evaluate_all(wide) == []
    for summary in view.page.locator("#box-view summary:visible").all():
        summary.click()
    regions = view.page.locator(".scroll:visible")
    assert view.page.locator("#box-view *").evaluate_all(wide) == [], "also with every table open"
    assert view.page.locator("#box-view").evaluate("(each) => each.scrollWidth") == PHONE["width"]
    assert regions.count() >= 3
    for region in regions.all():
        assert region.get_attribute("tabindex") == "0" and region.get_attribute("aria-label")


@pytest.mark.parametrize(("scheme", "size"), [("light", DESK), ("dark", PHONE)], ids=("light desk", "dark phone"))
def test_axe_finds_nothing_with_every_table_open(
    two: Run, look: Callable[..., View], axe: str, scheme: str, size: dict[str, int]
) -> None:
    view = look(two.url, size, color_scheme=scheme).open()
    for summary in view.page.locator("#box-view summary:visible").all():
        if not summary.evaluate("(each) => each.parentElement.open"):
            summary.click()
    view.page.evaluate(f"{axe}; 0")
    found = view.page.evaluate("axe.run(document)")["violations"]
    assert [(each["id"], each["nodes"][0]["html"][:120]) for each in found] == []


def test_parts_of_memory_are_read_by_arrow_keys(two: Run, look: Callable[..., View]) -> None:
    view = look(two.url).open()
    cursor = view.page.locator(".panel.memory [role='slider']")
    cursor.focus()
    view.page.keyboard.press("Home")
    assert "this server, measured" in str(cursor.get_attribute("aria-valuetext"))
    view.page.keyboard.press("ArrowDown")
    view.page.keyboard.press("ArrowRight")
    text = str(cursor.get_attribute("aria-valuetext"))
    line = text.split(":")[0]
    row = next(row for row in view.budgets[-1]["measured"] if row["line"] == line)
    assert f"planned, {view.chip('layout')} {mib(row['predicted_mib'])} MiB" in text
    assert view.text(".panel.memory .readout") == text
    assert view.page.locator("rect.part.marked").first.get_attribute("data-line") == line


def test_every_picture_has_a_name_and_the_values_of_a_chart_are_a_table_too(
    two: Run, look: Callable[..., View]
) -> None:
    view = look(two.url).open()
    pictures = view.page.locator("#box-view svg.picture")
    assert pictures.count() >= 6
    for picture in pictures.all():
        assert picture.get_attribute("role") == "img" and len(str(picture.get_attribute("aria-label"))) > 20
    chart = view.page.locator("[data-chart='kv']")
    chart.locator("summary").click()
    chart.locator("table tbody tr").first.wait_for()
    assert chart.locator("table thead th").all_text_contents() == ["From", "in use", "cached"]


def test_the_time_shown_is_kept_for_the_tab(two: Run, look: Callable[..., View]) -> None:
    view = look(two.url).open()
    view.page.get_by_role("radio", name="1 h").check(force=True)
    view.page.reload()
    assert view.page.get_by_role("radio", name="1 h").is_checked()
