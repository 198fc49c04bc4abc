"""The live page in real headless Chromium: type a message, see it stream, see the block map move."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import parrot
import pytest
from browser import chromium
from server_harness import ServerThread, wait_until
from tiny_served import write_served_artifact

from runtime.server.config import ServerConfig

TEXT = "Paris is the capital of France; Praha je hlavní město."


@pytest.fixture(scope="module")
def slow_parrot(tmp_path_factory) -> Iterator[ServerThread]:
    """A step takes 50 ms, so that there is something to watch."""
    artifact = write_served_artifact(tmp_path_factory.mktemp("wide") / "parrot", max_context_len=4096)
    with ServerThread({"parrot": artifact}, factory=parrot.FACTORY, factory_args={"step_s": 0.05}) as running:
        yield running


@pytest.fixture(scope="module")
def page(slow_parrot: ServerThread, tmp_path_factory) -> Iterator:
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        browser.get(slow_parrot.url)
        wait_until(lambda: element(browser, "status").text == "live")
        yield browser


def element(browser, name: str):
    return browser.find_element("id", name)


def say(browser, text: str) -> None:
    """Type a message and send it with the keyboard alone."""
    from selenium.webdriver.common.keys import Keys

    element(browser, "prompt").send_keys(text, Keys.ENTER)


def texts(browser, selector: str) -> list[str]:
    """The texts of all that match, read in one go: the page may replace what it shows at any time."""
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((node) => node.textContent)", selector
    )


def answers(browser) -> list[str]:
    return texts(browser, ".message.assistant .text")


def last_meta(browser) -> str:
    """What is said below the last answer."""
    return (texts(browser, ".message.assistant .meta") or [""])[-1]


def used_blocks(browser) -> int:
    return int(element(browser, "blocks").get_attribute("data-used") or 0)


def pixels(browser) -> str:
    return browser.execute_script("return document.getElementById('blocks').toDataURL()")


def test_a_message_streams_in_and_the_block_map_moves(page, slow_parrot: ServerThread):
    wait_until(lambda: used_blocks(page) == 0)
    before = pixels(page)
    said = " ".join([TEXT] * 4)
    say(page, said)
    seen: set[int] = set()
    moved = False
    wait_until(lambda: answers(page))
    while (text := answers(page)[-1]) != said:
        assert said.startswith(text), text
        seen.add(len(text))
        moved = moved or (used_blocks(page) > 0 and pixels(page) != before)
    assert len(seen) > 4, "the answer came at once instead of streaming"
    assert moved
    wait_until(lambda: "tokens/s" in last_meta(page))
    wait_until(lambda: used_blocks(page) == 0)
    assert page.find_element("css selector", "[data-state='1'] b").text != "0"  # what it computed stays cached
    assert element(page, "ttft-p").text.startswith("p50")
    assert not page.get_log("browser")


def test_requests_of_others_are_shown_while_they_run(page, slow_parrot: ServerThread):
    body = {"prompt": "The quick brown fox", "max_tokens": 200, "stream": True}
    with slow_parrot.client() as client, client.stream("POST", "/v1/completions", json=body):
        wait_until(lambda: any("running" in row and "/ 200" in row for row in texts(page, "#requests tr")))
        wait_until(lambda: element(page, "running").text == "1")
        wait_until(lambda: float(element(page, "rate").text) > 0)
    wait_until(lambda: not texts(page, "#requests tr"))
    assert element(page, "idle").is_displayed()


def test_the_acceptance_of_drafts_is_shown_as_it_moves(page, slow_parrot: ServerThread, artifact: Path):
    """The parrot repeats its prompt, so drafts out of the prompt are accepted; the tile shows how many."""
    wait_until(lambda: element(page, "spec-detail").text == "no drafts")
    options = {"factory": parrot.FACTORY, "factory_args": {"step_s": 0.02}, "speculative_config": "ngram"}
    try:
        with ServerThread({"parrot": artifact}, **options) as drafting:
            page.get(drafting.url)
            wait_until(lambda: element(page, "spec-detail").text == "no drafts yet")
            assert element(page, "spec").text == "–"
            body = {"prompt": "one two three four five six", "max_tokens": 200, "temperature": 0}
            with drafting.client() as client:
                assert client.post("/v1/completions", json=body).status_code == 200
            wait_until(lambda: "tokens a verification" in element(page, "spec-detail").text)
            stats = drafting.stats()
            share = stats.spec_decode_num_accepted_tokens / stats.spec_decode_num_draft_tokens
            assert share > 0.5
            wait_until(lambda: abs(float(element(page, "spec").text.rstrip(" %")) - 100 * share) < 1)
    finally:
        page.get(slow_parrot.url)
        wait_until(lambda: element(page, "status").text == "live")


def test_escape_stops_an_answer_and_frees_its_blocks(page, slow_parrot: ServerThread):
    from selenium.webdriver.common.keys import Keys

    say(page, "x" * 200)
    wait_until(lambda: slow_parrot.stats().num_running == 1)
    wait_until(lambda: answers(page)[-1])
    element(page, "prompt").send_keys(Keys.ESCAPE)
    wait_until(lambda: slow_parrot.stats().num_running == 0, timeout=5)
    wait_until(lambda: last_meta(page).endswith("stopped"))


def test_sampling_controls_reach_the_request_and_errors_are_shown(page):
    page.execute_script("document.getElementById('controls').open = true")
    limit = element(page, "max_tokens")
    limit.clear()
    limit.send_keys("3")
    say(page, TEXT)
    wait_until(lambda: last_meta(page).endswith("max tokens"))
    limit.clear()
    limit.send_keys("99999")
    say(page, TEXT)
    wait_until(lambda: texts(page, ".message.error"))
    assert "99999" in texts(page, ".message.error")[-1]
    limit.clear()
    limit.send_keys("256")
    element(page, "clear").click()
    assert not page.find_elements("css selector", ".message")


def test_what_a_model_says_is_never_run_as_html(page):
    say(page, "<img src=x onerror=\"document.title='owned'\"><b>bold</b>")
    wait_until(lambda: answers(page) and answers(page)[-1].endswith("</b>"))
    assert page.title == "plancast"
    assert not page.find_elements("css selector", ".message b, .message img")


def test_the_theme_follows_the_system_and_then_the_choice(page):
    def background() -> str:
        return page.execute_script("return getComputedStyle(document.body).backgroundColor")

    light = background()
    element(page, "theme").click()
    assert background() != light
    page.refresh()
    wait_until(lambda: element(page, "status").text == "live")
    assert background() != light
    element(page, "theme").click()
    assert background() == light


def test_every_control_has_a_name_and_can_be_reached_by_keyboard(page):
    nameless = page.execute_script(
        "return [...document.querySelectorAll('button, input, select, textarea')].filter((node) =>"
        " !(node.labels?.length || node.getAttribute('aria-label') || node.textContent.trim())).map((node) => node.id)"
    )
    assert nameless == []
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    page.execute_script("document.activeElement.blur()")
    ActionChains(page).send_keys("/").perform()
    assert page.switch_to.active_element.get_attribute("id") == "prompt"
    ActionChains(page).send_keys(Keys.TAB).perform()
    assert page.switch_to.active_element.get_attribute("id") == "send"


def test_a_phone_sees_the_chat_first_and_never_scrolls_sideways(slow_parrot: ServerThread, tmp_path: Path):
    with chromium(tmp_path, width=360, height=740, dark=True) as browser:
        browser.get(slow_parrot.url)
        wait_until(lambda: element(browser, "status").text == "live")
        assert browser.execute_script("return document.documentElement.scrollWidth") == 360
        assert browser.execute_script("return document.documentElement.dataset.theme") == "dark"
        assert element(browser, "prompt").location["y"] < 740
        say(browser, TEXT)
        wait_until(lambda: answers(browser) and answers(browser)[-1] == TEXT)
        assert browser.execute_script("return document.documentElement.scrollWidth") == 360


def test_the_page_asks_for_a_key_where_the_server_does(artifact: Path, tmp_path: Path):
    config = ServerConfig(port=0, api_keys=("secret",))
    with ServerThread({"parrot": artifact}, config, factory=parrot.FACTORY) as server, chromium(tmp_path) as browser:
        browser.get(server.url)
        wait_until(lambda: element(browser, "status").text == "needs an API key")
        key = element(browser, "key")
        wait_until(key.is_displayed)
        key.send_keys("secret\t")
        wait_until(lambda: element(browser, "status").text == "live")
        say(browser, TEXT)
        wait_until(lambda: answers(browser) and answers(browser)[-1] == TEXT)


def test_the_page_runs_nothing_but_its_own_files(slow_parrot: ServerThread):
    with slow_parrot.client() as client:
        response = client.get("/")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy
