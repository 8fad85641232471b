"""The generated page: current, and with a line for every key."""

from pathlib import Path

from shoal.config.fields import walk_keys
from shoal.config.reference import reference_page
from shoal.config.schema import RunConfig, SftConfig

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_the_committed_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == reference_page(), "run: shoal config-reference > docs/configuration.md"


def test_every_key_has_one_sentence():
    for key in [*walk_keys(RunConfig), *walk_keys(SftConfig)]:
        description = key.info.description or ""
        assert description.endswith("."), key.dotted
        assert len(description) < 130, key.dotted


def test_every_key_is_on_the_page():
    page = reference_page()
    for key in walk_keys(RunConfig):
        if key.section is not None:
            assert f"# {key.dotted}" in page
        else:
            assert f"| `{key.path[-1]}`" in page
