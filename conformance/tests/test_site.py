"""The built site: links, pictures and what a browser sees; each check is shown a site with that fault."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from conformance.publishing.rows import Results, read_results
from conformance.publishing.site_check import faults, main
from conformance.records import read_record

ROOT = Path(__file__).resolve().parents[2]
HEAD = '<head><link rel="icon" href="p.svg"></head>'
BODY = '<h1 id="a">A</h1><a href="#a">x</a> <img src="p.svg" alt="p">'
SOUND = f"<html>{HEAD}<body><article>{BODY}</article></body></html>"
PICTURE = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"></svg>'


def site(folder: Path, body: str = "", css: str = "") -> Path:
    """Write a site of one page; body goes into it."""
    (folder / "index.html").write_text(SOUND.replace("</article>", f"{body}</article>"))
    (folder / "p.svg").write_text(PICTURE)
    (folder / "s.css").write_text(css)
    return folder


def test_a_sound_site_has_no_faults(tmp_path: Path) -> None:
    more = '<a href="index.html#a">y</a> <a href="https://example.org/">z</a> <a href="mailto:a@b">m</a>'
    assert list(faults(site(tmp_path, more, "a { background: url(data:image/png;base64,) }"))) == []


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ('<a href="none.html">x</a>', "index.html: none.html leads nowhere"),
        ('<a href="#none">x</a>', "index.html: #none leads nowhere"),
        ('<a href="index.html#none">x</a>', "index.html: index.html#none leads nowhere"),
        ('<a href="../x">x</a>', "index.html: ../x leads nowhere"),
        ('<img src="none.png" alt="x">', "index.html: none.png leads nowhere"),
        ('<img src="p.svg">', "index.html: picture p.svg has no description"),
        ('<img src="p.svg" alt=" ">', "index.html: picture p.svg has no description"),
        ('<img src="https://example.org/p.png" alt="x">', "index.html: fetches https://example.org/p.png"),
        ('<script src="//example.org/x.js"></script>', "index.html: fetches //example.org/x.js"),
        ('<link rel="stylesheet" href="https://example.org/x.css">', "index.html: fetches https://example.org/x.css"),
        ('<link rel="preconnect" href="https://example.org">', "index.html: fetches https://example.org"),
    ],
)
def test_a_fault_in_a_page_is_found(tmp_path: Path, body: str, fault: str) -> None:
    assert list(faults(site(tmp_path, body))) == [fault]


@pytest.mark.parametrize("css", ["@import 'https://example.org/x.css';", "a { background: url(//example.org/x) }"])
def test_a_stylesheet_that_fetches_is_found(tmp_path: Path, css: str) -> None:
    assert [fault.startswith("s.css: fetches ") for fault in faults(site(tmp_path, "", css))] == [True]


def test_a_site_of_no_pages_is_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"{tmp_path}: no page\n0 pages, 1 faults\n"


@pytest.fixture
def results() -> Results:
    return read_results(ROOT)


@pytest.mark.docs
def test_pictures_are_made_of_records_and_are_the_same_each_time(results: Results) -> None:
    from conformance.publishing.pictures import pictures_of

    for group in ("speed", "steps", "memory", "gaps"):
        found = pictures_of(group, results)
        assert found, group
        assert [picture.svg for picture in pictures_of(group, results)] == [picture.svg for picture in found]
        assert all(picture.svg.startswith(b"<?xml") and len(picture.alt) > 60 for picture in found)
        assert pictures_of(group, Results([], [], [])) == []


@pytest.mark.docs
def test_a_picture_says_what_the_record_says(results: Results) -> None:
    from conformance.publishing.pictures import memory_parts, pictures_of

    row = next(r for r in results.rows if r.record.engine == "engine-cuda" and r.record.scenario == "27b-c512")
    parts = memory_parts(row.record)
    assert parts["weights"] == row.record.effective["resident_weights_n_bytes"]
    peak = row.record.peak_device_memory_n_bytes
    assert sum(n_bytes for name, n_bytes in parts.items() if n_bytes and name != "free") == peak
    gpu = row.record.machine.gpu
    assert gpu
    assert peak
    assert gpu.memory_n_bytes
    assert parts["free"] == gpu.memory_n_bytes - peak
    assert (parts["state"], parts["KV"]) == (156_893_184, 32 * 1024**2)
    theirs = next(r for r in results.rows if r.record.engine == "llama.cpp-b8763-cuda")
    assert memory_parts(theirs.record)["KV"] == 32 * 1024**2
    memory = pictures_of("memory", results)[0]
    assert (
        "27b-c2048, engine-cuda: weights 14,674, state 150, KV 128, arena (work) 20, context and kernels not measured"
        in memory.alt
    )
    assert "27b-c512, engine-cuda: weights 14,674, state 150, KV 32, arena (work)" in memory.alt
    assert "27b-c512, llama.cpp-b8763-cuda: weights 14,674, state 150, KV 32, arena (work) 505, context" in memory.alt
    assert "Not measured, 27b-c2048, engine-cuda: context and kernels, free." in memory.caption
    speed = pictures_of("speed", results)[0]
    figure = next(f for f in results.bench[0].record.figures if f.metric == "decode")
    assert f"{results.bench[0].record.scenario}, {figure.subject} {figure.tok_per_s:.1f} (" in speed.alt


@pytest.mark.docs
@pytest.mark.parametrize(
    ("record", "unknown"),
    [
        ("nvidia-h200-2026-11-30/27b-c2048", ["state", "KV", "arena (work)"]),  # from before they were recorded
        ("nvidia-h200-2026-12-01-a136871/27b-c2048", ["context and kernels", "free"]),  # the peak was not measured
    ],
)
def test_what_a_record_does_not_say_is_unknown_in_the_picture(record: str, unknown: list[str]) -> None:
    from conformance.publishing.pictures import memory_parts

    parts = memory_parts(read_record(ROOT / "results" / "v1" / record / "engine-cuda.json"))
    assert [name for name, n_bytes in parts.items() if n_bytes is None] == unknown


@pytest.mark.docs
def test_memory_is_split_where_a_record_has_the_parts(results: Results) -> None:
    from conformance.publishing.pictures import memory_parts

    record = next(r for r in results.rows if r.record.scenario == "27b-c512" and r.record.role == "engine").record
    arena = record.effective["arena_n_bytes"]
    assert isinstance(arena, int)
    effective = record.effective | {"state_n_bytes": 150 << 20, "kv_cache_n_bytes": 32 << 20}
    parts = memory_parts(record.model_copy(update={"effective": effective}))
    assert (parts["state"], parts["KV"], parts["arena (work)"]) == (150 << 20, 32 << 20, arena - (182 << 20))
    assert None not in parts.values()
    nothing = memory_parts(record.model_copy(update={"peak_device_memory_n_bytes": None, "effective": {}}))
    assert {*nothing.values()} == {None}


@pytest.mark.docs
def test_a_group_without_records_says_so() -> None:
    from conformance.publishing.site import figures

    assert figures(["gaps"], {"gaps": []}) == "Picture (gaps): not measured, no published record has what it needs."


@pytest.mark.docs
@pytest.mark.parametrize(
    ("text", "target", "folder", "expected"),
    [
        ("x", "numerics.md#a", "docs", "[x](numerics.md#a)"),
        ("x", "../results/README.md#the-gate", "docs", "[x](records.md#the-gate)"),
        ("x", "../docs/numerics.md", "results", "[x](numerics.md)"),
        ("x", "../results/v1/a.json", "docs", "[x](data/v1/a.json)"),
        ("x", "https://example.org/a", "docs", "[x](https://example.org/a)"),
        ("noxfile.py", "../noxfile.py", "docs", "noxfile.py"),
        ("sessions", "../noxfile.py", "docs", "sessions (`noxfile.py`)"),
    ],
)
def test_links_are_turned_around(
    text: str, target: str, folder: str, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    from conformance.publishing.site import turned

    known = {"numerics.md", "records.md", "data/v1/a.json"}
    assert turned(text, target, folder, ROOT, known, "p.md") == expected
    assert caplog.records == []


@pytest.mark.docs
def test_a_link_to_nothing_ends_the_build(tmp_path: Path) -> None:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from mkdocs.exceptions import Abort

    for name in ("docs", "results", "conformance/publishing", "engine/cuda/kernels"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("mkdocs.yml", "SECURITY.md", "README.md", "conformance/models/pydoc/README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    page = tmp_path / "docs" / "glossary.md"
    page.write_text(f"{page.read_text()}\n[x](../no-such-file.py)\n")
    config = load_config(str(tmp_path / "mkdocs.yml"), site_dir=str(tmp_path / "site"))
    with pytest.raises(Abort, match="strict mode"):
        build(config)
    logging.getLogger("mkdocs").handlers.clear()


@pytest.mark.browser
@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("", None),
        ('<div style="width: 2000px">x</div>', "px wide in a window of 390"),
        ("<script>console.error('oh')</script>", "oh"),
        ("<script>no_such_function()</script>", "no_such_function is not defined"),
        ('<img src="p.svg">', "has no description"),
        ('<img src="none.svg" alt="x">', "does not load"),
        ('<img src="http://127.0.0.1:9/p.png" alt="x">', "asks http://127.0.0.1:9/p.png"),
        ('<table><tr><td style="font-size: 7px">x</td></tr></table>', "letters below 10.0 px"),
    ],
)
def test_a_browser_finds_it(tmp_path: Path, capsys: pytest.CaptureFixture[str], body: str, says: str | None) -> None:
    from conformance.publishing.browser_check import main as look

    code = look([str(site(tmp_path, body))])
    out = capsys.readouterr().out
    assert code == (says is not None), out
    assert says is None or says in out
