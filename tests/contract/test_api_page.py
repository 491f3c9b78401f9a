"""The reference of the API is what the table of routes says, and every link in it leads somewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "benchmarks"))

import api_page as pages  # noqa: E402


def test_the_page_is_what_the_table_says() -> None:
    assert pages.PAGE.read_text() == pages.page(pages.told()), "scripts/api writes it"


def test_its_links_lead_to_its_headings() -> None:
    text = pages.PAGE.read_text()
    headings = {pages._anchor(line.lstrip("# ")) for line in text.splitlines() if line.startswith("#")}
    links = set(re.findall(r"\]\(#([^)]*)\)", text))
    assert links and links <= headings


def test_every_route_and_every_field_of_a_body_is_in_it() -> None:
    text = pages.PAGE.read_text()
    for route in pages.ROUTES:
        heading = f"### {route.method} {pages.path_of(route)}\n"
        assert heading in text
        section = text.split(heading)[1].split("\n### ")[0]
        fields = route.body.__struct_encode_fields__ if route.body is not None else ()
        assert all(f"| `{field}`" in section for field in fields), route.path
