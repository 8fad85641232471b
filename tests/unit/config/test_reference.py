"""The generated page is up to date and has a line for every key."""

from pathlib import Path

from shoal.config.fields import walk_keys
from shoal.config.reference import reference_page, with_tables
from shoal.config.schema import DpoConfig, RunConfig, SftConfig

DOCS = Path(__file__).parents[3] / "docs"
PAGE, ALGORITHMS = DOCS / "configuration.md", DOCS / "algorithms.md"


def test_committed_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == reference_page(), "run: shoal config-reference > docs/configuration.md"


def test_every_key_has_one_sentence():
    for key in [*walk_keys(RunConfig), *walk_keys(SftConfig), *walk_keys(DpoConfig)]:
        description = key.info.description or ""
        assert description.endswith("."), key.dotted
        assert len(description) < 130, key.dotted


def test_every_key_is_on_the_page():
    page = reference_page()
    for key in walk_keys(RunConfig):
        if key.sections:
            assert f"# {key.dotted}" in page
        else:
            assert f"| `{key.path[-1]}`" in page


def test_tables_of_parameters_are_current():
    text = ALGORITHMS.read_text(encoding="utf-8")
    assert text.count("<!-- parameters of ") == 2
    assert with_tables(text) == text, "run: python -m shoal.config.reference docs/algorithms.md"
    assert with_tables(text.replace("| `sapo` | `tau_pos` |", "| `sapo` | `tau` |")) == text
