"""The pages in docs/coming-from/ equal their tables, the tables name existing keys, and every key of a source has a
row.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shoal import coming_from as seeds
from shoal.coming_from import PAGES, page, unknown_keys
from shoal.config.preference import PREFERENCE_LOSSES
from shoal.surfaces.names import KeyTable
from shoal.surfaces.trl import DPO

ROOT = Path(__file__).parents[2]
SHARED = os.environ.get("SHOAL_SHARED")


@pytest.mark.parametrize("name", PAGES)
def test_committed_page_is_current(name: str):
    assert (ROOT / "docs" / "coming-from" / f"{name}.md").read_text(encoding="utf-8") == page(name), (
        "To update the pages: python -m shoal.coming_from docs/coming-from"
    )
    assert page(name).splitlines()[0] == f"# Coming from {PAGES[name][0]}"


def test_command_writes_the_pages(tmp_path: Path):
    command = [sys.executable, "-m", "shoal.coming_from", str(tmp_path)]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {f"{n}.md": page(n) for n in PAGES}


@pytest.mark.parametrize(
    "field", ["sync_ref_model", "off_policy_mask_threshold", "router_aux_loss_coef", "f_divergence_type"]
)
def test_unsupported_fields_are_marked(field: str):
    assert f"| `{field}` | not supported |" in page("trl")


# Fields of DPOConfig (TRL 1.16) that TrainingArguments lacks, and `reference_free` of earlier versions.
DPO_FIELDS = (
    "learning_rate model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout dataset_num_proc "
    "max_length truncation_mode padding_free pad_to_multiple_of precompute_ref_log_probs precompute_ref_batch_size "
    "loss_type loss_weights ld_alpha f_divergence_type f_alpha_divergence_coef label_smoothing beta use_weighting "
    "discopop_tau activation_offloading sync_ref_model ref_model_mixup_alpha ref_model_sync_steps pad_token "
    "reference_free"
)


def test_every_field_of_dpo_config_has_a_row():
    rows = {name: row for row in DPO.rows for name in row.theirs.split(", ")}
    assert [name for name in DPO_FIELDS.split() if name not in rows] == []
    for kind in PREFERENCE_LOSSES:
        assert f"`{kind.choice()}`" in rows["loss_type"].note


def test_every_key_exists():
    assert unknown_keys() == []


def test_row_has_text():
    """A row has a key, a text instead of a key, or the reason why there is no counterpart."""
    for table in (table for _, _, tables in PAGES.values() for table in tables):
        assert table.rows
        assert all(row.keys or row.note for row in table.rows), table.title
        names = [row.theirs for row in table.rows]
        assert len(names) == len(set(names)), table.title


def names_of(*tables: KeyTable) -> str:
    return "\n".join(row.theirs for table in tables for row in table.rows)


def without_links(text: str) -> str:
    return re.sub(r"\]\([^)]*\)", "]", text)


def shell_lines(text: str) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.shared
@pytest.mark.skipif(SHARED is None, reason="SHOAL_SHARED is not set")
@pytest.mark.parametrize(
    ("seed", "tables"),
    [
        ("surogate-grpo-quickstart.md", (seeds.QUICKSTART,)),
        ("grpo-trainer-guide.md", (seeds.TRAINER, seeds.ARGUMENTS)),
        ("cookbook-rl-loop.md", (seeds.RECIPE, seeds.FIELDS)),
    ],
)
def test_every_command_and_path_of_a_source_has_a_row(seed: str, tables: tuple[KeyTable, ...]):
    text = (Path(str(SHARED)) / "seeds" / seed).read_text(encoding="utf-8")
    names = names_of(*tables)
    for line in shell_lines(text):
        assert line in names, f"{seed}: {line}"
    paths = set(re.findall(r"(?<![\w(/.])(?:examples|training|skills)[/.][\w./]+\w/?", without_links(text)))
    for path in paths:
        assert path.rstrip("/.") in names, f"{seed}: {path}"
    for word in re.findall(r"^- `([a-z_]+)(?:=True)?` —", text, re.MULTILINE):
        assert word in names, f"{seed}: {word}"
