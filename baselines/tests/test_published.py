from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from baselines.published import FOLDER, PublishedError, all_published, load_published, published_rows


def test_every_table_of_the_report_is_there() -> None:
    report = load_published(FOLDER / "dense-inference-engine-q4-k-m.yaml")
    tables = {table.id: table for table in report.tables}
    assert len(tables) == len(report.tables)
    assert {"placement", "op-shared-memory", "op-whole-warp", "end-to-end", "surgeries"} <= tables.keys()
    assert tables["end-to-end"].rows[0] == ["decode, c=512", 24.11, 41.47, 23.19, 43.12, 24.94, 40.09, 25.14, 3.4]
    assert report.status == "claimed, not measured here"


def test_stated_speeds_fit_stated_times() -> None:
    """The report's own figures agree with each other, so no digit was lost on the way here."""
    for published in all_published():
        for table in published.tables:
            units = [column.unit for column in table.columns]
            for row in table.rows:
                for at, unit in enumerate(units[:-1]):
                    rate, time_ms = row[at], row[at + 1]
                    if unit == "tok_per_s" and units[at + 1] == "ms_per_token" and None not in (rate, time_ms):
                        assert 1000 / float(str(time_ms)) == pytest.approx(float(str(rate)), rel=0.002), table.id


def test_the_parts_of_a_step_add_up_to_its_rate() -> None:
    thread = load_published(FOLDER / "llama-cpp-issue-28196.yaml")
    for _, _, streaming_ms, rest_ms, rate, _ in thread.tables[0].rows:
        assert 1000 / (float(str(streaming_ms)) + float(str(rest_ms))) == pytest.approx(float(str(rate)), rel=0.001)


def test_every_other_source_has_an_address_and_every_speed_a_build() -> None:
    others = [published for published in all_published() if "llama.cpp 的" not in published.source.title]
    assert len(others) == 2
    for published in others:
        assert published.source.url
        assert published.source.url.startswith("https://github.com/")
    community = load_published(FOLDER / "qwen38-mtp.yaml").tables[0]
    assert all(str(row[3]).startswith("b10") for row in community.rows)


def test_bandwidths_fit_sizes_and_times() -> None:
    report = load_published(FOLDER / "dense-inference-engine-q4-k-m.yaml")
    for row in next(table for table in report.tables if table.id == "op-shared-memory").rows:
        _, size_mb, *pairs = (float(str(cell)) if at else 0.0 for at, cell in enumerate(row))
        for time_us, gb_per_s in zip(pairs[::2], pairs[1::2], strict=True):
            assert size_mb * 1e3 / time_us == pytest.approx(gb_per_s, rel=0.001)


def test_headlines_are_rows_with_a_source() -> None:
    rows = [row for row in published_rows() if row.headline]
    assert ("llama.cpp b8763", "decode, c=2048", 24.13) in {(row.engine, row.what, row.value) for row in rows}
    assert all(row.source and row.machine for row in rows)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"status": "measured"}, "status: Input should be 'claimed, not measured here'"),
        ({"tables": []}, "tables: List should have at least 1 item"),
        ({"extra": 1}, "extra: Extra inputs are not permitted"),
        ({"rows": [["a"]]}, "a row has 1 cells, expected 2"),
        ({"rows": [["a", "fast"]]}, "column speed: 'fast' does not fit its unit"),
        ({"headline": {"rate": "x"}}, "headline 'rate' is no column"),
    ],
)
def test_a_file_that_does_not_follow_the_schema_is_one_line(
    tmp_path: Path, change: dict[str, object], says: str
) -> None:
    table: dict[str, object] = {
        "id": "t",
        "title": "t",
        "section": "1",
        "columns": [{"name": "engine"}, {"name": "speed", "unit": "tok_per_s"}],
        "rows": [["a", 1.0]],
    }
    table |= {key: change.pop(key) for key in ("rows", "headline") if key in change}
    values = {
        "status": "claimed, not measured here",
        "source": {"title": "t", "publisher": None, "url": None, "language": "en"},
        "machine": "m",
        "model": "m",
        "setting": "s",
        "tables": [table],
    }
    path = tmp_path / "p.yaml"
    path.write_text(yaml.safe_dump(values | change))
    with pytest.raises(PublishedError, match=says) as caught:
        load_published(path)
    assert "\n" not in str(caught.value)


def test_no_yaml_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("a: [")
    with pytest.raises(PublishedError, match=r"p\.yaml: cannot be read") as caught:
        load_published(path)
    assert "\n" not in str(caught.value)
