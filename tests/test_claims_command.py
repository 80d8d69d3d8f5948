"""``moebench reproduce`` runs each arm once, writes rows, and its page in the docs is what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from moebench import claimfiles, result
from moebench.cli import main
from moebench.commands.reproduce import ReproduceOptions, reproduce
from moebench.report.claims import document, page

PAGE = Path(__file__).parents[1] / "docs" / "claims.md"
CHEAP = (  # sizes, statistics of routing, a cache replay, and a cell of two seconds
    "edge0_step_bytes", "edge0_expert_bytes", "ssd_llama_control_bytes", "ssd_llama_share_kimi", "ssd_llama_rans_bytes",
    "flashmoe_prompt_32", "flashmoe_lru_lfu", "specprefetch_expert", "specprefetch_off_tok_s",
    "specprefetch_load_share",
)  # fmt: skip


@pytest.fixture(autouse=True)
def hermetic(monkeypatch, tmp_path):
    monkeypatch.setenv("MOEBENCH_PLUGINS", "")
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def lines(text):
    """The cells of every line of the page that begins with a claim's name."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 6 and cells[0] in NAMES:
            found[cells[0]] = cells[1:]
    return found


NAMES = {claim.name: claim for paper in claimfiles.papers() for claim in paper.claims.values()}


def test_the_page_has_every_claim_with_its_published_value_and_verdict():
    told = lines(PAGE.read_text())
    assert set(told) == set(NAMES)
    for name, (says, published, ours, _, verdict) in told.items():
        claim = NAMES[name]
        assert says.replace("\\", "") == claim.says
        low = float(re.match(r"\+?(-?[0-9.]+)", published)[1])
        assert low == pytest.approx(claim.published[0], rel=0.006)
        assert published.endswith(claim.unit.replace("*", r"\*"))
        assert (ours == "-") == (verdict in ("not testable", "failed"))
        assert (verdict == "not testable") == (not claim.of)


def test_running_again_gives_the_numbers_of_the_page_and_one_row_for_each_cell(tmp_path, capsys):
    found = reproduce(ReproduceOptions(claims=CHEAP, out=str(tmp_path / "rows"), workers=1))
    again, told = lines(page(found)), lines(PAGE.read_text())
    assert set(again) == set(CHEAP)
    for name in CHEAP:
        assert again[name] == told[name], "docs/claims.md is not what 'make claims' writes"
    (file,) = (tmp_path / "rows").rglob("*.json")  # two claims are about one cell
    assert capsys.readouterr().err.count("wrote") == 1
    speed = {one["claim"]: one["ours"] for one in json.loads(document(found))["claims"]}["specprefetch_off_tok_s"]
    assert speed == result.load(file).metrics["decode_tok_s"].value


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["claims=nothing"], "unknown claim 'nothing'"),
        (["claims=edge0", "docs=page.md"], "it takes claims=all"),
        (["docs=page.md", "mode=auto"], "it takes mode=model"),
        (["workers=-1"], "workers must be at least 0"),
        (["mode=fast"], "model, auto, measure"),
        (["claims=specprefetch_off_tok_s", "mode=measure"], "mode=measure needs the machine itself"),
    ],
)
def test_wrong_use_is_one_line(words, said, capsys):
    assert main(["reproduce", *words]) == 2
    assert said in capsys.readouterr().err
