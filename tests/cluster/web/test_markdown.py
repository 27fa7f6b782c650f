"""Markdown as the page shows it: what models write becomes elements, all else stays text."""

from __future__ import annotations

import time

import pytest

from browser import Page

CASES = {
    "one\ntwo\n\nthree": "<p>one\ntwo</p><p>three</p>",
    "# Title\n### Part **two**\ntext": "<h3>Title</h3><h5>Part <strong>two</strong></h5><p>text</p>",
    "#no title": "<p>#no title</p>",
    "a **b** *c* __d__ _e_ ***f***": (
        "<p>a <strong>b</strong> <em>c</em> <strong>d</strong> <em>e</em> <strong><em>f</em></strong></p>"
    ),
    "*a **b** c*": "<p><em>a <strong>b</strong> c</em></p>",
    "2 * 3 * 4, f(*args, **kwargs), snake_case_name": "<p>2 * 3 * 4, f(*args, **kwargs), snake_case_name</p>",
    r"\*a\* and **b": "<p>*a* and **b</p>",
    "`a *b*` and ``c`d``": "<p><code>a *b*</code> and <code>c`d</code></p>",
    "say:\n```py\nif a < b:\n\n    *c*\n```\nend": (
        '<p>say:</p><pre tabindex="0"><code>if a &lt; b:\n\n    *c*</code></pre><p>end</p>'
    ),
    "```\nunfinished": '<pre tabindex="0"><code>unfinished</code></pre>',
    "- a\n- b\n  more\n\n- c\n\nend": "<ul><li>a</li><li>b\nmore</li><li>c</li></ul><p>end</p>",
    "3. a\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
    "- a\n1. b": '<ul><li>a</li></ul><ol start="1"><li>b</li></ol>',
    "1. a\n   - b\n   - c\n2. d": '<ol start="1"><li>a<ul><li>b</li><li>c</li></ul></li><li>d</li></ol>',
    "1. a\n\n   ```\n   b\n     c\n   ```\n2. d": (
        '<ol start="1"><li>a<pre tabindex="0"><code>b\n  c</code></pre></li><li>d</li></ol>'
    ),
    "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
    "[a *b*](https://x.org/c_(d)?e=f)": (
        '<p><a href="https://x.org/c_(d)?e=f" target="_blank" rel="noopener noreferrer">a <em>b</em></a></p>'
    ),
    "[a](javascript:b) [c](data:text/html,d) [e](/f)": "<p>[a](javascript:b) [c](data:text/html,d) [e](/f)</p>",
    "[a](JaVaScRiPt:b) [c](java\tscript:d)": "<p>[a](JaVaScRiPt:b) [c](java\tscript:d)</p>",
    "<b>a</b> &amp; <script>b</script>": "<p>&lt;b&gt;a&lt;/b&gt; &amp;amp; &lt;script&gt;b&lt;/script&gt;</p>",
}
# Written by a model in a loop; what grows with the square of a text's length would hold the page up.
LOOPS = ["- ", "*", "**a ", "`", "[", "_a", "> ", "1. ", "***a* ", "  - a\n"]


def shown(page: Page, text: str) -> str:
    """Return a text's markup."""
    script = """
        const [text, done] = arguments;
        import("./web/markdown.js").then(({ markdown }) => {
            const place = document.createElement("div");
            place.append(...markdown(text));
            done(place.innerHTML);
        });
    """
    return page.driver.execute_async_script(script, text)


@pytest.fixture
def blank(page: Page) -> Page:
    page.open("playground")
    return page


def test_what_models_write_is_shown(blank: Page):
    assert {text: shown(blank, text) for text in CASES} == CASES


def test_a_text_may_end_anywhere(blank: Page):
    whole = "\n\n".join(CASES)
    for end in range(0, len(whole), 7):
        shown(blank, whole[:end])


def test_a_model_in_a_loop_holds_nothing_up(blank: Page):
    for loop in LOOPS:
        started_s = time.monotonic()
        shown(blank, loop * 4000)
        assert time.monotonic() - started_s < 3, loop
